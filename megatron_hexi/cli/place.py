"""``hexi place`` and ``hexi slurm-arguments``: the host and the arguments of each rank of a Slurm job."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from megatron_hexi.argument_file import located_words
from megatron_hexi.cli.options import ClusterOption, PlanPath, whole
from megatron_hexi.cli.output import AsJson, check_outputs, output_option, print_json, say, tell
from megatron_hexi.cli.planned_job import naming_files
from megatron_hexi.cluster import read_cluster
from megatron_hexi.errors import HexiError
from megatron_hexi.models.megatron_arguments import read_arguments
from megatron_hexi.plan import read_plan
from megatron_hexi.shell.script import MAX_BYTES as MOST_OF_ARGUMENTS
from megatron_hexi.slurm import allocated_hosts, parse_nodes, plan_start
from megatron_hexi.slurm import place as place_ranks
from megatron_hexi.text_file import MAX_BYTES, read_text, write_text_atomically
from megatron_hexi.whole_number import variable_number

app = typer.Typer()


@app.command(
    epilog="Example: hexi place plan.yaml --cluster cluster.yaml -o hosts "
    "< <(sinfo --all --Node --noheader --format='%N|%R|%f|%G')"
)
def place(
    plan: PlanPath,
    cluster: ClusterOption,
    out: Annotated[Path, output_option("HOSTS", "Where to write the hosts.")],
    spares: Annotated[
        bool,
        typer.Option(
            "--spares",
            help="Use hosts of the cluster file that the plan leaves out as spares of an elastic job.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find the hosts of a plan's ranks in this Slurm job.

    Reads the output of sinfo for all nodes from standard input (the example below).
    Writes HOSTS, a line a rank in rank order, for HEXI_HOSTS; HOSTS.0, HOSTS.1, …, its lines by component of
    the job, for srun --distribution=arbitrary --nodelist; and HOSTS.nodes, a line a host with its node's name
    and GPUs in the cluster file, for megatron_hexi.elastic --nodes. With --spares, hosts of
    spares have a line in HOSTS.0, HOSTS.1, … and in HOSTS.nodes.
    """
    components = allocated_hosts(os.environ)
    parts = [Path(f"{out}.{number}") for number in range(len(components))]
    nodes = Path(f"{out}.nodes")
    check_outputs([plan, cluster], [out, nodes, *parts], None, "text")
    hosts = [host for component in components for host in component]
    machines = read_cluster(cluster)
    planned, slurm_nodes = read_plan(plan), parse_nodes(_nodes_text())
    with naming_files(plan, cluster):
        placed = place_ranks(planned, machines, slurm_nodes, hosts, spares)
    _write(out, placed.hosts)
    gpus = {node.name: len(node.ranks) for node in machines.nodes}
    lines = [f"{host} {node} {gpus[node]}" for node, host in placed.nodes.items()]
    waiting = [f"{host} {node} {gpus[node]} spare" for node, host in placed.spares.items()]
    _write(nodes, lines + waiting)
    for path, component in zip(parts, components, strict=True):
        part = [host for host in (*placed.hosts, *placed.spares.values()) if host in component]
        if part:
            _write(path, part)
        else:  # left by an earlier start of this job
            path.unlink(missing_ok=True)
    ranks = Counter(placed.hosts)
    if as_json:
        print_json(
            {
                "hosts": placed.hosts,
                "nodes": dict(placed.nodes),
                "spares": dict(placed.spares),
                "idle": placed.idle,
            }
        )
    else:
        for node, host in placed.nodes.items():
            tell(f"{node} is {host}: {ranks[host]} rank{'' if ranks[host] == 1 else 's'}")
        for node, host in placed.spares.items():
            tell(f"{node} is {host}: a spare")
    for absent, host in placed.absent.items():
        say(f"note: {absent} is not in this job; {host}, which Slurm describes alike, stands in for it")
    if placed.idle:
        say(f"note: without ranks by this plan: {', '.join(placed.idle)}")
    say(f"wrote {out}")


def _nodes_text() -> str:
    """Read sinfo's output from standard input; refuse a terminal."""
    if sys.stdin is None or sys.stdin.isatty():
        raise HexiError("standard input is a terminal or closed; pipe in sinfo's output (hexi place --help)")
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = sys.stdin.read(MAX_BYTES + 1)
        if len(text) <= MAX_BYTES:
            return text
    raise HexiError("standard input is not sinfo's output; pipe it in, as hexi place --help shows")


def _write(path: Path, hosts: list[str] | tuple[str, ...]) -> None:
    write_text_atomically(path, "".join(f"{host}\n" for host in hosts))


@app.command(
    epilog="Example: hexi slurm-arguments job.args --plan plan.yaml --checkpoints checkpoints -o words"
)
def slurm_arguments(
    file: Annotated[
        Path, typer.Argument(metavar="JOB.args", help="Megatron's arguments, as the user has them.")
    ],
    plan: Annotated[str, typer.Option(metavar="PLAN.yaml", help="The plan that ranks are placed by.")],
    checkpoints: Annotated[str, typer.Option(metavar="FOLDER", help="Where to save without --save.")],
    out: Annotated[Path, output_option("WORDS", "Where to write the words.")],
    save_interval: Annotated[
        int, typer.Option(metavar="N", help="Iterations from checkpoint to checkpoint.", parser=whole)
    ] = 500,
) -> None:
    """Complete Megatron's arguments for a Slurm job.

    Keeps the file's --save, --load, --save-interval and --ckpt-format; without them training saves in
    FOLDER and resumes from there. Writes WORDS, each ended by a NUL byte, as mapfile -d '' reads them.
    """
    check_outputs([file], [out], None, "text")
    again = variable_number(os.environ, "SLURM_RESTART_COUNT", 0) > 0
    if save_interval < 1:
        raise HexiError(f"--save-interval {save_interval}: give a number of iterations above 0")
    if os.path.exists(checkpoints) and not os.path.isdir(checkpoints):
        raise HexiError(f"--checkpoints {checkpoints}: is a file; give a folder, new or there already")
    text = read_text(file, MOST_OF_ARGUMENTS)
    located = located_words(text, file)
    read_arguments(located, file, read_plan(plan))
    words = [word.text for word in located]
    start = plan_start(
        words, file, plan=plan, checkpoints=checkpoints, save_interval=save_interval, again=again
    )
    write_text_atomically(out, "".join(f"{word}\0" for word in start.words))
    tell(f"saves in {start.save}; goes on from {start.load}")
    say(f"wrote {out}")
