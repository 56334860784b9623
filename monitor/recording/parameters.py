"""Collectors around an optimizer's step: gradients, weights and optimizer moments."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, Protocol, final

from monitor.recording.attached_model import MAX_LISTED, Attached, NamedParameter, ParameterSeries
from monitor.recording.backend import HookSet, Removable
from monitor.recording.phases import Collector, OptimizerTurn
from monitor.series import LEFT_BY_STEP, LOCAL, MOMENT_KINDS, OF_ONE_RANK, WITHOUT_ROWS, Placement
from monitor.terminal import counted, first_of

# --- Records weight gradients before and after the data-parallel ranks reduce them: the part common to all frameworks.

NOT_ACCUMULATED: Final = (
    "gradients were reduced or cleared between two backwards of a step, at least once: a row of such a step lacks the earlier "
    "backwards"
)
KEPT_BY: Final = (
    "; grad_reduced is not affected. If micro-batches are accumulated, {how} in all but the last one gives their sum here, and "
    "saves their reductions"
)
"""Follows ``NOT_ACCUMULATED`` where a call of the framework keeps gradients of micro-batches together."""
EACH_MICRO_BATCH: Final = "gradients are aggregated after every micro-batch: a row holds the last micro-batch's alone"
AGGREGATED_EARLY: Final = (
    "gradients are aggregated before the last micro-batch, at least in one step: a row of such a step holds the mean over the "
    "ranks so far and what this rank has added since; no_sync would keep them apart"
)
NOT_REDUCED: Final = (
    f"{WITHOUT_ROWS} of which no reduction over the data-parallel ranks was seen before the optimizer's step: in step "
    "{step} for {count}, {names}"
)
ONE_WRITES: Final = (
    "dp_group says that its ranks hold the same weights and moments of {count} ({names}), so rank {owner} alone writes them. "
    "But their gradients are not known to be reduced. If each rank holds others, as experts, those of the other ranks have no "
    "rows: let DistributedDataParallel ignore them, or pass no dp_group."
)
NOT_FOLLOWED: Final = (
    f"{WITHOUT_ROWS} that came before their step began, in a step without rows of gradients: one is step {{step}}"
)
SUMMED_EARLY: Final = (
    "missing where data-parallel ranks may have summed a gradient before it was accumulated, or between two micro-batches"
)

NOT_OF_THE_STEP: Final = frozenset({NOT_ACCUMULATED, EACH_MICRO_BATCH, AGGREGATED_EARLY})
"""Notes on ``grad_unreduced`` if it is not the sum over this rank's micro-batches."""


Reading = Literal["intact", "changed", "scaled", "unknown"]
"""The state of the gradients that an optimizer receives: as backward left them, changed since then by clipping or in another
way, or multiplied by a loss scale."""


@final
class GradientRows:
    """The rows of gradients of the step in progress.

    Attributes:
        unreduced: ``grad_unreduced``.
        reduced: ``grad_reduced``.
        each_micro_step: Whether ``grad_unreduced`` has a row for each micro-step.
        both: Whether ``grad_unreduced`` has rows at all.
        stepped: The parameters whose optimizer has had its turn. Gradients that a later backward leaves in them do not belong
            to this step. They belong to the next step or to none, such as the gradients that a generator leaves in its critic.
    """

    def __init__(self, attached: Attached) -> None:
        self.attached = attached
        self.each_micro_step = attached.config.monitor_mbs_grad
        self._clock = clock = attached.clock
        self.both = not attached.config.wg_reduced_only
        micro_steps = tuple(range(clock.micro_steps)) if self.each_micro_step else (-1,)
        self.unreduced = attached.series("grad_unreduced", micro_steps, recorded=self.both)
        self.reduced = attached.series("grad_reduced")
        self.stepped: set[NamedParameter] = set()
        self.backwards: Counter[NamedParameter] = Counter()
        self._local_notes: dict[str, None] = {}

    def note_local(self, said: str) -> None:
        """Add a note on ``grad_unreduced`` to the manifest, after earlier ones."""
        if not self.both:
            return
        self._local_notes[said] = None
        self.attached.note("grad_unreduced", "; ".join(self._local_notes))

    def micro_step(self, parameter: NamedParameter) -> int:
        """The micro-step of this backward. Without a root forward (compiled, scripted, or only parts of the model are called)
        it is the number of earlier backwards of the parameter.
        """
        if self._clock.forward[parameter.chunk] >= 0:
            return self._clock.backward_micro_step(parameter.chunk)
        self.backwards[parameter] += 1
        return self.backwards[parameter] - 1


