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
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from monitor.failures import Failures
from monitor.pytorch.clipping import NOT_CLIPPED, GradientClipping
from monitor.pytorch.hooks import TorchCallPatch
from monitor.recording import arguments
from monitor.recording.arguments import MAX_WRAPPERS, held_by
from monitor.recording.backend import HookSet, Removable, StepListener
from monitor.recording.patches import CallListener, CallPatch
from monitor.stats.torch.tensors import capturing

# --- Steps that a GradScaler skips. After Inf, ``GradScaler.step`` does not call the optimizer and no hook runs: only a patch
# sees the skip.

SCALER_PATCH: Final = TorchCallPatch(GradScaler, "step", ("self", "optimizer"))

# --- The torch optimizers inside the objects that frameworks hand to users.


def optimizers_in(given: Any) -> tuple[Optimizer, ...]:
    """The torch optimizers inside sequences, dictionaries, containers and wrappers, in order, each once.

    Raises:
        TypeError: An element is no optimizer, or there is none.
    """
    return arguments.optimizers_in(given, innermost, unwrapped)


def containers_in(given: Any) -> Iterator[Optimizer]:
    """The torch optimizers that hold other optimizers and step all of them."""
    for _ in range(MAX_WRAPPERS):
        if isinstance(given, Optimizer) and held_by(given) is not None:
            yield given
        given = getattr(given, "optimizer", None)


def innermost(optimizer: Any, called: str = "optimizer") -> Optimizer:
    """The torch optimizer inside any number of wrappers, which keep the wrapped one in ``optimizer``.

    Args:
        called: The argument's name in error messages.

    Raises:
        TypeError: There is none.
    """
    inner = unwrapped(optimizer)
    given = type(optimizer).__name__
    if isinstance(inner, Optimizer):
        if not hasattr(inner, "_optimizer_step_pre_hooks"):
            raise TypeError(f"{called} is a {given}, which calls no optimizer hooks: pass the optimizer that it wraps.")
        return inner
    raise TypeError(f"{called} is a {given}: expected a torch.optim.Optimizer, or a wrapper that keeps one in `.optimizer`.")


def unwrapped(optimizer: Any) -> Any:
    """The innermost object inside wrappers. Stops at a container of several optimizers."""
    inner = optimizer
    for _ in range(MAX_WRAPPERS):
        wrapped = None if held_by(inner) is not None else _wrapped(inner)
        if wrapped is None:
            break
        inner = wrapped
    return inner


WRAPPED_IN: Final = ("optimizer", "original_optimizer", "_base_optimizer")
"""Attributes in which wrappers keep an optimizer. The last two are those of Opacus, and of Lookahead in timm."""


def _wrapped(optimizer: Any) -> Any:
    """The wrapped optimizer in ``optimizer``. Optimizers that call no hooks of torch may keep it in ``optim``."""
    found = next((one for name in WRAPPED_IN if (one := getattr(optimizer, name, None)) is not None), None)
    if found is None and isinstance(optimizer, Optimizer) and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        found = getattr(optimizer, "optim", None)
    return found


def _calls_hooks_of_its_own(wrapper: Any, inner: Optimizer) -> bool:
    """Whether torch calls hooks of the wrapper itself around its step. Lightning's wrapper shares the hooks of the wrapped
    optimizer.
    """
    hooks = getattr(wrapper, "_optimizer_step_pre_hooks", None)
    is_hooked = isinstance(wrapper, Optimizer) and bool(getattr(type(wrapper).step, "hooked", False))
    return is_hooked and hooks is not None and hooks is not inner._optimizer_step_pre_hooks


def wrappers_in(given: Any) -> Iterator[tuple[Optimizer, Optimizer]]:
    """Optimizers that wrap another one and call hooks of their own, from outside in, each with the innermost optimizer.

    Such a wrapper may change weights after the wrapped optimizer's step, as Lookahead does.
    """
    held = held_by(given)
    for one in held if held is not None else ():
        yield from wrappers_in(one)
    inner = unwrapped(given)
    while held is None and given is not inner:
        if isinstance(inner, Optimizer) and _calls_hooks_of_its_own(given, inner):
            yield given, inner
            return
        given = _wrapped(given)


CALLS_HOOKS: Final = Optimizer.profile_hook_step(lambda: None).__code__
"""Code of the function that torch wraps around every ``step`` and that calls the hooks."""

CAPTURED: Final = (
    "optimizer.step() is being captured in a device graph. Replays of the graph call no hooks, so the monitor does not see "
    "these steps and records none of them. Keep optimizer.step() out of the capture."
)
HOST: Final = torch.device("cpu")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _HookOfAll:
    """A hook that torch calls for all optimizers. One that is removed while torch calls these hooks stays, and does nothing:
    torch must not find its dictionary of them changed.
    """

    def __init__(self, register: Callable[..., Removable], call: Callable[..., None]) -> None:
        self._call: Callable[..., None] | None = call
        self._handle = register(self)

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def remove(self) -> None:
        self._call = None
        if not _calls_hooks_of_all():
            self._handle.remove()


