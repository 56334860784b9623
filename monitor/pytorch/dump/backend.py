"""PyTorch's implementation of ``monitor.dump.backend``: reads tensors, hooks modules, fixes randomness."""

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
from monitor.dump.values import Copy, HostRow, KernelResult, TensorLeaf
from monitor.failures import Failures
from monitor.pytorch import autograd
from monitor.pytorch.dump.apis import TorchApiInterception, traced
from monitor.pytorch.hooks import after_forward, before_forward, takes_hooks
from monitor.pytorch.process_group import initialized
from monitor.pytorch.tensors import TENSOR_PATHS, computing
from monitor.recording.arguments import chunks_of
from monitor.recording.backend import Autograd, Removable
from monitor.stats.partials import COLUMNS, Floats
from monitor.stats.torch.dispatch import reduce_into
from monitor.stats.torch.host_kernel import TorchHostKernel
from monitor.stats.torch.memory import arriving
from monitor.stats.torch.tensors import beneath, has_memory, is_plain, local_shard, unseen

# --- Tensors in a dump. A tensor in host memory is reduced at once, and copied if its elements are wanted. For a tensor on a
# device, the kernel's row and the elements are copied to pinned memory in the computing stream, and the writer waits for an
# event.

_functorch: Final[Any] = torch._C._functorch

EPS: Final = 0.0
"""No element counts as small."""

