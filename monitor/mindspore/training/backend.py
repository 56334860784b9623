"""MindSpore's side of training metrics: see ``monitor.training.backend.Backend``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn
from numpy.typing import NDArray

from monitor.config import MonitorConfig
from monitor.failures import Failures
from monitor.mindspore.hooks import after_forward
from monitor.mindspore.process_group import place
from monitor.mindspore.trainer_mon import TrainerMon
from monitor.recording.protocols import HookSet
from monitor.stats.mindspore.tensors import on_host
from monitor.training.scalars import NoCounterError
from monitor.training.step import Number, Tokens

# --- By what an optimizer divides its gradients inside its step: the loss scale that it was made with.


class GradientScale:
    """See ``monitor.training.backend.GradientScale``: it never changes."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def take(self) -> float:
        return self._scale

    def remove(self) -> None:
        """Nothing was watched."""


# --- Tensors that are read later, by another thread.
#
# An operation makes a new tensor, so what a step has computed stays what it is. A parameter is what changes, and is
# copied.


def kept(x: Any) -> Number:
    """See ``Backend.kept``. A tensor is waited for by whoever calls what is returned: here everything that reads it waits."""
    if isinstance(x, int | float):
        return float(x)
    if isinstance(x, Tensor) and x.size == 1:
        still = x.copy() if isinstance(x, Parameter) else x
        return lambda: float(on_host(still).reshape(()).item())
    if not isinstance(x, Tensor) and hasattr(x, "item"):
        return float(x.item())
    raise TypeError(f"expected a number or a tensor of one element, got {_told(x)}")


def _told(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


# --- Routers of mixtures of experts: what each token is sent to, counted when the step has ended.

EXPERTS_NAMES: Final = ("num_experts", "n_routed_experts", "expert_num")
CHOSEN_NAMES: Final = ("top_k", "topk", "num_experts_per_tok")
INTEGERS: Final = (mindspore.int32, mindspore.int64)

Chosen = tuple[Tensor, int]
"""What a call of a router has chosen, and of how many experts; as a map, booleans."""


class NotARouterError(Exception):
    """What a cell returns does not say which experts were chosen."""


class Routers:
    """Keeps, of every training call of a router, what it has chosen, until the step ends.

    Args:
        names: Of cells. What they return has to have in it the numbers of the chosen experts (integers), or for each token
            which experts are chosen (booleans, experts last).

    Raises:
        ValueError: There is no cell of one of these names.
    """

    def __init__(self, model: nn.Cell, names: Iterable[str], failures: Failures) -> None:
        self._hooks = HookSet()
        self._chosen: dict[str, list[Chosen]] = {}
        cells = {name: cell for name, cell in model.cells_and_names() if name in set(names)}
        if missing := set(names) - set(cells):
            raise ValueError(f"routers: there is no cell {', '.join(map(repr, sorted(missing)))} in the model")
        for name, cell in cells.items():
            keep = failures.guarded("counting what went to each expert", partial(self._keep, name), of=name)
            self._hooks.add(after_forward(cell, keep))

    def step(self) -> dict[str, Tokens]:
        """See ``monitor.training.backend.Routers``."""
        chosen, self._chosen = self._chosen, {}
        return {name: partial(_counted, calls) for name, calls in chosen.items()}

    def remove(self) -> None:
        self._hooks.remove()

    def _keep(self, name: str, cell: nn.Cell, _args: Any, _kwargs: Any, result: Any) -> None:
        if cell.training:
            self._chosen.setdefault(name, []).append(chosen_in(cell, result))


def chosen_in(cell: nn.Cell, result: Any) -> Chosen:
    """What a router has chosen.

    Raises:
        NotARouterError: It does not say.
    """
    found = [one for one in _tensors(result) if one.ndim > 0]
    maps = [one for one in found if one.dtype == mindspore.bool_]
    if maps:
        return maps[-1], int(maps[-1].shape[-1])
    indices = [one for one in found if one.dtype in INTEGERS]
    floats = [one for one in found if one.dtype not in INTEGERS]
    known = next((value for name in EXPERTS_NAMES if isinstance(value := getattr(cell, name, None), int)), None)
    experts = known or (int(floats[0].shape[-1]) if floats else None)
    if not indices or not experts:
        raise NotARouterError("it does not return the numbers of the chosen experts")
    top = next((value for name in CHOSEN_NAMES if isinstance(value := getattr(cell, name, None), int)), None)
    return _the_chosen(indices, top), experts


def _the_chosen(indices: Sequence[Tensor], top: int | None) -> Tensor:
    """Of several, the one that has as many numbers for each token as the router chooses."""
    fitting = [one for one in indices if top is not None and one.shape[-1] == top] if len(indices) > 1 else indices
    if len(fitting) != 1:
        raise NotARouterError("it returns several tensors of integers, and which are the chosen experts does not show")
    return fitting[0]


def _counted(calls: Sequence[Chosen]) -> list[int]:
    counts: NDArray[np.int64] = np.sum([_of_call(on_host(chosen), experts) for chosen, experts in calls], axis=0)
    return [int(count) for count in counts]


def _of_call(chosen: Any, experts: int) -> NDArray[np.int64]:
    if chosen.dtype == np.bool_:
        by_token: NDArray[np.int64] = chosen.reshape(-1, experts).sum(0)
        return by_token
    # Of those that there are: a token that is dropped has another number.
    return np.bincount(chosen[(chosen >= 0) & (chosen < experts)], minlength=experts)


def _tensors(result: Any) -> Iterator[Tensor]:
    for one in result if isinstance(result, tuple | list) else (result,):
        if isinstance(one, Tensor):
            yield one


__all__ = ["counting_flops", "gradient_scale", "kept", "learning_rate", "monitor_of", "place", "routers", "trainable_names"]


def monitor_of(config: MonitorConfig, base: Path) -> TrainerMon:
    return TrainerMon.of_config(config, base, params_have_main_grad=False)


def trainable_names(model: Any) -> list[str]:
    return [str(parameter.name) for parameter in model.trainable_params()]


def learning_rate(optimizer: Any) -> Number | None:
    """Of the first group of the first optimizer. That of a schedule is computed for the step to come, as the optimizer is going
    to do itself.
    """
    if isinstance(optimizer, list):
        optimizer = optimizer[0] if optimizer else None
    if groups := getattr(optimizer, "param_groups", None):
        return kept(groups[0]["lr"])
    found = optimizer.get_lr() if hasattr(optimizer, "get_lr") else None
    first = found[0] if isinstance(found, tuple | list) else found
    return None if first is None else kept(first)


def gradient_scale(optimizer: Any, failures: Failures) -> GradientScale | None:
    """An optimizer that is told a loss scale divides by it in every step."""
    del failures
    scale = float(getattr(optimizer, "loss_scale", 1.0))
    return None if scale == 1.0 else GradientScale(scale)


def routers(model: Any, names: Iterable[str], failures: Failures) -> Routers:
    return Routers(model, names, failures)


def counting_flops(model: Any) -> AbstractContextManager[Callable[[], float]]:
    """MindSpore has no counter."""
    del model
    raise NoCounterError("MindSpore counts no floating point operations: pass model_flops as a number.")
