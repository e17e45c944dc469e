"""`lockstep data show`: the images that training would see, drawn, and nothing overwritten."""

import pytest
from photos import take_photos
from PIL import Image

from lockstep.cli.main import run
from lockstep.report import image_sheet


@pytest.fixture
def words(tmp_path):
    photos = take_photos(tmp_path / "photos", train=8, val=1)
    keys = ("data.name=folder", f"data.dir={photos}", "data.size=16", "train.batch=8", "train.lanes=4")
    return ["data", "show", "shapes", *(word for key in keys for word in ("-o", key))]


def test_a_sheet_of_mixed_photographs(words, tmp_path, capsys, monkeypatch):
    drawn = []
    draw = image_sheet.draw_sheet

    def watch(images, texts, path):
        drawn.append((images, texts))
        draw(images, texts, path)

    monkeypatch.setattr(image_sheet, "draw_sheet", watch)
    sheet = tmp_path / "sheet.png"
    more = ["-o", "data.augment=random_resized_crop,flip,color_jitter,mixup", "--images", "11"]
    assert run([*words, *more, "--output", str(sheet)]) == 0
    assert capsys.readouterr().out == f"11 images of folder, epoch 0: {sheet}\n"
    (images, texts), *rest = drawn
    assert not rest and images.shape == (11, 16, 16, 3) and len(texts) == 11
    assert all(" + " in text for text in texts)
    with Image.open(sheet) as picture:
        assert picture.width > 400


def test_pixels_are_those_of_the_file_without_augmentation(words, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(image_sheet, "draw_sheet", lambda images, texts, path: drawn.append((images, texts)))
    assert run([*words, "--images", "24", "--output", str(tmp_path / "sheet.png")]) == 0
    images, texts = drawn[0]
    for image, text in zip(images, texts, strict=True):  # a class a colour
        assert ("red", "green", "blue")[image.mean((0, 1)).argmax()] == text


def test_repeated_images_at_the_size_of_their_epoch(words, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(image_sheet, "draw_sheet", lambda images, texts, path: drawn.append((images, texts)))
    keys = ("data.sizes=8@0,12@1", "data.repeats=4", "data.augment=random_resized_crop")
    more = [word for key in keys for word in ("-o", key)]
    assert run([*words, *more, "--images", "4", "--epoch", "1", "--output", str(tmp_path / "sheet.png")]) == 0
    images, texts = drawn[0]
    assert images.shape == (4, 12, 12, 3) and len(set(texts)) == 1
    assert len({image.tobytes() for image in images}) == 4


def test_bad_input(words, tmp_path, capsys):
    there = tmp_path / "there.png"
    there.write_bytes(b"mine")
    assert run([*words, "--output", str(there)]) == 2
    assert "there is such a file" in capsys.readouterr().err and there.read_bytes() == b"mine"
    assert run([*words, "--output", str(tmp_path / "no" / "sheet.png")]) == 2
    assert run([*words, "--images", "0"]) == 2
