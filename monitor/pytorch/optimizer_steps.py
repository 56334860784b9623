"""When optimizers step: their own hooks, closures, and steps that a GradScaler skips.

``optimizer.step`` is never replaced, so that a scheduler made before or after finds what it expects.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from monitor.failures import Failures
from monitor.pytorch.hooks import TorchCallPatch
from monitor.recording import protocols
from monitor.recording.backend import StepListener
from monitor.recording.patches import CallListener, CallPatch
from monitor.recording.protocols import MAX_WRAPPERS, HookSet, Removable, held_by
from monitor.stats.torch.tensors import capturing

# --- Seeing a step that a GradScaler skips.
#
# When it found Inf, ``GradScaler.step`` does not call the optimizer at all, and no hook of any kind runs: a patch is
# the only way to learn of it.

SCALER_PATCH: Final = TorchCallPatch(GradScaler, "step", ("self", "optimizer"))

# --- Which torch optimizers do the work inside what a framework hands to its users.


def optimizers_in(given: Any) -> tuple[Optimizer, ...]:
    """The torch optimizers that step: inside sequences, dictionaries, containers and wrappers, in order, each once.

    Raises:
        TypeError: Something in it is no optimizer, or there is none.
    """
    return protocols.optimizers_in(given, innermost, _unwrapped)


def containers_in(given: Any) -> Iterator[Optimizer]:
    """The torch optimizers that hold others, and whose step is the step of all that they hold."""
    for _ in range(MAX_WRAPPERS):
        if isinstance(given, Optimizer) and held_by(given) is not None:
            yield given
        given = getattr(given, "optimizer", None)


def innermost(optimizer: Any, called: str = "optimizer") -> Optimizer:
    """The torch optimizer inside any number of wrappers, which keep what they wrap in ``optimizer``.

    Args:
        called: What a message calls it.

    Raises:
        TypeError: There is none.
    """
    inner = _unwrapped(optimizer)
    given = type(optimizer).__name__
    if isinstance(inner, Optimizer):
        if not hasattr(inner, "_optimizer_step_pre_hooks"):
            raise TypeError(f"{called} is a {given}, which calls no hooks around its step: pass the optimizer that it wraps.")
        return inner
    raise TypeError(f"{called} is a {given}: expected a torch.optim.Optimizer, or a wrapper that keeps one in `.optimizer`.")


def _unwrapped(optimizer: Any) -> Any:
    """What is inside wrappers, down to what holds several, or wraps nothing."""
    inner = optimizer
    for _ in range(MAX_WRAPPERS):
        wrapped = None if held_by(inner) is not None else _wrapped(inner)
        if wrapped is None:
            break
        inner = wrapped
    return inner


def _wrapped(optimizer: Any) -> Any:
    """What a wrapper keeps in ``optimizer``; of optimizers that call no hooks of torch also in ``optim``."""
    found = getattr(optimizer, "optimizer", None)
    if found is None and isinstance(optimizer, Optimizer) and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        found = getattr(optimizer, "optim", None)
    return found


def _calls_hooks_of_its_own(wrapper: Any, inner: Optimizer) -> bool:
    """Whether torch has put the call of hooks around the wrapper's step. Lightning's has the hooks of what it wraps."""
    hooks = getattr(wrapper, "_optimizer_step_pre_hooks", None)
    is_hooked = isinstance(wrapper, Optimizer) and bool(getattr(type(wrapper).step, "hooked", False))
    return is_hooked and hooks is not None and hooks is not inner._optimizer_step_pre_hooks


def wrappers_in(given: Any) -> Iterator[tuple[Optimizer, Optimizer]]:
    """The optimizers that wrap another one and call hooks of torch themselves, from outside in, each with the innermost.

    Such a wrapper may change weights after the step of what it wraps, as Lookahead does.
    """
    held = held_by(given)
    for one in held if held is not None else ():
        yield from wrappers_in(one)
    inner = _unwrapped(given)
    while held is None and given is not inner:
        if isinstance(inner, Optimizer) and _calls_hooks_of_its_own(given, inner):
            yield given, inner
            return
        given = _wrapped(given)


CALLS_HOOKS: Final = Optimizer.profile_hook_step(lambda: None).__code__
"""Of the function that torch puts around every ``step``, and that calls the hooks."""

CAPTURED: Final = (
    "The optimizer's step is being captured in a graph of the device. Its replays are steps that nobody is told of, and "
    "end none: leave optimizer.step() out of what is captured."
)
HOST: Final = torch.device("cpu")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class OptimizerSteps(CallListener):
    """Tells a listener of the steps of optimizers.

    Attributes:
        optimizers: Those that have a turn in each step. Empty until the first one that steps a parameter of the model shows
            itself, where none was given.
        evaluating: Whether an optimizer is calling its closure: forwards that begin now are inside its step.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        chunks: Sequence[nn.Module],
        listener: StepListener,
        failures: Failures,
        containers: Sequence[Optimizer] = (),
        wrappers: Mapping[Optimizer, Optimizer] = MappingProxyType({}),
    ) -> None:
        """Hook the optimizers.

        Args:
            containers: Those whose step is the step of all optimizers.
            wrappers: Those whose step is the step of one optimizer and more.
        """
        self.optimizers: tuple[Optimizer, ...] = ()
        self.evaluating = False
        self._chunks = chunks
        self._listener = listener
        self._guarded = failures.guarded
        self._failures = failures
        self._hooks = HookSet()
        self._called: set[Optimizer] = set()
        self._scalers: weakref.WeakKeyDictionary[GradScaler, int] = weakref.WeakKeyDictionary()
        for optimizer in optimizers:
            self._adopt(optimizer)
        for container in containers:
            self._follow(container)
        self._wrapped: set[Optimizer] = set()
        for wrapper, inner in wrappers.items():
            self._follow_wrapper(wrapper, inner)
        if not optimizers:
            self._hooks.add(self._wait_for_ours())
        SCALER_PATCH.add(self)

    def _adopt(self, optimizer: Optimizer) -> None:
        self.optimizers = (*self.optimizers, optimizer)
        # Where the step is compiled, these two are left out of it and called all the same.
        before, after = (
            torch.compiler.disable(self._guarded(where, hook))
            for where, hook in (("reading before the step", self._before), ("ending the step", self._after))
        )
        self._hooks.add(optimizer.register_step_pre_hook(before))
        self._hooks.add(optimizer.register_step_post_hook(after))

    def _follow(self, container: Optimizer) -> None:
        if not hasattr(container, "_optimizer_step_post_hooks"):
            return  # it only looks like an optimizer of torch, which calls no hooks for it

        def ended(_container: Optimizer, _args: Any, _kwargs: Any) -> None:
            self._listener.all_stepped()

        hook = torch.compiler.disable(self._guarded("ending the step", ended))
        self._hooks.add(container.register_step_post_hook(hook))

    def _follow_wrapper(self, wrapper: Optimizer, inner: Optimizer) -> None:
        """Have the step of ``inner`` end when that of ``wrapper`` does: it may change weights once more."""

        def begins(*_: Any) -> None:
            self._wrapped.add(inner)
            self._called.discard(inner)

        def ended(*_: Any) -> None:
            self._wrapped.discard(inner)
            if inner in self._called:
                self._after(inner, (), {})

        for register, hook in ((wrapper.register_step_pre_hook, begins), (wrapper.register_step_post_hook, ended)):
            self._hooks.add(register(torch.compiler.disable(self._guarded("following a wrapper", hook))))

    def _wait_for_ours(self) -> Removable:
        """A hook of all optimizers. It knows us weakly, or torch would keep the model alive."""
        adopt_if_ours = weakref.WeakMethod(self._adopt_if_ours)

        def look_at(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            if (living := adopt_if_ours()) is not None:
                living(optimizer)

        handle: Removable = register_optimizer_step_pre_hook(
            torch.compiler.disable(self._guarded("finding the optimizer", look_at))
        )
        weakref.finalize(self, handle.remove).atexit = False
        return handle

    def _adopt_if_ours(self, optimizer: Optimizer) -> None:
        """Called ahead of the optimizer's own hooks: what is adopted here is told of this step already."""
        if not self.optimizers:
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if any(id(p) in stepped for chunk in self._chunks for p in chunk.parameters()):
                self._adopt(optimizer)

    def remove(self) -> None:
        self._hooks.remove()
        SCALER_PATCH.remove(self)

    def call_begins(self, _: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._guarded("reading the loss scale", self._scaler_begins)(*args, **kwargs)

    def call_ended(self, _: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del result
        self._guarded("ending a skipped step", self._scaler_ended)(*args, **kwargs)

    def _scaler_begins(self, scaler: GradScaler, optimizer: Any, *_: Any, **__: Any) -> None:
        given = optimizers_in(optimizer)
        for one in given:
            self._adopt_if_ours(one)
        self._called.clear()
        for one in self._ours(given):
            if scaler.is_enabled() and scaler._scale is not None:
                self._listener.loss_scale(one, scaler._scale, self._scalers.setdefault(scaler, len(self._scalers)))

    def _scaler_ended(self, scaler: GradScaler, optimizer: Any, *_: Any, **__: Any) -> None:
        for one in self._ours(optimizers_in(optimizer)) if scaler.is_enabled() else ():
            if one not in self._called:
                self._guarded("reading before the step", self._listener.before_step)(one)
                self._guarded("reading gradients", self._listener.gradients_ready)(one)
                self._listener.step_skipped(one)

    def _ours(self, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
        return [one for one in optimizers if any(one is ours for ours in self.optimizers)]

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        self._called.add(optimizer)
        if _within_a_step_of(optimizer) or self._is_captured(optimizer):
            return None
        if (found_inf := _found_inf(optimizer)) is not None:
            still_scaled = getattr(optimizer, "grad_scale", None) is not None
            self._guarded("reading what the scaler found", self._listener.scales_itself)(optimizer, found_inf, still_scaled)
        self._guarded("reading before the step", self._listener.before_step)(optimizer)
        ready = partial(self._guarded("reading gradients", self._listener.gradients_ready), optimizer)
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": partial(self._evaluate, kwargs["closure"], ready)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], partial(self._evaluate, args[1], ready), *args[2:]), kwargs
        ready()
        return None

    def _evaluate(self, closure: Callable[[], Any], ready: Callable[[], None]) -> Any:
        """Call a closure, and say when its backward is done."""
        self.evaluating = True
        try:
            result = closure()
        finally:
            self.evaluating = False
        ready()
        return result

    def _is_captured(self, optimizer: Optimizer) -> bool:
        """Whether this is no step, but a capture of one. To seal the table in it would have every replay seal it there."""
        devices = (p.device for group in optimizer.param_groups for p in group["params"])
        captured = capturing(next(devices, HOST))
        if captured:
            self._failures.warn("captured steps", CAPTURED)
        return captured

    def _after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer in self._wrapped:
            return
        if _within_a_step_of(optimizer) or self._is_captured(optimizer):
            return
        if _skipped_itself(optimizer):
            self._listener.step_skipped(optimizer)
        else:
            self._listener.after_step(optimizer)


def _within_a_step_of(optimizer: Optimizer) -> bool:
    """Whether a hook is called for a step inside a step: of a class whose ``step`` calls that of its base, torch runs the
    hooks for both. The stack knows, also after a step that raised.
    """
    frame: FrameType | None = sys._getframe(1)
    found = 0
    while frame is not None and found < 2:
        if frame.f_code is CALLS_HOOKS and frame.f_locals.get("self") is optimizer:
            found += 1
        frame = frame.f_back
    return found == 2


def _found_inf(optimizer: Optimizer) -> Tensor | None:
    """What a GradScaler hands to an optimizer that does the scaler's work itself, for the time of its step."""
    found = getattr(optimizer, "found_inf", None)
    return found if isinstance(found, Tensor) else None


def _skipped_itself(optimizer: Optimizer) -> bool:
    """Whether an optimizer has just skipped inside its step, where that can be known without waiting for a device."""
    found = _found_inf(optimizer)
    return found is not None and found.device.type == "cpu" and bool(found.item())
