"""classifier_plain.py with lanes: the same bits from 1, 2, 3 or 4 workers, killed and resumed."""

import hashlib
import os
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import data

from lockstep import lanes

EPOCHS, BATCH, CLASSES = 2, 48, 4


class Stripes(data.Dataset):
    """Stripes in one of four directions, in noise; flipped and shifted at random."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        label = number % CLASSES
        rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        phase = (rows, columns, rows + columns, rows - columns)[label]
        image = torch.sin(phase * 1.5 + number) + 0.5 * torch.randn(16, 16)
        image = image.roll(random.randrange(4), 1)
        return image.flip(0, 1)[None] if random.random() < 0.5 else image[None], label


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.Linear(12 * 49, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def digest(*modules: nn.Module) -> str:
    tensors = [tensor for module in modules for tensor in module.state_dict().values()]
    return hashlib.sha256(b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors)).hexdigest()


def report(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def main() -> None:
    torch.manual_seed(0)
    stripes, model = Stripes(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(stripes) // BATCH)
    session = lanes.join(model, optimizer, schedule, lanes=4)
    for epoch in session.epochs(EPOCHS, checkpoint="classifier.safetensors", every=3):
        for batch in session.loader(stripes, BATCH):
            with session.step() as step:
                for images, labels in batch:
                    loss = F.cross_entropy(model(images), labels)
                    step.backward(loss)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            schedule.step()
        report(f"epoch {epoch}: loss {step.loss:.3f}")
    report(digest(model))


if __name__ == "__main__":
    main()
