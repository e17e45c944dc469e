"""A Plan: how a run is dealt to workers; it changes no bit, so it is no part of the identity.

workers = data × pipeline × spatial × channel. Along `data` every worker computes some lanes of a batch, along
`pipeline` some layers of the model, along `spatial` some rows of an image, along `channel` some channels of a
layer. Stage p, number d along `data`, s along `spatial` and c along `channel` are rank
((p·D + d)·S + s)·C + c: stages send the fewest bytes and channels the most, so neighbours in rank, which are
often on one host, are along `channel`. With `shard` the workers along `data` also share what they would all
keep: each has a part of it. With `layers` they share some fully connected layers, by channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

from lockstep.errors import SpecError, unknown
from lockstep.spec.field import check_fields
from lockstep.spec.run_file import read_toml

AXES = ("data", "pipeline", "spatial", "channel")
NAMES = ("cuts", "layers")  # lists of names, with / between them
SCHEDULES = ("1f1b", "gpipe")
LAYER_WAYS = ("channel", "data")
COSTS = ("measured", "counted")
SHARDS = ("none", "optimizer", "gradients", "parameters")  # each shares what those before it share, too


@dataclass(frozen=True)
class Plan:
    """The number of workers along each axis, and how a pipeline is cut and runs."""

    data: int = 0  # 0: as many as there are workers for
    pipeline: int = 1
    spatial: int = 1  # an image's rows over workers
    channel: int = 1  # a layer's channels over workers
    shard: str = "none"  # what the workers along `data` share instead of keeping it each
    replicas: int = 1  # how many workers keep each share
    schedule: str = "1f1b"
    cost: str = "measured"  # by which stages are balanced
    cuts: tuple[str, ...] = ()  # the layer that each stage but the first begins with; empty: by cost
    layers: tuple[str, ...] = ()  # patterns of layers that are by channel over `data`, or not: PATTERN:data

    def __post_init__(self) -> None:
        check_fields(self, "plan")
        for axis in (*AXES, "replicas"):
            if getattr(self, axis) < (axis != "data"):
                raise SpecError(f"plan.{axis}={getattr(self, axis)} must be a whole number from 1")
        for key, known in (("shard", SHARDS), ("schedule", SCHEDULES), ("cost", COSTS)):
            if getattr(self, key) not in known:
                raise SpecError(f"plan.{key}: {unknown(key, getattr(self, key), known)}")
        if self.replicas > 1 and self.shard == "none":
            raise SpecError(
                f"plan.replicas={self.replicas} is how many workers keep each share: give shard, too; "
                "without it every worker along data has the same"
            )
        if self.cuts and len(self.cuts) != self.pipeline - 1:
            raise SpecError(
                f"plan.cuts={'/'.join(self.cuts)} names {len(self.cuts)} cuts, and pipeline={self.pipeline} "
                f"has {self.pipeline - 1}: name the first layer of every stage but the first"
            )

        others = [
            key
            for key in ("pipeline", "spatial", "channel", "shard")
            if getattr(self, key) not in (1, "none")
        ]
        if self.layers and others:
            raise SpecError(
                f"plan.layers={'/'.join(self.layers)} goes with data alone, not with {' and '.join(others)}: "
                "leave one of them out"
            )

    @property
    def workers(self) -> int | None:
        """The number of workers that the plan asks for; None if it leaves `data` open."""
        return self.data * self.least if self.data else None

    @property
    def least(self) -> int:
        """The number of workers with one along `data`; all numbers that come out are its multiples."""
        return self.pipeline * self.cells

    @property
    def cells(self) -> int:
        """The number of workers that compute each lane of a stage together."""
        return self.spatial * self.channel

    @property
    def splits_layers(self) -> bool:
        """Whether several workers compute each layer together; each of them has all of its values."""
        return self.cells > 1

    @property
    def splits_state(self) -> bool:
        """Whether a worker has only a part of the run's state: some layers, or a share of what they keep."""
        return self.pipeline > 1 or self.shares_data

    @property
    def shares_data(self) -> bool:
        """Whether each worker along `data` keeps a part of what all of them would keep without the plan."""
        return self.shard != "none" or bool(self.layers)

    @property
    def splits_model(self) -> bool:
        """Whether no worker computes a lane of the whole model."""
        return self.pipeline > 1 or self.splits_layers

    @property
    def cuts_model(self) -> bool:
        """Whether a worker never has all of the model's values, or of a lane's, at one time."""
        return self.splits_model or self.shard == "parameters" or bool(self.layers)

    @property
    def splits(self) -> bool:
        """Whether it splits more than the batch; then only some numbers of workers come out."""
        return self.splits_state or self.splits_layers

    @property
    def shards_gradients(self) -> bool:
        """Whether gradients are shared, and given away as soon as they are known."""
        return self.shard in ("gradients", "parameters")

    def for_workers(self, workers: int) -> Plan:
        """The same plan with `data` filled in; an error with the equation if it does not come out."""
        data = self.data or workers // self.least
        if data * self.least != workers:
            raise SpecError(
                f"--plan {self}: workers = {self._equation}, and the number of workers is {workers}: "
                f"{self._fix(workers)}"
            )
        if self.shard != "none" and data // self.replicas < 2:
            raise SpecError(
                f"--plan {self}: shares = data / replicas = {data} / {self.replicas}, which is less than 2: "
                f"give {2 * self.replicas * self.least} workers, or leave shard out"
            )
        if self.layers and data < 2:
            raise SpecError(
                f"--plan {self}: layers are over {data} worker: give 2 or more, or leave layers out"
            )
        return replace(self, data=data)

    @property
    def folded(self) -> Plan:
        """The plan with the workers of a lane along `data`: each has what it takes to compute others."""
        return replace(self, data=self.data * self.cells, spatial=1, channel=1, layers=())

    def fits(self, workers: int, lanes: int) -> bool:
        """Whether it comes out for so many workers, and each has a lane."""
        return self.most(workers) == workers and workers <= lanes * self.least

    def most(self, workers: int) -> int:
        """The largest number of workers, of so many, for which it comes out; 0 if there is none."""
        for number in range(workers, 0, -1):
            with suppress(SpecError):
                self.for_workers(number)
                return number
        return 0

    @property
    def _equation(self) -> str:
        """The product of the axes in the plan, in names and in numbers."""
        more = [axis for axis in AXES[1:] if getattr(self, axis) > 1]
        shown = ["data", *(more or ["pipeline"])]
        numbers = [getattr(self, axis) or axis for axis in shown]
        result = f" = {prod(numbers)}" if self.data else ""
        return f"{' × '.join(shown)} = {' × '.join(map(str, numbers))}{result}"

    def _fix(self, workers: int) -> str:
        if self.workers:
            return f"start {self.workers}, or leave `data` out of the plan"
        fewer, more = workers // self.least * self.least, -(-workers // self.least) * self.least
        return f"start {more}" if not fewer else f"start {fewer} or {more}"

    def __str__(self) -> str:
        """As `read_plan` reads it; what is left at its default is left out."""
        shown = {key: getattr(self, key) for key in (*AXES, "replicas")}
        shown = {key: value for key, value in shown.items() if value > (key != "data")}
        words = [f"{key}={value}" for key, value in shown.items()]
        words += [
            f"{key}={getattr(self, key)}"
            for key in ("shard", "schedule", "cost")
            if getattr(self, key) != getattr(Plan, key)
        ]
        words += [f"{key}={'/'.join(names)}" for key in NAMES if (names := getattr(self, key))]
        return ",".join(words) or "data=1"


