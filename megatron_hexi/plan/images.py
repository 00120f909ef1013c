"""The images of a micro-batch, divided among the units of a domain by patches."""

from __future__ import annotations

from collections.abc import Sequence


def deal_images(patches: Sequence[int], weights: Sequence[int]) -> tuple[int, ...]:
    """Return the number of the unit that encodes each image.

    The largest image comes first. Each goes to the unit whose patches, with it, are fewest for the unit's
    weight: the first of equals.

    Source: R. L. Graham's rule of the longest processing time, for machines of different speeds
    (T. Gonzalez, O. H. Ibarra, S. Sahni, SIAM J. Comput. 6, 1977).

    Args:
        patches: patches of each image.
        weights: weight of each unit; a unit of weight 0 gets none, and one at least has more.
    """
    loads = [0] * len(weights)
    able = [unit for unit, weight in enumerate(weights) if weight]
    owners = [0] * len(patches)
    for image in sorted(range(len(patches)), key=lambda image: -patches[image]):
        unit = min(able, key=lambda unit: (loads[unit] + patches[image]) / weights[unit])
        owners[image] = unit
        loads[unit] += patches[image]
    return tuple(owners)
