"""Codecs in C beside those in torch: the same numbers and remainders in every bit, on every processor."""

import itertools
import platform
import threading
from pathlib import Path

import pytest
import torch
from small import small_run, train
from world import in_threads

from lockstep.comm.bucket import ReducedTensor
from lockstep.comm.compress import codec_library as library
from lockstep.comm.compress import compressed_bucket, low_rank_bucket
from lockstep.comm.compress.codec_library import call_codec, codec_library
from lockstep.comm.compress.factor_product import NativeProducts
from lockstep.comm.compress.feedback import Feedback
from lockstep.comm.group import Group
from lockstep.comm.reducer import Reducer
from lockstep.comm.tree import worker_lanes
from lockstep.native import c_library
from lockstep.native.c_library import find_compiler, keep_library
from lockstep.native.nvrtc import NoCompiler
from lockstep.spec.rule.compression import BLOCK, read_compression
from lockstep.train.parts.codec_facts import codec_numerics, explain_codecs

KINDS = ("bf16", "int8", "fp8", "top:0.0001", "top:0.01", "top:0.05", "top:0.0626", "top:0.25")
CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(codec_library() is None, reason="there is no C compiler")


def odd_blocks():
    """Blocks that are hard to compress alike, each by a name."""
    maker = torch.Generator().manual_seed(0)
    plain = torch.randn(BLOCK, generator=maker)
    sizes = torch.randint(0, 1 << 31, (BLOCK,), generator=maker)
    every = (sizes + torch.randint(0, 2, (BLOCK,), generator=maker) * (1 << 31)).to(torch.uint32)
    signs = torch.where(torch.arange(BLOCK) % 3 == 0, -1.0, 1.0)
    found = {
        "plain": plain,
        "any bits": torch.nan_to_num(every.view(torch.float32), 1.0, 2.0, -3.0) / 4,
        "equal": signs,
        "three sizes": (torch.arange(BLOCK) % 3).float() * signs,
        "zeros": torch.zeros(BLOCK),
        "zeros of both signs": 0.0 * signs,
        "a few": torch.where(torch.arange(BLOCK) % 100 == 7, plain, 0.0 * signs),
        "very few": torch.where(torch.arange(BLOCK) % 1000 == 7, plain, 0.0),
        "denormals": torch.arange(-BLOCK // 2, BLOCK // 2, dtype=torch.float32) * 1e-45,
        "hardly above zero": plain * 1e-44,
        "a scale too small": (torch.arange(BLOCK) % 601).float() * 1e-45,
        "small and large": plain * 10.0 ** torch.linspace(-40, 37, BLOCK),
        "huge": plain.clamp(-0.9, 0.9) * 3.4e38,
        "halves": torch.arange(BLOCK) / 2 * signs,
        "one column": torch.where(torch.arange(BLOCK) % 512 == 5, plain * 100, plain * 1e-9),
        "ascending": torch.linspace(-1, 1, BLOCK),
    }
    eighths = torch.arange(BLOCK) % 449
    return found | {"ends of fp8": torch.where(torch.arange(BLOCK) == 0, 448.0, eighths / 512) * signs}


def reduce(group, kind, params, gradients, lanes, steps=2):
    """The means of some steps, and what is remembered at the end."""
    feedback = Feedback(read_compression(kind), params, lanes, group)
    entries = [ReducedTensor(p, None, name) for name, p in params.items()]
    reducer = Reducer(group, lanes, entries, 0.1, overlap=False, feedback=feedback)
    means = []
    for step in range(steps):
        reducer.begin()
        for lane in worker_lanes(lanes, group.size, group.rank):
            reducer.add(gradients(step, lane))
        means += [mean.clone() for mean in reducer.finish()]
        reducer.commit()
    reducer.close()
    return means, [piece.tensor.clone() for piece in feedback.pieces()]


def by(codecs, monkeypatch):
    """From here on buckets use these codecs, in turn; of c and torch."""
    turns, lock = itertools.cycle(codecs), threading.Lock()

    def choose(_):
        with lock:
            return next(turns)

    for module in (compressed_bucket, low_rank_bucket):
        monkeypatch.setattr(module, "compresses_by", choose)


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lanes", [1, 4])
def test_what_is_hard_has_the_same_bits(kind, lanes, monkeypatch):
    """What is decoded and what is left out, of a lane and of the mean, with a short last block."""
    blocks, found = odd_blocks(), []
    given = [torch.cat([block, block[: BLOCK - 3]]).view(-1, 1) for block in blocks.values()]
    params = {name: torch.zeros_like(grad) for name, grad in zip(blocks, given, strict=True)}
    for codecs in ("c", "torch"):
        by([codecs], monkeypatch)
        found.append(reduce(Group(), kind, params, lambda step, lane: given[lane:] + given[:lane], lanes))
    (means, kept), (means_too, kept_too) = found
    for place, (a, b) in enumerate(zip(means, means_too, strict=True)):
        assert same_bits(a, b), [*blocks][place % len(blocks)]
    assert all(map(same_bits, kept, kept_too))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_so_in_the_same_places(kind, monkeypatch):
    found, given = [], torch.randn(3, 2 * BLOCK, generator=torch.Generator().manual_seed(2))
    for row, bad in enumerate((float("nan"), float("inf"), float("-inf"))):
        given[row, 1000 * row : 1000 * row + 5] = bad
    for codecs in ("c", "torch"):
        by([codecs], monkeypatch)
        found.append(reduce(Group(), kind, {"p": given}, lambda step, lane: [given], 1, steps=1))
    for a, b in zip(*(means + kept for means, kept in found), strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())
        assert same_bits(a.nan_to_num(9, 9, 9), b.nan_to_num(9, 9, 9))
    assert not found[0][0][0].isfinite().all()


@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["int8", "top:0.02"])
def test_some_workers_by_c_and_others_by_torch(kind, monkeypatch):
    shapes = {"conv": (24, 40, 3, 3), "linear": (70, 300), "tall": (5000, 2), "bias": (70,)}
    params = {name: torch.zeros(shape) for name, shape in shapes.items()}
    params["conv"] = params["conv"].contiguous(memory_format=torch.channels_last)

    def gradients(step, lane):
        maker = torch.Generator().manual_seed(100 * step + lane)
        return [torch.randn(shape, generator=maker) for shape in shapes.values()]

    by(["torch"], monkeypatch)
    alone, _ = reduce(Group(), kind, params, gradients, 8, steps=3)
    by(["c", "torch", "c"], monkeypatch)
    for means, _ in in_threads(3, lambda group: reduce(group, kind, params, gradients, 8, steps=3)):
        assert all(map(same_bits, means, alone))
        assert means[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("shape", "rank"), [((7, 33), 1), ((64, 64), 4), ((1, 5000), 2), ((301, 7), 3), ((40, 270), 9)]
)
def test_products_are_those_of_float64(shape, rank):
    maker = torch.Generator().manual_seed(rank)
    grad, kept = torch.randn(shape, generator=maker), torch.randn(shape, generator=maker)
    q, products = torch.randn(shape[1], rank, generator=maker), NativeProducts()
    matrix = torch.full(shape, float("nan"))
    p = products.add_project(grad, kept, q, matrix)
    assert torch.equal(matrix, grad + kept)
    torch.testing.assert_close(p.double(), matrix.double() @ q.double(), rtol=1e-4, atol=1e-4)
    along = products.find_along(matrix, p)
    torch.testing.assert_close(along.double(), matrix.double().t() @ p.double(), rtol=1e-4, atol=1e-2)
    found, rest = torch.empty(shape), matrix.clone()
    products.multiply(p, q, found)
    torch.testing.assert_close(found.double(), p.double() @ q.t().double(), rtol=1e-4, atol=1e-3)
    products.take_away(rest, p, q)
    assert torch.equal(rest, matrix - found)


