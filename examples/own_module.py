"""Train a module and a loss of your own, and listen to events in place of the progress bar."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lockstep
from lockstep.runs.event import EpochDone


class TinyNet(nn.Module):
    """Depthwise-separable blocks; nothing in it knows of lanes or workers."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            nn.Conv2d(16, 32, 1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.features(x).mean((2, 3))))


def focal_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy that looks away from what is easy; the mean over the samples it is given."""
    loss = F.cross_entropy(logits, labels, reduction="none")
    return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


def show(event: object) -> None:
    if isinstance(event, EpochDone):
        print(f"epoch {event.epoch + 1}: test accuracy {100 * event.eval_accuracy:.1f} %")


torch.manual_seed(0)  # your module starts from the weights it has when you hand it over
run = lockstep.Run(
    data=lockstep.Data("shapes", options={"size": 20, "classes": 4, "num_train": 2048, "num_test": 256}),
    train=lockstep.Train(epochs=5, batch=128, lanes=4),
    optimizer=lockstep.Optimizer("adamw", lr=1e-2, weight_decay=0.01),
)
result = lockstep.train(run, model=TinyNet(4), loss=focal_loss, on_event=show)
again = lockstep.load(result.directory, model=TinyNet(4))
print(again(torch.zeros(1, 1, 20, 20)).shape)
