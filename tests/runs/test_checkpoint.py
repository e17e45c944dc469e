"""Checkpoints come back bit for bit, damage is seen, and a failed write costs nothing that was there."""

import json
import sys
from pathlib import Path

import pytest
import torch
from forked import call
from torch import nn

from lockstep.errors import CheckpointError
from lockstep.runs import checkpoint
from lockstep.runs.train_state import TrainState
from lockstep.spec import Optimizer


def state(step: int = 0, seed: int = 0, width: int = 3) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, width, 3), nn.BatchNorm2d(width))
    made = TrainState.begin(model, Optimizer("momentum"), 0.9)
    made.memory["velocity"]["0.weight"].uniform_()
    made.step, made.epoch, made.totals.loss = step, 1, 0.1
    return made


def save(folder: Path, step: int, keep: int = 9, best_step: int = -1) -> Path:
    made = state(step, seed=step)
    made.best_step = best_step
    new = checkpoint.NewCheckpoint(folder, made.cursor(), "identity", keep)
    new.write(made.pieces())
    return new.path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def pair(step: int) -> list[str]:
    return [f"step-{step:09d}.json", f"step-{step:09d}.safetensors"]


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path) -> None:
    path = save(tmp_path / "new" / "folder", 12)
    saved, other = checkpoint.load_checkpoint(path), state(seed=99)
    assert saved.manifest["identity"] == "identity"
    saved.restore(other)
    expected = state(12, seed=12)
    assert other.hashes() == expected.hashes()
    assert other.cursor() == expected.cursor()


def test_either_file_names_the_checkpoint(tmp_path) -> None:
    path = save(tmp_path, 3)
    assert checkpoint.load_checkpoint(path.with_suffix(".safetensors")).path == path


def test_the_manifest_holds_the_hashes_of_the_state(tmp_path) -> None:
    manifest = checkpoint.load_checkpoint(save(tmp_path, 3)).manifest
    for name, value in state(3, seed=3).hashes().items():
        assert manifest[name] == value


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_every_flipped_byte_is_seen(tmp_path, suffix: str) -> None:
    path = save(tmp_path, 3).with_suffix(suffix)
    data = path.read_bytes()
    good = checkpoint.load_checkpoint(path)
    for place in range(0, len(data), 3):
        damaged = bytearray(data)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        try:
            assert checkpoint.load_checkpoint(path).manifest == good.manifest  # white space is no damage
            assert suffix == ".json"
        except CheckpointError:
            pass


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
def test_a_truncated_file_is_seen(tmp_path, suffix: str, share: float) -> None:
    path = save(tmp_path, 3).with_suffix(suffix)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * (len(data) - 2))])
    with pytest.raises(CheckpointError, match="step-000000003"):
        checkpoint.load_checkpoint(path)


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_missing_file_is_one_line(tmp_path, suffix: str) -> None:
    path = save(tmp_path, 3)
    path.with_suffix(suffix).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load_checkpoint(path)


@pytest.mark.parametrize("text", ["", "null", "[]", "3", "{}", '{"file": 3}', '{"file": "."}', "\x00", "{"])
def test_a_garbage_manifest_is_one_line(tmp_path, text: str) -> None:
    path = tmp_path / "step-000000001.json"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=r"step-000000001\.json: cannot be read"):
        checkpoint.load_checkpoint(path)


@pytest.mark.parametrize("outside", ["{}/secret", "../secret", "./secret", "sub/../../secret"])
def test_a_manifest_names_no_file_elsewhere(tmp_path, outside: str) -> None:
    (tmp_path / "a" / "sub").mkdir(parents=True)
    path = save(tmp_path / "a", 3)
    secret = path.with_suffix(".safetensors").rename(tmp_path / ("a" if outside[1] == "/" else "") / "secret")
    manifest = json.loads(path.read_text()) | {"file": outside.format(tmp_path)}
    del manifest["seal"]
    path.write_text(json.dumps(manifest | {"seal": checkpoint._seal(manifest)}))
    with pytest.raises(CheckpointError, match=r"cannot be read: file='.*' must be the name of a file beside"):
        checkpoint.load_checkpoint(path)
    manifest["file"] = "secret"
    secret.replace(path.with_name("secret"))
    path.write_text(json.dumps(manifest | {"seal": checkpoint._seal(manifest)}))
    assert checkpoint.load_checkpoint(path).manifest["cursor"]["step"] == 3


