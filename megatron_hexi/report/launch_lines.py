"""Commands that start a plan's training: Megatron's flags, torchrun for each node, sbatch for all nodes.

torchrun numbers the ranks of a job agent by agent, so each agent takes consecutive ranks of the plan on one
node. A node whose ranks are not consecutive, or that the plan uses in part, gets an agent for each run of
ranks, which sees only the GPUs of these.
"""

from __future__ import annotations

import itertools
import shlex
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_hexi.argument_file import without_flags
from megatron_hexi.cluster import Cluster, NodeEntry
from megatron_hexi.cost import shipped_kernels
from megatron_hexi.errors import HexiError
from megatron_hexi.grouping import grouped
from megatron_hexi.options.job_terms import replaced_flags
from megatron_hexi.options.layer_features import resolve
from megatron_hexi.options.parser import parse_words
from megatron_hexi.options.plan_job import hold_job, replica_shares
from megatron_hexi.options.refusals import refuse_unsupported
from megatron_hexi.options.registry import ADDED
from megatron_hexi.plan import Plan
from megatron_hexi.plan.terms import join_kernels
from megatron_hexi.plan.units import job_ranks
from megatron_hexi.shell.words import unplaced
from megatron_hexi.slurm import find_gpus

#: Flags of a trial run that the user did not give: synthetic data, few iterations.
_TRIAL = {
    "--mock-data": None,
    "--tokenizer-type": "NullTokenizer",
    "--lr": "1e-4",
    "--eval-interval": "1000",
    "--log-interval": "1",
}
#: Lines of a trial's flags that change nothing of the training.
_QUIET = ("--eval-interval 1000", "--log-interval 1")
#: Flags with which the user has data.
_DATA = ("--data-path", "--data-args-path", "--per-split-data-args-path", "--mock-data")
#: Flags with which the job's schedule counts samples, not iterations.
_SAMPLES = ("--train-samples", "--lr-decay-samples", "--lr-warmup-samples")
#: Iterations between checkpoints, as in ``hexi slurm-arguments``.
SAVE_INTERVAL = 500
#: Iterations of a trial run.
_ITERATIONS = 10
_PORT = 29500


@dataclass(frozen=True)
class Agent:
    """A start of torchrun.

    Args:
        node: its host, if the cluster file names it, or else its name there.
        gpus: numbers of its GPUs in the node, ascending as ranks are.
    """

    node: str
    entry: NodeEntry
    gpus: tuple[int, ...]
    first_rank: int
    whole: bool


@dataclass(frozen=True)
class LaunchLines:
    """Commands and flags that start a training run.

    Args:
        torchrun: for each start, the node and the line to type there, in the order of ranks.
        unnamed: nodes for which the cluster file states no hosts: lines use its names of these nodes, and
            Slurm partitions with the same names.
    """

    flags: tuple[str, ...]
    torchrun: tuple[tuple[str, str], ...]
    sbatch: tuple[str, ...]
    unnamed: tuple[str, ...] = ()


def megatron_flags(model_words: Sequence[str], more: Sequence[str], plan: Plan, path: str) -> tuple[str, ...]:
    """Return all flags of a training run under a plan, as training parses them.

    Args:
        model_words: Megatron's flags of the model, and of the job where a file states it.
        more: the user's flags; they replace flags of the same name.
    """
    names = {word.partition("=")[0] for word in more}
    words = [
        *without_flags(model_words, {*replaced_flags(plan), *names}),
        "--seq-length",
        str(plan.workload.seq_length),
    ]
    args = _parse([*words, *more])
    resolve(args, path)
    if args.position_embedding_type != "learned_absolute":  # without weights: as many as there are tokens
        positions = max(args.max_position_embeddings or 0, plan.workload.seq_length)
        if positions != args.max_position_embeddings and "--max-position-embeddings" not in names:
            words = [
                *without_flags(words, {"--max-position-embeddings"}),
                "--max-position-embeddings",
                str(positions),
            ]
    names |= {word.partition("=")[0] for word in words}
    words += [word for flag, value in ADDED.items() if flag not in names for word in (flag, value)]
    # Kernels that the image lacks are left out: training uses the plan's kernel where it is installed.
    kernels = shipped_kernels(plan.job.kernel or {})
    pinned = ["--hexi-kernel", join_kernels(kernels)] if kernels and "--hexi-kernel" not in names else []
    flags = ("--hexi-plan", path, *pinned, *words, *_trial(names, args, plan), *more)
    check_flags(flags, plan)
    return flags


