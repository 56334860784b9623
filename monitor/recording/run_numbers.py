"""The run's own numbers: what the loop logs, learning rates, and the total norm of gradients before and after clipping."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from math import hypot
from typing import Any, Final, final

from monitor.anomalies.overflows import LOGGED
from monitor.recording.attached_model import Attached, NamedParameter
from monitor.recording.parameters import GradientCollector
from monitor.recording.phases import UNSCALED, Clipping, Collector, OptimizerTurn
from monitor.recording.recorder import RecordedSeries
from monitor.series import CLIPPED_NORM, GRAD_NORM, LEARNING_RATE, RUN_KIND, Placement, Series
from monitor.stats.ops import TotalNorm
from monitor.stats.partials import COUNT, SUM
from monitor.stats.table import LateNumber, Postscript

SUMMED: Final = frozenset({"tokens"})
"""Names whose calls in one step are added up. Of the calls of any other name the mean is recorded."""

MOST_NAMES: Final = 1000
"""Names that a loop may log: each takes memory in every step."""

LOSS_SCALE: Final = "loss_scale"
"""A loop that logs it has steps that are skipped because it is too high."""

BATCH: Final = "batch"
"""The name under which ``log`` takes identifiers, which are no numbers."""

BETWEEN_STEPS: Final = (
    "log({names}) was called after optimizer.step() has ended a step, and before the next forward in training mode. It is not "
    "known to which of the two steps the numbers belong, and they are not recorded. Call log before optimizer.step(), or pass "
    "the loss in the same call: then they belong to the step that has ended."
)
UNSEEN_FORWARDS: Final = (
    "The monitor sees no forward of the model, as in compiled code, and the first step did not log {names} before or after "
    "optimizer.step(). It is not known to which step they belong, and they are not recorded. Call log in the first step, too."
)
TOO_LATE: Final = (
    "log({names}) was called after the rows of its step were written, and has no row. Call log before optimizer.step(), or "
    "within a second after it."
)
ON_DEVICE: Final = (
    "after optimizer.step() a number must be one of the host: pass loss.item(), or call log before optimizer.step()"
)

EPS: Final = 1e-6
"""Every framework adds this to the norm before it divides the limit by it."""

FROM_ROWS: Final = object()
"""Takes the place of a norm that the rows of gradients give."""

_NOT_RECORDED: Final = "This number has no row."


@final
class RunNumbers(Collector):
    """Records rows of the kind ``run``, one for each name and step.

    Args:
        gradients: Reads the gradients; None if they are not recorded.
        automatic: Whether to record learning rates and norms, and not only what the loop logs.
    """

    def __init__(self, attached: Attached, gradients: GradientCollector | None, *, automatic: bool) -> None:
        self._attached, self._gradients, self._automatic = attached, gradients, automatic
        self._recorder, self._framework = attached.recorder, attached.framework
        self._tensors, self._failures = attached.backend.tensors, attached.failures
        self._scalar = self._tensors.scalar()
        self._is_alone = attached.watch.ownership.world_size == 1
        self._series: dict[str, RecordedSeries] = {}
        self._logged: dict[str, tuple[Any, int]] = {}
        self._rates: dict[str, Any] = {}
        self._first_group: dict[int, int] = {}
        self._clippings: list[Clipping] = []
        self._turns: dict[int, Collection[int] | None] = {}
        self._whole: frozenset[int] | None = None
        self._ids = frozenset[int]()
        self._all_here: bool | None = None
        self._norm_at: int | None = None
        self._covered: dict[int, tuple[Collection[int], bool]] = {}

    def log(self, numbers: Mapping[str, Any], *, late: bool = False) -> None:
        """Record numbers of the step in progress, or of the step that has ended if ``late``. See ``ModelMonitor.log``."""
        for name, given in numbers.items():
            try:
                self._log(name, given, late)
            except Exception as error:
                self._failures.report("logging a number", error, _NOT_RECORDED, of=name)

    def _log(self, name: str, given: Any, late: bool) -> None:
        if name not in self._series and len(self._series) >= MOST_NAMES:
            raise ValueError(f"there are {MOST_NAMES} names already: log one number under one name in all steps")
        if name == LOSS_SCALE and name not in self._series:
            self._attached.note(LOGGED, "the loop logs a loss scale: grad_unreduced and actv_grad may be multiplied by it")
        number, logged = self._number(given), self._recorder.postscript.logged if late else self._logged
        total, calls = logged.get(name, (0.0, 0))
        if calls and isinstance(total, float) != isinstance(number, float):
            raise TypeError(
                "in one step it was a number of the host and a tensor of a device: pass one of the two in all calls"
            )
        with self._tensors.computing():
            total = number if not calls else total + number
        (self._add if late else self._record)(name, total, 1 if name in SUMMED else calls + 1)
        logged[name] = total, calls + 1

    def _add(self, name: str, total: Any, count: int) -> None:
        """Add a row to the step that has ended, whose rows may be written at any moment."""
        if not isinstance(total, float):
            raise TypeError(ON_DEVICE)
        table, scalar = self._recorder.table, self._scalar
        with self._recorder.lock:
            series = table.series.index_of(self._series_of(name).series)
            number = LateNumber(series, table.layout_of(tuple(scalar.shape), scalar.dtype), total, count)
        if not self._recorder.postscript.add(number):
            self._failures.warn("logging too late", TOO_LATE.format(names=name))

    def begin_step(self, *, before_a_turn: bool) -> None:
        """Forget the last step. Clippings before a turn belong to the step that begins with it."""
        del before_a_turn
        self._forget()

    def gradients_ready(self, turn: OptimizerTurn) -> None:
        """Take the learning rates with which the optimizer is about to step."""
        if self._automatic:
            self._failures.guarded("reading the learning rates", self._take_rates, _NOT_RECORDED)(turn.optimizer)
        self._turns[id(turn.optimizer)] = turn.ids
        self._clippings = [self._checked(one, turn) for one in self._clippings]

    def _checked(self, one: Clipping, turn: OptimizerTurn) -> Clipping:
        """A clipping of gradients that an optimizer is about to receive: without its norm if they have changed since."""
        if one.intact is None or (turn.ids is not None and one.of is not None and one.of.isdisjoint(turn.ids)):
            return one
        known = turn.scaling in ("", UNSCALED) and one.intact()
        return replace(one, norm=one.norm if known else None, intact=None)

    def clipped(self, clipping: Clipping) -> None:
        """Take a snapshot of the norm: the loop may change its tensor."""
        if self._automatic:
            self._failures.guarded("reading the norm of clipped gradients", self._take_norm, _NOT_RECORDED)(clipping)

    def _take_norm(self, clipping: Clipping) -> None:
        norm = None if clipping.norm is None else self._number(clipping.norm)
        self._clippings.append(replace(clipping, norm=norm))

    def _take_rates(self, optimizer: Any) -> None:
        several = self._framework.optimizers if len(self._framework.optimizers) > 1 else ()
        if id(optimizer) not in self._first_group:
            groups = 0
            for one in several:  # their groups are counted one optimizer after the other
                self._first_group[id(one)] = groups
                groups += len(self._framework.learning_rates(one))
        for group, rate in enumerate(self._framework.learning_rates(optimizer), self._first_group.get(id(optimizer), 0)):
            if rate is not None:
                self._rates[f"{LEARNING_RATE}.{group}"] = self._number(rate)

    def _number(self, given: Any) -> Any:
        return given if type(given) is float else self._tensors.number_of(given)

    def before_seal(self) -> None:
        self._recorder.total = None
        self._recorder.postscript.end()
        self._recorder.postscript = Postscript(self._logged)
        for name, number in {**self._rates, **(dict(self._norms()) if self._automatic else {})}.items():
            if name not in self._logged:
                self._record(name, number)
        self._forget()

    def _forget(self) -> None:
        self._logged, self._rates, self._first_group = {}, {}, {}
        self._clippings, self._turns = [], {}

    def _record(self, name: str, number: Any, count: int = 1) -> None:
        numbers = {} if number is FROM_ROWS else {COUNT: float(count), SUM: number}
        x = self._scalar if number is FROM_ROWS or isinstance(number, float) else number
        self._recorder.record_numbers(self._series_of(name), numbers, x)

    def _series_of(self, name: str) -> RecordedSeries:
        if name not in self._series:
            self._series[name] = RecordedSeries(Series(RUN_KIND, 0, name))
        return self._series[name]

    # The total norm of gradients: what clipping has computed, or else the rows of the gradients that the optimizer received.

    def _norms(self) -> Iterator[tuple[str, Any]]:
        """The norms of the step that are known."""
        clippings = self._clippings_of_all()
        if clippings:
            yield GRAD_NORM, self._together([one.norm for one in clippings])
            if all(one.limit is not None for one in clippings):
                with self._tensors.computing():
                    clipped = [after(one.norm, one.limit) for one in clippings]
                yield CLIPPED_NORM, self._together(clipped)
        elif (rows := self._rows_of_all()) is not None and self._gradients is not None:
            states = set(self._gradients.readings.values())
            may_be_intact = not self._clippings and "changed" not in states and (self._is_alone or states == {"intact"})
            before = self._place_of_norm() if may_be_intact else None
            self._recorder.total = TotalNorm(rows, before, states == {"intact"}, self._is_alone)
            if may_be_intact:
                yield GRAD_NORM, FROM_ROWS
            if not may_be_intact or self._is_alone:  # the rows decide which of the two it is
                yield CLIPPED_NORM, FROM_ROWS

    def _place_of_norm(self) -> int:
        """The index of the series of the norm before clipping."""
        if self._norm_at is None:
            self._norm_at = self._recorder.table.series.index_of(self._series_of(GRAD_NORM).series)
        return self._norm_at

    def _together(self, norms: Sequence[Any]) -> Any:
        """The norm of several vectors as one."""
        if all(isinstance(one, float) for one in norms):
            return hypot(*norms)
        with self._tensors.computing():
            return norms[0] if len(norms) == 1 else sum(one * one for one in norms) ** 0.5

    def _clippings_of_all(self) -> list[Clipping]:
        """The clippings that together covered each gradient of the step once, by a norm that is known to be the total."""
        stepped = self._stepped() if self._clippings else None
        found = [one for one in self._clippings if one.of is None or stepped is None or not one.of.isdisjoint(stepped)]
        if not found or not all(one.norm is not None and (one.is_total or self._holds_all()) for one in found):
            return []
        if len(found) == 1 and found[0].of is None:
            return found
        parts = [one.of for one in found if one.of is not None]
        covered = frozenset[int]().union(*parts)
        once = len(parts) == len(found) and sum(map(len, parts)) == len(covered) and self._are_of_model(covered)
        return found if once and stepped is not None and not self._have_gradients(stepped - covered) else []

    def _are_of_model(self, ids: Collection[int]) -> bool:
        """Whether the model has all these parameters. An optimizer may step others, too, whose gradients a norm includes."""
        if not self._ids.issuperset(ids):  # walking over the names of a large model takes milliseconds
            self._ids = frozenset(id(one.tensor) for one in self._parameters(trained=False))
        return self._ids.issuperset(ids)

    def _stepped(self) -> frozenset[int] | None:
        """The ids of the parameters that optimizers have stepped in this step; None if they step all."""
        held = [one for one in self._turns.values() if one is not None]
        return frozenset[int]().union(*held) if held and len(held) == len(self._turns) else None

    def _have_gradients(self, ids: Collection[int]) -> bool:
        """Whether one of these parameters was stepped with a gradient."""
        if not ids:
            return False
        known = {id(one.tensor): one for one in self._parameters()}
        return any(one not in known or self._framework.reduced(known[one]) is not None for one in ids)

    def _rows_of_all(self) -> int | None:
        """The number of rows of ``grad_reduced`` that together are all gradients of the step; None if they are not all."""
        gradients = self._gradients
        if gradients is None or not self._turns or not all(map(self._is_covered, self._turns.values())):
            return None
        read = [gradients.read.get(one) for one in self._turns]
        if None in read or not {"scaled"}.isdisjoint(gradients.readings.values()):
            return None
        return sum(one for one in read if one is not None)

    def _is_covered(self, held: Collection[int] | None) -> bool:
        """Whether this rank records the whole gradient of each of these parameters. Most steps pass the same object."""
        if held is None or self._gradients is None:
            return False
        if self._whole is None:
            named = [(id(one.tensor), placed) for one, placed in self._gradients.recorded()]
            ids = [one for one, _ in named]
            here = {one for one, placed in named if self._is_alone or self._is_everywhere(placed)}
            self._whole = frozenset(here) if len(set(ids)) == len(ids) else frozenset()
        known = self._covered.get(id(held))
        if known is None or known[0] is not held:
            known = self._covered[id(held)] = held, self._whole.issuperset(held)
        return known[1]

    def _holds_all(self) -> bool:
        """Whether this rank, like every other, has all gradients whole, so that a norm over its own is the total."""
        if self._all_here is None:
            places = (self._attached.placement("grad_reduced", one) for one in self._parameters())
            self._all_here = self._is_alone or all(map(self._is_everywhere, places))
        return self._all_here

    def _is_everywhere(self, placement: Placement) -> bool:
        ranks = {*placement.replicas, *placement.unclaimed}
        is_whole = placement.shard is None and not placement.partial and not placement.differing and not placement.assumed
        return is_whole and len(ranks) == self._attached.watch.ownership.world_size

    def _parameters(self, *, trained: bool = True) -> Iterator[NamedParameter]:
        """All parameters of the model, or all that are trained, whether they are recorded or not."""
        for chunk, root in enumerate(self._attached.watch.chunks):
            for name, tensor in self._attached.backend.modules.parts(root).parameters:
                if tensor.requires_grad or not trained:
                    yield NamedParameter(chunk, name, tensor)


@final
class LoggedStep:
    """Finds the step to which numbers belong that a loop logs: the one in progress, or the one that has ended.

    A forward shows that a step has begun. Some forwards are not seen, such as those of compiled functions. There the first step
    shows where the loop logs: a name before the optimizer, or anything after it.

    Attributes:
        of_ended: What has recorded the numbers of the step that has ended.
    """

    def __init__(self) -> None:
        self.of_ended: RunNumbers | None = None
        self._ended = 0
        self._trains = self._called = False  # in the step in progress
        self._sees_training = self._sees_forwards = False  # in the step that has ended
        self._before, self._logs_after = set[str](), False

    def forward_begins(self, *, trains: bool) -> bool:
        """A forward with gradients begins, in training mode or not. Returns whether it shows that a step has begun."""
        self._trains, self._called = self._trains or trains, True
        return self._is_shown

    @property
    def _is_shown(self) -> bool:
        return self._trains if self._sees_training else self._called

    def step_ends(self, numbers: RunNumbers | None) -> None:
        """What comes from now on belongs to the next step, or says something of this one, whose numbers these are."""
        self._ended, self.of_ended = self._ended + 1, numbers
        self._sees_training, self._sees_forwards = self._trains, self._called
        self._trains = self._called = False

    def is_late(self, numbers: Collection[str], *, has_turn: bool, has_rows: bool) -> bool | None:
        """Whether these numbers belong to the step that has ended, and not to the one in progress; None if it is not known.

        Args:
            has_turn: Whether an optimizer has stepped in the step in progress.
            has_rows: Whether the step in progress has rows, such as gradients.
        """
        if has_turn:
            self._logs_after = True
            return False
        if not self._ended or self._is_shown or (has_rows and not self._sees_forwards):
            self._before.update(numbers)
            return False
        if not self._sees_forwards and not self._before.isdisjoint(numbers):
            return False
        self._logs_after = self._logs_after or self._ended == 1
        has_loss = LOSS_SCALE not in numbers and any("loss" in name for name in numbers)
        return True if has_loss and (self._sees_forwards or self._logs_after) else None

    def unknown(self, numbers: Collection[str]) -> str:
        """What is said of numbers whose step is not known."""
        return (BETWEEN_STEPS if self._sees_forwards else UNSEEN_FORWARDS).format(names=", ".join(numbers))


def after(norm: Any, limit: float | None) -> Any:
    """The norm that clipping to ``limit`` leaves of ``norm``: a number, or a tensor of one element. NaN stays NaN."""
    if limit is None or limit == float("inf"):
        return norm
    share = limit / (norm + EPS)
    return norm * (share * (share < 1) + (share >= 1))
