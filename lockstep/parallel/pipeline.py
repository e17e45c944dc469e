"""A model cut into the stages of a pipeline, for training and for evaluation; each worker keeps its own part.

The cuts are found with one lane of fixed images. Evaluation has a graph of its own, since a model may compute
something else there; its cuts are those of training, as its layers say.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from lockstep.comm.mesh import Mesh
from lockstep.errors import ModelError
from lockstep.kernels.numerics import half_precision
from lockstep.models.tensors import buffers_kept, has_values, replace_tensors
from lockstep.parallel.cut import Trial, choose_cuts, named_cuts, share_of_work, try_lane
from lockstep.parallel.model_graph import ModelGraph
from lockstep.parallel.schedule import Position
from lockstep.parallel.shard.gathered_model import GatheredModel
from lockstep.parallel.shard.sharded_model import blocks_by_use
from lockstep.parallel.stage import Stage
from lockstep.spec.plan import Plan


@dataclass(frozen=True)
class Pipeline:
    """This worker's stage of a model, in training and in evaluation; and what all stages are."""

    training: Stage
    evaluation: Stage
    schedule: str
    draws: bool  # whether the model draws from torch's generator, whose state then goes from stage to stage
    told: list[str]  # a line for each stage
    cuts: list[int]  # the places in the graph of training before which it is cut

    def recut(
        self, model: nn.Module, images: Tensor, half: torch.dtype | None, split: ModelGraph | None = None
    ) -> Pipeline:
        """The same for lanes of other images, of as many samples as they are; evaluation stays as it is."""
        graph, trial = _try(model.train(), images, half, "counted", split)
        return replace(self, training=Stage(graph, trial, self.cuts, self.position.number))

    @property
    def position(self) -> Position:
        """Which stage this is."""
        return self.training

    @property
    def names(self) -> set[str]:
        """Names of the parameters and buffers that it keeps."""
        return self.training.names

    @property
    def gathered(self) -> GatheredModel | None:
        """The model whose parameters are gathered block by block, if they are shared."""
        return self.training.gathered

    def share(self, model: nn.Module, most_mb: float) -> list[list[str]]:
        """The names of the parameters of blocks of at most so many megabytes, in the order of use."""
        return blocks_by_use(model, self.training.calls, most_mb)

    def gather(self, gathered: GatheredModel) -> None:
        """Gather parameters, in training and in evaluation."""
        self.training.gathered = self.evaluation.gathered = gathered


def cut_model(
    model: nn.Module,
    images: tuple[Tensor, Tensor],
    half: torch.dtype | None,
    plan: Plan,
    mesh: Mesh,
    split: ModelGraph | None = None,
) -> Pipeline:
    """Cut a model; `images` are those of a lane and of evaluation. A collective: worker 0 chooses the cuts.

    `split` are its calls if layers are over several workers.
    """
    number = mesh.pipeline.rank
    graph, trial = _try(model.train(), images[0], half, plan.cost if plan.pipeline > 1 else "counted", split)
    cuts = _choose(graph, trial, plan)
    cuts = json.loads(mesh.world.broadcast_bytes(json.dumps(cuts).encode()))  # measured times differ
    training = Stage(graph, trial, cuts, number)
    with torch.no_grad():
        eval_graph, eval_trial = _try(model.eval(), images[1], half, "counted")
    places = _same_cuts(graph, cuts, eval_graph, eval_trial)
    evaluation = Stage(eval_graph, eval_trial, places, number)
    missing = evaluation.uses - training.names - {value.key for value in evaluation.received}
    if missing:
        raise ModelError(
            f"plan.pipeline={plan.pipeline}: in evaluation stage {number} uses '{min(missing)}', which is "
            "another stage's in training: name other cuts (--plan …,cuts=LAYER)"
        )
    model.train()
    draws = trial.draws or eval_trial.draws
    return Pipeline(training, evaluation, plan.schedule, draws, _tell(graph, trial, cuts), cuts)


