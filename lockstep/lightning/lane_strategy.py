"""The strategy: each worker computes its lanes of every batch, and all of them get the means over all lanes.

Lightning's loops, hooks, loggers, callbacks and checkpoints go on as they are. Its DDP strategy starts the
processes and their process group; the model is not wrapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lockstep.comm.group import Group
from lockstep.comm.tree import worker_lanes
from lockstep.errors import DataError, LockstepError, SpecError
from lockstep.kernels.keyed_seed import seed_all
from lockstep.kernels.numerics import prepare_device
from lockstep.lanes.lane_sampler import check_lanes
from lockstep.lightning.fit_state import FitState, refuse_features, shared_tensors
from lockstep.lightning.lane_batch import LaneBatch, merge_outputs
from lockstep.lightning.lane_order import EvalOrder, TrainOrder, check_loader
from lockstep.lightning.lane_results import BlockLog, LaneResults, results_of
from lockstep.lightning.process_group import find_environment, make_group
from lockstep.lightning.split_loader import SplitLoader
from lockstep.models.tensors import buffers_kept, tensors_sha256
from lockstep.spec.system import check_system


class LaneStrategy(DDPStrategy):
    """Trains by `lanes` equal parts of each batch: 1 to `lanes` workers end with the same bits.

    `batch_size` of the train loader is that of the whole batch of all workers, and a multiple of `lanes`.
    `lanes`, a power of two, `seed` and `threads` decide the bits; the number of workers does not. The seed
    decides the order of samples and all random numbers of data sets, lanes and hooks; that of the first
    weights is the script's own. `options` are those of Lightning's strategies, such as `timeout`.
    """

    def __init__(
        self, lanes: int = 8, seed: int = 0, *, threads: int = 1, tf32: bool = False, **options: Any
    ) -> None:
        check_lanes(lanes)
        options.setdefault("cluster_environment", find_environment())
        super().__init__(**options)
        if odd := [*self._ddp_kwargs, *(name for name in options if name.startswith(("ddp_", "model_")))]:
            raise SpecError(f"LaneStrategy: {odd[0]} is an option of DDP's wrapper: leave it out")
        self.lanes, self.seed, self._threads, self._tf32 = lanes, seed, threads, tf32
        self._group: Group | None = None
        self._fit: FitState | None = None
        self._blocks = BlockLog()
        self._splits_predictions: bool | None = None
        self._facts: dict[str, Any] = {}  # of the last fit
        self._saved: tuple[dict[str, Any], Any] | None = None  # facts of a checkpoint, and its path

    @staticmethod
    def hash_of(module: pl.LightningModule) -> str:
        """SHA-256 of a module's parameters and buffers."""
        return tensors_sha256(shared_tensors(module))

    # ---- Lightning sets up

    def connect(self, model: pl.LightningModule) -> None:
        """Take the module; Lightning's own splitting of data among workers stays off, but in `predict`."""
        super().connect(model)
        connector = model.trainer._accelerator_connector
        if self._splits_predictions is None:
            self._splits_predictions = connector.use_distributed_sampler
        is_predicting = model.trainer.state.fn == TrainerFn.PREDICTING
        connector.use_distributed_sampler = self._splits_predictions and is_predicting

    def setup_environment(self) -> None:
        """Prepare torch for equal bits, and form the process group."""
        check_system()
        workers = self.num_nodes * self.num_processes
        if workers > self.lanes:
            raise SpecError(
                f"{workers} workers are more than lanes={self.lanes}: every worker needs a lane of its own; "
                "more lanes are another training"
            )
        prepare_device(self.root_device.type, self._threads, self.root_device.index, self._tf32)
        super().setup_environment()
        self._group = self._group or make_group()

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up the module and its optimizer, as in DDP, without the wrapper."""
        refuse_features(trainer, self._layer_sync)
        loops = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop
        for loop in (*loops, trainer.validate_loop, trainer.test_loop):
            loop._results = LaneResults(loop._results.training, self.root_device)
        if trainer.state.fn == TrainerFn.FITTING:
            self._fit = FitState(self._module(), self.root_device, self.lanes, self.seed)
            self._facts = self._fit.facts
            if self._saved:
                self._fit.check_saved(*self._saved)
        super().setup(trainer)
        if self._fit is not None:
            self._fit.take_optimizers(self.optimizers)

    def configure_ddp(self) -> None:
        """In place of the wrapper: all workers start from the weights of worker 0."""
        self._fitting().send_weights(self._joined())

    def process_dataloader(self, dataloader: object) -> object:
        """Put a loader of this worker's lanes in place of the user's."""
        trainer = self._module().trainer
        if trainer.predicting or isinstance(dataloader, SplitLoader):
            return dataloader
        stage = "train" if trainer.training else "evaluation"
        loader, group = check_loader(dataloader, stage), self._joined()
        order = (TrainOrder if trainer.training else EvalOrder)(loader, self.lanes, self.seed)
        return SplitLoader(loader, order, stage, worker_lanes(self.lanes, group.size, group.rank), self.seed)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move each lane by itself; hooks such as `on_after_batch_transfer` get a lane."""
        if not isinstance(batch, LaneBatch):
            return super().batch_to_device(batch, device, dataloader_idx)
        for lane in batch.lanes:
            seed_all(self.root_device, "transfer", self.seed, *batch.place, lane.number)
            given = self.precision_plugin.convert_input(lane.data)
            lane.data = super().batch_to_device(given, device, dataloader_idx)
        seed_all(self.root_device, "batch", self.seed, *batch.place)
        return batch

    # ---- a step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forward and backward of this worker's lanes, and the means over all lanes; gives the mean loss."""
        batch, *rest = args
        fit, trainer = self._fitting(), self._module().trainer
        if not isinstance(batch, LaneBatch):
            raise DataError("LaneStrategy: give one train loader, and training_step(self, batch, batch_idx)")
        results, outputs = results_of(trainer.fit_loop.epoch_loop), []
        with fit.step(self._joined(), keeps_gradients=trainer.accumulate_grad_batches > 1) as step:
            for lane in batch.lanes:
                seed_all(self.root_device, "lane", self.seed, *batch.place, lane.number)
                with results.noting(lane.samples) as noted:
                    outputs.append(super().training_step(lane.data, *rest, **kwargs))
                loss = _loss_of(outputs[-1])
                self._backward_lane(loss)
                step.add(lane.number, loss, noted)
        seed_all(self.root_device, "after", self.seed, *batch.place)
        where = f"epoch {batch.epoch}, batch {batch.number}"
        fit.apply(step, where, checks=getattr(self.precision_plugin, "scaler", None) is None)
        for how, values, weights in step.logged():
            results.put(how, values, weights)
        mean, merged = step.loss.to(self.root_device, loss.dtype), merge_outputs(outputs)
        return {**merged, "loss": mean} if isinstance(merged, dict) else mean

    def backward(
        self, closure_loss: Tensor, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Set the means as gradients, or add them if batches are accumulated; the lanes' work is done."""
        module = self._module()
        # not the plugin's own, which may scale the loss: the losses of lanes were scaled
        Precision.pre_backward(self.precision_plugin, closure_loss, module)
        self._fitting().give_gradients(module.trainer.accumulate_grad_batches)
        return self.precision_plugin.post_backward(closure_loss, module)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """`validation_step` of the module, for each of this worker's blocks of the batch."""
        return self._evaluate(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """`test_step` of the module, for each of this worker's blocks of the batch."""
        return self._evaluate(super().test_step, *args, **kwargs)

    def _evaluate(self, run: Callable[..., Any], batch: Any, *rest: Any, **kwargs: Any) -> Any:
        loop, outputs = self._module().trainer._evaluation_loop, []
        results, step = results_of(loop), self._module().trainer.global_step
        if not isinstance(batch, LaneBatch):
            raise DataError("LaneStrategy: evaluate one loader after another, not several at once")
        loader = results.dataloader_idx or 0
        for lane in batch.lanes:
            seed_all(self.root_device, "block", self.seed, step, loader, batch.number, lane.number)
            with buffers_kept(self._module()), results.noting(lane.samples) as noted:
                outputs.append(run(lane.data, *rest, **kwargs))
            self._blocks.add(batch.number, lane.number, noted)
        if batch.number + 1 >= loop.max_batches[loader]:
            self._blocks.finish(self._joined(), results)
        seed_all(self.root_device, "after block", self.seed, step, loader, batch.number)
        return merge_outputs(outputs)

    def _backward_lane(self, loss: Tensor) -> None:
        scaler = getattr(self.precision_plugin, "scaler", None)
        scaled = loss if scaler is None else scaler.scale(loss)
        self.precision_plugin.backward(scaled, self._module(), self.optimizers[0])

    # ---- checkpoints, start and end

    def on_train_start(self) -> None:
        """Take the loader's place from a checkpoint, and let all workers compare their state."""
        # Lightning forgets the place if a schedule asked for `estimated_stepping_batches`
        self._module().trainer.fit_loop._load_combined_loader_states()
        self._fitting().prove(self._joined(), "at the start")

    def on_train_end(self) -> None:
        """All workers compare their state."""
        self._fitting().prove(self._joined(), "at the end")

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save what Lightning saves, once all workers are found equal."""
        if self._fit is not None:
            self._fit.prove(self._joined(), "at a checkpoint")
        checkpoint["lockstep"] = self._facts
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load what was saved; a fit goes on only with the lanes, the seed and the kind of machine it had."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        self._saved = (checkpoint["lockstep"], checkpoint_path) if checkpoint.get("lockstep") else None
        return checkpoint

    def on_exception(self, exception: BaseException) -> None:
        """Tell the workers that wait for this one."""
        for leave in self._group.on_abort if self._group else ():
            leave()

    def teardown(self) -> None:
        """End the reductions."""
        if self._fit is not None:
            self._fit.close()
        self._fit = self._saved = None
        super().teardown()

    def _module(self) -> pl.LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    def _joined(self) -> Group:
        assert self._group is not None
        return self._group

    def _fitting(self) -> FitState:
        assert self._fit is not None
        return self._fit


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise LockstepError(
            "training_step returned no loss for a lane: every lane takes part in the mean, so return a "
            "tensor, or a dict with 'loss'"
        )
    return loss
