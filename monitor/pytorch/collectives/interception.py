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
from functools import partial, wraps
from threading import get_ident
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DispatchKey, DispatchKeySet

from monitor.failures import Failures
from monitor.pytorch.collectives.operators import Method, Overload, TorchOperator, issuers, methods, operators, wait_operator
from monitor.pytorch.hooks import NO_BACKWARD, TorchCallPatch, untraced, when_backward_ends
from monitor.pytorch.silent_writes import NOT_WAITED_FOR, WAIT, WAIT_FOR_FUTURE
from monitor.recording import patches
from monitor.recording.patches import CallListener

KEY: Final = "BackendSelect"
_BELOW: Final = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)

QUIET_STEPS: Final = 2
"""Steps without a call from C++, after which none is expected."""

REMOVAL_SECONDS: Final = 1.0
"""Longest wait for the removal of kernels, which takes a millisecond. In a forked child the removing thread is gone."""

Function = Callable[..., Any]


class TorchCollectiveListener:
    """Receives communication calls. Must not raise.

    Attributes:
        wants_cpp_calls: Whether it wants calls from C++. Without such a listener, Python calls pass no kernel of the monitor.
    """

    wants_cpp_calls: ClassVar[bool] = True

    def call_begins(self, _operator: TorchOperator, _args: Sequence[Any]) -> bool:
        """An operator is about to be called.

        Returns:
            Whether to report the call's result.
        """
        return False

    def call_issued(self, operator: TorchOperator, args: Sequence[Any], result: Any) -> None:
        """The operator has returned."""

    def tensor_waited_for(self, tensor: Tensor) -> None:
        """The functional collective that gave ``tensor`` has completed for the current stream."""