_NUMPY_DTYPES: Final = frozenset(
    ["bool", "float16", "float32", "float64", "complex64", "complex128"]
    + [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
)
_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class TorchReader:
    """Reads tensors, without a cache by version: collectives and custom kernels write without changing torch's version
    counter.
    """

    def __init__(self, *, checksums: bool) -> None:
        self._checksums = checksums
        self._kernel = TorchHostKernel(EPS)

    def leaf(self, x: Tensor, file: str | None) -> TensorLeaf:
        if _is_transformed(x):
            return TensorLeaf(_described(x), None, None, None)
        with unseen():
            if file is None and not self._checksums and is_plain(x):
                return TensorLeaf(_described(x), HostRow(self._kernel.reduce(x)), None, None)  # the fast path of most tensors
        with beneath():
            local = local_shard(x)
            if local is None or local.is_meta or not has_memory(local):
                return TensorLeaf(_described(x), None, None, None)
            copy = _copied(local) if file is not None or self._checksums else None
            return TensorLeaf(_described(x), self._read(local), copy, file)

    def _read(self, local: Tensor) -> KernelResult | None:
        if local.device.type == "cpu":
            row = self._kernel.reduce(local)
            return None if row is None else HostRow(row)
        page = torch.zeros(1, len(COLUMNS), dtype=torch.float64, device=local.device)
        reduce_into(local, page, 0, None, EPS)
        return _TorchDeviceRow(page)


def _is_transformed(x: Tensor) -> bool:
    """Whether a transform (``torch.vmap``, ``torch.func``) is active: it would also batch or differentiate the monitor's
    calls.
    """
    return _functorch.peek_interpreter_stack() is not None or _functorch.is_functorch_wrapped_tensor(x)


def _described(x: Tensor) -> dict[str, Any]:
    return {"type": "torch.Tensor", "dtype": str(x.dtype), "shape": list(x.shape), "requires_grad": x.requires_grad}


class _TorchDeviceRow:
    """The row of the device kernel, copied asynchronously. The first access waits for it."""

    def __init__(self, page: Tensor) -> None:
        self._page = arriving(page)

    def row(self) -> Floats:
        found: Floats = self._page().numpy()[0]
        return found


class _TorchCopy:
    """A copy in host memory, possibly pending."""

    def __init__(self, x: Tensor) -> None:
        self.dtype = _name_if_not_numpy(x.dtype)
        self.nbytes = x.nbytes
        self._shape = tuple(x.shape)
        self._copy = arriving(x.clone(memory_format=torch.contiguous_format) if x.device.type == "cpu" else x)

    def array(self) -> NDArray[Any]:
        x = self._copy()
        if self.dtype is None:
            plain: NDArray[Any] = x.numpy()
            return plain
        size = x.element_size()
        bits: NDArray[Any] = x.reshape(-1).view(_BITS[size]).numpy().view(_UNSIGNED[size])
        return bits.reshape(self._shape)


def _copied(local: Tensor) -> Copy | None:
    """A dense copy; None for layouts without a dense form, such as nested tensors."""
    if local.layout is torch.jagged or local.is_nested:
        return None
    dense = local.dequantize() if local.is_quantized else local if local.layout is torch.strided else local.to_dense()
    return _TorchCopy(dense.resolve_conj().resolve_neg())


def _name_if_not_numpy(dtype: torch.dtype) -> str | None:
    """The name of a dtype that numpy lacks; None for others."""
    name = str(dtype).removeprefix("torch.")
    return None if name in _NUMPY_DTYPES else name


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

framework: str = "pytorch"
module_prefix: str = "Module"
tensor: type = Tensor
leaves = TENSOR_PATHS
graph: Autograd = autograd


def new_reader(*, checksums: bool) -> TorchReader:
    return TorchReader(checksums=checksums)


def new_interception(listener: ApiListener, api_list: str | None, *, primitives_of: Sequence[Any]) -> TorchApiInterception:
    del primitives_of  # which are MindSpore's
    return TorchApiInterception(listener, api_list)


def models_of(model: Any) -> Sequence[Any]:
    return chunks_of(model, nn.Module, "torch.nn.Module")


def modules_of(model: nn.Module, failures: Failures) -> Iterable[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if module is model:
            continue
        if takes_hooks(module):
            yield name, module
        else:
            said = f"{name!r} is a {type(module).__name__}, which is compiled and takes no hooks: it is not dumped."
            failures.warn(f"compiled module {name}", said)


def compiled_of(models: Sequence[nn.Module]) -> frozenset[int]:
    """None: modules run by themselves under ``torch.compile`` too, and have their usual entries."""
    del models
    return frozenset()


def parameters_of(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return module.named_parameters(recurse=False)


def on_parameter(parameter: Tensor, take: Callable[[Tensor], None]) -> Removable | None:
    if not parameter.requires_grad:
        return None
    return autograd.on_gradient(parameter, take)


def being_called() -> None:
    """Nothing to do: hooks are called after forwards that raise, too."""


def backward_pass() -> int:
    return torch._C._current_graph_task_id()


def rank() -> int | None:
    """The rank in the process group, or before it exists the launcher's."""
    if initialized():
        return torch.distributed.get_rank()
    announced = os.environ.get("RANK", "")
    return int(announced) if announced.isdigit() and "WORLD_SIZE" in os.environ else None


def refuse(level: str) -> None:
    """Refuses nothing: every level can be recorded."""
    del level


# --- Fixed randomness, so that two runs can be compared.

Function = Callable[..., Any]


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False) -> None:
    """Seed all generators: of Python, numpy, and torch on all devices.

    Args:
        mode: Whether torch may use deterministic algorithms only. This is slower, and operations without one raise.
        rm_dropout: Whether to disable dropout from now on: in modules made afterwards, whose ``p`` or ``dropout`` becomes 0,
            and in every call of a torch function.

    Raises:
        ValueError: ``seed`` is no integer from 0 to 2^32 - 1, the range of numpy.
        TypeError: ``mode`` or ``rm_dropout`` is neither True nor False.
    """
    seed_python(seed, mode=mode, rm_dropout=rm_dropout)
    torch.manual_seed(seed)
    if mode:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    if rm_dropout:
        _disable_dropout()


FUNCTIONALS: Final = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
"""Functions of ``torch.nn.functional`` with the arguments ``input``, ``p``, ``training`` and ``inplace``."""

BUILTINS: Final = (
    (torch.nn.functional, "scaled_dot_product_attention", 4, "dropout_p"),
    *((torch, name, 1, "p") for name in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")),
    *((torch, name, 1, "p") for name in ("dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_")),
    (torch, "native_dropout", 1, "p"),
)
"""Namespace, name, and the position and name of the probability argument."""

ATTRIBUTES: Final[dict[type[nn.Module], str]] = {
    nn.modules.dropout._DropoutNd: "p",
    nn.MultiheadAttention: "dropout",
    nn.RNNBase: "dropout",
}
"""Modules with dropout, and the attribute that holds the probability."""


def _disable_dropout() -> None:
    for kind, attribute in ATTRIBUTES.items():
        _zero_probability(kind, attribute)
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
    del replacement.__wrapped__  # type: ignore[attr-defined]  # compilers would unwrap it
    replace_everywhere("torch", name, function, replacement)


def _zero_probability(kind: type[nn.Module], attribute: str) -> None:
    """Have ``__init__`` of a class set the probability attribute to 0."""
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
    """Keeps the original signature: ``torch.jit.script`` does not compile functions with ``*args``."""
    trains = bool(inspect.signature(function).parameters["training"].default)

    def without(input: Tensor, p: float = 0.5, training: bool = trains, inplace: bool = False) -> Tensor:  # noqa: A002, ARG001
        dropped_nothing: Tensor = function(input, 0.0, training, inplace)
        return dropped_nothing

    return without


@functools.cache  # torch.jit keys functions by id, so a registered one must stay alive
def _builtin_without(function: Function, position: int, keyword: str) -> Function:
    def without(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], 0.0, *args[position + 1 :])
        else:
            kwargs[keyword] = 0.0
        return function(*args, **kwargs)

    builtin = torch.jit._builtins._find_builtin(function)
    if builtin is not None:
        torch.jit._builtins._register_builtin(without, builtin)  # so torch.jit.script finds the original operator
    return without
