"""What PyTorch brings to the precision dump: see ``monitor.dump.backend``."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from monitor.dump.backend import ApiListener, replace_everywhere, seed_python
from monitor.dump.values import Copy, Leaf, Reading
from monitor.failures import Failures
from monitor.pytorch import calls
from monitor.pytorch.dump.apis import Interception, traced
from monitor.pytorch.hooks import after_forward, before_forward, takes_hooks
from monitor.pytorch.process_group import initialized
from monitor.pytorch.tensors import LEAVES, computing
from monitor.recording.backend import Graph
from monitor.recording.protocols import Removable, chunks_of
from monitor.stats.partials import COLUMNS, Floats
from monitor.stats.torch.dispatch import reduce_into
from monitor.stats.torch.host_kernel import TorchHostKernel
from monitor.stats.torch.tensors import beneath, has_memory, is_plain, local_shard, unseen

# --- Tensors of torch as a dump keeps them.
#
# A tensor in host memory is reduced where it is caught, and copied if its elements are wanted. Of one on a device the
# kernel's row and the elements are copied to pinned memory in the stream that computes, behind an event that the writer
# waits for.

_functorch: Final[Any] = torch._C._functorch

EPS: Final = 0.0
"""No element is counted as small."""

_OF_NUMPY: Final = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
)
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class Reader:
    """Reads tensors, each whenever it is met: what writes past torch's count of versions (a collective, a kernel of somebody's
    own) would go unseen if one was taken to be as it was.
    """

    def __init__(self, *, checksums: bool) -> None:
        self._checksums = checksums
        self._kernel = TorchHostKernel(EPS)

    def leaf(self, x: Tensor, file: str | None) -> Leaf:
        if _is_transformed(x):
            return Leaf(_described(x), None, None, None)
        with unseen():
            if file is None and not self._checksums and is_plain(x):
                return Leaf(_described(x), _HostRow(self._kernel.reduce(x)), None, None)  # most of them, on the shortest way
        with beneath():
            local = local_shard(x)
            if local is None or local.is_meta or not has_memory(local):
                return Leaf(_described(x), None, None, None)
            copy = _copied(local) if file is not None or self._checksums else None
            return Leaf(_described(x), self._read(local), copy, file)

    def _read(self, local: Tensor) -> Reading | None:
        if local.device.type == "cpu":
            row = self._kernel.reduce(local)
            return None if row is None else _HostRow(row)
        page = torch.zeros(1, len(COLUMNS), dtype=torch.float64, device=local.device)
        reduce_into(local, page, 0, None, EPS)
        return _DeviceRow(page)


def _is_transformed(x: Tensor) -> bool:
    """Whether ``torch.vmap`` or one of ``torch.func`` is at work: what is called then, ours too, is called of many tensors
    at once, or differentiated.
    """
    return _functorch.peek_interpreter_stack() is not None or _functorch.is_functorch_wrapped_tensor(x)


def _described(x: Tensor) -> dict[str, Any]:
    return {"type": "torch.Tensor", "dtype": str(x.dtype), "shape": list(x.shape), "requires_grad": x.requires_grad}


class _HostRow:
    """What the host's kernel has found."""

    __slots__ = ("_row",)

    def __init__(self, row: Any) -> None:
        self._row = row

    def row(self) -> Floats:
        found: Floats = self._row
        return found


class _Arriving:
    """A tensor on its way from a device."""

    def __init__(self, x: Tensor) -> None:
        self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._host.copy_(x, non_blocking=True)
        self._arrived = torch.accelerator.current_stream(x.device).record_event()

    def there(self) -> Tensor:
        self._arrived.synchronize()
        return self._host


class _DeviceRow:
    """What the device's kernel will have found. It was found when asked for first."""

    def __init__(self, page: Tensor) -> None:
        self._page = _Arriving(page)

    def row(self) -> Floats:
        found: Floats = self._page.there().numpy()[0]
        return found


class _Copied:
    """A copy in host memory, or on its way there."""

    def __init__(self, x: Tensor) -> None:
        self.dtype = _lacking(x.dtype)
        self.nbytes = x.nbytes
        self._shape = tuple(x.shape)
        self._copy = x.clone(memory_format=torch.contiguous_format) if x.device.type == "cpu" else _Arriving(x)

    def array(self) -> NDArray[Any]:
        x = self._copy.there() if isinstance(self._copy, _Arriving) else self._copy
        if self.dtype is None:
            plain: NDArray[Any] = x.numpy()
            return plain
        size = x.element_size()
        bits: NDArray[Any] = x.reshape(-1).view(_BITS[size]).numpy().view(_UNSIGNED[size])
        return bits.reshape(self._shape)


def _copied(local: Tensor) -> Copy | None:
    """None for a layout that has no elements side by side, nested ones above all."""
    if local.layout is torch.jagged or local.is_nested:
        return None
    dense = local.dequantize() if local.is_quantized else local if local.layout is torch.strided else local.to_dense()
    return _Copied(dense.resolve_conj().resolve_neg())


def _lacking(dtype: torch.dtype) -> str | None:
    """The name of a type that numpy lacks."""
    name = str(dtype).removeprefix("torch.")
    return None if name in _OF_NUMPY else name


