"""What MindSpore compiles in place of hooks: taps, which measure the arguments and results of cells, and gradients.

Compiled code calls no hooks. But the compiler reads the attribute ``construct`` of each cell. So a watched cell gets one of
its own, which measures by the operator ``follow`` of ``monitor.mindspore.tape``. In the dynamic graph that attribute calls the
original and does nothing else.

``Depend`` ties each measurement to the tensor that it measures. So the compiler keeps the measurement if and only if it keeps
the tensor. A call begins with an entry whose number all other entries of the call repeat, also those of its gradients. So
calls of one cell can be distinguished whatever the order of execution is.

The compiler runs functions that are marked ``constexpr`` in Python, while it compiles. Of Python it knows a part only: no
``del``, no starred items in tuples.
"""
# ruff: noqa: ARG002, RUF005, SIM102, SIM108, SIM118

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.sparse_tensor import RowTensorInner
from mindspore.ops import constexpr
from mindspore.ops.functional import is_sequence_shape_unknown

from monitor.mindspore.autograd import recording
from monitor.mindspore.features.reading import FLOATS
from monitor.mindspore.tape import NO_TAPE, follow_operator, numbering_operator, ordered_follow_operator

if TYPE_CHECKING:
    from monitor.mindspore.compiled.program import Program

_COMPILED: Final = False
"""False in Python. The compiler reads True from a comment at its use."""

BEGIN: Final = "begin"
INPUT: Final = "input"
OUTPUT: Final = "output"
INPUT_GRAD: Final = "input_grad"
OUTPUT_GRAD: Final = "output_grad"
EVALUATION: Final = "evaluation"
PARAMETER: Final = "parameter"
TURN_BEGINS: Final = "turn begins"
REDUCED: Final = "reduced"
BEFORE: Final = "before"
AFTER: Final = "after"
TURN_ENDS: Final = "turn ends"

MARKS: Final = frozenset({BEGIN, EVALUATION, TURN_BEGINS, TURN_ENDS})
"""Roles whose entries hold no measurements, and are made in every step."""


# --- The attribute ``construct`` of an observed cell.

Construct = Callable[..., Any]


class _Number(int):
    """The number of an observed cell, which copies of the cell do not have: theirs is 0.

    Attributes:
        functions: The functions with which compiled code measures the cell.
    """

    functions: Any = None

    def __deepcopy__(self, memo: Any) -> int:
        del memo
        return 0


def install(cell: nn.Cell, number: int, construct: Construct, functions: Any) -> None:
    """Let compiled code observe a cell, unless another model's does. A ``construct`` that the user has put around the monitor's
    stays there.
    """
    attributes = vars(cell)
    marked = _Number(number)
    marked.functions = functions
    if attributes.get("_monitored_as"):
        return
    if "_monitored_as" in attributes and not _is_ours(attributes.get("construct")):
        if getattr(attributes["_monitored_as"], "functions", None) is functions:
            attributes["_monitored_as"] = marked
        return
    uninstall(cell)  # a copy of an observed cell
    own = attributes.get("construct")
    plain = cell.construct
    function = construct(_is_compiled_by_itself(plain))
    function.__signature__ = _with_self(inspect.signature(plain))
    function._of_monitor = True
    attributes["_monitored_as"] = marked
    attributes["_unobserved"] = plain
    attributes["_had_construct"] = own is not None
    attributes["construct"] = MethodType(function, cell)


def _with_self(signature: inspect.Signature) -> inspect.Signature:
    """The signature of a method before it is bound."""
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    return signature.replace(parameters=[first, *signature.parameters.values()])


def uninstall(cell: nn.Cell) -> None:
    attributes = vars(cell)
    if "_monitored_as" not in attributes:
        return
    now = attributes.get("construct")
    if not _is_ours(now) and now not in (None, attributes.get("_unobserved")):  # the user's, which may call the monitor's
        rested = _Number(0)
        rested.functions = getattr(attributes["_monitored_as"], "functions", None)
        attributes["_monitored_as"] = rested
        return
    if attributes["_had_construct"]:
        attributes["construct"] = attributes["_unobserved"]
    else:
        attributes.pop("construct", None)
    for name in ("_monitored_as", "_unobserved", "_had_construct"):
        attributes.pop(name)


def is_installed(cell: nn.Cell, functions: Any) -> bool:
    """Whether compiled code observes a cell with these functions."""
    marked = vars(cell).get("_monitored_as")
    return bool(marked) and getattr(marked, "functions", None) is functions


