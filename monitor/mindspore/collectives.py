"""Records communication for a ``TrainerMon``: listens to every call, and writes rows for its tensors."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, Final, Literal

from mindspore import Tensor
from mindspore.communication import get_group_rank_from_world_rank, get_group_size, get_process_group_ranks, get_rank
from mindspore.ops import primitive as PRIMITIVES
from mindspore.ops.auto_generate import gen_ops_prim as KERNELS

from monitor.config.model import CcDistribution
from monitor.failures import EarlierFailure, Failures
from monitor.mindspore.hooks import jit_context
from monitor.mindspore.process_group import initialized, is_settled
from monitor.mindspore.tensor_reader import HOST, MindSporeTensorReader, computing, dtype_name
from monitor.recording.collectives import LOCK_SECONDS, CallRows, CollectiveCall, Communication, Labels, NamedGroup, Operator
from monitor.recording.recorder import NoLateRows, Recorder
from monitor.stats.mindspore.tensors import has_data, on_host
from monitor.stats.table import RowSlot

# --- The communication operators of MindSpore: their names and arguments, and the interception of their calls.
#
# There are two families. Functions of ``mint.distributed``, ``ops.communication`` and ``communication.comm_func`` end in
# *kernels*: C++ functions of one module (``pyboost_dist_comm_all_reduce``). ``ops.AllReduce`` and the like are *primitives*,
# which one function runs by name.

Rooted = Literal["inputs", "outputs", ""]

SENT: Final = 0
RECEIVED: Final = 1
"""The codes of ``isend`` and ``irecv`` in ``batch_isend_irecv``."""


@dataclass(frozen=True, slots=True)
class _OperatorSpec:
    """An operator and the names of its arguments: inputs, outputs and the root's rank.

    Attributes:
        outputs: Empty if the outputs are the result.
        root: Empty if there is no root.
        rooted: The side that only the root has.
    """

    name: str
    inputs: str = ""
    outputs: str = ""
    rooted: Rooted = ""
    root: str = ""


_KERNELS: Final[Mapping[str, _OperatorSpec]] = {
    "dist_comm_all_reduce": _OperatorSpec("all_reduce", "input", "input"),
    "dist_comm_broadcast": _OperatorSpec("broadcast", "input", "input", "inputs", "src"),
    "dist_comm_reduce": _OperatorSpec("reduce", "input", "input", "outputs", "dst"),
    "dist_comm_all_gather": _OperatorSpec("all_gather", "input", "tensor_list"),
    "dist_comm_all_gather_into_tensor": _OperatorSpec("all_gather_into_tensor", "input", "other"),
    "dist_comm_all_gather_into_tensor_uneven": _OperatorSpec("all_gather_into_tensor_uneven", "input", "other"),
    "dist_comm_reduce_scatter": _OperatorSpec("reduce_scatter", "input_list", "other"),
    "dist_comm_reduce_scatter_tensor": _OperatorSpec("reduce_scatter_tensor", "input", "other"),
    "dist_comm_reduce_scatter_tensor_uneven": _OperatorSpec("reduce_scatter_tensor_uneven", "input", "other"),
    "dist_comm_all_to_all_v": _OperatorSpec("all_to_all", "input", "other"),
    "dist_comm_all_to_all_v_single": _OperatorSpec("all_to_all_single", "input", "other"),
    "dist_comm_all_to_all_v_c": _OperatorSpec("all_to_all_v_c", "input", "other"),
    "dist_comm_gather": _OperatorSpec("gather", "input", "gather_list", "outputs", "dst"),
    "dist_comm_gather_into_tensor": _OperatorSpec("gather_into_tensor", "input", "other", "outputs", "dst"),
    "dist_comm_scatter": _OperatorSpec("scatter", "scatter_list", "other", "inputs", "src"),
    "dist_comm_scatter_tensor": _OperatorSpec("scatter_tensor", "input", "other", "inputs", "src"),
    "dist_comm_isend": _OperatorSpec("send", "input"),
    "dist_comm_irecv": _OperatorSpec("recv", "", "input"),
    "dist_comm_batch_isend_irecv": _OperatorSpec("batch_isend_irecv", "op_types", "op_types"),
    "dist_comm_barrier": _OperatorSpec("barrier"),
    "inner_comm_all_reduce": _OperatorSpec("all_reduce", "input"),
    "inner_comm_all_gather": _OperatorSpec("all_gather_into_tensor", "input"),
    "inner_comm_reduce_scatter": _OperatorSpec("reduce_scatter_tensor", "input"),
    "inner_comm_all_to_all_v": _OperatorSpec("all_to_all", "input"),
    "inner_comm_isend": _OperatorSpec("send", "input"),
    "inner_comm_irecv": _OperatorSpec("recv"),
}

_NO_INPUTS: Final = frozenset({"recv", "barrier"})
_NO_OUTPUTS: Final = frozenset({"send", "barrier"})

_PRIMITIVES: Final[Mapping[str, _OperatorSpec]] = {
    "AllReduce": _OperatorSpec("all_reduce"),
    "Reduce": _OperatorSpec("reduce", rooted="outputs", root="dest_rank"),
    "Broadcast": _OperatorSpec("broadcast", rooted="inputs", root="root_rank"),
    "AllGather": _OperatorSpec("all_gather"),
    "AllGatherV": _OperatorSpec("all_gather_v"),
    "ReduceScatter": _OperatorSpec("reduce_scatter"),
    "ReduceScatterV": _OperatorSpec("reduce_scatter_v"),
    "AlltoAll": _OperatorSpec("all_to_all"),
    "AlltoAllV": _OperatorSpec("all_to_all_v"),
    "AlltoAllVC": _OperatorSpec("all_to_all_v_c"),
    "CollectiveScatter": _OperatorSpec("scatter", rooted="inputs", root="src_rank"),
    "CollectiveGather": _OperatorSpec("gather", rooted="outputs", root="dest_rank"),
    "Send": _OperatorSpec("send"),
    "Receive": _OperatorSpec("recv"),
    "BatchISendIRecv": _OperatorSpec("batch_isend_irecv"),
    "Barrier": _OperatorSpec("barrier"),
}


@dataclass(frozen=True, slots=True)
class MindSporeOperator:
    """An operator with one way to call it.

    Attributes:
        name: Its usual name, such as ``all_reduce``.
        rooted: The side that only the root has.
    """

    name: str
    rooted: Rooted

    functional: bool
    """Whether the outputs are the result, and not among the arguments."""


@dataclass(frozen=True, slots=True)
class Kernel(MindSporeOperator):
    """An operator in C++.

    Attributes:
        function: The name of its function in ``gen_ops_prim``.
        places: The position of each argument, by name.
        inputs, outputs: Positions of the arguments that hold them; None if there are none, or if they are the result.
        rooted_at: Position of the root's rank.
    """

    function: str
    places: Mapping[str, int]
    inputs: int | None
    outputs: int | None
    rooted_at: int | None

    def taken(self, args: Sequence[Any]) -> list[Tensor]:
        return _tensors(args[self.inputs]) if self.inputs is not None else []

    def given(self, args: Sequence[Any], result: Any) -> list[Tensor]:
        if self.outputs is not None:
            return _tensors(args[self.outputs])
        return _tensors(result[0] if isinstance(result, tuple) else result) if self.functional else []

    def root(self, args: Sequence[Any]) -> int:
        return int(args[self.rooted_at])  # type: ignore[index]

    def group_of(self, args: Sequence[Any]) -> Any:
        return args[self.places["group"]]

    def is_awaited(self, args: Sequence[Any]) -> bool:
        """Whether the outputs are ready only after a wait for the handle."""
        place = self.places.get("async_op")
        return place is None or bool(args[place])


class ReducedToOneRank(Kernel):
    """``reduce`` passes the root's rank in the job. All other rooted functions convert it to the rank in the group."""

    def root(self, args: Sequence[Any]) -> int:
        return int(get_group_rank_from_world_rank(args[self.places["dst"]], self.group_of(args)))


