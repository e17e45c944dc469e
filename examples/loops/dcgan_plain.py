"""A small DCGAN with its two optimizers: plain PyTorch, or DDP."""

import hashlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import data

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
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    waves, generator, critic = Waves(), Generator(), Critic()
    optimizer_d = torch.optim.Adam(critic.parameters(), 1e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), 1e-3, betas=(0.5, 0.999))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        generator, critic = DistributedDataParallel(generator), DistributedDataParallel(critic)
    sampler = data.DistributedSampler(waves) if "RANK" in os.environ else data.RandomSampler(waves)
    loader = data.DataLoader(waves, BATCH // workers, sampler=sampler, drop_last=True)
    for epoch in range(EPOCHS):
        for real in loader:
            optimizer_d.zero_grad()
            fake = generator(torch.randn(len(real), NOISE, 1, 1, device=real.device)).detach()
            loss = judge(critic(torch.cat([real, fake])), len(real))
            loss.backward()
            optimizer_d.step()
            optimizer_g.zero_grad()
            noise = torch.randn(len(real), NOISE, 1, 1, device=real.device)
            loss = judge(critic(generator(noise)), len(real))
            loss.backward()
            optimizer_g.step()
        report(f"epoch {epoch} is done")
    report(digest(generator, critic))


if __name__ == "__main__":
    main()
