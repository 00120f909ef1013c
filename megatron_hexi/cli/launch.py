"""``hexi launch``: the commands that start the training of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from megatron_hexi.argument_file import replace_flags
from megatron_hexi.cli.bundles import with_bundles
from megatron_hexi.cli.kubernetes import PLAN_IN_POD, TrainingManifests, write_manifests
from megatron_hexi.cli.options import MODEL_OF_PLAN, ClusterOption, PlanPath
from megatron_hexi.cli.output import AsJson, check_outputs, output_option, print_json, say
from megatron_hexi.cli.planned_job import naming_files
from megatron_hexi.cli.script_start import start_with_plan
from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.errors import HexiError, NoFlagError
from megatron_hexi.models import (
    BRIDGE_ALONE,
    argument_words,
    constant_flags,
    constant_notes,
    model_file,
    model_flags,
    read_model,
    reading_notes,
)
from megatron_hexi.options.job_terms import replaced_flags
from megatron_hexi.options.registry import ADDED
from megatron_hexi.plan import Plan, read_plan
from megatron_hexi.report.launch_lines import (
    LaunchLines,
    flags_text,
    launch_dict,
    launch_lines,
    launch_text,
    megatron_flags,
    trial_notes,
)
from megatron_hexi.report.planned import assumption_lines
from megatron_hexi.slurm import find_gpus
from megatron_hexi.text_file import write_text_atomically

app = typer.Typer()


@app.command(
    epilog="Example: hexi launch plan.yaml --cluster examples/clusters/mixed-16.yaml -o job.args -- "
    "--data-path data/text --tokenizer-type HuggingFaceTokenizer --tokenizer-model openai-community/gpt2 "
    "--train-iters 5000"
)
@with_bundles
def launch(
    plan: PlanPath,
    cluster: ClusterOption,
    kubernetes: TrainingManifests,
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- FLAGS …|COMMAND …",
            help="After two dashes your own of Megatron's flags, as data and learning rate; or the command "
            "that starts your training, which is run: its training starts with the plan.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME|PATH", help=MODEL_OF_PLAN),
    ] = None,
    out: Annotated[
        Path | None,
        output_option(
            "JOB.args",
            "Write Megatron's flags, for scripts/slurm/train.sbatch; with --kubernetes the manifests.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the commands that start training under a plan.

    Megatron's flags, torchrun for each node, and sbatch. Without data of your own they train ten iterations
    on Megatron's synthetic data. With --kubernetes: the manifests of a job.

    With -- COMMAND nothing is printed: it RUNS YOUR SCRIPT, whose torchrun or python gets megatron_hexi.run
    before the training script, and --hexi-plan in place of the flags that the plan sets.
    """
    planned = read_plan(plan)
    if more and not more[0].startswith("-"):
        if out or as_json or kubernetes.kubernetes:
            raise HexiError(f"-- {more[0]}: hexi launch runs it; leave -o, --json and --kubernetes out")
        with naming_files(plan, cluster):
            find_gpus(planned, read_cluster(cluster))
        first = [word for pair in ADDED.items() for word in pair]
        raise typer.Exit(start_with_plan(more, plan, sorted(replaced_flags(planned)), first))
    named = model or (planned.provenance.model if planned.provenance else None)
    if named is None:
        raise HexiError(
            f"{plan}: does not say which model it is for (provenance.model); add --model NAME|PATH"
        )
    files = {"plan": str(plan), "cluster": str(cluster)}
    kind = "text" if kubernetes.kubernetes is None else "YAML"
    check_outputs([plan, cluster, model_file(named)], [out], None, kind)
    machines = read_cluster(cluster)
    for note in reading_notes(named):
        say(f"note: {named}: {note}")
    if kubernetes.kubernetes is not None:
        flags = find_flags(planned, PLAN_IN_POD, named, more or [])
        _say_kernels(planned, machines)
        with naming_files(plan, cluster):
            objects = kubernetes.training(planned, machines, cluster, flags)
        write_manifests(objects, files, out, as_json=as_json)
        say_trial(flags, named, more or [])
        return
    kubernetes.refuse_without_kubernetes()
    lines = find_lines(planned, machines, plan, cluster, named, more or [], out)
    _say_kernels(planned, machines)
    if out is not None:
        write_text_atomically(out, flags_text(lines.flags))
        say(f"wrote {out}")
    say_trial(lines.flags, named, more or [])
    if as_json:
        print_json(files | launch_dict(lines))
    else:
        print(launch_text(lines))


def _say_kernels(plan: Plan, cluster: Cluster) -> None:
    """Print a note for each of the plan's kernels that the shipped image lacks, with a flag to avoid it."""
    for line in assumption_lines(cluster, plan):
        say(line)


def find_lines(
    plan: Plan,
    cluster: Cluster,
    path: Path,
    cluster_path: Path,
    model: str,
    more: list[str],
    written: Path | None = None,
) -> LaunchLines:
    """Return the commands that start the training of a plan.

    Args:
        model: value of ``--model``; if it is a file of Megatron's arguments, all of its flags are used.
        written: the file that the flags are written to; ``None``: they are printed only.

    Raises:
        NoFlagError: Megatron has no flag for a constant of the model, so it would train another model.
    """
    flags = find_flags(plan, str(path), model, more)
    with naming_files(path, cluster_path):
        return launch_lines(
            plan,
            cluster,
            flags,
            plan_path=str(path),
            cluster_path=str(cluster_path),
            model=model,
            more=more,
            written=None if written is None else str(written),
        )


def find_flags(plan: Plan, path: str, model: str, more: list[str]) -> tuple[str, ...]:
    """Return all of Megatron's flags for a plan; for arguments and errors see `find_lines`."""
    given = argument_words(model)
    if plan.job.lora_rank is not None:
        raise NoFlagError(f"{path}: adapters of rank {plan.job.lora_rank}: {BRIDGE_ALONE}")
    if any(member.patches is not None for member in plan.members):
        raise NoFlagError(f"{path}: divided images: {BRIDGE_ALONE}")
    if given is None:
        given = replace_flags(model_flags(read_model(model), plan.workload.seq_length), constant_flags(model))
        if "--moe-router-load-balancing-type" not in more:
            for note in constant_notes(model):
                say(f"note: {note}")
    return megatron_flags(given, more, plan, path)


def say_trial(flags: Sequence[str], model: str, more: Sequence[str]) -> None:
    """Print which flags were made up or are missing, unless all but the model is a trial."""
    words = argument_words(model)
    if words or more:
        for note in trial_notes(flags, [*(words or ()), *more]):
            say(f"note: {note}")
