"""The command's side of the testbed: refuses what cannot be emulated, starts the lab, waits for its end."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import psutil

from megatron_hexi.cluster import Cluster, Device, cluster_from_yaml
from megatron_hexi.cluster.schema import refuse
from megatron_hexi.errors import HexiError
from megatron_hexi.lab.testbed.isolation import check_tools, command_prefix, find_isolation
from megatron_hexi.lab.testbed.lab import SPEEDS, Lab, Speeds, parse_throttle, write_lab
from megatron_hexi.lab.testbed.quotas import KERNEL, rank_quotas
from megatron_hexi.text_file import read_text, write_text_atomically
from megatron_hexi.yaml_file import YamlFile, yaml_from_text

#: An address is 10.77.NODE.GPU.
_MOST = 250
#: A quota knows one speed of a device: attention and matrix products must agree on it.
_SAME_RATIO = 0.01


def check_emulable(cluster: Cluster, source: YamlFile, speeds: Speeds, *, links: bool) -> None:
    """Refuse a cluster that the testbed cannot emulate."""
    if len(cluster.nodes) > _MOST or any(len(node.ranks) > _MOST for node in cluster.nodes):
        refuse(source, ("nodes",), f"= more than {_MOST} nodes, or GPUs of one", "emulate a smaller cluster")
    if links:
        _check_links(cluster, source)
    if speeds != "none":
        for number, entry in enumerate(cluster.file.nodes):
            device = next(rank.device for rank in cluster.ranks if rank.device.name == entry.gpu)
            if KERNEL not in device.kernels:
                problem = f"= {entry.gpu} has no curves of {KERNEL}, the kernel that ranks here compute with"
                refuse(source, ("nodes", number, "gpu"), problem, "give them below devices:")
    if speeds == "quota":
        _check_one_speed(cluster, source)


def _check_links(cluster: Cluster, source: YamlFile) -> None:
    file = cluster.file
    instead = "describe the nodes' links by network, or take --emulate-links off"
    if file.matrix is not None:
        refuse(source, ("matrix",), "cannot be emulated: a node has one link here, as wide to all", instead)
    for field in ("fabrics", "levels"):
        if getattr(file, field):
            refuse(source, (field,), "cannot be emulated: nodes hang on one switch here", instead)
    for number, entry in enumerate(file.nodes):
        node = cluster.nodes[file.node_numbers[entry.name].start]
        if node.cards is None:
            return
        if node.cards.count > 1:
            if entry.network is not None:
                problem = (
                    f"= {entry.network.cards} cannot be emulated: the GPUs of a node share its link here"
                )
                refuse(source, ("nodes", number, "network", "cards"), problem, "write cards: 1")
            problem = "= gpu cannot be emulated: the GPUs of a node share its link here"
            refuse(source, ("network", "per"), problem, "write per: node, or give each node one GPU")
        network = node.cards.bandwidth
        if entry.gpus > 1 and node.bandwidth < network:
            problem = (
                f"has {node.bandwidth / 1e9:g} GB/s inside and {network / 1e9:g} outside: not emulated, what "
                "leaves a node passes the GPU's own port here"
            )
            refuse(source, ("nodes", number), problem, "make intra the faster, or take --emulate-links off")


def _check_one_speed(cluster: Cluster, source: YamlFile) -> None:
    """Refuse devices whose speedup over the first differs between attention and matrix products."""
    first = cluster.ranks[0].device
    for number, entry in enumerate(cluster.file.nodes):
        device = cluster.ranks[cluster.nodes[cluster.file.node_numbers[entry.name].start].ranks[0]].device
        ratios = [rate / of_first for rate, of_first in zip(_top(device), _top(first), strict=True)]
        if max(ratios) > (1 + _SAME_RATIO) * min(ratios):
            problem = (
                f"is {min(ratios):.3g} to {max(ratios):.3g} times as fast as {first.name}, by kind of work"
            )
            refuse(source, ("nodes", number), f"{problem}: a quota has one speed", "take --speeds paced")


def _top(device: Device) -> list[float]:
    """Return the last rate of each curve, TFLOP/s."""
    return [curve.rates[-1] for curve in (device.layer_matmul, *device.attention(KERNEL).curves.values())]


def run_testbed(
    path: Path,
    *,
    folder: Path | None,
    speeds: str,
    links: str,
    gpus: str | None,
    program: Sequence[str],
    quiet: bool,
    throttles: Sequence[str] = (),
) -> tuple[int, dict[str, Any] | None]:
    """Emulate a cluster, run a job on it, and measure what was emulated.

    Args:
        folder: the run folder, new or empty; ``None``: one that is named by the time.
        gpus: GPUs of the cluster file that the ranks stand for, as ``0,1``; ``None``: all.
        quiet: print the job's output on standard error, since standard output is for a document.
        speeds: ``paced``, ``quota`` or ``none``.
        program: the program for torchrun; empty: only measure.

    Returns:
        The exit code, and what was measured if it came to that.
    """
    _check_words(speeds, links, program)
    text = read_text(path)  # once: it may be a pipe
    source = yaml_from_text(path, text)
    cluster = cluster_from_yaml(source)
    method = cast(Speeds, speeds)
    check_emulable(cluster, source, method, links=links == "on")
    chosen = _choose(cluster, gpus)
    slowed = tuple(parse_throttle(text, len(cluster.ranks)) for text in throttles)
    if slowed and method != "paced":
        raise HexiError(f"--throttle {throttles[0][:40]}: speeds change under paced only; add --speeds paced")
    check_tools()
    isolation = find_isolation()
    emulated = links == "on" and isolation != "none"
    if links == "on" and not emulated:
        print(
            "NOTE: neither root nor user namespaces here: the links of the file are NOT emulated",
            file=sys.stderr,
        )
    with ExitStack() as stack:
        quotas = stack.enter_context(rank_quotas(cluster)) if method == "quota" else ()
        lab = Lab(_claim(folder), method, emulated, isolation, chosen, quotas, tuple(program), slowed)
        write_text_atomically(lab.cluster, text)
        write_lab(lab)
        print(f"everything is written to {lab.folder}", file=sys.stderr)
        process = stack.enter_context(_supervised(lab, quiet))
        code = process.wait()
    return code, json.loads(lab.result.read_text()) if lab.result.exists() else None


def _check_words(speeds: str, links: str, program: Sequence[str]) -> None:
    if speeds not in SPEEDS:
        raise HexiError(f"--speeds {speeds}: unknown kind of speeds; take {', '.join(SPEEDS)}")
    if links not in ("on", "off"):
        raise HexiError(f"--emulate-links {links}: give on or off")
    if program and program[0] == "-m" and len(program) == 1:
        raise HexiError("-m: no module follows it; write -m megatron_hexi.pretrain_gpt and its arguments")
    if program and program[0] != "-m" and not os.path.isfile(program[0]):
        raise HexiError(f"{program[0]}: no such script; write a script's path, or -m and a module's name")


def _choose(cluster: Cluster, gpus: str | None) -> tuple[int, ...]:
    count = len(cluster.ranks)
    if gpus is None:
        return tuple(range(count))
    words = gpus.split(",")
    chosen = tuple(int(word) for word in words if word.isascii() and word.isdecimal() and len(word) < 6)
    known = len(chosen) == len(words) == len(set(chosen)) and max(chosen) < count
    if known:
        # A torchrun a node starts ranks that follow each other.
        nodes = [cluster.ranks[gpu].node for gpu in chosen]
        known = len(list(itertools.groupby(nodes))) == len(set(nodes))
    if not known:
        remedy = f"give GPUs of the file, 0 to {count - 1}, each once, those of a node together: 2,0,1"
        raise HexiError(f"--gpus {gpus[:40]}: {remedy}")
    return chosen


def _claim(folder: Path | None) -> Path:
    path = Path(os.path.realpath(folder or Path("runs") / time.strftime("testbed-%Y%m%d-%H%M%S")))
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise HexiError(f"{path}: holds files already; give a new or an empty folder")
    except OSError as problem:
        raise HexiError(f"{path}: cannot be used ({problem.strerror}); give another folder") from None
    return path


@contextlib.contextmanager
def _supervised(lab: Lab, quiet: bool) -> Iterator[subprocess.Popen[bytes]]:
    """Run the lab's first process; when the context ends, so does every process of the lab."""
    process = subprocess.Popen(
        [
            *command_prefix(lab.isolation),
            *(sys.executable, "-m", "megatron_hexi.lab.testbed.supervisor", str(lab.folder)),
        ],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if quiet else None,
        start_new_session=True,  # the terminal's Ctrl-C reaches us alone
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            # `unshare` waits for process 1 of the lab, and that for the kernel to end all others.
            top = psutil.Process(process.pid)
            for started in (*top.children(recursive=True), top):
                with contextlib.suppress(psutil.NoSuchProcess):
                    started.kill()
            process.wait()
