"""A pack whose process is killed at random moments, again and again, comes out as if nothing had happened."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Forked, call
from photos import take_photos
from small import command

from lockstep.data.images.folder import FolderOptions
from lockstep.data.pack.from_folder import pack_folder
from lockstep.data.pack.pack_set import PackOptions, check_pack
from lockstep.data.pack.shard_file import ShardFile
from lockstep.data.pack.write_pack import PackPlan, write_pack

KILLS = 8


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))}


def pack_command(folder: Path, dest: Path) -> list[str]:
    return command("data", "pack", str(folder), str(dest), "--shard-mb", "0.02", "--threads", "2")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return take_photos(tmp_path_factory.mktemp("photos"), train=250, val=30)


@pytest.fixture(scope="module")
def whole(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A pack that was left alone."""
    dest = tmp_path_factory.mktemp("whole") / "pack"
    assert call(pack_command(photos, dest)).returncode == 0
    return tree(dest)


def test_killed_at_random_moments(photos: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    dest, part = tmp_path / "pack", tmp_path / "pack.part"
    moments, kept = random.Random(0), []
    for kill in range(KILLS):
        with Forked(pack_command(photos, dest)) as process:
            journal = part / "unfinished" / "journal.jsonl"
            before = journal.stat().st_size if journal.exists() else 0
            while process.poll() is None and not (journal.exists() and journal.stat().st_size > before):
                time.sleep(0.001)  # until it has done something
            time.sleep(moments.uniform(0.0, 0.05))
            process.kill()
            process.wait()
        if dest.exists():
            break
        kept.append(len(list(part.glob("*.tar"))))
        if kill == 3:  # as if the last write had been torn
            with journal.open("ab") as stream:
                stream.write(b'{"split": "tra')
    assert len(kept) > 2 and kept == sorted(kept)
    if not dest.exists():
        assert call(pack_command(photos, dest)).returncode == 0
    assert tree(dest) == whole and not part.exists()
    assert check_pack(PackOptions(), dest, lambda done, total: None) == []


def test_interrupted_by_the_keyboard(photos: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    for turn in range(20):  # on a busy machine it may be done before the signal comes
        dest, part = tmp_path / f"{turn}" / "pack", tmp_path / f"{turn}" / "pack.part"
        dest.parent.mkdir()
        with Forked(pack_command(photos, dest)) as process:
            while process.poll() is None and not part.exists():
                time.sleep(0.001)
            while process.poll() is None:  # it stands still while we look
                process.send_signal(signal.SIGSTOP)
                if list(part.glob("*.tar")):
                    break
                process.send_signal(signal.SIGCONT)
                time.sleep(0.001)
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGCONT)
            done = process.finish()
        if done.returncode:
            break
    assert done.returncode == 130 and not dest.exists() and not list(part.glob("*.tmp"))
    assert "pack.part keeps the shards that are whole" in done.stderr
    assert call(pack_command(photos, dest)).returncode == 0
    assert tree(dest) == whole


def test_killed_when_all_but_the_name_is_done(photos: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    dest, part = tmp_path / "pack", tmp_path / "pack.part"
    assert call(pack_command(photos, dest)).returncode == 0
    dest.rename(part)
    (part / "unfinished").mkdir()
    (part / "unfinished" / "train-000003.tar.index.npy").write_bytes(b"")  # not all of it was removed
    other = call([*pack_command(photos, dest), "--size", "8"])
    assert other.returncode == 2 and "was begun with form=" in other.stderr
    assert call(pack_command(photos, dest)).returncode == 0
    assert tree(dest) == whole


def test_stopped_at_every_single_step_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sync, rename and removal is once the last thing that happens."""
    source = pack_folder(FolderOptions(), take_photos(tmp_path / "photos", train=3, val=1))
    plan = PackPlan(shard_mb=0.02)
    write_pack(source, tmp_path / "whole", plan)
    whole, steps = tree(tmp_path / "whole"), 0

    class Killed(BaseException):
        pass

    def stopping(work: Callable[..., object]) -> Callable[..., object]:
        def step(*arguments: object, **options: object) -> object:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return work(*arguments, **options)

        return step

    for last in range(1000):
        dest, left = tmp_path / f"pack{last}", last
        with monkeypatch.context() as patched:
            for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "rename"), (shutil, "rmtree")):
                patched.setattr(owner, name, stopping(getattr(owner, name)))
            patched.setattr(ShardFile, "abandon", lambda shard: shard._stream.close())  # its file stays
            try:
                write_pack(source, dest, plan)
            except Killed:
                steps += 1
        if not dest.exists():
            assert write_pack(source, dest, plan).is_done
        assert tree(dest) == whole and not dest.with_name(f"{dest.name}.part").exists()
        if left >= 0:
            break
    assert steps > 20
