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
# ruff: noqa: ARG001, ARG002, SIM118

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore._c_expression import typing
from mindspore.common.sparse_tensor import RowTensorInner
from mindspore.ops import constexpr, functional as F
from mindspore.ops.composite import Map
from mindspore.ops.functional import is_sequence_shape_unknown

from monitor.mindspore.autograd import recording
from monitor.mindspore.compiled import roles
from monitor.mindspore.compiled.constructs import Construct, call_from_python, call_original
from monitor.mindspore.compiled.operations import Operations, gradient_is_measured, hook_by_operations
from monitor.mindspore.compiled.parameter_tape import layout_of
from monitor.mindspore.features.reading import FLOATS
from monitor.mindspore.tape import (
    NO_TAPE,
    UNJOINED,
    follow_all_operators,
    follow_operator,
    numbering_operator,
    ordered_follow_operator,
)

if TYPE_CHECKING:
    from monitor.mindspore.compiled.program import Program

_COMPILED: Final = False
"""False in Python. The compiler reads True from a comment at its use."""

FLOAT_NAMES: Final = frozenset(str(one).lower() for one in FLOATS)
ABSENT: Final = "the monitor: no argument"
"""Takes the place of an argument that a call does not have."""


def given(*arguments: Any) -> tuple[Any, ...]:
    """The arguments that a call has."""
    return tuple(one for one in arguments if one is not ABSENT)


class _Back(nn.Cell):  # type: ignore[misc]
    """Returns its first argument, and measures the gradient of that.

    ``follow`` and ``depend`` are not joined by the compiler: gradients of several calls may be the same tensor.
    """

    def __init__(self, follow: Any, depend: Any) -> None:
        super().__init__()
        self.follow, self.depend = follow, depend

    def construct(self, x: Any, slot: Any, call: Any) -> Any:
        return x

    def bprop(self, x: Any, slot: Any, call: Any, out: Any, dout: Any) -> Any:
        measured = self.follow(ops.stop_gradient(dout), slot, call)
        return self.depend(dout, measured), ops.zeros_like(slot), ops.zeros_like(call)


_DEEPEST: Final = 3
"""How many structures inside each other have rows."""

TOGETHER: Final = 16
"""How many gradients, weights or moments of an optimizer's step one operator measures, in one thread."""


