"""Randomness fixed, so that two runs can be compared."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Final

import mindspore as ms
from mindspore import mint, nn, ops

from monitor.dump.backend import replace_everywhere, seed_python


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False) -> None:
    """Seed every generator: of Python, numpy and MindSpore.

    Args:
        mode: Whether to have MindSpore compute deterministically, communication included. Slower.
        rm_dropout: Whether dropout drops nothing from now on: in cells and primitives that are made afterwards, and in every
            call of a function of MindSpore's.

    Raises:
        ValueError: ``seed`` is no whole number from 0 to 2^32 - 1, which is as many as numpy takes.
    """
    seed_python(seed)
    ms.set_seed(seed)
    ms.manual_seed(seed)
    if mode:
        ms.set_context(deterministic="ON")
        os.environ["HCCL_DETERMINISTIC"] = "true"
    if rm_dropout:
        _let_nothing_drop()


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


def _let_nothing_drop() -> None:
    for kind in CELLS:
        _make_with(kind, p=0.0)
    for kind in PRIMITIVES:
        _make_with(kind, keep_prob=1.0)
    for place, name in FUNCTIONS:
        function = getattr(place, name, None)
        if function is not None and not getattr(function, "drops_nothing", False):
            replacement = _called_without(function)
            for known in {name, function.__name__}:
                replace_everywhere("mindspore", known, function, replacement)


def _make_with(kind: type, **probability: float) -> None:
    """From now on objects of a class are made with this probability."""
    if getattr(kind.__init__, "drops_nothing", False):  # type: ignore[misc]
        return
    original = kind.__init__  # type: ignore[misc]

    def without(self: object, *_: object, **__: object) -> None:
        original(self, **probability)

    without.drops_nothing = True  # type: ignore[attr-defined]
    kind.__init__ = without  # type: ignore[misc]


def _called_without(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a function that drops gives when it drops nothing: what it was given."""

    def without(input: Any, *_: Any, **__: Any) -> Any:  # noqa: A002  # the argument's name is MindSpore's
        return input

    functools.update_wrapper(without, function, assigned=("__name__", "__qualname__", "__doc__", "__module__"), updated=())
    without.drops_nothing = True  # type: ignore[attr-defined]
    return without
