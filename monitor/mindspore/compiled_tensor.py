"""A tensor that compiled code has measured, as collectors pass it on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from monitor.stats.partials import Floats


@dataclass(frozen=True, slots=True)
class TapedTensor:
    """A tensor that compiled code has measured.

    Attributes:
        row: Its partials, shape ``(len(COLUMNS),)``.
        dtype: MindSpore's name of its dtype, such as ``float32``.
        has_init: True, as for parameters without data: only its row can be read.
    """

    row: Floats
    shape: tuple[int, ...]
    dtype: str
    has_init: bool = True

    @property
    def size(self) -> int:
        return math.prod(self.shape)
