"""A trained run as a function of images, on a GPU one CUDA graph a batch size: behind `lockstep predict`.

For a run whose steps stay on the device, every batch size is one CUDA graph, from the bytes of the images to
the probabilities. Fused kernels compute chains, and large batches of residual networks. Stock kernels compute
all other models, with each batch norm folded into the convolution before it. For any other run the predictor
calls the model itself, folded in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from lockstep.errors import BadInput, ModelError
from lockstep.kernels.cuda_graph import capture, run_first
from lockstep.kernels.loss import make_loss
from lockstep.kernels.numerics import half_precision, half_type, precision_kept, set_precision
from lockstep.kernels.structure import zip_tensors
from lockstep.lower.choose import lower_for_device
from lockstep.lower.program import DeviceLowering
from lockstep.runs.trained_run import Trained

if TYPE_CHECKING:
    from lockstep.lower.eval_network import EvalNetwork

_MOST = 8192  # the largest batch; more images are split into several
_CHAIN_VALUES = 2**31 - 1  # most values of a chain's layer in a batch: kernels index them with 32 bits
_OTHER_VALUES = 2**28  # the same for other models: keeps a GPU busy, and leaves memory for other batch sizes
_MANY = 32  # the smallest batch for which fused kernels are faster for a residual network
_PAYS = ("bf16", "fp16")  # the precisions in which they are faster
_KEPT = 8  # batch sizes whose buffers are kept
_Run = Callable[[Tensor], Any]


class Predictor:
    """Computes the probabilities of the classes with an opened run, on the run's device.

    With several labels it gives the probability of each; for any other model, what the model gives.
    """

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self.classes = trained.classes  # their names, in the order of the probabilities
        with self._precision():
            self._model, self._ways = _find_ways(trained, _find_lowering(trained))
        self._most = max(min([_MOST, *(way.most for way in self._ways)]), 1)
        self._runs: dict[int, _Run] = {}

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Any:
        """Images [N, C, H, W] as the run was trained on, uint8 or floats, on any device → [N, classes]."""
        if not isinstance(images, Tensor):
            raise BadInput(f"images must be a torch tensor, not {type(images).__name__}: use torch.as_tensor")
        shape = tuple(images.shape[1:])
        floats = self._trained.takes_floats
        if not (images.is_floating_point() if floats else images.dtype == torch.uint8) or (
            shape != self._trained.shape
        ):
            wanted = " × ".join(map(str, self._trained.shape))
            kind = "floats" if floats else "uint8"
            raise BadInput(
                f"images must be {kind} [N, C, H, W] with C × H × W = {wanted}, as the run was trained on; "
                f"these are {str(images.dtype).removeprefix('torch.')} {list(images.shape)}"
            )
        parts = [self._find(len(part))(part) for part in torch.split(images, self._most) if len(part)]
        if parts or not self._trained.is_classifier:
            return zip_tensors(torch.cat, parts or [self._by_the_model(images)])
        return torch.zeros(0, len(self._trained.classes), device=self._trained.device)

    def _find(self, size: int) -> _Run:
        way = next((way for way in self._ways if size >= way.least), None)
        if way is None:
            return self._by_the_model
        if size not in self._runs:
            if len(self._runs) == _KEPT:
                del self._runs[next(iter(self._runs))]
            with torch.inference_mode(False), torch.no_grad(), self._precision():  # for callers in any mode
                self._runs[size] = Batch(self._trained, way.make(size))
        return self._runs[size]

    def _by_the_model(self, images: Tensor) -> Any:
        trained = self._trained
        normal = trained.augment.normalize(images.to(trained.device))
        half = half_type(trained.run.train.precision)
        with self._precision(), half_precision(trained.device, half):
            outputs = self._model(normal.contiguous(memory_format=trained.memory_format))
        return trained.answer(outputs)

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """Set torch's precision as the run asks; a CUDA graph keeps the setting it was captured with."""
        with precision_kept():
            set_precision(self._trained.run.train.precision == "tf32")
            yield


