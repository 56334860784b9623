"""Measures tensors on a CPU by an operator in C, which MindSpore runs in order with all its other operators.

Reading a tensor from Python waits for the operation that computes it, and Python prepares no further operations meanwhile. The
operator is called like MindSpore's own instead. It sees the elements that the next operation would see, and compiled code can
call it, too. Its measurements are entries of a ``Tape``, in the order in which they were made.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops
from numpy.typing import NDArray

from monitor.failures import LOGGER, EarlierFailure
from monitor.stats.histograms import BINS
from monitor.stats.host.array_kernel import NumpyKernel, Raw, count_magnitudes, is_wanted
from monitor.stats.mindspore.tensors import as_given, finish_all, on_host
from monitor.stats.ops import Epsilon
from monitor.stats.partials import COLUMNS, Floats

try:
    from monitor.mindspore import _tape
    from monitor.stats import _host_kernel
except ImportError:
    _tape = None  # type: ignore[assignment]

MARK: Final[int] = 0 if _tape is None else _tape.MARK
"""The flag of entries without measurements."""


_MOST_DIMENSIONS: Final = 32
"""The most that numpy 1 has, and so MindSpore's ``asnumpy``."""

_ENTRY: Final = np.dtype(
    [
        ("id", np.int64),
        ("flags", np.int64),
        ("state", np.int64),
        ("format", np.int64),
        ("dimensions", np.int64),
        ("shape", np.int64, _MOST_DIMENSIONS),
        ("number", np.int64),
        ("call", np.int64),
        ("site", np.int64),
        ("more", np.int64),
        ("row", np.float64, len(COLUMNS)),
    ]
)

_FIELDS: Final = ["format", "dimensions", "shape"]
_LAYOUT: Final = np.dtype([("format", np.int64), ("dimensions", np.int64), ("shape", np.int64, _MOST_DIMENSIONS)])
_NAMES: Final = {"bool": "bool_"}
"""The dtypes that ``mindspore`` has under another name."""


NO_TAPE: Final = -1
MOST_COPIED: Final = 1 << 20
READERS: Final = 16
"""The operators ``read`` that slots share: see ``ReadSlot``."""

Layout = tuple[tuple[int, ...], str]
"""The shape of a tensor, and MindSpore's name of its dtype, such as ``float32``."""


@dataclass(frozen=True, slots=True)
class Measurements:
    """Entries of a tape, in the order in which they were made.

    Attributes:
        ids: The ids of their slots, shape ``(entries,)``.
        rows: Their partials, shape ``(entries, len(COLUMNS))``.
        histograms: Their histograms of magnitudes, float64, shape ``(entries, BINS)``; None if none are counted.
        layouts: The different layouts of their tensors.
        layout: The index of each entry's layout, shape ``(entries,)``.
        copied: The ids of tensors of which more than ``MOST_COPIED`` bytes were copied.
        numbers: What ``follow`` has returned for each entry, shape ``(entries,)``; 0 for ``read``.
        calls: The argument ``call`` of ``follow``, likewise.
        sites: The place of the operator in compiled code, likewise: operators of one graph have rising numbers, each after
            those that it depends on. 0 if it is not known.
        flags: The flags of their slots, shape ``(entries,)``.
        dropped: The number of the last entry that was dropped because too many forwards had no backward; 0 if none was.
    """

    ids: NDArray[np.int64]
    rows: Floats
    histograms: Floats | None
    layouts: Sequence[Layout]
    layout: NDArray[np.int64]
    copied: frozenset[int]
    numbers: NDArray[np.int64]
    calls: NDArray[np.int64]
    sites: NDArray[np.int64]
    flags: NDArray[np.int64]
    dropped: int


@dataclass(frozen=True, slots=True)
class TapedTensor:
    """A tensor that compiled code has measured, as collectors pass it on.

    Attributes:
        row: Its partials, shape ``(len(COLUMNS),)``.
        histogram: Its histogram of magnitudes, shape ``(BINS,)``; None if none are counted.
        dtype: MindSpore's name of its dtype, such as ``float32``.
        has_init: True, as for parameters without data: only its row can be read.
    """

    row: Floats
    histogram: Floats | None
    shape: tuple[int, ...]
    dtype: str
    has_init: bool = True

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@cache
def read_operators() -> Sequence[Any]:
    """Equal operators ``read(x, slot)``, which return an int32 tensor of one element without meaning. Empty if they cannot be
    used.

    They are missing if there was no compiler when the package was built, on other devices than a CPU, and if the environment
    allows other libraries only (``MS_CUSTOM_AOT_WHITE_LIST``).
    """
    first = _operator("read_tensor")
    if first is None:
        return ()
    return first, *(_custom("read_tensor", ms.int32).add_prim_attr("place", place) for place in range(1, READERS))


