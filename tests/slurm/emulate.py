"""A real Slurm on this machine: a controller and several slurmd, each a node with a host name of its own.

``python -m tests.slurm.emulate COMMAND …`` runs a command on it, for example ``bash``. When the command ends,
or this process in whatever way, all of it ends too; folders that a killed one has left go at the next start.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megatron_hexi.lab.testbed.job import free_port

#: The nodes, and the partition and the feature of each: two of a kind, so that one may fail.
NODES = {"fast0": "fast", "fast1": "fast", "slow0": "slow", "slow1": "slow"}
#: Ranks that a node has room for; Slurm counts them as GPUs too.
GPUS = 2

_TOOLS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "setpriv", "unshare", "mount")
_PREFIX = "hexi-slurm-"
_READY_S = 60.0

# A process tree in namespaces of its own, which ends with the process that started it, however that ends.
_TIED = (
    *("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--uts", "--pid"),
    *("--fork", "--kill-child", "--mount-proc"),
)
# Process 1 of a node: reaps what jobs leave, and lets the node's name stand for an address of this machine.
_NODE = ("bash", "-c", 'hostname "$1" && mount --bind "$2" /etc/hosts && { "${@:3}" & wait; }', "node")


def missing() -> str | None:
    """Why there can be no Slurm here; ``None`` where there can."""
    lacking = [tool for tool in _TOOLS if shutil.which(tool, path=_search_path()) is None]
    if lacking:
        return f"{', '.join(lacking)} not found; run tests/slurm/install.sh as root"
    tried = subprocess.run([*_TIED, "true"], capture_output=True, text=True, check=False)
    return f"no namespaces for this user: {tried.stderr.strip()}" if tried.returncode else None


@dataclass
class Slurm:
    """A running Slurm.

    Args:
        folder: configuration, state and logs.
        environment: in which Slurm's commands find it.
    """

    folder: Path
    environment: Mapping[str, str]
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def call(self, *words: str, cwd: Path | None = None, code: int = 0) -> str:
        """What a command says that ends with this exit code."""
        done = subprocess.run(
            words, env=self.environment, cwd=cwd, capture_output=True, text=True, timeout=250, check=False
        )
        said = done.stdout + done.stderr
        assert done.returncode == code, f"{' '.join(words)}: exit code {done.returncode}: {said}"
        return said.strip()

    def states(self) -> dict[str, str]:
        """The state of each node."""
        said = self.call("sinfo", "--Node", "--noheader", "--partition=all", "--format=%N %T")
        return dict(line.split() for line in said.splitlines())

    def start_node(self, node: str) -> None:
        """Let a node come up."""
        self.start(node, *_NODE, node, str(self.folder / "hosts"), "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Let a node fail: its slurmd and all that runs on it end at once."""
        self._stop(node)

    def start(self, name: str, *command: str) -> None:
        """Start a daemon."""
        with (self.folder / f"{name}.out").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [*_TIED, *command],
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # what is typed at the terminal is not for it
            )

    def stop(self) -> None:
        """Let everything end."""
        for name in list(self._running):
            self._stop(name)

    def _stop(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        process.wait()


@contextmanager
def running_slurm() -> Iterator[Slurm]:
    """A Slurm with all nodes idle.

    Raises:
        TimeoutError: it did not come up; the message holds what the controller said.
    """
    _sweep()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _search_path()}
    slurm = Slurm(folder, environment)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _configure(folder)
            _start_all(slurm)
            yield slurm
        finally:
            slurm.stop()
            shutil.rmtree(folder)


def _search_path() -> str:
    """Daemons are in sbin, which is not on every user's path."""
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])


def _sweep() -> None:
    """Remove folders whose owner is gone: nobody holds their lock."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if folder.owner() != pwd.getpwuid(os.geteuid()).pw_name:
            continue
        with (folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(folder)


def _configure(folder: Path) -> None:
    folder.chmod(0o755)  # munge looks at who may write, jobs of other users at who may read
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    for gpu in range(GPUS):
        (folder / f"gpu{gpu}").touch()
    (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
    addresses = {node: f"127.0.1.{number}" for number, node in enumerate(NODES, start=1)}
    names = [f"{address} {node}\n" for node, address in addresses.items()]
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
    user, (port, *ports) = pwd.getpwuid(os.geteuid()).pw_name, _free_ports(1 + len(NODES))
    nodes = "".join(
        f"NodeName={node} NodeHostname={node} NodeAddr={addresses[node]} Port={own} CPUs={GPUS} "
        f"RealMemory=1000 Gres=gpu:{GPUS} Feature={kind}\n"
        for (node, kind), own in zip(NODES.items(), ports, strict=True)
    )
    partitions = "".join(
        f"PartitionName={kind} Nodes={','.join(node for node in NODES if NODES[node] == kind)}\n"
        for kind in dict.fromkeys(NODES.values())
    )
    (folder / "slurm.conf").write_text(
        f"""\
ClusterName=emulated
FirstJobId={1 + secrets.randbelow(11000)}
SlurmctldHost={socket.gethostname()}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
SchedulerParameters=bf_interval=1,sched_min_interval=0
MinJobAge=3600
KillWait=30
SlurmdTimeout=10
ReturnToService=2
{nodes}{partitions}PartitionName=all Nodes=ALL Default=YES
"""
    )


def _start_all(slurm: Slurm) -> None:
    folder = slurm.folder
    files = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munged.pid", "seed-file": "seed"}
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    slurm.start("munged", "munged", "--foreground", "--force", f"--log-file={folder}/munged.log", *options)
    _wait(slurm, (folder / "munge.socket").exists)
    slurm.start("slurmctld", "slurmctld", "-D", "-i")
    for node in NODES:
        slurm.start_node(node)
    _wait(slurm, lambda: _all_idle(slurm))


def _all_idle(slurm: Slurm) -> bool:
    try:
        return set(slurm.states().values()) == {"idle"}
    except AssertionError:  # the controller does not answer yet
        return False


def _wait(slurm: Slurm, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _READY_S
    while not ready():
        if time.monotonic() > deadline:
            logs = sorted(slurm.folder.glob("*.out"))
            said = "".join(f"\n{log.name}: {log.read_text()[-1000:]}" for log in logs)
            raise TimeoutError(f"Slurm did not come up in {_READY_S:g} s:{said}")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


def main(command: list[str]) -> int:
    """Run a command on a Slurm; its exit code."""
    if why := missing():
        print(f"no Slurm: {why}", file=sys.stderr)
        return 2
    try:
        with running_slurm() as slurm:
            return subprocess.run(command, env=slurm.environment, check=False).returncode
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["bash"]))
