"""The clock of layers: computing without exchanges, backward too, and not the first of several steps."""

import time

import pytest
import torch

from lockstep.parallel.split.layer_clock import LayerClock


class Slow(torch.autograd.Function):
    """Takes 20 ms each way."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(0.02)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.02)
        return grad


def run_step(clock, exchange_s):
    clock.begin_step()
    with clock.busy("layer"):
        result = Slow.apply(torch.ones(1, requires_grad=True))
        start = time.perf_counter()
        time.sleep(exchange_s)
        clock.sent("spatial", "layer", 100, start)
    clock.watch_backward("layer", result)
    result.sum().backward()
    clock.end_step()


def test_exchanges_are_apart_and_the_first_step_is_left_out():
    clock = LayerClock()
    clock.sent("spatial", "probe", 7, time.perf_counter())  # before the first step
    run_step(clock, 0.5)
    assert (clock.steps, set(clock.traffic), clock.busy_s["layer"] < 0.5) == (1, {("spatial", "layer")}, True)
    for _ in range(2):
        run_step(clock, 0.05)
    seen = clock.traffic["spatial", "layer"]
    assert (clock.steps, seen.num_bytes) == (2, 200)
    assert seen.seconds >= 0.1 and clock.busy_s["layer"] >= 0.08


def test_what_needs_no_gradient_has_no_backward_pass():
    clock = LayerClock()
    clock.watch_backward("layer", torch.ones(1))
    assert not clock.busy_s and clock.busy_s["layer"] == pytest.approx(0.0)
