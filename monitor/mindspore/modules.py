"""Access to MindSpore's cells: the hooks that they take, which calls train, and forwards that raised."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType
from typing import Any, Final

import mindspore as ms
from mindspore import Parameter, Tensor, nn
from mindspore.ops.composite import base

from monitor.config.loading import DYNAMIC_VARIABLE
from monitor.failures import LOGGER, Failures
from monitor.mindspore import autograd, hooks as cell_hooks, tape
from monitor.mindspore.compiled import roles
from monitor.mindspore.compiled.constructs import original_construct
from monitor.mindspore.compiled.program import Handle, Handles, ObservedCell, Program
from monitor.mindspore.compiled.replay import REPLAYING, flush, join, program_of
from monitor.recording import arguments
from monitor.recording.activations import ModuleCollector, ModuleWatcher
from monitor.recording.attached_model import NamedParts
from monitor.recording.backend import HookSet, Removable, Shown

takes_hooks = cell_hooks.takes_hooks

RUNNING_STATISTICS: Final = frozenset({"moving_mean", "moving_variance", "running_mean", "running_var", "num_batches_tracked"})
"""Attributes of the BatchNorm cells of ``nn`` and ``mint.nn``, which are parameters only by name: each forward writes them, on
each rank others. PyTorch has buffers in their place.
"""


def never_called(cell: nn.Cell) -> bool:
    """Whether a cell only contains others."""
    return isinstance(cell, (nn.CellList, nn.CellDict))


def before_forward(cell: nn.Cell, call: Callable[..., Any], *, compiled: bool = False) -> Removable:
    """See ``Modules``. In compiled code ``call`` is called when the forward has been executed."""
    handle = cell_hooks.before_forward(cell, call)
    program = program_of(cell) if compiled else None
    return handle if program is None else Handles(handle, _Added(program.cell(cell).begins, call))


def after_forward(cell: nn.Cell, call: Callable[..., Any], *, always: bool = False, compiled: bool = False) -> Removable:
    """See ``Modules``. In compiled code ``call`` is called when the forward has been executed."""
    handle = cell_hooks.after_forward(cell, call, always=always)
    program = program_of(cell) if compiled else None
    return handle if program is None else Handles(handle, _Added(program.cell(cell).ends, call))


def around_forward(
    cell: nn.Cell, before: Callable[..., Any], after: Callable[..., Any], whole: Callable[..., Any], shows: Shown
) -> Sequence[Removable]:
    """Register both. In compiled code nothing is called."""
    del whole, shows
    return before_forward(cell, before), after_forward(cell, after, always=True)


class _Added:
    """The handle of a function that is added to a list."""

    __slots__ = ("_call", "_calls")

    def __init__(self, calls: list[Callable[..., object]], call: Callable[..., object]) -> None:
        calls.append(call)
        self._calls, self._call = calls, call

    def remove(self) -> None:
        self._calls.remove(self._call)


def repeating() -> bool:
    """Whether the caller runs inside a backward: a forward that begins now repeats an earlier one."""
    return not REPLAYING.get() and autograd.in_backward()


def chunks_of(model: Any) -> Sequence[nn.Cell]:
    """The chunks of a virtual pipeline; a single cell becomes a list. A training cell is replaced by its network.

    Raises:
        TypeError: One of them is no cell.
        ValueError: The environment variable about compiled code has an unknown value.
    """
    chunks = [_trained_by(one) for one in arguments.chunks_of(model, nn.Cell, "mindspore.nn.Cell")]
    tape.refuse_unknown_values()
    for chunk in chunks:
        if said := _observed(chunk).warning():
            LOGGER.warning("%s", said)
    return chunks


def _trained_by(cell: nn.Cell) -> nn.Cell:
    """The network of a training cell, which computes gradients or has an optimizer; any other cell itself.

    A training cell is no model: its own forward is not differentiated, and the state of its optimizer would count as weights.
    """
    inside = {name: one for name, one in cell.name_cells().items() if not _is_optimizer(one)}
    has_optimizer = len(inside) < len(cell.name_cells())
    if not has_optimizer and not isinstance(cell, (nn.TrainOneStepCell, nn.ForwardValueAndGrad, nn.WithGradCell)):
        return cell
    with_weights = [one for one in inside.values() if one.trainable_params()]
    found = inside.get("network", with_weights[0] if len(with_weights) == 1 else None)
    return cell if found is None else _trained_by(found)


def _is_optimizer(cell: nn.Cell) -> bool:
    return isinstance(getattr(cell, "parameters", None), tuple)


def parts(chunk: nn.Cell) -> NamedParts:
    """The cells that take hooks, and all parameters but running statistics. Compiled cells take none."""
    named = chunk.parameters_and_names()
    return NamedParts(_observed(chunk).cells, [(name, one) for name, one in named if not _is_running(name, one)])


def _is_running(name: str, parameter: Parameter) -> bool:
    return name.rpartition(".")[2] in RUNNING_STATISTICS and is_frozen(parameter)


def is_frozen(parameter: Parameter) -> bool:
    """Whether a parameter needs no gradient. ``requires_grad`` would wait for earlier operations, and raise their errors."""
    facts = getattr(parameter, "_param_info", None)
    return facts is not None and not facts.requires_grad


class CellHooks:
    """The hooks of a collector's cells (``CallHooks``). MindSpore calls none after a forward that raised."""

    repetitions = autograd.RecomputeRepetitions

    def __init__(self, collector: ModuleCollector) -> None:
        self._collector = collector
        self._failures = collector.failures
        self._mode = TrainingFlag(collector.failures)

    def hook_module(
        self, watcher: ModuleWatcher, before: Callable[..., None], after: Callable[..., None], hooks: HookSet
    ) -> None:
        wanted = watcher.wanted
        if not autograd.GRAPH_IS_THERE and (wanted.input_grad.wanted or wanted.output_grad.wanted):
            self._failures.warn("no graph", autograd.NO_GRAPH)
        hooks.add(before_forward(watcher.module, before))
        hooks.add(after_forward(watcher.module, after))
        root = watcher.collector.roots.get(0)
        program = None if root is None else program_of(root)
        if program is not None:
            hooks.add(_watched(program, watcher))

    def hook_root(
        self, chunk: int, root: nn.Cell, before: Callable[..., None], after: Callable[..., None], hooks: HookSet
    ) -> None:
        program = join(root, self._collector.roots[0])

        def before_islands(*args: Any) -> None:
            flush(program)
            before(*args)

        hooks.add(before_forward(root, self._failures.guarded("following compiled code", before_islands)))

        def after_islands(*args: Any) -> None:
            flush(program, island=True)
            after(*args)

        hooks.add(after_forward(root, self._failures.guarded("following compiled code", after_islands)))
        if program is not None:
            self._observe_root(program, chunk, program.cell(root), before, after, hooks)

    def _observe_root(
        self,
        program: Program,
        chunk: int,
        root: ObservedCell,
        before: Callable[..., None],
        after: Callable[..., None],
        hooks: HookSet,
    ) -> None:
        reader = self._collector.recorder.reader
        program.set_up(reader.eps, higher=reader.higher, check_sums=reader.check_sums, magnitudes=reader.magnitudes)
        if program.failures not in (None, self._failures) and program.is_on:
            program.absences.replaced(program.failures)
        program.bound(self._collector.clock.micro_steps * len(self._collector.roots))
        program.failures, program.clock = self._failures, self._collector.clock
        program.recorder = self._collector.recorder
        if not REPLAYING.get():
            program.begin()
        hooks.add(Handle(partial(_rest, program)))
        root.chunk, root.collector = chunk, self._collector
        if os.environ.get(DYNAMIC_VARIABLE) == "True" and ms.get_context("mode") == ms.GRAPH_MODE:
            _prepare(program, root.cell())
        hooks.add(_Added(root.begins, before))
        hooks.add(_Added(root.ends, after))

    def is_alone(self, root: nn.Cell) -> bool:
        return not self.is_running(root, 2)

    def is_running(self, root: nn.Cell, calls: int) -> bool:
        """Whether that many calls of the root are on this thread's stack, or compiled code has called it."""
        if REPLAYING.get():
            return True
        frame: FrameType | None = sys._getframe(1)
        found = 0
        while frame is not None and found < calls:
            found += frame.f_code is nn.Cell.__call__.__code__ and frame.f_locals.get("self") is root
            frame = frame.f_back
        return found == calls

    def root_trains(self, root: nn.Cell | None) -> bool:
        """A model that trains with its training flag off gets advice."""
        if root is None:
            return True
        training = trains(root)
        if training and not REPLAYING.get():
            self._mode.called(root)
        return training

    def backward_begins(self, x: Tensor, call: Callable[[Tensor], None]) -> None:
        if autograd.requires_grad(x) and autograd.made_since(x, 0):  # a hook on a parameter would stay for every later backward
            autograd.on_gradient(x, call)

    def end_step(self) -> None:
        """Keeps no data."""

    def remove(self) -> None:
        """Keeps no data."""


