"""What the strategy refuses, by one worker; writes the kind and the text of each error as JSON."""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torch.utils.data import WeightedRandomSampler as Weighted

from lockstep.errors import LockstepError
from lockstep.lightning import LaneStrategy

warnings.filterwarnings("ignore")
DATA = TensorDataset(torch.arange(40.0).view(20, 2))
KEPT = tempfile.mkdtemp()


class Net(pl.LightningModule):
    def __init__(self, **options):
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 1), options.get("norm", nn.Identity())
        self.automatic_optimization, self.scale = options.get("automatic", True), options.get("scale", 1.0)
        self.lbfgs, self.returns = options.get("lbfgs", False), options.get("returns", True)

    def training_step(self, batch, batch_idx):
        loss = self.norm(self.layer(batch[0])).mean() * self.scale
        return loss if self.returns else None

    def configure_optimizers(self):
        return (torch.optim.LBFGS if self.lbfgs else torch.optim.SGD)(self.parameters(), lr=0.1)


class Early(Net):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


def loader(**options):
    return DataLoader(options.pop("data", DATA), options.pop("batch_size", 4), **options)


def fit(net=None, data=None, ckpt=None, lanes=4, **options):
    options = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, **options}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "devices": 1}
    trainer = pl.Trainer(strategy=LaneStrategy(lanes), **options, **quiet)
    trainer.fit(net or Net(), loader() if data is None else data, ckpt_path=ckpt)
    return trainer


def with_more_workers():
    strategy = LaneStrategy(2)
    strategy.parallel_devices = [torch.device("cpu")] * 3
    strategy.setup_environment()


CASES = {
    "manual": lambda: fit(Net(automatic=False)),
    "sync_batchnorm": lambda: fit(sync_batchnorm=True),
    "SyncBatchNorm": lambda: fit(Net(norm=nn.SyncBatchNorm(1))),
    "before_transfer": lambda: fit(Early()),
    "LBFGS": lambda: fit(Net(lbfgs=True)),
    "no_loss": lambda: fit(Net(returns=False)),
    "not_finite": lambda: fit(Net(scale=float("nan"))),
    "iterable": lambda: fit(data=loader(data=Stream())),
    "batch": lambda: fit(data=loader(batch_size=6)),
    "batch_sampler": lambda: fit(data=DataLoader(DATA, batch_sampler=[[0, 1, 2, 3]])),
    "distributed": lambda: fit(data=loader(sampler=DistributedSampler(DATA, 1, 0))),
    "generator": lambda: fit(data=loader(sampler=Weighted([1.0] * 20, 20, generator=torch.Generator()))),
    "no_loader": lambda: fit(data=[[torch.zeros(4, 2)]]),
    "two_loaders": lambda: fit(data=[loader(), loader()]),
    "lanes": lambda: LaneStrategy(3),
    "ddp_option": lambda: LaneStrategy(4, find_unused_parameters=True),
    "workers": with_more_workers,
    "other_lanes": lambda: fit(ckpt=f"{KEPT}/kept.ckpt", lanes=2, max_epochs=2),
    "other_batch": lambda: fit(ckpt=f"{KEPT}/mid.ckpt", data=loader(batch_size=8), max_epochs=2),
}


def main():
    trainer = fit()
    trainer.save_checkpoint(f"{KEPT}/kept.ckpt")
    keep = pl.callbacks.ModelCheckpoint(KEPT, "mid", every_n_train_steps=3)
    fit(enable_checkpointing=True, callbacks=[keep])
    found = {}
    for name, case in CASES.items():
        try:
            case()
            found[name] = ["nothing", ""]
        except LockstepError as error:
            found[name] = [type(error).__name__, str(error)]
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