def cut_for_evaluation(
    model: nn.Module, images: Tensor, half: torch.dtype | None, plan: Plan, mesh: Mesh
) -> Pipeline:
    """Cut a model that is only evaluated, and may have no memory yet: all of it on `meta`."""
    with torch.no_grad():
        graph, trial = _try(model.eval(), images, half, "counted")
    cuts = _choose(graph, trial, plan)
    stage = Stage(graph, trial, cuts, mesh.pipeline.rank)
    return Pipeline(stage, stage, plan.schedule, trial.draws, _tell(graph, trial, cuts), cuts)


def keep_part(model: nn.Module, names: set[str]) -> None:
    """Free the parameters and buffers with other names: they become tensors without memory, on `meta`."""
    mine = {
        id(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()] if name in names
    }
    replace_tensors(model, lambda _, t: None if id(t) in mine else torch.empty_like(t, device="meta"))


def forget_values(model: nn.Module, device: torch.device) -> None:
    """Give a model of which a part was kept memory for all of it; NaN stands for what is not known."""

    def unknown(name: str, tensor: Tensor) -> Tensor | None:
        if has_values(tensor):
            return None
        value = float("nan") if tensor.is_floating_point() else 0
        return torch.full_like(tensor, value, device=device)

    replace_tensors(model, unknown)


def _try(
    model: nn.Module, images: Tensor, half: torch.dtype | None, cost: str, graph: ModelGraph | None = None
) -> tuple[ModelGraph, Trial]:
    """The graph of a model in its present mode, and a lane through it; nothing of the model changes."""
    device = images.device
    streams = [device] if device.type == "cuda" else []
    with buffers_kept(model), torch.random.fork_rng(streams), half_precision(device, half):
        graph = graph or ModelGraph(model)
        # autocast casts a parameter once for all calls, so their gradients add up in half precision
        return graph, try_lane(graph, images, cost, keeps_shared=half is not None)


def _choose(graph: ModelGraph, trial: Trial, plan: Plan) -> list[int]:
    """The cuts that the plan names, or those that balance the stages."""
    labels = [graph.label(place) for place in range(len(graph.calls))]
    if plan.cuts:
        return named_cuts(labels, trial.allowed, plan.cuts)
    return choose_cuts(trial.costs, trial.allowed, plan.pipeline)


def _same_cuts(graph: ModelGraph, cuts: list[int], other: ModelGraph, trial: Trial) -> list[int]:
    """The cuts of another graph of a model: each module is in the stage that it has in the first graph."""
    stages = {graph.label(place): sum(cut <= place for cut in cuts) for place in range(len(graph.calls))}
    is_module = [node.op == "call_module" for node in other.calls]
    found, least = [], 0
    for stage in range(1, len(cuts) + 1):
        later = [
            place
            for place in range(len(other.calls))
            if is_module[place] and stages.get(other.label(place), 0) >= stage
        ]
        first = later[0] if later else len(other.calls)
        ways = [p for p in trial.allowed if least < p <= first and not any(is_module[p:first])]
        if not ways:
            name = other.label(min(first, len(is_module) - 1))
            raise ModelError(
                f"plan: in evaluation the model cannot be cut before '{name}', where training has a cut: "
                "name another (--plan …,cuts=LAYER)"
            )
        found.append(ways[-1])
        least = found[-1]
    return found


def _tell(graph: ModelGraph, trial: Trial, cuts: list[int]) -> list[str]:
    """What each stage begins with, its share of the cost, and what it sends."""
    ends = [0, *cuts, len(graph.calls)]
    lines = []
    for number, (first, stop) in enumerate(pairwise(ends)):
        share = share_of_work(trial.costs, range(first, stop))
        sent = [trial.tensors[key].form.num_bytes for key in graph.crossing(stop) if key in trial.tensors]
        told = f", {sum(sent) / 1e6:.2f} MB a lane go on" if stop < ends[-1] else ""
        lines.append(f"stage {number}: from {graph.label(first)}, {share}{told}")
    return lines
