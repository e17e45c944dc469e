"""A Slurm of this machine's own: controller, munge and some nodes, each in a network namespace; it vanishes.

Needs root, iproute2 and Debian's packages slurmctld, slurmd, slurm-client and munge. Every node has a host
name, an address and a slurmd of its own, so that tasks of different nodes talk by a network, as on a cluster.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
_PATIENCE_S = 400.0
_NEEDED = ("ip", "unshare", "munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "srun")
_CONFIG = """\
ClusterName=lockstep
SlurmctldHost=control
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=100000
ReturnToService=2
SlurmdTimeout=30
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{more}
NodeName=node[1-{nodes}] CPUs=1 RealMemory=4000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


def what_is_missing() -> str:
    """Why no such cluster can be made here; empty if it can."""
    missing = [name for name in _NEEDED if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurmctld slurmd slurm-client munge iproute2)"
    space = f"slurm{os.getpid()}-try"
    if subprocess.run(["ip", "netns", "add", space], capture_output=True, check=False).returncode:
        return "network namespaces need root and a kernel that lets it"
    _run("ip", "netns", "delete", space)
    return ""


class SlurmCluster:
    """A running Slurm; `more` are further lines of its configuration."""

    def __init__(self, folder: Path, nodes: int = 3, more: str = "") -> None:
        self.folder, self._name = folder, f"slurm{os.getpid()}"
        self._hosts = ["control", *(f"node{number}" for number in range(1, nodes + 1))]
        self._more, self._daemons = more, list[subprocess.Popen[bytes]]()
        self._env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        try:
            self._make_network()
            self._start_daemons()
            self.wait_for(self._is_up, "the nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """End all jobs and daemons, and only those: whatever is left runs in the namespaces made here."""
        with suppress(subprocess.CalledProcessError):
            self.call("scancel", "--full", "--user=root")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            daemon.kill()
            daemon.wait()
        for host in self._hosts:
            self.end(host)
        for host in (*self._hosts, "switch"):
            _run("ip", "netns", "delete", self._space(host), check=False)
            shutil.rmtree(Path("/etc/netns", self._space(host)), ignore_errors=True)

    def call(self, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """What a command prints that a user of the cluster types."""
        inside = ["ip", "netns", "exec", self._space("control"), *words]
        return _run(*inside, env={**self._env, **(env or {})}, cwd=cwd or self.folder)

    def submit(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        """Submit a job; gives its number."""
        return self.call("sbatch", "--parsable", *words, env=env).strip()

    def train(self, file: str, flags: Sequence[str], *words: str) -> tuple[str, Path]:
        """Submit a batch file of the examples with flags of sbatch; gives the job and its run's folder."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {"PATH": path, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
        runs = self.folder / "runs"
        training = [str(_ROOT / "examples" / "slurm" / file), *words, "--runs-dir", str(runs)]
        job = self.submit(*flags, *training, "--device", "cpu", env=env)
        return job, runs / f"lockstep-{job}"

    def log(self, job: str) -> str:
        """What a training of the examples has said so far."""
        path = self.folder / f"lockstep-{job}.out"
        return path.read_text() if path.is_file() else ""

    def state(self, job: str) -> str:
        """What a job is doing, in Slurm's word."""
        return self.facts(job).get("JobState", "")

    def facts(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job."""
        words = self.call("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, condition: Callable[[], Any], what: str) -> Any:
        """Until a condition holds."""
        end = time.monotonic() + _PATIENCE_S
        while not (found := condition()):
            if time.monotonic() > end:
                raise TimeoutError(f"waited {_PATIENCE_S:g} s for {what}; the logs are in {self.folder}")
            time.sleep(0.2)
        return found

    def cut(self, host: str) -> None:
        """Take a node from the network, as if its cable were pulled."""
        _run("ip", "-n", self._space(host), "link", "set", "eth0", "down")

    def end(self, host: str) -> None:
        """End all that runs on a node, as if its power were cut."""
        for pid in _run("ip", "netns", "pids", self._space(host), check=False).split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _is_up(self) -> bool:
        try:
            return set(self.call("sinfo", "-h", "-N", "-o", "%t").split()) == {"idle"}
        except subprocess.CalledProcessError:  # the controller is not there yet
            if ended := [daemon for daemon in self._daemons if daemon.poll() is not None]:
                raise RuntimeError(f"a daemon has ended: {ended[0].args}; see {self.folder}") from None
            return False

    def _space(self, host: str) -> str:
        return f"{self._name}-{host}"

    def _make_network(self) -> None:
        """A switch, and a cable from each host to it; the hosts know each other by name."""
        switch = self._space("switch")
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        addresses = {host: f"10.78.0.{number}" for number, host in enumerate(self._hosts, 10)}
        names = "127.0.0.1 localhost\n" + "".join(f"{where} {host}\n" for host, where in addresses.items())
        for number, (host, address) in enumerate(addresses.items()):
            space, port = self._space(host), f"port{number}"
            _run("ip", "netns", "add", space)
            cable = ["type", "veth", "peer", "name", port, "netns", switch]
            _run("ip", "-n", space, "link", "add", "eth0", *cable)
            _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
            _run("ip", "-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", space, "link", "set", device, "up")
            told = Path("/etc/netns", space)  # ip shows these files to what runs in the namespace
            told.mkdir(parents=True)
            (told / "hosts").write_text(names)

    def _start_daemons(self) -> None:
        folder = self.folder
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "munge.key").chmod(0o600)
        (folder / "slurm.conf").write_text(
            _CONFIG.format(folder=folder, nodes=len(self._hosts) - 1, more=self._more)
        )
        files = ("socket", "pid-file", "log-file", "seed-file")
        flags = [f"--{name}={folder}/munge.{name.removesuffix('-file')}" for name in files]
        # slurmd wants a plugin for cgroups even where nothing uses them; this one looks for none at its start
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        self._start("control", "munged", "--foreground", "--force", f"--key-file={folder}/munge.key", *flags)
        self.wait_for((folder / "munge.socket").exists, "munge")
        self._start("control", "slurmctld", "-D", "-i")
        for host in self._hosts[1:]:
            (folder / f"spool-{host}").mkdir()
            self._start(host, "slurmd", "-D", "-N", host)

    def _start(self, host: str, *command: str) -> None:
        """Start a daemon on a host, with the host's name."""
        inside = ["ip", "netns", "exec", self._space(host), "unshare", "--uts"]
        named = ["sh", "-c", 'hostname "$1"; shift; exec "$@"', "sh", host, *command]
        with (self.folder / f"{command[0]}-{host}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen([*inside, *named], stdout=output, stderr=output, env=self._env)
            )


def _run(*words: str, check: bool = True, **options: Any) -> str:
    done = subprocess.run(words, check=False, capture_output=True, text=True, **options)
    if check and done.returncode:
        raise subprocess.CalledProcessError(done.returncode, words, done.stdout, done.stderr)
    return done.stdout
