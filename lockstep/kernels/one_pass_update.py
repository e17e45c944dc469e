"""The update of weights on a CPU in one pass over memory: C that is made of each rule's own arithmetic.

PyTorch takes a pass for every operation. Here an element's numbers are read once, and every operation rounds
once, as it does there: the bits are the same, so nothing has to know which of them was taken.

Compiled by the machine's compiler when it is first needed; without one, PyTorch does it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor, nn

from lockstep.errors import LockstepError
from lockstep.native.c_library import EXACT, keep_library
from lockstep.spec import Optimizer
from lockstep.spec.rule.optimizer_rule import RULES, Rule

_PIECE = 1 << 20  # elements that a thread takes at a time, where there are several
_MANY = 1_000_000  # weights whose update by PyTorch is felt
_NUMBERS = ("a", "b", "eps", "correct_a", "correct_b")
_PASS = """
static inline void pass_{name}(long count, float *restrict weights, const float *restrict grads,
    float *restrict firsts, float *restrict seconds, double lr, double decay, {numbers}, int decays)
{{
    for (long i = 0; i < count; i++) {{
        float weight = weights[i], grad = grads[i];
        {load}
        if (decays) {{ {decay} }}
        {lines}
        {store}
        const float step = {move} * (float)lr;
        weights[i] = weight - step;
    }}
}}

void update_{name}(long count, float *weights, const float *grads, float *firsts, float *seconds,
    double lr, double decay, {numbers})
{{
    if (decay == {none}) pass_{name}(count, weights, grads, firsts, seconds, lr, decay, {names}, 0);
    else pass_{name}(count, weights, grads, firsts, seconds, lr, decay, {names}, 1);
}}
"""


def update_in_one_pass(
    optimizer: Optimizer, lr: float, step: int, rows: Sequence[Sequence[Tensor]], decayed: Sequence[bool]
) -> list[int]:
    """Change weights and memory, the first row and those from the third on, by the gradients, the second.

    Gives the places of tensors that it leaves as they are: all without a compiler, else what is not fp32, or
    does not lie in memory without gaps and alike.
    """
    library = _library()
    if library is None:
        return list(range(len(decayed)))
    rule, weight_decay, change = (
        RULES[optimizer.name],
        optimizer.weight_decay,
        library[f"update_{optimizer.name}"],
    )
    numbers = *rule.numbers(optimizer.options), *rule.corrections(optimizer.options, step)
    decay, none = (1.0 - lr * weight_decay, 1.0) if rule.decays_weights else (weight_decay, 0.0)
    calls, left = [], []
    for place, is_decayed in enumerate(decayed):
        tensors = [row[place] for row in rows]
        if not _lie_alike(tensors):
            left.append(place)
            continue
        given = [*map(ctypes.c_double, (lr, decay if is_decayed else none, *numbers))]
        calls += [(count, *places, *given) for count, places in _pieces(tensors)]
    if torch.get_num_threads() == 1:
        for call in calls:
            change(*call)
    else:
        list(_threads(torch.get_num_threads()).map(lambda call: change(*call), calls))
    return left


def explain_update(optimizer: Optimizer, model: nn.Module, device: torch.device) -> list[str]:
    """A notice if many weights are updated on a CPU and there is no compiler for it."""
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if device.type != "cpu" or weights < _MANY or RULES[optimizer.name].whole or _library():
        return []
    return [
        "no C compiler works here, so torch updates the weights, which takes several times as long: install "
        "gcc or clang"
    ]


def _lie_alike(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    if not (first.is_contiguous() or first.is_contiguous(memory_format=torch.channels_last)):
        return False
    return all(each.dtype == torch.float32 and each.stride() == first.stride() for each in tensors)


def _pieces(tensors: Sequence[Tensor]) -> Iterator[tuple[ctypes.c_long, list[ctypes.c_void_p | None]]]:
    total = tensors[0].numel()
    size = total if torch.get_num_threads() == 1 else _PIECE
    for start in range(0, total, size or 1):
        places: list[ctypes.c_void_p | None] = [ctypes.c_void_p(t.data_ptr() + 4 * start) for t in tensors]
        yield ctypes.c_long(min(size, total - start)), places + [None] * (4 - len(places))


@cache
def _threads(count: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count, "lockstep-update")


@cache
def _library() -> ctypes.CDLL | None:
    source = "#include <math.h>\n" + "".join(
        _write(name, rule) for name, rule in RULES.items() if not rule.whole
    )
    try:
        return keep_library(source, EXACT)
    except (LockstepError, OSError):
        return None


class _Number(str):
    """A number of the rule, a double in C; what torch makes of one beside a tensor is a float."""

    def __rsub__(self, other: float) -> _Number:
        return _Number(f"({other!r} - {self})")


class _Value:
    """A float in C, by its name; arithmetic adds a line each, which rounds once."""

    def __init__(self, lines: list[str], name: str) -> None:
        self._lines, self._name = lines, name

    def __str__(self) -> str:
        return self._name

    def __add__(self, other: _Value | _Number) -> _Value:
        return self._then("+", other)

    def __mul__(self, other: _Value | _Number) -> _Value:
        return self._then("*", other)

    def divide(self, by: _Value | _Number) -> _Value:
        return self._then("/", by)

    def sqrt(self) -> _Value:
        return self._keep(f"sqrtf({self})")

    def _then(self, sign: str, other: _Value | _Number) -> _Value:
        return self._keep(f"{self} {sign} {f'(float){other}' if isinstance(other, _Number) else other}")

    def _keep(self, text: str) -> _Value:
        name = f"v{len(self._lines)}"
        self._lines.append(f"const float {name} = {text};")
        return _Value(self._lines, name)


def _write(name: str, rule: Rule) -> str:
    """The rule in C: what its arithmetic does to names."""
    lines: list[str] = []
    memory = ["first", "second"][: len(rule.memory)]
    values = [_Value(lines, each) for each in ("grad", "first", "second")]
    move, *new = rule.direction(*values, *map(_Number, _NUMBERS), _Value.divide, _Value.sqrt)
    return _PASS.format(
        name=name,
        numbers=", ".join(f"double {number}" for number in _NUMBERS),
        names=", ".join(_NUMBERS),
        none="1.0" if rule.decays_weights else "0.0",
        decay="weight = weight * (float)decay;"
        if rule.decays_weights
        else "const float more = weight * (float)decay; grad = grad + more;",
        load=" ".join(f"const float {each} = {each}s[i];" for each in memory),
        lines="\n        ".join(lines),
        store=" ".join(f"{each}s[i] = {value};" for each, value in zip(memory, new, strict=False)),
        move=move,
    )
