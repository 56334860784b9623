"""Records weights, moments and gradients of compiled code from outside, wherever no operator in C measures in it.

Weights and moments live between two executions of compiled code. So Python reads them before and after each execution that may
step an optimizer, with the ordinary reader. Nothing is added to what MindSpore compiles, so training has the same bits.
Activations and gradients exist only during an execution. They have no rows, unless MindSpore's operations measure them
(``operations``). On request compiled code copies the gradients that an optimizer is given (``copies``), and Python reads the
copies.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from mindspore import Parameter, nn
from mindspore.nn.cell import _cell_graph_executor

from monitor.failures import Failures
from monitor.mindspore.autograd import recording
from monitor.mindspore.compiled.absences import PARTIAL, is_called, parameters_of
from monitor.mindspore.compiled.bytecode import UnmeasuredBytecode
from monitor.mindspore.compiled.computations import Groups, groups_of
from monitor.mindspore.compiled.copies import SUMMED, GradientCopies, copies_in
from monitor.mindspore.compiled.fallback import COMPILERS, CompilerListener, Fallback
from monitor.mindspore.compiled.parameter_tape import tapes_in
from monitor.mindspore.compiled.replay import REPLAYING, flush
from monitor.mindspore.frameworks.optimizer_state import innermost
from monitor.mindspore.tape import BY_OPERATIONS, COMPILED_VARIABLE, ON_REQUEST, changes_are_accepted, could_be_measured
from monitor.recording.patches import CallPatch
from monitor.recording.startup_estimate import records_run_numbers
from monitor.series import kinds_asked_for
from monitor.stats.mindspore.tensors import on_host

if TYPE_CHECKING:
    from monitor.config import MonitorConfig
    from monitor.mindspore.compiled.program import Program
    from monitor.mindspore.optimizer_steps import GradientReceiver

MISSING: Final = (
    "A training step is compiled (GRAPH_MODE or @jit), and the monitor measures nothing inside: {why}. Weights and moments are "
    "read before and after the step. These cannot be read there and have no rows: {fields}. {to_do} to record them."
)
IN_PYTHON: Final = "Use PYNATIVE_MODE without @jit"
NOT_THERE: Final = ("its operator for compiled code cannot be used here", IN_PYTHON)
NOT_COPIED: Final = (
    NOT_THERE[0],
    f"{IN_PYTHON}, or before set_monitor set {COMPILED_VARIABLE}=1 for grad_reduced, or slowly {BY_OPERATIONS} for most,",
)
NOT_USED: Final = ("last bits of training could change", f"{IN_PYTHON}, or {ON_REQUEST},")
LEFT_OUT: Final = ("the step was compiled without its operators", IN_PYTHON)
EARLIER: Final = (
    "the step was compiled before the monitor was attached",
    "Call set_monitor before the first step, or make the @jit function or the training cell anew after it,",
)
"""Why compiled code measures nothing, and what to do."""
SEVERAL: Final = (
    "Compiled code has made {count} steps in one call, as with data sinking. Weights and moments can only be read before the "
    "first of them and after the last one. The rows of the steps in between are missing. Pass sink_size=1 to Model.train to "
    "record them."
)
BETWEEN: Final = kinds_asked_for(("param_distribution", "mv_distribution"))
ELSEWHERE: Final = (
    "Weights or the optimizer's state were replaced (set_data, load_param_into_net) after a @jit function was compiled that "
    f"trains them. MindSpore continues to train the earlier tensors, which Python no longer sees. So the rows of {BETWEEN} are "
    "missing. Load before the first call of the function, or make the function anew afterwards."
)
NOT_MEASURED: Final = (
    "A training step is compiled (GRAPH_MODE or @jit). MindSpore's operations measure activations and gradients in it, and "
    "weights and moments are read before and after it. These cannot be measured so and have no rows: {fields}. "
    f"{IN_PYTHON} to record them."
)
FORWARD: Final = "The forward is"
BOTH: Final = "The forward and the backward are"
NOT_SEEN: Final = (
    " compiled (@jit or vmap), and the monitor measures nothing inside: {why}. These have no rows: {fields}. {to_do} to record "
    "them."
)
INSIDE: Final = "actv, actv_grad, grad_unreduced"
MEASURED: Final = ("xy_distribution",)
"""The fields of which MindSpore's operations measure all."""
SEVERAL_MEASURED: Final = (
    "Compiled code has made {count} steps in one call, as with data sinking. The measurements do not show to which step they "
    f"belong, so these steps have no rows of {INSIDE}. Pass sink_size=1 to Model.train to record them."
)
GRADIENTS: Final = "wg_distribution"
NOT_OUTSIDE: Final = (
    *("xy_distribution", "wg_distribution", "ur_distribution", "mg_direction", "optimizer_health"),
    *("recording_l2_features", "stack_info"),
)
"""The fields of the configuration whose rows need more than weights and moments."""
OF_FORWARDS: Final = ("xy_distribution", "recording_l2_features", "stack_info")
"""Fields whose rows come from hooks if Python calls the model and compiled code only steps the optimizer."""

