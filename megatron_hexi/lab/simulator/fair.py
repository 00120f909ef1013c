"""Max-min fair rates of transfers that share links, by progressive filling.

All rates rise together; where a link is full, the rates of its transfers stay and the others rise on
(Bertsekas and Gallager, Data Networks, 1992, section 6.5.2). Then no transfer can get more without taking
from one that has no more.
"""

from __future__ import annotations

import numpy as np

from megatron_hexi.cost.arrays import Floats, Ints

#: Relative difference below which shares are equal, so that rounding does not add rounds.
_CLOSE = 1e-9


def fair_rates(links: Ints, weights: Floats, capacity: Floats) -> Floats:
    """Return bytes/s of each transfer.

    Links fill up in order of their shares, but not one by one: a link whose share is the least for all its
    transfers fills whatever happens elsewhere, so all such links are settled in one round.

    Args:
        links: links that each transfer crosses, [F, K]; shorter routes are padded with the last link.
        weights: load of each transfer on its links, [F, K]; 0 for padding.
        capacity: capacity of each link, bytes/s; infinite for the last link.
    """
    rates = np.zeros(len(links))
    waiting = np.arange(len(links))
    remaining = capacity.copy()
    while len(waiting):
        at, load = links[waiting], weights[waiting]
        places = at.ravel()
        total = np.bincount(places, load.ravel(), len(remaining))
        share = np.full(len(remaining), np.inf)
        np.divide(remaining, total, out=share, where=total > 0)
        shares = share[at]
        least = shares.min(axis=1)
        lowest = np.full(len(remaining), np.inf)
        np.minimum.at(lowest, places, np.repeat(least, at.shape[1]))
        full = lowest >= share * (1 - _CLOSE)
        settled = (full[at] & (shares <= least[:, None] * (1 + _CLOSE))).any(axis=1)
        rates_settled = least[settled]
        rates[waiting[settled]] = rates_settled
        used = (load[settled] * rates_settled[:, None]).ravel()
        remaining = np.maximum(remaining - np.bincount(at[settled].ravel(), used, len(remaining)), 0.0)
        waiting = waiting[~settled]
    return rates
