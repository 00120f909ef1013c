"""The layouts that each baseline's rules allow, or why there is none.

ring          groups of one, tokens equal
ulysses       one group; its size divides the query heads; KV heads replicated where there are fewer
usp           every ring x ulysses of the replica's size, groups of consecutive ranks or strided
te-a2a+p2p    as Transformer Engine: groups inside a machine, or everything one group; their size divides
              query and KV heads; the length divides by 2 x ranks
proportion    usp's groups of consecutive ranks, or one group a machine; tokens in proportion to speed; heads
              equal, or in proportion too
homogeneous   usp, which includes the three before it, on the GPUs of one model alone: all of them, or those
              in nodes of one size

Replicas are equal rectangles. A length that the ranks do not divide is apportioned: one token more for some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from megatron_hexi.plan.layout import apportion
from megatron_hexi.planner.baselines.arrange import (
    Order,
    ReplicaUnits,
    divisors,
    equal_replicas,
    groups,
    orders,
)
from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.layout import A2AGroup, Layout, units_by_rank

RING, ULYSSES, USP, TE = "ring", "ulysses", "usp", "te-a2a+p2p"
PROPORTION, HOMOGENEOUS = "proportion", "homogeneous"
NAMES = (RING, ULYSSES, USP, TE, PROPORTION, HOMOGENEOUS)
UNIFORM = (RING, ULYSSES, USP, TE)


@dataclass(frozen=True, eq=False)
class BaselineLayouts:
    """Layouts of all replicas, and the baselines that may use them.

    Args:
        fleet: the fleet whose units the layouts number.
        layouts: the layout of each replica.
        texts: description of the layouts for people, for each baseline that may use them.
    """

    fleet: Fleet
    layouts: tuple[Layout, ...]
    texts: dict[str, str] = field(default_factory=dict)

    @property
    def is_in_order(self) -> bool:
        """Whether replicas have consecutive ranks in order, as Megatron assigns them."""
        number = {unit: place for place, unit in enumerate(units_by_rank(self.fleet, self.layouts))}
        ranks = [
            sorted(number[unit] for part in layout.parts for unit in part.units) for layout in self.layouts
        ]
        dealt = [rank for replica_ranks in ranks for rank in replica_ranks]
        return dealt == sorted(dealt)


def replica_counts(fleet: Fleet, data_parallel: int | None, context_parallel: int | None = None) -> list[int]:
    """Return numbers of equal replicas with equally many micro-batches, for the given parallel sizes."""
    units, together = len(fleet.units), _micro_batches(fleet)
    wanted = divisors(together) if data_parallel is None else [data_parallel]
    counts = [count for count in wanted if units % count == 0 and together % count == 0]
    return [count for count in counts if context_parallel in (None, units // count)]


def candidates(fleet: Fleet, counts: Iterable[int], names: Sequence[str] = NAMES) -> list[BaselineLayouts]:
    """Return all layouts of these baselines with these numbers of replicas, each once."""
    by_layouts: dict[tuple[Layout, ...], BaselineLayouts] = {}
    ways = orders(fleet)
    for count in counts:
        seen: set[ReplicaUnits] = set()
        for name, order in ways.items():
            for deal in equal_replicas(fleet, count, order):
                if deal in seen:
                    continue
                seen.add(deal)
                for layouts, text, users in _layouts(fleet, deal, names):
                    baseline_layouts = by_layouts.setdefault(layouts, BaselineLayouts(fleet, layouts))
                    for user in users:
                        baseline_layouts.texts.setdefault(user, _describe(fleet, deal, text, name))
    return list(by_layouts.values())


def why_none(fleet: Fleet, data_parallel: int | None, name: str) -> str:
    """Return the reason why a baseline has no layout at all."""
    workload = fleet.job.workload()
    units, together = len(fleet.units), _micro_batches(fleet)
    counts = replica_counts(fleet, data_parallel)
    if not counts and units % (data_parallel or 1):
        return f"{units} {_ranks(fleet)} cannot be cut into {data_parallel} equal replicas"
    if not counts:
        return f"{together} micro-batches cannot be shared equally by {data_parallel} replicas"
    sizes = [str(units // count) for count in counts]
    text = sizes[0] if len(sizes) == 1 else f"{', '.join(sizes[:-1])} or {sizes[-1]}"
    if fleet.job.model.state is not None:
        return f"a state passes between no groups, and one group of {text} {_ranks(fleet)} is not its rule's"
    if name == TE:
        return f"{workload.seq_length} tokens cannot be cut into 2 x {text} equal parts"
    return f"{workload.local_heads} heads cannot be cut over {text} {_ranks(fleet)}"


def _layouts(
    fleet: Fleet, deal: ReplicaUnits, names: Sequence[str]
) -> Iterator[tuple[tuple[Layout, ...], str, list[str]]]:
    """Yield layouts of equal replicas, each with its description and the baselines that may use it."""
    workload = fleet.job.workload()
    size = len(deal[0])
    degrees = [degree for degree in divisors(size) if workload.local_heads % degree == 0]
    state = fleet.job.model.state
    if state is not None:  # one group, as Megatron's scans need it: it divides their heads, too
        local = state.heads // fleet.job.tensor_parallel
        degrees = [degree for degree in degrees if degree == size and local % degree == 0]
    tokens = _tokens(fleet, deal, [1.0] * len(fleet.units))
    for degree in degrees:
        heads = (workload.local_heads // degree,) * degree
        for strided in (False, True) if 1 < degree < size else (False,):
            cut = [groups(replica, degree, strided) for replica in deal]
            allowed = {
                RING: degree == 1,
                ULYSSES: degree == size,
                USP: True,
                TE: not strided and _te_allows(fleet, cut, size),
                HOMOGENEOUS: True,
            }
            users = [name for name in names if allowed.get(name)]
            if users:
                layouts = _assemble(fleet, cut, tokens, partial(_same, heads))
                yield layouts, _shape(cut[0], strided, workload.seq_length % size), users
    if PROPORTION in names:
        yield from _proportional(fleet, deal, degrees)


def _te_allows(fleet: Fleet, cut: Sequence[Sequence[Order]], size: int) -> bool:
    workload = fleet.job.workload()
    degree = len(cut[0][0])
    if workload.local_kv_heads % degree or (size > 1 and workload.seq_length % (2 * size)):
        return False
    return degree == size or all(
        len({fleet.units[unit].site for unit in group}) == 1 for replica in cut for group in replica
    )


def _proportional(
    fleet: Fleet, deal: ReplicaUnits, degrees: Sequence[int]
) -> Iterator[tuple[tuple[Layout, ...], str, list[str]]]:
    total = fleet.job.workload().local_heads
    speed = [fleet.kinds[unit.kind].tokens_per_s for unit in fleet.units]
    tokens = _tokens(fleet, deal, speed)
    cuts = [([groups(replica, degree, False) for replica in deal], "") for degree in degrees]
    by_site = [_by_site(fleet, replica) for replica in deal]
    if fleet.job.model.state is None or all(len(groups) == 1 for groups in by_site):
        cuts.append((by_site, "one group a machine"))

    @cache
    def shares(weights: tuple[float, ...]) -> tuple[int, ...]:
        return tuple(apportion(total, weights))

    for cut, name in cuts:
        text = name or _shape(cut[0], False, 0)
        equal = _assemble(fleet, cut, tokens, lambda units: shares((1.0,) * len(units)))
        yield equal, f"{text}, heads equal", [PROPORTION]
        likewise = _assemble(fleet, cut, tokens, lambda units: shares(tuple(speed[unit] for unit in units)))
        yield likewise, f"{text}, heads in proportion", [PROPORTION]


def _tokens(fleet: Fleet, deal: ReplicaUnits, weights: Sequence[float]) -> list[int]:
    """Return the tokens of each unit of the fleet; remainders go to the first units, the fast ones."""
    tokens = [0] * len(fleet.units)
    for replica in deal:
        units = sorted(replica)
        counts = apportion(fleet.job.seq_length, [weights[unit] for unit in units])
        for unit, count in zip(units, counts, strict=True):
            tokens[unit] = count
    return tokens


def _same(heads: tuple[int, ...], units: tuple[int, ...]) -> tuple[int, ...]:
    """Return `heads` unchanged, for a rule by which heads do not depend on the units."""
    assert len(heads) == len(units)
    return heads


def _by_site(fleet: Fleet, replica: Order) -> list[Order]:
    sites: dict[int, list[int]] = {}
    for unit in replica:
        sites.setdefault(fleet.units[unit].site, []).append(unit)
    return [tuple(units) for units in sites.values()]


def _assemble(
    fleet: Fleet,
    cut: Sequence[Sequence[Order]],
    tokens: Sequence[int],
    heads: Callable[[tuple[int, ...]], tuple[int, ...]],
) -> tuple[Layout, ...]:
    share = _micro_batches(fleet) // len(cut)
    layouts = []
    for replica in cut:
        owned = [tuple(sorted(group)) for group in replica]
        parts = tuple(
            A2AGroup(units, tuple([tokens[unit] for unit in units]), heads(units)) for units in owned
        )
        layouts.append(Layout(parts, share))
    return tuple(sorted(layouts, key=lambda layout: min(part.units[0] for part in layout.parts)))


def _shape(cut: Sequence[Order], strided: bool, uneven: int) -> str:
    number, size = len(cut), len(cut[0])
    if number == 1:
        text = "a single rank" if size == 1 else f"one group of {size}"
    elif size == 1:
        text = f"{number} groups of one"
    else:
        text = f"{number} groups of {size}, {'strided' if strided else 'consecutive'}"
    more = "a rank" if uneven == 1 else f"{uneven} ranks"
    return f"{text}, {more} with one token more" if uneven else text


def _describe(fleet: Fleet, deal: ReplicaUnits, shape: str, order: str) -> str:
    count = len(deal)
    mixes = {tuple(sorted(fleet.units[unit].kind for unit in replica)) for replica in deal}
    alike = " of one mix" if len(mixes) == 1 and len(set(mixes.pop())) > 1 else ""
    text = shape if count == 1 else f"{count} replicas{alike}, each {shape}"
    return f"{text}, {order}" if order else text


def _micro_batches(fleet: Fleet) -> int:
    return fleet.job.global_batch_size // fleet.job.micro_batch_size


def _ranks(fleet: Fleet) -> str:
    gpus = fleet.job.tensor_parallel * fleet.job.pipeline_parallel
    return "ranks" if gpus == 1 else f"units of {gpus} GPUs"
