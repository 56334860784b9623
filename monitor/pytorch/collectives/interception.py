"""Sees every communication operator, each once, where all of them pass.

What Python issues, in torch and outside of it, passes a method of ``ProcessGroup``. What C++ issues (the reducer of
DistributedDataParallel), and functional collectives, pass torch's dispatcher: below autograd and above every backend. There the
key is ``BackendSelect``, which every call passes whatever its device. At the autograd keys we would miss what is issued below
autograd (the dispatch of DTensor, ``torch.inference_mode``), and would displace the derivatives that torch has registered there
for functional collectives. Modes and tracers stand above, so that no compiler meets us.

A kernel in Python costs a call three times what a method does: its arguments are turned into Python's objects and back. So the
kernels of ``c10d`` stand only as long as C++ may issue something: until training has gone through some steps without, and from
the making of a DistributedDataParallel on, or the first call of another operator that issues some.

A call that is on its way through the dispatcher when a kernel is taken away ends in an internal error of torch's, whoever made
it: torch picks the key before it looks the kernel up. So kernels that calls do pass stay when nobody listens any more, and
hand every call on; and those of ``c10d``, which the calls of other threads' methods pass, are taken away only while no thread
is in such a call, and none begins one.
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
"""Steps without a call from C++ after which none is expected."""

MOST_SECONDS: Final = 1.0
"""That anybody waits for kernels to be taken away, which takes a millisecond. In a forked child nobody would end the wait."""

Function = Callable[..., Any]


class CollectiveListener:
    """Whoever wants to know of communication. Must not raise.

    Attributes:
        hears_below: Whether it wants to know what C++ issues. Without such a listener calls of Python's pass no kernel of ours.
    """

    hears_below: ClassVar[bool] = True

    def call_begins(self, _operator: Operator, _args: Sequence[Any]) -> bool:
        """An operator is about to be called.

        Returns:
            Whether to tell of its result.
        """
        return False

    def call_issued(self, operator: Operator, args: Sequence[Any], result: Any) -> None:
        """It has returned."""

    def tensor_waited_for(self, tensor: Tensor) -> None:
        """The functional collective that gave ``tensor`` has completed for the current stream."""


class Interception(CallListener):
    """What stands in the way of calls, and who is told by it."""

    def __init__(self) -> None:
        self._listeners: tuple[weakref.ref[CollectiveListener], ...] = ()
        self._replaced: dict[str, tuple[Any, Function]] = {}
        self._functional: list[torch.library.Library] = []
        self._below: list[torch.library.Library] = []
        self._issued_below = False
        self._functional_called = False
        self._reducers = False
        self._under_way: set[int] = set()  # threads in an operator, which may be made of others
        self._taking_away = False
        self._removal = threading.RLock()
        self._steps: weakref.WeakKeyDictionary[CollectiveListener, int] = weakref.WeakKeyDictionary()
        self._reducer_made = TorchCallPatch(nn.parallel.DistributedDataParallel, "__init__")

    @property
    def installed(self) -> bool:
        """Whether anything is in the way of calls, be it only to hand them on."""
        return bool(self._replaced or self._functional or self._below)

    def add(self, listener: CollectiveListener) -> None:
        """Tell ``listener`` of every call from now on, as long as it lives."""
        self._listeners = (*self._listeners, weakref.ref(listener, self._forget))
        if listener.hears_below:
            self._steps[listener] = 0
            self._watch_below()
        self._install()

    def remove(self, listener: CollectiveListener) -> None:
        """Tell it nothing more. Any number of times."""
        self._steps.pop(listener, None)
        for known in self._listeners:
            if known() is listener:
                self._forget(known)

    def training_begins(self, listener: CollectiveListener) -> None:
        """What C++ issues from now on is what it issues in training."""
        self._steps[listener] = 0
        self._issued_below = self._reducers

    def step_ends(self, listener: CollectiveListener) -> None:
        """A step of the training that ``listener`` follows has ended. The kernels of ``c10d`` go when nobody needs them."""
        if not self._below or self._issued_below:
            return
        self._steps[listener] = self._steps.get(listener, 0) + 1
        if min(self._steps.values()) >= QUIET_STEPS:
            self._take_away(self._below)

    def call_begins(self, _patch: patches.CallPatch, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> None:
        """A DistributedDataParallel is made, which communicates as soon as it is."""
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
            if vars(dist.ProcessGroup)[name] is ours:  # somebody may have patched it since
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
        """Of an operator that calls others from C++, from its first call on."""

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
        """A call of this thread's is under way. Kernels that are just being taken away are gone when it goes on."""
        self._under_way.add(get_ident())
        if self._taking_away and self._removal.acquire(timeout=MOST_SECONDS):
            self._removal.release()

    def _leave(self) -> None:
        self._under_way.discard(get_ident())

    def _take_away(self, libraries: list[torch.library.Library]) -> None:
        """Unless a call is under way, which may have picked a kernel of them already, or some are being taken away just now
        (garbage may be collected meanwhile): then they stay, for now.
        """
        if self._taking_away or not self._removal.acquire(timeout=MOST_SECONDS):
            return
        self._taking_away = True  # before the look: a call that begins later waits
        try:
            if not self._under_way:
                _destroy(libraries)
        finally:
            self._taking_away = False
            self._removal.release()

    def _begin(self, operator: Operator, args: Sequence[Any]) -> Sequence[CollectiveListener]:
        """Tells of the call, and returns who is to be told of its result."""
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
    """Put kernels of ours before those of the backends, for as long as the libraries that are returned are not destroyed."""
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
"""Of this process, which has one dispatcher."""