class Place(NamedTuple):
    """The place of a tap. The compiler passes it as a plain tuple.

    Attributes:
        suffix: The path of a tensor (``TensorPath``).
        depth: How many structures may still contain each other. At 0, tensors have no rows.
    """

    number: int
    role: str
    suffix: str = ""
    position: int = 0
    found: int = 1
    depth: int = _DEEPEST + 1


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
    """The functions whose entries belong to a program.

    Functions marked ``constexpr`` return the function that the compiler calls next, and its constants. An ``if`` in their
    place is compiled as three functions. They take the type and the shape of a tensor: for the tensor itself, MindSpore
    allocates memory.
    """
    known: Any = weakref.ref(program)
    follow, ordered, numbered, depend = follow_operator(), ordered_follow_operator(), numbering_operator(), ops.Depend()
    follow_all, ordered_all = follow_all_operators()
    unjoined = ops.Depend().add_prim_attr(UNJOINED, True)
    back_in_c = _Back(numbered, unjoined)
    nowhere = Tensor(np.array([NO_TAPE, 0, 0], dtype=np.int64))
    none = Tensor(np.array([0], dtype=np.int64))
    shape_of, typeof, each, partial = ops.Shape(), F.typeof, Map(), F.partial

    def as_given(x: Any, _constants: Any, _call: Any) -> Any:
        return x

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def refuses() -> None:
        """Have code compiled without the monitor (``Fallback``): MindSpore compiles such operators, but fails to run them."""
        raise RuntimeError("a tuple of tensors has a dynamic length")

    # Arguments and results of cells.

    def taps_with(depend: Any) -> Any:
        """The functions that tie a tensor to its call, by whether they measure its gradient, and the tensor itself."""

        def tied(x: Any, _constants: Any, call: Any) -> Any:
            return depend(x, call)

        def tap_forward(x: Any, slots: Any, call: Any) -> Any:
            y = depend(x, call)
            return depend(y, slots[0](ops.stop_gradient(y), slots[1], call))

        def tap_backward(x: Any, slots: Any, call: Any) -> Any:
            return slots[3](depend(x, call), slots[2], call)

        def tap_both(x: Any, slots: Any, call: Any) -> Any:
            y = slots[3](depend(x, call), slots[2], call)
            return depend(y, slots[0](ops.stop_gradient(y), slots[1], call))

        return (tied, tap_forward), (tap_backward, tap_both)

    taps, taps_of_equal_calls = taps_with(unjoined), taps_with(depend)
    ((tied, _), _) = taps_of_equal_calls

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def tap_of(place: Any, kind: Any, shape: Any) -> Any:
        """The function that taps a tensor, with its operator and slots."""
        program, (number, role, *path, _) = known(), place
        if not program.has_fixed(shape):
            return tied, ()
        gradient = role + "_grad"
        if program.operations is not None:
            return tap_by_operations(program, program.operations, Place(*place), layout_of(kind, shape))
        forward, backward = program.takes(number, role), program.takes(number, gradient) and kind.element_type() in FLOATS
        # For a call in the dynamic graph, the compiler joins equal calls and then differentiates. Taps must not prevent it.
        joins = recording()
        measure = ordered if role == roles.OUTPUT and is_ordered(program, number) else follow if joins else numbered
        slot = program.slot(number, role, *path) if forward else nowhere
        tap = (taps_of_equal_calls if joins else taps)[backward][forward]
        return tap, (measure, slot, program.slot(number, gradient, *path) if backward else nowhere, back_in_c)

    def tap_by_operations(program: Program, used: Operations, at: Place, layout: Any) -> Any:
        if layout is None:
            program.lacks("layout")
            return tied, ()
        gradient, measured = at.role + "_grad", program.observed[at.number].roles

        def slot_of(role: str) -> Any:
            return program.slot_of_operations(at.number, role, at.suffix, at.position, at.found, layout=layout)

        slot = slot_of(at.role) if program.takes(at.number, at.role) else None
        has_gradient = program.takes(at.number, gradient) and layout[1] in FLOAT_NAMES
        slot_of_gradient = slot_of(gradient) if has_gradient else None
        back = _Back(used.write if gradient in measured else used.write_mark, unjoined)
        tap = taps[slot_of_gradient is not None][slot is not None]
        return tap, (used.follow if at.role in measured else used.mark, slot, slot_of_gradient, back)

    def is_ordered(program: Program, number: int) -> bool:
        """Whether forwards of the model begin and end in the order of the program. Not in code that is compiled for a call in
        the dynamic graph: its gradients would be wrong with ordered operators.
        """
        return program.is_root(number) and not recording()

    def tap_tensor(x: Any, place: Any, call: Any) -> Any:
        function, slots = tap_of(place, typeof(x), shape_of(x))
        return function(x, slots, call)

    def tapping() -> Callable[..., Any]:
        def tap(call: Any, x: Any, place: Any) -> Any:
            return function_of(place, typeof(x))(x, place, call)

        return tap

    def tapping_each() -> Callable[..., Any]:
        tap = tapping()

        def tap_each(x: Any, place: Any, call: Any) -> Any:
            if is_sequence_shape_unknown(x):
                refuses()
            return each(partial(tap, call), x, elements_of(place, len(x)))

        return tap_each

    # A function for each depth: the compiler forgets constants in recursions.
    tap, of_tuples = tapping(), [tapping_each() for _ in range(_DEEPEST + 3)]

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def function_of(place: Any, kind: Any) -> Any:
        return choose(Place(*place), kind)

    def choose(at: Place, kind: Any) -> Any:
        """The function that taps an argument or a result of this type."""
        is_tuple, is_tensor = isinstance(kind, typing.Tuple), isinstance(kind, typing.TensorType)
        if isinstance(kind, (typing.List, typing.Dict)) or (at.depth == 0 and (is_tuple or is_tensor)):
            known().hides(at.number)
            return as_given
        if isinstance(kind, typing.RefType) and not (at.role == roles.OUTPUT and known().is_root(at.number)):
            known().lacks("reference")  # MindSpore would take one Parameter for another in ``_Back``
            return as_given
        return of_tuples[at.depth] if is_tuple else tap_tensor if is_tensor else as_given

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def elements_of(place: Any, count: int) -> Any:
        at = Place(*place)
        return tuple(at._replace(suffix=f"{at.suffix}_{i}", depth=at.depth - 1) for i in range(count))

    def tap_results(x: Any, place: Any, call: Any) -> Any:
        if is_sequence_shape_unknown(x):
            refuses()
        return each(partial(tap, call), x, results_of(place, each(typeof, x)))

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def results_of(place: Any, kinds: Any) -> Any:
        at, count = Place(*place), len(kinds)
        if count == 1 and isinstance(kinds[0], typing.TensorType):
            return (at,)
        return tuple(at._replace(suffix=f"_{i}", position=i, found=count) for i in range(count))

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def result_of(number: int, kind: Any) -> Any:
        place = Place(number, roles.OUTPUT)
        return tap_results if isinstance(kind, typing.Tuple) else choose(place, kind), place

    # Calls of cells with up to four arguments and no names. At a tuple or a dictionary of arguments, differentiation reaches
    # all of them at once: then it adds up the gradients of shared weights in another order.

    def call_1(self: Any, on: Any, at: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return self._unobserved(on(a, at[0]))

    def call_2(self: Any, on: Any, at: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return self._unobserved(on(a, at[0]), on(b, at[1]))

    def call_3(self: Any, on: Any, at: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return self._unobserved(on(a, at[0]), on(b, at[1]), on(c, at[2]))

    def call_4(self: Any, on: Any, at: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
        return self._unobserved(on(a, at[0]), on(b, at[1]), on(c, at[2]), on(d, at[3]))

    def unobserved_few(self: Any, constants: Any, a: Any, b: Any, c: Any, d: Any, rest: Any, kwargs: Any) -> Any:
        call, places = constants
        return call(self, as_is, places, a, b, c, d)

    def as_is(x: Any, place: Any) -> Any:
        return x

    def evaluated_few(self: Any, constants: Any, a: Any, b: Any, c: Any, d: Any, rest: Any, kwargs: Any) -> Any:
        call, places, begin, slot = constants
        return call(self, partial(tie, begin(none, slot, none)), places, a, b, c, d)

    def measured_few(self: Any, constants: Any, a: Any, b: Any, c: Any, d: Any, rest: Any, kwargs: Any) -> Any:
        call_few, places, begin, slot = constants
        call = begin(none, slot, none)
        return tap_result(self, call_few(self, partial(tap, call), places, a, b, c, d), call)

    # Other calls of cells.

    def together(self: Any, constants: Any, a: Any, b: Any, c: Any, d: Any, rest: Any, kwargs: Any) -> Any:
        function, count, others = constants
        return function(self, (a, b, c, d)[:count] + rest, kwargs, others)

    def unobserved(self: Any, args: Any, kwargs: Any, _constants: Any) -> Any:
        return self._unobserved(*args, **kwargs)

    def evaluated(self: Any, args: Any, kwargs: Any, constants: Any) -> Any:
        begin, slot, places = constants
        return self._unobserved(*each(partial(tie, begin(none, slot, none)), args, places), **kwargs)

    def tie(call: Any, x: Any, _place: Any) -> Any:
        return tying(typeof(x))(x, none, call)

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def tying(kind: Any) -> Any:
        return tied if isinstance(kind, typing.TensorType) else as_given

    def measured(self: Any, args: Any, _kwargs: Any, constants: Any) -> Any:
        begin, slot, places = constants
        call = begin(none, slot, none)
        return tap_result(self, self._unobserved(*each(partial(tap, call), args, places)), call)

    def measured_with_names(self: Any, args: Any, kwargs: Any, constants: Any) -> Any:
        begin, slot, places = constants
        call = begin(none, slot, none)
        names, before = tuple(kwargs.keys()), len(args)
        # In a statement `for`, or in `Map`, the compiler would forget that constants, such as None, are constant.
        named = {name: tap(call, kwargs[name], named_place(self._monitored_as, names, name, before)) for name in kwargs.keys()}
        return tap_result(self, self._unobserved(*each(partial(tap, call), args, places), **named), call)

    def tap_result(self: Any, x: Any, call: Any) -> Any:
        function, place = result_of(self._monitored_as, typeof(x))
        return function(x, place, call)

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def named_place(number: int, names: Any, name: str, before: int) -> Any:
        return Place(number, roles.INPUT, "_" + name, before + names.index(name), before + len(names))

    # Which of them a call is.

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def call_of(number: int, training: bool, count: int, more: int, named: int) -> Any:
        """The function for a call, and its constants. ``count``: arguments that are passed one by one."""
        few = (call_1, call_2, call_3, call_4)[count - 1] if count and not more and not named else None
        program, total = known(), count + more
        places = tuple(Place(number, roles.INPUT, f"_{i}", i, total + named) for i in range(total))
        if program is None or not program.observes(number):
            return (unobserved_few, (few, places)) if few else (together, (unobserved, count, ()))
        if program.evaluates(number, training):
            begins = begin(program, number, roles.EVALUATION)
            return (evaluated_few, (few, places, *begins)) if few else (together, (evaluated, count, (*begins, places)))
        begins = begin(program, number, roles.BEGIN)
        if total == 1 and not named:
            places = (Place(number, roles.INPUT, depth=_DEEPEST + 2),)
        if few:
            return measured_few, (few, places, *begins)
        return together, (measured_with_names if named else measured, count, (*begins, places))

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def counting(kind: Any) -> Any:
        return one_unless_absent if isinstance(kind, typing.String) else one

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def one_unless_absent(text: str) -> int:
        return int(text != ABSENT)

    def one(_x: Any) -> int:
        return 1

    def number_of(x: Any) -> Any:
        return counting(typeof(x))(x)

    def begin(program: Program, number: int, role: str) -> Any:
        """The operator that begins a call, and its slot. Its result, the number of the call, depends on no tensor: that would
        change the order in which the compiler differentiates.
        """
        if program.operations is not None:
            used = program.operations
            marked = program.slot_of_operations(number, role, "", roles.ORDERED) if program.is_root(number) else None
            return (used.begin, nowhere) if marked is None else (used.begin_marked, marked)
        if not program.is_root(number):
            return numbered, nowhere
        if is_ordered(program, number):
            return ordered, program.slot(number, role, "", roles.ORDERED, 1)
        return numbered, program.slot(number, role, "", roles.UNORDERED, 1)

    def observed_call(self: Any, a: Any, b: Any, c: Any, d: Any, rest: Any, kwargs: Any) -> Any:
        count = number_of(a) + number_of(b) + number_of(c) + number_of(d)
        function, constants = call_of(self._monitored_as, self.training, count, len(rest), len(kwargs))
        return function(self, constants, a, b, c, d, rest, kwargs)

    def of_cell(by_itself: bool) -> Construct:
        original = call_from_python if by_itself else call_original

        # Names that no caller uses: MindSpore takes what a caller names `rest` for a parameter `*rest`.
        def construct(
            self: Any,
            _monitored_0: Any = ABSENT,
            _monitored_1: Any = ABSENT,
            _monitored_2: Any = ABSENT,
            _monitored_3: Any = ABSENT,
            *_monitored_more: Any,
            **_monitored_names: Any,
        ) -> Any:
            if _COMPILED:  # @jit.cond: True
                return observed_call(
                    self, _monitored_0, _monitored_1, _monitored_2, _monitored_3, _monitored_more, _monitored_names
                )
            few = given(_monitored_0, _monitored_1, _monitored_2, _monitored_3)
            return original(self, (*few, *_monitored_more), _monitored_names)

        return construct

    # Gradients of parameters.

    def measured_gradient(x: Any, slot: Any, call: Any) -> Any:
        return follow(ops.stop_gradient(x), slot, call)

    def not_measured(_x: Any, _constants: Any, call: Any) -> Any:
        return call

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def gradient_of(number: int, role: str, position: int, shape: Any) -> Any:
        program = known()
        if not program.has_fixed(shape, gradient=True):
            return not_measured, nowhere
        return measured_gradient, program.slot(number, role, "", position, 1)

    def measured_as(number: int, role: str) -> Callable[..., Any]:
        def measure(x: Any, position: Any, call: Any) -> Any:
            function, slot = gradient_of(number, role, position, shape_of(x))
            return function(x, slot, call)

        return measure

    def of_parameter(number: int) -> Callable[[Any], Any]:
        used = known().operations
        if used is not None:
            return hook_by_operations(known, number, used.write)
        measure = measured_as(number, roles.PARAMETER)

        def hooked(x: Any) -> Any:
            return depend(x, measure(x, 0, none))

        def not_hooked(x: Any) -> Any:
            return x

        @constexpr(check=False)  # type: ignore[untyped-decorator]
        def hook_of(kind: Any) -> Any:
            return hooked if gradient_is_measured(known(), number, kind) else not_hooked

        def hook(gradient: Any) -> Any:
            return hook_of(typeof(gradient))(gradient)

        return hook

    # Steps of optimizers.

    def tied_sparse(x: Any, _constants: Any, call: Any) -> Any:
        return RowTensorInner(x.indices, depend(x.values, call), x.dense_shape)

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def tying_gradient(kind: Any) -> Any:
        return tied if isinstance(kind, typing.TensorType) else tied_sparse

    def tie_gradient(call: Any, x: Any) -> Any:
        return tying_gradient(typeof(x))(x, none, call)

    def values_of(x: Any) -> Any:
        return having_values(typeof(x))(x)

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def having_values(kind: Any) -> Any:
        return whole if isinstance(kind, typing.TensorType) else of_sparse

    def whole(x: Any) -> Any:
        return x

    def of_sparse(x: Any) -> Any:
        return x.values

    def of_optimizer(number: int, state: tuple[Parameter, ...]) -> Callable[[bool], Construct]:  # noqa: C901 (likewise)
        reduce = measured_as(number, roles.REDUCED)

        @constexpr(check=False)  # type: ignore[untyped-decorator]
        def step_of() -> Any:
            """What a step is, and its slots."""
            program = known()
            if program is None or not program.has_tape():
                return unobserved_step, ()
            begin, end = (program.slot(number, role, "", 0, 1) for role in (roles.TURN_BEGINS, roles.TURN_ENDS))
            return observed_step, (begin, slots_of_state(program, roles.BEFORE), slots_of_state(program, roles.AFTER), end)

        def slots_of_state(program: Program, role: str) -> Any:
            spans = spans_of(len(state) * program.reads(number, role))
            return tuple(spans), slots_of(program, role, spans)

        def slots_of(program: Program, role: str, spans: list[tuple[int, int]]) -> tuple[Tensor, ...]:
            each_of = ([program.slot(number, role, "", i, 1).asnumpy() for i in range(*span)] for span in spans)
            return tuple(Tensor(np.stack(slots)) for slots in each_of)

        @constexpr(check=False)  # type: ignore[untyped-decorator]
        def reducing(kinds: Any) -> Any:
            if not known().reads(number, roles.REDUCED):
                return reduce_none
            return reduce_dense if all(isinstance(kind, typing.TensorType) for kind in kinds) else reduce_each

        def reduce_none(gradients: Any, call: Any) -> Any:
            return ()

        def reduce_each(gradients: Any, call: Any) -> Any:
            return each(partial(reduce_one, call), gradients, positions(len(gradients)))

        def reduce_one(call: Any, x: Any, position: Any) -> Any:
            return reducing_one(typeof(x))(x, position, call)

        @constexpr(check=False)  # type: ignore[untyped-decorator]
        def reducing_one(kind: Any) -> Any:
            return reduce if isinstance(kind, typing.TensorType) else not_measured

        def reduce_dense(gradients: Any, call: Any) -> Any:
            function, constants = reducing_dense(each(shape_of, gradients))
            return function(gradients, call, *constants)

        @constexpr(check=False)  # type: ignore[untyped-decorator]
        def reducing_dense(shapes: Any) -> Any:
            program = known()
            if not all(program.has_fixed(shape, gradient=True) for shape in shapes):
                return reduce_each, ()
            spans = spans_of(len(shapes))
            return reduce_together, (tuple(spans), slots_of(program, roles.REDUCED, spans))

        def reduce_together(gradients: Any, call: Any, spans: Any, slots: Any) -> Any:
            return each(partial(together_of, gradients, call), spans, slots)

        def together_of(gradients: Any, call: Any, span: Any, slots: Any) -> Any:
            return follow_all(*gradients[span[0] : span[1]], slots, call)

        def before(call: Any, span: Any, slots: Any) -> Any:
            return follow_all(*state[span[0] : span[1]], slots, call)

        def after(call: Any, span: Any, slots: Any) -> Any:
            return ordered_all(*state[span[0] : span[1]], slots, call)

        def unobserved_step(self: Any, gradients: Any, args: Any, kwargs: Any, _slots: Any) -> Any:
            return self._unobserved(gradients, *args, **kwargs)

        def observed_step(self: Any, gradients: Any, args: Any, kwargs: Any, slots: Any) -> Any:
            begin, of_state, of_new_state, end = slots
            gradients = tuple(gradients)
            call = follow(depend(none, each(values_of, gradients)), begin, none)
            measured = reducing(each(typeof, gradients))(gradients, call)
            measured = measured + each(partial(before, call), *of_state)
            ready = depend(call, measured)
            given = each(partial(tie_gradient, ready), gradients)
            result = self._unobserved(given, *args, **kwargs)
            each(partial(after, call), *of_new_state)
            ordered(ready, end, call)
            return result

        def construct(self: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
            if _COMPILED:  # @jit.cond: True
                function, slots = step_of()
                return function(self, gradients, args, kwargs, slots)
            return call_from_python(self, (gradients, *args), kwargs)

        return lambda _by_itself: construct

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def positions(count: int) -> Any:
        return tuple(range(count))

    def spans_of(count: int) -> list[tuple[int, int]]:
        return [(first, min(first + TOGETHER, count)) for first in range(0, count, TOGETHER)]

    return Functions(of_cell, of_parameter, of_optimizer)