COUNTS: Final = ("global_step", "state_step", "step_t")
"""The parameters in which optimizers of MindSpore count their steps. Some, such as ``experimental.optim.SGD``, count none."""


@dataclass(eq=False)
class Held:
    """An optimizer of which compiled code has weights and state.

    Attributes:
        parameters: These, if the code keeps the tensors that they had when it was compiled; empty for cells.
        count: The parameter that counts its steps; None if the compiled code has none, and makes a step in each execution.
        gradients: The copies of its gradients, by index.
        sums: The groups over which these are summed, by the copy's name.
        addresses: Where ``parameters`` were after the first execution; None before it.
    """

    parameters: Sequence[Parameter]
    count: Parameter | None
    gradients: Sequence[Parameter | None]
    sums: Mapping[str, Groups]
    addresses: Sequence[int] | None = None

    def is_elsewhere(self) -> bool:
        """Whether ``parameters`` have other tensors by now. Waits for the execution."""
        return self.addresses is not None and self.addresses != self.addresses_now()

    def addresses_now(self) -> Sequence[int]:
        return [one.data_ptr() for one in self.parameters]


@dataclass(eq=False, frozen=True)
class Stepping:
    """An optimizer in an execution that may step it.

    Attributes:
        held: What the compiled code has of it.
        before: The count before the execution.
        take_back: Removes the rows that were read before the execution.
        is_unseen: Whether Python does not see what the execution steps.
    """

    optimizer: nn.Cell
    given: GradientReceiver
    held: Held
    before: int
    take_back: Callable[[], None]
    is_unseen: bool = False

    def steps(self) -> int:
        """How many steps it has made. Waits for the execution."""
        return 1 if self.held.count is None or self.is_unseen else max(0, _number(self.held.count) - self.before)


class Code(NamedTuple):
    """Compiled code.

    Attributes:
        held: The optimizers that it may step.
        tapes: The tapes that MindSpore's operations write to in it.
        has_weights: Whether it has weights of the model.
    """

    held: Mapping[nn.Cell, Held]
    tapes: Sequence[Parameter]
    has_weights: bool


class Execution(NamedTuple):
    """An execution of compiled code.

    Attributes:
        steppings: The optimizers that it may step.
        writes: Whether MindSpore's operations measure in it.
    """

    steppings: Sequence[Stepping] = ()
    writes: bool = False


NOTHING: Final = Execution()