class Reductions(Protocol):
    """Follows the reductions of gradients over the ranks, step by step.

    Attributes:
        is_whole: Whether every gradient that is read now contains every rank's part. Then ``is_reduced`` need not be asked.
        out_of_sight: Why reductions of these gradients cannot be seen; empty if they can.
    """

    is_whole: bool
    out_of_sight: str

    def begin_step(self) -> None:
        """A collected step begins."""

    def pause(self) -> None:
        """A step begins that is not collected."""

    def forward_begins(self) -> None:
        """A training forward begins in a collected step."""

    def forward_ends(self) -> None:
        """A forward has ended, in training or not."""

    def is_reduced(self, parameter: NamedParameter, gradient: Any) -> bool:
        """Whether a gradient is known to contain every rank's part when the optimizer's step begins."""

    def end_turn(self) -> None:
        """An optimizer has had its turn, and others have not: their gradients may be reduced now."""

    def remove(self) -> None:
        """Stop following."""


class GradientSource(Protocol):
    """Takes the gradients of a framework, and records them in the ``GradientRows`` that it was created with.

    Attributes:
        hooked: The parameters that need a hook; the framework reports the others.
        reading: The state of the gradients that were read last.
    """

    hooked: Sequence[NamedParameter]
    reading: Reading

    @property
    def reductions(self) -> Reductions:
        """Follows the reductions of the gradients."""

    def can_be_hooked(self, parameter: NamedParameter) -> bool:
        """Whether a parameter takes hooks now. A frozen one does not."""

    def register(self, parameter: NamedParameter, read: Callable[[Any], None]) -> Removable:
        """Call ``read``, which does not raise, with the framework's argument when a backward reaches a parameter."""

    def found(self, parameter: NamedParameter, argument: Any) -> None:
        """A backward has reached a hooked parameter."""

    def begin_step(self) -> None:
        """A collected step begins, without gradients."""

    def before_reading(self, turn: OptimizerTurn) -> None:
        """The reduced gradients of an optimizer are about to be read."""

    def after_reading(self, turn: OptimizerTurn, not_reduced: str) -> None:
        """The reduced gradients were read.

        Args:
            not_reduced: A note that some gradients of the run were not reduced; empty if all were.
        """

    def remove(self) -> None:
        """Remove hooks other than those of ``register``."""


