"""Counts the tokens that routers of mixtures of experts send to each expert. Copies values for another thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from monitor.failures import Failures
from monitor.pytorch import modules
from monitor.pytorch.tensors import computing
from monitor.recording.backend import HookSet
from monitor.selection import clean_name, without_module
from monitor.stats.torch.tensors import local_shard
from monitor.training.step import Number, Tokens

# --- Copies of current values, which another thread reads later.


def kept(x: Any) -> Number:
    """See ``Backend.kept``. A number on the host is read at once; a number on a device is copied in the stream that computes
    it.

    A DTensor is refused: its value needs a collective.
    """
    if isinstance(x, int | float):
        return float(x)
    if hasattr(x, "_local_tensor"):
        raise TypeError("the value of a DTensor is spread over its ranks: pass its full_tensor()")
    if isinstance(x, Tensor) and x.numel() == 1:
        there = arriving(x)
        return float(there().item()) if x.device.type == "cpu" else lambda: float(there().item())
    if not isinstance(x, Tensor) and hasattr(x, "item"):
        return float(x.item())
    raise TypeError(f"expected a number or a tensor of one element, got {_description(x)}")


def arriving(x: Tensor) -> Callable[[], Tensor]:
    """Start a copy of ``x`` to the host; the result waits for it. A tensor on the host is not copied."""
    x = x.detach()
    if x.device.type == "cpu":
        return lambda: x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    return partial(_arrived, host, torch.accelerator.current_stream(x.device).record_event())


def _arrived(host: Tensor, event: torch.Event) -> Tensor:
    event.synchronize()
    return host


def _description(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


RECOGNISED: Final = frozenset({"MixtralTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter"})
"""Classes whose forward returns logits, scores and the indices of the chosen experts."""

EXPERTS_NAMES: Final = ("num_experts", "n_routed_experts", "num_local_experts")
TOP_K_NAMES: Final = ("top_k", "topk", "num_experts_per_tok")


class NotARouterError(Exception):
    """The result of a module does not show which experts were chosen."""


class Routers:
    """Counts how many tokens a router sends to each expert, in every training forward. Recomputed forwards count once.

    Args:
        names: Names of further router modules. Their result must contain the indices of the chosen experts (an integer tensor)
            or a mask of them (booleans, experts last). Or it is the logits, and the module has ``top_k``, ``topk`` or
            ``num_experts_per_tok``.

    Raises:
        ValueError: There is no module of one of these names.
    """

    def __init__(self, model: nn.Module, names: Iterable[str], failures: Failures) -> None:
        self._failures = failures
        self._hooks = HookSet()
        self._counts: dict[str, Tensor] = {}
        chosen = dict(_chosen(model, frozenset(names)))
        self.names = tuple(chosen)
        for name, module in chosen.items():
            count = failures.guarded("counting what went to each expert", partial(self._count, name), of=name)
            self._hooks.add(modules.after_forward(module, count))

    def step(self) -> dict[str, Tokens]:
        """See ``monitor.training.backend.Routers``."""
        counts, self._counts = self._counts, {}
        return {name: partial(_to_list, arriving(counts[name])) for name in self.names if name in counts}

    def remove(self) -> None:
        self._hooks.remove()

    def _count(self, name: str, module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> None:
        if not module.training or modules.repeating():
            return
        with computing():
            counts = counts_of(module, result)
            known = self._counts.get(name)
            self._counts[name] = counts if known is None else known.add_(counts)


def counts_of(module: nn.Module, result: Any) -> Tensor:
    """How many tokens go to each expert, int64, shape ``(experts,)``, on the device of a router's result.

    Raises:
        NotARouterError: The result does not show it.
    """
    found = [one for one in _tensors(result) if one.dim() > 0]
    maps = [one for one in found if one.dtype == torch.bool]
    if maps:
        return maps[-1].flatten(0, -2).sum(0)
    floats = [one for one in found if one.is_floating_point()]
    indices = [one for one in found if not one.is_floating_point() and not one.is_complex()]
    experts = _number(module, EXPERTS_NAMES) or (floats[0].shape[-1] if floats else None)
    top = _number(module, TOP_K_NAMES)
    if indices and experts:
        return _count_indices(_expert_indices(indices, top), experts)
    if len(floats) == 1 and top:
        return _count_indices(floats[0].topk(top, -1).indices, floats[0].shape[-1])
    raise NotARouterError("it returns neither the indices of the chosen experts nor logits with a top_k")


def _expert_indices(indices: Sequence[Tensor], top: int | None) -> Tensor:
    """The index tensor: of several, the one whose last dimension is ``top``."""
    fitting = [one for one in indices if top is not None and one.shape[-1] == top] if len(indices) > 1 else indices
    if len(fitting) != 1:
        raise NotARouterError("it returns several integer tensors, and it is unknown which one holds the chosen experts")
    return fitting[0]


def _count_indices(indices: Tensor, experts: int) -> Tensor:
    """Count valid indices only: a dropped token has an index out of range, at which a device kernel would fail fatally."""
    flat = indices.flatten().to(torch.int64)
    there = ((flat >= 0) & (flat < experts)).to(torch.int64)
    zeros = torch.zeros(experts, dtype=torch.int64, device=flat.device)
    return zeros.scatter_add_(0, flat.clamp(0, experts - 1), there)


def _tensors(result: Any) -> Iterator[Tensor]:
    for one in result if isinstance(result, tuple | list) else (result,):
        if isinstance(one, Tensor) and (local := local_shard(one)) is not None:
            yield local


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if isinstance(value := getattr(module, name, None), int)), None)


def _chosen(model: nn.Module, names: frozenset[str]) -> Iterator[tuple[str, nn.Module]]:
    missing = set(names)
    for name, module in model.named_modules():
        known = without_module(clean_name(name))
        if known in names or name in names or type(module).__name__ in RECOGNISED:
            missing -= {known, name}
            yield known, module
    if missing:
        raise ValueError(f"routers: there is no module {', '.join(map(repr, sorted(missing)))} in the model")


def _to_list(counts: Any) -> list[int]:
    listed: list[int] = counts().tolist()
    return listed
