"""MindSpore's implementation of the precision dump's adapter interface ``monitor.dump.backend``."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import mindspore as ms
import numpy as np
from mindspore import Tensor, communication, mint, nn, ops
from mindspore.ops import constexpr
from numpy.typing import NDArray

from monitor.dump.backend import ApiListener, replace_everywhere, seed_python
from monitor.dump.values import HostRow, KernelResult, TensorLeaf
from monitor.failures import EarlierFailure, Failures
from monitor.mindspore import autograd, hooks
from monitor.mindspore.autograd import engine
from monitor.mindspore.dump.apis import MindSporeApiInterception
from monitor.mindspore.hooks import before_forward, takes_hooks
from monitor.mindspore.modules import compiled, observable
from monitor.mindspore.process_group import initialized
from monitor.mindspore.tensor_reader import TENSOR_PATHS, computing
from monitor.recording.arguments import chunks_of
from monitor.recording.backend import Autograd, Removable
from monitor.stats.host.array_kernel import NumpyKernel, Raw, is_readable
from monitor.stats.mindspore.kernels import MindSporeDeviceKernel, combined
from monitor.stats.mindspore.tensors import beneath, has_data, on_host, on_the_host
from monitor.stats.partials import Floats

# --- Read tensors for a dump.
#
# On a host, tensors share memory with numpy. A tensor is reduced when it is read, which waits for the operation that computes
# it, and copied if its elements are needed. On a device, the kernel's rows stay there until the writer needs them.

EPS: Final = 0.0
"""No element counts as small."""

_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class MindSporeDumpReader:
    """Reads a tensor each time it appears, since in-place changes between two readings cannot be detected."""

    def __init__(self, *, checksums: bool) -> None:
        self._checksums = checksums
        self._kernel = NumpyKernel(EPS)
        self._device_kernel = None if on_the_host() else MindSporeDeviceKernel(EPS)

    def leaf(self, x: Tensor, file: str | None) -> TensorLeaf:
        described, readable = _described(x)
        if not readable:
            return TensorLeaf(described, None, None, None)
        wanted = file is not None or self._checksums
        array = on_host(x) if wanted or self._device_kernel is None else None
        copy = _Copied(array) if wanted and array is not None else None
        return TensorLeaf(described, self._reading(x, array), copy, file)

    def _reading(self, x: Tensor, array: Raw | None) -> KernelResult | None:
        if array is not None:
            return HostRow(self._kernel.reduce(array)) if is_readable(array) else None
        assert self._device_kernel is not None
        # ``beneath`` would convert float64 to float32.
        with computing() if x.dtype == ms.float64 else beneath():
            rows = self._device_kernel.reduce(x)
        return None if rows is None else _DeviceRow(rows)


def _described(x: Tensor) -> tuple[dict[str, Any], bool]:
    """The description, and whether the tensor has elements. Asking may wait, and raise an earlier error of training."""
    try:
        return {"type": "mindspore.Tensor", "dtype": str(x.dtype), "shape": list(x.shape)}, has_data(x)
    except Exception as error:
        raise EarlierFailure(error) from error


class _DeviceRow:
    """The future result of the device's kernel."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    def row(self) -> Floats:
        return combined(on_host(self._rows))


class _Copied:
    """A copy in host memory, since an optimizer overwrites the tensor in place."""

    def __init__(self, array: Raw) -> None:
        self.dtype = array.dtype.name if array.dtype.kind == "V" else None
        bits = array if self.dtype is None else array.view(_UNSIGNED[array.dtype.itemsize])
        self._copy: NDArray[Any] = bits.copy()
        self.nbytes = self._copy.nbytes

    def array(self) -> NDArray[Any]:
        return self._copy


__all__ = [
    "after_forward",
    "backward_pass",
    "before_forward",
    "being_called",
    "compiled_of",
    "computing",
    "framework",
    "graph",
    "leaves",
    "models_of",
    "module_prefix",
    "modules_of",
    "new_interception",
    "new_reader",
    "on_parameter",
    "parameters_of",
    "rank",
    "refuse",
    "tensor",
    "traced",
]

framework: str = "mindspore"
module_prefix: str = "Cell"
tensor: type = Tensor
leaves = TENSOR_PATHS
graph: Autograd = autograd


def new_reader(*, checksums: bool) -> MindSporeDumpReader:
    return MindSporeDumpReader(checksums=checksums)


def new_interception(listener: ApiListener, api_list: str | None, *, primitives_of: Sequence[Any]) -> MindSporeApiInterception:
    return MindSporeApiInterception(listener, api_list, primitives_of)


def models_of(model: Any) -> Sequence[Any]:
    return chunks_of(model, nn.Cell, "mindspore.nn.Cell")


def modules_of(model: nn.Cell, failures: Failures) -> Iterable[tuple[str, nn.Cell]]:
    cells = observable(model)
    if cells.hiding:
        names = ", ".join(repr(name) if name else "the model" for name in cells.hiding)
        said = f"Cells inside {names} are compiled (@jit) and are not dumped: take @jit off to dump them."
        failures.warn(f"compiled cells {names}", said)
    below = [(name, cell) for name, cell in cells.cells if cell is not model]
    for name, cell in below:
        if not takes_hooks(cell):
            failures.warn(f"hooks of {name}", f"{name!r} is a {type(cell).__name__}, which takes no hooks: it is not dumped.")
    return [(name, cell) for name, cell in below if takes_hooks(cell)]


