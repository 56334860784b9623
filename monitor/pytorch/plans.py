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
from monitor.pytorch.fast_path import IN_C, GradientWriter, fits, producers, targets_of, watch_results
from monitor.pytorch.tensor_reader import TorchTensorReader
from monitor.pytorch.tensors import TENSOR_PATHS
from monitor.recording.activations import ModuleCall, ModuleWatcher
from monitor.recording.backend import Removable
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


class UnplannedError(Exception):
    """A structure cannot be planned."""


class InputPlan(NamedTuple):
    """The plan of a call's arguments.

    Attributes:
        names: The keyword arguments.
        recorded: The series of each argument.
        targets: The name of each argument's gradient.
    """

    names: tuple[str, ...]
    recorded: Plan
    targets: Plan


class ResultPlan(NamedTuple):
    """The plan of a call's result: the series of each tensor, and of its gradient."""

    recorded: Plan
    gradients: Plan


@final
class ModulePlans:
    """The plans of one module (``CallPlans``). Each call of a micro-step has series of its own, and so a plan."""

    def __init__(self, watcher: ModuleWatcher, reader: TorchTensorReader) -> None:
        self._watcher, self._wanted = watcher, watcher.wanted
        self._reader, self._gate = reader, watcher.collector.gate
        self._inputs: dict[int, InputPlan | None] = {}
        self._results: dict[int, ResultPlan | None] = {}
        self._changes = 0

    def record_inputs(self, call: ModuleCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        values = (*args, *kwargs.values()) if kwargs else args
        plan = self._plan_of_inputs(call.place.call, args, kwargs)
        return plan is not None and self._reader.record_structure(plan.recorded, values, call.place.micro_step)

    def find_targets(self, call: ModuleCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        values = (*args, *kwargs.values()) if kwargs else args
        plan = self._plan_of_inputs(call.place.call, args, kwargs)
        targets = None if plan is None else targets_of(plan.targets, values)
        if targets is not None:
            call.targets = targets
        return targets is not None

    def record_result(self, call: ModuleCall, result: Any) -> bool:
        plan = self._plan_of_result(call.place.call, result)
        return plan is not None and self._reader.record_structure(plan.recorded, result, call.place.micro_step)

    def watch_result(self, call: ModuleCall, result: Any) -> bool:
        plan = self._plan_of_result(call.place.call, result)
        step, micro_step = self._gate.clock.step, call.place.micro_step
        return plan is not None and watch_results(
            plan.gradients, result, call.start, self._reader, self._gate, step, micro_step
        )

    def follow_inputs(self, call: ModuleCall, result: Any) -> list[Removable] | None:
        plan = self._plan_of_result(call.place.call, result)
        found = None if plan is None else producers(plan.gradients, result, call.targets, call.start)
        if found is None:
            return None
        handles: list[Removable] = []
        (micro_step, number), step = call.place, self._gate.clock.step
        for target, edges in found.items():
            if not edges:
                continue
            watched = self._watcher.expected("actv_grad", call.targets[target], number)
            if len(edges) == 1:
                ((node, k),) = edges
                node.register_hook(GradientWriter(self._reader, watched, self._gate, step, micro_step, k))
            else:
                writer = GradientWriter(self._reader, watched, self._gate, step, micro_step)
                handles += autograd.engine.watch(target, edges, writer)
        return handles

    def _plan_of_inputs(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> InputPlan | None:
        """The plan that the arguments fit; None if there is none."""
        plan = self._inputs.get(number)
        if plan is None:
            if number in self._inputs:
                return None
        elif (not kwargs and not plan.names) or plan.names == tuple(kwargs):
            if fits(plan.recorded, (*args, *kwargs.values()) if kwargs else args):
                return plan
        if self._changes == MOST_CHANGES:
            return None
        self._changes += plan is not None
        plan = self._inputs[number] = self._planned_inputs(number, args, kwargs)
        return plan

    def _plan_of_result(self, number: int, result: Any) -> ResultPlan | None:
        plan = self._results.get(number)
        if plan is None:
            if number in self._results:
                return None
        elif fits(plan.recorded, result):
            return plan
        if self._changes == MOST_CHANGES:
            return None
        self._changes += plan is not None
        plan = self._results[number] = self._planned_result(number, result)
        return plan

    def _planned_inputs(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> InputPlan | None:
        leaves, values = TENSOR_PATHS.inputs(args, kwargs), (*args, *kwargs.values())
        wanted, found = self._wanted, len(values)

        def recorded(leaf: TensorPath) -> Any:
            return self._watcher.series("actv", "input" + leaf.suffix, number, leaf.tensor)

        def name(leaf: TensorPath) -> Any:
            return "input" + leaf.suffix

        try:
            series = _planned(values, iter(leaves), _selected(wanted.input, found, recorded))
            names = _planned(values, iter(leaves), _selected(wanted.input_grad, found, name))
        except UnplannedError:
            return None
        return InputPlan(tuple(kwargs), series, names)

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
        return ResultPlan(series, gradients)


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
