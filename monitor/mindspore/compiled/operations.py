"""Measures in compiled code by MindSpore's own operations, in place of the operator in C, which devices do not run.

They reduce a tensor to piece rows in float32 (``monitor.stats.mindspore.kernels``), and add these to a ``ParameterTape``. Only
steps that are compiled as a whole are measured, on request: it is slow.
"""
# ruff: noqa: ARG001, ARG002

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore._c_expression import typing
from mindspore.ops import constexpr, functional as F

from monitor.mindspore.autograd import recording
from monitor.mindspore.compiled import roles
from monitor.mindspore.compiled.parameter_tape import BLOCK, HEAD, ParameterTape, layout_of, pieces_of, run_of
from monitor.mindspore.tape import BY_OPERATIONS, COMPILED_VARIABLE, Layout
from monitor.stats.mindspore.kernels import PIECE_COLUMNS
from monitor.stats.ops import Epsilon

if TYPE_CHECKING:
    from monitor.mindspore.compiled.program import Program, Tap

UNAVAILABLE: Final = (
    f"With {COMPILED_VARIABLE}={BY_OPERATIONS}, compiled code measures no higher moments, checksums and histograms. So it has "
    "no rows of activations, their gradients and grad_unreduced. Take such statistics out of ops to record them."
)
PARTS: Final = (
    f"With {COMPILED_VARIABLE}={BY_OPERATIONS}, parts of the dynamic graph that are compiled (@jit) have no rows. Take @jit "
    "off, or compile the whole step, to record them."
)


class ByOperations:
    """What MindSpore's operations measure of one program.

    Attributes:
        tape: Receives it; None while it is not known what is recorded, or if the operations cannot measure it.
        functions: What writes to the tape; None likewise.
    """

    def __init__(self, program: Program) -> None:
        self._known = weakref.ref(program)
        self._eps: float | None = None
        self.tape: ParameterTape | None = None
        self.functions: Operations | None = None

    def set_up(self, eps: float, *others: bool) -> None:
        """Set what is measured in code that is compiled from now on.

        Args:
            others: Whether statistics are recorded that the operations do not measure.
        """
        self.tape = self.functions = None
        self._eps = None if any(others) else eps

    def can_measure(self) -> bool:
        """Whether code that is compiled now is measured. Parts of the dynamic graph are not: MindSpore could not differentiate
        them.
        """
        program = self._known()
        if program is None:
            return False
        if recording():
            program.warn("parts of the dynamic graph", PARTS)
            return False
        self.make()
        if self._eps is None:
            program.warn("measuring actv, actv_grad and grad_unreduced in compiled code", UNAVAILABLE)
        return self.functions is not None

    def make(self) -> None:
        """Make the tape, once the cells and parameters of the program are known."""
        program = self._known()
        if program is None or self._eps is None or self.functions is not None:
            return
        roots = program.roots()
        sizes = [one.size for root in roots for one in root.get_parameters()]
        self.tape = ParameterTape(sum(1 for root in roots for _ in root.cells_and_names()), sizes, program.inside, program.warn)
        self.functions = operations_of(self.tape, self._eps)

    def slot(self, number: int, tap: Tap, layout: Layout | None) -> Tensor | None:
        """What the operations write of a tensor (``ParameterTape.site``).

        Args:
            number: The id of the tap's entries.
        """
        of_parameter = tap.role == roles.PARAMETER
        layout = layout if of_parameter or tap.role in tap.owner.roles else None
        cell = 0 if of_parameter else tap.owner.number
        found = None if self.tape is None else self.tape.site(number, cell, tap.role, layout)
        program = self._known()
        if found is None and program is not None:
            program.lacks("room")
        return found


class Operations(NamedTuple):
    """Functions for the compiler.

    Attributes:
        begin: ``begin(x, slot, call)`` begins a call, and returns it: int64, shape ``(1,)``.
        begin_marked: The same, and marks it by an entry.
        follow: ``follow(x, slot, call)`` measures a tensor, and returns the call. It is not differentiated.
        mark: The same without measurements.
        write, write_mark: The same inside a backward.
    """

    begin: Any
    begin_marked: Any
    follow: Any
    mark: Any
    write: Any
    write_mark: Any


def operations_of(tape: ParameterTape, eps: float) -> Operations:
    """The functions that write to a tape.

    Args:
        eps: The bound of elements that count as zeros.
    """
    reduce = _reducing(eps)
    table, counter = tape.rows, tape.counter
    scatter, assign_add, depend = ops.ScatterAdd(), ops.AssignAdd(), ops.Depend()
    cast, concat, reshape = ops.Cast(), ops.Concat(1), ops.Reshape()
    tile, floormod = ops.Tile(), ops.FloorMod()
    block, ring = Tensor(np.array([BLOCK])), Tensor(np.array([tape.ring]))
    empty = Tensor(np.zeros((1, PIECE_COLUMNS), np.float32))

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def places_of(count: int) -> Tensor:
        return Tensor(np.arange(count))

    def add(rows: Any, slot: Any, call: Any, count: int) -> Any:
        place = call + cast(slot[2:3], ms.int64) + places_of(count)
        head = tile(reshape(slot, (1, HEAD)), (count, 1))
        return depend(call, scatter(table, place, concat((head, rows))))

    def write(x: Any, slot: Any, call: Any) -> Any:
        rows, count = reduce(x)
        return add(rows, slot, call, count)

    def write_mark(x: Any, slot: Any, call: Any) -> Any:
        return add(empty, slot, call, 1)

    def begin(x: Any, slot: Any, call: Any) -> Any:
        return floormod(assign_add(counter, block), ring)

    def begin_marked(x: Any, slot: Any, call: Any) -> Any:
        return write_mark(x, slot, begin(x, slot, call))

    apart = _Undifferentiated
    return Operations(apart(begin), apart(begin_marked), apart(write), apart(write_mark), write, write_mark)


