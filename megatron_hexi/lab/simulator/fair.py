"""Rates of transfers that share links fairly: max-min fairness by progressive filling.

All rates rise together; where a link is full, those that cross it stay as they are and the others go on
(Bertsekas and Gallager, Data Networks, 1992, section 6.5.2). No transfer can then be given more without
taking from one that has no more than it.
"""

from __future__ import annotations

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints

#: Shares that differ by less are equal: rounding must not make rounds.
_CLOSE = 1e-9


def fair_rates(links: Ints, weights: Floats, capacity: Floats) -> Floats:
    """Bytes/s of each transfer.

    Links fill up in order of their shares, but not one by one: a link whose share is the least for all that
    cross it fills whatever happens elsewhere, so all such links are settled in one round.

    Args:
        links: that each transfer crosses, [F, K]; shorter routes are filled with the last link.
        weights: how many times each loads its link, [F, K]; 0 for what is filled in.
        capacity: of each link, bytes/s; the last one's is endless.
    """
    rates = np.zeros(len(links))
    waiting = np.arange(len(links))
    left = capacity.copy()
    while len(waiting):
        at, load = links[waiting], weights[waiting]
        places = at.ravel()
        total = np.bincount(places, load.ravel(), len(left))
        share = np.full(len(left), np.inf)
        np.divide(left, total, out=share, where=total > 0)
        shares = share[at]
        least = shares.min(axis=1)
        lowest = np.full(len(left), np.inf)
        np.minimum.at(lowest, places, np.repeat(least, at.shape[1]))
        full = lowest >= share * (1 - _CLOSE)
        settled = (full[at] & (shares <= least[:, None] * (1 + _CLOSE))).any(axis=1)
        found = least[settled]
        rates[waiting[settled]] = found
        taken = (load[settled] * found[:, None]).ravel()
        left = np.maximum(left - np.bincount(at[settled].ravel(), taken, len(left)), 0.0)
        waiting = waiting[~settled]
    return rates
