"""What looking for a better plan, and for a closer proof, may take.

In counts, never in seconds: the same input gives the same bytes on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

#: Of up to so many units, all sets and all partitions are tried: 52 for five, fewer where units are alike.
EXHAUSTIVE = 5
#: Logarithms of the factors by which tuning changes tokens.
_COARSE, _FINE = (0.005, 0.02, 0.06, 0.2, 0.5), (0.001, 0.003, 0.01, 0.05, 0.3)


class Tuning(NamedTuple):
    """A round of tuning (tune.py).

    Args:
        layouts: that differ in their groups, the best of them.
        trials: layouts that are timed for each at most.
        patience: of them for each unit, one after the other, that are no better before it ends.
        steps: logarithms of the factors by which tokens are changed.
    """

    layouts: int
    trials: int
    patience: int
    steps: tuple[float, ...]


class Proof(NamedTuple):
    """The lower bound (bound/).

    Args:
        depths: intervals of a group's depth among the nested ones, for pieces of groups.
        packed: shapes of groups up to which whole groups are looked at.
        few_shapes: of groups that are worked out at most, where there are few of them, for plans of each
            number of groups.
        shapes: likewise, where there are more.
        many_shapes: likewise, where there are many: those on many sites take time.
        replicas: choices of a replica's units up to which each is looked at by itself.
        nested: what working out shapes by who is outside of them may cost (nested_worth.py).
        nested_alone: likewise, for each choice of a replica's units.
        packings: ways to pack whole groups up to which each is looked at by itself.
        programs: pairs of groups in the linear programs that are solved for a time.
        aims: times for which groupings are named that it does not rule out.
    """

    depths: int
    packed: int
    few_shapes: int
    shapes: int
    many_shapes: int
    replicas: int
    nested: int
    nested_alone: int
    packings: int
    programs: int
    aims: int


@dataclass(frozen=True)
class Budget:
    """All of it.

    Args:
        walks: series of random changes of groupings, from each start.
        walked: up to so many units, groupings are changed at random, or looked at because the bound names
            them.
        tunings: rounds of tuning, one after the other.
        tuned: units of a layout; of more, as many fewer trials are made as each takes longer.
        trials: of a round of tuning, at least.
        proof: what the lower bound may take.
    """

    walks: int
    walked: int
    tunings: tuple[Tuning, ...]
    tuned: int
    trials: int
    proof: Proof


#: A second or two; of one replica on 128 GPUs, less than half a second.
SHORT = Budget(
    walks=0,
    walked=16,
    tunings=(Tuning(2, 150, 4, _COARSE), Tuning(1, 150, 10, _FINE)),
    tuned=16,
    trials=0,
    proof=Proof(
        depths=2,
        packed=1300,
        few_shapes=120,
        shapes=40,
        many_shapes=5,
        replicas=30,
        nested=0,
        nested_alone=0,
        packings=20,
        programs=300,
        aims=2,
    ),
)
#: Seconds, minutes, and up to twelve of them where replicas are free.
THOROUGH = Budget(
    walks=4,
    walked=96,
    tunings=(
        Tuning(8, 150, 4, _COARSE),
        Tuning(3, 600, 10, _COARSE),
        Tuning(2, 3000, 25, _FINE),
        Tuning(1, 3000, 25, _FINE),
    ),
    tuned=40,
    trials=150,
    proof=Proof(
        depths=16,
        packed=45_000,
        few_shapes=1200,
        shapes=400,
        many_shapes=50,
        replicas=1300,
        nested=90_000,
        nested_alone=1000,
        packings=800,
        programs=50_000,
        aims=5,
    ),
)
