"""Copies of tensors too small to be reduced alone where they are caught: a hook copies, and the rest is done together.

In training the code of a reduction is cold each time that a hook comes to it, and fetching it costs more than the arithmetic
on a thousand elements. So a hook only copies, into a buffer where the tensors stand end to end (``torch_small_tensors``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monitor.stats.epsilon import Epsilon
from monitor.stats.partials import Floats
from monitor.stats.torch_modes import KEYS_ABOVE_US
from monitor.stats.torch_small_tensors import BATCH, SMALL, reduce_segments

_GIVEN_UP: Final = -1
_MOST_VIEWS: Final = 4096

Closer = Callable[[Tensor], Sequence[float] | Floats | None]
Enter = Callable[[NDArray[np.int64], Floats], None]
"""Takes rows of the table and their numbers, shape ``(rows, len(COLUMNS))``."""


class Copies:
    """Copies of small tensors, by the table row that each is for.

    Args:
        closer: Reduces one that cannot be reduced beside others.
        enter: Told of each row once, when room is needed or by ``reduce``.
    """

    def __init__(self, eps: float, closer: Closer, enter: Enter) -> None:
        self._bound = Epsilon.of(eps, np.float32).bound
        self._closer = closer
        self._enter = enter
        self._buffer: Tensor | None = None
        self._wide = np.empty(0)
        self._views: dict[tuple[int, torch.Size], Tensor] = {}
        self._starts: list[int] = []
        self._end = 0
        self._rows: list[int] = []
        self._places: dict[int, int] = {}

    def takes(self, x: Tensor) -> bool:
        """Whether a plain tensor (``is_plain``) is one that is copied."""
        return x.numel() <= SMALL

    def take(self, row: int, x: Tensor) -> None:
        """Copy, for ``row``, a tensor that is one to be copied. It takes the place of an earlier one."""
        with torch._C._ExcludeDispatchKeyGuard(KEYS_ABOVE_US):
            length = x.numel()
            if self._end + length > BATCH:
                self._reduce()
            self._copy_all([row], [self._room(row, x, length)], [x])

    def take_all(self, rows: Sequence[int], tensors: list[Tensor]) -> None:
        """The same for many, whose rows all differ, in fewer calls."""
        with torch._C._ExcludeDispatchKeyGuard(KEYS_ABOVE_US):
            rooms: list[Tensor] = []
            begun = 0
            for row, x in zip(rows, tensors, strict=True):
                length = x.numel()
                if self._end + length > BATCH:  # what is about to be reduced has to be there
                    self._copy_all(rows[begun:], rooms, tensors[begun : begun + len(rooms)])
                    begun += len(rooms)
                    rooms = []
                    self._reduce()
                rooms.append(self._room(row, x, length))
            self._copy_all(rows[begun:], rooms, tensors[begun:])

    def give_up(self, row: int) -> None:
        """Its row is written by somebody else now."""
        place = self._places.pop(row, None)
        if place is not None:
            self._rows[place] = _GIVEN_UP

    def reduce(self) -> None:
        """Enter what was copied."""
        if self._rows:
            with torch._C._ExcludeDispatchKeyGuard(KEYS_ABOVE_US):
                self._reduce()

    def discard(self) -> None:
        """Let go of what was copied."""
        self._starts.clear()
        self._rows.clear()
        self._places.clear()
        self._end = 0

    def _room(self, row: int, x: Tensor, length: int) -> Tensor:
        """Where to copy ``x``, in its shape."""
        if row in self._places:
            self.give_up(row)
        start = self._end
        self._places[row] = len(self._rows)
        self._rows.append(row)
        self._starts.append(start)
        self._end = start + length
        key = start, x.shape
        view = self._views.get(key)
        return self._new_view(key) if view is None else view

    def _new_view(self, key: tuple[int, torch.Size]) -> Tensor:
        """Steps repeat each other, and so do places: cutting a view costs as much as the copy."""
        if self._buffer is None:
            self._buffer, self._wide = torch.empty(BATCH, dtype=torch.float32, device="cpu"), np.empty(BATCH)
        if len(self._views) >= _MOST_VIEWS:
            self._views.clear()
        start, shape = key
        view = self._views[key] = self._buffer[start : start + shape.numel()].view(shape)
        return view

    def _reduce(self) -> None:
        assert self._buffer is not None
        try:
            copied, starts = self._buffer[: self._end], np.array(self._starts)
            lengths = np.diff(starts, append=self._end)
            numbers, hold = reduce_segments(copied.numpy(), starts, lengths, self._bound, self._wide[: self._end])
            for place in np.flatnonzero(~hold).tolist():
                numbers[place] = self._closer(copied[starts[place] : starts[place] + lengths[place]])
            rows = np.array(self._rows)
            wanted = rows != _GIVEN_UP
            self._enter(rows[wanted], numbers[wanted])
        finally:
            self.discard()

    def _copy_all(self, rows: Sequence[int], rooms: list[Tensor], tensors: list[Tensor]) -> None:
        """Where it fails the rooms hold what earlier tensors were: no row of theirs is entered."""
        try:
            if len(rooms) == 1:
                rooms[0].copy_(tensors[0])
            elif rooms:
                torch._foreach_copy_(rooms, tensors)
        except BaseException:
            for row in rows:
                self.give_up(row)
            raise
