"""Intercepts every communication operator exactly once.

Calls from Python pass a method of ``ProcessGroup``, which is replaced. Calls from C++ (the reducer of DistributedDataParallel)
and functional collectives pass torch's dispatcher. There the monitor registers kernels at the key ``BackendSelect``: below
autograd, above every backend, and passed by calls on any device. Kernels at the autograd keys would miss calls issued below
autograd (the dispatch of DTensor, ``torch.inference_mode``). They would also displace the derivatives that torch has registered
for functional collectives. Modes and tracers are above the key, so no compiler sees the kernels.

A kernel in Python costs three times as much as a method, since arguments are converted to Python objects and back. So the
``c10d`` kernels exist only while C++ may issue calls. They are installed at the start, when a DistributedDataParallel is made,
and at the first call of another operator that issues some. They are removed after some training steps without such calls.

Removing a kernel while a call passes the dispatcher causes an internal error of torch in that call: torch selects the key
before it looks up the kernel. So kernels that calls do pass remain when the last listener has gone, and forward every call. The
``c10d`` kernels, which calls of other threads' methods pass, are removed only while no thread is in such a call or begins one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DispatchKey, DispatchKeySet

from monitor.pytorch.collectives.operators import Method, Operator, Overload, issuers, methods, operators, wait_operator
from monitor.pytorch.hooks import TorchCallPatch, untraced
from monitor.recording import patches
from monitor.recording.patches import CallListener

KEY: Final = "BackendSelect"
_BELOW: Final = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)

QUIET_STEPS: Final = 2
"""Steps without a call from C++, after which none is expected."""

MOST_SECONDS: Final = 1.0
"""Longest wait for the removal of kernels, which takes a millisecond. In a forked child the removing thread is gone."""

Function = Callable[..., Any]


class CollectiveListener:
    """Receives communication calls. Must not raise.

    Attributes:
        hears_below: Whether it wants calls from C++. Without such a listener, calls from Python pass no kernel of the monitor.
    """

    hears_below: ClassVar[bool] = True

    def call_begins(self, _operator: Operator, _args: Sequence[Any]) -> bool:
        """An operator is about to be called.

        Returns:
            Whether to report the call's result.
        """
        return False

    def call_issued(self, operator: Operator, args: Sequence[Any], result: Any) -> None:
        """It has returned."""

    def tensor_waited_for(self, tensor: Tensor) -> None:
        """The functional collective that gave ``tensor`` has completed for the current stream."""


class Interception(CallListener):
    """Replaced methods and kernels that report calls to listeners."""

    def __init__(self) -> None:
        self._listeners: tuple[weakref.ref[CollectiveListener], ...] = ()
        self._replaced: dict[str, tuple[Any, Function]] = {}
        self._functional: list[torch.library.Library] = []
        self._below: list[torch.library.Library] = []
        self._issued_below = False
        self._functional_called = False
        self._reducers = False
        self._under_way: set[int] = set()  # threads in an operator, which may call other operators
        self._taking_away = False
        self._removal = threading.RLock()
        self._steps: weakref.WeakKeyDictionary[CollectiveListener, int] = weakref.WeakKeyDictionary()
        self._reducer_made = TorchCallPatch(nn.parallel.DistributedDataParallel, "__init__")

    @property
    def installed(self) -> bool:
        """Whether any method or kernel is installed, even if it only forwards calls."""
        return bool(self._replaced or self._functional or self._below)

    def add(self, listener: CollectiveListener) -> None:
        """Report every call to ``listener`` from now on, while it is alive."""
        self._listeners = (*self._listeners, weakref.ref(listener, self._forget))
        if listener.hears_below:
            self._steps[listener] = 0
            self._watch_below()
        self._install()

    def remove(self, listener: CollectiveListener) -> None:
        """Stop reporting to ``listener``. Idempotent."""
        self._steps.pop(listener, None)
        for known in self._listeners:
            if known() is listener:
                self._forget(known)

    def training_begins(self, listener: CollectiveListener) -> None:
        """Training begins: count steps without calls from C++ from now on."""
        self._steps[listener] = 0
        self._issued_below = self._reducers

    def step_ends(self, listener: CollectiveListener) -> None:
        """A step of the training that ``listener`` follows has ended. Removes the ``c10d`` kernels when they are no longer
        needed.
        """
        if not self._below or self._issued_below:
            return
        self._steps[listener] = self._steps.get(listener, 0) + 1
        if min(self._steps.values()) >= QUIET_STEPS:
            self._take_away(self._below)

    def call_begins(self, _patch: patches.CallPatch, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> None:
        """A DistributedDataParallel is being made, which communicates at once."""
        self._reducers = self._issued_below = True
        if self._steps:
            self._watch_below()

    def _forget(self, gone: weakref.ref[CollectiveListener]) -> None:
        self._listeners = tuple(known for known in self._listeners if known is not gone and known() is not None)
        if not self._steps and not self._issued_below:
            self._take_away(self._below)
        if self._listeners:
            return
        self._reducer_made.remove(self)
        if not self._functional_called:
            self._take_away(self._functional)
        if not self._issued_below:
            self._reducers = False
        for name, (original, ours) in self._replaced.items():
            if vars(dist.ProcessGroup)[name] is ours:  # another library may have patched it since
                setattr(dist.ProcessGroup, name, original)
        self._replaced.clear()

    def _install(self) -> None:
        if self._replaced:
            return
        self._reducer_made.add(self)
        if not self._functional:
            self._watch_functional()
        for one in methods():
            original = vars(dist.ProcessGroup)[one.method]
            self._replaced[one.method] = original, self._method(one, original)
            setattr(dist.ProcessGroup, one.method, self._replaced[one.method][1])

    def _watch_functional(self) -> None:
        functional = [one for one in operators() if one.functional]
        self._functional = _implemented((one.namespace, one.schema_name, self._kernel(one)) for one in functional)
        self._functional += _implemented([("_c10d_functional", "wait_tensor", self._wait())])
        self._functional += _implemented((namespace, name, self._issuer(op)) for namespace, name, op in issuers())

    def _watch_below(self) -> None:
        if not self._below:
            below = [one for one in operators() if not one.functional]
            self._below = _implemented((one.namespace, one.schema_name, self._kernel(one)) for one in below)

    def _kernel(self, operator: Overload) -> Function:
        redispatch, under_way = operator.overload.redispatch, self._under_way

        def kernel(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            if get_ident() in under_way:
                return redispatch(keys & _BELOW, *args, **kwargs)
            if operator.functional:
                self._functional_called = True
            else:
                self._issued_below = True
            told = self._begin(operator, args)
            self._enter()
            try:
                result = redispatch(keys & _BELOW, *args, **kwargs)
            finally:
                self._leave()
            for listener in told:
                listener.call_issued(operator, args, result)
            return result

        return kernel

    def _issuer(self, overload: Any) -> Function:
        """A kernel of an operator that calls others from C++: installs the ``c10d`` kernels at its first call."""

        def kernel(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            self._functional_called = self._issued_below = True
            if self._steps:
                self._watch_below()
            return overload.redispatch(keys & _BELOW, *args, **kwargs)

        return kernel

    def _method(self, operator: Method, original: Function) -> Function:
        under_way = self._under_way

        def method(*args: Any, **kwargs: Any) -> Any:
            if get_ident() in under_way:
                return original(*args, **kwargs)
            seen = operator.positional(args, kwargs) if kwargs else args
            told = self._begin(operator, seen)
            self._enter()
            try:
                result = original(*args, **kwargs)
            finally:
                self._leave()
            for listener in told:
                listener.call_issued(operator, seen, result)
            return result

        method = untraced(method)
        method.__name__, method.__qualname__ = operator.method, f"ProcessGroup.{operator.method}"
        method.__doc__ = original.__doc__
        return method

    def _enter(self) -> None:
        """This thread begins a call. Waits for a removal of kernels in progress."""
        self._under_way.add(get_ident())
        if self._taking_away and self._removal.acquire(timeout=MOST_SECONDS):
            self._removal.release()

    def _leave(self) -> None:
        self._under_way.discard(get_ident())

    def _take_away(self, libraries: list[torch.library.Library]) -> None:
        """Remove kernels, unless a call is under way, which may have selected one of them. Also skipped during another removal,
        since garbage collection may call this.
        """
        if self._taking_away or not self._removal.acquire(timeout=MOST_SECONDS):
            return
        self._taking_away = True  # before the check: a call that begins later waits
        try:
            if not self._under_way:
                _destroy(libraries)
        finally:
            self._taking_away = False
            self._removal.release()

    def _begin(self, operator: Operator, args: Sequence[Any]) -> Sequence[CollectiveListener]:
        """Report the call; return the listeners that want its result."""
        listeners = self._listeners
        if len(listeners) == 1:
            only = listeners[0]()
            return (only,) if only is not None and only.call_begins(operator, args) else ()
        return [one for known in listeners if (one := known()) is not None and one.call_begins(operator, args)]

    def _wait(self) -> Function:
        redispatch, under_way = wait_operator().redispatch, self._under_way

        def kernel(keys: DispatchKeySet, tensor: Tensor) -> Any:
            self._functional_called = True
            result = redispatch(keys & _BELOW, tensor)
            if get_ident() not in under_way:
                for known in self._listeners:
                    listener = known()
                    if listener is not None:
                        listener.tensor_waited_for(tensor)
            return result

        return kernel


def _implemented(kernels: Iterable[tuple[str, str, Function]]) -> list[torch.library.Library]:
    """Register kernels above those of the backends. They exist until the returned libraries are destroyed."""
    libraries: dict[str, torch.library.Library] = {}
    for namespace, name, kernel in kernels:
        if namespace not in libraries:
            libraries[namespace] = torch.library.Library(namespace, "IMPL")
        libraries[namespace].impl(name, untraced(kernel), KEY, with_keyset=True)
    return [*libraries.values()]


def _destroy(libraries: list[torch.library.Library]) -> None:
    while libraries:
        libraries.pop()._destroy()


INTERCEPTION: Final = Interception()
"""One for this process, which has one dispatcher."""