COMPILED_VARIABLE: Final = "MONITOR_COMPILED_CODE"
"""The environment variable with which all of MindSpore's compiled code is recorded, if it is 1, and none if it is 0.

With ``BY_OPERATIONS``, MindSpore's own operations measure in steps that are compiled as a whole. Otherwise whole graphs
(``GRAPH_MODE``) are recorded if that changes no computation (``compiled.fallback``).
"""
BY_OPERATIONS: Final = "operations"
ON_REQUEST: Final = f"on a CPU set {COMPILED_VARIABLE}=1, which may change last bits of training"
"""What to do to have compiled code recorded, for messages."""


def refuse_unknown_values() -> None:
    """Check the environment variable, before anything is attached.

    Raises:
        ValueError: It has a value without a meaning.
    """
    value = os.environ.get(COMPILED_VARIABLE, "")
    if value not in ("", "0", "1", BY_OPERATIONS):
        raise ValueError(
            f"{COMPILED_VARIABLE} is {value!r}: 1 records all of MindSpore's compiled code, 0 none, and {BY_OPERATIONS} "
            "whole steps on any device, slowly. Unset it to record whole graphs where that changes no computation."
        )


def changes_are_accepted() -> bool:
    """Whether code may be recorded that has other last bits then."""
    return os.environ.get(COMPILED_VARIABLE) in ("1", BY_OPERATIONS)


def compiled_code_is_excluded() -> bool:
    """Whether the user wants no compiled code recorded."""
    return os.environ.get(COMPILED_VARIABLE) == "0"


def could_be_measured() -> bool:
    """Whether the operator for compiled code can be used, if the user wants it."""
    return _follow() is not None and not operations_are_used()


def follow_operator() -> Any:
    """The operator ``follow(x, slot, call)``, for compiled code. Its entry has the number ``call``, int64 of shape ``(1,)``,
    and a number of its own, which it returns likewise. See ``read_operators``. None if it measures no compiled code now.
    """
    whole = ms.get_context("mode") == ms.GRAPH_MODE and not compiled_code_is_excluded()
    return _follow() if could_be_measured() and (whole or changes_are_accepted()) else None


def operations_are_used() -> bool:
    """Whether MindSpore's own operations measure in compiled code, in place of the operator in C."""
    return os.environ.get(COMPILED_VARIABLE) == BY_OPERATIONS


def whole_steps_are_measured() -> bool:
    """Whether activations and gradients are measured in steps that are compiled as a whole."""
    return follow_operator() is not None or operations_are_used()


@cache
def _follow() -> Any:
    return _operator("follow_tensor", ms.int64, Tensor(np.array([0], dtype=np.int64)))


@cache
def ordered_follow_operator() -> Any:
    """``follow`` in the order of the program. A compiler keeps it even if its result is not used."""
    found = None if _follow() is None else _custom("follow_tensor", ms.int64)
    if found is not None:
        found.add_prim_attr("side_effect_io", True)
    return found


@cache
def follow_all_operators() -> tuple[Any, Any]:
    """``follow_all(x, …, slots, call)``, and the same in the order of the program: ``follow`` for many tensors, whose slots are
    the rows of ``slots``. It returns ``call``. MindSpore compiles it in the time of one ``follow``.
    """
    if _follow() is None:
        return None, None
    return _custom("follow_tensors", ms.int64), _custom("follow_tensors", ms.int64).add_prim_attr("side_effect_io", True)


UNJOINED: Final = "side_effect_hidden"
"""The attribute of operators that a compiler does not join."""


@cache
def numbering_operator() -> Any:
    """``follow`` for calls that begin, and for gradients. A compiler does not join two of them, though they have the same
    arguments.
    """
    found = None if _follow() is None else _custom("follow_tensor", ms.int64)
    if found is not None:
        found.add_prim_attr(UNJOINED, True)
    return found


