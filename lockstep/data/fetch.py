"""How published data sets are downloaded, resumed and checked; each data set's own file has its addresses.

It is not part of the data pipeline: it only puts files into a folder, where a store reads them later.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import shutil
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lockstep.errors import DataError, FetchError

Progress = Callable[[str, int, int], None]  # (file, bytes done, total bytes or 0 if unknown)

_CHUNK_BYTES = 1 << 18
_TIMEOUT_S = 30.0
_SCHEMES = ("http://", "https://", "file://")


@dataclass(frozen=True)
class Archive:
    """A published file, its MD5 sum, and the members to extract if it is a tar file."""

    name: str
    md5: str
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Published:
    """The base URL of a published data set, and its files."""

    base: str
    archives: tuple[Archive, ...]


def fetch(
    published: Published, dir: Path, mirror: str | None = None, on_progress: Progress | None = None
) -> None:
    """Download a published data set into `dir`; files that are there with the right sum are kept."""
    base = mirror if mirror is not None else published.base
    if not base.startswith(_SCHEMES):
        raise DataError(f"--mirror {base}: must begin with http://, https:// or file://")
    try:
        ours = not dir.exists()
        dir.mkdir(parents=True, exist_ok=True)
        for archive in published.archives:
            url = f"{base.rstrip('/')}/{archive.name}"
            _fetch_archive(archive, dir / archive.name, url, on_progress or _ignore)
            if archive.members:
                _extract(archive, dir)
    except (DataError, FetchError):
        if ours and not any(dir.iterdir()):  # an empty folder would look like broken data
            dir.rmdir()
        raise
    except OSError as error:
        raise DataError(
            f"--dir {dir}: cannot be written ({error.strerror or error}): name a folder that can be written"
        ) from error


def _ignore(_file: str, _done: int, _total: int) -> None:
    pass


def _fetch_archive(archive: Archive, target: Path, url: str, on_progress: Progress) -> None:
    """Download to a `.part` file, and rename it to the target once its sum is right."""
    if target.exists():
        found = _md5(target)
        if found != archive.md5:
            raise DataError(
                f"{target}: is there with MD5 {found}, the published one is {archive.md5}: "
                "it is left as it is; move it away to fetch it"
            )
        on_progress(archive.name, target.stat().st_size, target.stat().st_size)
        return
    part = target.with_name(f"{target.name}.part")
    if not (part.exists() and _md5(part) == archive.md5):
        _download(url, part, lambda done, total: on_progress(archive.name, done, total))
    found = _md5(part)
    if found != archive.md5:
        part.unlink()
        raise FetchError(
            f"{url}: MD5 is {found}, expected {archive.md5}: the download is removed; "
            "run again, or name another source with --mirror"
        )
    part.replace(target)


def _download(url: str, part: Path, on_progress: Callable[[int, int], None]) -> None:
    """Download `url` to `part`; resume after the bytes already there, if the server supports it."""
    start = part.stat().st_size if part.exists() else 0
    with _open(url, start) as response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:  # file:// has no status
            start = 0
        length = int(response.headers.get("Content-Length") or 0)
        total = start + length if length else 0
        done = start
        with part.open("r+b" if start else "wb") as out:
            out.seek(start)
            for chunk in _chunks(url, response):
                out.write(chunk)
                done += len(chunk)
                on_progress(done, total)
    if done < total:
        raise _network_error(url, f"the connection broke after {done} of {total} bytes, which are kept")


def _open(url: str, start: int) -> Any:
    """Request the file from byte `start` on, or the whole file if `start` is past its end."""
    headers = {"User-Agent": "lockstep", **({"Range": f"bytes={start}-"} if start else {})}
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            return _open(url, 0)
        raise _network_error(url, f"HTTP {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _network_error(url, str(getattr(error, "reason", error))) from error


def _chunks(url: str, response: IO[bytes]) -> Iterator[bytes]:
    while True:
        try:
            chunk = response.read(_CHUNK_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise _network_error(url, f"the connection broke: {error}; what came is kept") from error
        if not chunk:
            return
        yield chunk


def _network_error(url: str, reason: str) -> FetchError:
    text = reason.replace("\n", " ")
    return FetchError(f"{url}: {text}: run again to go on, or name another source with --mirror")


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)  # the publishers list MD5; it finds damage, not attacks
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _extract(archive: Archive, dir: Path) -> None:
    """Extract only the expected members, so that no path in the archive can point outside `dir`."""
    missing = set(archive.members)
    try:
        with tarfile.open(dir / archive.name) as tar:
            for member in tar:
                if member.name in missing and member.isreg():
                    missing.remove(member.name)
                    _extract_member(tar, member, dir / member.name)
    except (tarfile.TarError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{dir / archive.name}: not a tar file ({error}): remove it and run again") from error
    if missing:
        raise DataError(f"{dir / archive.name}: holds no {', '.join(sorted(missing))}: use another --mirror")


def _extract_member(tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    """Extract to a `.part` file and rename it to the target; an existing target must have equal content."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    source = tar.extractfile(member)
    assert source is not None, "a regular member has content"
    with source, part.open("wb") as out:
        shutil.copyfileobj(source, out)
    if not target.exists():
        part.replace(target)
        return
    equal = _md5(part) == _md5(target)
    part.unlink()
    if not equal:
        raise DataError(
            f"{target}: differs from the one in its archive: it is left as it is; move it away to extract it"
        )