class MindSporeBatchedSendsAndReceives(Kernel):
    """``batch_isend_irecv``: sent tensors are inputs, received tensors are outputs."""

    def taken(self, args: Sequence[Any]) -> list[Tensor]:
        return self._of(SENT, args)

    def given(self, args: Sequence[Any], _result: Any) -> list[Tensor]:
        return self._of(RECEIVED, args)

    def _of(self, kind: int, args: Sequence[Any]) -> list[Tensor]:
        tensors, kinds = args[self.places["input"]], args[self.places["op_types"]]
        return [tensor for tensor, what in zip(tensors, kinds, strict=True) if what == kind]


@dataclass(frozen=True, slots=True)
class Primitive(MindSporeOperator):
    """An operator object. The object itself is the first argument; the others hold the inputs.

    Attributes:
        root_attribute: The attribute that holds the root's rank.
    """

    root_attribute: str

    def taken(self, args: Sequence[Any]) -> list[Tensor]:
        return [] if self.name in _NO_INPUTS else _tensors(args[1:])

    def given(self, _args: Sequence[Any], result: Any) -> list[Tensor]:
        return [] if self.name in _NO_OUTPUTS else _tensors(result)

    def root(self, args: Sequence[Any]) -> int:
        return int(getattr(args[0], self.root_attribute))

    def group_of(self, args: Sequence[Any]) -> Any:
        return args[0].group