@final
class GradientCollector(Collector):
    """``grad_unreduced`` and ``grad_reduced``.

    Attributes:
        is_reduced: Whether a gradient is known to contain every rank's part when the optimizer's step begins.
        read: By id of an optimizer, how many of its gradients were read in this step; None if some could not be.
        readings: By id of an optimizer, the state of these gradients.
    """

    def __init__(self, attached: Attached, new_source: Callable[[GradientRows], GradientSource]) -> None:
        self._failures, modules = attached.failures, attached.backend.modules
        self._due, self._clock = attached.recorder.due("wg_distribution"), attached.clock
        self._framework = attached.framework
        self._rows = GradientRows(attached)
        self._source = new_source(self._rows)
        self._reductions = self._source.reductions
        self.is_reduced = self._reductions.is_reduced
        self._local: list[NamedParameter] = []
        self._not_reduced = ""
        self._followed = self._not_followed = False
        self._found = 0
        self.read: dict[int, int | None] = {}
        self.readings: dict[int, Reading] = {}
        self._hooks = HookSet()
        self._frozen = set(self._source.hooked)
        self._hook_thawed()
        ends = self._failures.guarded("ending a forward", self._forward_ends)
        for root in filter(modules.takes_hooks, attached.watch.chunks):
            self._hooks.add(modules.after_forward(root, ends, compiled=True))

    def begin_step(self, *, before_a_turn: bool) -> None:
        self.read.clear()
        self.readings.clear()
        followed, self._followed = self._followed, self._due.now
        self._not_followed = before_a_turn and not followed
        if not self._due.now:
            self._rows.backwards.clear()
            self._reductions.pause()
            return
        self._rows.stepped.clear()
        if before_a_turn and followed:  # keep what is known about the gradients
            return
        self._rows.backwards.clear()
        self._source.begin_step()
        if len(self._rows.reduced):
            self._reductions.begin_step()

    def forward_begins(self) -> None:
        self._reductions.forward_begins()

    def _forward_ends(self, *_: Any) -> None:
        if self._due.now:
            self._reductions.forward_ends()
            self._hook_thawed()

    def gradients_ready(self, turn: OptimizerTurn) -> None:
        """Read the gradients that are reduced. The others have no row, and a warning says so."""
        self._source.before_reading(turn)
        self._local, self._found = [], 0
        self._rows.reduced.record_all(self._if_reduced, turn.held)
        if self._local and self._not_followed:
            self._not_reduced = self._not_reduced or NOT_FOLLOWED.format(step=self._clock.step)
        elif self._local:
            self._warn_not_reduced(self._local)
        self._source.after_reading(turn, self._not_reduced)
        self.read[id(turn.optimizer)] = None if self._local else self._found
        self.readings[id(turn.optimizer)] = self._source.reading

    def recorded(self) -> Iterator[tuple[NamedParameter, Placement]]:
        """The parameters whose reduced gradient this rank records, and its placement."""
        return self._rows.reduced.placed()

    def end_turn(self, turn: OptimizerTurn | None) -> None:
        if turn is not None:
            self._rows.stepped.update(self._rows.unreduced.parameters if turn.held is None else turn.held)
            self._reductions.end_turn()

    def remove(self) -> None:
        self._hooks.remove()
        self._source.remove()
        self._reductions.remove()

    def _if_reduced(self, parameter: NamedParameter) -> Any:
        gradient = self._framework.reduced(parameter)
        if self._reductions.is_whole or self.is_reduced(parameter, gradient):
            self._found += gradient is not None
            return gradient
        if gradient is not None:
            self._local.append(parameter)
        return None

    def _warn_not_reduced(self, local: Sequence[NamedParameter]) -> None:
        if why := self._reductions.out_of_sight:
            self._not_reduced = self._not_reduced or why
            self._failures.nothing_of("grad_reduced in compiled code", why)
            return
        listed = first_of([one.name for one in local], MAX_LISTED)
        if not self._not_reduced:
            self._not_reduced = NOT_REDUCED.format(step=self._clock.step, count=counted(len(local), "parameter"), names=listed)
            self._advise_of_replicas(local)
        self._failures.warn(
            "gradients that are not reduced",
            f"No reduction of {counted(len(local), 'gradient')} over the data-parallel ranks was seen before "
            f"the optimizer's step {self._clock.step} ({listed}): their grad_reduced is missing. If the optimizer reduces "
            "inside its step, they are local before it. If they are reduced, pass the groups: dp_group (possibly of one "
            "rank) and tp_group to set_monitor, process_group to TrainerMon.",
        )

    def _advise_of_replicas(self, local: Sequence[NamedParameter]) -> None:
        """Say that one rank writes weights that others hold as only ``dp_group`` says: their gradients are not reduced."""
        attached = self._rows.attached
        config, ownership = attached.config, attached.watch.ownership
        if ownership.dp_group is None or not (config.param_distribution or config.mv_distribution):
            return
        unknown = [one for one in local if (self._framework.placement("param_origin", one) or LOCAL) == LOCAL]
        placed = {one.name: attached.placement("param_origin", one) for one in unknown}
        shared = [name for name, placement in placed.items() if placement.replicas]
        if shared:
            owner, count = ownership.owner(placed[shared[0]]), counted(len(shared), "parameter")
            said = ONE_WRITES.format(count=count, names=first_of(shared, MAX_LISTED), owner=owner)
            self._failures.advise("weights that one rank writes", said)
            attached.note(OF_ONE_RANK, said)

    def _hook_thawed(self) -> None:
        """Hook the parameters that could not be hooked before: a frozen parameter takes hooks once it is trained."""
        for parameter in [frozen for frozen in self._frozen if self._source.can_be_hooked(frozen)]:
            self._hooks.add(self._hook(parameter))
            self._frozen.remove(parameter)

    def _hook(self, parameter: NamedParameter) -> Removable:
        # Python's garbage collector does not see references inside these hooks: a strong one would keep the model forever.
        source, known = weakref.ref(self._source), weakref.ref(parameter)

        def read(argument: Any) -> None:
            living, watched = source(), known()
            if living is not None and watched is not None:
                living.found(watched, argument)

        return self._source.register(parameter, self._failures.guarded("reading the gradient", read, of=parameter.name))


