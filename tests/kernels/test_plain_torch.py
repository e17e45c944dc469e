"""What surrounds training: no mode or default of the caller is in it, and it adds none."""

import torch
from torch.overrides import _get_current_function_mode_stack

from lockstep.kernels.numerics import plain_torch


def test_no_call_of_torch_goes_through_python():
    with plain_torch():
        assert not _get_current_function_mode_stack()


def test_the_callers_device_is_not_its_own():
    with torch.device("meta"):
        with plain_torch():
            assert torch.empty(1).device.type == "cpu"
        assert torch.empty(1).device.type == "meta"
