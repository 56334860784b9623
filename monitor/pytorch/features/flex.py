"""FlexAttention: what a program's own functions do to scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

FLEX: Final = "flex_attention"
"""The name of torch's operator of FlexAttention, which older versions do not have."""


class Modification(NamedTuple):
    """What FlexAttention does to scores: ``score_mod`` and ``mask_mod``, and the tensors that they read."""

    score: Callable[..., Tensor]
    mask: Callable[..., Tensor]
    read_by_score: tuple[Any, ...] = ()
    read_by_mask: tuple[Any, ...] = ()

    def apply(self, scores: Tensor, places: list[Tensor]) -> Tensor:
        """The scores of one row of the batch.

        Args:
            scores: Shape ``(heads, queries, keys)``.
            places: The indices of the row, the heads, the queries and the keys.
        """
        with torch._C._EnableTorchFunction(), _Indexing(), _vmap_enabled():
            seen = _over_places(self.mask, (), len(self.read_by_mask))(*places, *self.read_by_mask)
            over = _over_places(self.score, (0,), len(self.read_by_score))
            return torch.where(seen, over(scores.unsqueeze(0), *places, *self.read_by_score), -math.inf)[0]


def _vmap_enabled() -> AbstractContextManager[None]:
    """Let ``vmap`` work inside a dispatch mode, which excludes its keys: torch runs new compiled code once in such a mode."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _OF_VMAP:
        excluded = excluded.remove(key)
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
    return guard


_OF_VMAP: Final = (
    torch._C.DispatchKey.FuncTorchBatched,
    torch._C.DispatchKey.FuncTorchBatchedDecomposition,
    torch._C.DispatchKey.FuncTorchVmapMode,
    torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode,
    torch._C.DispatchKey.FuncTorchDynamicLayerBackMode,
)


class _Indexing(TorchFunctionMode):
    """Lets ``tensor[index]`` take indices under ``vmap``, and hides the calls from the user's modes."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            if func is Tensor.__getitem__:
                places = args[1] if isinstance(args[1], tuple) else (args[1],)
                if all(isinstance(one, Tensor) for one in places):
                    return torch.ops.aten.index.Tensor(args[0], list(places))
            return func(*args, **(kwargs or {}))


def _over_places(of_one: Callable[..., Tensor], scores: tuple[int, ...], read: int) -> Callable[..., Tensor]:
    """A function of single places as one of vectors of rows, heads, queries and keys."""
    for place in (3, 2, 1, 0):
        dims = tuple(0 if one == place else None for one in range(4))
        of_one = torch.vmap(of_one, in_dims=(*scores, *dims, *(None,) * read))
    return of_one