class StepsFromOutside(CompilerListener):
    """Reports the steps of optimizers in compiled code to a listener: an ``Attachment``.

    Attributes:
        is_replaying: Whether forwards are reported that were made inside a step that is being reported.
    """

    def __init__(
        self,
        optimizers: Sequence[tuple[nn.Cell, GradientReceiver]],
        listener: Any,
        failures: Failures,
        program: Program | None = None,
    ) -> None:
        """Follow executions from now on.

        Args:
            program: What compiled code measures itself.
        """
        self._optimizers, self._listener, self._failures = dict(optimizers), listener, failures
        self._program = program
        self._weights = parameters_of(listener.watch.chunks)
        self._known: dict[str, Code] = {}
        self._running = threading.local()
        self._begins = failures.guarded("reading before compiled code", self._before)
        self._ends = failures.guarded("reading after compiled code", self._after)
        self._fails = failures.guarded("dropping what was read before compiled code", self._drop)
        self._reads_gradients = failures.guarded("reading gradients", listener.gradients_ready)
        self._forward_in: int | None = None
        self.is_replaying = False
        self._inside = ""
        self._looked_at: dict[str, MonitorConfig] = {}
        asked = listener.watch.config.wg_distribution and changes_are_accepted() and not could_be_measured()
        self._copies = self._new_copies(optimizers) if asked else None
        say = failures.guarded("following bytecode", self._say_unmeasured)
        self._bytecode = UnmeasuredBytecode(say) if program is None else None
        for patch in (*PATCHES, *COMPILERS):
            patch.add(self)

    def _new_copies(self, optimizers: Sequence[tuple[nn.Cell, GradientReceiver]]) -> GradientCopies:
        places = [(optimizer, given.place) for optimizer, given in optimizers]
        return GradientCopies(places, self._recorded, self._failures)

    def _recorded(self) -> Sequence[Parameter]:
        """The parameters whose gradients are recorded."""
        wanted = self._listener.watch.config.wg_distribution
        return [one.tensor for one in self._listener.names.parameters()] if wanted else []

    def remove(self) -> None:
        if self._copies is not None:
            self._copies.remove()
        if self._bytecode is not None:
            self._bytecode.remove()
        for patch in (*PATCHES, *COMPILERS):
            patch.remove(self)

    def _say_unmeasured(self, said: str) -> None:
        self._failures.advise("bytecode", said)  # Python may call all of the model, and then nothing is missing
        self._listener.sealer.note("compiled_code: bytecode", said)

    # Each execution of this thread has an entry: None before it is known what is executed.

    @property
    def _open(self) -> list[Execution | None]:
        found: list[Execution | None] = self._running.__dict__.setdefault("open", [])
        return found

    def call_begins(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if patch.name == RUN:
            known = getattr(args[1], "phase_cache", {}).get(kwargs.get("phase"))
            self._open.append((known and self._begins(args[0], known)) or NOTHING)
        else:
            self._open.append(None)

    def succeeded(self, others: Sequence[Fallback], executor: Any, phase: str) -> None:
        del others
        if self._open and self._open[-1] is None:  # a function was compiled, and is about to be executed
            self._open[-1] = self._begins(executor, phase) or NOTHING

    def call_ended(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del patch, args, kwargs, result
        if self._open and any(found := self._open.pop() or NOTHING):
            self._ends(found)

    def call_raised(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        del patch, args, kwargs
        if self._open:
            for one in (self._open.pop() or NOTHING).steppings:
                self._fails(one)

    def _before(self, executor: Any, phase: str) -> Execution:
        """Compiled code is about to be executed."""
        program = self._program
        if program is not None and program.measures(phase):
            return NOTHING  # its entries report the steps
        if phase not in self._known:
            self._known[phase] = self._code_of(executor, phase)
        held, tapes, has_weights = self._known[phase]
        writes = program is not None and program.is_measured_by(tapes)
        if has_weights and not held and program is None:
            self._inside = FORWARD if recording() else BOTH
        if not held or (not _is_of_cells(executor) and is_called(self._optimizers)):
            return Execution((), writes)  # Python sees the step
        flush(program)
        missing = partial(self._missing, writes=writes, has_gradients=any(one.gradients for one in held.values()))
        self._warn_of_missing(NOT_MEASURED if writes else MISSING, partial(self._why_missing, phase), missing)
        if not writes:
            self._count_forward()
        return Execution([self._begin(optimizer, one) for optimizer, one in held.items()], writes)

    def _code_of(self, executor: Any, phase: str) -> Code:
        parameters = tuple(executor._graph_executor.get_params(phase).values())
        ids = {id(one) for one in parameters}
        found: dict[nn.Cell, Held] = {}
        for optimizer in self._optimizers:
            every = parameters_of([optimizer])
            if ids & (every - self._weights) and ids & every & self._weights:
                counts = (getattr(innermost(optimizer), name, None) for name in COUNTS)
                count = next((count for count in counts if id(count) in ids), None)
                kept = [] if _is_of_cells(executor) else [one for one in parameters if id(one) in every]
                copies = copies_in(parameters, optimizer)
                names = [one.name for one in copies if one is not None]
                found[optimizer] = Held(kept, count, copies, groups_of(executor, phase, names) if names else {})
        return Code(found, tapes_in(parameters), bool(ids & self._weights))

    def stepped_in_python(self) -> None:
        """Python calls an optimizer. Unless it has called the model in this step, compiled code has."""
        inside, self._inside = self._inside, ""
        if inside and not self._listener.begun:
            why = NOT_USED if could_be_measured() else NOT_THERE
            self._warn_of_missing(inside + NOT_SEEN, lambda: why, partial(self._missing_inside, inside))

    def _missing_inside(self, inside: str, config: MonitorConfig) -> list[str]:
        """The fields and kinds that the step has no rows of if compiled code has called the model."""
        missing = [field for field in OF_FORWARDS if getattr(config, field)]
        has_gradients = inside == FORWARD or not config.wg_distribution or config.wg_reduced_only
        return missing if has_gradients else [*missing, "grad_unreduced"]

    def _warn_of_missing(
        self, said: str, why_missing: Callable[[], tuple[str, str]], missing_in: Callable[[MonitorConfig], Sequence[str]]
    ) -> None:
        config = self._listener.watch.config
        if not self._listener.modules.recorder.active or self._looked_at.get(said) is config:
            return
        self._looked_at[said] = config
        if missing := missing_in(config):
            why, to_do = why_missing()
            said = said.format(why=why, fields=", ".join(missing), to_do=to_do)
            # The check for missing kinds says nothing of kinds that a cause names.
            self._say("compiled_code", f"{kinds_asked_for(missing)} in compiled code", said)

    def _say(self, note: str, what: str, said: str) -> None:
        self._failures.nothing_of(what, said)
        self._listener.sealer.note(note, said)

    def _missing(self, config: MonitorConfig, *, writes: bool, has_gradients: bool) -> list[str]:
        """The fields and kinds that the step has no rows of."""
        recorded = OF_FORWARDS if self._has_forward else MEASURED if writes else ()
        missing = [field for field in NOT_OUTSIDE if getattr(config, field) and field not in recorded]
        if GRADIENTS in missing and (has_gradients or recorded):
            missing.remove(GRADIENTS)
            missing += [] if has_gradients else ["grad_reduced"]
            missing += [] if recorded or config.wg_reduced_only else ["grad_unreduced"]
        if records_run_numbers(config):
            missing.append("learning_rate")
        return missing

    def _why_missing(self, phase: str) -> tuple[str, str]:
        """Why compiled code measures nothing, and what to do."""
        if self._program is not None:
            said = self._program.absences.said_of(phase)
            return (NOT_USED if said == PARTIAL else EARLIER) if said and self._program.fallback.has_taps else LEFT_OUT
        if could_be_measured():
            return NOT_USED
        return NOT_THERE if changes_are_accepted() or not self._listener.watch.config.wg_distribution else NOT_COPIED

    @property
    def _has_forward(self) -> bool:
        """Whether Python has called the model in this step, so that only the optimizer is compiled."""
        return bool(self._listener.begun) and self._forward_in != self._listener.clock.step

    def _count_forward(self) -> None:
        """Count a forward of the model, unless Python has called it in this step."""
        if self._has_forward:
            return
        token = REPLAYING.set(True)
        try:
            self._listener.micro_batch_begins()
            self._listener.micro_batch_ends(())
        finally:
            REPLAYING.reset(token)
        self._forward_in = self._listener.clock.step

    def _begin(self, optimizer: nn.Cell, held: Held) -> Stepping:
        given = self._optimizers[optimizer]
        if held.is_elsewhere():
            self._say("replaced_tensors", f"reading {BETWEEN} of replaced tensors", ELSEWHERE)
            return Stepping(optimizer, given, held, 0, _nothing, is_unseen=True)
        before = 0 if held.count is None else _number(held.count)
        given.begin_step(())
        given.is_outside = True
        step, recorder = self._listener.clock.step, self._listener.modules.recorder
        writes = recorder.table.writes
        self._listener.before_step(optimizer)
        if self._listener.clock.step != step:  # it had its turn in that step
            writes = 0
        return Stepping(optimizer, given, held, before, partial(recorder.forget, writes + 1, recorder.table.writes))

    def _after(self, execution: Execution) -> None:
        """Compiled code was executed."""
        run = execution.steppings
        steps = {one: one.steps() for one in run}
        for one in run:
            if not steps[one]:
                self._drop(one)
            elif one.is_unseen:
                self._listener.unseen_step(one.optimizer)
                steps[one] = 0
            elif one.held.addresses is None:
                one.held.addresses = one.held.addresses_now()
        if execution.writes:
            self._take_rows(max(steps.values(), default=0))
            if run:
                self._count_forward()  # unless one was measured
        while (most := max(steps.values(), default=0)) > 1:
            self._failures.nothing_of(f"steps without {BETWEEN}", SEVERAL.format(count=most))
            for one in [one for one in run if steps[one] == most]:
                self._listener.unseen_step(one.optimizer)
                steps[one] -= 1
        for one in [one for one in run if steps[one]]:
            self._end(one)

    def _take_rows(self, steps: int) -> None:
        """Record what MindSpore's operations have measured in an execution that has made so many steps."""
        if steps > 1 and self._program is not None and self._program.tape is not None:
            self._program.tape.drain()
            self._failures.nothing_of(f"steps without {INSIDE}", SEVERAL_MEASURED.format(count=steps))
            return
        self.is_replaying = steps > 0
        try:
            flush(self._program)
        finally:
            self.is_replaying = False

    def _drop(self, one: Stepping) -> None:
        """An optimizer has made no step."""
        one.take_back()
        one.given.end_step()

    def _end(self, one: Stepping) -> None:
        for copy in one.held.gradients:
            if copy is not None:
                setattr(copy, SUMMED, one.held.sums.get(copy.name))
        one.given.begin_step(one.held.gradients)
        self._reads_gradients(one.optimizer)
        one.given.call_ended()
        try:
            self._listener.after_step(one.optimizer)
        finally:
            one.given.end_step()


def _nothing() -> None:
    """No rows were read before the execution."""


def _is_of_cells(executor: Any) -> bool:
    """Whether an executor is that of ``GRAPH_MODE``."""
    return isinstance(executor, type(_cell_graph_executor))


def _number(count: Parameter) -> int:
    return int(on_host(count).reshape(-1)[0])


# --- The patches.

RUN: Final = "run"
"""The function of MindSpore that executes a compiled cell."""
CALL: Final = "__call__"
"""The one that compiles a function and executes it."""


def _patches() -> Sequence[CallPatch]:
    """MindSpore's executors of cells and of functions. They have moved between versions."""
    of_cells = type(_cell_graph_executor)
    of_functions = getattr(sys.modules[of_cells.__module__], "_JitExecutor", None)
    found = [(of_cells, RUN), *([] if of_functions is None else [(of_functions, CALL)])]
    return tuple(CallPatch(owner, name) for owner, name in found)


PATCHES: Final = _patches()
