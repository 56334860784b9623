"""What is done with the tensors of a module's call, planned from an earlier call with the same structure.

What a module takes and returns has the same structure in nearly every call. A plan says where its tensors are, and what each
is used for. Code in C checks that a call fits the plan, and does the work. Calls that do not fit, and tensors that are not
ordinary (``fast_path``), are left to ``ModuleWatcher``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

from torch import Tensor

from monitor.pytorch import autograd
from monitor.pytorch.fast_path import IN_C, MOST_TENSORS
from monitor.pytorch.tensor_reader import TorchTensorReader
from monitor.pytorch.tensors import TENSOR_PATHS
from monitor.recording.activations import ModuleWatcher
from monitor.recording.module_calls import ALL, GRADIENTS, NOTHING, Left, ModuleCall
from monitor.recording.recorder import RecordedSeries
from monitor.recording.tensor_paths import SIMPLE, TensorPath, children
from monitor.selection import TensorChoice
from monitor.stats.host.array_kernel import is_wanted
from monitor.stats.torch.tensors import PLAIN

Plan = Any
"""The structure of a value. For a container it is a tuple of its class and the plan of each item, and for a value without
tensors its class. For a tensor it is a list of its series and that of its gradient, with None for one that is not recorded.
"""

Use = Callable[[TensorPath], list[RecordedSeries | None]]
"""Returns the series of a tensor and that of its gradient."""

MOST_DEPTH: Final = 4
"""More deeply nested structures are not planned."""

MOST_CHANGES: Final = 16
"""Changes of structure of a module that are planned again. A module that changes more often is cheaper without plans."""


LEFT: Final = (
    NOTHING,
    Left(rows=False, gradients=True, inputs=False),
    Left(rows=False, gradients=False, inputs=True),
    Left(rows=False, gradients=True, inputs=True),
)
"""What the code in C has left, by its answer."""


class UnplannedError(Exception):
    """A structure cannot be planned."""


class InputPlan(NamedTuple):
    """The plan of a call's arguments, positional and then by name, and the names."""

    structure: Plan
    names: tuple[str, ...]


@final
class ModulePlans:
    """The plans of one module (``CallPlans``). Each call of a micro-step has series of its own, and so a plan."""

    def __init__(self, watcher: ModuleWatcher, reader: TorchTensorReader) -> None:
        self._watcher, self._wanted = watcher, watcher.wanted
        self._begin_call, self._end_call = reader.begin_call, reader.end_call
        self._gate, self._nodes = watcher.collector.gate, watcher.collector.nodes
        self._inputs: dict[int, InputPlan | None] = {}
        self._results: dict[int, Plan | None] = {}
        self._follows = self._wanted.input_grad.wanted
        self._changes = 0

    def begin(self, call: ModuleCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, graph: bool) -> Left:
        micro_step, number = call.place
        plan = self._inputs.get(number)
        if plan is None or (kwargs and plan.names != tuple(kwargs)) or (plan.names and not kwargs):
            return self._plan_inputs(number, args, kwargs)
        values = (*args, *kwargs.values()) if kwargs else args
        found = self._begin_call(plan.structure, values, micro_step, call.records_forward, graph and self._follows)
        if found is None:
            return self._plan_inputs(number, args, kwargs)
        if found is False:
            return GRADIENTS
        if found is not True:
            call.targets = found
        return NOTHING

    def end(self, call: ModuleCall, result: Any, *, graph: bool) -> Left:
        micro_step, number = call.place
        plan = self._results.get(number)
        if plan is None:
            return self._plan_result(number, result)
        gate = self._gate
        left = self._end_call(
            plan,
            result,
            call.records_forward,
            graph,
            call.targets,
            call.start,
            gate,
            gate.clock.step,
            micro_step,
            self._nodes,
            self._several,
        )
        return self._plan_result(number, result) if left is None else LEFT[left]

    def _several(self, target: autograd.Target, edges: list[autograd.Edge], write: autograd.Write) -> None:
        self._watcher.collector.until_step_ends(autograd.engine.watch(target, edges, write))

    def _plan_inputs(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Left:
        """Plan the next call with this number like this one, and leave this one to the watcher."""
        if self._may_plan(self._inputs, number):
            self._inputs[number] = self._planned_inputs(number, args, kwargs)
        return ALL

    def _plan_result(self, number: int, result: Any) -> Left:
        if self._may_plan(self._results, number):
            self._results[number] = self._planned_result(number, result)
        return ALL

    def _may_plan(self, plans: Mapping[int, object], number: int) -> bool:
        """Whether a structure is planned: the first, and those that replace a plan, until there were too many."""
        known = number in plans
        if known and (plans[number] is None or self._changes == MOST_CHANGES):
            return False
        self._changes += known
        return True

    def _planned_inputs(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> InputPlan | None:
        values, leaves, wanted = (*args, *kwargs.values()), TENSOR_PATHS.inputs(args, kwargs), self._wanted
        try:
            use = self._use("input", wanted.input, wanted.input_grad, len(values), number)
            return InputPlan(_whole(values, leaves, use), tuple(kwargs))
        except UnplannedError:
            return None

    def _planned_result(self, number: int, result: Any) -> Plan | None:
        wanted = self._wanted
        try:
            use = self._use("output", wanted.output, wanted.output_grad, TENSOR_PATHS.length(result), number)
            return _whole(result, TENSOR_PATHS.outputs(result), use, of_result=True)
        except UnplannedError:
            return None

    def _use(self, side: str, forward: TensorChoice, gradient: TensorChoice, found: int, number: int) -> Use:
        for choice in (forward, gradient):
            if choice.wanted and choice.length not in (None, found):
                raise UnplannedError  # the watcher warns about it
        watcher = self._watcher

        def use(leaf: TensorPath) -> list[RecordedSeries | None]:
            slot = side + leaf.suffix
            return [
                watcher.series("actv", slot, number, leaf.tensor) if forward.wanted and forward.takes(leaf.position) else None,
                watcher.expected("actv_grad", slot, number) if gradient.wanted and gradient.takes(leaf.position) else None,
            ]

        return use


def new_plans(watcher: ModuleWatcher) -> ModulePlans | None:
    """The plans of a module; None where there is no code in C to carry them out."""
    reader = watcher.collector.recorder.reader
    return ModulePlans(watcher, reader) if IN_C and is_wanted() and isinstance(reader, TorchTensorReader) else None


def _whole(value: Any, leaves: Sequence[TensorPath], use: Use, *, of_result: bool = False) -> Plan:
    """The plan of a value, from all of its tensors. Raises ``UnplannedError``."""
    if len(leaves) > MOST_TENSORS:
        raise UnplannedError
    return _planned(value, iter(leaves), use, of_result=of_result)


def _planned(value: Any, leaves: Iterator[TensorPath], use: Use, depth: int = 0, *, of_result: bool = False) -> Plan:
    """The plan of a value.

    Args:
        leaves: Its tensors, in the order of the search (``TensorPaths``).
        of_result: Whether every tensor must be found, also one that has no rows.

    Raises:
        UnplannedError: It has other containers than tuples and lists, other tensors than plain ones, or is nested too deeply.
    """
    kind = type(value)
    if kind in PLAIN:
        leaf = next(leaves, None)
        if leaf is None or leaf.tensor is not value:
            raise UnplannedError
        return use(leaf)
    if kind in (tuple, list) and depth < MOST_DEPTH:
        return kind, *(_planned(each, leaves, use, depth + 1, of_result=of_result) for each in value)
    if isinstance(value, Tensor) or children(value) is not None or (of_result and kind not in SIMPLE):
        raise UnplannedError
    return kind
