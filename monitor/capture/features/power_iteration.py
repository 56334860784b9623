"""How long power iteration goes on: by measurement, of random matrices, whose singular values lie closest."""

from __future__ import annotations

from typing import Final

FIRST: Final = 30
"""Products for the first row of a matrix: as many steps of power iteration, and what is best among all of their vectors."""

LATER: Final = (1, 5, 30)
"""Products for any other, one number after the other until the estimate stays where it was: mostly one product is enough."""

STAYS: Final = 1e-3
"""The part of itself by which an estimate may move and still be where it was."""

LATER_THERE: Final = 3
"""Products for a later row on an accelerator, where nobody may wait to see whether the estimate moves."""

SQUARINGS: Final = 12
"""2^12 steps of power iteration in the space of the combinations, which has 30 dimensions at most."""

SEED: Final = 20_251_207
FARTHEST: Final = 126
"""Powers of two that elements are scaled by reach so far: 2^-126 is the smallest normal float32."""
