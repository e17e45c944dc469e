"""What people type and import is frozen here; a change of it is a decision, not an accident."""

import argparse
import subprocess
import sys
import time

from patience import PATIENCE_S

import lockstep
from lockstep.cli.main import FORESIGHT, LISTING, SHELL, VERBS, make_parser
from lockstep.recipes import RECIPES

FLAGS = {
    "train": "RECIPE --audit --backend --bucket-mb --config --copy-every --data-changed --decode-threads "
    "--device --dry-run --fork --min-workers --name --no-graph --no-overlap --nodes --or --override "
    "--pixel-cache --pixel-cache-gb --plan --print-config --quiet --rdzv --read-ahead --replicas --restarts "
    "--resume --runs-dir --stop-after-epochs --tls --trace --track --wait --workers -c -o",
    "launch": "SCRIPT … --min-workers --nodes --rdzv --restarts --tls --wait --workers",
    "eval": "RUN --backend --checkpoint --data-dir --device --json --other-data --plan --runs-dir --split "
    "--workers --by-class --confusion --wrong",
    "predict": "RUN IMAGE --backend --checkpoint --device --json --plan --runs-dir --workers",
    "export": "RUN --checkpoint --format --output --runs-dir",
    "verify": "RUN_A RUN_B --json --runs-dir",
    "runs list": "--json --runs-dir",
    "runs compare": "RUN --json --runs-dir",
    "runs prune": "RUN --keep --runs-dir --yes",
    "completion": "bash|zsh|fish …",
    "layers": "RECIPE --config --override --plan -c -o",
    "report": "RUN|DIR|FILE --output --runs-dir --title -o",
    "data get": "NAME --dir --mirror",
    "data show": "RECIPE --config --epoch --images --output --override -c -o",
    "data info": "NAME --dir --json --override -o",
    "data check": "NAME --dir --json --override -o",
    "data pack": "SOURCE DEST --as --classes --override --quality --raw --shard-mb --size --skip-bad "
    "--threads -o",
    "simulate": "RECIPE --checkpoint-s --classes --cluster --config --days --detect-s --images "
    "--interval-min --json --lanes --node-mtbf-hours --nodes --override --picture --plan --profile "
    "--recover-s --repair-hours --restart-s --runs --seed --spread --step-ms --steps --survive --trace -c -o",
    "doctor": "--comm --data-dir --json",
    "bench tune": "RECIPE --config --output --override -c -o",
    "bench io": "RECIPE --config --gpu-rate --images --json --override --picture --slow -c -o",
    "bench lanes": "--config --override -c -o RECIPE",
    "bench gemm": "--device --json --parts --picture --sizes --skinny --threads",
    "bench baselines": "--batch --cores --device --epochs --images --json --only --picture --precision "
    "--processes --rate --seed",
    "bench threads": "--device --epochs --json --most --picture --steps",
    "bench conv": "--device --dilation --groups --json --map --padding --pass --precision --shape --stride "
    "--toeplitz",
    "profile": "RECIPE --batch --config --device --output --override --parts --picture --steps --trace -c -o",
    "plan": "RECIPE --classes --cluster --config --goal --images --json --output --override --profile --top "
    "--vary --workers -c -o",
    "scale": "RECIPE --cluster --config --device --json --override --profile --steps --weak --workers -c -o",
    "sweep": "RECIPE --config --device --jobs --json --keep --name --override --picture --rungs --runs-dir "
    "--samples --search --seed --seeds --workers -c -o",
    "probe": "--device --list --output --quick --show --workers",
}


def test_exported_names():
    assert lockstep.__all__ == sorted(lockstep.__all__)
    assert set(lockstep.__all__) == {
        "Data", "Launch", "LockstepError", "Model", "Optimizer", "Run", "Schedule", "Train",
        "evaluate", "export", "is_main", "load", "pack", "predictor", "recipe", "train",
    }  # fmt: skip
    assert len(lockstep.__all__) <= 16 and all(hasattr(lockstep, name) for name in lockstep.__all__)


def test_train_stays_a_function_when_its_package_is_imported():
    code = "import lockstep; from lockstep.train import loop; import lockstep.train.step; assert loop.Loop; "
    code += "assert type(lockstep.train).__name__ == 'function'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


def test_recipes():
    known = "shapes mnist fashion cifar10 emotion folder finetune imagenet"
    assert set(RECIPES) == set(known.split())
    for name, function in RECIPES.items():
        assert isinstance(function(), lockstep.Run) and function.__doc__, name


def test_every_verb_and_flag():
    found = dict(surface(make_parser()))
    assert {*VERBS, *FORESIGHT, *LISTING, *SHELL} == {name.split()[0] for name in FLAGS}
    assert found == {name: set(flags.split()) for name, flags in FLAGS.items()}


def surface(parser, name=""):
    """(verb, its arguments and flags) of every verb that does something."""
    words = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb, inner in action.choices.items():
                yield from surface(inner, f"{name} {verb}".strip())
        elif not isinstance(action, argparse._HelpAction | argparse._VersionAction):
            assert action.help, f"{name} {action.dest} has no help"
            words |= set(action.option_strings) or {action.metavar}
    if words:
        yield name, words


def test_help_is_quick_and_imports_no_torch():
    code = "import sys; from lockstep.cli.main import make_parser; make_parser().format_help(); "
    code += (
        "heavy = {'torch', 'numpy', 'matplotlib', 'rich', 'PIL'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
    times: list[float] = []
    while len(times) < 3 or (min(times) >= 0.5 and len(times) < 30):  # others may be busy on this machine
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "lockstep", "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.5, times


def test_training_with_stock_kernels_needs_no_triton(tmp_path):
    """As after `make train`, which does not install it."""
    words = ["train", "shapes", "--quiet", "--device", "cpu", "--runs-dir", str(tmp_path)]
    words += ["-o", "train.epochs=1", "-o", "data.num_train=64", "-o", "data.num_test=8"]
    words += ["-o", "train.batch=32", "-o", "schedule.warmup_epochs=0"]
    code = "import sys; sys.modules['triton'] = None; "  # importing it fails
    code += f"from lockstep.cli.main import main; main({words!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)
