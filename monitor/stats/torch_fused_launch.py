"""Launching a compiled kernel at the cost of little more than the driver's call.

Triton's own launch finds out the type and the alignment of every argument, and looks up what was compiled for them: tens of
microseconds each time. Here all that is known once a variant has been launched: arguments are whole numbers of fixed types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Driver:
    """What a launch has to know of a device.

    Attributes:
        device: The current device's number.
        stream: The handle of a device's current stream.
        capturing: Whether the current stream's work is being recorded to be run later.
        on: Makes a device the current one.
        warp: Threads that a device runs in step.
    """

    device: Callable[[], int]
    stream: Callable[[int], int]
    capturing: Callable[[], bool]
    on: Callable[[int], Any]
    warp: int = 32


class Launch:
    """One variant of a kernel, on one device.

    Args:
        function: The kernel, ``@triton.jit``.
        constants: Its constants, which follow its other arguments.
    """

    def __init__(self, function: Any, constants: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._function = function
        self._constants = dict(constants)
        self._options = dict(options)
        self._values = tuple(constants.values())
        self._run: Callable[..., object] | None = None
        self._handle: tuple[Any, Any] = (None, None)

    @property
    def ready(self) -> bool:
        """Whether it has run before: nothing is compiled any more."""
        return self._run is not None

    def __call__(self, programs: int, stream: int, *arguments: float) -> None:
        """With ``programs`` programs, in ``stream``, which is the current one. Does not wait."""
        if self._run is None:
            self._first(programs, arguments)
        else:
            function, packed = self._handle
            self._run(programs, 1, 1, stream, function, packed, None, None, None, *arguments, *self._values)

    def _first(self, programs: int, arguments: tuple[float, ...]) -> None:
        """Triton's own launch, which compiles. What it returns is launched from then on, where it is what is known here."""
        compiled = self._function[(programs, 1, 1)](*arguments, **self._constants, **self._options)
        try:
            self._handle = (compiled.function, compiled.packed_metadata)
            self._run = compiled.run
        except AttributeError:  # the interpreter, or a Triton that has changed: the ordinary launch each time
            self._run = None
