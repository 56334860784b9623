"""Gradients of what goes into a module and comes out of it, followed while its call is traced.

AOTAutograd traces forward and backward together, over a graph of autograd's own. So gradients are found there as in eager
code: by hooks on results, and on the edges through which the call hands gradients back to its inputs (``input_gradients``).
Nothing is put in the place of what a module is given, and no sum is grouped otherwise.
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
from monitor.pytorch import calls as input_gradients
from monitor.pytorch.calls import Target, sequence_nr
from monitor.recording.activations import ADVICE
from monitor.recording.backend import Graph
from monitor.recording.following import follow_inputs, follow_result, slots_of
from monitor.recording.protocols import Removable

GRAPH: Final[Graph] = input_gradients

MOST_OPEN: Final = 64
"""Calls of one module within each other. More have begun and raised."""

Named = tuple[Tensor, str]
"""A tensor and the slot that it stands in."""
Reader = Callable[[Tensor, str], Callable[[Tensor], None]]
"""Makes what reads the gradient of a slot, given the tensor that stands for the call."""


@dataclass(frozen=True, slots=True)
class OpenCall:
    """A call that has begun.

    Attributes:
        tag: The tensor that stands for it.
        targets: Where the gradients of its inputs will go, and the slots of these.
        start: What autograd had counted to.
    """

    tag: Tensor
    targets: dict[Target, str]
    start: int

    @classmethod
    def of(cls, tag: Tensor, inputs: Sequence[tuple[Tensor, str, bool]]) -> OpenCall:
        """Of all inputs, each with its slot and whether its gradient is wanted."""
        targets = slots_of(GRAPH, inputs, "input_") if torch.is_grad_enabled() else {}
        return cls(tag, targets, sequence_nr())


class OpenCalls:
    """By the tensors that stand for modules, which in a trace are its own."""

    def __init__(self) -> None:
        self._open = WeakIdKeyDictionary()

    def push(self, handle: Tensor, call: OpenCall | None) -> None:
        """None for a call of which nothing is known: it ends, too."""
        calls: list[OpenCall | None] = self._open.setdefault(handle, [])
        calls.append(call)
        del calls[:-MOST_OPEN]

    def pop(self, handle: Tensor) -> OpenCall | None:
        calls: list[OpenCall | None] = self._open.get(handle, [])
        return calls.pop() if calls else None


def follow(
    call: OpenCall | None, tag: Tensor, results: Sequence[Tensor], outputs: Iterable[Named], read: Reader
) -> list[Removable]:
    """Have the gradients of a call's inputs and outputs read.

    Args:
        tag: Stands for the call from its end on.
        results: All tensors that it returns.
        outputs: Those whose gradients are wanted.

    Returns:
        Handles of hooks on what may outlive the graph.
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


# --- What the operators in compiled code come to, whatever is observed.


class Called:
    """A hook that wants to be called and looks at nothing."""

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


class Guarded:
    """An observer none of whose failures reaches the compiled code."""

    def __init__(self, observer: Any, failures: Failures, name: str) -> None:
        self.begins = failures.guarded("reading the inputs", observer.begins, ADVICE, of=name)
        self.ends = failures.guarded("reading the outputs", observer.ends, ADVICE, of=name)
        self.sees = failures.guarded("reading activations", observer.sees, ADVICE, of=name)
        self.keep = observer.keep
        self.sees_gradient = failures.guarded("reading gradients of activations", observer.sees_gradient, ADVICE, of=name)


def device_of(*modules: nn.Module | None) -> torch.device:
    """Where the first of these that has any tensors has them; the host where that is not known."""
    for module in modules:
        if module is not None:
            # Not by the module's own names: Megatron's wrapper calls something else ``buffers``.
            first = next(chain(nn.Module.parameters(module), nn.Module.buffers(module)), None)
            if first is not None:
                return torch.device("cpu") if first.is_meta else first.device
    return torch.device("cpu")
