"""One worker through all generations: agrees with the others, trains, recovers when workers are lost.

A worker keeps its setup and state when its group changes. When workers are lost or join, all leave the group,
form the next, agree on the highest committed step, take the state from a worker that has it, and go on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lockstep.comm.everywhere import everywhere
from lockstep.comm.group import Group
from lockstep.comm.group_source import GroupSource, LeftOut
from lockstep.comm.mesh import part_of
from lockstep.data.feeding import choose_feeding
from lockstep.data.map_style import from_map_style
from lockstep.errors import GroupLost, LockstepError, SpecError
from lockstep.kernels.numerics import plain_torch, prepare_device
from lockstep.runs.checkpoint import Saved
from lockstep.runs.event import Event, Listener, Notice
from lockstep.runs.held_state import HeldParts
from lockstep.runs.journal import Journal
from lockstep.runs.kept_state import KeptState
from lockstep.runs.resume import continued_identity, open_directory, recorded_identity, reopen_directory
from lockstep.runs.train_state import TrainState
from lockstep.spec import Launch, Run
from lockstep.spec.identity import Identity
from lockstep.spec.world import World
from lockstep.train.dealt import deal, forget_part
from lockstep.train.foresight.dry_run import try_run
from lockstep.train.handshake import (
    RollCall,
    answer_roll,
    begin_parts,
    call_roll,
    compare_identities,
    give_parts,
    prove_identity,
    share_state,
)
from lockstep.train.interrupt import Interrupt
from lockstep.train.loop import Loop, Moved
from lockstep.train.preflight import explain_crowding
from lockstep.train.result import Result
from lockstep.train.setup import Given, Setup, set_up

FindGroups = Callable[[World | None, str, torch.device], GroupSource]


def fit(run: Run, launch: Launch, on_event: Listener, find_groups: FindGroups, given: Given) -> Result:
    """Train a Run from where it stopped to its end, as one of its workers; `find_groups` gives its groups."""
    launch.check_run(run)
    with plain_torch():
        # the device first: preparing it sets the number of threads for everything else
        local_rank = launch.world.local_rank if launch.world else None
        tf32 = run.train.precision == "tf32"
        try:
            device = prepare_device(launch.device, run.train.threads, local_rank, tf32)
            choose_feeding(launch)
            groups = find_groups(launch.world, launch.backend, device)
        except SpecError as error:  # a wrong flag, which all workers of a host share
            error.everywhere, error.rank = True, local_rank or 0
            raise
        # only this device: by default torch saves the state of every GPU of the host, and warns about it
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            kept = KeptState(launch.copy_every)
            return _Worker(run, launch, on_event, device, given, groups, kept).work()


@dataclass
class _Worker:
    """What a worker keeps from one generation to the next."""

    run: Run
    launch: Launch
    on_event: Listener
    device: torch.device
    given: Given
    groups: GroupSource
    kept: KeptState  # what is left of a state in parts in another generation, and copies of it
    setup: Setup | None = None
    state: TrainState | None = None  # None until it has been made or received
    journal: Journal | None = None
    is_ended: bool = False  # whether an error in `on_event` ended the run for all workers

    def work(self) -> Result:
        """Train through as many generations as it takes."""
        if self.groups.joins:
            self._prepare_to_join()
        try:
            with (interrupt := Interrupt()):
                while True:
                    if result := self._work_in_group(self.groups.next(), interrupt):
                        return result
        except LeftOut:
            raise SystemExit(0) from None  # the others train on; the launcher says so
        finally:
            if self.journal:
                self.journal.close(wait=not interrupt.is_over)

    def _work_in_group(self, group: Group, interrupt: Interrupt) -> Result | None:
        """Train in one generation; None if another one follows."""
        groups, interrupt.answers = self.groups, group.rank == 0 and not self.launch.dry_run
        try:
            result = self._train(group, interrupt)
        except GroupLost as error:
            if not groups.is_elastic:
                group.abort()
                error.rank = group.rank
                raise
            groups.drop(group)
            self._hold_part()
            return None
        except Moved:
            groups.leave(group)
            self._hold_part()
            return None
        except BaseException as error:
            if isinstance(error, LockstepError):
                error.rank = group.rank
            everywhere = getattr(error, "everywhere", False)
            if everywhere or self.is_ended:
                groups.tell_end(getattr(error, "exit_code", 1), group.rank)
            if everywhere:
                groups.leave(group)
            else:
                groups.drop(group)
            raise
        groups.leave(group)
        groups.tell_end(0, group.rank)
        return result

    def _hold_part(self) -> None:
        """Keep what this worker has of the state apart, if its part may be another in the next generation."""
        if not self.launch.splits_state(self.run):
            return
        self.kept.hold(self.state)
        self.state = None
        if self.run.train.compress == "none":  # a plan has taken the model apart
            self.setup = forget_part(self.setup, self.given)
        if self.journal:
            self.journal.close()

    def _tell(self, event: Event) -> None:
        """Call `on_event`; its error ends the run, since the next worker 0 would only raise it again."""
        try:
            self.on_event(event)
        except (Exception, SystemExit, KeyboardInterrupt):
            self.is_ended = True
            raise

    def _train(self, everyone: Group, interrupt: Interrupt) -> Result:
        """Agree with the other workers on run and state, then train on; a giver only hands over its part."""
        generation = self.groups.generation
        size = len(generation.workers) if generation else everyone.size
        held = self.kept.find(everyone)
        if everyone.rank >= size:
            give_parts(held, self.journal)
            self.kept.release()
            raise Moved
        if held.is_lost and self.journal:  # it has trained the model, which must begin again
            self.setup = forget_part(self.setup, self.given)
        group = part_of(everyone, "workers", range(size))
        roll = call_roll(group, answer_roll(self.setup, self.launch, self.state, self.journal))
        setup = self.setup if roll.agrees and self.setup else self._agree_on_setup(group)
        dealt = deal(setup, self.launch, group, generation)
        journal = self.journal = self.journal or Journal(self._tell, setup.about(), self.launch.trace)
        saved = None if roll.has_directory or self.launch.dry_run else self._open(group, journal, roll, held)
        if self.launch.splits_state(self.run):
            self.state = begin_parts(group, setup, dealt.begin, held, saved, journal)
            self.kept.begin(group, generation.nodes[:size] if generation else (), self.state)
            dealt.held, dealt.kept = held, self.kept
        else:
            state = self.state or dealt.begin()
            everywhere(group, lambda: saved.restore(state) if saved else None)
            if not roll.is_even:
                share_state(group, state, roll.source or 0)
            self.state = state
        with closing(dealt):
            if self.launch.dry_run:
                raise try_run(dealt, self.state, self.launch, self._tell)
            return Loop(dealt, self.state, self.launch, journal, interrupt, self.groups).run()

    def _agree_on_setup(self, group: Group) -> Setup:
        mine = self.setup
        recorded = everywhere(group, lambda: None if group.rank or mine else recorded_identity(self.launch))
        recorded = json.loads(group.broadcast_bytes(json.dumps(recorded).encode()))
        setup = everywhere(group, lambda: mine or self._build(recorded, tells=group.rank == 0))
        if mine is None:
            setup.warnings += explain_crowding(self.launch, self.run, self.device)
        setup.identity = everywhere(
            group, lambda: setup.identity if group.rank else continued_identity(setup.about(), self.launch)
        )
        setup.identity = prove_identity(group, setup.identity, self.launch)
        self.setup = setup
        return setup

    def _build(self, recorded: Identity | None, tells: bool) -> Setup:
        """Build the run's parts; a worker that `tells` sends a notice before work that takes long."""
        given = self.given
        if tells and given.data is not None:
            tell, targets = lambda text: self._tell(Notice(text)), given.targets(self.run)
            given = replace(given, data=from_map_style(given.data, tell, **targets))
        return set_up(self.run, self.device, given, recorded, self.launch.plan.splits_model)

    def _prepare_to_join(self) -> None:
        """Build everything before the others wait for this worker; an error here ends only this worker."""
        self.setup = self._build(None, tells=False)
        theirs = self.groups.ask_identity()
        if theirs:  # it has the fields that only worker 0 knows, too
            compare_identities(theirs, self.setup.identity)
            self.setup.identity = theirs

    def _open(self, group: Group, journal: Journal, roll: RollCall, held: HeldParts) -> Saved | None:
        """Let worker 0 open the run's directory, and tell all workers its path.

        Returns the checkpoint to go on from, at worker 0 and if the workers have no state.
        """
        if group.rank:
            journal.close()
        saved = everywhere(
            group, lambda: None if journal.is_open or group.rank else self._take(journal, roll, held)
        )
        journal.found = json.loads(group.broadcast_bytes(json.dumps(journal.found).encode()))
        if group.rank == 0:
            self._announce(journal.path)
        return saved

    def _announce(self, path: Path) -> None:
        """Tell the coordinator where the run's files are, for a worker that may have to take over."""
        assert self.setup
        self.groups.tell_job(str(path.resolve()), dict(self.setup.identity))

    def _take(self, journal: Journal, roll: RollCall, held: HeldParts) -> Saved | None:
        """Open the run's directory; if no worker has a state, find one there."""
        assert self.setup
        is_lost = roll.source is None and not held.cursor
        known = journal.found.get("path") or self.groups.run
        if known:
            directory, saved = reopen_directory(Path(known), self.setup.about(), self._tell, is_lost)
        else:
            directory, saved = open_directory(self.setup.about(), self.launch, self._tell, self._announce)
        journal.open(directory)
        return saved