def test_another_compiler_s_work_gives_the_same_bits(monkeypatch):
    """Without vectors of this processor: what is computed is written down in the source."""
    sources = "".join(p.read_text() for p in sorted(Path(library.__file__).parent.glob("c/*.c")))
    old = ("-march=x86-64",) if platform.machine() == "x86_64" else ()
    plain = keep_library(sources, (*c_library.EXACT, "-O1", "-fno-tree-vectorize", *old))
    monkeypatch.setattr(library, "codec_library", lambda: plain)
    blocks = torch.stack([*odd_blocks().values()])
    grad, q = blocks[:, :600].contiguous(), torch.randn(600, 5)

    def compute():
        products, matrix = NativeProducts(), torch.empty(grad.shape)
        p = products.add_project(grad, grad, q, matrix)
        rows, lost = torch.zeros(len(blocks), 6 * 41, dtype=torch.uint8), torch.empty(blocks.shape)
        call_codec("pack_lane", [3, 41, blocks.numel()], blocks, blocks, lost, rows, 0)
        return p, products.find_along(matrix, p), rows, lost

    slow = compute()
    monkeypatch.undo()
    for a, b in zip(slow, compute(), strict=True):
        assert (
            torch.equal(a.nan_to_num(5.0), b.nan_to_num(5.0)) if a.is_floating_point() else torch.equal(a, b)
        )


def test_several_that_ask_at_once_compile_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    built, build = [], c_library.build_library
    monkeypatch.setattr(c_library, "build_library", lambda *a, **b: built.append(1) or build(*a, **b))
    source, found = "int seven(void) { return 7; }", []
    threads = [
        threading.Thread(target=lambda: found.append(keep_library(source, ("-O1",)).seven()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [7] * 4 and built == [1]
    assert keep_library(source, ("-O0",)).seven() == 7 and len(built) == 2
    kept = [path.suffix for path in (tmp_path / "cache" / "native").iterdir()]
    assert sorted(kept) == [".lock", ".lock", ".so", ".so"]
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "file" / "under"))
    assert keep_library(source, ("-O1",)).seven() == 7  # nothing can be kept


def test_without_a_compiler_torch_serves(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoCompiler, match="install gcc or clang"):
        find_compiler()
    codec_library.cache_clear()
    try:
        run = small_run("train.compress=rank:1")
        summary = train(run, tmp_path)[0].summary
        assert codec_numerics("rank:2", CPU) == {"factors": "torch"}
        *_, notice = explain_codecs(run, torch.nn.Linear(64, 64), CPU)
        assert "no C compiler is found" in notice
        assert not explain_codecs(small_run(), torch.nn.Linear(64, 64), CPU)
    finally:
        codec_library.cache_clear()
        monkeypatch.undo()
    (notice,) = explain_codecs(run, torch.nn.Linear(64, 64), CPU)
    assert "1 of 2 tensors of parameters" in notice
    assert train(run, tmp_path, launch={"name": "by-c"})[0].summary["identity"] != summary["identity"]


def test_which_of_them_sums_is_part_of_a_run_by_rank():
    assert codec_numerics("rank:2", CPU) == {"factors": "c"}
    assert codec_numerics("rank:2", torch.device("cuda")) == {"factors": "torch"}
    assert codec_numerics("int8", CPU) == codec_numerics("none", CPU) == {}