new_hooks = CellHooks


def _rest(program: Program) -> None:
    """The model is not recorded. Between two steps it may be recorded again."""
    if not REPLAYING.get():
        program.release()


def _prepare(program: Program, root: nn.Cell | None) -> None:
    """Everything may be recorded later, and MindSpore compiles once."""
    if root is not None:
        cells = [cell for _, cell in _observed(root).cells if takes_hooks(cell) and not never_called(cell)]
        program.prepare(cells, [one for one in root.get_parameters() if one.requires_grad])


ROLES: Final = {
    "input": roles.INPUT,
    "output": roles.OUTPUT,
    "input_grad": roles.INPUT_GRAD,
    "output_grad": roles.OUTPUT_GRAD,
}


def _watched(program: Program, watcher: ModuleWatcher) -> Removable:
    """Let compiled code record what a watcher records."""
    observed = program.cell(watcher.module)
    observed.watcher = watcher
    observed.roles |= {role for name, role in ROLES.items() if getattr(watcher.wanted, name).wanted}

    def remove() -> None:
        observed.watcher = None

    return Handle(remove)


# --- The cells that take hooks in MindSpore's modes.
#
# MindSpore calls no hooks inside compiled code. It calls the hooks of a compiled cell itself, but not those of cells inside it.

_DIFFERENTIATING: Final[CodeType | None] = getattr(getattr(base, "_pynative_func_grad_forward", None), "__code__", None)
"""The code that calls every function that is differentiated."""