@cache
def kernels() -> tuple[Kernel, ...]:
    """The kernels that this version of MindSpore has, and whose arguments have the expected names."""
    described = (_described(name, known) for name, known in _KERNELS.items() if hasattr(KERNELS, f"pyboost_{name}"))
    return tuple(one for one in described if one is not None)


@cache
def primitives() -> Mapping[str, Primitive]:
    """The primitives by name."""
    return {
        name: Primitive(known.name, known.rooted, True, known.root)  # its result is new
        for name, known in _PRIMITIVES.items()
    }


_MADE: Final[Mapping[str, type[Kernel]]] = {"reduce": ReducedToOneRank, "batch_isend_irecv": MindSporeBatchedSendsAndReceives}


def _described(name: str, known: _OperatorSpec) -> Kernel | None:
    caller = getattr(KERNELS, f"{name}_op", None)  # it passes its arguments on unchanged
    if caller is None:
        return None
    names = list(inspect.signature(type(caller).__call__).parameters)[1:]
    places = {argument: place for place, argument in enumerate(names)}
    if not {"group", known.inputs, known.outputs, known.root} - {""} <= places.keys():
        return None
    made = _MADE.get(known.name, Kernel)
    functional = not known.outputs and known.name not in _NO_OUTPUTS
    found = (places.get(argument) for argument in (known.inputs, known.outputs, known.root))
    return made(known.name, known.rooted, functional, f"pyboost_{name}", places, *found)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, (list, tuple)):
        return []
    return [tensor for one in value for tensor in _tensors(one)]


# --- The moment at which a call's outputs are ready: they are read then, and the monitor never waits for them.
#
# An asynchronous call returns a handle of the runtime, which MindSpore puts into the ``CommHandle`` of its users. The monitor
# wraps the runtime's handle: the ``CommHandle`` stays MindSpore's own and waits as before.


class Handle:
    """Wraps a runtime handle and calls back after a wait."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._callbacks: list[Callable[[], object]] = []

    @property
    def has_listeners(self) -> bool:
        return bool(self._callbacks)

    def on_wait(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` once, on the waiting thread, before its wait returns. The wait raises what ``callback`` raises."""
        self._callbacks.append(callback)

    def wait(self) -> None:
        self._handle.wait()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def __repr__(self) -> str:
        return repr(self._handle)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


# --- Intercept each communication operator that Python issues, once, at the point through which all calls pass.
#
# The functions of ``mint.distributed``, ``ops.communication`` and ``communication.comm_func`` end in C++ functions. Callers
# look these up in the module ``gen_ops_prim`` at each call, so imports do not matter. Primitives (``ops.AllReduce``) end in the
# function ``_run_op``. The monitor replaces both in their modules while it has listeners. Compilers use neither: they know
# operators by name.

Function = Callable[..., Any]

RUN: Final = "_run_op"


class MindSporeCollectiveListener:
    """Receives communication calls. It raises only errors of training."""

    def call_begins(self, _operator: Operator, _args: Sequence[Any]) -> bool:
        """An operator is about to be called.

        Returns:
            Whether ``call_issued`` should follow.
        """
        return False

    def call_issued(self, operator: Operator, args: Sequence[Any], result: Any, handle: Handle | None) -> None:
        """The call has returned. Its outputs are ready, or will be after a wait for ``handle``."""


class _Inside(threading.local):
    """Whether this thread is inside an operator: if others have patched it too, a call may pass here twice."""

    another = False


