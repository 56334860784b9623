"""Functions of ours in the place of torch's own: a compiler is to find them as opaque as what they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """``function``, which a compiler neither looks into nor compiles, nor anything that it calls.

    ``torch.compiler.disable`` does the same with a wrapper that costs every call a microsecond, and imports the compiler.
    """
    strategy = _skip_with_all_it_calls()
    if strategy is None:
        disabled: F = torch.compiler.disable(function)
        return disabled
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def not_compiled_alone(function: F) -> F:
    """``function``, which a compiler does not compile as a piece of its own where it comes to it between two graphs: there it
    runs as it is. Within what is compiled it is traced.
    """
    strategy = _skip_with_all_it_calls()
    if strategy is not None:
        torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


def _skip_with_all_it_calls() -> Any:
    """None where this version of torch has no such thing."""
    frames: Any = torch._C._dynamo.eval_frame
    try:
        return frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    except AttributeError:
        return None
