"""Randomness fixed, so that two runs can be compared."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from monitor.dump.backend import replace_everywhere, seed_python

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
