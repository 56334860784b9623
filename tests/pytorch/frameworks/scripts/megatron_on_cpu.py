"""What Megatron needs in order to train where there is no CUDA device. For these tests alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any, Final

import torch
from megatron.core.transformer.moe import moe_utils
from torch.overrides import TorchFunctionMode

CPU: Final = torch.device("cpu")
STANDS_IN: Final[dict[str, Callable[..., Any]]] = {
    "current_device": lambda: CPU,
    "synchronize": lambda *_: None,
    "Stream": lambda **_: None,
    "manual_seed": torch.manual_seed,
    "get_rng_state": lambda *_: torch.get_rng_state(),
    "random.get_rng_state": lambda **_: torch.get_rng_state(),
}
"""Functions of ``torch.cuda`` that Megatron calls. What it hands to CUDA's generators waits for a device, for ever."""


@contextmanager
def on_cpu() -> Iterator[None]:
    """Within it, what asks for a CUDA device gets the host."""
    moe_utils.te_general_gemm = None  # looked up, and not defined where TransformerEngine is not installed
    original = {path: _replace(path, ours) for path, ours in STANDS_IN.items()}
    try:
        with _HostInsteadOfCuda():
            yield
    finally:
        for path, theirs in original.items():
            _replace(path, theirs)


def _replace(path: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Put a function under a name of ``torch.cuda``, and return what was there."""
    module, _, name = f"cuda.{path}".rpartition(".")
    owner = reduce(getattr, module.split("."), torch)
    there: Callable[..., Any] = getattr(owner, name)
    setattr(owner, name, function)
    return there


class _HostInsteadOfCuda(TorchFunctionMode):
    """Sees every function of torch. Megatron asks for tensors on ``"cuda"``, and knows half precision by the name of its CUDA
    type.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = CPU
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")
        return found
