"""unet_plain.py with lanes: the same bits from 1, 2, 3 or 4 workers, killed and resumed."""

import hashlib
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import data

from lockstep import lanes

EPOCHS, BATCH = 2, 16


class Discs(data.Dataset):
    """A bright disc in noise, and its mask."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
        x, y = 4 + number % 8, 4 + number // 8 % 8
        mask = ((rows - x) ** 2 + (columns - y) ** 2 < 12).float()[None]
        return {"image": mask + 0.4 * torch.randn(1, 16, 16), "mask": mask}


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = block(1, 8), block(8, 16), block(16, 16)
        self.up2, self.up1, self.head = block(32, 8), block(16, 8), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        x = F.interpolate(self.middle(F.max_pool2d(two, 2)), scale_factor=2.0)
        x = F.interpolate(self.up2(torch.cat([x, two], 1)), scale_factor=2.0)
        return self.head(self.up1(torch.cat([x, one], 1)))


def loss_of(outputs: Tensor, masks: Tensor) -> Tensor:
    """Binary cross-entropy and the Dice loss of each image."""
    shares = outputs.sigmoid()
    overlap = (shares * masks).sum((1, 2, 3)) / (shares + masks).sum((1, 2, 3))
    return F.binary_cross_entropy_with_logits(outputs, masks) + (1 - 2 * overlap).mean()


def digest(*modules: nn.Module) -> str:
    tensors = [tensor for module in modules for tensor in module.state_dict().values()]
    return hashlib.sha256(b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors)).hexdigest()


def report(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def main() -> None:
    torch.manual_seed(0)
    discs, model = Discs(), UNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    session = lanes.join(model, optimizer, lanes=4)
    for epoch in session.epochs(EPOCHS, checkpoint="unet.safetensors", every=3):
        for batch in session.loader(discs, BATCH):
            with session.step() as step:
                for sample in batch:
                    loss = loss_of(model(sample["image"]), sample["mask"])
                    step.backward(loss)
        report(f"epoch {epoch}: loss {step.loss:.3f}")
    report(digest(model))


if __name__ == "__main__":
    main()