class Batch:
    """Computes batches of one size with a network on the device; on a GPU as one CUDA graph."""

    def __init__(self, trained: Trained, network: EvalNetwork) -> None:
        device, size = trained.device, network.lane_size
        self._network = network
        self._images = torch.zeros(size, *trained.shape, dtype=torch.uint8, device=device)
        self._labels = torch.zeros(size, dtype=torch.int64, device=device)
        self._order = torch.arange(size, device=device)
        self._nothing = torch.zeros(5, dtype=torch.int64, device=device)  # step 0, not bad, unused keys
        self._normal = trained.augment.normal(self._images)
        self._result = torch.zeros(size, len(trained.classes), device=device)
        run_first(self._launch, device)
        self._replay = capture(self._launch, device, device.type == "cuda")

    def __call__(self, images: Tensor) -> Tensor:
        """[N, C, H, W] → [N, classes]."""
        self._images.copy_(images, non_blocking=True)
        self._replay()
        return self._result.clone()

    def _launch(self) -> None:
        from lockstep.kernels.triton.batch_gather import Move, gather_batch

        network, nothing = self._network, self._nothing
        gather_batch(
            self._images, self._labels, self._order, self._order, nothing[:1], nothing[:1], nothing,
            self._normal, network.x[0], network.labels, Move(), network.pad,
        )  # fmt: skip
        network.forward(training=False)
        torch.softmax(network.logits, 1, out=self._result)


@dataclass(frozen=True)
class _Way:
    """A way to compute on the device: `make(n)` builds a network for n images, from `least` to `most`."""

    make: Callable[[int], EvalNetwork]
    most: int
    least: int = 1


def _find_lowering(trained: Trained) -> DeviceLowering | None:
    run, loss = trained.run, make_loss(trained.run.train)
    with suppress(ModelError):  # the run's kernels may not run on this device
        return lower_for_device(run, trained.model, loss, trained.shape, trained.device, trains=False)
    return None


def _find_ways(trained: Trained, lowering: DeviceLowering | None) -> tuple[nn.Module, list[_Way]]:
    """The model to call if no way fits, and the ways to compute on the device, the best first."""
    if lowering is None or trained.takes_floats or not trained.is_classifier:
        return fold_norms(trained.model), []
    if lowering.is_fused and not lowering.program.shares_norms:
        return trained.model, [_fused_way(trained, lowering)]
    folded = fold_norms(trained.model)
    pays = lowering.is_fused and lowering.train.precision in _PAYS and lowering.table.boxes
    return folded, [*([_fused_way(trained, lowering)] if pays else []), *_stock_ways(trained, folded)]


def _fused_way(trained: Trained, lowering: DeviceLowering) -> _Way:
    def make(size: int) -> EvalNetwork:
        one = DeviceLowering(
            lowering.program, lowering.table, replace(lowering.train, batch=size, lanes=1), lowering.device
        )
        network, load = one.eval_network(1)
        load(trained.model)
        return network

    largest = max(layer.num_values for layer in lowering.program.layers)
    if lowering.program.shares_norms:
        return _Way(make, _OTHER_VALUES // largest, _MANY)
    return _Way(make, _CHAIN_VALUES // largest)


def _stock_ways(trained: Trained, folded: nn.Module) -> list[_Way]:
    from lockstep.lower.compiled.compiled_eval import CompiledEval, fix_weights
    from lockstep.lower.compiled.compiled_program import find_compiled

    train, device = trained.run.train, trained.device
    try:
        program = find_compiled(folded, trained.shape, train, trains=False)
    except ModelError:
        return []
    model = replace(program.model, module=fix_weights(folded, train.precision))
    return [_Way(lambda size: CompiledEval(model, size, train, device), _OTHER_VALUES // program.largest)]


def fold_norms(model: nn.Module) -> nn.Module:
    """A copy of the model in which every batch norm after a convolution is folded into that convolution."""
    folded = deepcopy(model).eval()
    for module in list(folded.modules()):
        if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
            continue
        for i in range(len(module) - 1):
            conv, norm = module[i], module[i + 1]
            if type(conv) is nn.Conv2d and type(norm) is nn.BatchNorm2d and norm.track_running_stats:
                module[i], module[i + 1] = fuse_conv_bn_eval(conv, norm), nn.Identity()
    return folded