class OptimizerSteps(CallListener):
    """Reports the steps of optimizers to a listener.

    Attributes:
        optimizers: The optimizers that step once in each training step. If none was given: empty until an optimizer steps a
            parameter of the model.
        evaluating: Whether an optimizer is calling its closure. Forwards that begin now are then inside its step.
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
            containers: Optimizers whose step is the step of all optimizers.
            wrappers: Optimizers whose step includes the step of another one, by wrapper.
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
        self._wrappers = frozenset(wrappers)
        for wrapper, inner in wrappers.items():
            self._follow_wrapper(wrapper, inner)
        if not optimizers:
            self._at_every_step(register_optimizer_step_pre_hook, self._adopt_if_monitored, "finding the optimizer")
        self._at_every_step(register_optimizer_step_post_hook, self._is_other, "looking for a replaced optimizer")
        self._clipping = GradientClipping(listener, failures)
        self._hooks.add(self._clipping)
        SCALER_PATCH.add(self)
        _FOLLOWING.add(self)

    def _adopt(self, optimizer: Optimizer) -> None:
        self.optimizers = (*self.optimizers, optimizer)
        # A compiled step leaves these two hooks out of its graph and calls them eagerly.
        before, after = (
            torch.compiler.disable(self._guarded(where, hook))
            for where, hook in (("reading before the step", self._before), ("ending the step", self._after))
        )
        self._hooks.add(optimizer.register_step_pre_hook(before))
        self._hooks.add(optimizer.register_step_post_hook(after))

    def _follow(self, container: Optimizer) -> None:
        if not hasattr(container, "_optimizer_step_post_hooks"):
            return  # it looks like an optimizer of torch, but torch calls no hooks for it

        def ended(_container: Optimizer, _args: Any, _kwargs: Any) -> None:
            self._listener.all_stepped()

        hook = torch.compiler.disable(self._guarded("ending the step", ended))
        self._hooks.add(container.register_step_post_hook(hook))

    def _follow_wrapper(self, wrapper: Optimizer, inner: Optimizer) -> None:
        """Begin and end the step of ``inner`` with that of ``wrapper``, which may change weights before and after it."""

        def begins(*_: Any) -> None:
            self._wrapped.add(inner)
            self._called.discard(inner)
            if not self._is_captured(inner):
                self._listener.before_step(inner)

        def ended(*_: Any) -> None:
            self._wrapped.discard(inner)
            if inner in self._called:
                self._after(inner, (), {})

        for register, hook in ((wrapper.register_step_pre_hook, begins), (wrapper.register_step_post_hook, ended)):
            self._hooks.add(register(torch.compiler.disable(self._guarded("following a wrapper", hook))))

    def _at_every_step(self, register: Callable[..., Removable], method: Callable[[Optimizer], None], where: str) -> None:
        """Register a hook of all optimizers. It references this object weakly, or torch would keep the model alive."""
        weak = weakref.WeakMethod(method)

        def hook(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
            if (living := weak()) is not None:
                living(optimizer)

        if not _calls_hooks_of_all():
            handle = _HookOfAll(register, torch.compiler.disable(self._guarded(where, hook)))
            weakref.finalize(self, handle.remove).atexit = False
            self._hooks.add(handle)

    def _is_other(self, optimizer: Optimizer) -> None:
        """Report an optimizer that is none of the known ones, and a known one of which it has stepped all parameters.

        One that a known one calls in its step, as ``ZeroRedundancyOptimizer`` does, is a part of it.
        """
        if optimizer in self._called or optimizer in self._wrappers:  # their own hooks report them
            return
        if not self._monitored([frame.f_locals.get("self") for frame in _steps_within()]):
            stepped = _ids(optimizer)
            old = next((one for one in self.optimizers if stepped.issuperset(_ids(one) or {0})), None)
            self._listener.others_stepped(old, optimizer, stepped, elsewhere=self._is_followed_elsewhere(optimizer))

    def _is_followed_elsewhere(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer was passed to a monitor with other models."""
        own = set(map(id, self._chunks))
        others = (one for one in list(_FOLLOWING) if own.isdisjoint(map(id, one._chunks)))
        return any(optimizer is known for one in others for known in one.optimizers)

    def _adopt_if_monitored(self, optimizer: Optimizer) -> None:
        """Called before the optimizer's own hooks: an optimizer adopted here reports this step already."""
        if not self.optimizers:
            stepped = _ids(optimizer)
            if any(id(p) in stepped for chunk in self._chunks for p in chunk.parameters()):
                self._adopt(optimizer)

    def remove(self) -> None:
        self._hooks.remove()
        SCALER_PATCH.remove(self)
        _FOLLOWING.discard(self)

    def call_begins(self, _: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._guarded("reading the loss scale", self._scaler_begins)(*args, **kwargs)

    def call_ended(self, _: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del result
        self._guarded("ending a skipped step", self._scaler_ended)(*args, **kwargs)

    def _scaler_begins(self, scaler: GradScaler, optimizer: Any, *_: Any, **__: Any) -> None:
        given = optimizers_in(optimizer)
        for one in given:
            self._adopt_if_monitored(one)
        self._called.difference_update(given)  # another thread may be in the step of another one
        for one in self._monitored(given):
            if scaler.is_enabled() and scaler._scale is not None:
                index, late = self._scalers.setdefault(scaler, len(self._scalers)), not _has_unscaled(scaler, optimizer)
                self._listener.loss_scale(one, scaler._scale, index, late=late)
                if late:
                    self._clipping.scaled_step_begins(partial(_ids, one), scaler._scale)

    def _scaler_ended(self, scaler: GradScaler, optimizer: Any, *_: Any, **__: Any) -> None:
        for one in self._monitored(optimizers_in(optimizer)) if scaler.is_enabled() else ():
            if one not in self._called:
                self._guarded("reading before the step", self._listener.before_step)(one)
                self._guarded("reading gradients", self._listener.gradients_ready)(one)
                self._listener.after_step(one, skipped=True)

    def _monitored(self, optimizers: Sequence[Any]) -> list[Optimizer]:
        return [one for one in optimizers if any(one is known for known in self.optimizers)]

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        self._called.add(optimizer)
        if _within_a_step_of(optimizer) or self._is_captured(optimizer):
            return None
        if (found_inf := _found_inf(optimizer)) is not None:
            still_scaled = getattr(optimizer, "grad_scale", None) is not None
            self._guarded("reading what the scaler found", self._listener.scales_itself)(optimizer, found_inf, still_scaled)
        if optimizer not in self._wrapped:
            self._guarded("reading before the step", self._listener.before_step)(optimizer)
        ready = partial(self._guarded("reading gradients", self._listener.gradients_ready), optimizer)
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": partial(self._evaluate, kwargs["closure"], ready)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], partial(self._evaluate, args[1], ready), *args[2:]), kwargs
        ready()
        return None

    def _evaluate(self, closure: Callable[[], Any], ready: Callable[[], None]) -> Any:
        """Call a closure, then report that gradients are ready."""
        self.evaluating = True
        try:
            result = closure()
        finally:
            self.evaluating = False
        ready()
        return result

    def _is_captured(self, optimizer: Optimizer) -> bool:
        """Whether this step is only captured, not run. Sealing the table in a capture would seal it again in every replay."""
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
        self._clipping.latest = NOT_CLIPPED
        self._listener.after_step(optimizer, skipped=_skipped_itself(optimizer))


_FOLLOWING: Final = weakref.WeakSet[OptimizerSteps]()
"""All objects of this process. A step of an optimizer that one of them follows replaces no optimizer of another model."""


def _has_unscaled(scaler: GradScaler, optimizer: Any) -> bool:
    """Whether the loop has called ``unscale_`` for this step. Otherwise ``step`` divides the gradients, after any clipping."""
    return bool(scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED)


def _ids(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _within_a_step_of(optimizer: Optimizer) -> bool:
    """Whether a hook is called for a step inside a step. If a class's ``step`` calls its base's, torch runs the hooks for both.
    The stack shows the nesting, also after a step that raised.
    """
    return sum(frame.f_locals.get("self") is optimizer for frame in _steps_within()) >= 2


def _calls_hooks_of_all() -> bool:
    """Whether torch may be calling, on this thread, the hooks of all optimizers."""
    of_all = [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]
    called = [frame.f_locals.get("post_hook", frame.f_locals.get("pre_hook")) for frame in _steps_within()]
    return any(hook is one for hook in called for one in of_all)


def _steps_within() -> Iterator[FrameType]:
    """The steps in progress on this thread, with the hooks that they call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is CALLS_HOOKS:
            yield frame
        frame = frame.f_back


def _found_inf(optimizer: Optimizer) -> Tensor | None:
    """The tensor that a GradScaler sets on a fused optimizer, which unscales by itself, during its step."""
    found = getattr(optimizer, "found_inf", None)
    return found if isinstance(found, Tensor) else None


def _skipped_itself(optimizer: Optimizer) -> bool:
    """Whether an optimizer has just skipped inside its step, if that can be read without waiting for a device."""
    found = _found_inf(optimizer)
    return found is not None and found.device.type == "cpu" and bool(found.item())