def has_taps(cell: nn.Cell) -> bool:
    """Whether the ``construct`` of a cell is the monitor's: not taken out, and not inside one of the user's."""
    return _is_ours(vars(cell).get("construct"))


def _is_ours(construct: Any) -> bool:
    return getattr(getattr(construct, "__func__", None), "_of_monitor", False)


def _is_compiled_by_itself(construct: Any) -> bool:
    return bool(getattr(construct, "__wrapped_by_jit__", False))


def original_construct(cell: nn.Cell) -> Any:
    """The method ``construct`` of a cell, observed or not."""
    return vars(cell).get("_unobserved", cell.construct)


@contextmanager
def unobserved(cell: nn.Cell) -> Iterator[None]:
    """A while in which a cell with taps has the ``construct`` that it has without the monitor."""
    attributes = vars(cell)
    mine = attributes.pop("construct", None)
    if attributes.get("_had_construct"):
        attributes["construct"] = attributes["_unobserved"]
    try:
        yield
    finally:
        if mine is not None and "_monitored_as" in attributes:  # else another thread calls it, or the monitor was closed
            attributes["construct"] = mine


def _call_from_python(cell: nn.Cell, args: Any, kwargs: Any) -> Any:
    """Call a compiled ``construct``. Its hooks see the call, so it must be compiled without taps of its own."""
    with unobserved(cell):
        return cell.construct(*args, **kwargs)


# --- What the compiler compiles.

NOTHING: Final[Any] = ()
"""Tuples of tensors begin with it."""


ORDERED: Final = 1
UNORDERED: Final = 0
"""Whether calls begin in the order of the program, in place of the position of a tensor."""


class _Back(nn.Cell):  # type: ignore[misc]
    """Returns its first argument, and measures the gradient of that."""

    def __init__(self, follow: Any) -> None:
        super().__init__()
        self.follow = follow
        self.depend = ops.Depend()

    def construct(self, x: Any, slot: Any, call: Any) -> Any:
        return x

    def bprop(self, x: Any, slot: Any, call: Any, out: Any, dout: Any) -> Any:
        measured = self.follow(ops.stop_gradient(dout), slot, call)
        return self.depend(dout, measured), ops.zeros_like(slot), ops.zeros_like(call)


_DEEPEST: Final = 3
"""How many structures inside each other have rows."""


