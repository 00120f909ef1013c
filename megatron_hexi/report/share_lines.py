"""Shares of a plan by kind of GPU: similar stages and groups, and members on one kind, share a line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from megatron_hexi.cluster import Cluster, Device
from megatron_hexi.cost import IterationCost, RankCost
from megatron_hexi.grouping import grouped
from megatron_hexi.models import Job
from megatron_hexi.plan import Group, Member, Plan, Replica, Stage
from megatron_hexi.plan.recompute import Again, Recompute, of_layer, spell_recompute
from megatron_hexi.plan.terms import Offload, Order
from megatron_hexi.plan.units import domain_rows
from megatron_hexi.report.unit_summary import spell_ministages
from megatron_hexi.spelling import first_few, spell_numbers

_NODE = re.compile(r"(?P<base>.+)-(?P<number>\d+)")
#: Most nodes that a line names; more are counted.
_NAMED = 4


@dataclass(frozen=True)
class ShareLine:
    """Members of similar groups in similar replicas, on one kind of GPU.

    Args:
        stages: numbers of adjacent similar stages in the replica.
        layers: layers of each of these; ``None``: as the job says.
        ministages: ministages of each of these; ``None``: they run whole.
        offload: data of each of these that waits in host memory; ``None``: nothing.
        device: model of GPU; several where a member's pipeline stages differ.
        tokens: tokens of a member, the least and the most.
        share: part of the sequence that they hold in a stage, from 0 to 1.
        heads: heads of a member, the least and the most, on one tensor-parallel rank.
        memory_gib: memory of the fullest GPU.
        order: order of the ministages; ``None``: one after the other.
        recompute: recomputation of the stages; ``None``: the job's setting.
    """

    replicas: tuple[int, ...]
    micro_batches: int
    stages: tuple[int, ...]
    layers: int | None
    ministages: int | None
    order: Order | None
    offload: tuple[Offload, ...] | None
    recompute: Recompute | None
    tensor_parallel: int
    groups: int
    members: int
    device: str
    nodes: tuple[str, ...]
    tokens: tuple[int, int]
    share: float
    heads: tuple[int, int]
    memory_gib: float
    usable_gib: float


@dataclass(frozen=True)
class _MembersOfKind:
    """Members of one group on one kind of GPU (`models`: a number for each GPU of a member)."""

    models: tuple[int, ...]
    device: str
    members: tuple[Member, ...]

    @property
    def tokens(self) -> tuple[int, int]:
        return _extent(member.tokens for member in self.members)

    @property
    def heads(self) -> tuple[int, int]:
        return _extent(member.heads[1] - member.heads[0] for member in self.members)

    def look(self, seq_length: int) -> tuple[object, ...]:
        """Return a key that is equal for members that share a line: nearly equal tokens, and equal heads."""
        shares = tuple(f"{count / seq_length:.2g}" for count in self.tokens)
        return self.models, len(self.members), self.heads, shares


#: The kinds of one group, in member order.
_Kinds = list[_MembersOfKind]
#: The groups of a stage, by their key.
_Cut = dict[tuple[object, ...], list[_Kinds]]


@dataclass(frozen=True, eq=False)
class _RankFacts:
    """Facts about a plan's ranks: costs by the first rank of a unit, and models by GPU."""

    ranks: dict[int, list[RankCost]]
    models: list[int]

    @classmethod
    def of(cls, plan: Plan, cost: IterationCost, cluster: Cluster) -> _RankFacts:
        lead = [member.lead for member in plan.members]
        return cls(grouped((lead[rank.unit], rank) for rank in cost.ranks), _models(cluster))


@dataclass(frozen=True, eq=False)
class _Run:
    """Adjacent similar stages, and all their groups."""

    stages: tuple[int, ...]
    look: tuple[object, ...]
    groups: _Cut


def _cut(stage: Stage, facts: _RankFacts, length: int) -> tuple[tuple[object, ...], _Cut]:
    """Return a key of a stage for comparison, and its groups."""
    groups: _Cut = {}
    for domain in stage.domains:
        for group in domain.groups:
            kinds = _kinds(group, facts)
            groups.setdefault(tuple(kind.look(length) for kind in kinds), []).append(kinds)
    layers = None if stage.layers is None else stage.layers[1] - stage.layers[0]
    width = len(stage.members[0].ranks)
    return (
        layers,
        stage.recompute,
        stage.ministage_count,
        stage.offload,
        width,
        *((key, len(same)) for key, same in groups.items()),
    ), groups


def _runs(cuts: Sequence[tuple[tuple[object, ...], _Cut]]) -> list[_Run]:
    runs: list[_Run] = []
    for number, (look, groups) in enumerate(cuts):
        if runs and runs[-1].look == look:
            before = runs.pop()
            joined = {key: before.groups[key] + same for key, same in groups.items()}
            runs.append(_Run((*before.stages, number), look, joined))
        else:
            runs.append(_Run((number,), look, groups))
    return runs


