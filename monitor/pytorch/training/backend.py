"""PyTorch's implementation of ``monitor.training.metrics.MetricsBackend``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from monitor.config import MonitorConfig
from monitor.failures import Failures
from monitor.pytorch import modules, tensors
from monitor.pytorch.features import choices, reading
from monitor.pytorch.hooks import TorchCallPatch
from monitor.pytorch.optimizer_steps import optimizers_in
from monitor.pytorch.process_group import place
from monitor.pytorch.trainer_mon import TrainerMon
from monitor.recording.backend import HookSet
from monitor.recording.patches import CallListener
from monitor.selection import clean_name, without_module
from monitor.stats.torch.memory import arriving
from monitor.training.step import NoCounterError, Number, Tokens

# --- Copies of current values, which another thread reads later.


def is_spread(x: Any) -> bool:
    """Whether ``x`` is a DTensor. Versions of torch have its class in different modules."""
    return hasattr(x, "_local_tensor")


def kept(x: Any) -> Number:
    """See ``Backend.kept``. A number on the host is read at once; a number on a device is copied in the stream that computes
    it.

    A DTensor is refused: its value needs a collective.
    """
    if isinstance(x, int | float):
        return float(x)
    if is_spread(x):
        raise TypeError("the value of a DTensor is spread over its ranks: pass its full_tensor()")
    if isinstance(x, Tensor) and x.numel() == 1:
        there = arriving(x)
        return float(there().item()) if x.device.type == "cpu" else lambda: float(there().item())
    if not isinstance(x, Tensor) and hasattr(x, "item"):
        return float(x.item())
    raise TypeError(f"expected a number or a tensor of one element, got {_description(x)}")


def _description(x: Any) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__


# --- Routers of mixtures of experts: counts the tokens that go to each expert.

RECOGNISED: Final = frozenset({"MixtralTopKRouter", "Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter"})
"""Classes whose forward returns logits, scores and the indices of the chosen experts."""


class TorchRouters:
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
        """See ``monitor.training.metrics.Routers``."""
        counts, self._counts = self._counts, {}
        return {name: partial(_to_list, arriving(counts[name])) for name in self.names if name in counts}

    def remove(self) -> None:
        self._hooks.remove()

    def _count(self, name: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if not module.training or modules.repeating():
            return
        with tensors.computing():
            call = reading.call_of(module, args, kwargs)._replace(picks_greatest=True)
            counts = choices.counts_of(module, result, call)
            known = self._counts.get(name)
            self._counts[name] = counts if known is None else known.add_(counts)


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


# --- Values that trainers pass to no callback: the norm from clipping, the number of samples of a batch.

CLIPPING: Final = TorchCallPatch(torch.nn.utils, "clip_grad_norm_", ("parameters", "max_norm"))


class GradNorm(CallListener):
    """The norm that ``clip_grad_norm_`` returned last. Sees callers that look the function up at each call, as trainers do."""

    def __init__(self, patch: TorchCallPatch = CLIPPING) -> None:
        self._patch = patch
        self._last: Any = None
        patch.add(self)

    def call_ended(self, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del args, kwargs
        self._last = result

    def take(self) -> Any:
        """The norm since the last ``take``; None if the function was not called."""
        last, self._last = self._last, None
        return last

    def remove(self) -> None:
        self._patch.remove(self)


class NormOfOptimizer(GradNorm):
    """The norm of all gradients of a single optimizer, if all are clipped together.

    Calls that clip some parameters only, or by another norm, are ignored.

    Args:
        whole: The call that clips all parameters of the optimizer and calls ``clip_grad_norm_``.
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
        """Also None if several calls have clipped."""
        calls, self._calls = self._calls, 0
        last = super().take()
        return last if calls == 1 else None

    def remove(self) -> None:
        super().remove()
        self._whole.remove(self)


def rows_of(batch: Any) -> int | None:
    """Number of samples of a batch: the first dimension of all its tensors. None if they differ."""
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


# --- The scale by which a fused optimizer divides gradients inside its step, under a GradScaler.


class TorchGradientScale:
    """See ``monitor.training.metrics.GradientScale``. The scaler sets it on the optimizer during a step."""

    def __init__(self, optimizer: Optimizer, failures: Failures) -> None:
        self._last: Number | None = None
        known = weakref.WeakMethod(self._look)

        def look(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            if (living := known()) is not None:
                living(optimizer)

        hook = torch.compiler.disable(failures.guarded("reading the scale of gradients", look))
        self._handle = optimizer.register_step_pre_hook(hook)

    def take(self) -> Number | None:
        last, self._last = self._last, None
        return last

    def remove(self) -> None:
        self._handle.remove()

    def _look(self, optimizer: Optimizer) -> None:
        scale = getattr(optimizer, "grad_scale", None)
        self._last = None if scale is None else kept(scale)


class TorchLearningRate:
    """See ``monitor.training.metrics.LearningRate``."""

    def step_ended(self) -> None:
        """Nothing to observe."""

    def next(self, optimizer: Any) -> Number | None:
        while optimizer is not None and not hasattr(optimizer, "param_groups"):
            optimizer = getattr(optimizer, "optimizer", None)  # an engine may be passed in place of its optimizer
        return kept(optimizer.param_groups[0]["lr"]) if optimizer is not None and optimizer.param_groups else None

    def remove(self) -> None:
        """Nothing to remove."""


__all__ = ["counting_flops", "gradient_scale", "kept", "learning_rate", "monitor_of", "place", "routers", "trainable_names"]

COMPILED: Final = "The monitor cannot count the floating point operations of a compiled model: pass model_flops as a number."


def monitor_of(config: MonitorConfig, base: Path) -> TrainerMon:
    return TrainerMon.of_config(config, base, params_have_main_grad=False)


def gradient_scale(optimizer: Any, failures: Failures) -> TorchGradientScale | None:
    """Fused optimizers divide by the scale of a GradScaler themselves; for others the scaler divides."""
    try:
        found, *others = optimizers_in(optimizer)
    except TypeError:  # a framework's optimizer
        return None
    return None if others else TorchGradientScale(found, failures)


def routers(model: Any, names: Iterable[str], failures: Failures) -> TorchRouters:
    return TorchRouters(model, names, failures)


def trainable_names(model: Any) -> list[str]:
    return [without_module(clean_name(name)) for name, parameter in model.named_parameters() if parameter.requires_grad]


def learning_rate(optimizer: Any, failures: Failures) -> TorchLearningRate:
    del optimizer, failures
    return TorchLearningRate()


def counting_flops(model: Any) -> AbstractContextManager[Callable[[], float]]:
    """Counts multiplications and additions of matrix products, convolutions and attention, forward and backward.

    Raises:
        NoCounterError: A module is compiled: code compiled as a whole graph raises under a counter.
    """
    if model is not None and any(_is_compiled(module) for module in model.modules()):
        raise NoCounterError(COMPILED)
    return _counting()


def _is_compiled(module: nn.Module) -> bool:
    return isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None


@contextmanager
def _counting() -> Iterator[Callable[[], float]]:
    with FlopCounterMode(display=False) as counter:
        yield lambda: float(counter.get_total_flops())
