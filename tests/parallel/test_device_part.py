"""Parts of a fused or compiled network, one after another in one process: the bits of the whole network."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from images import DEVICE
from tiny_resnet import TinyResNet
from torch import Tensor, nn

from lockstep.comm.group import Group
from lockstep.comm.mesh import Mesh
from lockstep.comm.tree import LaneTree
from lockstep.data.loader import Lanes
from lockstep.errors import ModelError
from lockstep.kernels.global_average import GlobalAverage
from lockstep.kernels.numerics import plain_torch, prepare_device
from lockstep.kernels.triton.conv.tile import Tile
from lockstep.kernels.triton.conv.tile_table import OPERATIONS, Table, tile_key
from lockstep.lower.compiled.compiled_program import find_compiled, prove_lanes
from lockstep.lower.device_lanes import DeviceLanes, make_keys, read_output
from lockstep.lower.fused.chain_program import find_chain
from lockstep.lower.fused.residual_program import find_residual
from lockstep.lower.lane_by_lane import LaneByLane
from lockstep.lower.program import DeviceLowering, PartNetwork, Program, fill_weights
from lockstep.models.block import BlockModel
from lockstep.models.googlenet import GoogLeNet, Inception
from lockstep.models.resnet import BasicBlock
from lockstep.models.tensors import has_values
from lockstep.parallel.device_pipeline import DevicePipeline, cut_program
from lockstep.parallel.pipeline import keep_part
from lockstep.parallel.pipelined_device import PipelinedDevice
from lockstep.parallel.schedule import Position
from lockstep.parallel.shard.device_part import DevicePart, PartTables
from lockstep.parallel.shard.gathered_model import GatheredModel
from lockstep.parallel.stage_link import StageLink
from lockstep.spec import Train
from lockstep.spec.plan import Plan

BOX = Tile(16, 16, 16, warps=1, stages=1, parts=2, boxes=True)
LANES = 2


@pytest.fixture(autouse=True)
def as_training() -> Iterator[None]:
    with plain_torch():
        prepare_device("auto", 1)
        yield


def chain() -> nn.Module:
    """Pooling and padding at cuts, before a convolution and before a fully connected layer; dropout."""
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 3, padding=1)]
    layers += [nn.ReLU(), nn.Conv2d(5, 4, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 8)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 10))


def residual() -> nn.Module:
    """Blocks with an identity and with a projection and a stride."""
    return TinyResNet(BasicBlock(8, 8, 1), BasicBlock(8, 16, 2), channels=16, colours=1)


def branches() -> nn.Module:
    """Convolutions one by one and in branches, batch norm, pooling, dropout."""
    layers = [nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
    layers += [Inception((8, 4, 4, 4, 2, 4, 4)), nn.MaxPool2d(2), GlobalAverage(), nn.Dropout(0.4)]
    return nn.Sequential(*layers, nn.Linear(16, 10))


class Heads(GoogLeNet):
    """Two heads on small blocks."""

    def __init__(self) -> None:
        stem = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
        blocks = {"stem": stem, "pool": nn.MaxPool2d(2), "middle": nn.Conv2d(4, 4, 1)}
        BlockModel.__init__(self, {**blocks, "classifier": nn.Sequential(GlobalAverage(), nn.Linear(4, 10))})
        sizes = {"stem": 6, "middle": 3}
        self.aux = nn.ModuleDict(
            {name: nn.Sequential(nn.Flatten(), nn.Linear(4 * side**2, 10)) for name, side in sizes.items()}
        )


def wide() -> nn.Module:
    """Blocks that boxes fit."""
    return TinyResNet(BasicBlock(8, 16, 1), BasicBlock(16, 16, 1), channels=16, colours=1)


MODELS = {"chain": chain, "residual": residual, "boxes": wide, "compiled": branches, "heads": Heads}


def make(kind: str) -> tuple[nn.Module, DeviceLowering, Lanes]:
    torch.manual_seed(0)
    size, side, model = 2, {"chain": 7, "boxes": 4}.get(kind, 8), MODELS[kind]().to(DEVICE)
    image, train = (1, side, side), Train(batch=size * LANES, lanes=LANES, label_smoothing=0.1)
    program: Program | None = find_chain(model, image) or find_residual(model, image)
    if kind in ("compiled", "heads"):
        program = prove_lanes(find_compiled(model, image, train), train, torch.device(DEVICE))
    assert program
    boxes = {
        tile_key(name, layer, "fp32"): BOX
        for layer in program.layers
        for name in OPERATIONS
        if kind == "boxes"
    }
    lanes = Lanes(
        torch.randn(size * LANES, *image, device=DEVICE),
        torch.arange(size * LANES, device=DEVICE) % 10,
        LANES,
    )
    return model, DeviceLowering(program, Table(boxes, boxes=False), train, torch.device(DEVICE)), lanes


def whole(model: nn.Module, lowering: DeviceLowering, lanes: Lanes) -> dict[str, Tensor]:
    way = DeviceLanes(model, lowering, 0)
    (output,) = way.run(lanes, 3)
    found = named(way, [*output.grads, *output.float_buffers])
    return {"loss": output.loss, "logits": output.logits, **found}


def named(way: LaneByLane, tensors: list[Tensor]) -> dict[str, Tensor]:
    return dict(zip([*way.params, *way.float_names()], tensors, strict=True))


@torch.no_grad()
def in_parts(kind: str, cuts: list[int]) -> dict[str, Tensor]:
    """The same by one network for each part and lane; each has a model of its own with its tensors only."""
    models = [make(kind) for _ in range(len(cuts) + 1)]
    lowering, lanes = models[0][1:]
    blocks = lowering.program.blocks
    ways, networks, found = [], [], {}
    for (model, whole_lowering, _), ends in zip(models, pairwise([0, *cuts, len(blocks)]), strict=True):
        own = range(*ends)
        every = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        keep_part(model, {name for name in every if any(blocks[place].has(name) for place in own)})
        part = whole_lowering.part(own)
        ways.append((LaneByLane(model, lambda *_: None, 0, None), part.program))
        networks.append([part.part_network() for _ in range(LANES)])
        fill_weights(part.program, networks[-1][0], model)
        networks[-1][1].take_weights(networks[-1][0].weights, networks[-1][0].copy)
    trees, logits, sent = [LaneTree() for _ in networks], [], []
    for lane in range(LANES):
        images, labels = lanes.lane(lane)
        given = [images.permute(0, 2, 3, 1)]
        for number, stage in enumerate(networks):
            stage[lane].enter(given)
            stage[lane].labels.copy_(labels)
            stage[lane].keys.copy_(make_keys(ways[number][1], 0, range(lane, lane + 1), 3))
            stage[lane].forward()
            given = stage[lane].leave() if stage is not networks[-1] else []
            sent.append(len(given))
    for lane in range(LANES):
        for number in reversed(range(len(networks))):
            network, (way, program) = networks[number][lane], ways[number]
            if number < len(networks) - 1:
                network.enter_back(given)
            network.backward()
            output = read_output(way, program, network, range(1), 0)
            trees[number].add([output.loss, *output.grads, *output.float_buffers])
            logits += [output.logits] if number == len(networks) - 1 else []
            given = network.leave_back() if number else []
    for tree, (way, _) in zip(trees, ways, strict=True):
        loss, *tensors = tree.root()[1]
        found |= {"loss": loss, **named(way, tensors)}
    # with boxes, also z and its statistics, for the sums of a norm's gradient in the part before; side heads
    assert max(sent) == {"boxes": 4, "heads": 3}.get(kind, 1)
    return {**found, "logits": torch.cat(logits)}


@pytest.mark.parametrize("kind", MODELS)
def test_parts_give_the_bits_of_the_whole_network(kind: str) -> None:
    expected = whole(*make(kind))
    count = len(make(kind)[1].program.blocks)
    for cuts in ([count - 1], list(range(1, count))):
        found = in_parts(kind, cuts)
        assert found.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == [], cuts


def gathered(model: nn.Module, lowering: DeviceLowering) -> tuple[PipelinedDevice, GatheredModel]:
    """A stage of all blocks, each of them a part whose parameters are gathered."""
    blocks = range(len(lowering.program.blocks))
    pipeline = DevicePipeline(Position(0, 1), "1f1b", set(), lowering, blocks, [])
    source = GatheredModel(model, pipeline.share(model, 1e-6), Group())
    pipeline.gather(source)
    assert len(pipeline.parts) == len(blocks)
    way = PipelinedDevice(model, 0, pipeline, StageLink(Mesh(), torch.device(DEVICE)))
    way.hands_over = True
    return way, source


@pytest.mark.parametrize("kind", MODELS)
def test_only_the_part_that_computes_has_weights(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = whole(*make(kind))
    model, lowering, lanes = make(kind)
    way, source = gathered(model, lowering)
    filled, tables = PartTables.filled, []

    @contextmanager
    def checked(self: PartTables, part: DevicePart, network: PartNetwork, backward: bool) -> Iterator[None]:
        with filled(self, part, network, backward):
            yield
            assert [n for own in way._networks for n in own if has_values(n.weights)] == [network]
            here = {name for name, p in model.named_parameters() if has_values(p)}
            assert here == set(part.own(way.params)) or not part.own(way.params)
            tables.append(weakref.ref(network.weights.untyped_storage()))
        gc.collect()  # the interpreter's own objects
        # what autograd has saved keeps no table either
        assert all(ref() in (None, tables[-1]()) for ref in tables)

    monkeypatch.setattr(PartTables, "filled", checked)
    tree, grads, logits = LaneTree(), dict[int, Tensor](), []
    for output in way.run(lanes, 3, grads.__setitem__):
        assert not any(map(has_values, output.grads))
        tree.add(
            [output.loss, *(grads.pop(i).clone() for i in range(len(way.params))), *output.float_buffers]
        )
        logits.append(output.logits)
    loss, *tensors = tree.root()[1]
    found = {"loss": loss, **named(way, tensors), "logits": torch.cat(logits)}
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    assert len(tables) == 2 * LANES * len(lowering.program.blocks)
    assert not any(ref() for ref in tables) and not any(map(has_values, model.parameters()))
    source.close()


def test_norms_that_see_all_lanes_are_refused() -> None:
    model, lowering, lanes = make("residual")
    shared = replace(lowering, train=replace(lowering.train, sync_norm=True))
    with pytest.raises(ModelError, match=r"train\.sync_norm=false.*without pipeline and shard=parameters"):
        cut_program(model, shared, lanes.images[:1], Plan(data=2, shard="parameters"), Mesh())
