"""Launchers that talk by TLS: what travels, and who is refused."""

import asyncio
import os
import shutil
import socket
import threading
from contextlib import suppress

import forked
import pytest
from certificates import OPENSSL, make_certificates
from job import Job
from small import small_run, summary, train, train_command
from world import free_port

from lockstep.elastic.certificates import Certificates
from lockstep.elastic.coordinator_link import Link
from lockstep.elastic.job import Job as Wanted
from lockstep.errors import LockstepError, SpecError

pytestmark = [pytest.mark.gloo, pytest.mark.skipif(not OPENSSL, reason="openssl is not installed")]
TOKEN = "a secret of sixteen"
FILES = ("ca.crt", "tls.crt", "tls.key")


@pytest.fixture(scope="module")
def trusted(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def strange(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls") / "theirs")


class Tap:
    """Passes connections on to a port, and keeps what travels."""

    def __init__(self, target):
        self.target, self.seen = target, bytearray()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with suppress(OSError):
            while True:
                here, _ = self.listener.accept()
                there = socket.create_connection(("127.0.0.1", self.target))
                for source, sink in ((here, there), (there, here)):
                    threading.Thread(target=self.carry, args=(source, sink), daemon=True).start()

    def carry(self, source, sink):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


def test_two_launchers_of_a_slurm_step_meet_by_tls_and_nothing_can_be_read(trusted, tmp_path):
    keys, port = ("train.epochs=1", "data.num_test=10"), free_port()
    flags = ["--workers", "1", "--nodes", "2", "--tls", str(trusted)]
    env = {"LOCKSTEP_TOKEN": TOKEN, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
    with Job(tmp_path, *flags, "--rdzv", f"127.0.0.1:{port}", overrides=keys, env=env) as first:
        first.wait_for(lambda: not can_bind(port), "the coordinator")
        tap = Tap(port)
        there = train_command(tmp_path / "other", *flags, "--rdzv", f"127.0.0.1:{tap.port}", overrides=keys)
        done = forked.call(there, env={**os.environ, **env, "SLURM_PROCID": "1"}, launches=True)
        assert done.returncode == 0, done.stderr
        first.finish()
    expected, _ = train(small_run(*keys), tmp_path / "calm")
    assert summary(first.run)["weights_sha256"] == expected.summary["weights_sha256"]
    assert len(tap.seen) > 1000 and b'"op"' not in tap.seen and b"127.0.0.1" not in tap.seen


def can_bind(port):
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True


def meet(here, there):
    """What a second launcher is told, with the certificates of each."""

    async def both():
        port, said = free_port(), []
        wanted = Wanted(1, 2, rdzv=("127.0.0.1", port), nodes=(1, 2), token=TOKEN, tls=here)
        first = Link(wanted, said.append, said.append)
        await first.open()
        await first.enter()
        other = Wanted(1, 2, rdzv=("127.0.0.1", port), nodes=(1, 2), token=TOKEN, tls=there)
        second = Link(other, said.append, said.append)
        try:
            await second.open()
            await second.enter()
            return "met"
        except LockstepError as error:
            return str(error)
        finally:
            await second.close()
            await first.close()

    return asyncio.run(both())


def test_each_side_refuses_what_another_authority_signed(trusted, strange):
    assert meet(trusted, trusted) == "met"
    told = meet(trusted, strange)
    assert "its certificate is refused: self-signed certificate in" in told and "\n" not in told, told


def test_a_coordinator_has_the_name_that_is_asked_for(trusted, tmp_path):
    elsewhere = make_certificates(tmp_path / "elsewhere", host="10.1.1.1")
    told = meet(elsewhere, elsewhere)
    assert "its certificate is refused: IP address mismatch" in told and "127.0.0.1" in told, told


def test_all_launchers_speak_tls_or_none(trusted, monkeypatch):
    told = meet(None, trusted)
    assert "speaks no TLS" in told and "give --tls to all launchers, or to none" in told, told
    for name in (
        "ADMIT_S",
        "_SEARCH_S",
    ):  # until a connection that says nothing is closed, and all is given up
        monkeypatch.setattr(f"lockstep.elastic.coordinator_link.{name}", 0.5)
    told = meet(trusted, None)
    assert "no coordinator of a job there" in told and "does it want --tls" in told, told


@pytest.mark.parametrize(
    ("spoil", "message"),  # what is done to a folder, and to what other authority's
    [
        (lambda folder, other: (folder / "tls.key").unlink(), "there is no file tls.key in it"),
        (lambda folder, other: shutil.copy(other / "tls.key", folder), "tls.key cannot be used: key values"),
        (
            lambda folder, other: shutil.copy(other / "ca.crt", folder),
            "tls.crt cannot be used: unable to get",
        ),
        (
            lambda folder, other: (folder / "ca.crt").write_text("none"),
            "ca.crt cannot be used: no certificate",
        ),
        (
            lambda folder, other: (folder / "tls.crt").write_text("none"),
            "tls.crt cannot be used: no certificate",
        ),
        (
            lambda folder, other: (folder / "tls.key").write_text("none"),
            "tls.key cannot be used: no private key in PEM, or one with a password",
        ),
    ],
)
def test_bad_files_are_found_before_the_start(spoil, message, trusted, strange, tmp_path):
    folder = tmp_path / "tls"
    shutil.copytree(trusted, folder)
    spoil(folder, strange)
    with pytest.raises(SpecError, match=message) as found:
        Certificates(folder)
    assert "\n" not in str(found.value) and "docs/jobs.md" in str(found.value)


def test_an_expired_certificate_is_found_before_the_start(tmp_path):
    with pytest.raises(SpecError, match=r"tls\.crt cannot be used: certificate has expired"):
        Certificates(make_certificates(tmp_path / "old", days=-1))


def test_a_launcher_says_so_in_a_line(tmp_path):
    words = ["--workers", "1", "--rdzv", f"127.0.0.1:{free_port()}", "--tls", str(tmp_path / "none")]
    done = forked.call(train_command(tmp_path, *words), env={**os.environ, "LOCKSTEP_TOKEN": TOKEN})
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "there is no file ca.crt in it" in done.stderr and not (tmp_path / "run").exists()
