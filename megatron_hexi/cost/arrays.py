"""Types of this package's arrays."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
#: A count, or an array of counts; mean counts may be fractions.
Counts = NDArray[Any] | float