class CollectiveInterception(CallListener):
    """Replaced methods and kernels that report calls to listeners."""

    def __init__(self) -> None:
        self._listeners: tuple[weakref.ref[TorchCollectiveListener], ...] = ()
        self._replaced: dict[str, tuple[Any, Function]] = {}
        self._functional_kernels: list[torch.library.Library] = []
        self._cpp_kernels: list[torch.library.Library] = []
        self._cpp_issues = False
        self._functional_called = False
        self._reducers = False
        self._active_threads: set[int] = set()  # threads in an operator, which may call other operators
        self._removing = False
        self._removal = threading.RLock()
        self._steps: weakref.WeakKeyDictionary[TorchCollectiveListener, int] = weakref.WeakKeyDictionary()
        self._reducer_made = TorchCallPatch(nn.parallel.DistributedDataParallel, "__init__")

    @property
    def installed(self) -> bool:
        """Whether any method or kernel is installed, even if it only forwards calls."""
        return bool(self._replaced or self._functional_kernels or self._cpp_kernels)

    def add(self, listener: TorchCollectiveListener) -> None:
        """Report every call to ``listener`` from now on, while it is alive."""
        self._listeners = (*self._listeners, weakref.ref(listener, self._forget))
        if listener.wants_cpp_calls:
            self._steps[listener] = 0
            self._install_cpp_kernels()
        self._install()

    def remove(self, listener: TorchCollectiveListener) -> None:
        """Stop reporting to ``listener``. Idempotent."""
        self._steps.pop(listener, None)
        for known in self._listeners:
            if known() is listener:
                self._forget(known)

    def training_begins(self, listener: TorchCollectiveListener) -> None:
        """Training begins: count steps without calls from C++ from now on."""
        self._steps[listener] = 0
        self._cpp_issues = self._reducers

    def step_ends(self, listener: TorchCollectiveListener) -> None:
        """A step of the training that ``listener`` follows has ended. Removes the ``c10d`` kernels when they are no longer
        needed.
        """
        if not self._cpp_kernels or self._cpp_issues:
            return
        self._steps[listener] = self._steps.get(listener, 0) + 1
        if min(self._steps.values()) >= QUIET_STEPS:
            self._remove_kernels(self._cpp_kernels)

    def call_begins(self, _patch: patches.CallPatch, _args: Sequence[Any], _kwargs: Mapping[str, Any]) -> None:
        """A DistributedDataParallel is being made, which communicates at once."""
        self._reducers = self._cpp_issues = True
        if self._steps:
            self._install_cpp_kernels()

    def _forget(self, gone: weakref.ref[TorchCollectiveListener]) -> None:
        self._listeners = tuple(known for known in self._listeners if known is not gone and known() is not None)
        if not self._steps and not self._cpp_issues:
            self._remove_kernels(self._cpp_kernels)
        if self._listeners:
            return
        self._reducer_made.remove(self)
        if not self._functional_called:
            self._remove_kernels(self._functional_kernels)
        if not self._cpp_issues:
            self._reducers = False
        for name, (original, ours) in self._replaced.items():
            if vars(dist.ProcessGroup)[name] is ours:  # another library may have patched it since
                setattr(dist.ProcessGroup, name, original)
        self._replaced.clear()

    def _install(self) -> None:
        if self._replaced:
            return
        self._reducer_made.add(self)
        if not self._functional_kernels:
            self._install_functional_kernels()
        for one in methods():
            original = vars(dist.ProcessGroup)[one.method]
            self._replaced[one.method] = original, self._method(one, original)
            setattr(dist.ProcessGroup, one.method, self._replaced[one.method][1])

    def _install_functional_kernels(self) -> None:
        functional = [one for one in operators() if one.functional]
        self._functional_kernels = _implemented((one.namespace, one.schema_name, self._kernel(one)) for one in functional)
        self._functional_kernels += _implemented([("_c10d_functional", "wait_tensor", self._wait())])
        self._functional_kernels += _implemented((namespace, name, self._issuer(op)) for namespace, name, op in issuers())

    def _install_cpp_kernels(self) -> None:
        if not self._cpp_kernels:
            below = [one for one in operators() if not one.functional]
            self._cpp_kernels = _implemented((one.namespace, one.schema_name, self._kernel(one)) for one in below)

    def _kernel(self, operator: Overload) -> Function:
        redispatch, active_threads = operator.overload.redispatch, self._active_threads

        def kernel(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            if get_ident() in active_threads:
                return redispatch(keys & _BELOW, *args, **kwargs)
            if operator.functional:
                self._functional_called = True
            else:
                self._cpp_issues = True
            interested = self._begin(operator, args)
            self._enter()
            try:
                result = redispatch(keys & _BELOW, *args, **kwargs)
            finally:
                self._leave()
            for listener in interested:
                listener.call_issued(operator, args, result)
            return result

        return kernel

    def _issuer(self, overload: Any) -> Function:
        """A kernel of an operator that calls others from C++: installs the ``c10d`` kernels at its first call."""

        def kernel(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
            self._functional_called = self._cpp_issues = True
            if self._steps:
                self._install_cpp_kernels()
            return overload.redispatch(keys & _BELOW, *args, **kwargs)

        return kernel

    def _method(self, operator: Method, original: Function) -> Function:
        active_threads = self._active_threads

        def method(*args: Any, **kwargs: Any) -> Any:
            if get_ident() in active_threads:
                return original(*args, **kwargs)
            seen = operator.positional(args, kwargs) if kwargs else args
            interested = self._begin(operator, seen)
            self._enter()
            try:
                result = original(*args, **kwargs)
            finally:
                self._leave()
            for listener in interested:
                listener.call_issued(operator, seen, result)
            return result

        method = untraced(method)
        method.__name__, method.__qualname__ = operator.method, f"ProcessGroup.{operator.method}"
        method.__doc__ = original.__doc__
        return method

    def _enter(self) -> None:
        """This thread begins a call. Waits for a removal of kernels in progress."""
        self._active_threads.add(get_ident())
        if self._removing and self._removal.acquire(timeout=REMOVAL_SECONDS):
            self._removal.release()

    def _leave(self) -> None:
        self._active_threads.discard(get_ident())

    def _remove_kernels(self, libraries: list[torch.library.Library]) -> None:
        """Remove kernels, unless a call is under way, which may have selected one of them. Also skipped during another removal,
        since garbage collection may call this.
        """
        if self._removing or not self._removal.acquire(timeout=REMOVAL_SECONDS):
            return
        self._removing = True  # before the check: a call that begins later waits
        try:
            if not self._active_threads:
                _destroy(libraries)
        finally:
            self._removing = False
            self._removal.release()

    def _begin(self, operator: TorchOperator, args: Sequence[Any]) -> Sequence[TorchCollectiveListener]:
        """Report the call; return the listeners that want its result."""
        listeners = self._listeners
        if len(listeners) == 1:
            only = listeners[0]()
            return (only,) if only is not None and only.call_begins(operator, args) else ()
        return [one for known in listeners if (one := known()) is not None and one.call_begins(operator, args)]

    def _wait(self) -> Function:
        redispatch, active_threads = wait_operator().redispatch, self._active_threads

        def kernel(keys: DispatchKeySet, tensor: Tensor) -> Any:
            self._functional_called = True
            result = redispatch(keys & _BELOW, tensor)
            if get_ident() not in active_threads:
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


INTERCEPTION: Final = CollectiveInterception()
"""One for this process, which has one dispatcher."""

# --- Reads the outputs of a communication call when they are complete, without waiting for them.
#
# Python code waits for the call's ``Work`` or for a future of it. The outputs are read at that moment, on the thread
# and stream that wait. Code below Python (the reducer of DistributedDataParallel) waits without passing a patch, and
# Python code may wait for what follows a future. Then the future's callback reads, on a thread of the backend. The
# waiting code may be faster than that thread, so complete outputs are also read when backward and the step end. Their
# versions show whether they were changed by then.
#
# The program may change outputs without a wait: in a callback, which torch runs at once where the future is complete, even
# before the callback of the monitor, which waits for the backend's thread; or once ``is_completed`` or ``done`` returns True.
# So outputs are read right before a callback. Otherwise they are read at that moment if they are complete, and a later read
# trusts their versions alone.
#
# Several threads may wait for a call. Reading lets other threads run, so each of them waits until the outputs were read.

Call = Any
"""A listener's key for a call."""

Read = Callable[[Call, Sequence[Tensor], Sequence[int | None]], bool]
"""Called with a call, its complete outputs, and their versions if another thread may change them meanwhile. Returns whether it
read them. Does not raise.
"""

GET_FUTURE: Final = TorchCallPatch(dist.Work, "get_future")
BEGIN_GROUP: Final = TorchCallPatch(dist.ProcessGroup, "_start_coalescing")
END_GROUP: Final = TorchCallPatch(dist.ProcessGroup, "_end_coalescing")
PATCHES: Final = (WAIT, GET_FUTURE, WAIT_FOR_FUTURE, BEGIN_GROUP, END_GROUP, *NOT_WAITED_FOR)
"""One set for this process, since callers look the methods up in the class."""


class _CallbackPatch(TorchCallPatch):
    """A method through which the program passes a callback to a future."""

    def _patched(self, original: Any) -> Any:
        @wraps(original)
        def with_reading(future: Any, callback: Any, *args: Any, **kwargs: Any) -> Any:
            return original(future, self._reading_before(future, callback), *args, **kwargs)

        return super()._patched(with_reading)

    def _opaque(self, patched: Any, original: Any) -> Any:
        del original  # torch's method, which a compiler does not trace
        return untraced(patched)

    def _reading_before(self, future: Any, callback: Any) -> Any:
        """A callback that reads the outputs of the future's call first, if these are pending."""
        followers = [one for known in self._listeners if isinstance(one := known(), _Followers)]
        outputs = [found for one in followers for found in one.pending(future) or ()]
        if not outputs or not callable(callback):
            return callback

        def read_first(done: Any) -> Any:
            for one in outputs:
                one.done(done)
            return callback(done)

        return read_first


ADD_CALLBACK: Final = torch._C.Future.add_done_callback
IS_DONE: Final = torch._C.Future.done
FOLLOWED: Final = (
    _CallbackPatch(torch._C.Future, "add_done_callback"),
    _CallbackPatch(torch._C.Future, "then"),
    TorchCallPatch(torch._C, "_collect_all"),
)
"""Functions that make something follow a future, or each of several."""


class _ThreadCalls(threading.local):
    """Calls that this thread has issued.

    Attributes:
        latest: The ``Work`` that the thread waits for before anything else, the call, and its outputs.
        coalescing: Calls of each process group that are being coalesced.
    """

    latest: tuple[Any, Call, Sequence[Tensor]] | None = None

    def __init__(self) -> None:
        self.coalescing: dict[Any, list[tuple[Call, Sequence[Tensor]]]] = {}


class _Outputs:
    """The outputs of a pending call. The first thread that learns of their completion reads them, once.

    Attributes:
        followed: Whether the program made something follow their future, which may change them.
    """

    def __init__(self, call: Call, tensors: Sequence[Tensor], read: Read) -> None:
        self._call = call
        self._tensors: Sequence[Tensor] | None = tensors
        self._versions = [None if one.is_inference() else one._version for one in tensors]
        self._read = read
        self._lock = threading.RLock()  # a signal handler may wait for the same call
        self.followed = False

    def waited_for(self) -> None:
        """Called on the thread that waited, which has not changed them yet. It may change them afterwards."""
        with self._lock:
            self._once(self._versions if self.followed else ())
            self._tensors = None

    def done(self, future: Any) -> None:
        """Called on a thread of the backend."""
        if not _failed(future):
            self._once(self._versions)

    def _once(self, versions: Sequence[int | None]) -> None:
        with self._lock:
            # A backend that fills outputs by copying changes their versions itself. Then the waiting thread reads.
            if self._tensors is not None and self._read(self._call, self._tensors, versions):
                self._tensors = None


class Completion(CallListener):
    """Calls ``read`` for each pending call when its outputs are complete."""

    def __init__(self, read: Read, failures: Failures) -> None:
        self._read = read
        self._read_completed = failures.guarded("reading the outputs of communication operators", self.read_completed)
        self._pending: weakref.WeakKeyDictionary[Any, list[_Outputs]] = weakref.WeakKeyDictionary()
        self._by_future: dict[int, tuple[_Outputs, Any]] = {}
        self._backward = NO_BACKWARD
        self._thread = _ThreadCalls()
        self._guarded_notify = failures.guarded("following a communication operator", self._notify)
        self._followers = _Followers(
            failures.guarded("following a communication operator", self._followed),
            failures.guarded("following a communication operator", self._pending_of),
        )

    def listen(self) -> None:
        for patch in PATCHES:
            patch.add(self)
        for patch in FOLLOWED:
            patch.add(self._followers)

    def remove(self) -> None:
        """Stop listening. Idempotent."""
        for patch in PATCHES:
            patch.remove(self)
        for patch in FOLLOWED:
            patch.remove(self._followers)
        self._pending.clear()
        self._by_future.clear()
        self._thread = _ThreadCalls()

    def issued(self, group: Any, work: Any, call: Call, outputs: Sequence[Tensor], *, waited_for: bool) -> None:
        """A method of ``group`` has returned ``work``, which will fill ``outputs``.

        Args:
            work: None if the stream is ordered after the call, or if the call will be coalesced.
            waited_for: Whether this thread waits for ``work`` before it does anything else.
        """
        mine = self._thread
        if mine.coalescing and group in mine.coalescing:
            mine.coalescing[group].append((call, outputs))
        elif work is None:
            self._read(call, outputs, ())
        elif waited_for:
            mine.latest = work, call, outputs
        else:
            self._expect(work, call, outputs)

    def is_coalescing(self, group: Any) -> bool:
        """Whether this thread is coalescing calls of a group."""
        return group in self._thread.coalescing

    def _expect(self, work: Any, call: Call, outputs: Sequence[Tensor]) -> None:
        """Read the outputs when a thread waits for ``work``."""
        self._pending.setdefault(work, []).append(_Outputs(call, outputs, self._read))

    def issued_from_cpp(self, work: Any, call: Call, outputs: Sequence[Tensor]) -> None:
        """``work`` will fill ``outputs``, and C++ waits for it unseen."""
        self._read_when_done(work, _Outputs(call, outputs, self._read))
        if (backward := torch._C._current_graph_task_id()) not in (NO_BACKWARD, self._backward):
            self._backward = backward
            when_backward_ends(self._read_completed)

    def read_completed(self) -> None:
        """Read complete outputs whose callback has not run yet."""
        for outputs, future in list(self._by_future.values()):
            if IS_DONE(future):
                outputs.done(future)

    def _read_when_done(self, work: Any, outputs: _Outputs) -> None:
        try:
            future = work.get_future()
        except RuntimeError:
            return  # the backend has no futures for this operator
        self._follow(future, outputs)

    def _follow(self, future: Any, outputs: _Outputs) -> None:
        self._by_future[id(outputs)] = outputs, future
        ADD_CALLBACK(future, partial(self._done, outputs))  # past the patch, and at once if the future is complete

    def _done(self, outputs: _Outputs, future: Any) -> None:
        outputs.done(future)
        self._by_future.pop(id(outputs), None)  # after reading, so that the end of a step finds unread outputs

    def _followed(self, futures: Sequence[Any]) -> None:
        for future in futures:
            for outputs in self._pending_of(future):
                self._follow(future, outputs)

    def _pending_of(self, future: Any) -> Sequence[_Outputs]:
        """The outputs of the call that a future is of, which something is about to follow."""
        found = self._pending.get(future, ())
        for outputs in found:
            outputs.followed = True
        return found

    def call_ended(self, patch: patches.CallPatch, args: Sequence[Any], _kwargs: Mapping[str, Any], result: Any) -> None:
        mine = self._thread
        latest = mine.latest
        if latest is not None and patch is WAIT and latest[0] is args[0]:
            mine.latest = None
            self._read(latest[1], latest[2], ())
        elif args and (self._pending or mine.coalescing or patch is BEGIN_GROUP):
            self._guarded_notify(patch, args[0], result)

    def call_raised(self, patch: patches.CallPatch, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> None:
        if patch is WAIT:
            self._thread.latest = None
        elif patch is END_GROUP and args:
            self._thread.coalescing.pop(args[0], None)

    def _notify(self, patch: patches.CallPatch, of: Any, result: Any) -> None:
        if patch is BEGIN_GROUP:
            self._thread.coalescing[of] = []
        elif patch is END_GROUP:
            for call, outputs in self._thread.coalescing.pop(of, ()):
                self.issued(of, result, call, outputs, waited_for=False)
        elif (pending := self._pending.get(of)) is None:
            return
        elif patch is GET_FUTURE:
            for one in pending:
                self._follow(result, one)  # before the caller can add a callback, so the monitor's runs first
            self._pending[result] = pending
        else:
            self._usable(patch, of, result, pending)

    def _usable(self, patch: patches.CallPatch, of: Any, result: Any, pending: Sequence[_Outputs]) -> None:
        """The program may use outputs from now on, unless ``result`` says that they are not complete."""
        waited_for = patch not in NOT_WAITED_FOR
        if result is False and not waited_for:
            return
        for one in pending:
            if waited_for:
                one.waited_for()
            elif isinstance(of, torch._C.Future):
                self._follow(of, one)
            else:
                self._read_when_done(of, one)
        self._pending.pop(of, None)  # after reading, so that another thread that waits finds them until then


class _Followers(CallListener):
    """Learns of what is about to follow futures.

    Args:
        followed: Called with futures that others are collected from.
        pending: Called with a future that gets a callback; returns the outputs to read before it, or None.
    """

    def __init__(
        self, followed: Callable[[Sequence[Any]], object], pending: Callable[[Any], Sequence[_Outputs] | None]
    ) -> None:
        self._followed, self.pending = followed, pending

    def call_begins(self, patch: patches.CallPatch, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> None:
        if args and not isinstance(patch, _CallbackPatch):
            self._followed(args[0])


def _failed(future: Any) -> bool:
    try:
        future.value()
    except Exception:
        return True
    return False
