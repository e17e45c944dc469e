"""`lockstep train`: a recipe, a file and overrides become a Run, and the Run is trained."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from lockstep.cli import flag
from lockstep.cli.data_action import folder_defaults
from lockstep.cli.launch import start_workers
from lockstep.errors import BadInput, SpecError
from lockstep.recipes import RECIPES, recipe
from lockstep.spec import Launch, Run
from lockstep.spec.identity import is_scripted
from lockstep.spec.plan import read_plans
from lockstep.spec.prediction import read_prediction
from lockstep.spec.run_file import (
    Table,
    dump_toml,
    from_table,
    merge,
    parse_overrides,
    read_toml,
    speaks_of,
    to_table,
)

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

_EPILOG = """\
recipes:
{recipes}

Every key has a default: `lockstep train RECIPE --print-config` shows them, and its output is a file
for -c. An interrupted run saves its state; --resume auto goes on, and ends with the same bits.
The newest three checkpoints and the best are kept, of a finished run the last and the best;
-o checkpoint.keep=N keeps the newest N.
Any number of workers, up to train.lanes, gives the same bits; they are also started by
`torchrun --nproc-per-node N -m lockstep train …`, by `mpirun -n N lockstep train …`, and under Slurm by
`srun lockstep train …`, where a warning (SIGUSR1) saves and queues the job again.
"""


def add_parser(verbs: Verbs) -> None:
    """Add the verb and its flags."""
    lines = [f"  {name:9} {(function.__doc__ or '').splitlines()[0]}" for name, function in RECIPES.items()]
    parser = verbs.add_parser(
        "train",
        help="train a model",
        description="Train a model: a recipe, then a file's keys, then -o overrides.",
        epilog=_EPILOG.format(recipes="\n".join(lines)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag.add_run_keys(parser)
    parser.add_argument("--name", help="the run's name; one that exists gets a suffix")
    flag.add_runs_dir(parser)
    flag.add_device(parser)
    flag.add_workers(parser)
    flag.add_elastic(parser)
    flag.add_feeding(parser)
    parser.add_argument(
        "--copy-every",
        type=int,
        default=100,
        metavar="N",
        help="with train.compress, steps between copies of the state in memory: if a worker is lost, all go "
        "back to the last one; 0: to the last checkpoint; default: 100",
    )
    parser.add_argument(
        "--audit",
        type=int,
        default=0,
        metavar="EVERY",
        help="look for wrong bits every EVERY steps: compute a random lane and a random slice of the sums "
        "again, on another worker if there is one, and stop if a bit differs",
    )
    parser.add_argument("--resume", metavar="auto|RUN|PATH", help="go on with a run that stopped")
    parser.add_argument(
        "--stop-after-epochs",
        type=int,
        default=0,
        metavar="N",
        help="save and stop after so many epochs of the run, with exit code 0; --resume goes on",
    )
    parser.add_argument(
        "--data-changed",
        action="store_true",
        help="resume with changed data, such as a repaired file; from there on it is another run",
    )
    text = "start a new run from this run's newest weights, or a checkpoint's by its path"
    parser.add_argument("--fork", metavar="RUN", help=text)
    flag.add_trackers(parser)
    parser.add_argument(
        "--trace",
        action="store_true",
        help="keep a hash of every tensor at every step, for `lockstep verify`",
    )
    parser.add_argument(
        "--quiet", action="store_true", help="print nothing but warnings and errors, on stderr"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="build everything, do the first steps in memory, say what time and memory they took, and stop; "
        "nothing is written",
    )
    parser.add_argument("--print-config", action="store_true", help="print the Run as TOML and stop")
    parser.set_defaults(handler=run_train)


def run_train(options: argparse.Namespace) -> int:
    """Resolve the Run, then train it."""
    plan, *fallbacks = read_plans([options.plan, *options.fallbacks], options.replicas)
    launch = Launch(
        options.name,
        options.runs_dir,
        options.resume,
        options.fork,
        options.device,
        tuple(options.track),
        workers=options.workers,
        backend=options.backend,
        bucket_mb=options.bucket_mb,
        overlap=not options.no_overlap,
        graph=not options.no_graph,
        decode_threads=options.decode_threads,
        read_ahead=options.read_ahead,
        pixel_cache=options.pixel_cache,
        pixel_cache_gb=options.pixel_cache_gb,
        trace=options.trace,
        min_workers=options.min_workers,
        wait_s=options.wait,
        restarts=options.restarts,
        rdzv=options.rdzv,
        nodes=options.nodes,
        tls=options.tls,
        copy_every=options.copy_every,
        audit=options.audit,
        data_changed=options.data_changed,
        stop_after_epochs=options.stop_after_epochs,
        dry_run=options.dry_run,
        quiet=options.quiet,
        plan=plan,
        fallbacks=tuple(fallbacks),
        predicted=read_prediction(options.plan),
    )
    flag.check_trackers(launch)
    run, name = resolve(options, launch)
    with named_file(options):
        return _train(options, run, replace(launch, name=launch.name or name))


def _train(options: argparse.Namespace, run: Run, launch: Launch) -> int:
    if options.print_config:
        from lockstep.data.catalog import make_options

        make_options(run.data.name, run.data.options)  # wrong ones are refused here, too
        print(dump_toml(run), end="")
        return 0
    if options.recipe == "imagenet":
        folder_defaults.check_imagenet(run)
    launch = start_workers(launch, run)
    from lockstep.cli.listeners import train_with_listeners

    train_with_listeners(run, launch)
    return 0


def resolve(options: argparse.Namespace, launch: Launch) -> tuple[Run, str]:
    """The Run that the arguments describe, and its default name."""
    base, name = _base(options, launch)
    layers = [parse_overrides(options.override)]
    if options.config:
        layers.insert(0, read_toml(options.config))
        name = options.config.stem
    if launch.fork:
        layers = folder_defaults.lay_fork(launch, layers, tunes=options.recipe == "finetune")
    with named_file(options):
        run = _lay(to_table(base), layers)
        if options.recipe == "imagenet" and run.data.name == "pack":  # it has the size that a folder has
            kept = {"data": {"name": "pack", "size": base.data.options["size"]}}
            return _lay(merge(to_table(base), kept), layers), name
        facts = folder_defaults.find_facts(run) if options.recipe in ("folder", "finetune") else None
        if facts:
            chosen = folder_defaults.fit_folder(facts, run, options.recipe, name, launch)
            run = _lay(merge(to_table(base), chosen), layers)
        if options.recipe == "finetune":
            run = _lay(merge(to_table(run), folder_defaults.fit_weights(run, name, launch)), layers)
    if facts and not launch.quiet:
        folder_defaults.tell_defaults(facts, run)
    return run, name


def resolve_steps(options: argparse.Namespace, launch: Launch) -> Run:
    """The Run whose steps are measured or predicted: those of the first epochs, if its batch grows."""
    run, _ = resolve(options, launch)
    if run.train.growth:
        told = f"train.batch={run.train.batches}: this is about its first, {run.train.batch}"
        print(f"lockstep: {told}; for another give it alone", file=sys.stderr)
    return run.at(0)


def _lay(table: Table, layers: list[Table]) -> Run:
    """The Run of a table with layers on top."""
    for layer in layers:
        table = merge(table, layer)
    return from_table(table)


@contextmanager
def named_file(options: argparse.Namespace) -> Iterator[None]:
    """Prefix an error with the name of the -c file if it concerns a key or value of that file."""
    try:
        yield
    except BadInput as error:
        given = parse_overrides(options.override)
        own = {
            section: {key: value for key, value in row.items() if key not in given.get(section, {})}
            if isinstance(row, dict)
            else row
            for section, row in (read_toml(options.config) if options.config else {}).items()
        }
        if speaks_of(str(error), own):
            error.args = (f"{options.config}: {error}", *error.args[1:])
        raise


def _base(options: argparse.Namespace, launch: Launch) -> tuple[Run, str]:
    """The Run that the file and the overrides modify, a recipe's or an earlier run's, and its name."""
    if options.recipe:
        return recipe(options.recipe), options.recipe
    earlier = launch.fork or (launch.resume if launch.resume != "auto" else None)
    if earlier and not options.config:
        from lockstep.runs.resume import find_directory

        directory = find_directory(launch.runs_dir, earlier)
        if launch.fork and is_scripted(directory.identity()):
            raise SpecError(
                f"--fork {earlier}: it was trained by a script with a module, data or a loss of its own, "
                "which its run.toml does not hold: name a recipe too, or start from its weights in a script"
            )
        return directory.run(), f"{directory.path.name}-fork" if launch.fork else directory.path.name
    return recipe("shapes") if not options.config else Run(), "shapes"
