"""Options of a job on Kubernetes, and ``hexi launch-probe``: the manifests that measure a cluster there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from megatron_hexi.argument_file import last_value
from megatron_hexi.cli import probe as measuring
from megatron_hexi.cli.bundles import Bundle, with_bundles
from megatron_hexi.cli.options import ClusterPath, whole
from megatron_hexi.cli.output import AsJson, check_outputs, output_option, print_json, say
from megatron_hexi.cluster import Cluster, read_cluster
from megatron_hexi.errors import HexiError
from megatron_hexi.kubernetes.manifests import SECRET_KEY, manifests, manifests_text, secret_name
from megatron_hexi.kubernetes.pods import elastic_pods, probe_pods, training_pods
from megatron_hexi.kubernetes.settings import (
    FOLDER,
    Settings,
    read_labels,
    read_resources,
    read_volume,
)
from megatron_hexi.plan import Plan, dump_plan
from megatron_hexi.plan.flags import flag_name
from megatron_hexi.report.launch_lines import SAVE_INTERVAL, flags_text
from megatron_hexi.slurm import plan_start
from megatron_hexi.text_file import read_text, write_text_atomically

_PANEL = "Kubernetes"
#: Megatron's flags of folders that must outlive a pod, or come from outside.
_FOLDERS = ("--save", "--load", "--pretrained-checkpoint", "--data-path", "--tensorboard-dir")

app = typer.Typer()


def _option(name: str, text: str, metavar: str, **more: Any) -> Any:
    return typer.Option(name, help=text, metavar=metavar, rich_help_panel=_PANEL, show_default=False, **more)


@dataclass(frozen=True, kw_only=True)
class Manifests(Bundle):
    """Options of a job's Kubernetes manifests."""

    kubernetes: Annotated[
        str | None, _option("--kubernetes", "Write manifests: Jobs, or one JobSet.", "job|jobset")
    ] = None
    image: Annotated[str | None, _option("--image", "Image of all pods; required.", "IMAGE")] = None
    name: Annotated[str | None, _option("--name", "Name of the job; default: train, or probe.", "NAME")] = (
        None
    )
    namespace: Annotated[
        str | None, _option("--namespace", "Namespace of all objects; default: kubectl's.", "NAME")
    ] = None
    volume: Annotated[
        list[str] | None,
        _option(
            "--volume",
            "A PersistentVolumeClaim, or a folder of the nodes, in every pod; may be repeated.",
            "CLAIM:/PATH[:ro]",
        ),
    ] = None
    node_label: Annotated[
        list[str] | None,
        _option(
            "--node-label",
            "A label of an entry's nodes; if not given, the entry's hosts, else the product label that "
            "gpu-feature-discovery sets. May be repeated.",
            "ENTRY:LABEL=VALUE",
        ),
    ] = None
    resource: Annotated[
        list[str] | None,
        _option(
            "--resource",
            "Another resource that each pod requests: rdma/hca_shared_devices_a=1; may be repeated.",
            "[ENTRY:]NAME=COUNT",
        ),
    ] = None

    def refuse_without_kubernetes(self) -> None:
        """Refuse options of Kubernetes where no manifests are asked for."""
        for field in dataclasses.fields(self):
            if getattr(self, field.name) != field.default:
                raise HexiError(
                    f"{flag_name(field.name)}: works with --kubernetes only; add --kubernetes job or jobset"
                )

    def settings(self, cluster: Cluster, name: str, **more: Any) -> Settings:
        """Return the checked settings of a job.

        Args:
            more: fields of `Settings` that other commands lack.
        """
        if self.image is None:
            raise HexiError(f"--kubernetes {self.kubernetes}: --image is missing; give the pods' image")
        entries = [entry.name for entry in cluster.file.nodes]
        return Settings(
            form=self.kubernetes,  # type: ignore[arg-type]  # checked there
            image=self.image,
            name=name if self.name is None else self.name,
            namespace=self.namespace,
            volumes=tuple(map(read_volume, self.volume or ())),
            labels=read_labels(self.node_label or (), entries),
            resources=read_resources(self.resource or (), entries),
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class TrainingManifests(Manifests):
    """Options of Kubernetes manifests for a training run."""

    elastic: Annotated[
        int | None,
        _option(
            "--elastic",
            "Continue after node failures while this many nodes are left (docs/surviving.md).",
            "NODES",
            parser=whole,
        ),
    ] = None
    spare: Annotated[
        list[str] | None,
        _option(
            "--spare",
            "With --elastic: a node that the plan leaves out, and that waits; may be repeated.",
            "NODE",
        ),
    ] = None
    restarts: Annotated[
        int | None,
        _option("--restarts", "Most restarts of the job; default: 3.", "N", parser=whole),
    ] = None

    def training(
        self, plan: Plan, cluster: Cluster, path: Path, flags: tuple[str, ...]
    ) -> list[dict[str, Any]]:
        """Return the Kubernetes objects of a training run."""
        if self.restarts is not None and not 0 <= self.restarts <= 1000:
            raise HexiError(f"--restarts {self.restarts}: give 0 to 1000")
        restarts = Settings.restarts if self.restarts is None else self.restarts
        if self.spare and self.elastic is None:
            raise HexiError(f"--spare {self.spare[0]}: only elastic jobs have spares; add --elastic NODES")
        settings = self.settings(
            cluster, "train", restarts=restarts, least=self.elastic, spares=tuple(self.spare or ())
        )
        words = _resuming(flags)
        files = {"plan.yaml": dump_plan(plan), "job.args": flags_text(words)}
        if self.elastic is None:
            pods = training_pods(plan, cluster, settings)
        else:
            if words == flags:
                raise HexiError("--elastic: needs checkpoints to go on from; add -- --save /FOLDER")
            pods = elastic_pods(plan, cluster, settings)
            files["cluster.yaml"] = read_text(path)
            where = "" if settings.namespace is None else f" -n {settings.namespace}"
            say(
                "note: its pods know each other by a Secret; make it first: openssl rand -hex 32 | "
                f"kubectl{where} create secret generic {secret_name(settings)} "
                f"--from-file={SECRET_KEY}=/dev/stdin"
            )
        _say_lost(words, settings)
        return manifests(pods, files, settings)


#: Where pods find the plan.
PLAN_IN_POD = str(FOLDER / "plan.yaml")


#: Where Megatron's flags stand, for errors.
_FLAGS = Path("Megatron's flags")


def _resuming(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return the flags with which every start resumes from the last checkpoint; the same if none is saved."""
    save, load = (last_value(flags, flag, _FLAGS) for flag in ("--save", "--load"))
    if save is None:
        say("note: without --save a job that starts again begins at iteration 0")
        return flags
    if load not in (None, save):
        raise HexiError(
            f"{_FLAGS}: --load {load} is loaded at every start, and --save {save} is another folder; give "
            f"--pretrained-checkpoint {load} instead"
        )
    start = plan_start(
        flags, _FLAGS, plan=PLAN_IN_POD, checkpoints=save, save_interval=SAVE_INTERVAL, again=True
    )
    return start.words


def _say_lost(flags: tuple[str, ...], settings: Settings) -> None:
    """Say which folders are in no volume: what is written there is lost with the pod."""
    for flag in _FOLDERS:
        value = last_value(flags, flag, _FLAGS)
        if value is not None and not settings.holds(value):
            say(f"note: {flag} {value} lies in no --volume; a pod finds there only what its image has")


def write_manifests(
    objects: list[dict[str, Any]], files: dict[str, str], out: Path | None, *, as_json: bool
) -> None:
    """Write manifests to a file, or print them, and print the document that ``--json`` asks for."""
    text = manifests_text(objects)
    if out is not None:
        write_text_atomically(out, text)
        say(f"wrote {out}")
    if as_json:
        print_json(files | {"manifests": objects})
    elif out is None:
        print(text, end="")


@dataclass(frozen=True, kw_only=True)
class ProbeManifests(Manifests):
    """Options of a probe's Kubernetes manifests."""

    kubernetes: Annotated[
        str, _option("--kubernetes", "Jobs, which is what you get if not given, or one JobSet.", "job|jobset")
    ] = "job"


@app.command(
    name="launch-probe",
    epilog="Example: hexi launch-probe examples/clusters/mixed-16.yaml --image registry.example/hexi:0.1.0 "
    "--volume train:/train -o probe.yaml -- -o /train/cluster.yaml --hidden-size 4096",
)
@with_bundles
def launch_probe(
    cluster: ClusterPath,
    job: ProbeManifests,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="-- OPTIONS …", help="Those of hexi probe, after two dashes; -o in a --volume."
        ),
    ],
    out: Annotated[
        Path | None, output_option("PROBE.yaml", "Write the manifests here, not to standard output.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write manifests of a probe on Kubernetes.

    CLUSTER.yaml says how many nodes of which GPU there are: one written by hand will do, its rates do not
    matter.
    """
    check_outputs([cluster], [out], None)
    machines = read_cluster(cluster)
    settings = job.settings(machines, "probe", restarts=0)
    measured = measuring.read_words(words)
    if not settings.holds(str(measured)):
        raise HexiError(f"-- -o {measured}: is lost with the pod; give a path in a --volume, and no ..")
    objects = manifests(probe_pods(machines, settings, words), {}, settings)
    write_manifests(objects, {"cluster": str(cluster)}, out, as_json=as_json)
