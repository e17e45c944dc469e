"""JPEGs decoded by a GPU: refused where there is none; there, near a CPU's pixels whatever the batch."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data.catalog import open_store
from lockstep.data.decoding.decode import fit_image
from lockstep.errors import DataError

BOX = 5, 8, 100, 90


def make_jpeg(seed, size=(160, 120), mode="RGB", **options):
    """A smooth picture, encoded."""
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    stream = io.BytesIO()
    image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).convert(mode)
    image.save(stream, "JPEG", quality=90, **options)
    return stream.getvalue()


@pytest.fixture
def folder(tmp_path):
    for number in range(12):
        place = tmp_path / ("train" if number % 3 else "val") / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        mode, kind = ("L" if number == 5 else "RGB"), {"progressive": number == 7}
        (place / f"{number}.jpg").write_bytes(make_jpeg(number, mode=mode, **kind))
    Image.new("RGB", (40, 40), (9, 8, 7)).save(tmp_path / "train" / "class1" / "z.png")
    return tmp_path


def test_a_decoder_that_does_not_exist_is_refused_with_those_that_do(folder):
    with pytest.raises(DataError, match=r"data.decoder: unknown decoder 'gpu'.*cpu, nvjpeg"):
        open_store("folder", folder, {"decoder": "gpu"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_is_refused_in_one_line(folder):
    with pytest.raises(DataError, match=r"data.decoder=nvjpeg needs an NVIDIA GPU.*set data.decoder=cpu"):
        open_store("folder", folder, {"decoder": "nvjpeg"})


@pytest.mark.gpu
def test_pixels_are_near_those_of_a_cpu_and_do_not_depend_on_the_batch(folder):
    by_gpu = open_store("folder", folder, {"decoder": "nvjpeg", "size": 64})
    by_cpu = open_store("folder", folder, {"size": 64})
    assert by_gpu.manifest["decoder"] != by_cpu.manifest["decoder"]
    assert "nvjpeg" in by_gpu.manifest["decoder"]
    ids = torch.arange(len(by_gpu.train))
    boxes = torch.tensor([BOX]).expand(len(ids), 4).clone()
    boxes[by_gpu.train.sizes(ids)[:, 0] == 40] = torch.tensor([1, 2, 30, 35])
    for gpu, cpu, alone in (
        (by_gpu.train.decode(ids), by_cpu.train.decode(ids), [by_gpu.train.decode(i) for i in ids[:, None]]),
        (
            by_gpu.train.read_boxes(ids, boxes)[0],
            by_cpu.train.read_boxes(ids, boxes)[0],
            [by_gpu.train.read_boxes(i, boxes[i])[0] for i in ids[:, None]],
        ),
    ):
        assert (gpu.float() - cpu.float()).abs().mean((1, 2, 3)).max() < 4
        assert torch.equal(gpu, torch.cat(alone))


@pytest.mark.gpu
def test_what_it_is_not_made_for_is_decoded_on_the_host():
    from lockstep.data.decoding.nvjpeg import find_nvjpeg

    gpu = find_nvjpeg()
    exif = Image.Exif()
    exif[0x0112] = 6
    assert gpu.parse(make_jpeg(0)) is not None
    assert gpu.parse(make_jpeg(0, mode="L")) is not None
    assert gpu.parse(make_jpeg(0, progressive=True)) is None
    assert gpu.parse(make_jpeg(0, mode="CMYK")) is None
    assert gpu.parse(make_jpeg(0, exif=exif)) is None
    assert gpu.parse(make_jpeg(0)[:-40]) is None
    assert gpu.parse(b"") is None


@pytest.mark.gpu
def test_grey_images_and_large_batches():
    from lockstep.data.decoding.nvjpeg import find_nvjpeg

    gpu = find_nvjpeg()
    files = [make_jpeg(seed, size=(50 + seed, 90)) for seed in range(200)]
    coded = [gpu.parse(file) for file in files]
    out = torch.empty((200, 1, 32, 24), dtype=torch.uint8)
    gpu.decode(coded, [None] * 200, out, 1.0)
    for number in (0, 77, 199):
        own, alone = np.empty((1, 32, 24), np.uint8), torch.empty((1, 1, 32, 24), dtype=torch.uint8)
        fit_image(files[number], own)
        gpu.decode(coded[number : number + 1], [None], alone, 1.0)
        assert torch.equal(alone[0], out[number])
        assert abs(out[number].float() - torch.from_numpy(own).float()).mean() < 4