def test_another_format_is_named(tmp_path) -> None:
    path = save(tmp_path, 3)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    with pytest.raises(CheckpointError, match="format 2 is not 1: another version"):
        checkpoint.load_checkpoint(path)


def test_a_checkpoint_of_another_model_is_refused(tmp_path) -> None:
    saved = checkpoint.load_checkpoint(save(tmp_path, 3))
    with pytest.raises(CheckpointError, match="does not fit this model or optimizer"):
        saved.restore(state(width=4))
    with pytest.raises(CheckpointError, match="does not fit this model or optimizer"):
        saved.restore(TrainState.begin(state().model, Optimizer("adam"), 0.9))


def test_the_newest_is_loaded(tmp_path) -> None:
    for step in (10, 9, 1_000_000_000):
        save(tmp_path, step)
    saved = checkpoint.load_newest(tmp_path, pytest.fail)
    assert saved.manifest["cursor"]["step"] == 1_000_000_000


def test_a_damaged_newest_gives_way_to_the_one_before_with_a_warning(tmp_path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / pair(3)[1]).write_bytes(b"")
    (tmp_path / pair(2)[0]).write_text("{")
    warnings: list[str] = []
    saved = checkpoint.load_newest(tmp_path, warnings.append)
    assert saved.manifest["cursor"]["step"] == 1
    assert "step-000000003.safetensors: damaged" in warnings[0]
    assert "step-000000002.json: cannot be read" in warnings[1]


def test_only_damaged_checkpoints_are_an_error_and_none_is_none(tmp_path) -> None:
    assert checkpoint.load_newest(tmp_path / "nowhere", pytest.fail) is None
    assert checkpoint.load_newest(tmp_path, pytest.fail) is None
    save(tmp_path, 1).write_text("")
    with pytest.raises(CheckpointError, match="none of its 1 checkpoints can be read"):
        checkpoint.load_newest(tmp_path, lambda text: None)


def test_the_newest_and_the_best_are_kept(tmp_path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step, keep=2, best_step=2)
    assert names(tmp_path) == [*pair(2), *pair(4), *pair(5)]


def test_what_a_crash_left_is_removed_and_what_is_not_ours_stays(tmp_path) -> None:
    left = [".step-000000001.safetensors.77.tmp", "step-000000001.safetensors"]
    mine = ["mine.safetensors", "notes.tmp", "step-000000001-copy.safetensors", "step-good.safetensors"]
    for name in [*left, *mine]:
        (tmp_path / name).write_text("x")
    save(tmp_path, 2)
    assert names(tmp_path) == sorted([*mine, *pair(2)])


def test_a_checkpoint_before_a_damaged_one_is_not_pruned_for_it(tmp_path) -> None:
    """The run fell back to step 5 and goes on; the damaged step 10 must not push out what is whole."""
    save(tmp_path, 5)
    (tmp_path / pair(10)[0]).write_text("{")
    save(tmp_path, 7, keep=1)
    assert checkpoint.load_newest(tmp_path, lambda text: None).manifest["cursor"]["step"] == 7


def test_saving_a_step_again_heals_it(tmp_path) -> None:
    path = save(tmp_path, 3)
    path.with_suffix(".safetensors").write_bytes(b"damaged")
    assert checkpoint.load_checkpoint(save(tmp_path, 3)).manifest["cursor"]["step"] == 3


FULL_DISK = """
import resource, sys
from pathlib import Path
from lockstep.runs.checkpoint import write_durably
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_durably(Path(sys.argv[1]), b"n" * 5000)
except OSError as error:
    print(error.strerror)
"""


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path) -> None:
    path = tmp_path / "file"
    checkpoint.write_durably(path, b"old")
    done = call([sys.executable, "-c", FULL_DISK, str(path)])
    assert done.returncode == 0 and done.stdout.strip() == "File too large", done.stderr
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["file"]