def _operator(function: str, dtype: Any = ms.int32, *others: Tensor) -> Any:
    if _tape is None or not is_wanted() or ms.get_context("device_target") != "CPU":
        return None
    try:
        operator = _custom(function, dtype)
        operator(Tensor(0.0, ms.float32), Tensor(np.array([NO_TAPE, 0, 0], dtype=np.int64)), *others).asnumpy()
    except Exception as error:
        LOGGER.info("The operator %s cannot be used, so reading tensors of MindSpore waits for them: %r", function, error)
        return None
    return operator


def _custom(function: str, dtype: Any) -> Any:
    operator = ops.Custom(f"{_tape.__file__}:{function}", (1,), dtype, "aot")
    # MindSpore asks for the shape in the middle of a call. If a signal handler raises in Python code there, as at Ctrl+C, the
    # process crashes later. This function runs no Python code: all keys are False, and ``min`` returns the first element.
    operator.__infer__ = partial(min, {"shape": (1,), "dtype": dtype, "value": None}, key=callable)
    return operator


def wait_for_turn(number: int) -> bool:
    """Wait until an entry with the flag ``turn`` is made on the tape of this number. False once the waiting was stopped."""
    try:
        ended: bool = _tape.wait_for_turn(number)
    except ValueError:  # the tape was closed
        return False
    return ended


class ReadSlot:
    """A slot of ``Tape.read``.

    MindSpore starts no operator before its last call with arguments of the same shapes and dtypes has run. So slots have one of
    several equal operators. Each is compiled for each shape, in 1 ms and 40 KiB. So tensors that have not the shape of
    the slot's first one share an operator.

    Attributes:
        arguments: The slot as the operator takes it.
    """

    __slots__ = ("_operator", "_shape", "arguments")

    def __init__(self, arguments: Tensor, place: int) -> None:
        self.arguments = arguments
        self._operator = read_operators()[place % READERS]
        self._shape: tuple[int, ...] | None = None

    def operator_for(self, x: Tensor) -> Any:
        if self._shape is None:
            self._shape = x.shape
        return self._operator if x.shape == self._shape else read_operators()[0]