def find_shares(plan: Plan, job: Job, cost: IterationCost, cluster: Cluster) -> tuple[ShareLine, ...]:
    """Return the lines of the table of shares, in plan order."""
    facts = _RankFacts.of(plan, cost, cluster)
    equal = job.global_batch_size // job.micro_batch_size // len(plan.replicas)
    length = plan.workload.seq_length
    alike: dict[tuple[object, ...], list[int]] = {}
    cuts: list[list[_Run]] = []
    for number, replica in enumerate(plan.replicas):
        runs = _runs([_cut(stage, facts, length) for stage in replica.stages])
        cuts.append(runs)
        look = replica.micro_batches, replica.order, *((run.stages, run.look) for run in runs)
        alike.setdefault(look, []).append(number)
    shares = []
    for replicas in alike.values():
        first = plan.replicas[replicas[0]]
        turns = first.micro_batches or equal
        for place, run in enumerate(cuts[replicas[0]]):
            same_runs = [cuts[number][place] for number in replicas]
            for key in run.groups:
                groups = [kinds for run_of_replica in same_runs for kinds in run_of_replica.groups[key]]
                for kind in range(len(key)):
                    same = [kinds[kind] for kinds in groups]
                    shares.append(_share(same, tuple(replicas), turns, run.stages, first, length, facts))
    return tuple(shares)


def shares_table(shares: Sequence[ShareLine], job: Job) -> Table:
    """Return the table of shares."""
    several = len({share.replicas for share in shares}) > 1 or len(shares[0].replicas) > 1
    staged = shares[0].layers is not None
    unit = 1 if staged else job.tensor_parallel * job.pipeline_parallel
    caption = (
        "tokens: part of the sequence, and of each member; heads: of each member; memory: of the fullest GPU"
    )
    if unit > 1:
        caption += f"; a member is {unit} GPUs: tensor x pipeline parallel"
    table = Table(caption=caption, caption_justify="left")
    if several:
        table.add_column("replicas")
        table.add_column("micro-batches each", justify="right")
    if staged:
        for name in ("stages", "layers each", "recompute", "TP"):
            table.add_column(name, justify="left" if name == "stages" else "right")
    for name in ("groups", "members of each", "on"):
        table.add_column(name, justify="right" if name == "groups" else "left", overflow="fold")
    for name in ("tokens", "of a member", "heads", "GiB", "usable"):
        table.add_column(name, justify="right", no_wrap=True)
    for share in shares:
        cells = [spell_numbers(share.replicas), str(share.micro_batches)] if several else []
        if staged:
            again = "" if share.recompute is None else spell_recompute(share.recompute)
            layers = f"{share.layers}"
            if share.ministages is not None:
                layers += f" in {spell_ministages(share.ministages, share.order)}"
            if share.offload is not None:
                layers += f", offloading {', '.join(share.offload)}"
            cells += [spell_numbers(share.stages), layers, again, str(share.tensor_parallel)]
        table.add_row(
            *cells,
            str(share.groups),
            Text(f"{share.members} x {share.device}"),
            Text(spell_nodes(share.nodes)),
            f"{share.share:.1%}",
            _spell_extent(share.tokens),
            _spell_extent(share.heads),
            f"{share.memory_gib:.1f}",
            f"{share.usable_gib:.1f}",
        )
    return table


def spell_recomputed(plan: Plan, job: Job) -> str:
    """Return the recomputed layers of a plan as text: ``none``, ``full``, or ``full: 33 of 80 layers``.

    Args:
        job: the plan's job: for stages without a setting, and for the number of repeated stages.
    """
    counts: dict[str, int] = {}
    rows = domain_rows(plan, stages=job.pipeline_parallel, layers=job.model.layers)
    for row in rows:
        if row.number or row.layers is None:
            continue  # the first domain stands for its stage
        recompute = row.recompute or job.recompute
        again = Again.of(recompute).layers(row.layers[1] - row.layers[0], job.virtual_stages)
        if again:
            mode = spell_recompute(of_layer(recompute))
            counts[mode] = counts.get(mode, 0) + again
    layers = job.model.layers * len(plan.replicas)
    if list(counts.values()) == [layers]:
        return next(iter(counts))
    spelt = (f"{mode}: {count} of {layers} layers" for mode, count in counts.items())
    return ", ".join(spelt) or "none"


