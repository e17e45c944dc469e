"""Fits of one script by one number of workers, one after another; writes what must be the same for all.

python fits.py WORKERS OUTPUT [CHECKPOINT]   (or under torchrun; CHECKPOINT is one that another number saved)
"""

import json
import random
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler
from torchmetrics.classification import MulticlassAccuracy

from lockstep.lightning import LaneStrategy

warnings.filterwarnings("ignore", ".*LeafSpec")


class Stripes(Dataset):
    """Images that are drawn and augmented anew each time; the number of one is its label."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        image = torch.sin(torch.arange(144.0).view(1, 12, 12) * (1 + number % 3)) + torch.randn(1, 12, 12)
        return {"image": image.roll(random.randrange(3), 2), "label": number % 3}


class Net(pl.LightningModule):
    """Batch norm, dropout, a metric, logs of every kind, random numbers in hooks, gradients that are seen."""

    def __init__(self, plateau=False):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(800, 3)
        )
        self.unused = nn.Linear(2, 2)
        self.accuracy, self.plateau, self.seen = MulticlassAccuracy(3), plateau, []

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return {**batch, "image": batch["image"] + 0.1 * torch.randn_like(batch["image"])}

    def on_train_batch_start(self, batch, batch_idx):
        self.seen.append([batch_idx, float(torch.rand(())), random.random()])  # the same on every worker

    def training_step(self, batch, batch_idx):
        outputs = self.net(batch["image"])
        loss = F.cross_entropy(outputs, batch["label"])
        self.accuracy(outputs, batch["label"])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("largest", outputs.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.log("samples", float(len(outputs)), reduce_fx="sum")
        return {"loss": loss, "outputs": outputs}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert len(outputs["outputs"]) == sum(lane.samples for lane in batch.lanes)
        self.log("after", float(batch_idx), on_epoch=True)

    def on_after_backward(self):
        assert self.unused.weight.grad is None
        self.seen.append(self.net[0].weight.grad.abs().sum().item())

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        outputs = self.net(batch["image"])
        self.log("val_loss", F.cross_entropy(outputs, batch["label"]), on_step=True, on_epoch=True)
        self.log("val_count", float(len(outputs)), reduce_fx="sum")
        return outputs.argmax(1)

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        kinds, steps = torch.optim.lr_scheduler, self.trainer.estimated_stepping_batches
        schedule = {"scheduler": kinds.OneCycleLR(optimizer, 0.02, steps), "interval": "step"}
        if self.plateau:
            schedule = {"scheduler": kinds.ReduceLROnPlateau(optimizer), "monitor": "val_loss_epoch"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def trainer_of(workers, folder, **options):
    options = {"max_epochs": 2, "logger": CSVLogger(folder), "log_every_n_steps": 1, **options}
    options.setdefault("strategy", LaneStrategy(4, seed=3))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", devices=workers, default_root_dir=folder, **options, **quiet)


def metrics_of(folder):
    return sorted(path.read_text() for path in Path(folder).rglob("metrics.csv"))


def fit_plain(workers, folder, resumed=None):
    """From the start with checkpoints in the middle of epochs; or from one of these."""
    pl.seed_everything(1, verbose=False)
    net = Net()
    keep = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    trainer = trainer_of(workers, folder, callbacks=[keep], gradient_clip_val=0.5)
    train = DataLoader(Stripes(65), 12, shuffle=True, num_workers=1, persistent_workers=True)
    # a batch of one sample; more workers than samples in the last batch
    vals = [DataLoader(Stripes(7), 1), DataLoader(Stripes(9), 8)] if resumed is None else None
    trainer.fit(net, train, vals, ckpt_path=resumed)
    found = {"hash": LaneStrategy.hash_of(net), "seen": net.seen, "steps": trainer.global_step}
    if resumed is None:
        found["tested"] = trainer.test(net, DataLoader(Stripes(10), 4), verbose=False)
        found["metrics"] = metrics_of(folder)
    return found


def fit_hard(workers, folder):
    """bf16, accumulated batches, a sampler of the user's own, decisions by validation; stops early."""
    pl.seed_everything(1, verbose=False)
    net = Net(plateau=True)
    stop = EarlyStopping("val_loss_epoch", patience=0, min_delta=0.05)
    best = ModelCheckpoint(folder, "best-{epoch}", monitor="val_loss_epoch")
    options = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "limit_val_batches": 2}
    trainer = trainer_of(workers, folder, callbacks=[stop, best], max_epochs=4, **options)
    sampler = WeightedRandomSampler([1.0 + number % 5 for number in range(40)], 40)
    trainer.fit(net, DataLoader(Stripes(40), 8, sampler=sampler), DataLoader(Stripes(30), 6))
    decided = [best.best_model_path.rpartition("/")[2], trainer.current_epoch, float(best.best_model_score)]
    return {"hash": LaneStrategy.hash_of(net), "decided": decided, "metrics": metrics_of(folder)}


def fit_ddp(workers, folder):
    pl.seed_everything(1, verbose=False)
    environments = TorchElasticEnvironment, LightningEnvironment
    place = next(kind() for kind in environments if kind is LightningEnvironment or kind.detect())
    net, strategy = Net(), DDPStrategy(cluster_environment=place, find_unused_parameters=True)
    net.on_train_batch_end = lambda *given: None
    trainer_of(workers, folder, strategy=strategy).fit(
        net, DataLoader(Stripes(65), 12 // workers, shuffle=True)
    )
    return {"hash": LaneStrategy.hash_of(net)}


def main():
    workers, folder = int(sys.argv[1]), Path(sys.argv[2])
    found = {"plain": fit_plain(workers, folder / "plain")}
    resumed = sys.argv[3] if len(sys.argv) > 3 else str(folder / "plain" / "step=3.ckpt")
    found["resumed"] = fit_plain(workers, folder / "resumed", resumed)
    found["hard"] = fit_hard(workers, folder / "hard")
    if workers < 4:
        found["ddp"] = fit_ddp(workers, folder / "ddp")
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