def trial_notes(flags: Sequence[str], given: Sequence[str]) -> list[str]:
    """Return notes on flags that were made up for a trial, and on flags that a real training lacks."""
    names, given_names = ({word.partition("=")[0] for word in words} for words in (flags, given))
    made_up = {*_TRIAL, "--train-iters", "--train-samples"} & names - given_names
    told = [line for line in _flag_lines(flags) if line.partition(" ")[0] in made_up and line not in _QUIET]
    lacking = {
        "--save FOLDER (nothing is saved without)": "--save" not in names,
        "--tokenizer-type": names.isdisjoint(("--mock-data", "--tokenizer-type", "--tokenizer-model")),
    }
    missing = [flag for flag, lacks in lacking.items() if lacks]
    notes = [f"made up for a trial: {', '.join(told)}; give your own"] if told else []
    return [*notes, f"not given: {', '.join(missing)}"] if missing else notes


def check_flags(flags: Sequence[str], plan: Plan) -> None:
    """Check flags against their plan, as each rank does before it allocates anything."""
    args = _parse(flags)
    for name in ("num_layers", "hidden_size", "num_attention_heads"):
        if getattr(args, name) is None and getattr(args, f"encoder_{name}", None) is None:
            raise HexiError(f"Megatron's flags: --{name.replace('_', '-')} is missing; add it")
    stages = plan.job.pipeline_parallel or args.pipeline_model_parallel_size
    args.rank, args.world_size = 0, job_ranks(plan, stages)
    hold_job(args, {word.partition("=")[0] for word in flags if word.startswith("--")}, plan)
    refuse_unsupported(args, "script")
    replica_shares(args, plan)


def _parse(words: Sequence[str]) -> Namespace:
    return parse_words(unplaced(words), "Megatron's flags").args


def _trial(names: set[str], args: Namespace, plan: Plan) -> list[str]:
    """Return flags that the user did not give, for a run of some iterations."""
    has_data = not names.isdisjoint(_DATA)
    trial = [
        word
        for flag, value in _TRIAL.items()
        if flag not in names and not (has_data and flag in ("--mock-data", "--tokenizer-type"))
        for word in (flag, value)
        if word is not None
    ]
    if args.save is not None and args.save_interval is None:
        trial += ["--save-interval", str(SAVE_INTERVAL)]
    if not names.isdisjoint(_SAMPLES):
        batch = plan.job.global_batch_size or args.global_batch_size or 1
        return trial if "--train-samples" in names else [*trial, "--train-samples", str(_ITERATIONS * batch)]
    if "--train-iters" in names:
        return trial
    if args.lr_warmup_iters >= _ITERATIONS and "--lr-decay-iters" not in names:  # longer than the trial
        trial += ["--lr-decay-iters", str(args.lr_warmup_iters + _ITERATIONS)]
    return [*trial, "--train-iters", str(_ITERATIONS)]


def find_agents(plan: Plan, cluster: Cluster) -> tuple[Agent, ...]:
    """Return the starts of torchrun, in the order of ranks."""
    ranks = [cluster.ranks[gpu] for gpu in find_gpus(plan, cluster)]
    entries = [entry for entry in cluster.file.nodes for _ in range(entry.count)]
    agents, first = [], 0
    for node, node_ranks in itertools.groupby(ranks, key=lambda rank: rank.node):
        gpus = tuple(rank.local for rank in node_ranks)
        whole = gpus == tuple(range(len(cluster.nodes[node].ranks)))
        # Names of hosts: a single node has no number.
        usual = entries[node].name if entries[node].count == 1 else cluster.nodes[node].name
        name = cluster.file.hosts[node] or usual
        agents.append(Agent(name, entries[node], gpus, first, whole))
        first += len(gpus)
    return tuple(agents)


def launch_lines(
    plan: Plan,
    cluster: Cluster,
    flags: Sequence[str],
    *,
    plan_path: str,
    cluster_path: str,
    model: str,
    more: Sequence[str] = (),
    written: str | None = None,
) -> LaunchLines:
    """Return the commands of a plan."""
    agents = find_agents(plan, cluster)
    return LaunchLines(
        flags=tuple(flags),
        torchrun=tuple((agent.node, _torchrun(number, agents)) for number, agent in enumerate(agents)),
        sbatch=_sbatch(agents, (plan_path, cluster_path, model), more, written),
        unnamed=tuple(dict.fromkeys(agent.node for agent in agents if not agent.entry.hosts)),
    )


