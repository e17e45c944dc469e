"""`lockstep bench tune`, as far as it goes without a GPU."""

from dataclasses import replace

import pytest
import torch
from forked import call
from small import command

from lockstep.cli.bench import to_toml
from lockstep.kernels.triton.conv.fused_layer import Layer
from lockstep.kernels.triton.conv.tile import Tile
from lockstep.kernels.triton.conv.tile_table import OPERATIONS, Table, find_table, tile_key
from lockstep.kernels.triton.conv.tma_box import takes_boxes
from lockstep.measure.tune import candidates
from lockstep.spec import Train

LAYERS = [
    Layer(48, 48, 1, 32, (3, 3), (1, 1), pool=2),
    Layer(1, 1, 4608, 256),
    Layer(1, 1, 256, 7, relu=False),
]
PLAIN = Layer(32, 32, 64, 192, (3, 3), (1, 1), relu=False, bias=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path):
    path = tmp_path / "tiles.toml"
    done = call(command("bench", "tune", "emotion", "--output", str(path)))
    assert (done.returncode, path.exists()) == (2, False)
    assert "no GPU here" in done.stderr and done.stderr.count("\n") == 1


def test_nothing_is_overwritten(tmp_path):
    path = tmp_path / "tiles.toml"
    path.write_text("mine")
    done = call(command("bench", "tune", "emotion", "--output", str(path)))
    assert done.returncode == 2 and "nothing is overwritten" in done.stderr and path.read_text() == "mine"


@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
def test_candidates_are_powers_of_two_that_fit(precision):
    every = list(candidates(LAYERS, Train(batch=1024, lanes=8, precision=precision)))
    assert len(set(every)) == len(every) > 100
    assert {(c.operation, c.layer) for c in every} == {
        (name, i) for name in OPERATIONS for i in range(3) if i or name != "input_grad"
    }
    for tile in (c.tile for c in every):
        assert all(n & (n - 1) == 0 for n in (tile.rows, tile.cols, tile.depth, tile.parts))


def test_convolutions_alone_in_bf16_are_tried_with_boxes_that_suit_them():
    train, layers = Train(batch=1024, lanes=8, precision="bf16"), [LAYERS[0], PLAIN]
    tried = [c for c in candidates(layers, train) if c.layer == 1]
    assert {c.operation for c in tried} == set(OPERATIONS) and len(tried) > 20
    for each in tried:
        assert each.tile.boxes and takes_boxes(each.operation, PLAIN, each.tile, 128, each.tile.parts // 8)
    assert not any(c.tile.boxes for c in candidates(layers, replace(train, precision="tf32")))


@pytest.mark.parametrize("boxes", [True, False])
def test_a_table_is_written_and_read_back(tmp_path, boxes):
    path, tile = tmp_path / "tiles.toml", Tile(64, 32, 16, 8, 2, 4, boxes=boxes)
    path.write_text(to_toml({tile_key("forward", LAYERS[0], "bf16"): tile}, "a GPU"))
    found = find_table(torch.device("cpu"), path)
    assert found.tiles(LAYERS[0], "bf16")["forward"] == tile
    assert found.tiles(LAYERS[0], "tf32") == Table().tiles(LAYERS[0], "tf32")
    assert found.digest(LAYERS, "bf16") != Table().digest(LAYERS, "bf16")


def test_it_shows_which_convolutions_take_all_lanes_at_once():
    keys = ("model.name=resnet18", "train.batch=4", "train.lanes=2", "data.num_train=16", "data.num_test=4")
    keys = (*keys, "data.size=8")  # kernels of ours run in the interpreter
    done = call(command("bench", "lanes", "shapes", *(part for key in keys for part in ("-o", key))))
    head, *rows, last = done.stdout.splitlines()
    assert done.returncode == 0 and head.split() == ["convolution", "forward", "data", "gradient"]
    assert len(rows) == 20 and all("at once" in row or "lane by lane" in row for row in rows)
    assert last.startswith("on c") and "2 lanes of 2" in last
