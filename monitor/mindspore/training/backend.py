"""MindSpore's implementation of the training metrics' adapter interface ``monitor.training.metrics.MetricsBackend``."""

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
from monitor.recording.backend import HookSet
from monitor.stats.mindspore.tensors import on_host
from monitor.training.metrics import NotARouterError
from monitor.training.step import NoCounterError, Number, Tokens

# --- The factor by which an optimizer divides its gradients inside its step: the constant loss scale.


class MindSporeGradientScale:
    """See ``monitor.training.metrics.GradientScale``. The factor never changes."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def take(self) -> float:
        return self._scale

    def remove(self) -> None:
        """Nothing to remove."""


# --- Tensors that another thread reads later.
#
# Operations create new tensors, so a computed tensor keeps its value. Parameters are overwritten, and so they are copied.


def kept(x: Any) -> Number:
    """See ``MetricsBackend.kept``. The returned function waits for the tensor, since in MindSpore every reading waits."""
    if isinstance(x, int | float):
        return float(x)
    if isinstance(x, Tensor) and x.size == 1:
        still = x.copy() if isinstance(x, Parameter) else x
        return lambda: float(on_host(still).reshape(()).item())
    if not isinstance(x, Tensor) and hasattr(x, "item"):
        return float(x.item())
    raise TypeError(f"expected a number or a tensor of one element, got {_description(x)}")


def _description(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


# --- Routers of mixtures of experts: their choices are counted after the step has ended.

EXPERTS_NAMES: Final = ("num_experts", "n_routed_experts", "expert_num")
CHOSEN_NAMES: Final = ("top_k", "topk", "num_experts_per_tok")
INTEGERS: Final = (mindspore.int32, mindspore.int64)

ChosenExperts = tuple[Tensor, int]
"""The result of a router's call, indices or a boolean map, and the number of experts."""


class MindSporeRouters:
    """Keeps the choices of a router in every training call until the step ends.

    Args:
        names: The names of cells. Their results must contain the indices of the chosen experts (integers), or for each token a
            boolean map of the experts (experts last).

    Raises:
        ValueError: The model has no cell of one of these names.
    """

    def __init__(self, model: nn.Cell, names: Iterable[str], failures: Failures) -> None:
        self._hooks = HookSet()
        self._chosen: dict[str, list[ChosenExperts]] = {}
        cells = {name: cell for name, cell in model.cells_and_names() if name in set(names)}
        if missing := set(names) - set(cells):
            raise ValueError(f"routers: there is no cell {', '.join(map(repr, sorted(missing)))} in the model")
        for name, cell in cells.items():
            keep = failures.guarded("counting what went to each expert", partial(self._keep, name), of=name)
            self._hooks.add(after_forward(cell, keep))

    def step(self) -> dict[str, Tokens]:
        """See ``monitor.training.metrics.Routers``."""
        chosen, self._chosen = self._chosen, {}
        return {name: partial(_counted, calls) for name, calls in chosen.items()}

    def remove(self) -> None:
        self._hooks.remove()

    def _keep(self, name: str, cell: nn.Cell, _args: Any, _kwargs: Any, result: Any) -> None:
        if cell.training:
            self._chosen.setdefault(name, []).append(chosen_in(cell, result))


def chosen_in(cell: nn.Cell, result: Any) -> ChosenExperts:
    """The choices of a router's call.

    Raises:
        NotARouterError: The result does not show them.
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
    return _fitting_indices(indices, top), experts


def _fitting_indices(indices: Sequence[Tensor], top: int | None) -> Tensor:
    """The tensor with as many indices for each token as the router chooses, if there are several."""
    fitting = [one for one in indices if top is not None and one.shape[-1] == top] if len(indices) > 1 else indices
    if len(fitting) != 1:
        raise NotARouterError(
            "it returns several tensors of integers, and it is unclear which of them holds the chosen experts"
        )
    return fitting[0]


def _counted(calls: Sequence[ChosenExperts]) -> list[int]:
    counts: NDArray[np.int64] = np.sum([_of_call(on_host(chosen), experts) for chosen, experts in calls], axis=0)
    return [int(count) for count in counts]


def _of_call(chosen: Any, experts: int) -> NDArray[np.int64]:
    if chosen.dtype == np.bool_:
        by_token: NDArray[np.int64] = chosen.reshape(-1, experts).sum(0)
        return by_token
    # Only valid indices: a dropped token has another number.
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
    """The learning rate of the first group of the first optimizer. A schedule's rate for the next step is computed as the
    optimizer computes it.
    """
    if isinstance(optimizer, list):
        optimizer = optimizer[0] if optimizer else None
    if groups := getattr(optimizer, "param_groups", None):
        return kept(groups[0]["lr"])
    found = optimizer.get_lr() if hasattr(optimizer, "get_lr") else None
    first = found[0] if isinstance(found, tuple | list) else found
    return None if first is None else kept(first)


def gradient_scale(optimizer: Any, failures: Failures) -> MindSporeGradientScale | None:
    """The constant scale of an optimizer that was created with ``loss_scale``; None if it does not scale."""
    del failures
    scale = float(getattr(optimizer, "loss_scale", 1.0))
    return None if scale == 1.0 else MindSporeGradientScale(scale)


def routers(model: Any, names: Iterable[str], failures: Failures) -> MindSporeRouters:
    return MindSporeRouters(model, names, failures)


def counting_flops(model: Any) -> AbstractContextManager[Callable[[], float]]:
    """Raises ``NoCounterError``: MindSpore cannot count operations."""
    del model
    raise NoCounterError("MindSpore counts no floating point operations: pass model_flops as a number.")