@final
class WeightCollector(Collector):
    """``param_origin`` and ``param_updated``: weights before and after the step; master weights if the optimizer has them."""

    def __init__(self, attached: Attached) -> None:
        self._origin = attached.series("param_origin")
        self._updated = attached.series("param_updated")
        self._framework = attached.framework

    def before_step(self, turn: OptimizerTurn) -> None:
        self._origin.record_all(self._framework.weight, turn.held)

    def after_step(self, turn: OptimizerTurn) -> None:
        self._updated.record_all(self._framework.weight, turn.held)


@final
class MomentCollector(Collector):
    """``exp_avg``, ``exp_avg_sq`` and ``max_exp_avg_sq``, read before the step: a new optimizer has none in its first step.

    To see what changes between steps, they are read after the step, too.
    """

    def __init__(self, attached: Attached) -> None:
        self._series = {kind: attached.series(kind) for kind in MOMENT_KINDS}
        left = MOMENT_KINDS if attached.config.checks_moments_between_steps else ()
        self._left = {kind: attached.series(f"{kind}{LEFT_BY_STEP}") for kind in left}
        every = (one for series in (*self._series.values(), *self._left.values()) for one in series.parameters)
        self._parameters = tuple(dict.fromkeys(every))
        self._framework = attached.framework
        self._note = attached.note
        self._noted = 0

    def before_step(self, turn: OptimizerTurn) -> None:
        """Record the moments of the optimizer that is about to step."""
        self._record(self._series, turn)
        self._note_absences()

    def after_step(self, turn: OptimizerTurn) -> None:
        if self._left:
            self._record(self._left, turn)

    def _record(self, of_kinds: Mapping[str, ParameterSeries], turn: OptimizerTurn) -> None:
        ids, optimizer, moments_of = turn.ids, turn.optimizer, self._framework.moments
        kinds, stepped, found = tuple(of_kinds), list[NamedParameter](), list[Sequence[Any]]()
        for parameter in self._parameters if turn.held is None else turn.held:
            if ids is not None and id(parameter.tensor) not in ids:
                continue  # frozen: its state is from earlier steps
            try:
                found.append(moments_of(kinds, parameter, optimizer))
                stepped.append(parameter)
            except Exception as error:
                for series in of_kinds.values():
                    series.missing(parameter.name, error)
        for series, moments in zip(of_kinds.values(), zip(*found, strict=True), strict=False):
            series.record_all(dict(zip(stepped, moments, strict=True)).get, stepped)

    def _note_absences(self) -> None:
        """Note in the manifest which optimizer state has no rows, because it is not a moment of one parameter."""
        absent = self._framework.unusable_state
        if len(absent) > self._noted:
            self._noted = len(absent)
            self._note("optimizer_state", "; ".join(absent))
