"""The layouts that each baseline's rules allow, or why there is none.

ring             groups of one, tokens equal
ulysses          one group; its size divides the query heads; KV heads replicated where there are fewer
usp              every ring x ulysses of the replica's size, groups of consecutive ranks or strided
te-a2a+p2p       as Transformer Engine: groups inside a machine, or everything one group; their size divides
                 query and KV heads; the length divides by 2 x ranks
proportion       usp's groups of consecutive ranks, or one group a machine; tokens in proportion to speed;
                 heads equal, or in proportion too
homogeneous      usp (with experts: expert-parallel) on the GPUs of one model alone: all of them, or those in
                 nodes of one size
expert-parallel  of models with experts: groups of one, or the largest with equal KV heads; experts whole

Replicas are equal rectangles. A length that the ranks do not divide is apportioned: one token more for some.
Baselines assign consecutive ranks. A machine's GPUs stay together, in Megatron's order, but users choose the
order of machines (in a host file). So a baseline without experts is tried with several orders, and the order
in the cluster file does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial

from megatron_hexi.cluster import Cluster
from megatron_hexi.grouping import grouped
from megatron_hexi.plan.layout import apportion
from megatron_hexi.planner.baselines.flags import FlagLayout
from megatron_hexi.planner.fleet.units import Fleet
from megatron_hexi.planner.layouts.layout import A2AGroup, Layout

RING, ULYSSES, USP, TE = "ring", "ulysses", "usp", "te-a2a+p2p"
PROPORTION, HOMOGENEOUS, EXPERTS = "proportion", "homogeneous", "expert-parallel"
#: Name under which all layouts are compared, whichever baseline may use them.
ANY = "any"
NAMES = (RING, ULYSSES, USP, TE, PROPORTION, HOMOGENEOUS)
UNIFORM = (RING, ULYSSES, USP, TE, EXPERTS)

#: Units in the order of their ranks.
Order = tuple[int, ...]
#: The units of each replica, each in the order of their ranks.
ReplicaUnits = tuple[Order, ...]


def replica_counts(fleet: Fleet, data_parallel: int | None, context_parallel: int | None = None) -> list[int]:
    """Return numbers of equal replicas with equally many micro-batches, for the given parallel sizes."""
    units, together = len(fleet.units), _micro_batches(fleet)
    wanted = divisors(together) if data_parallel is None else [data_parallel]
    counts = [count for count in wanted if units % count == 0 and together % count == 0]
    return [count for count in counts if context_parallel in (None, units // count)]


def candidates(fleet: Fleet, counts: Iterable[int], names: Sequence[str] = NAMES) -> list[FlagLayout]:
    """Return all layouts of these baselines with these numbers of replicas, each once."""
    by_layouts: dict[tuple[Layout, ...], FlagLayout] = {}
    ways = orders(fleet) if fleet.job.model.experts is None else {"": tuple(range(len(fleet.units)))}
    for count in counts:
        seen: set[ReplicaUnits] = set()
        for name, order in ways.items():
            for deal in equal_replicas(fleet, count, order):
                if deal in seen:
                    continue
                seen.add(deal)
                for layouts, text, users in _layouts(fleet, deal, names):
                    candidate = by_layouts.setdefault(layouts, FlagLayout(fleet, layouts))
                    for user in users:
                        candidate.texts.setdefault(user, _describe(fleet, deal, text, name))
    return list(by_layouts.values())


def expert_sizes(layout: FlagLayout) -> list[int]:
    """Return expert-parallel sizes to try: numbers of ranks of whole units, in one or several replicas.

    A size below a unit's number of ranks would make the unit hold copies of experts, which saves nothing.
    """
    job, count = layout.fleet.job, layout.fleet.job.model.expert_count or 0
    # With documents a micro-batch is one sequence, so that no two replicas form an expert domain.
    joined = len(layout.layouts) if job.documents is None else 1
    sizes = [job.tensor_parallel * units for units in divisors(layout.context)]
    sizes += [job.tensor_parallel * layout.context * several for several in divisors(joined)[1:]]
    return [size for size in sizes if count % size == 0]


def consecutive(fleet: Fleet, count: int, degree: int) -> tuple[Layout, ...]:
    """Return equal layouts of `count` replicas of consecutive units, in groups of `degree` of these."""
    deal = _runs(range(len(fleet.units)), count)
    tokens, heads = _tokens(fleet, deal, [1.0] * len(fleet.units)), fleet.job.workload().local_heads
    return _assemble(
        fleet, [groups(units, degree, False) for units in deal], tokens, partial(_equal_heads, heads)
    )


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
    size, experts = len(deal[0]), fleet.job.model.experts is not None
    degrees = [degree for degree in divisors(size) if workload.local_heads % degree == 0]
    state = fleet.job.model.state
    if state is not None:  # one group, as Megatron's scans need it: it divides their heads, too
        local = state.heads // fleet.job.tensor_parallel
        degrees = [degree for degree in degrees if degree == size and local % degree == 0]
    elif experts:
        degrees = sorted({1, max(degree for degree in degrees if workload.local_kv_heads % degree == 0)})
    tokens = _tokens(fleet, deal, [1.0] * len(fleet.units))
    for degree in degrees:
        for strided in (False, True) if 1 < degree < size and not experts else (False,):
            cut = [groups(replica, degree, strided) for replica in deal]
            allowed = {
                RING: degree == 1,
                ULYSSES: degree == size,
                USP: True,
                TE: TE in names and not strided and _te_allows(fleet, cut, size),
                HOMOGENEOUS: True,
                EXPERTS: True,
                ANY: True,
            }
            users = [name for name in names if allowed.get(name)]
            if users:
                layouts = _assemble(fleet, cut, tokens, partial(_equal_heads, workload.local_heads))
                yield layouts, _shape(cut[0], strided, workload.seq_length % size), users
    users = [name for name in names if name in (PROPORTION, ANY)]
    if users and not experts:
        for layouts, text in _proportional(fleet, deal, degrees):
            yield layouts, text, users


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
) -> Iterator[tuple[tuple[Layout, ...], str]]:
    total = fleet.job.workload().local_heads
    speed = [fleet.kinds[unit.kind].tokens_per_s for unit in fleet.units]
    tokens = _tokens(fleet, deal, speed)
    cuts = [([groups(replica, degree, False) for replica in deal], "") for degree in degrees]
    of_sites = (grouped((fleet.units[unit].site, unit) for unit in replica).values() for replica in deal)
    by_site: list[list[Order]] = [list(map(tuple, own)) for own in of_sites]
    if fleet.job.model.state is None or all(len(groups) == 1 for groups in by_site):
        cuts.append((by_site, "one group a machine"))

    @cache
    def shares(weights: tuple[float, ...]) -> tuple[int, ...]:
        return tuple(apportion(total, weights))

    for cut, name in cuts:
        text = name or _shape(cut[0], False, 0)
        equal = _assemble(fleet, cut, tokens, lambda units: shares((1.0,) * len(units)))
        yield equal, f"{text}, heads equal"
        likewise = _assemble(fleet, cut, tokens, lambda units: shares(tuple(speed[unit] for unit in units)))
        yield likewise, f"{text}, heads in proportion"


def _tokens(fleet: Fleet, deal: ReplicaUnits, weights: Sequence[float]) -> list[int]:
    """Return the tokens of each unit of the fleet; remainders go to the first units, the fast ones."""
    tokens = [0] * len(fleet.units)
    for replica in deal:
        units = sorted(replica)
        counts = apportion(fleet.job.seq_length, [weights[unit] for unit in units])
        for unit, count in zip(units, counts, strict=True):
            tokens[unit] = count
    return tokens


def _equal_heads(heads: int, units: tuple[int, ...]) -> tuple[int, ...]:
    return (heads // len(units),) * len(units)


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


def orders(fleet: Fleet) -> dict[str, Order]:
    """Return orders of all units, machine by machine, by a printable name.

    The first order has fast machines first, and an empty name.
    """
    sites = [sorted(site, key=lambda unit: fleet.units[unit].gpus) for site in fleet.sites]
    paths = _paths(fleet, sites)
    domains = sorted(range(len(sites)), key=lambda site: (*paths[site], site))
    model_of = {unit: number for number, units in enumerate(fleet.models.values()) for unit in units}
    alike = [(model_of[site[0]], len(site)) for site in sites]
    name_of: dict[Order, str] = {}
    for name, ways in (("", range(len(sites))), ("domain by domain", domains)):
        name_of.setdefault(_join(sites, ways), name)
        backwards = ways[::-1]
        if [alike[site] for site in ways] != [alike[site] for site in backwards]:
            name_of.setdefault(_join(sites, backwards), f"{name}, slow first" if name else "slow first")
    return {name: order for order, name in name_of.items()}


def equal_replicas(fleet: Fleet, count: int, order: Order) -> Iterator[ReplicaUnits]:
    """Yield the units divided into `count` equal replicas.

    Units are divided in the given order and, if those of every GPU model divide evenly, also with the same
    mix of models in each replica.
    """
    yield _runs(order, count)
    owned = fleet.models.values()
    if count > 1 and len(owned) > 1 and not any(len(units) % count for units in owned):
        place = {unit: number for number, unit in enumerate(order)}
        shares = [_runs(sorted(units, key=lambda unit: place[unit]), count) for units in owned]
        mixed = [[unit for share in shares for unit in share[replica]] for replica in range(count)]
        yield tuple(tuple(sorted(units, key=lambda unit: place[unit])) for units in mixed)


def nodes_of_one_model(cluster: Cluster) -> list[tuple[int, ...]]:
    """Return sets of nodes with GPUs of one model: all such nodes, and those of each size if sizes differ.

    Users leave out a node with fewer GPUs if it would limit the tensor-parallel size of the other nodes.
    """
    sets = grouped(
        (key, number)
        for number, node in enumerate(cluster.nodes)
        for key in ((id(node.device),), (id(node.device), len(node.ranks)))
    )
    return list(dict.fromkeys(map(tuple, sets.values())))


def groups(units: Order, degree: int, strided: bool) -> list[Order]:
    """Return groups of `degree` units: consecutive or, if `strided`, at equal distances in the order."""
    if strided:
        return [units[first :: len(units) // degree] for first in range(len(units) // degree)]
    return [units[first : first + degree] for first in range(0, len(units), degree)]


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _paths(fleet: Fleet, sites: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return each site's part of every level, outermost level first; a part is named by its first site."""
    paths: list[list[int]] = [[] for _ in sites]
    firsts = [fleet.units[site[0]].gpus[0][0] for site in sites]
    for partition in reversed(fleet.cluster.fast_domains()[1:]):
        part_of = {gpu: number for number, part in enumerate(partition.parts) for gpu in part}
        leader: dict[int, int] = {}
        for site, gpu in enumerate(firsts):
            paths[site].append(leader.setdefault(part_of[gpu], site))
    return [tuple(path) for path in paths]


def _join(sites: Sequence[Sequence[int]], order: Sequence[int]) -> Order:
    return tuple(unit for site in order for unit in sites[site])


def _runs(units: Sequence[int], count: int) -> ReplicaUnits:
    size = len(units) // count
    return tuple(tuple(units[first * size : (first + 1) * size]) for first in range(count))
