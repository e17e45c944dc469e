"""What listens, where, and what it does with messages of strangers."""

import json
import random
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from job import Job
from patience import PATIENCE_S
from small import small_run, summary, train
from world import free_port

from lockstep.elastic.message import LIMIT_BYTES, is_proof, pack, prove, unpack

pytestmark = pytest.mark.gloo
TOKEN = {"LOCKSTEP_TOKEN": "a secret of sixteen"}
MESSAGES = 1000


def listeners(pid):
    """(address, port) that a process listens on."""
    inodes = set()
    with suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            row = line.split()
            if row[3] == "0A" and row[9] in inodes:
                address, port = row[1].split(":")
                found.add((address, int(port, 16)))
    return found


def test_without_nodes_only_gloo_listens_and_on_loopback(tmp_path):
    with Job(tmp_path, "--workers", "2", overrides=("train.epochs=200",)) as job:
        job.wait_for_steps(1)
        assert not listeners(job.process.pid) and not listeners(job.fork_server())
        for pid in job.workers().values():
            assert {address for address, _ in listeners(pid)} == {"0100007F"}


def messages(rng):
    """Random bytes, and messages that are nearly right."""
    proof = prove("another token", "0" * 32, "launcher")
    near = [
        {"op": "hello", "proof": proof, "nonce": "x", "host": "evil"},
        {"op": "hello", "proof": 7, "nonce": None},
        {"op": "hello", "proof": "é" * 64, "nonce": "x"},
        {"op": "from", "worker": "0", "body": {"op": "verdict", "code": 0, "rank": 0}},
        {"op": "gone", "worker": "0", "why": "I say so"},
        {"op": "add", "worker": "9"},
        {"op": []},
        [],
        "hello",
        None,
    ]
    while True:
        kind = rng.randrange(6)
        if kind == 0:
            yield rng.randbytes(rng.choice([1, 8, 16, 100, 5000]))
        elif kind == 1:
            yield b"[" * rng.choice([10, 1000, 100_000]) + b"\n"
        elif kind == 2:
            yield b"x" * (LIMIT_BYTES + 10 if rng.random() < 0.05 else 2000)
        elif kind == 3:
            yield b""
        else:
            yield json.dumps(rng.choice(near)).encode() + rng.choice([b"\n", b""])


def test_a_thousand_messages_to_every_port_change_nothing(tmp_path):
    port = free_port()
    keys = ("train.epochs=10", "checkpoint.every_steps=100", "data.num_test=10")
    flags = ["--workers", "2", "--rdzv", f"127.0.0.1:{port}", "--nodes", "1:3"]
    with Job(tmp_path, *flags, overrides=keys, env=TOKEN, paced=True) as job:
        job.wait_for_steps(1)
        pids = [job.process.pid, *job.workers().values()]
        ports = {number for pid in pids for _, number in listeners(pid)}
        assert port in ports and len(ports) >= 3, "the coordinator's and one of each worker"
        rng = random.Random(0)
        stream = messages(rng)
        with ExitStack() as stay:
            for number in sorted(ports):
                for count in range(MESSAGES):
                    stranger = socket.create_connection(("127.0.0.1", number), timeout=PATIENCE_S)
                    with suppress(OSError):
                        stranger.sendall(next(stream))
                    if count % 50:
                        stranger.close()
                    else:
                        stay.enter_context(stranger)  # some say nothing more, and stay
            assert job.process.poll() is None
            job.hurry()
            _, errors = job.finish()
    alone, _ = train(small_run(*keys), tmp_path / "alone")
    found = summary(job.run)
    assert found["weights_sha256"] == alone.summary["weights_sha256"]
    assert len(found["generations"]) == 1 and found["workers"] == 2, found["generations"]
    assert not errors, errors


def test_a_message_is_one_bounded_line_of_json():
    assert unpack(pack("beat", number=1)) == {"op": "beat", "number": 1}
    for line in (b"{}\n", b"[]\n", b'{"op": 1}\n', b'{"op": "x"}', b"\xff\n", b"[" * 100_000 + b"\n"):
        with pytest.raises(ValueError):
            unpack(line)


def test_a_proof_is_of_one_token_one_nonce_and_one_side():
    proof = prove("token", "nonce", "launcher")
    assert is_proof(proof, "token", "nonce", "launcher")
    for wrong in (
        ("other", "nonce", "launcher"),
        ("token", "once", "launcher"),
        ("token", "nonce", "coordinator"),
    ):
        assert not is_proof(proof, *wrong)
    for given in (None, 3, "", "é", proof[:-1], proof.upper()):
        assert not is_proof(given, "token", "nonce", "launcher")


def test_a_port_of_something_else_is_named(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        rdzv = f"127.0.0.1:{other.getsockname()[1]}"
        start = time.monotonic()
        with Job(tmp_path, "--workers", "1", "--rdzv", rdzv, "--nodes", "2", env=TOKEN) as job:
            stranger, _ = other.accept()
            with stranger:
                stranger.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                _, errors = job.finish(1)
    assert "no Lockstep launcher: choose another port" in errors and time.monotonic() - start < 30
