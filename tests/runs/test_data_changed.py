"""A truncated JPEG ends a run; it is found, repaired, and the run goes on, and says so."""

import json

import pytest
import torch
from forked import call
from photos import photo_run, take_photos
from small import command, rows, summary, train

from lockstep.cli.main import run
from lockstep.data.order import sample_ids
from lockstep.errors import DataError, IdentityError, SpecError
from lockstep.runs.event import Notice, StepDone
from lockstep.spec import Launch
from lockstep.spec.identity import HISTORY, digest

NUM_TRAIN, STEPS = 33, 4  # an epoch leaves out one image


def left_out(epoch):
    """The image that an epoch does not use."""
    return int(sample_ids(0, epoch, torch.tensor([NUM_TRAIN - 1]), NUM_TRAIN))


@pytest.fixture
def ended(tmp_path):
    """A run that ended in its second epoch: its photos, the truncated one, and what that was."""
    photos = take_photos(tmp_path / "photos", train=11, val=2)
    path = sorted((photos / "train").glob("*/*.jpg"), key=lambda p: (p.parent.name, p.name))[left_out(0)]
    assert left_out(1) != left_out(0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    with pytest.raises(DataError) as caught:
        train(photo_run(photos), tmp_path)
    for part in (f"{path}: unreadable image (image file is truncated", "repair or remove it",
                 f"`lockstep data check folder --dir {photos}`", "--resume RUN --data-changed"):  # fmt: skip
        assert part in str(caught.value)
    return photos, path, whole


def test_a_truncated_file_is_found_repaired_and_the_run_goes_on(tmp_path, ended, capsys):
    photos, path, whole = ended
    assert run(["data", "check", "folder", "--dir", str(photos)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith(f"{path}: unreadable image")
    path.write_bytes(whole)
    assert run(["data", "check", "folder", "--dir", str(photos), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bad"] == []
    before = json.loads((tmp_path / "run" / "identity.json").read_text())
    with pytest.raises(
        IdentityError, match=r"other data than there is now: manifest.train_sha256.*--data-changed"
    ):
        train(photo_run(photos), tmp_path, launch={"resume": "auto"})
    result, events = train(photo_run(photos), tmp_path, launch={"resume": "auto", "data_changed": True})
    (said,) = [event.text for event in events if isinstance(event, Notice) and event.warning]
    assert f"the data was changed after step {STEPS} (manifest.train_sha256: " in said
    assert "from here on this is another run" in said
    after = json.loads((tmp_path / "run" / "identity.json").read_text())
    (change,) = after[HISTORY]
    assert change["step"] == STEPS and change["identity"] == digest(before)
    assert change["before"] == {"manifest.train_sha256": before["manifest.train_sha256"]}
    assert result.summary["identity"] == digest(after) and result.summary["steps"] == 2 * STEPS
    again, _ = train(photo_run(photos), tmp_path, launch={"resume": "auto"})
    assert again.summary == result.summary
    assert run(["eval", str(result.directory), "--device", "cpu"]) == 0
    fresh, _ = train(photo_run(photos), tmp_path, launch={"name": "fresh"})
    capsys.readouterr()
    assert run(["verify", str(result.directory), str(fresh.directory)]) == 0  # the file was not used before
    assert f"identity: {HISTORY}: [" in capsys.readouterr().out


def test_a_run_with_a_changed_history_is_resumed_as_any_other(tmp_path, ended):
    photos, path, _ = ended
    path.unlink()

    def stop(event):
        if getattr(event, "step", 0) == STEPS + 2:
            raise InterruptedError

    resume = {"resume": "auto", "data_changed": True}
    with pytest.raises(InterruptedError):
        train(photo_run(photos, "checkpoint.every_steps=1"), tmp_path, launch=resume, on_event=stop)
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("*.json"))
    saved = {json.loads(p.read_text())["cursor"]["step"]: p for p in checkpoints}
    early = json.loads(saved[STEPS].read_text())["identity"]
    assert early != json.loads(saved[STEPS + 1].read_text())["identity"]
    whole, _ = train(photo_run(photos), tmp_path, launch={"resume": str(saved[STEPS])})
    assert whole.summary["steps"] == 2 * STEPS
    with pytest.raises(IdentityError, match=r"manifest\.num_train: 32 there, 31 here"):
        next((photos / "train").glob("*/*.jpg")).unlink()
        train(photo_run(photos), tmp_path, launch={"resume": "auto"})
    with pytest.raises(IdentityError, match="is finished, so nothing is left to do"):
        train(photo_run(photos), tmp_path, launch=resume)


def test_only_the_data_may_have_changed(tmp_path, ended):
    photos, path, whole = ended
    path.write_bytes(whole)
    with pytest.raises(SpecError, match="--data-changed needs --resume"):
        Launch(data_changed=True)
    resume = {"resume": "auto", "data_changed": True}
    with pytest.raises(IdentityError, match=r"is another run.*seed: 0 there, 1 here"):
        train(photo_run(photos, "seed=1"), tmp_path, launch=resume)
    (photos / "train" / "red").rename(photos / "train" / "rose")
    (photos / "val" / "red").rename(photos / "val" / "rose")
    with pytest.raises(IdentityError, match=r"is another run.*manifest.classes"):
        train(photo_run(photos), tmp_path, launch=resume)


@pytest.mark.gloo
def test_several_workers_go_on_with_repaired_data_to_the_same_bits(tmp_path, ended):
    photos, path, whole = ended
    path.write_bytes(whole)
    words = [
        "train",
        "--resume",
        str(tmp_path / "run"),
        "--data-changed",
        "--device",
        "cpu",
        "--workers",
        "2",
    ]
    done = call(command(*words), launches=True)
    assert done.returncode == 0, done.stderr
    assert "the data was changed after step" in done.stdout
    fresh, _ = train(photo_run(photos), tmp_path, launch={"name": "fresh"})
    assert summary(tmp_path / "run")["weights_sha256"] == fresh.summary["weights_sha256"]


def test_fewer_images_and_an_earlier_checkpoint(tmp_path):
    """The rate falls over the epochs that are left; checkpoints of the data before do not block the run."""
    photos, keys = take_photos(tmp_path / "photos", train=11, val=2), ("checkpoint.every_steps=1",)

    def stop(event):
        if getattr(event, "step", 0) == STEPS + 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(photo_run(photos, *keys), tmp_path, on_event=stop)
    for path in sorted((photos / "train").glob("*/*.jpg"))[::2]:
        path.unlink()
    earlier = tmp_path / "run" / "checkpoints" / f"step-{STEPS + 1:09}.json"

    def stop_again(event):
        if isinstance(event, StepDone):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        again = {"resume": str(earlier), "data_changed": True}
        train(photo_run(photos, *keys), tmp_path, launch=again, on_event=stop_again)
    result, _ = train(photo_run(photos, *keys), tmp_path, launch={"resume": "auto"})
    assert all(row["lr"] > 0 for row in rows(result.directory, "step"))
