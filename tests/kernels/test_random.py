"""Keyed random bits against splitmix64 in Python integers, and what keys and bounds promise."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.kernels import random

MASK = 2**64 - 1
INT64 = st.integers(-(2**63), 2**63 - 1)


def splitmix64(state: int) -> int:
    """The published generator: the output for a state already advanced."""
    z = state & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def unsigned(values: torch.Tensor) -> list[int]:
    return [value & MASK for value in values.tolist()]


def test_the_published_first_outputs_for_seed_1234567() -> None:
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert unsigned(random.bits(1234567, torch.arange(4))) == published


@given(INT64, INT64)
def test_bits_are_splitmix64_for_every_key_and_counter(base: int, counter: int) -> None:
    expected = splitmix64(base + (counter + 1) * 0x9E3779B97F4A7C15)
    assert unsigned(random.bits(base, torch.tensor([counter]))) == [expected]


def test_a_key_is_the_same_in_every_process() -> None:
    assert random.key("order", 0, 1, 2) == -6136111820175731120  # another value changes every run


def test_different_parts_give_different_keys() -> None:
    parts = [
        ("a", 1),
        (1, "a"),
        ("a", "1"),
        ("a1",),
        ("a", 11),
        ("a", 1, 1),
        ("a",),
        ("a", -1),
        ("", "a", 1),
        (),
    ]
    assert len({random.key(*part) for part in parts}) == len(parts)


def test_neighbouring_keys_share_no_values() -> None:
    counter = torch.arange(1000)
    drawn = torch.cat([random.bits(random.key("a", number), counter) for number in range(20)])
    assert len(drawn.unique()) == 20_000


def test_a_value_depends_on_its_counter_alone() -> None:
    counter = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    whole = random.bits(5, torch.arange(1000))
    assert torch.equal(random.bits(5, counter), whole[counter])
    assert torch.equal(random.bits(5, counter.view(10, 100)), whole[counter].view(10, 100))


def test_uniform_is_in_range_and_even() -> None:
    drawn = random.uniform(random.key("u"), torch.arange(100_000))
    assert drawn.dtype == torch.float32
    assert 0.0 <= float(drawn.min()) < 0.001
    assert 0.999 < float(drawn.max()) < 1.0
    assert abs(float(drawn.double().mean()) - 0.5) < 0.005
    assert int(torch.histc(drawn, 10).min()) > 9_500


def test_uniform_has_the_top_24_bits() -> None:
    counter = torch.arange(100)
    expected = [(value >> 40) / 2**24 for value in unsigned(random.bits(9, counter))]
    assert random.uniform(9, counter).tolist() == expected


@given(INT64, st.integers(1, 2**31))
def test_integers_are_the_top_62_bits_modulo_the_bound(base: int, bound: int) -> None:
    counter = torch.arange(20)
    expected = [(value >> 2) % bound for value in unsigned(random.bits(base, counter))]
    assert random.integers(base, counter, bound).tolist() == expected


def test_integers_reach_every_value_evenly() -> None:
    counts = torch.bincount(random.integers(3, torch.arange(70_000), 7), minlength=7)
    assert len(counts) == 7
    assert int(counts.min()) > 9_500
