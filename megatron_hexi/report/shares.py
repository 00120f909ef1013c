"""Who gets what, by kind of GPU: groups that are alike, and their members on the same GPU, share a line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from megatron_hexi.cluster import Cluster, Device
from megatron_hexi.cost import IterationCost, Job, RankCost
from megatron_hexi.plan import Group, Member, Plan

_NODE = re.compile(r"(?P<base>.+)-(?P<number>\d+)")
#: Nodes that a line names; more are counted.
_NAMED = 4


@dataclass(frozen=True)
class Share:
    """Members of alike groups in alike replicas, on one kind of GPU.

    Args:
        replicas: their numbers.
        micro_batches: of an iteration, each replica's.
        groups: how many in each replica.
        members: on this kind of GPU, in each group.
        device: model of GPU; several where a member's pipeline stages differ.
        nodes: where all of them are.
        tokens: of a member, the least and the most.
        share: part of the sequence that all of them in a replica hold, from 0 to 1.
        heads: of a member, the least and the most, on one tensor-parallel rank.
        memory_gib: of the fullest GPU.
        usable_gib: what that one has.
    """

    replicas: tuple[int, ...]
    micro_batches: int
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
class _Kind:
    """Members of one group on one kind of GPU (a number for each GPU of a member)."""

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
        """Equal for those that share a line: rounding may deal one token more to some."""
        shares = tuple(f"{count / seq_length:.2g}" for count in self.tokens)
        return self.models, len(self.members), self.heads, shares


#: The kinds of one group, in member order.
_Kinds = list[_Kind]


def find_shares(plan: Plan, job: Job, cost: IterationCost, cluster: Cluster) -> tuple[Share, ...]:
    """One for each line of the table, in plan order.

    Args:
        plan: the plan.
        job: the job that it is for.
        cost: what the cost model says of it.
        cluster: where it runs.
    """
    models = _models(cluster)
    ranks: dict[int, list[RankCost]] = {}
    for rank in cost.ranks:
        ranks.setdefault(rank.unit, []).append(rank)
    equal = job.global_batch_size // job.micro_batch_size // len(plan.replicas)
    length = plan.workload.seq_length
    alike: dict[tuple[object, ...], list[int]] = {}
    cuts: list[dict[tuple[object, ...], list[_Kinds]]] = []
    for number, replica in enumerate(plan.replicas):
        groups: dict[tuple[object, ...], list[_Kinds]] = {}
        for group in replica.domain.groups:
            kinds = _kinds(group, ranks, models)
            groups.setdefault(tuple(kind.look(length) for kind in kinds), []).append(kinds)
        cuts.append(groups)
        look = replica.micro_batches, *((key, len(same)) for key, same in groups.items())
        alike.setdefault(look, []).append(number)
    shares = []
    for replicas in alike.values():
        turns = plan.replicas[replicas[0]].micro_batches or equal
        for key in cuts[replicas[0]]:
            groups_alike = [kinds for number in replicas for kinds in cuts[number][key]]
            for place in range(len(key)):
                same = [kinds[place] for kinds in groups_alike]
                shares.append(_share(same, tuple(replicas), turns, length, ranks))
    return tuple(shares)


def shares_table(shares: Sequence[Share], job: Job) -> Table:
    """The lines."""
    several = len({share.replicas for share in shares}) > 1 or len(shares[0].replicas) > 1
    unit = job.tensor_parallel * job.pipeline_parallel
    caption = (
        "tokens: part of the sequence, and of each member; heads: of each member; memory: of the fullest GPU"
    )
    if unit > 1:
        caption += f"; a member is {unit} GPUs: tensor x pipeline parallel"
    table = Table(caption=caption, caption_justify="left")
    if several:
        table.add_column("replicas")
        table.add_column("micro-batches each", justify="right")
    for name in ("groups", "members of each", "on"):
        table.add_column(name, justify="right" if name == "groups" else "left", overflow="fold")
    for name in ("tokens", "of a member", "heads", "GiB", "usable"):
        table.add_column(name, justify="right", no_wrap=True)
    for share in shares:
        cells = [_spell_numbers(share.replicas), str(share.micro_batches)] if several else []
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


def spell_layout(shares: Sequence[Share]) -> str:
    """The same in a sentence: ``8 x H100 (61% of tokens, 4 heads each) + 8 x A100 (…)``."""
    sets: dict[tuple[int, ...], list[Share]] = {}
    for share in shares:
        sets.setdefault(share.replicas, []).append(share)
    spelt = []
    for replicas, same in sets.items():
        whole = " + ".join(map(_spell_share, same))
        if len(sets) > 1:
            turns, each = same[0].micro_batches, " each" if len(replicas) > 1 else ""
            batches = f"{turns} micro-batch{'es' if turns > 1 else ''}{each}"
            whole = f"{_replicas(replicas)}, {batches}: {whole}"
        elif len(replicas) > 1:
            whole = f"{len(replicas)} replicas, each {whole}"
        spelt.append(whole)
    return "; ".join(spelt)


def spell_nodes(nodes: Sequence[str]) -> str:
    """Nodes as a cluster file counts them: ``h100-0..3, a100-0``."""
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
    more = f" and {len(spelt) - _NAMED} more" if len(spelt) > _NAMED else ""
    return ", ".join(spelt[:_NAMED]) + more


def _models(cluster: Cluster) -> list[int]:
    """A number for each GPU, the same for those that are alike; a throttled one is not."""
    known: list[Device] = []
    for node in cluster.nodes:
        if node.device not in known:
            known.append(node.device)
    of_node = [known.index(node.device) for node in cluster.nodes]
    return [of_node[rank.node] for rank in cluster.ranks]


def _kinds(group: Group, ranks: dict[int, list[RankCost]], models: Sequence[int]) -> _Kinds:
    found: dict[tuple[int, ...], list[Member]] = {}
    for member in group.members:
        found.setdefault(tuple(models[rank.gpu] for rank in ranks[member.number]), []).append(member)
    kinds = []
    for model, members in found.items():
        devices = dict.fromkeys(rank.device for rank in ranks[members[0].number])
        kinds.append(_Kind(model, " + ".join(devices), tuple(members)))
    return kinds


def _share(
    same: Sequence[_Kind],
    replicas: tuple[int, ...],
    micro_batches: int,
    seq_length: int,
    ranks: dict[int, list[RankCost]],
) -> Share:
    members = [member for kind in same for member in kind.members]
    held = [rank for member in members for rank in ranks[member.number]]
    fullest = max(held, key=lambda rank: rank.memory_gib / rank.usable_gib)
    return Share(
        replicas=replicas,
        micro_batches=micro_batches,
        groups=len(same) // len(replicas),
        members=len(same[0].members),
        device=same[0].device,
        nodes=tuple(dict.fromkeys(rank.name.rpartition("/")[0] for rank in held)),
        tokens=_extent(member.tokens for member in members),
        share=sum(member.tokens for member in members) / len(replicas) / seq_length,
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


def _spell_share(share: Share) -> str:
    groups = f"{share.groups} groups of " if share.groups > 1 else ""
    heads = f"{_spell_extent(share.heads)} heads each"
    return f"{groups}{share.members} x {share.device} ({share.share:.0%} of tokens, {heads})"


def _spell_numbers(numbers: Sequence[int]) -> str:
    if numbers[-1] - numbers[0] == len(numbers) - 1 and len(numbers) > 2:
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers))


def _replicas(numbers: Sequence[int]) -> str:
    return f"{'replica' if len(numbers) == 1 else 'replicas'} {_spell_numbers(numbers)}"