def spell_layout(shares: Sequence[ShareLine]) -> str:
    """Return the shares in a sentence: ``8 x H100 (61% of tokens, 4 heads each) + 8 x A100 (…)``."""
    sets = grouped((share.replicas, share) for share in shares)
    spelt = []
    for replicas, same in sets.items():
        stages = grouped((share.stages, share) for share in same)
        whole = " | ".join(_spell_stage(of_stage) for of_stage in stages.values())
        if len(sets) > 1:
            turns, suffix = same[0].micro_batches, " each" if len(replicas) > 1 else ""
            batches = f"{turns} micro-batch{'es' if turns > 1 else ''}{suffix}"
            word = "replica" if len(replicas) == 1 else "replicas"
            whole = f"{word} {spell_numbers(replicas)}, {batches}: {whole}"
        elif len(replicas) > 1:
            whole = f"{len(replicas)} replicas, each {whole}"
        spelt.append(whole)
    return "; ".join(spelt)


def _spell_stage(shares: Sequence[ShareLine]) -> str:
    """Return a stage as text: ``2 stages of 12 layers, TP 4: 8 x H100 (…)``; or only its members."""
    first, members = shares[0], " + ".join(map(_spell_share, shares))
    if first.layers is None:
        return members
    count = len(first.stages)
    stages = f"{count} stages of {first.layers} layers" if count > 1 else f"{first.layers} layers"
    return f"{stages}, TP {first.tensor_parallel}: {members}"


def spell_nodes(nodes: Sequence[str]) -> str:
    """Return nodes as a cluster file counts them: ``h100-0..3, a100-0``."""
    runs: list[tuple[str, int, int]] = []
    plain: list[str] = []
    for node in nodes:
        match = _NODE.fullmatch(node)
        if match is None:
            plain.append(node)
            continue
        base, number = match["base"], int(match["number"])
        if runs and runs[-1][0] == base and runs[-1][2] == number - 1:
            runs[-1] = base, runs[-1][1], number
        else:
            runs.append((base, number, number))
    spelt = plain + [f"{base}-{first}" + (f"..{last}" if last > first else "") for base, first, last in runs]
    return first_few(spelt, _NAMED)


def _models(cluster: Cluster) -> list[int]:
    """Return a number for each GPU, equal for equal GPUs; a throttled one differs."""
    known: list[Device] = []
    for node in cluster.nodes:
        if node.device not in known:
            known.append(node.device)
    of_node = [known.index(node.device) for node in cluster.nodes]
    return [of_node[rank.node] for rank in cluster.ranks]


def _kinds(group: Group, facts: _RankFacts) -> _Kinds:
    models = (tuple(facts.models[rank.gpu] for rank in facts.ranks[one.lead]) for one in group.members)
    members_of = grouped(zip(models, group.members, strict=True))
    kinds = []
    for model, members in members_of.items():
        devices = dict.fromkeys(rank.device for rank in facts.ranks[members[0].lead])
        kinds.append(_MembersOfKind(model, " + ".join(devices), tuple(members)))
    return kinds


def _share(
    same: Sequence[_MembersOfKind],
    replicas: tuple[int, ...],
    micro_batches: int,
    stages: tuple[int, ...],
    replica: Replica,
    seq_length: int,
    facts: _RankFacts,
) -> ShareLine:
    stage = replica.stages[stages[0]]
    members = [member for kind in same for member in kind.members]
    ranks = [rank for member in members for rank in facts.ranks[member.lead]]
    fullest = max(ranks, key=lambda rank: rank.memory_gib / rank.usable_gib)
    cuts = len(replicas) * len(stages)
    return ShareLine(
        replicas=replicas,
        micro_batches=micro_batches,
        stages=stages,
        layers=None if stage.layers is None else stage.layers[1] - stage.layers[0],
        ministages=stage.ministage_count,
        order=replica.order,
        offload=stage.offload,
        recompute=stage.recompute,
        tensor_parallel=len(stage.members[0].ranks),
        groups=len(same) // cuts,
        members=len(same[0].members),
        device=same[0].device,
        nodes=tuple(dict.fromkeys(rank.name.rpartition("/")[0] for rank in ranks)),
        tokens=_extent(member.tokens for member in members),
        share=sum(member.tokens for member in members) / cuts / seq_length,
        heads=_extent(member.heads[1] - member.heads[0] for member in members),
        memory_gib=fullest.memory_gib,
        usable_gib=fullest.usable_gib,
    )


def _extent(counts: Iterable[int]) -> tuple[int, int]:
    values = list(counts)
    return min(values), max(values)


def _spell_extent(extent: tuple[int, int]) -> str:
    least, most = extent
    return f"{most:,}" if least == most else f"{least:,}-{most:,}"


def _spell_share(share: ShareLine) -> str:
    groups = f"{share.groups} groups of " if share.groups > 1 else ""
    heads = f"{_spell_extent(share.heads)} heads each"
    return f"{groups}{share.members} x {share.device} ({share.share:.0%} of tokens, {heads})"
