"""The spread of speeds among GPUs of one model: the slowest of many sets the pace."""

from __future__ import annotations

import math

#: Standard deviation over mean of the speeds of GPUs of one model in one cluster: 8 % in the mean between the
#: ends of a box plot's whiskers, which are 5.4 deviations apart (Sinha et al., Not All GPUs Are Created
#: Equal, SC22, arXiv 2208.11035: five clusters, 18,800 hours).
VARIATION = 0.08 / 5.4


def spread(count: int) -> float:
    """Return the part by which computation takes longer on the slowest GPU: c sqrt(2 ln N).

    That is by how much the largest of many normal numbers exceeds their mean.

    Args:
        count: GPUs that wait for each other and whose rates are the catalogue's, measured on single cards; 0:
            the cluster file's rates are of its slowest GPUs already, and nothing is added.
    """
    return VARIATION * math.sqrt(2 * math.log(count)) if count else 0.0
