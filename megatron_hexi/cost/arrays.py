"""Types of arrays, of this package."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
#: How many of something, one number or an array of them; means may be fractions.
Counts = NDArray[Any] | float