class OperatorInterception:
    """Replaces MindSpore's functions, and passes their calls to listeners."""

    def __init__(self) -> None:
        self._listeners: tuple[weakref.ref[MindSporeCollectiveListener], ...] = ()
        self._inside = _Inside()
        self._replaced: dict[tuple[ModuleType, str], tuple[Function, Function]] = {}

    @property
    def installed(self) -> bool:
        return bool(self._replaced)

    def add(self, listener: MindSporeCollectiveListener) -> None:
        """Pass every call to ``listener`` from now on, as long as it lives."""
        self._listeners = (*self._listeners, weakref.ref(listener, self._forget))
        if not self._replaced:
            self._install()

    def remove(self, listener: MindSporeCollectiveListener) -> None:
        """Stop passing calls to ``listener``. May be called repeatedly."""
        for known in self._listeners:
            if known() is listener:
                self._forget(known)

    def _forget(self, gone: weakref.ref[MindSporeCollectiveListener]) -> None:
        self._listeners = tuple(known for known in self._listeners if known is not gone and known() is not None)
        if self._listeners:
            return
        for (module, name), (original, ours) in self._replaced.items():
            if vars(module)[name] is ours:  # others may have patched it since
                setattr(module, name, original)
        self._replaced.clear()

    def _install(self) -> None:
        for kernel in kernels():
            self._replace(KERNELS, kernel.function, self._kernel(kernel, vars(KERNELS)[kernel.function]))
        self._replace(PRIMITIVES, RUN, self._runner(vars(PRIMITIVES)[RUN]))

    def _replace(self, module: ModuleType, name: str, ours: Function) -> None:
        self._replaced[module, name] = vars(module)[name], ours
        setattr(module, name, ours)

    def _kernel(self, kernel: Kernel, original: Function) -> Function:
        def observed(primitive: Any, args: Sequence[Any]) -> Any:
            return self._observed(kernel, args, original, primitive, args)

        observed.__name__ = observed.__qualname__ = kernel.function
        return observed

    def _runner(self, original: Function) -> Function:
        known = primitives()

        def run_op(primitive: Any, name: str, args: Sequence[Any]) -> Any:
            operator = known.get(name)
            if operator is None:  # the usual case
                return original(primitive, name, args)
            return self._observed(operator, (primitive, *args), original, primitive, name, args)

        run_op.__name__ = run_op.__qualname__ = RUN
        return run_op

    def _observed(self, operator: Operator, seen: Sequence[Any], original: Function, *args: Any) -> Any:
        inside = self._inside
        if inside.another or jit_context() is not None:  # tracing, which would record the result
            return original(*args)
        listeners = [one for known in self._listeners if (one := known()) is not None and one.call_begins(operator, seen)]
        inside.another = True
        try:
            result = original(*args)
        finally:
            inside.another = False
        return _report_result(listeners, operator, seen, result) if listeners else result


def _report_result(
    listeners: Sequence[MindSporeCollectiveListener], operator: Operator, args: Sequence[Any], result: Any
) -> Any:
    """Returns the caller's result. Its handle is wrapped if a listener waits for it."""
    handle = None
    if isinstance(operator, Kernel) and isinstance(result, tuple) and operator.is_awaited(args):
        handle = Handle(result[1])
    for listener in listeners:
        listener.call_issued(operator, args, result, handle)
    return result if handle is None or not handle.has_listeners else (result[0], handle)


INTERCEPTION: Final = OperatorInterception()
"""One per process, since MindSpore's modules exist once."""

# --- Start listening.


def communication(wanted: CcDistribution, failures: Failures) -> Communication | None:
    """Listen from now on if configured. If that fails, one warning says so."""
    if not wanted.enable:
        return None
    listen = failures.guarded("installing the interception of communication", Communication)
    return listen(wanted, failures, MindSporeCollectives(failures))


# --- Rows of operator calls.


