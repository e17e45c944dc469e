"""Two runs compared: every bit that differs is found, and said by how much."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.errors import BadInput, CheckpointError, IdentityError
from lockstep.models.tensors import tensors_sha256
from lockstep.runs import checkpoint
from lockstep.runs.compare import Side, compare, read_trace
from lockstep.runs.directory import RunDirectory
from lockstep.runs.tensor_difference import locate, ulp_distance
from lockstep.runs.train_state import TrainState
from lockstep.spec import Optimizer, Run
from lockstep.spec.identity import digest

# dtype: the integer type of its bits, the bits of infinity
TYPES = {
    torch.float64: (torch.int64, 0x7FF0 << 48),
    torch.float32: (torch.int32, 0x7F80 << 16),
    torch.float16: (torch.int16, 0x7C00),
    torch.bfloat16: (torch.int16, 0x7F80),
}
DTYPES = pytest.mark.parametrize("dtype", TYPES, ids=str)


def number(place: int, dtype: torch.dtype) -> torch.Tensor:
    """The number that is `place` numbers above zero (below, if negative)."""
    bits = torch.tensor(abs(place), dtype=TYPES[dtype][0]).view(dtype)
    return -bits if place < 0 else bits


@DTYPES
@settings(deadline=None)
@given(data=st.data())
def test_ulps_count_the_numbers_between(dtype, data) -> None:
    limit = TYPES[dtype][1]
    places = st.integers(-limit, limit) | st.integers(-3, 3) | st.sampled_from([-limit, 1 - limit, limit])
    a, b = data.draw(places), data.draw(places)
    assert ulp_distance(number(a, dtype), number(b, dtype)) == abs(a - b)
    assert ulp_distance(number(b, dtype), number(a, dtype)) == abs(a - b)


@settings(deadline=None)
@given(st.floats(allow_nan=False, width=32))
def test_a_neighbour_of_fp32_is_one_ulp_away(value) -> None:
    with np.errstate(over="ignore"):  # after the largest comes infinity
        after = np.nextafter(np.float32(value), np.float32(math.inf))
    apart = ulp_distance(torch.tensor(value), torch.tensor(after.item()))
    assert apart == (0 if value == math.inf else 1)


@settings(deadline=None)
@given(st.floats(allow_nan=False), st.integers(0, 5))
def test_steps_of_nextafter_are_ulps_of_fp64(value, steps) -> None:
    other, moved = value, 0
    for _ in range(steps):
        moved += other > -math.inf
        other = math.nextafter(other, -math.inf)
    a, b = torch.tensor(value, dtype=torch.float64), torch.tensor(other, dtype=torch.float64)
    assert ulp_distance(a, b) == moved


@DTYPES
def test_special_numbers(dtype) -> None:
    def apart(a, b):
        return ulp_distance(torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype))

    smallest, largest = number(1, dtype).item(), torch.finfo(dtype).max
    assert apart(0.0, -0.0) == 0
    assert apart(smallest, -smallest) == 2 and apart(smallest, 0.0) == apart(-0.0, smallest) == 1
    assert apart(largest, math.inf) == 1 and apart(-math.inf, -largest) == 1
    assert apart(-math.inf, math.inf) == 2 * TYPES[dtype][1]
    assert apart(math.nan, 1.0) is apart(1.0, math.nan) is apart(math.nan, math.nan) is None
    assert ulp_distance(torch.tensor(1), torch.tensor(2)) is None


@DTYPES
@settings(deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_located(dtype, data) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=3)))
    a = torch.randn(shape, dtype=torch.float64).to(dtype)
    place, bit = data.draw(st.integers(0, a.numel() - 1)), data.draw(st.integers(0, dtype.itemsize * 8 - 2))
    b = a.clone()
    b.view(-1).view(TYPES[dtype][0])[place] ^= 1 << bit
    found = locate(7, {"model.x": a, "model.a": a}, {"model.x": b, "model.a": a})
    assert (found.step, found.names, found.name, found.num_tensors) == (7, ["model.x"], "model.x", 2)
    assert (found.num_different, found.num_elements) == (1, a.numel())
    assert found.element.index == tuple(int(i) for i in np.unravel_index(place, shape))
    assert int(found.element.bits[0], 16) ^ int(found.element.bits[1], 16) == 1 << bit


def test_bits_count_not_values() -> None:
    nan, other = torch.tensor([1, 0x7FC00000], dtype=torch.int32), torch.tensor([1, 0x7FC00001])
    a = {"model.nan": nan.view(torch.float32), "model.zero": torch.tensor(0.0)}
    assert not locate(0, a, dict(a)).names
    b = {"model.nan": other.to(torch.int32).view(torch.float32), "model.zero": torch.tensor(-0.0)}
    found = locate(0, a, b)
    assert found.names == ["model.nan", "model.zero"]
    assert found.element.values == ("nan", "nan") and found.element.ulps is None
    zero = locate(0, a, b, "model.zero").element
    assert zero.values == ("0.0", "-0.0") and zero.bits == ("0x00000000", "0x80000000") and zero.ulps == 0
    assert zero.index == ()


def test_integers_have_a_difference() -> None:
    a, b = {"model.n": torch.tensor([5, 9])}, {"model.n": torch.tensor([5, 7])}
    element = locate(0, a, b).element
    assert (element.index, element.difference, element.ulps) == ((1,), -2, None)


def test_absent_tensors_and_other_forms_are_said() -> None:
    a = {"optimizer.v.x": torch.zeros(2), "model.x": torch.zeros(2), "ema.x": torch.zeros(0)}
    b = {"model.x": torch.zeros(2, 1), "ema.x": torch.zeros(0), "model.y": torch.zeros(1).half()}
    found = locate(0, a, b)
    assert found.names == ["model.x", "model.y", "optimizer.v.x"] and found.num_tensors == 4
    assert found.forms == ("float32 (2,)", "float32 (2, 1)") and found.element is None
    assert locate(0, a, b, "model.y").forms == (None, "float16 (1,)")


# Runs made by background: what the traces and the checkpoints say can be chosen freely.


def make(tmp_path, name, states, traced=(), steps=None, identity=None) -> Side:
    """A run whose weight at step n is states[n], with checkpoints of all steps but those only traced."""
    directory = RunDirectory.create(tmp_path, name)
    identity = identity or {"seed": 0}
    directory.describe(Run(), identity)
    rows = []
    for step, value in states.items():
        model = nn.Linear(1, 1)
        nn.init.constant_(model.weight, value)
        nn.init.zeros_(model.bias)
        state = TrainState.begin(model, Optimizer("sgd"), 0)
        state.step = step
        if step not in traced or traced[step]:
            new = checkpoint.NewCheckpoint(directory.checkpoints, state.cursor(), digest(identity), 99)
            new.write(state.pieces())
        if step in traced:
            hashes = {key: tensors_sha256({key: tensor})[:16] for key, tensor in state.named().items()}
            rows.append(json.dumps({"step": step, "tensors": hashes}) + "\n")
    if rows:
        (directory.path / "trace.jsonl").write_text("".join(rows))
    if steps is not None:
        directory.write_summary({"steps": steps})
    return Side.read(directory)


ONLY_TRACED = dict.fromkeys(range(9), False)


def test_the_first_of_the_common_checkpoints_that_differs(tmp_path) -> None:
    a = make(tmp_path, "a", {0: 1.0, 2: 2.0, 4: 3.0, 6: 4.0}, steps=6)
    b = make(tmp_path, "b", {0: 1.0, 3: 2.5, 4: 3.5, 6: 4.5}, steps=6, identity={"seed": 1})
    found = compare(a, b)
    assert not found.identical and not found.by_trace
    assert (found.last_equal, found.first_different, found.names) == (0, 4, ["model.weight"])
    assert found.located.step == 4 and found.located.element.values == ("3.0", "3.5")
    assert found.identity == ["seed: 0 in A, 1 in B"]


def test_traces_name_the_step_and_the_next_checkpoint_the_element(tmp_path) -> None:
    states = {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}
    kept = {**ONLY_TRACED, 3: True}
    found = compare(make(tmp_path, "a", states, kept), make(tmp_path, "b", {**states, 2: 3.5, 3: 4.5}, kept))
    assert (found.last_equal, found.first_different, found.by_trace) == (1, 2, True)
    assert found.located.step == 3 and found.located.element.values == ("4.0", "4.5")
    none = compare(
        make(tmp_path, "a", states, ONLY_TRACED), make(tmp_path, "b", {**states, 2: 3.5}, ONLY_TRACED)
    )
    assert (none.first_different, none.located) == (2, None)
    healed = compare(make(tmp_path, "a", states, kept), make(tmp_path, "b", {**states, 2: 3.5}, kept))
    assert healed.first_different == 2 and healed.located.names == [] and not healed.identical


def test_a_checkpoint_changed_before_the_traces_part_comes_first(tmp_path) -> None:
    kept = {**ONLY_TRACED, 1: True}
    a = make(tmp_path, "a", {0: 1.0, 1: 2.0, 2: 3.0}, kept)
    b = make(tmp_path, "b", {0: 1.0, 1: 2.0, 2: 3.5}, kept)
    odd = make(tmp_path, "odd", {1: 9.0})
    b.checkpoints.update(odd.checkpoints)
    found = compare(a, b)
    assert (found.first_different, found.by_trace, found.last_equal) == (1, False, 0)
    assert found.located.element.values == ("2.0", "9.0")


def test_another_length_is_a_difference_only_when_both_are_finished(tmp_path) -> None:
    a = make(tmp_path, "a", {0: 1.0, 1: 2.0, 2: 3.0}, steps=2)
    b = make(tmp_path, "b", {0: 1.0, 1: 2.0}, steps=1)
    found = compare(a, b)
    assert (found.identical, found.first_different, found.last_equal) == (False, None, 1)
    unfinished = compare(a, make(tmp_path, "c", {0: 1.0, 1: 2.0}))
    assert unfinished.identical and unfinished.last_equal == 1


def test_what_cannot_be_compared_is_refused(tmp_path) -> None:
    a = make(tmp_path, "a", {2: 1.0, 3: 1.0}, steps=3)
    with pytest.raises(BadInput, match=r"no step that both runs kept: A .*2, 3 and no trace.*--trace"):
        compare(a, make(tmp_path, "b", {1: 1.0}))
    with pytest.raises(BadInput, match="neither a checkpoint nor a trace"):
        compare(a, make(tmp_path, "c", {}))
    with pytest.raises(
        BadInput, match="is the state before step 1, and they are different runs: seed: 0 in A, 1 in B"
    ):
        compare(*(make(tmp_path, f"seed {n}", {0: 1.0}, identity={"seed": n}) for n in (0, 1)))
    with pytest.raises(BadInput, match="finished at step 3 and equal up to step 2"):
        compare(a, make(tmp_path, "d", {2: 1.0}, steps=3))
    (tmp_path / "a" / "summary.json").write_text("{}")
    with pytest.raises(BadInput, match=r"summary.json: damaged"):
        Side.read(RunDirectory(tmp_path / "a"))


def test_a_checkpoint_of_another_run_is_refused(tmp_path) -> None:
    a, b = make(tmp_path, "a", {1: 1.0}), make(tmp_path, "b", {1: 1.0}, identity={"seed": 1})
    a.checkpoints.update(b.checkpoints)
    with pytest.raises(IdentityError):
        compare(a, b)


def test_checkpoints_that_a_training_run_removes_meanwhile_are_passed_over(tmp_path) -> None:
    a, b = (make(tmp_path, name, {0: 1.0, 1: 2.0, 2: 3.0}) for name in "ab")
    b.checkpoints[1].unlink()
    found = compare(a, b)
    assert found.identical and found.checkpoints == [0, 2]
    b.checkpoints[0].with_suffix(".safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="damaged"):
        compare(a, b)


def test_a_trace_is_read_to_its_last_whole_row(tmp_path) -> None:
    path, row = tmp_path / "trace.jsonl", b'{"step": %d, "tensors": {"model.x": "%s"}}\n'
    assert read_trace(path) == {}
    path.write_bytes(row % (3, b"aa") + row % (3, b"bb") + (row % (4, b"cc"))[:-9])
    assert read_trace(path) == {3: (row % (3, b"bb"))[:-1]}


DAMAGED = (
    *("", "{", "[]", "7", "\xff", '{"step": 1}', '{"step": "1", "tensors": {}}'),
    *('{"step": 1, "tensors": []}', '{"step": 1, "tensors": {"x": 1}}'),
)


@pytest.mark.parametrize("row", DAMAGED)
def test_a_damaged_row_is_named(tmp_path, row) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"step": 0, "tensors": {}}\n' + row.encode("latin-1") + b"\n")
    with pytest.raises(BadInput, match=r"trace\.jsonl line 2: damaged"):
        read_trace(path)
