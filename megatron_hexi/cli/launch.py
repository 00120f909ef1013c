"""``hexi launch``: what to type for a plan that exists."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megatron_hexi.argument_file import read_words
from megatron_hexi.cli.options import MODEL_OF_PLAN, AsJson, ClusterOption, PlanPath
from megatron_hexi.cli.output import check_outputs, print_json, say
from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.cost import constant_flags, model_file, model_flags, read_model, read_terms
from megatron_hexi.errors import HexiError
from megatron_hexi.plan import Plan, read_plan
from megatron_hexi.report.launch import (
    LaunchLines,
    flags_text,
    launch_dict,
    launch_lines,
    launch_text,
    megatron_flags,
)
from megatron_hexi.text_file import write_text_atomically

app = typer.Typer()


@app.command(
    epilog="Example: hexi launch plan.yaml --cluster examples/clusters/mixed-16.yaml -o job.args -- "
    "--data-path data/text --tokenizer-type HuggingFaceTokenizer --tokenizer-model openai-community/gpt2 "
    "--train-iters 5000"
)
def launch(
    plan: PlanPath,
    cluster: ClusterOption,
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- FLAGS …", help="Your own of Megatron's flags, after two dashes: data, learning rate."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME|PATH", help=MODEL_OF_PLAN),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="JOB.args", help="Write Megatron's flags, for scripts/slurm/train.sbatch."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the lines that start a plan's training.

    Megatron's flags, torchrun for each node, and sbatch. Without data of your own they train ten iterations
    on Megatron's synthetic data.
    """
    planned = read_plan(plan)
    named = model or (planned.provenance.model if planned.provenance else None)
    if named is None:
        raise HexiError(
            f"{plan}: does not say which model it is for (provenance.model); add --model NAME|PATH"
        )
    check_outputs([plan, cluster, model_file(named)], [out], None, "text")
    lines = find_lines(planned, read_cluster(cluster), plan, cluster, named, more or [])
    if out is not None:
        write_text_atomically(out, flags_text(lines.flags))
        say(f"wrote {out}")
    if as_json:
        print_json({"plan": str(plan), "cluster": str(cluster)} | launch_dict(lines))
    else:
        print(launch_text(lines))


def _constants(model: str) -> list[str]:
    """Flags for the constants of a config.json; what Megatron has no flag for is named in a note."""
    try:
        return constant_flags(model)
    except HexiError as problem:
        say(f"note: Megatron's flags lack constants of the model: {problem}")
        return []


def find_lines(
    plan: Plan, cluster: Cluster, path: Path, cluster_path: Path, model: str, more: list[str]
) -> LaunchLines:
    """What to type for a plan.

    Args:
        plan: the plan.
        cluster: that it was made for.
        path: the plan's file.
        cluster_path: the cluster's.
        model: as ``--model`` takes it; of a file of Megatron's arguments all flags are taken.
        more: the user's own flags.

    Raises:
        HexiError: an unknown model, or a plan for another cluster.
    """
    file = model_file(model)
    shapes = read_model(model)
    if file is not None and read_terms(model) is not None:
        given = read_words(file)
    else:
        given = model_flags(shapes, plan.workload.seq_length) + _constants(model)
    flags = megatron_flags(given, more, plan, str(path))
    return launch_lines(
        plan, cluster, flags, plan_path=str(path), cluster_path=str(cluster_path), model=model
    )
