"""dcgan_plain.py with lanes: the same bits from 1, 2, 3 or 4 workers, killed and resumed."""

import hashlib
import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import data

from lockstep import lanes

EPOCHS, BATCH, NOISE = 2, 32, 8


class Waves(data.Dataset):
    """Waves of random height."""

    def __len__(self) -> int:
        return 128

    def __getitem__(self, number: int) -> Tensor:
        return torch.sin(torch.arange(16.0) * (1 + number % 3) / 2)[None, None].expand(
            1, 16, 16
        ) * torch.rand(1)


class Generator(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.ConvTranspose2d(NOISE, 16, 4),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.ConvTranspose2d(16, 8, 4, 2, 1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.ConvTranspose2d(8, 1, 4, 2, 1),
            nn.Tanh(),
        )


class Critic(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv2d(8, 16, 4, 2, 1),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(0.2),
            nn.Conv2d(16, 1, 4),
            nn.Flatten(0),
        )


def judge(outputs: Tensor, num_real: int) -> Tensor:
    """The loss of a critic whose first inputs are real, or of a generator that wants them to seem so."""
    are_real = (torch.arange(len(outputs), device=outputs.device) < num_real).float()
    return F.binary_cross_entropy_with_logits(outputs, are_real)


def digest(*modules: nn.Module) -> str:
    tensors = [tensor for module in modules for tensor in module.state_dict().values()]
    return hashlib.sha256(b"".join(tensor.cpu().numpy().tobytes() for tensor in tensors)).hexdigest()


def report(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def main() -> None:
    torch.manual_seed(0)
    waves, generator, critic = Waves(), Generator(), Critic()
    optimizer_d = torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.999))
    session = lanes.join(generator, critic, optimizer_d, optimizer_g, lanes=4)
    for epoch in session.epochs(EPOCHS, checkpoint="dcgan.safetensors", every=3):
        for batch in session.loader(waves, BATCH):
            with session.step(optimizer_d) as step:
                for real in batch:
                    fake = generator(torch.randn(len(real), NOISE, 1, 1, device=real.device)).detach()
                    loss = judge(critic(torch.cat([real, fake])), len(real))
                    step.backward(loss)
            with session.step(optimizer_g) as step:
                for real in batch:
                    noise = torch.randn(len(real), NOISE, 1, 1, device=real.device)
                    loss = judge(critic(generator(noise)), len(real))
                    step.backward(loss)
        report(f"epoch {epoch} is done")
    report(digest(generator, critic))


if __name__ == "__main__":
    main()
