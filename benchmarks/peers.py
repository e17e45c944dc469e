"""Whole training steps as users of PyTorch and Lightning write them, from the plain loop to the best stock.

Each takes a Case and a device and gives `step()`: the next batch of a shuffled order, to float, forward,
cross entropy, backward, SGD with momentum. Timed by time_job.py, one a process; flax_peer.py has JAX's.

Shapes: images uint8 [num_images, C, H, W], labels and order [num_images], indices [batch].
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from case import Case
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lockstep.kernels.loss import heads_loss
from lockstep.models import build

LR, MOMENTUM = 1e-3, 0.9
NUM_LOADERS = 8
GRAPH_WARMUP_STEPS = 5  # compiles, tunes, fills the optimizer's state and the allocator
Step = Callable[[], Any]


def make_data(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """Random images and labels on the device."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (case.num_images, case.in_channels, case.size, case.size)
    images = torch.randint(256, shape, dtype=torch.uint8, device=device, generator=generator)
    labels = torch.randint(case.num_classes, shape[:1], device=device, generator=generator)
    return images, labels


def make_model(case: Case, device: str, channels_last: bool) -> nn.Module:
    torch.manual_seed(0)
    model = build(
        case.model,
        in_channels=case.in_channels,
        num_classes=case.num_classes,
        image_size=(case.size, case.size),
    )
    return model.to(device, memory_format=torch.channels_last if channels_last else torch.contiguous_format)


def make_optimizer(model: nn.Module, fused: bool) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), LR, MOMENTUM, fused=fused or None)


def compute_loss(model: nn.Module, images: Tensor, labels: Tensor, channels_last: bool = False) -> Tensor:
    """Normalized images through the model and its heads."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    normalized = images.to(torch.float32, memory_format=layout) * (1 / 63.75) - 2.0
    return heads_loss(F.cross_entropy, model(normalized), labels, getattr(model, "aux_weight", 0.0))


def gather_loss(
    model: nn.Module, data: tuple[Tensor, Tensor], indices: Tensor, bf16: bool, channels_last: bool
) -> Tensor:
    """The loss of the samples at `indices`; what the compiled variants compile, gather included."""
    images, labels = data[0][indices], data[1][indices]
    context = torch.autocast(images.device.type, torch.bfloat16) if bf16 else nullcontext()
    with context:
        return compute_loss(model, images, labels, channels_last)


def shuffle(case: Case, device: str) -> Iterator[Tensor]:
    """The batches of one epoch as indices; a rest is left out."""
    order = torch.randperm(case.num_images, device=device)
    for number in range(case.num_batches):
        yield order[number * case.batch : (number + 1) * case.batch]


def forever(make_epoch: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    while True:
        yield from make_epoch()


class Training:
    """Data, model and optimizer in the device's memory."""

    def __init__(
        self, case: Case, device: str, tuned: bool = True, compiled: dict[str, str] | None = None
    ) -> None:
        torch.backends.cudnn.benchmark = tuned
        if tuned:  # torch's own default is TF32 in convolutions alone
            torch.backends.cudnn.allow_tf32 = case.precision == "tf32"
            torch.backends.cuda.matmul.allow_tf32 = case.precision == "tf32"
        self.case, self.device, self.tuned = case, device, tuned
        self.data = make_data(case, device)
        self.model = make_model(case, device, channels_last=tuned)
        self.optimizer = make_optimizer(self.model, fused=tuned)
        self.loss = gather_loss if compiled is None else torch.compile(gather_loss, dynamic=False, **compiled)

    def update(self, indices: Tensor) -> Tensor:
        """One step on the samples at `indices`."""
        self.optimizer.zero_grad(set_to_none=True)
        bf16 = self.tuned and self.case.precision == "bf16"
        loss: Tensor = self.loss(self.model, self.data, indices, bf16, self.tuned)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def make_step(self) -> Step:
        """Launched kernel by kernel."""
        batches = forever(lambda: shuffle(self.case, self.device))
        return lambda: self.update(next(batches))

    def make_graph_step(self) -> Step:
        """The whole step as one CUDA graph, which reads where it stands in the order from the device.

        As PyTorch documents it: warm-up on a side stream, no gradients left at capture so that they lie in
        the graph's own memory and each replay writes them anew. Grown momentum makes SGD capturable.
        """
        case = self.case
        order = torch.randperm(case.num_images, device=self.device)
        positions = torch.arange(case.batch, device=self.device)

        def work() -> Tensor:
            indices = order.index_select(0, positions)
            positions.add_(case.batch)
            return self.update(indices)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(GRAPH_WARMUP_STEPS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            loss = work()
        left = 0

        def step() -> Tensor:
            nonlocal left
            if left == 0:  # the next epoch, between two replays
                left = self.case.num_batches  # `self` keeps alive what the graph works on
                order.copy_(torch.randperm(case.num_images, device=self.device))
                torch.arange(case.batch, out=positions)
            left -= 1
            graph.replay()
            return loss

        return step


def plain_loop(case: Case, device: str) -> Step:
    """What a tutorial has: DataLoader, fp32, eager, the loss read each step."""
    loader = DataLoader(
        TensorDataset(*make_data(case, "cpu")),
        case.batch,
        shuffle=True,
        drop_last=True,
        num_workers=NUM_LOADERS,
        pin_memory=device == "cuda",
        persistent_workers=True,
    )
    model = make_model(case, device, channels_last=False)
    optimizer = make_optimizer(model, fused=False)
    batches = forever(lambda: iter(loader))

    def step() -> float:
        images, labels = (tensor.to(device, non_blocking=True) for tensor in next(batches))
        optimizer.zero_grad()
        loss = compute_loss(model, images, labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def run_lightning(case: Case, device: str, turns: Generator[None, Any, None]) -> None:
    """Lightning's Trainer over resident data, tuned as "resident" is, until `turns` ends."""
    import lightning
    from lightning.fabric.plugins.environments import LightningEnvironment

    data = make_data(case, device)

    class Batches:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for indices in shuffle(case, device):
                yield data[0][indices], data[1][indices]

        def __len__(self) -> int:
            return case.num_batches

    class Data(lightning.LightningDataModule):
        def train_dataloader(self) -> Batches:
            return Batches()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(case, device, channels_last=True)

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            return compute_loss(self.model, *batch, channels_last=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make_optimizer(self.model, fused=True)

    class Turn(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            try:
                turns.send(outputs["loss"].detach())
            except StopIteration:
                trainer.should_stop = True

    warnings.filterwarnings("ignore", module="lightning")
    trainer = lightning.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed" if case.precision == "bf16" else "32-true",
        benchmark=True,
        max_epochs=-1,
        callbacks=[Turn()],
        plugins=[LightningEnvironment()],  # one process; else it asks mpi4py, where that is installed
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    next(turns)
    trainer.fit(Module(), datamodule=Data())


MAX_AUTOTUNE = {"mode": "max-autotune-no-cudagraphs"}
PEERS: dict[str, Callable[[Case, str], Step]] = {
    "plain loop": plain_loop,
    "resident fp32 eager": lambda case, device: Training(case, device, tuned=False).make_step(),
    "resident": lambda case, device: Training(case, device).make_step(),
    "compile": lambda case, device: Training(case, device, compiled={}).make_step(),
    "compile, graph": lambda case, device: Training(case, device, compiled={}).make_graph_step(),
    "max-autotune, graph": lambda case, device: Training(
        case, device, compiled=MAX_AUTOTUNE
    ).make_graph_step(),
}