class _Undifferentiated(nn.Cell):  # type: ignore[misc]
    """A function that has no gradient: MindSpore knows none of ``ScatterAdd`` in loops."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def construct(self, x: Any, slot: Any, call: Any) -> Any:
        return self.function(x, slot, call)

    def bprop(self, x: Any, slot: Any, call: Any, out: Any, dout: Any) -> Any:
        return ops.zeros_like(x), ops.zeros_like(slot), ops.zeros_like(call)


def gradient_is_measured(program: Program | None, number: int, kind: Any) -> bool:
    """Whether a parameter's gradient of this type is measured, whatever measures it. Sparse ones are not."""
    if program is None or not program.arrives(number):
        return False
    if not isinstance(kind, typing.TensorType):
        program.lacks("sparse")
        return False
    return True


def hook_by_operations(known: Callable[[], Program | None], number: int, write: Callable[..., Any]) -> Callable[[Any], Any]:
    """The hook of a parameter, which measures its gradient.

    The hook itself names the function that writes: MindSpore does not find the Parameters of one that it is given.
    """
    depend, typeof, shape_of, none = ops.Depend(), F.typeof, ops.Shape(), Tensor(np.array([0], dtype=np.int64))

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def is_measured(kind: Any) -> bool:
        return gradient_is_measured(known(), number, kind)

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def slot_of(kind: Any, shape: Any) -> Any:
        program = known()
        if program is None or not program.has_fixed(shape, gradient=True):
            return None
        layout = layout_of(kind, shape)
        if layout is None:
            program.lacks("layout")
            return None
        return program.slot_of_operations(number, roles.PARAMETER, layout=layout)

    def hook(gradient: Any) -> Any:
        if is_measured(typeof(gradient)):
            slot = slot_of(typeof(gradient), shape_of(gradient))
            if slot is not None:
                return depend(gradient, write(ops.stop_gradient(gradient), slot, none))
        return gradient

    return hook


_STEP: Final = 50
"""Exponent steps of the scaling, as in the kernel of devices."""


def _reducing(eps: float) -> Callable[[Any], Any]:
    """The piece rows of a tensor, float32, shape ``(pieces, PIECE_COLUMNS)``, and their number; of few operations: each is
    compiled anew for each tensor. Higher moments are zeros. See ``MindSporeDeviceKernel``.
    """

    def constant(number: Any) -> Tensor:
        return Tensor(np.array(number, np.float32))

    one, zero, inf = constant(1), constant(0), constant(math.inf)
    lowest, bound = constant(-math.inf), constant(Epsilon.of(eps, np.float32).bound)
    steps = np.arange(-2, 3) * _STEP
    limits = constant(2.0 ** (np.array([-1.5, -0.5, 0.5, 1.5]) * _STEP))
    scales = constant(np.stack([steps, 2.0**-steps], 1))
    cast, reshape, finite_in, where = ops.Cast(), ops.Reshape(), ops.IsFinite(), ops.Select()
    sum_of, least, most = ops.ReduceSum(True), ops.ReduceMin(True), ops.ReduceMax(True)
    greater, less, equal, differ = ops.Greater(), ops.Less(), ops.Equal(), ops.NotEqual()
    magnitude, square, divide, larger = ops.Abs(), ops.Square(), ops.RealDiv(), ops.Maximum()
    concat, gather, float32, full, shape_of = ops.Concat(1), ops.Gather(), ms.float32, ops.ZerosLike(), ops.Shape()

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def plan_of(shape: Any) -> Any:
        """The number of pieces, the function that adds one up, and the shape of its runs."""
        pieces, size = pieces_of(shape), math.prod(shape)
        run = run_of(size // pieces)
        runs = size // pieces // run
        return pieces, add_at_once if runs == 1 else add_runs, (pieces, runs, run)

    def add_at_once(v: Any, runs: Any) -> Any:
        return sum_of(v, 1)

    def add_runs(v: Any, runs: Any) -> Any:
        return sum_of(reshape(sum_of(reshape(v, runs), 2), runs[:2]), 1)

    def rows(x: Any) -> Any:
        pieces, add, runs = plan_of(shape_of(x))

        def add_up(which: Any) -> Any:
            return add(which, runs)

        def count(which: Any) -> Any:
            return add(cast(which, float32), runs)

        v = reshape(cast(x, float32), (pieces, -1))
        finite, nothing = finite_in(v), full(v)
        n = count(finite)
        kept = where(finite, v, nothing)
        lo, hi = least(where(finite, v, nothing + inf), 1), most(where(finite, v, nothing + lowest), 1)
        step = sum_of(cast(greater(most(magnitude(kept), 1), limits), float32), 1)
        scale = gather(scales, reshape(cast(step, ms.int32), (pieces,)), 0)
        exponent, scaled = scale[:, 0:1], kept * scale[:, 1:2]
        total, at_least_one = add_up(scaled), larger(n, one)
        mean = divide(total, at_least_one)
        off = where(finite, scaled - mean, nothing)
        rest = add_up(off)
        m2 = larger(add_up(square(off)) - divide(square(rest), at_least_one), zero)
        smalls, none = count(less(magnitude(v), bound)), n * zero
        counts = (n, count(differ(v, v)), count(equal(v, inf)), count(equal(v, lowest)), smalls)
        sums = (total, add_up(square(scaled)), m2, none, none, none, none, exponent)
        return concat((*counts, lo, hi, *sums, none, none, mean, rest, none)), pieces

    return rows