def launch_dict(lines: LaunchLines) -> dict[str, Any]:
    """Return the commands as plain values."""
    values = asdict(lines)
    return values | {"torchrun": [{"node": node, "line": line} for node, line in lines.torchrun]}


def launch_text(lines: LaunchLines) -> str:
    """Return the commands as a shell reads them: the flags, then torchrun for each node, then Slurm's."""
    data = " Synthetic data until you give your own." if "--mock-data" in lines.flags else ""
    text = [f"# Megatron's flags; the plan sets the others.{data}"]
    text += ["FLAGS=(", *(f"  {line}" for line in _flag_lines(lines.flags)), ")"]
    if lines.unnamed:
        text += [
            "# Nodes have the cluster file's names here: put in addresses (--master-addr) and partitions,",
            "# or say hosts: at the nodes there, by which these lines then go.",
        ]
    text += [f"{line}  # {node}" for node, line in lines.torchrun]
    return "\n".join([*text, "# or with Slurm", *lines.sbatch])


def _torchrun(number: int, agents: Sequence[Agent]) -> str:
    agent = agents[number]
    together = ["--standalone"]
    if len(agents) > 1:
        # Static: node ranks stay as they are written, and agents may have different numbers of ranks.
        together = [
            f"--nnodes={len(agents)}",
            f"--node-rank={number}",
            f"--master-addr={agents[0].node}",
            f"--master-port={_PORT}",
        ]
    visible = "" if agent.whole else f"CUDA_VISIBLE_DEVICES={','.join(map(str, agent.gpus))} "
    words = [f"--nproc-per-node={len(agent.gpus)}", *together, "-m", "megatron_hexi.pretrain_gpt"]
    return f'{visible}python -m megatron_hexi.torchrun {" ".join(words)} "${{FLAGS[@]}}"'


def _sbatch(
    agents: Sequence[Agent], files: tuple[str, str, str], more: Sequence[str], written: str | None
) -> tuple[str, ...]:
    components = [
        f"{where} --nodes={count} --exclusive --ntasks-per-node={gpus} --gpus-per-node={gpus}"
        for where, count, gpus in _components(agents)
    ]
    plan, cluster, model = map(shlex.quote, files)
    arguments = shlex.quote(written or "job.args")
    started = (
        f"PLAN={plan} CLUSTER={cluster} ARGUMENTS={arguments} sbatch {' : '.join(components)} "
        "scripts/slurm/train.sbatch"
    )
    if written is not None:
        return (started,)
    own = f" -- {shlex.join(more)}" if more else ""
    return (f"hexi launch {plan} --cluster {cluster} --model {model} -o {arguments}{own}", started)


def _components(agents: Sequence[Agent]) -> Iterator[tuple[str, int, int]]:
    """Yield where each component of a job runs, its number of nodes, and GPUs of each node.

    Nodes with hosts in the cluster file are selected by host, grouped by their number of GPUs.
    """
    used = {agent.node: agent.entry for agent in agents}
    named = grouped((entry.gpus, host) for host, entry in used.items() if entry.hosts)
    for gpus, hosts in named.items():
        yield f"--nodelist={shlex.quote(','.join(hosts))}", len(hosts), gpus
    unnamed = [entry for entry in used.values() if not entry.hosts]
    counts = Counter(entry.name for entry in unnamed)
    gpus_of = {entry.name: entry.gpus for entry in unnamed}
    for name, count in counts.items():
        yield f"--partition={shlex.quote(name)}", count, gpus_of[name]


def _flag_lines(flags: Sequence[str]) -> list[str]:
    """Return the flags for a shell, each with its values on a line of its own."""
    lines: list[list[str]] = []
    for word in flags:
        if word.startswith("--") or not lines:
            lines.append([])
        lines[-1].append(word)
    return [shlex.join(line) for line in lines]


def flags_text(flags: Sequence[str]) -> str:
    """Return the flags as a file of Megatron's arguments."""
    return "".join(f"{line}\n" for line in _flag_lines(flags))