_REPEATS: Final = "_recompute_cell"
"""The attribute through which ``Cell.recompute`` calls a cell. It is no part of the model."""


@dataclass(frozen=True, slots=True)
class Observable:
    """The cells of a model.

    Attributes:
        cells: The cells that take hooks, by name, in the order of ``cells_and_names``.
        hiding: The names of compiled cells that contain other cells, which take no hooks.
    """

    cells: Sequence[tuple[str, nn.Cell]]
    hiding: Sequence[str]

    def warning(self) -> str:
        """The warning for the user; empty if no cell is hidden."""
        if not self.hiding:
            return ""
        names = ", ".join(repr(name) if name else "the model" for name in self.hiding)
        return f"Cells inside {names} are compiled (@jit) and have no rows: take @jit off to record them."


_OUTSIDE: Final = ("param_distribution", "mv_distribution", "update_ratio")


def fields_outside() -> Sequence[str]:
    """The fields of the configuration whose rows can be read before and after compiled code."""
    return (*_OUTSIDE, "wg_distribution") if tape.changes_are_accepted() else _OUTSIDE


def refuse_graph_mode(*, outside: bool = False) -> None:
    """Refuse graph mode if it would have no rows, before anything is attached.

    Args:
        outside: Whether one of ``fields_outside`` is recorded.

    Raises:
        ValueError: The mode is GRAPH_MODE, in which every cell is compiled and no hook is called, and operators cannot be used.
    """
    if (
        ms.get_context("mode") == ms.GRAPH_MODE
        and not tape.whole_steps_are_measured()
        and not (outside and not tape.compiled_code_is_excluded())
    ):
        why, other = "the operator for compiled code cannot be used here", ", or turn on one of {}, which have rows without it"
        other = other.format(", ".join(fields_outside()))
        if tape.compiled_code_is_excluded():
            why, other = f"{tape.COMPILED_VARIABLE} is 0", f", or unset {tape.COMPILED_VARIABLE}"
        to_do = f"call mindspore.set_context(mode=mindspore.PYNATIVE_MODE) before set_monitor{other}"
        raise ValueError(f"mode is GRAPH_MODE, so MindSpore calls no hooks, and {why}: {to_do}.")


