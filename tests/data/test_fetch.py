"""Fetching over a real server on this machine: whole, resumed, broken, wrong, never over a user's file."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lockstep.data.catalog import data_names, published_as
from lockstep.data.fetch import Archive, Published, fetch
from lockstep.errors import DataError, FetchError

BODY = bytes(i * 7 % 256 for i in range(300_000))


@dataclass
class Site:
    """A small web site whose faults the tests set."""

    files: dict[str, bytes]
    ranges: bool = True  # whether it honours Range
    break_after: int | None = None  # bytes of a body after which the connection is cut, once
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""


def handler(site: Site) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            site.asked.append((self.path, wanted))
            body = site.files.get(self.path.lstrip("/"))
            if body is None:
                return self.send_error(404)
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and site.ranges else 0
            if start >= len(body):
                return self.send_error(416)
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            end, site.break_after = site.break_after, None
            self.wfile.write(body[start:end])
            return None

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site({"one.gz": BODY})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler(made)) as server:
        made.url = f"http://127.0.0.1:{server.server_port}/"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield made
        server.shutdown()
        thread.join()


def table(content: bytes = BODY, name: str = "one.gz", members: tuple[str, ...] = ()) -> Published:
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    return Published("http://127.0.0.1:9/", (Archive(name, md5, members),))


def test_whole_file_and_progress(site: Site, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    fetch(table(), tmp_path / "new", site.url, lambda *event: seen.append(event))
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["one.gz"]
    assert (tmp_path / "new" / "one.gz").read_bytes() == BODY
    assert seen[-1] == ("one.gz", len(BODY), len(BODY)) and len(seen) > 1


def test_right_file_is_kept_and_wrong_one_left_alone(site: Site, tmp_path: Path) -> None:
    (tmp_path / "one.gz").write_bytes(BODY)
    fetch(table(), tmp_path, site.url)
    assert site.asked == []
    (tmp_path / "one.gz").write_bytes(b"the user's own")
    with pytest.raises(DataError, match=f"{tmp_path}/one.gz: is there with MD5 .* move it away"):
        fetch(table(), tmp_path, site.url)
    assert (tmp_path / "one.gz").read_bytes() == b"the user's own"


@pytest.mark.parametrize("ranges", [True, False])
def test_broken_connection_then_resume(site: Site, tmp_path: Path, ranges: bool) -> None:
    site.break_after, site.ranges = 123_456, ranges
    with pytest.raises(FetchError, match=r"broke after 123456 of 300000 bytes.*--mirror"):
        fetch(table(), tmp_path, site.url)
    assert (tmp_path / "one.gz.part").read_bytes() == BODY[:123_456]
    fetch(table(), tmp_path, site.url)
    assert (tmp_path / "one.gz").read_bytes() == BODY
    assert site.asked == [("/one.gz", None), ("/one.gz", "bytes=123456-")]
    assert not (tmp_path / "one.gz.part").exists()


def test_part_that_is_whole_or_too_long(site: Site, tmp_path: Path) -> None:
    (tmp_path / "one.gz.part").write_bytes(BODY)
    fetch(table(), tmp_path, site.url)
    assert site.asked == [] and (tmp_path / "one.gz").read_bytes() == BODY
    (tmp_path / "one.gz").rename(tmp_path / "one.gz.part")
    with (tmp_path / "one.gz.part").open("ab") as part:
        part.write(b"more")
    fetch(table(), tmp_path, site.url)
    assert (tmp_path / "one.gz").read_bytes() == BODY


def test_wrong_sum_names_both_and_removes_the_part(site: Site, tmp_path: Path) -> None:
    site.files["one.gz"] = b"something else"
    found = hashlib.md5(b"something else", usedforsecurity=False).hexdigest()
    wanted = table().archives[0].md5
    with pytest.raises(FetchError, match=f"MD5 is {found}, expected {wanted}"):
        fetch(table(), tmp_path, site.url)
    assert list(tmp_path.iterdir()) == []


def test_network_errors_name_the_url_and_the_fix(site: Site, tmp_path: Path) -> None:
    with pytest.raises(FetchError, match=f"{site.url}two.gz: HTTP 404 Not Found.*--mirror"):
        fetch(table(name="two.gz"), tmp_path, site.url)
    with pytest.raises(FetchError, match=r"http://127.0.0.1:9/one.gz: .*--mirror"):
        fetch(table(), tmp_path / "new", None)
    assert not (tmp_path / "new").exists(), "an empty folder would look like broken data"
    with pytest.raises(DataError, match=r"--mirror ftp://x: must begin with http"):
        fetch(table(), tmp_path, "ftp://x")
    with pytest.raises(DataError, match=r"unknown data set to fetch 'minst': did you mean 'mnist'"):
        published_as("minst")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file: cannot be written"):
        fetch(table(), tmp_path / "file", site.url)


def test_file_mirror(tmp_path: Path) -> None:
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "one.gz").write_bytes(BODY)
    mirror = (tmp_path / "mirror").as_uri()
    (tmp_path / "one.gz.part").write_bytes(b"started from elsewhere")
    fetch(table(), tmp_path, mirror)
    assert (tmp_path / "one.gz").read_bytes() == BODY
    with pytest.raises(FetchError, match=r"two.gz: .*No such file"):
        fetch(table(name="two.gz"), tmp_path, mirror)


def tar_of(files: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("set/link.bin")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return packed.getvalue()


def test_only_expected_members_are_extracted(site: Site, tmp_path: Path) -> None:
    packed = tar_of({"set/a.bin": b"aaa", "../evil": b"x", "/tmp/evil-lockstep": b"x", "set/b.bin": b"bbb"})
    site.files["set.tar.gz"] = packed
    published = table(packed, "set.tar.gz", ("set/a.bin", "set/b.bin"))
    target = tmp_path / "in"
    fetch(published, target, site.url)
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert found == ["in/set.tar.gz", "in/set/a.bin", "in/set/b.bin"]
    assert not Path("/tmp/evil-lockstep").exists()
    fetch(published, target, site.url)
    assert len(site.asked) == 1
    (target / "set" / "a.bin").write_bytes(b"mine")
    with pytest.raises(DataError, match=r"a.bin: differs .* move it away"):
        fetch(published, target, site.url)
    assert (target / "set" / "a.bin").read_bytes() == b"mine"
    with pytest.raises(DataError, match=r"set.tar.gz: holds no set/c.bin, set/link.bin"):
        fetch(table(packed, "set.tar.gz", ("set/c.bin", "set/link.bin")), target, site.url)


def test_published_table_is_whole() -> None:
    for published in map(published_as, data_names(fetchable=True)):
        assert published.base.startswith("https://") and published.base.endswith("/")
        assert all(len(archive.md5) == 32 and int(archive.md5, 16) for archive in published.archives)
