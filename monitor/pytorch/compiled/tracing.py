"""Follows gradients of a module's inputs and outputs while its call is traced.

AOTAutograd traces forward and backward together, over a graph of autograd. So gradients are found as in eager code: by hooks on
results, and on the edges through which the call returns gradients of its inputs (``recording/gradient_edges.py``). A module's
inputs are not replaced, and no sum is regrouped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from monitor.failures import Failures
from monitor.pytorch import autograd
from monitor.pytorch.autograd import Target, sequence_nr
from monitor.recording.activations import ADVICE
from monitor.recording.backend import Autograd, Removable
from monitor.recording.gradient_edges import follow_inputs, follow_result, slots_of

GRAPH: Final[Autograd] = autograd

MOST_OPEN: Final = 64
"""Most nested calls of one module. Further open calls must have raised."""

Named = tuple[Tensor, str]
"""A tensor and its slot."""
Reader = Callable[[Tensor, str], Callable[[Tensor], None]]
"""Makes a function that reads the gradient of a slot, given the tag of the call."""


@dataclass(frozen=True, slots=True)
class TracedCall:
    """A call that has begun.

    Attributes:
        tag: The tensor that identifies the call.
        targets: Edges that the gradients of its inputs will flow to, and the slots of the inputs.
        start: Autograd's sequence number when the call began.
    """

    tag: Tensor
    targets: dict[Target, str]
    start: int

    @classmethod
    def of(cls, tag: Tensor, inputs: Sequence[tuple[Tensor, str, bool]]) -> TracedCall:
        """From all inputs, each with its slot and whether its gradient is wanted."""
        targets = slots_of(GRAPH, inputs, "input_") if torch.is_grad_enabled() else {}
        return cls(tag, targets, sequence_nr())


class TracedCalls:
    """Open calls by handle. Each trace has its own tensors for the handles."""

    def __init__(self) -> None:
        self._open = WeakIdKeyDictionary()

    def push(self, handle: Tensor, call: TracedCall | None) -> None:
        """Push a call; None for an unknown one, since its end comes, too."""
        calls: list[TracedCall | None] = self._open.setdefault(handle, [])
        calls.append(call)
        del calls[:-MOST_OPEN]

    def pop(self, handle: Tensor) -> TracedCall | None:
        calls: list[TracedCall | None] = self._open.get(handle, [])
        return calls.pop() if calls else None


def follow(
    call: TracedCall | None, tag: Tensor, results: Sequence[Tensor], outputs: Iterable[Named], read: Reader
) -> list[Removable]:
    """Hook the gradients of a call's inputs and outputs.

    Args:
        tag: Identifies the call from its end on.
        results: All tensors that it returns.
        outputs: Tensors whose gradients are wanted.

    Returns:
        Handles of hooks on tensors that may outlive the graph.
    """
    if not torch.is_grad_enabled():
        return []
    start = 0 if call is None else call.start
    handles: list[Removable] = []
    for x, slot in outputs:
        if x.requires_grad:
            handles += follow_result(GRAPH, x, start, read(tag, slot))
    if call is not None and call.targets:
        differentiable = [x for x in results if x.requires_grad]
        handles += follow_inputs(GRAPH, call.targets, start, differentiable, partial(read, call.tag))
    return handles


# --- Observers that the operators in compiled code call.


class CallObserver:
    """An observer that only calls a function at the begin and end of a call."""

    def __init__(self, call: Callable[..., None], module: nn.Module) -> None:
        self._call = call
        self._module = module

    def begins(self, _tag: Tensor) -> None:
        self._call(self._module, (), {})

    def ends(self, _tag: Tensor) -> None:
        self._call(self._module, (), {}, None)

    def sees(self, *_: Any) -> None: ...

    def sees_gradient(self, *_: Any) -> None: ...

    def keep(self, *_: Any) -> None: ...


class GuardedObserver:
    """Wraps an observer so that its failures do not reach compiled code."""

    def __init__(self, observer: Any, failures: Failures, name: str) -> None:
        self.begins = failures.guarded("reading the inputs", observer.begins, ADVICE, of=name)
        self.ends = failures.guarded("reading the outputs", observer.ends, ADVICE, of=name)
        self.sees = failures.guarded("reading activations", observer.sees, ADVICE, of=name)
        self.keep = observer.keep
        self.sees_gradient = failures.guarded("reading gradients of activations", observer.sees_gradient, ADVICE, of=name)


def device_of(*modules: nn.Module | None) -> torch.device:
    """The device of the first module that has tensors; the host if none has."""
    for module in modules:
        if module is not None:
            # Not by attribute: Megatron's wrapper has another attribute ``buffers``.
            first = next(chain(nn.Module.parameters(module), nn.Module.buffers(module)), None)
            if first is not None:
                return torch.device("cpu") if first.is_meta else first.device
    return torch.device("cpu")