def after_forward(cell: nn.Cell, call: Callable[..., None], *, always: bool = False) -> Removable:
    return hooks.after_forward(cell, call, always=always, when_compiled=_warn_of_compiling)


@constexpr(check=False)  # type: ignore[untyped-decorator]
def _warn_of_compiling() -> None:
    """The compiler runs this in Python, since it evaluates constants when it compiles."""
    hooks.warn_of_compiled(_NOT_DUMPED)


_NOT_DUMPED: Final = (
    "Code that calls a cell is compiled (@jit), and MindSpore calls no hooks there: such cells are not dumped. Take @jit off "
    "to dump them."
)


def compiled_of(models: Sequence[nn.Cell]) -> frozenset[int]:
    return frozenset(
        id(cell) for model in models for _, cell in observable(model).cells if cell is not model and compiled(cell)
    )


def parameters_of(module: nn.Cell) -> Iterable[tuple[str, Tensor]]:
    """The parameters by attribute. Their own names may include those of enclosing cells, or be arbitrary."""
    own = {name: one for name, one in module._params.items() if one is not None}
    return own.items()


def on_parameter(parameter: Any, take: Callable[[Any], None]) -> Removable | None:
    if not parameter.requires_grad:
        return None
    handle: Removable = parameter.register_hook(take)
    return handle


def being_called() -> Sequence[int]:
    """The cells on this thread's stack."""
    found: list[int] = []
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Cell.__call__.__code__:
            found.append(id(frame.f_locals["self"]))
        frame = frame.f_back  # type: ignore[assignment]
    return found[::-1]


def backward_pass() -> int:
    return engine.current_pass()


def rank() -> int | None:
    """The rank from communication; before it is initialised, from the launcher."""
    if initialized():
        return int(communication.get_rank())
    announced = os.environ.get("RANK_ID", "")
    return int(announced) if announced.isdigit() else None


def refuse(level: str) -> None:
    if ms.get_context("mode") == ms.GRAPH_MODE:
        what = f"level {level} is not recorded in GRAPH_MODE: only the dump tools of an Ascend device can dump it"
        to_do = "Call mindspore.set_context(mode=mindspore.PYNATIVE_MODE) first, or record statistics with TrainerMon"
        raise ValueError(f"{what}. {to_do}.")


def traced() -> bool:
    """False: compiled cells call no hooks."""
    return False


# --- Fixed randomness, so that two runs can be compared.


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False) -> None:
    """Seed the generators of Python, numpy and MindSpore.

    Args:
        mode: Whether MindSpore computes deterministically, communication included. This is slower.
        rm_dropout: Whether to disable dropout from now on: in cells and primitives created later, and in every call of
            MindSpore's functions.

    Raises:
        ValueError: ``seed`` is no whole number from 0 to 2^32 - 1, numpy's limit.
        TypeError: ``mode`` or ``rm_dropout`` is neither True nor False.
    """
    seed_python(seed, mode=mode, rm_dropout=rm_dropout)
    ms.set_seed(seed)
    ms.manual_seed(seed)
    if mode:
        ms.set_context(deterministic="ON")
        os.environ["HCCL_DETERMINISTIC"] = "true"
    if rm_dropout:
        _disable_dropout()


CELLS: Final = tuple(
    getattr(place, name)
    for place, names in {
        nn: ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "DropoutExt", "Dropout2dExt"),
        mint.nn: ("Dropout", "Dropout2d"),
    }.items()
    for name in names
    if hasattr(place, name)
)
PRIMITIVES: Final = (ops.Dropout, ops.Dropout2D, ops.Dropout3D)
FUNCTIONS: Final = (
    *((ops, name) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d")),
    *((mint.nn.functional, name) for name in ("dropout", "dropout2d")),
)


def _disable_dropout() -> None:
    for kind in CELLS:
        _fix_probability(kind, p=0.0)
    for kind in PRIMITIVES:
        _fix_probability(kind, keep_prob=1.0)
    for place, name in FUNCTIONS:
        function = getattr(place, name, None)
        if function is not None and not getattr(function, "drops_nothing", False):
            replacement = _identity_in_place_of(function)
            for known in {name, function.__name__}:
                replace_everywhere("mindspore", known, function, replacement)


def _fix_probability(kind: type, **probability: float) -> None:
    """Create objects of a class with this probability from now on."""
    if getattr(kind.__init__, "drops_nothing", False):  # type: ignore[misc]
        return
    original = kind.__init__  # type: ignore[misc]

    def without(self: object, *_: object, **__: object) -> None:
        original(self, **probability)

    without.drops_nothing = True  # type: ignore[attr-defined]
    kind.__init__ = without  # type: ignore[misc]


def _identity_in_place_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns its input, in place of a dropout function."""

    def without(input: Any, *_: Any, **__: Any) -> Any:  # noqa: A002  # the argument's name is MindSpore's
        return input

    functools.update_wrapper(without, function, assigned=("__name__", "__qualname__", "__doc__", "__module__"), updated=())
    without.drops_nothing = True  # type: ignore[attr-defined]
    return without
