"""What is done with the tensors of a module's call, planned from an earlier call with the same structure.

What a module takes and returns has the same structure in nearly every call. A plan says where its tensors are, and what each is
used for. Code in C checks that a call fits the plan, and does the work. Calls that do not fit, and tensors that are not ordinary
(``fast_path``), are left to ``ModuleWatcher``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, final

from torch import Tensor

from monitor.pytorch import autograd
from monitor.pytorch.fast_path import IN_C
from monitor.pytorch.tensor_reader import TorchTensorReader
from monitor.pytorch.tensors import TENSOR_PATHS
from monitor.recording.activations import ALL, GRADIENTS, NOTHING, Left, ModuleCall, ModuleWatcher
from monitor.recording.recorder import RecordedSeries
from monitor.recording.tensor_paths import SIMPLE, TensorPath, children
from monitor.selection import TensorChoice
from monitor.stats.torch.tensors import PLAIN

Plan = Any
"""The structure of a value, and what its tensors are used for: for a container a tuple of its class and the plan of each item; for a
value without tensors its class; for a tensor a series, a name, or None if it is not used.
"""

Use = Callable[[TensorPath], Any]

MOST_DEPTH: Final = 4
"""More deeply nested structures are not planned."""

MOST_CHANGES: Final = 16
"""Changes of structure of a module that are planned again. A module that changes more often is cheaper without plans."""


NO_TARGETS: Final[dict[autograd.Target, RecordedSeries]] = {}

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
    """The plan of a call's arguments.

    Attributes:
        names: The keyword arguments.
        recorded, targeted: The series of each argument, and of its gradient. None if no argument is recorded, or no gradient.
    """

    names: tuple[str, ...]
    recorded: Plan
    targeted: Plan


class ResultPlan(NamedTuple):
    """The plan of a call's result: its structure, and the series of each tensor, and of its gradient, as for ``InputPlan``."""

    structure: Plan
    recorded: Plan
    gradients: Plan


@final
class ModulePlans:
    """The plans of one module (``CallPlans``). Each call of a micro-step has series of its own, and so a plan."""

    def __init__(self, watcher: ModuleWatcher, reader: TorchTensorReader) -> None:
        self._watcher, self._wanted = watcher, watcher.wanted
        self._begin_call, self._end_call = reader.begin_call, reader.end_call
        self._gate = watcher.collector.gate
        self._inputs: dict[int, InputPlan | None] = {}
        self._results: dict[int, ResultPlan | None] = {}
        self._changes = 0

    def begin(self, call: ModuleCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, graph: bool) -> Left:
        micro_step, number = call.place
        plan = self._inputs.get(number)
        if plan is None or (kwargs and plan.names != tuple(kwargs)) or (plan.names and not kwargs):
            return self._plan_inputs(number, args, kwargs)
        targeted = plan.targeted if graph else None
        recorded = plan.recorded if call.records_forward else None
        if targeted is None and recorded is None:
            return NOTHING
        found = self._begin_call(recorded, targeted, (*args, *kwargs.values()) if kwargs else args, micro_step)
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
        recorded = plan.recorded if call.records_forward else None
        gradients, targets = (plan.gradients, call.targets) if graph else (None, NO_TARGETS)
        gate = self._gate
        left = self._end_call(
            plan.structure, recorded, gradients, result, targets, call.start, gate, gate.clock.step, micro_step, self._several
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
        leaves, values = TENSOR_PATHS.inputs(args, kwargs), (*args, *kwargs.values())
        wanted, found = self._wanted, len(values)

        def recorded(leaf: TensorPath) -> Any:
            return self._watcher.series("actv", "input" + leaf.suffix, number, leaf.tensor)

        def gradient(leaf: TensorPath) -> Any:
            return self._watcher.expected("actv_grad", "input" + leaf.suffix, number)

        try:
            series = _planned(values, iter(leaves), _selected(wanted.input, found, recorded))
            gradients = _planned(values, iter(leaves), _selected(wanted.input_grad, found, gradient))
        except UnplannedError:
            return None
        return InputPlan(tuple(kwargs), series if wanted.input.wanted else None, gradients if wanted.input_grad.wanted else None)

    def _planned_result(self, number: int, result: Any) -> ResultPlan | None:
        leaves, wanted, found = TENSOR_PATHS.outputs(result), self._wanted, TENSOR_PATHS.length(result)

        def recorded(leaf: TensorPath) -> Any:
            return self._watcher.series("actv", "output" + leaf.suffix, number, leaf.tensor)

        def gradient(leaf: TensorPath) -> Any:
            return self._watcher.expected("actv_grad", "output" + leaf.suffix, number)

        try:
            series = _planned(result, iter(leaves), _selected(wanted.output, found, recorded), of_result=True)
            gradients = _planned(result, iter(leaves), _selected(wanted.output_grad, found, gradient), of_result=True)
        except UnplannedError:
            return None
        return ResultPlan(series, series if wanted.output.wanted else None, gradients if wanted.output_grad.wanted else None)


def new_plans(watcher: ModuleWatcher) -> ModulePlans | None:
    """The plans of a module; None where there is no code in C to carry them out."""
    reader = watcher.collector.recorder.reader
    return ModulePlans(watcher, reader) if IN_C and isinstance(reader, TorchTensorReader) else None


def _selected(choice: TensorChoice, found: int, use: Use) -> Use:
    """``use`` for the tensors that are chosen, and None for the others."""
    if choice.wanted and choice.length not in (None, found):
        raise UnplannedError  # the watcher warns about it
    return lambda leaf: use(leaf) if choice.wanted and choice.takes(leaf.position) else None


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
