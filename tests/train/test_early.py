"""Models and losses that ask for gradients themselves, hook parameters late or give none: the same bits."""

import copy

import pytest
import torch
from torch import nn
from world import in_threads

from lockstep.comm.mesh import plain_mesh
from lockstep.comm.tree import worker_lanes
from lockstep.data.loader import Lanes
from lockstep.lower.choose import lower_for_host
from lockstep.runs.train_state import TrainState
from lockstep.spec import Optimizer, Run, Train
from lockstep.train.evaluation.host_evaluate import Evaluator
from lockstep.train.step import Step

pytestmark = pytest.mark.gloo
LANES, SAMPLES = 4, 3
RUN = Run(train=Train(batch=LANES * SAMPLES, lanes=LANES), optimizer=Optimizer("momentum", lr=0.1))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 9), nn.Linear(9, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.c(self.b(self.a(x.flatten(1)).tanh()).tanh())


class LateHook(Layers):
    """Scales a gradient by a hook that only its forward registers."""

    handle = None

    def forward(self, x):
        if self.handle:
            self.handle.remove()
        self.handle = self.b.weight.register_hook(lambda grad: grad * 0.5)
        return super().forward(x)


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x + weight.sum() * 0

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Without(Layers):
    """One parameter takes part and gets no gradient."""

    def __init__(self):
        super().__init__()
        self.d = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return NoGradient.apply(super().forward(x), self.d)


def entropy(logits, labels):
    return nn.functional.cross_entropy(logits, labels)


def train(model, loss, workers, bucket_mb):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(LANES, SAMPLES, 1, 2, 3, generator=generator)
    labels = torch.randint(0, 4, (LANES, SAMPLES), generator=generator)

    def work(group):
        own = worker_lanes(LANES, group.size, group.rank)
        mine = copy.deepcopy(model)
        part = slice(own.start, own.stop)
        lanes = Lanes(images[part].flatten(0, 1), labels[part].flatten(), len(own), own.start)
        state = TrainState.begin(mine, RUN.optimizer, 0.0)
        chosen = loss(mine)
        step = Step(
            RUN,
            state,
            lower_for_host(mine, chosen, seed=0, half=None),
            10,
            plain_mesh(group),
            bucket_mb=bucket_mb,
        )
        results = [step(lanes) for _ in range(3)]
        step.close()
        return state.hashes(), [result.loss for result in results]

    found = in_threads(workers, work)
    assert all(other == found[0] for other in found)
    return found[0]


def penalized(names):
    """Cross entropy plus the squared norm of its own gradient by some parameters."""

    def make(model):
        chosen = [parameter for name, parameter in model.named_parameters() if name in names]

        def loss(logits, labels):
            plain = entropy(logits, labels)
            grads = torch.autograd.grad(plain, chosen, create_graph=True)
            return plain + 0.1 * sum(grad.square().sum() for grad in grads)

        return loss

    return make


CASES = {
    "penalty on the last layer": (Layers, penalized({"c.weight", "c.bias"})),
    "penalty on all": (Layers, penalized({f"{a}.{b}" for a in "abc" for b in ("weight", "bias")})),
    "hook in forward": (LateHook, lambda model: entropy),
    "no gradient": (Without, lambda model: entropy),
}


@pytest.mark.parametrize("bucket_mb", [1e-4, 2e-4, 4e-4, 25.0])
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_workers_and_any_bucket(name, bucket_mb):
    make, loss = CASES[name]
    torch.manual_seed(0)
    model = make()
    assert train(model, loss, 3, bucket_mb) == train(model, loss, 1, 25.0)


def test_an_evaluation_that_draws_random_numbers_gives_the_same_at_any_number_of_workers():
    class Split:
        def __len__(self):
            return 23

        def read(self, ids):
            return ids.float().view(-1, 1, 1, 1).expand(-1, 1, 2, 3), ids % 4

    class Plain:
        def normalize(self, images):
            return images

    class Noisy(Layers):
        def forward(self, x):
            return super().forward(x + torch.randn(x.shape))

    torch.manual_seed(0)
    model = Noisy()
    found = []
    for workers in (1, 2, 5):
        for rank in range(workers):  # one after another: the stream is the process's
            blocks = range(rank, 6, workers)
            found += [
                (block, value)
                for block, value in zip(blocks, losses(model, Split(), Plain(), blocks), strict=True)
            ]
    assert len(set(found)) == 6


def losses(model, split, augment, blocks):
    """The loss of each of some blocks, as a worker that owns them finds it."""
    values = []
    group = type("Share", (), {"rank": blocks.start, "size": blocks.step})()
    group.all_gather = lambda output, tensor: values.append(tensor.clone())
    group.check = lambda: None

    def loss(logits, labels):
        return entropy(logits, labels)

    run = Run(train=Train(batch=4, lanes=1))
    evaluator = Evaluator(run, split, augment, loss, torch.device("cpu"), group)
    evaluator(model)
    return values[0][: len(blocks)].tolist()
