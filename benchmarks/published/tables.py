"""What was published, read from figures.yaml."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatron_hexi.models import Job, Model, presets
from megatron_hexi.models.job import Fusible
from megatron_hexi.plan.recompute import Recompute
from megatron_hexi.plan.terms import Fp8Recipe
from megatron_hexi.yaml_file import read_yaml

#: Files of rows, and what their rows are of.
FIGURES = {
    "figures.yaml": "long contexts, attention, mixed GPUs",
    "dense.yaml": "layouts of dense models",
    "experts.yaml": "mixtures of experts",
    "layers.yaml": "layers alone",
}


@dataclass(frozen=True)
class Row:
    """A row of a table; what a table does not state is as the defaults say.

    Args:
        published: in the table's unit.
        model: its name in figures.yaml, or a preset's.
        cluster: its name in figures.yaml.
        context: tokens of a sequence, in K (1,024).
        tensor: tensor-parallel size.
        pipeline: stages that are alike.
        data: replicas.
        parallel: context-parallel size.
        expert: expert-parallel size; 0: the model has no experts.
        by_node: whether a token travels once to each node with some of its experts (DeepEP, HybridEP).
        imbalance: as `Job.expert_imbalance`; 0: routing was forced to be equal.
        hidden_experts: part of the all-to-alls to experts that hide behind another micro-batch.
        release: of the software, where a table has several.
        note: what tells rows of one layout apart.
        batch: sequences of an iteration.
        micro: sequences of a micro-batch.
        precision: as `Job`'s.
        recipe: as `Job.fp8_recipe`.
        recompute: as `Job`'s.
        kernel: as `Job`'s.
        attention: a kernel of its day in place of `kernel`: see days.py; empty: none.
        sequence_parallel: as `Job`'s.
        overlap_gradients: as `Job`'s.
        sharded_state: whether optimizer state is cut over replicas.
        torch_ring: whether context parallelism is torch's: see torch_ring.py.
        broadcast: whether each rank sends its part of the weights to all others by itself, after the step,
            and all wait.
        chunks: of a stage, in an interleaved schedule.
        hidden_sums: whether the sums inside units hide behind matrix products.
        blocking: of stages with layers of their own: whether sends are in both stages' time.
        unfused: as `Job`'s.
        gradient_bytes: as `Job`'s.
        layer_share: what a layer's matrices reach of the catalogue's, in place of what that says.
        counting: how attention is counted in FLOPs: see convert.py.
        method: of attention alone.
        way: of attention or of a layer alone.
        gpus: of attention alone.
        stages: GPUs of each stage, one letter a replica: "R/TG"; empty: all of one kind.
        layers: of each stage, where they are no equal parts.
        memory: what the framework keeps otherwise than Megatron: see predict.py; empty: nothing is published.
        memory_gib: peak of one GPU.
        memory_gb: the same in 10^9 bytes.
    """

    published: float
    model: str
    cluster: str
    context: float = 2
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    parallel: int = 1
    expert: int = 0
    by_node: bool = False
    imbalance: float = Job.expert_imbalance
    hidden_experts: float = 0.0
    release: str = ""
    note: str = ""
    batch: int = 1
    micro: int = 1
    precision: Literal["bf16", "fp16", "fp32", "fp8"] = "bf16"
    recipe: Fp8Recipe = "delayed"
    recompute: Recompute = "none"
    kernel: str | None = None
    attention: Literal["", "triton", "scores"] = ""
    sequence_parallel: bool = True
    overlap_gradients: bool = True
    sharded_state: bool = True
    torch_ring: bool = False
    broadcast: bool = False
    chunks: int = 1
    hidden_sums: bool = False
    blocking: bool = True
    unfused: tuple[Fusible, ...] = Job.unfused
    gradient_bytes: int | None = None
    layer_share: float | None = None
    counting: Literal["full", "half"] = "half"
    method: str = ""
    way: Literal["", "forward", "backward"] = ""
    gpus: int = 0
    stages: str = ""
    layers: tuple[int, ...] = ()
    memory: Literal["", "fsdp", "fsdp-pipeline", "foundry", "automodel", "deepspeed", "nemo", "bridge"] = ""
    memory_gib: float | None = None
    memory_gb: float | None = None

    @property
    def ranks(self) -> int:
        """GPUs of the job."""
        return self.gpus or self.tensor * self.pipeline * self.data * self.parallel

    @property
    def depth(self) -> int:
        """Pipeline stages."""
        return len(self.layers) or self.pipeline


@dataclass(frozen=True)
class Table:
    """Rows of one source.

    Args:
        name: for people, and for the page.
        label: of a row, with its fields in braces.
        title: likewise.
        year: of the software.
        kind: what is predicted.
        source: where they were published.
        assumed: of what the source leaves open.
        unit: of `published`.
        rows: all of them.
        group: of tables that it belongs to.
    """

    name: str
    label: str
    title: str
    year: int
    kind: Literal["training", "attention", "stages", "layers"]
    source: str
    assumed: str
    unit: Literal["TFLOP/s", "tokens/s", "sequences/s", "s", "ms"]
    rows: tuple[Row, ...] = field(repr=False)
    group: str


class LeftOut(NamedTuple):
    """Published rows that are not predicted: where they are, how many, of which models, and why not."""

    source: str
    url: str
    rows: int
    models: str
    reason: str


@dataclass(frozen=True)
class Site:
    """A cluster.

    Args:
        gpu: of all nodes, where a row names none.
        gpus: of a node.
        network_gb_s: of a GPU or of a node, GB/s a direction.
        per: which of them.
        source: who says so.
        slow: nodes of a GPU that are linked more slowly.
    """

    gpu: str
    gpus: int
    network_gb_s: float
    per: Literal["gpu", "node"]
    source: str
    slow: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """A GPU by seconds that somebody measured of a model's parts; see profiles.py.

    Args:
        device: the catalogue's, for all else.
        samples: sequences of a micro-batch.
        layer: of one layer, forward and backward.
        embedding: of the look-up, forward.
        head: of the output matrix, backward.
        units: of the look-up at tensor-parallel sizes.
    """

    device: str
    samples: int
    layer: tuple[float, float]
    embedding: float
    head: float
    units: Mapping[int, float]


@functools.cache
def tables() -> tuple[Table, ...]:
    """All of them."""
    return tuple(_table(dict(entry)) for entry in _data()["tables"])


@functools.cache
def model(name: str) -> Model:
    """A model of the files, or a preset."""
    known = _data()["models"]
    return Model(name=name, **known[name]) if name in known else presets()[name]


@functools.cache
def site(name: str) -> Site:
    """A cluster of the files."""
    return Site(**_data()["clusters"][name])


@functools.cache
def profile(name: str) -> Profile:
    """The profile of a GPU."""
    entry = _data()["profiles"][name]
    units = {int(size): seconds for size, seconds in entry["units"].items()}
    return Profile(**{**entry, "layer": tuple(entry["layer"]), "units": units})


def left_out() -> tuple[LeftOut, ...]:
    """Return the rows that are not predicted, each with its reason."""
    return tuple(LeftOut(**entry) for entry in _data()["left_out"])


def is_profiled(row: Row) -> bool:
    """Whether the row's GPUs are known by their profiles (Sailor's)."""
    return site(row.cluster).gpu in _data()["profiles"]


@functools.cache
def _data() -> Mapping[str, Any]:
    data: dict[str, Any] = {"models": {}, "clusters": {}, "profiles": {}, "tables": [], "left_out": []}
    for name, group in FIGURES.items():
        for part, entries in read_yaml(Path(__file__).parent / name).data.items():
            if isinstance(entries, Mapping):
                data[part] |= entries
            else:
                data[part] += [{**entry, "group": group} if part == "tables" else entry for entry in entries]
    return data


def _table(entry: dict[str, Any]) -> Table:
    common, columns, gpus = dict(entry.pop("common")), entry.pop("columns"), entry.pop("gpus", [0])
    unit = common.pop("unit")
    rows = tuple(
        row
        for values in entry.pop("rows")
        for row in _rows(common | dict(zip(columns, values, strict=True)), gpus)
    )
    return Table(unit=unit, rows=rows, **entry)


def _rows(fields: dict[str, Any], gpus: list[int]) -> Iterator[Row]:
    """One; or one for each number of GPUs."""
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    fields["release"] = str(fields.get("release", ""))
    if gpus == [0]:
        yield Row(**fields)
        return
    for count, published in zip(gpus, fields.pop("published"), strict=True):
        yield Row(published=published, gpus=count, **fields)
