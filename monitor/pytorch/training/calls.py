"""What trainers tell no callback: the norm that clipping has found, how many samples a batch has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from monitor.pytorch.patches import TorchCallPatch
from monitor.recording.patches import CallListener

CLIPPING: Final = TorchCallPatch(torch.nn.utils, "clip_grad_norm_", ("parameters", "max_norm"))


class GradNorm(CallListener):
    """The norm that ``clip_grad_norm_`` has returned last, where it is looked up when it is called, as trainers do."""

    def __init__(self, patch: TorchCallPatch = CLIPPING) -> None:
        self._patch = patch
        self._last: Any = None
        patch.add(self)

    def call_ended(self, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del args, kwargs
        self._last = result

    def take(self) -> Any:
        """What it returned since this was last asked; None if it was not called."""
        last, self._last = self._last, None
        return last

    def remove(self) -> None:
        self._patch.remove(self)


class NormOfOptimizer(GradNorm):
    """The norm of all gradients of the one optimizer, where it is clipped as a whole.

    What clips some of the parameters, or by another norm, does not tell it.

    Args:
        whole: The call that clips all parameters of the optimizer, within which ``clip_grad_norm_`` is called.
    """

    def __init__(self, whole: TorchCallPatch) -> None:
        self._whole = whole
        self._within = False
        self._calls = 0
        whole.add(self)
        super().__init__(CLIPPING)

    def call_begins(self, patch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del args, kwargs
        self._within |= patch is self._whole

    def call_ended(self, patch: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if patch is self._whole:
            self._within = False
            return
        self._calls += 1
        norm_type = kwargs.get("norm_type", args[2] if len(args) > 2 else 2)
        self._last = result if self._within and norm_type == 2 else None

    def call_raised(self, patch: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del args, kwargs
        self._within &= patch is not self._whole

    def take(self) -> Any:
        """None, too, if several calls have clipped."""
        calls, self._calls = self._calls, 0
        last = super().take()
        return last if calls == 1 else None

    def remove(self) -> None:
        super().remove()
        self._whole.remove(self)


def rows_of(batch: Any) -> int | None:
    """How many samples a batch has: the first dimension of all its tensors. None where they differ."""
    rows = {int(tensor.shape[0]) for tensor in _tensors(batch) if tensor.dim()}
    return rows.pop() if len(rows) == 1 else None


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for one in batch.values():
            yield from _tensors(one)
    elif isinstance(batch, list | tuple):
        for one in batch:
            yield from _tensors(one)