def _nested(outer_of: Callable[[Any], Any], innermost: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls itself ``_DEEPEST`` times, unrolled: the compiler forgets constants in recursions."""
    function = innermost
    for _ in range(_DEEPEST + 1):
        function = outer_of(function)
    return function


class Functions(NamedTuple):
    """Functions for the compiler.

    Attributes:
        cell: Makes the ``construct`` of a cell. Its argument tells whether the original is compiled by itself.
        gradient: Makes the hook of a parameter, from its number.
        optimizer: Makes the maker of the ``construct`` of an optimizer, from its number and state.
    """

    cell: Callable[[bool], Construct]
    gradient: Callable[[int], Callable[[Any], Any]]
    optimizer: Callable[[int, tuple[Parameter, ...]], Callable[[bool], Construct]]


def functions_of(program: Program) -> Functions:  # noqa: C901 (closures: the compiler knows no other way to pass objects)
    """The functions whose entries belong to a program."""
    known = weakref.ref(program)
    follow, ordered, depend = follow_operator(), ordered_follow_operator(), ops.Depend()
    back = _Back(follow)
    numbered = numbering_operator()
    nowhere = Tensor(np.array([NO_TAPE, 0, 0], dtype=np.int64))
    none = Tensor(np.array([0], dtype=np.int64))
    shape_of = ops.Shape()

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def slot(number: int, role: str, suffix: str, position: int, found: int) -> Any:
        return known().slot(number, role, suffix, position, found)  # type: ignore[union-attr]

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def takes(number: int, role: str) -> bool:
        return known().takes(number, role)  # type: ignore[union-attr]

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def observes(number: int) -> bool:
        program = known()
        return program is not None and program.observes(number)

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def arrives(number: int) -> bool:
        program = known()
        return program is not None and program.arrives(number)

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def measures() -> bool:
        """Whether compiled code can make entries."""
        program = known()
        return program is not None and program.has_tape()

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def evaluates(number: int, training: bool) -> bool:
        return known().evaluates(number, training)  # type: ignore[union-attr]

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def hides(number: int) -> None:
        known().hides(number)  # type: ignore[union-attr]

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def refuses() -> None:
        """Have code compiled without the monitor (``Fallback``): MindSpore compiles such operators, but fails to run them."""
        raise RuntimeError("a tuple of tensors has a dynamic length")

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def lacks(what: str) -> None:
        known().lacks(what)  # type: ignore[union-attr]

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def reads(number: int, kind: str) -> bool:
        return known().reads(number, kind)  # type: ignore[union-attr]

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def is_float(dtype: Any) -> bool:
        return dtype in FLOATS

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def is_root(number: int) -> bool:
        return known().is_root(number)  # type: ignore[union-attr]

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def is_ordered(number: int) -> bool:
        """Whether forwards of the model begin and end in the order of the program. Not in code that is compiled for a call in
        the dynamic graph: its gradients would be wrong with ordered operators.
        """
        return known().is_root(number) and not recording()  # type: ignore[union-attr]

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def is_known(shape: Any) -> bool:
        """Whether the compiler knows a shape, or passes None. MindSpore cannot build the operator for other tensors."""
        return known().has_fixed(shape)  # type: ignore[union-attr]

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def is_known_gradient(shape: Any) -> bool:
        return known().has_fixed(shape, gradient=True)  # type: ignore[union-attr]

    def begin(number: int, role: str) -> Any:
        """The number of a call. It depends on no tensor: that would change the order in which the compiler differentiates."""
        if is_ordered(number):
            return ordered(none, slot(number, role, "", ORDERED, 1), none)
        if is_root(number):
            return numbered(none, slot(number, role, "", UNORDERED, 1), none)
        return numbered(none, nowhere, none)

    def tap_tensor(x: Any, number: int, role: str, suffix: str, position: int, found: int, call: Any) -> Any:
        y = depend(x, call)
        if not is_known(shape_of(x)):
            return y
        if takes(number, role + "_grad") and is_float(x.dtype):
            y = back(y, slot(number, role + "_grad", suffix, position, found), call)
        if takes(number, role):
            measure = ordered if role == OUTPUT and is_ordered(number) else follow
            y = depend(y, measure(ops.stop_gradient(y), slot(number, role, suffix, position, found), call))
        return y

    def tap_of(inner: Callable[..., Any]) -> Callable[..., Any]:
        def tap(x: Any, number: int, role: str, suffix: str, position: int, found: int, call: Any) -> Any:
            if isinstance(x, Tensor):
                return tap_tensor(x, number, role, suffix, position, found, call)
            if isinstance(x, tuple):
                if is_sequence_shape_unknown(x):
                    refuses()
                every = NOTHING
                for i in range(len(x)):
                    every = every + (inner(x[i], number, role, suffix + "_" + str(i), position, found, call),)
                return every
            if isinstance(x, (list, dict)):
                hides(number)
            return x

        return tap

    def too_deep(x: Any, number: int, _role: str, _suffix: str, _position: int, _found: int, _call: Any) -> Any:
        if isinstance(x, (Tensor, tuple, list, dict)):
            hides(number)
        return x

    tap = _nested(tap_of, too_deep)

    def tap_each(parts: Any, number: int, role: str, call: Any) -> Any:
        every = NOTHING
        for i in range(len(parts)):
            every = every + (tap(parts[i], number, role, "_" + str(i), i, len(parts), call),)
        return every

    def tap_result(x: Any, number: int, call: Any) -> Any:
        if isinstance(x, Tensor):
            return tap(x, number, OUTPUT, "", 0, 1, call)
        if isinstance(x, tuple):
            if len(x) == 1 and isinstance(x[0], Tensor):
                return (tap(x[0], number, OUTPUT, "", 0, 1, call),)
            return tap_each(x, number, OUTPUT, call)
        if isinstance(x, (list, dict)):
            hides(number)
        return x

    def tap_arguments(args: Any, count: int, number: int, call: Any) -> Any:
        if count == 1 and len(args) == 1:
            x = args[0]
            if isinstance(x, tuple) and is_sequence_shape_unknown(x):
                refuses()
            if isinstance(x, tuple) and (len(x) != 1 or not isinstance(x[0], Tensor)):
                every = NOTHING
                for i in range(len(x)):
                    every = every + (tap(x[i], number, INPUT, "_" + str(i), 0, 1, call),)
                return (every,)
            return (tap(x, number, INPUT, "", 0, 1, call),)
        every = NOTHING
        for i in range(len(args)):
            every = every + (tap(args[i], number, INPUT, "_" + str(i), i, count, call),)
        return every

    def tap_named(kwargs: Any, before: int, number: int, call: Any) -> Any:
        every = {}
        place = before
        for key in kwargs.keys():
            every[key] = tap(kwargs[key], number, INPUT, "_" + key, place, before + len(kwargs), call)
            place = place + 1
        return every

    def tied(args: Any, call: Any) -> Any:
        every = NOTHING
        for i in range(len(args)):
            if isinstance(args[i], Tensor):
                every = every + (depend(args[i], call),)
            else:
                every = every + (args[i],)
        return every

    def observed_call(self: Any, args: Any, kwargs: Any) -> Any:
        number = self._monitored_as
        if not observes(number):
            return self._unobserved(*args, **kwargs)
        if evaluates(number, self.training):
            return self._unobserved(*tied(args, begin(number, EVALUATION)), **kwargs)
        call = begin(number, BEGIN)
        given = tap_arguments(args, len(args) + len(kwargs), number, call)
        return tap_result(self._unobserved(*given, **tap_named(kwargs, len(args), number, call)), number, call)

    def of_cell(by_itself: bool) -> Construct:
        def construct(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _COMPILED:  # @jit.cond: True
                return observed_call(self, args, kwargs)
            return self._unobserved(*args, **kwargs)

        def construct_of_compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
            if _COMPILED:  # @jit.cond: True
                return observed_call(self, args, kwargs)
            return _call_from_python(self, args, kwargs)

        return construct_of_compiled if by_itself else construct

    def of_parameter(number: int) -> Callable[[Any], Any]:
        def measure(gradient: Any) -> Any:
            if not arrives(number):
                return gradient
            if not isinstance(gradient, Tensor):
                lacks("sparse")
                return gradient
            if not is_known_gradient(shape_of(gradient)):
                return gradient
            return depend(gradient, follow(ops.stop_gradient(gradient), slot(number, PARAMETER, "", 0, 1), none))

        return measure

    def of_optimizer(number: int, state: tuple[Parameter, ...]) -> Callable[[bool], Construct]:  # noqa: C901 (likewise)
        def start(gradients: Any) -> Any:
            """What a turn begins at. No gradient if one is sparse: MindSpore would drop the optimizer's step."""
            for i in range(len(gradients)):
                if not isinstance(gradients[i], Tensor):
                    return none
            if is_known_gradient(shape_of(gradients[0])):
                return gradients[0]
            return none

        def tied_gradient(gradient: Any, measured: Any) -> Any:
            if isinstance(gradient, Tensor):
                return depend(gradient, measured)
            return RowTensorInner(gradient.indices, depend(gradient.values, measured), gradient.dense_shape)

        def before(gradients: Any, call: Any) -> Any:
            """The gradients, after everything was measured that the step changes."""
            first = depend(start(gradients), call)
            if reads(number, REDUCED):
                for i in range(len(gradients)):
                    if isinstance(gradients[i], Tensor):
                        if is_known_gradient(shape_of(gradients[i])):
                            given = ops.stop_gradient(gradients[i])
                            first = depend(first, follow(given, slot(number, REDUCED, "", i, 1), call))
            if reads(number, BEFORE):
                for i in range(len(state)):
                    first = depend(first, follow(state[i], slot(number, BEFORE, "", i, 1), call))
            every = NOTHING
            for i in range(len(gradients)):
                every = every + (tied_gradient(gradients[i], first),)
            return every

        def after(call: Any) -> None:
            if reads(number, AFTER):
                for i in range(len(state)):
                    ordered(state[i], slot(number, AFTER, "", i, 1), call)
            ordered(call, slot(number, TURN_ENDS, "", 0, 1), call)

        def observed_step(self: Any, gradients: Any, args: Any, kwargs: Any) -> Any:
            call = follow(ops.stop_gradient(start(gradients)), slot(number, TURN_BEGINS, "", 0, 1), none)
            result = self._unobserved(before(gradients, call), *args, **kwargs)
            after(call)
            return result

        def construct(self: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
            if _COMPILED:  # @jit.cond: True
                if measures():
                    return observed_step(self, gradients, args, kwargs)
                return self._unobserved(gradients, *args, **kwargs)
            return _call_from_python(self, (gradients, *args), kwargs)

        return lambda _by_itself: construct

    return Functions(of_cell, of_parameter, of_optimizer)
