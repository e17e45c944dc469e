"""Processes that decode images: the same pixels, errors that name the image, and none that is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import lockstep
from lockstep.data import feeding
from lockstep.data.catalog import open_store
from lockstep.data.decoding import batch_decoder
from lockstep.data.decoding.decode_processes import BadImage, DecodeProcesses, find_decoders
from lockstep.data.images.view_options import View
from lockstep.errors import DataError

COUNT = 26
BOXES = torch.tensor([[1, 2, 17, 12], [0, 0, 20, 17]]).repeat(COUNT // 2, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("images")
    for number in range(COUNT + 4):
        place = folder / ("val" if number < 4 else "train") / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(random.integers(0, 256, (20, 17, 3), np.uint8))
        image.save(place / f"{number:02}.{'png' if number == 9 else 'jpg'}")
    return folder


@pytest.fixture
def three_processes(monkeypatch):
    monkeypatch.setattr(feeding, "_chosen", [feeding.Feeding(3)])
    monkeypatch.setattr(batch_decoder, "_MANY_THREADS", 2)
    monkeypatch.setattr(batch_decoder, "_FOR_PROCESSES", 4)


def read_all(folder, name="folder"):
    split = open_store(name, folder, {"size": 16}).train
    return split.in_memory().images, split.read_boxes(torch.arange(COUNT), BOXES)[0]


def test_the_pixels_are_those_of_threads_from_a_folder_and_its_pack(folder, tmp_path, request):
    alone = read_all(folder)
    lockstep.pack(folder, tmp_path / "pack")
    request.getfixturevalue("three_processes")
    for found in (read_all(folder), read_all(tmp_path / "pack", "pack")):
        assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def test_a_bad_image_is_named_and_the_others_can_still_be_read(folder, three_processes):
    split = open_store("folder", folder, {"size": 16}).train
    bad = folder / "train" / "class1" / "11.jpg"
    whole = bad.read_bytes()
    bad.write_bytes(whole[:-300])
    try:
        with pytest.raises(DataError, match=r"class1/11.jpg: unreadable image .*data check folder"):
            split.decode(torch.arange(COUNT))
    finally:
        bad.write_bytes(whole)
    assert split.decode(torch.arange(COUNT)).shape == (COUNT, 3, 16, 16)


def test_any_number_of_images_and_long_names(tmp_path):
    place = tmp_path / ("n" * 200) / ("m" * 200)
    place.mkdir(parents=True)
    Image.new("RGB", (5, 4), (200, 100, 50)).save(place / "x.png")
    decoders = DecodeProcesses(2)
    for count in (0, 1, 2, 700):
        found = decoders.decode([(str(place / "x.png"), 0, -1)] * count, None, View((3, 4, 5)))
        assert found.shape == (count, 3, 4, 5) and bool((found[:, 0] == 200).all())
    decoders.close()


def test_no_answer_of_a_batch_that_failed_is_taken_for_the_next(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"none")
    Image.new("RGB", (900, 900), (1, 2, 3)).save(tmp_path / "large.png")
    Image.new("RGB", (5, 4), (200, 100, 50)).save(tmp_path / "x.png")
    bad, large, good = ((str(tmp_path / f"{name}.png"), 0, -1) for name in ("bad", "large", "x"))
    decoders = DecodeProcesses(3)
    for _ in range(3):
        with pytest.raises(BadImage, match="not an image"):
            decoders.decode([bad, *[large] * 20], None, View((3, 4, 5)))
        found = decoders.decode([good] * 9, None, View((3, 4, 5)))
        assert bool((found[:, 2] == 50).all())
    decoders.close()


def test_no_file_stays_open(tmp_path):
    Image.new("RGB", (5, 4), (200, 100, 50)).save(tmp_path / "x.png")
    data, places = (tmp_path / "x.png").read_bytes(), []
    for number in range(300):
        (tmp_path / f"{number}.tar").write_bytes(b"before" + data)
        places.append((str(tmp_path / f"{number}.tar"), 6, len(data)))
    decoders = DecodeProcesses(1)
    found = decoders.decode(places, None, View((3, 4, 5)))
    (process,) = decoders._lines.values()
    assert len(list(Path("/proc", str(process.pid), "fd").iterdir())) < 20 and bool(
        (found[:, 1] == 100).all()
    )
    decoders.close()


def test_a_process_that_is_killed_is_an_error_and_not_a_wait(folder, three_processes):
    decoders = find_decoders(os.getpid(), 3)
    read_all(folder)
    next(iter(decoders._lines.values())).send_signal(signal.SIGKILL)
    try:
        with pytest.raises(DataError, match="a process that decodes images ended"):
            read_all(folder)
    finally:
        find_decoders.cache_clear()


def test_no_process_is_left_if_the_one_that_asked_is_killed():
    script = (
        "import time; from lockstep.data.decoding.decode_processes import DecodeProcesses\n"
        "found = DecodeProcesses(2)\n"
        "print(*(p.pid for p in found._lines.values()), flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    end = time.monotonic() + 20
    while any(Path("/proc", str(pid)).exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.1)
    assert not any(Path("/proc", str(pid)).exists() for pid in pids)
