"""Hashes of what a user's function holds."""

import functools

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.models.source_hash import describe_module, describe_values

SCALE = 2


def make(divisor):
    return lambda image: image // divisor


def with_default(image, divisor=2):
    return image // divisor


def by_global(image):
    return image // SCALE


class Own:
    def __init__(self, value):
        self.value = value

    def __call__(self, image):
        return image + self.value

    def change(self, image):
        return image - self.value


@pytest.mark.parametrize(
    "function",
    [
        make,
        lambda value: functools.partial(with_default, divisor=value),
        Own,
        lambda value: Own(value).change,
        lambda value: Own({"deep": [value]}),
        lambda value: Own(np.full(3, value)),
        lambda value: Own(torch.full((3,), value)),
        lambda value: make(make(value)),
    ],
)
def test_it_changes_with_the_values_and_only_then(function):
    assert describe_values(function(2)) == describe_values(function(2)) != describe_values(function(3))


def test_it_changes_with_defaults_and_globals(monkeypatch):
    before = describe_values(by_global), describe_values(with_default)
    monkeypatch.setitem(by_global.__globals__, "SCALE", 3)
    monkeypatch.setattr(with_default, "__defaults__", (3,))
    assert describe_values(by_global) != before[0] and describe_values(with_default) != before[1]


def test_what_holds_itself_ends():
    own = Own(1)
    own.value = own
    assert describe_values(own)


def test_classes_of_one_source_count_once():
    """A function that makes a class makes another one each time, with nothing new in it."""

    def make():
        class Part(nn.Module):
            pass

        return Part

    first, second = make(), make()
    same, other = nn.Sequential(first(), first()), nn.Sequential(first(), second())
    assert describe_module(same) == describe_module(other)
