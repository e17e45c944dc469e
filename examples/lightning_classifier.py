"""A plain LightningModule: one hash by 1, 2, 3 or 4 workers. `--strategy ddp` shows that DDP has several."""

import argparse
import random
import warnings

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from lockstep.lightning import LaneStrategy

LANES, BATCH, CLASSES = 4, 48, 4
warnings.filterwarnings("ignore", ".*LeafSpec")  # Lightning 2.6 uses what torch 2.13 wants to drop


class Stripes(Dataset):
    """Stripes in one of four directions, in noise; shifted and flipped at random."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        label = number % CLASSES
        rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        phase = (rows, columns, rows + columns, rows - columns)[label]
        image = torch.sin(phase * 1.5 + number) + 0.5 * torch.randn(16, 16)
        return image.flip(0, 1).roll(random.randrange(4), 1)[None], label


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        features = nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2)
        self.net = nn.Sequential(*features, nn.Flatten(), nn.Dropout(0.2), nn.Linear(12 * 49, CLASSES))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        outputs = self.net(images)
        accuracy = (outputs.argmax(1) == labels).float().mean()
        self.log_dict({"val_loss": F.cross_entropy(outputs, labels), "val_accuracy": accuracy})

    def configure_optimizers(self) -> tuple[list, list]:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--strategy", choices=["ours", "ddp"], default="ours")
    options = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    strategy, batch, keep = LaneStrategy(LANES), BATCH, ModelCheckpoint(monitor="val_loss")
    if options.strategy == "ddp":
        strategy, batch = DDPStrategy(cluster_environment=LightningEnvironment()), BATCH // options.workers
    places = {"accelerator": "cpu", "devices": options.workers, "strategy": strategy}
    logs = {"logger": CSVLogger("logs"), "log_every_n_steps": 1, "callbacks": [keep]}
    trainer = pl.Trainer(max_epochs=2, gradient_clip_val=1.0, **places, **logs, enable_progress_bar=False)
    model, val = Classifier(), DataLoader(Subset(Stripes(), range(70)), 32)
    trainer.fit(model, DataLoader(Stripes(), batch, shuffle=True), val)
    if trainer.is_global_zero:
        print(f"validation loss {keep.best_model_score:.3f}", LaneStrategy.hash_of(model), sep="\n")


if __name__ == "__main__":
    main()