class Tape:
    """The measurements of one recorder."""

    def __init__(self) -> None:
        self.number: int = _tape.open_tape()
        self._kernel = self._checking_kernel = NumpyKernel(0.0)
        self._magnitudes = False
        self._last: Tensor | None = None
        self._failed = False
        self.close = weakref.finalize(self, _tape.close_tape, self.number)

    def set_up(self, eps: float, *, higher: bool, check_sums: bool, magnitudes: bool) -> None:
        """Set what is measured of every tensor from now on. No operator may be waiting to be run."""
        narrow, wide = Epsilon.of(eps, np.float32).bound, Epsilon.of(eps, np.float64).bound
        wanted = higher * _host_kernel.HIGHER | check_sums * _host_kernel.CHECK_SUMS
        _tape.set_up(self.number, narrow, wide, wanted, magnitudes)
        self._magnitudes = magnitudes
        self._kernel = NumpyKernel(eps, higher=higher, check_sums=check_sums)
        self._checking_kernel = NumpyKernel(eps, higher=higher, check_sums=True)

    def bound(self, most: int) -> None:
        """Keep fewer than twice as many forwards that have no backward. The oldest are dropped."""
        _tape.bound(self.number, most)

    def rest(self) -> None:
        """Let gated slots make no entries, and another tape replace this one if there are too many."""
        _tape.rest(self.number)

    def wake(self) -> bool:
        """Whether the tape is still there, which then rests no more."""
        return _tape.wake(self.number)

    def turn(self, on: bool) -> None:
        """Set whether gated slots make entries."""
        _tape.turn(self.number, on)

    def slot(
        self,
        number: int,
        *,
        gated: bool = False,
        checked: bool = False,
        mark: bool = False,
        turn: bool = False,
        forward: bool = False,
        backward: bool = False,
    ) -> Tensor:
        """A slot for the operators: int64, shape ``(3,)``.

        Args:
            number: The id of its entries.
            gated: Whether it makes entries only while the tape is turned on.
            checked: Whether its tensors get check sums in any case.
            mark: Whether its entries hold no measurements. For ``follow`` only.
            turn: Whether each of its entries ends ``wait_for_turn``. For ``follow`` only.
            forward: Whether its entries begin a forward of the model, or its evaluation. For ``follow`` only.
            backward: Whether its entries show that a forward has a backward. For ``follow`` only.
        """
        flags = gated * _tape.GATED | checked * _tape.CHECKED | mark * _tape.MARK | turn * _tape.TURN
        flags |= forward * _tape.FORWARD | backward * _tape.BACKWARD
        return Tensor(np.array([self.number, number, flags], dtype=np.int64))

    def stop_waiting(self) -> None:
        """End ``wait_for_turn``."""
        _tape.stop_waiting(self.number)

    def read(self, x: Tensor, slot: ReadSlot) -> None:
        """Measure a tensor with data. Does not wait for its elements.

        Raises:
            EarlierFailure: An earlier operation has failed.
        """
        try:
            with as_given():
                self._last = slot.operator_for(x)(x, slot.arguments)
        except Exception as error:  # the operator itself was tried when it was made
            self._failed = True
            raise EarlierFailure(error) from error

    def wait(self) -> None:
        """Wait until all calls of ``read`` so far have made their entries.

        Raises:
            EarlierFailure: An earlier operation has failed.
        """
        last, failed = self._last, self._failed
        self._last, self._failed = None, False
        try:
            if failed:  # MindSpore may run the call of ``read`` that raised
                finish_all()
            elif last is not None:
                on_host(last)
        except EarlierFailure:
            with suppress(EarlierFailure):  # an error is raised at once, while earlier operations are still running
                finish_all()
            raise

    def drain(self) -> Measurements:
        """Take all entries. Tensors that cannot be read have none."""
        taken, asides, dropped = _tape.drain(self.number)
        entries = np.frombuffer(taken, dtype=_ENTRY)
        more = dict(zip(np.flatnonzero(entries["more"]).tolist(), asides, strict=True))
        set_aside = {place: one for place, one in more.items() if entries["state"][place] == _tape.SET_ASIDE}
        copied = {int(entries["id"][place]) for place, one in set_aside.items() if len(one) > MOST_COPIED}
        rows = entries["row"].copy()
        for place, elements in set_aside.items():
            self._reduce(entries[place], rows, place, elements)
        known = entries["state"] <= _tape.SET_ASIDE
        histograms = self._histograms(entries, more)[known] if self._magnitudes else None
        layouts, layout = np.unique(_layouts(entries[known]), return_inverse=True)
        names = [_layout(one) for one in layouts]
        number, call, site, flags = (entries[name][known] for name in ("number", "call", "site", "flags"))
        ids, rows = entries["id"][known], rows[known]
        return Measurements(ids, rows, histograms, names, layout, frozenset(copied), number, call, site, flags, dropped)

    def _histograms(self, entries: NDArray[Any], more: Mapping[int, bytes]) -> Floats:
        """The histogram of each entry, shape ``(entries, BINS)``; zeros for marks."""
        found = np.zeros((len(entries), BINS))
        for place, one in more.items():
            if entries["state"][place] == _tape.SET_ASIDE:
                counts = count_magnitudes(_elements(entries["format"][place], one))
                found[place] = 0 if counts is None else counts
            else:
                found[place] = np.frombuffer(one)
        return found

    def _reduce(self, entry: Any, rows: Floats, place: int, elements: bytes) -> None:
        """Fill in the row of a tensor whose elements were set aside."""
        kernel = self._checking_kernel if entry["flags"] & _tape.CHECKED else self._kernel
        kernel.reduce_into(_elements(entry["format"], elements), rows, place)


def _layouts(entries: NDArray[Any]) -> NDArray[np.void]:
    """The layout of each entry as raw memory, which can be sorted."""
    fields: Any = _FIELDS
    return np.ascontiguousarray(entries[fields].astype(_LAYOUT)).view(np.dtype((np.void, _LAYOUT.itemsize)))


def _layout(raw: np.void) -> Layout:
    found = np.frombuffer(raw.tobytes(), dtype=_LAYOUT)[0]
    return tuple(found["shape"][: found["dimensions"]].tolist()), _tape.DTYPES[found["format"]]


def _elements(place: int, elements: bytes) -> Raw:
    """The elements of a tensor, shape ``(elements,)``, as MindSpore would share them with numpy."""
    name = _tape.DTYPES[place]
    return np.frombuffer(elements, dtype=ms.dtype_to_nptype(getattr(ms, _NAMES.get(name, name))))


def new_tape() -> Tape | None:
    """A tape; None if the operators cannot be used, or if too many tapes are in use."""
    if not read_operators():
        return None
    try:
        return Tape()
    except RuntimeError:
        return None