def read_plan(text: str) -> Plan:
    """A plan from `data=2,pipeline=2`, or from a TOML file with such keys."""
    if text.endswith(".toml"):
        table = read_toml(Path(text))
        return _from_table({key: table[key] for key in table if key != "predicted"}, text)
    table = {}
    for word in text.split(","):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not value:
            raise SpecError(f"--plan {text}: '{word}' must be KEY=VALUE, as in data=2,pipeline=2")
        if key in table:
            raise SpecError(f"--plan {text}: {key} stands twice")
        table[key] = value.split("/") if key in NAMES else int(value) if value.isdecimal() else value
    return _from_table(table, text)


def read_plans(texts: Sequence[str], replicas: int) -> tuple[Plan, ...]:
    """Several plans; in those that have shares, so many workers keep each, unless they say it themselves."""
    plans = [read_plan(text) for text in texts]
    if replicas != 1 and plans[0].shard == "none":
        raise SpecError(f"--replicas {replicas} needs --plan with shard=optimizer, gradients or parameters")
    return tuple(
        plan if plan.shard == "none" or plan.replicas > 1 else replace(plan, replicas=replicas)
        for plan in plans
    )


def _from_table(table: Mapping[str, Any], source: str) -> Plan:
    known = [field.name for field in fields(Plan)]
    for key in table:
        if key not in known:
            raise SpecError(f"--plan {source}: {unknown('key', key, known)}")
    if table.get("data") == 0:
        raise SpecError(
            f"--plan {source}: data=0 must be a whole number from 1; leave it out to use all workers"
        )
    layers = table.get("layers", ())
    return Plan(
        **{**table, "layers": _read_layers(layers, source) if isinstance(layers, Mapping) else layers}
    )


def _read_layers(layers: Mapping[str, Any], source: str) -> list[str]:
    """The patterns of a table, as `layers` has them."""
    for pattern, way in layers.items():
        if way not in LAYER_WAYS:
            raise SpecError(f"--plan {source}: layers.{pattern}: {unknown('way', str(way), LAYER_WAYS)}")
    return [pattern if way == "channel" else f"{pattern}:{way}" for pattern, way in layers.items()]