__all__ = [
    "after_forward",
    "backward_pass",
    "before_forward",
    "being_called",
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

framework: str = "pytorch"
module_prefix: str = "Module"
tensor: type = Tensor
leaves = LEAVES
graph: Graph = calls


def new_reader(*, checksums: bool) -> Reader:
    return Reader(checksums=checksums)


def new_interception(listener: ApiListener, api_list: str | None, *, primitives_of: Sequence[Any]) -> Interception:
    del primitives_of  # which are MindSpore's
    return Interception(listener, api_list)


def models_of(model: Any) -> Sequence[Any]:
    return chunks_of(model, nn.Module, "torch.nn.Module")


def modules_of(model: nn.Module, failures: Failures) -> Iterable[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if module is model:
            continue
        if takes_hooks(module):
            yield name, module
        else:
            said = f"{name!r} is a {type(module).__name__}, compiled, and takes no hooks: it is not dumped."
            failures.warn(f"compiled module {name}", said)


def parameters_of(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return module.named_parameters(recurse=False)


def on_parameter(parameter: Tensor, take: Callable[[Tensor], None]) -> Removable | None:
    if not parameter.requires_grad:
        return None
    return calls.on_gradient(parameter, take)


def being_called() -> None:
    """Hooks are called after forwards that raise, too."""


def backward_pass() -> int:
    return torch._C._current_graph_task_id()


def rank() -> int | None:
    """The process group's word, before it is made the launcher's."""
    if initialized():
        return torch.distributed.get_rank()
    announced = os.environ.get("RANK", "")
    return int(announced) if announced.isdigit() and "WORLD_SIZE" in os.environ else None


def refuse(level: str) -> None:
    """Every level can be recorded."""
    del level


# --- Randomness fixed, so that two runs can be compared.

Function = Callable[..., Any]


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False) -> None:
    """Seed every generator: of Python, numpy and torch on all devices.

    Args:
        mode: Whether to have torch use deterministic algorithms alone. Slower, and an error where there is none.
        rm_dropout: Whether dropout drops nothing from now on: in modules that are made afterwards, whose ``p`` or ``dropout``
            becomes 0, and in every call of a function of torch's.

    Raises:
        ValueError: ``seed`` is no whole number from 0 to 2^32 - 1, which is as many as numpy takes.
    """
    seed_python(seed)
    torch.manual_seed(seed)
    if mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    if rm_dropout:
        _let_nothing_drop()


FUNCTIONALS: Final = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
"""Of ``torch.nn.functional``, all with the arguments ``input``, ``p``, ``training`` and ``inplace``."""

BUILTINS: Final = (
    (torch.nn.functional, "scaled_dot_product_attention", 4, "dropout_p"),
    *((torch, name, 1, "p") for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")),
    *((torch, name, 1, "p") for name in ("dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_")),
    (torch, "native_dropout", 1, "p"),
)
"""Where they are, and which argument is the probability, by its place and its name."""

ATTRIBUTES: Final[dict[type[nn.Module], str]] = {
    nn.modules.dropout._DropoutNd: "p",
    nn.MultiheadAttention: "dropout",
    nn.RNNBase: "dropout",
}
"""Modules that drop, and the attribute that holds the probability."""


def _let_nothing_drop() -> None:
    for kind, attribute in ATTRIBUTES.items():
        _make_without(kind, attribute)
    for name in FUNCTIONALS:
        _replace(torch.nn.functional, name, _functional_without)
    for place, name, position, keyword in BUILTINS:
        _replace(place, name, functools.partial(_builtin_without, position=position, keyword=keyword))


def _replace(place: Any, name: str, without: Callable[[Function], Function]) -> None:
    function = getattr(place, name, None)
    if function is None or getattr(function, "drops_nothing", False):
        return
    replacement = without(function)
    functools.update_wrapper(replacement, function, assigned=("__name__", "__qualname__", "__doc__", "__module__"), updated=())
    replacement.drops_nothing = True  # type: ignore[attr-defined]
    del replacement.__wrapped__  # type: ignore[attr-defined]  # compilers would look behind it
    replace_everywhere("torch", name, function, replacement)


def _make_without(kind: type[nn.Module], attribute: str) -> None:
    """From now on modules of a class are made with a probability of 0, which is written into their attribute."""
    if getattr(kind.__init__, "drops_nothing", False):
        return
    original = kind.__init__

    @functools.wraps(original)
    def without(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        setattr(self, attribute, 0.0)

    without.drops_nothing = True  # type: ignore[attr-defined]
    kind.__init__ = without  # type: ignore[method-assign]


def _functional_without(function: Function) -> Function:
    """With the arguments as they are, since ``torch.jit.script`` compiles functions without ``*args`` only."""
    trains = bool(inspect.signature(function).parameters["training"].default)

    def without(input: Tensor, p: float = 0.5, training: bool = trains, inplace: bool = False) -> Tensor:  # noqa: A002, ARG001
        dropped_nothing: Tensor = function(input, 0.0, training, inplace)
        return dropped_nothing

    return without


@functools.cache  # torch.jit knows functions by their ids, so one that is registered has to stay
def _builtin_without(function: Function, position: int, keyword: str) -> Function:
    def without(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], 0.0, *args[position + 1 :])
        else:
            kwargs[keyword] = 0.0
        return function(*args, **kwargs)

    builtin = torch.jit._builtins._find_builtin(function)
    if builtin is not None:
        torch.jit._builtins._register_builtin(without, builtin)  # so torch.jit.script finds the operator, as it was
    return without