class MindSporeOperatorCalls(NoLateRows):
    """Reads the tensors of communication calls.

    Attributes:
        rows: The rows of calls.
    """

    def __init__(self, recorder: Recorder) -> None:
        assert isinstance(recorder.reader, MindSporeTensorReader)
        self.rows = CallRows(recorder.reader)
        self._recorder, self._device = recorder, recorder.reader.device
        recorder.late = self

    @classmethod
    def of(cls, recorder: Recorder) -> MindSporeOperatorCalls:
        """The reader of ``recorder``, created once: later attachments continue its rows."""
        return recorder.late if isinstance(recorder.late, cls) else cls(recorder)

    def read(self, call: CollectiveCall, tensors: Sequence[Any]) -> bool:
        """Reduce the tensors of a call, one row each.

        Returns:
            Whether all tensors were read. Otherwise none has a row.

        Raises:
            EarlierFailure: An earlier operation of training has failed.
        """
        if not self._recorder.active or not all(map(has_data, tensors)):
            return False
        with computing():
            if self._device == HOST:
                for x in tensors:
                    on_host(x)  # waits for the tensor, which must happen without the lock
            lock = self._recorder.lock
            if not lock.take(LOCK_SECONDS):
                return False
            try:
                return self._recorder.active and self._read(call, tensors)
            finally:
                lock.release()

    def _read(self, call: CollectiveCall, tensors: Sequence[Any]) -> bool:
        call.begin(self._recorder.steps)
        written: list[RowSlot] = []
        complete = False
        try:
            complete = all(self.rows.read(call, x, self._device, written) for x in tensors)
        finally:
            if not complete:
                self.rows.forget(written)
        return complete


# --- The ranks of groups, and their labels.


class MindSporeGroups:
    """The named groups of MindSpore. The ranks of a name may change, so MindSpore is asked for them each time."""

    def __init__(self) -> None:
        self._labels = Labels()
        self._known: dict[tuple[str, tuple[int, ...]], NamedGroup] = {}

    def learn(self, roles: Mapping[str, Sequence[int]]) -> None:
        """Set labels for groups of ranks. If several roles have the same ranks, the first wins."""
        self._labels.learn(roles)
        self._known.clear()

    def of(self, given: Any) -> NamedGroup | None:
        """The group of a name; None if MindSpore does not know it.

        Args:
            given: Its name.
        """
        try:
            key = given, tuple(get_process_group_ranks(given))
            return self._known.get(key) or self._described(*key)
        except (RuntimeError, TypeError, ValueError):
            return None

    def _described(self, name: str, ranks: tuple[int, ...]) -> NamedGroup:
        label = self._labels.of(ranks, get_group_size())
        group = self._known[name, ranks] = NamedGroup(label, get_rank(name))
        return group


class MindSporeCollectives(MindSporeCollectiveListener):
    """Intercepts the operators of MindSpore, and reads their outputs when they are complete.

    Reading a tensor may raise an error of training. MindSpore raises such an error once, at the first wait. So it is passed on
    to the caller of the operator, or of ``wait``.
    """

    _communication: Communication
    computing = staticmethod(nullcontext)
    dtype_name = staticmethod(dtype_name)

    def __init__(self, failures: Failures) -> None:
        self.groups = MindSporeGroups()
        self._failures = failures
        self._calls: MindSporeOperatorCalls | None = None

    def listen(self, communication: Communication) -> None:
        self._communication = communication
        INTERCEPTION.add(self)

    def begin(self, recorder: Recorder) -> MindSporeOperatorCalls:
        self._calls = MindSporeOperatorCalls.of(recorder)
        return self._calls

    def stop(self) -> None:
        INTERCEPTION.remove(self)
        self._calls = None

    def among_ranks(self) -> bool:
        return initialized() or not is_settled()

    def are_real(self, tensors: Sequence[Tensor]) -> bool:
        return not any(getattr(one, "is_meta", False) for one in tensors)

    def call_begins(self, operator: Operator, args: Sequence[Any]) -> bool:
        return self._communication.call_begins(operator, args)

    def call_issued(self, operator: Operator, args: Sequence[Any], result: Any, handle: Handle | None) -> None:
        try:
            expected = self._communication.expected(operator, args, result)
        except Exception as error:
            self._failures.report("following a communication operator", error)
            return
        if expected is None:
            return
        if handle is None:
            self.outputs_there(*expected)
        else:  # the handle may outlive the listener
            handle.on_wait(partial(_read_outputs, weakref.ref(self), *expected))

    def outputs_there(self, call: CollectiveCall, outputs: Sequence[Tensor]) -> None:
        """Read the outputs before they can be changed."""
        try:
            if self._calls is not None and self._calls.read(call, outputs):
                self._communication.unread -= 1
        except EarlierFailure as failure:
            raise failure.error from None
        except Exception as error:
            self._failures.report("reading the outputs of a communication operator", error)


def _read_outputs(listener: weakref.ref[MindSporeCollectives], call: CollectiveCall, outputs: Sequence[Tensor]) -> None:
    collectives = listener()
    if collectives is not None:
        collectives.outputs_there(call, outputs)
