"""Has compiled code copy the gradients that optimizers are given, for Python to read them afterwards.

Gradients exist only during an execution. So the attribute ``construct`` of an optimizer, which the compiler reads, assigns each
recorded gradient to a Parameter before the step. The operator in C is not needed. Copies take the memory of the gradients, and
may change last bits of training: with weight decay, where calls share weights. So they are made on request only.
"""
# ruff: noqa: ARG001

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, Final

import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore._c_expression import typing
from mindspore.ops import constexpr, functional as F
from mindspore.ops.composite import Map

from monitor.failures import Failures
from monitor.mindspore.autograd import recording
from monitor.mindspore.compiled.constructs import Construct, call_from_python, install, is_installed, uninstall
from monitor.mindspore.compiled.fallback import Fallback
from monitor.mindspore.hooks import is_exporting

_COMPILED: Final = False
"""False in Python. The compiler reads True from a comment at its use."""

_MARK: Final = "_monitored_gradient"
"""The attribute of a copy that names the optimizer, and the index of the gradient."""

SUMMED: Final = "_monitored_sum"
"""The attribute of a copy with the groups of ranks over which the gradient was summed; None if it was not."""

_NUMBERS: Final = count()
"""Parameters of compiled code need different names."""

SHAPES: Final = (
    "Compiled code has gradients of dynamic shape. They are not copied, and have no rows of grad_reduced. Compile with fixed "
    "shapes to record them."
)


class GradientCopies:
    """Makes compiled code copy gradients, unless MindSpore does not compile it then.

    Args:
        optimizers: Each optimizer with a function that returns the index of a parameter in it.
        recorded: Returns the parameters whose gradients are recorded.
    """

    def __init__(
        self,
        optimizers: Sequence[tuple[nn.Cell, Callable[[Parameter], int | None]]],
        recorded: Callable[[], Iterable[Parameter]],
        failures: Failures,
    ) -> None:
        self.failures = failures
        self.fallback = Fallback(self)
        self._optimizers = [(weakref.ref(optimizer), place) for optimizer, place in optimizers]
        self._recorded = recorded
        self._copies: dict[tuple[Any, ...], Callable[[Any], Any]] = {}
        self._construct = _construct_of(self)
        for number in range(1, len(optimizers) + 1):
            self._install(number)
        self.fallback.begin()

    def remove(self) -> None:
        """Leave the optimizers as they were. Compiled code still copies."""
        self.fallback.end()
        for _ in self.take_out():
            pass

    def take_out(self) -> Iterator[Callable[[], None]]:
        """Have code compiled without copies. Returns functions that undo it."""
        for number, (known, _) in enumerate(self._optimizers, 1):
            optimizer = known()
            if optimizer is not None and is_installed(optimizer, self):
                uninstall(optimizer)
                yield partial(self._install, number)

    def _install(self, number: int) -> None:
        optimizer = self._optimizers[number - 1][0]()
        if optimizer is not None and self.fallback.has_taps:
            install(optimizer, number, lambda _by_itself: self._construct, self)

    def turn(self, *, on: bool) -> None:
        """Nothing to do: only copies of this monitor's code are read."""

    def warn(self, key: str, said: str) -> None:
        self.failures.nothing_of(key, said)

    def compiled(self, executor: Any, phase: str, others: Sequence[Any]) -> None:
        """Nothing to do: the parameters of the code show whether it copies."""

    def positions(self, number: int, gradients: int) -> tuple[int, ...]:
        """The index of each gradient that an optimizer is given; -1 if it is not recorded.

        Args:
            number: The number of the optimizer, from 1; 0 for a copy of an optimizer.
        """
        if not number or recording() or is_exporting():
            return (-1,) * gradients
        _, place = self._optimizers[number - 1]
        recorded = {place(parameter) for parameter in self._recorded()}
        return tuple(at if at in recorded else -1 for at in range(gradients))

    def copying(self, number: int, position: int, kind: Any, shape: Sequence[int] | None) -> Callable[[Any], Any] | None:
        """The function that copies a gradient; None if that is not recorded, or has no fixed shape."""
        if position < 0:
            return None
        if shape is None or any(size is None or size < 0 for size in shape):
            self.warn("shapes of grad_reduced", SHAPES)
            return None
        self.fallback.takes_part = True
        key = number, position, str(kind), tuple(shape)
        if key not in self._copies:
            zeros = Tensor(np.zeros(tuple(shape), np.float32), kind.element_type())
            made = Parameter(zeros, name=f"monitor.gradient.{next(_NUMBERS)}", requires_grad=False)
            setattr(made, _MARK, (self._optimizers[number - 1][0], position))
            self._copies[key] = _copying_to(made)
        return self._copies[key]


def copies_in(parameters: Iterable[Parameter], optimizer: nn.Cell) -> Sequence[Parameter | None]:
    """The copies of an optimizer's gradients among the parameters of compiled code, in the order of the gradients."""
    found: dict[int, Parameter] = {}
    for one in parameters:
        known, position = getattr(one, _MARK, (None, 0))
        if known is not None and known() is optimizer:
            found[position] = one
    return [found.get(position) for position in range(max(found, default=-1) + 1)]


# --- What MindSpore compiles. Functions marked ``constexpr`` run in Python, while it compiles.


def _copying_to(copy: Parameter) -> Callable[[Any], Any]:
    assign = ops.Assign()
    depend = ops.Depend()

    def copying(x: Any) -> Any:
        return depend(x, assign(copy, x))

    return copying


def _construct_of(copies: GradientCopies) -> Construct:  # noqa: C901 (closures, as in ``taps``)
    """The ``construct`` of optimizers."""
    known: Any = weakref.ref(copies)
    shape_of, typeof, each, partial = ops.Shape(), F.typeof, Map(), F.partial

    def as_given(x: Any) -> Any:
        return x

    def each_as_given(number: int, gradients: Any) -> Any:
        return gradients

    def copy_each(number: int, gradients: Any) -> Any:
        return each(partial(copy_one, number), gradients, positions_of(number, len(gradients)))

    def copy_one(number: int, x: Any, position: int) -> Any:
        return function_for(typeof(x))(number, x, position)

    def copy_tensor(number: int, x: Any, position: int) -> Any:
        return copying_of(number, position, typeof(x), shape_of(x))(x)

    def leave(number: int, x: Any, position: int) -> Any:
        return x

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def positions_of(number: int, gradients: int) -> Any:
        living = known()
        return living.positions(number, gradients) if living else (-1,) * gradients

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def function_for(kind: Any) -> Any:
        return copy_tensor if isinstance(kind, typing.TensorType) else leave

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def function_for_all(kind: Any) -> Any:
        return copy_each if isinstance(kind, (typing.Tuple, typing.List)) else each_as_given

    @constexpr(check=False)  # type: ignore[untyped-decorator]
    def copying_of(number: int, position: int, kind: Any, shape: Any) -> Any:
        living = known()
        return (living and living.copying(number, position, kind, shape)) or as_given

    def construct(self: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        if _COMPILED:  # @jit.cond: True
            function = function_for_all(typeof(gradients))
            return self._unobserved(function(self._monitored_as, gradients), *args, **kwargs)
        return call_from_python(self, (gradients, *args), kwargs)

    return construct
