"""Processes that decode a whole split: the same pixels, and errors that say what happened."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data import feeding
from lockstep.data.catalog import open_store
from lockstep.data.images import encoded_split
from lockstep.data.images.fill_processes import fill_in_processes, shared_empty
from lockstep.errors import DataError


@pytest.fixture
def folder(tmp_path):
    random = np.random.default_rng(0)
    for number in range(24):
        place = tmp_path / ("val" if number < 4 else "train") / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (20, 17, 3), np.uint8)).save(place / f"{number:02}.jpg")
    return tmp_path


@pytest.fixture
def three_processes(monkeypatch):
    monkeypatch.setattr(feeding, "_chosen", [feeding.Feeding(3)])
    monkeypatch.setattr(encoded_split, "_FOR_A_PROCESS", 4)


def test_the_pixels_are_those_of_threads(folder, three_processes):
    whole = open_store("folder", folder, {"size": 16}).train.in_memory()
    assert torch.equal(
        whole.images, open_store("folder", folder, {"size": 16}).train.decode(torch.arange(20))
    )


def test_a_bad_image_is_named(folder, three_processes):
    bad = folder / "train" / "class1" / "11.jpg"
    bad.write_bytes(bad.read_bytes()[:-300])
    with pytest.raises(DataError, match=r"class1/11.jpg: unreadable image .*data check folder"):
        open_store("folder", folder, {"size": 16}).train.in_memory()


def test_a_process_that_is_killed_is_an_error():
    with pytest.raises(DataError, match="a process that decodes images ended: SIGKILL"):
        fill_in_processes(lambda _: os.kill(os.getpid(), signal.SIGKILL), range(2), 2)


def test_all_items_are_filled_whatever_their_number():
    for count in (1, 2, 5):
        memory = shared_empty((7, 3))
        place = memory.numpy()
        fill_in_processes(lambda item, place=place: place[item].fill(item + 1), range(7), count)
        assert memory[:, 0].tolist() == list(range(1, 8))


def test_no_process_is_left_if_the_one_that_asked_is_killed(tmp_path):
    script = f"""
import time
from pathlib import Path
from lockstep.data.images.fill_processes import fill_in_processes
def fill(item):
    Path({str(tmp_path)!r}, f"{{item % 2}}-{{item}}").touch()
    time.sleep(0.001)
fill_in_processes(fill, range(1_000_000), 2)
"""
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        while not (any(tmp_path.glob("0-*")) and any(tmp_path.glob("1-*"))):
            time.sleep(0.05)
        process.kill()
    time.sleep(1.5)
    before = len(list(tmp_path.iterdir()))
    time.sleep(0.5)
    assert len(list(tmp_path.iterdir())) == before
