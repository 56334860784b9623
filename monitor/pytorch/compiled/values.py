"""Which tensors of compiled code hold the same numbers, known while it is traced.

When compiled code runs, one tensor is written over and over: neither the object nor its version tells what it holds. So what a
tensor is, is numbered in tracing, where each change makes a new version.
"""

from __future__ import annotations

import itertools
from typing import Final

from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.weak import WeakIdKeyDictionary

NO_VALUE: Final = -1
"""Of what is not traced: nothing is known of it."""

_NUMBERS: Final = itertools.count()


class _Values:
    """By tensors of a trace, which are gone when it is."""

    def __init__(self) -> None:
        self._numbers = WeakIdKeyDictionary()

    def number(self, x: Tensor) -> int:
        versions: dict[int, int] = self._numbers.setdefault(x, {})
        if x._version not in versions:
            versions[x._version] = next(_NUMBERS)
        return versions[x._version]


_VALUES: Final = _Values()


def value_of(x: Tensor) -> int:
    """A number that all tensors of a trace share which hold the same, and no others do; ``NO_VALUE`` outside of a trace."""
    return NO_VALUE if get_proxy_mode() is None else _VALUES.number(x)