def compiled(cell: nn.Cell) -> bool:
    """Whether ``jit`` is around the cell's ``construct``. A compiled function that calls the cell is not detected."""
    return bool(getattr(original_construct(cell), "__wrapped_by_jit__", False))


def observable(root: nn.Cell, *, by_operators: bool = False) -> Observable:
    """The cells of a model that take hooks. A cell used both inside a compiled cell and elsewhere takes none.

    Args:
        by_operators: Whether operators replace the hooks of cells inside compiled cells.
    """
    rewritten = _rewritten(root)
    named = [(name, rewritten.get(id(cell), cell)) for name, cell in root.cells_and_names() if _REPEATS not in name.split(".")]
    hiding = {name: inside for name, cell in named if not by_operators and compiled(cell) and (inside := _inside(cell))}
    hidden: set[int] = set().union(*hiding.values())
    if not autograd.GRAPH_IS_THERE:  # a repetition could not be distinguished from a call
        repeated = [name.split(".") for name, _ in root.cells_and_names()]
        hidden |= {id(cell) for name, cell in named if any(_repeats(name, one) for one in repeated)}
    cells = [(name, cell) for name, cell in named if id(cell) not in hidden]
    # A compiled cell inside another compiled cell is hidden by the outer one.
    outermost = [name for name, cell in cells if name in hiding]
    return Observable(cells, outermost)


def _rewritten(root: nn.Cell) -> Mapping[int, nn.Cell]:
    """The cells that a ``SequentialCell`` calls in place of its own, by the ids of these: with ``amp_level="O1"`` MindSpore
    rewrites its cells, and replaces them in the list of what it calls alone.
    """
    # Code that MindSpore rewrites may import the class a second time, as another one of the same name.
    sequential = [cell for _, cell in root.cells_and_names() if _has_base(cell, "SequentialCell")]
    pairs = [pair for one in sequential for pair in zip(one.name_cells().values(), getattr(one, "cell_list", ()), strict=False)]
    return {id(own): called for own, called in pairs if own is not called}


def _has_base(cell: nn.Cell, name: str) -> bool:
    return any(base.__name__ == name for base in type(cell).__mro__)


def _observed(root: nn.Cell) -> Observable:
    """The cells of a model that are recorded."""
    return observable(root, by_operators=tape.whole_steps_are_measured())


def _repeats(name: str, parts: list[str]) -> bool:
    """Whether the cell ``name`` is recomputed, or lies in a recomputed cell, to which the path ``parts`` leads."""
    if _REPEATS not in parts:
        return False
    within = parts[: parts.index(_REPEATS)]
    return name.split(".")[: len(within)] == within if within else True


def trains(cell: nn.Cell) -> bool:
    """Whether a call of the cell that begins now trains: its operations are recorded for a backward.

    MindSpore also records operations that do not train: everything after a differentiated function has raised, and every call
    of a cell with ``set_grad``.
    """
    return REPLAYING.get() or (autograd.recording() and (_DIFFERENTIATING is None or _is_trained(cell)))


def _is_trained(cell: nn.Cell) -> bool:
    """Whether a backward will follow: a differentiated function is on the stack, or a cell that requires gradients. In
    evaluation the cell must have an optimizer.
    """
    sign = "requires_grad" if cell.training else "optimizer"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _DIFFERENTIATING:
            return True
        if frame.f_code is nn.Cell.__call__.__code__ and getattr(frame.f_locals.get("self"), sign, None) not in (None, False):
            return True
        frame = frame.f_back
    return False


class TrainingFlag:
    """Says once that a model trains with its training flag off, so that its dropout has no effect."""

    def __init__(self, failures: Failures) -> None:
        self._failures = failures
        self._was_on = self._is_said = False

    def called(self, root: nn.Cell) -> None:
        """A forward that trains begins."""
        self._was_on |= root.training
        if root.training or self._is_said:
            return
        self._is_said = True
        said = "A model is trained with its training flag off: its gradients are recorded, but Dropout and BatchNorm act as in"
        if self._was_on:
            self._failures.warn(
                "training flag", f"{said} evaluation. It was on before: call set_train(True) after an evaluation."
            )
        else:
            self._failures.advise("training flag", f"{said} evaluation. Call set_train(True) on it unless this is intended.")


def _inside(cell: nn.Cell) -> set[int]:
    return {id(inner) for _, inner in cell.cells_and_names() if inner is not cell}
