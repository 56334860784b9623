"""Records weight gradients, before and after the data-parallel ranks aggregate them.

MindSpore keeps no gradient with a parameter. A backward returns each parameter's gradient to its caller: there it is read
unreduced. The loop sums the gradients of micro-batches, reduces them, and passes them to the optimizer: there they are read
reduced.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, communication, nn

from monitor.coordinator.ownership import Ownership, beyond, reaches
from monitor.failures import Failures
from monitor.mindspore.collectives import INTERCEPTION, Handle, Kernel, MindSporeCollectiveListener
from monitor.mindspore.compiled.copies import SUMMED
from monitor.mindspore.compiled.fallback import HooksOfPython
from monitor.mindspore.compiled.replay import program_of
from monitor.mindspore.process_group import has_others, is_settled
from monitor.recording.attached_model import NamedParameter, ParameterSubset, undeclared
from monitor.recording.backend import Removable
from monitor.recording.collectives import Operator
from monitor.recording.parameters import NOT_ACCUMULATED, GradientRows, Reading
from monitor.recording.patches import CallListener, CallPatch
from monitor.recording.phases import OptimizerTurn
from monitor.series import IN_NO_GROUP, Ranks
from monitor.stats.mindspore.tensors import on_host, on_the_host
from monitor.stats.partials import Floats

# --- Detects whether the gradients that an optimizer is given are reduced, from the calls between the last backward and the
# step.
#
# MindSpore's functions create new tensors, so no link leads from a collective's result to the optimizer's gradients.
# Visible is that after the last backward there was a sum over ranks for each gradient's shape.
# ``DistributedGradReducer`` is compiled; visible is that it was called with as many gradients as the optimizer has.
# Sums of other tensors (averaged weights, squares) may have the same shape. So on the host a gradient also has to be a
# multiple of the result of such a sum. On a device this check would wait, so the shape has to suffice.
# A gradient of few elements, such as a bias of two classes, may be a multiple of any sum, and zeros are one of each. These
# also need a factor that the sum, its mean, or a larger gradient has.
#
# A loop may reduce the gradients of each micro-batch and add up the results. Their total is compared, too.

SUMS: Final = frozenset({"all_reduce"})
ROUNDING: Final = 1e-3
"""The relative difference, against its norm, that a gradient may have to a multiple of a sum: a divided float16 is rounded."""

FEW: Final = 4
"""Gradients of so many elements, or fewer, may be multiples of a sum by chance."""

OUT_OF_SIGHT: Final = (
    "The backward or the reduction of gradients is compiled, and the monitor cannot see whether gradients are reduced over the "
    "data-parallel ranks: grad_reduced has no rows. Compute and reduce gradients in PYNATIVE_MODE without @jit to record it."
)

Shape = tuple[int, ...]
Totals = list[tuple[Floats, Ranks]]
"""Results of sums of one shape in the order of the calls, added up over micro-batches, and the ranks of each."""


class _InheritedPatch(CallPatch):
    """Patches a method that a class inherits: the class has its own attribute only while there are listeners."""

    def _now(self) -> Any:
        return getattr(self.owner, self.name)

    def _forget(self, gone: weakref.ref[CallListener]) -> None:
        super()._forget(gone)
        if not self._listeners and vars(self.owner).get(self.name) is self._original is not None:
            delattr(self.owner, self.name)


REDUCER_CALLED: Final = _InheritedPatch(nn.DistributedGradReducer, "__call__")
"""Patches ``__call__`` and not ``construct``, which compilers read."""


class _ReducerListener(CallListener):
    def __init__(self, callback: Callable[[Any, Any], object]) -> None:
        self._callback = callback

    def call_ended(self, patch: CallPatch, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        del patch, kwargs
        self._callback(args[0], result)


class _Compared(NamedTuple):
    """A gradient of an optimizer, beside the sums of its shape.

    Attributes:
        gradient: Kept, since its id is the key.
        factors: By which it is a multiple of sums.
        summed: The ranks of each of these sums.
        is_evidence: Whether it is no coincidence if it is a multiple of one.
    """

    gradient: Tensor
    factors: Sequence[float]
    summed: Sequence[Ranks]
    is_evidence: bool


class MindSporeReductions(MindSporeCollectiveListener):
    """Listens for reductions of gradients, if there are other ranks to sum over.

    Attributes:
        undeclared: What is said of ranks that share gradients, and that are in no group that was passed; mostly empty.
    """

    def __init__(self, ownership: Ownership, failures: Failures) -> None:
        self._ownership = ownership
        self._failures = failures
        self._listening = False
        self._wanted = False
        self._reducer_listener = _ReducerListener(failures.guarded("following a reducer of gradients", self._reducer_called))
        self._sums: dict[Ranks, Counter[Shape]] = {}
        self._given: dict[Shape, list[tuple[Tensor, Ranks]]] = {}
        self._totals: dict[Shape, Totals] = {}
        self._added: dict[Shape, Totals] = {}
        self._handed: Sequence[Tensor | None] = ()
        self._compared: dict[int, _Compared] = {}
        self._usual: Sequence[float] | None = None
        self._compares = on_the_host()
        self.is_whole, self.out_of_sight, self.undeclared = False, "", ""
        self._reducers: list[tuple[Ranks, tuple[Shape, ...]]] = []
        self._reduced: Mapping[Shape, bool] = {}

    def begin_step(self) -> None:
        self._forget()
        self._totals.clear()
        self._wanted = False
        if not self._listening and (has_others() or not is_settled()):
            self._listening = True
            INTERCEPTION.add(self)
            REDUCER_CALLED.add(self._reducer_listener)

    def pause(self) -> None:
        """Nothing to do, as in ``forward_begins``."""

    def forward_begins(self) -> None:
        """Nothing to do: MindSpore reduces after the backward."""

    def forward_ends(self) -> None:
        """Nothing to do, as in ``forward_begins``."""

    def arrived(self) -> None:
        """A backward has returned a gradient: earlier sums belong to another micro-batch."""
        self._wanted = True
        self._totals |= {shape: self._added_up(shape) for shape in self._given}
        self._forget()

    def begin_reading(self, gradients: Sequence[Tensor | None], waiting: Sequence[Shape] = ()) -> None:
        """The optimizer is given these gradients.

        Args:
            waiting: The shapes of gradients that other optimizers will be given later: sums may belong to those.
        """
        arrived, self._wanted = self._wanted, False
        self.is_whole = not has_others() or self._reaches_all([])
        self._handed, self._usual = gradients, None
        self._compared.clear()
        self._added.clear()
        if self.is_whole:
            return
        are_taped, are_copies = (any(map(kind, gradients)) for kind in (_is_taped, _is_copy))
        self.out_of_sight = OUT_OF_SIGHT if are_taped or not (arrived or are_copies) else ""
        shapes = Counter(tuple(one.shape) for one in gradients if one is not None)
        later = Counter(waiting)
        self._reduced = {shape: self._covers(shape, count + later[shape], gradients) for shape, count in shapes.items()}
        for sums in self._sums.values():
            sums -= shapes  # later optimizers cannot use these sums

    def end_turn(self) -> None:
        """An optimizer has stepped, and others have not: their gradients may be reduced now."""
        self._wanted = True

    def is_reduced(self, parameter: NamedParameter, gradient: Tensor | None) -> bool:
        """Whether each gradient of this shape was summed over all ranks that share its parameter."""
        if gradient is None or self.is_whole:
            return gradient is not None
        if (groups := getattr(gradient, SUMMED, None)) is not None:  # a copy that compiled code has made
            return self._reaches_all([_ranks_of(group) for group in groups])
        if not self._reduced.get(tuple(gradient.shape), False):
            return False
        if not self._compares:
            return True
        compared = self._compare(gradient)
        if compared.is_evidence and compared.summed and not self.undeclared:
            others = beyond(self._ownership, int(communication.get_rank()), [], compared.summed)
            self.undeclared = undeclared(parameter.name, others) if others else ""
        return self._stems_from_a_sum(compared)

    def remove(self) -> None:
        """Stop listening."""
        if self._listening:
            self._listening = False
            INTERCEPTION.remove(self)
            REDUCER_CALLED.remove(self._reducer_listener)

    def call_begins(self, operator: Operator, args: Sequence[Any]) -> bool:
        del args
        return self._wanted and operator.name in SUMS

    def call_issued(self, operator: Operator, args: Sequence[Any], result: Any, handle: Handle | None) -> None:
        try:
            if not _adds(operator, args):
                return
            ranks = _ranks_of(operator.group_of(args))
            given = list(operator.given(args, result))
        except Exception as error:
            self._failures.report("following the reduction of gradients", error)
            return
        if handle is None:
            self._summed(ranks, given)
        else:
            handle.on_wait(partial(self._summed, ranks, given))

    def _reducer_called(self, reducer: Any, result: Any) -> None:
        shapes = tuple(tuple(one.shape) for one in result) if self._wanted and isinstance(result, (tuple, list)) else ()
        if shapes and all(reducer.allreduce_filter):
            ranks = _ranks_of(_group_of(reducer))
            self._reducers.append((ranks, shapes))
            self._keep(result, ranks)

    def _summed(self, ranks: Ranks, given: Sequence[Tensor]) -> None:
        self._sums.setdefault(ranks, Counter()).update(tuple(one.shape) for one in given)
        self._keep(given, ranks)

    def _keep(self, given: Iterable[Tensor], ranks: Ranks) -> None:
        """Keep results until the optimizer was called, to compare them with its gradients."""
        for one in given if self._compares else ():
            self._given.setdefault(tuple(one.shape), []).append((one, ranks))

    def _stems_from_a_sum(self, gradient: _Compared) -> bool:
        """Whether a gradient is a multiple of a sum's result: the sum, its mean, or one of them clipped or unscaled."""
        if not gradient.factors or gradient.is_evidence:
            return bool(gradient.factors)
        if self._usual is None:
            every = [self._compare(one) for one in self._handed if one is not None]
            self._usual = [factor for one in every if one.is_evidence for factor in one.factors]
        each = zip(gradient.factors, gradient.summed, strict=True)
        return any(np.isclose(factor, [1.0, 1 / len(ranks), *self._usual], ROUNDING, 0).any() for factor, ranks in each)

    def _compare(self, gradient: Tensor) -> _Compared:
        """A gradient beside the sums of its shape. The elements of each are read once."""
        if id(gradient) not in self._compared:
            handed = _elements(gradient)
            shape = tuple(gradient.shape)
            sums = [(_elements(one), ranks) for one, ranks in self._given.get(shape, ())]
            if shape in self._totals and shape not in self._added:
                self._added[shape] = self._added_up(shape)
            sums += self._added.get(shape, [])
            each = [(_factor(handed, one), ranks) for one, ranks in sums]
            found = [(factor, ranks) for factor, ranks in each if factor is not None]
            factors, summed = [factor for factor, _ in found], [ranks for _, ranks in found]
            self._compared[id(gradient)] = _Compared(gradient, factors, summed, handed.size > FEW and bool(handed.any()))
        return self._compared[id(gradient)]

    def _added_up(self, shape: Shape) -> Totals:
        """The sums of a shape since the last backward, each added to those that the earlier micro-batches had in its place."""
        now = [(_elements(one).copy(), ranks) for one, ranks in self._given.get(shape, ())]
        earlier = self._totals.get(shape, [])
        if [ranks for _, ranks in earlier] != [ranks for _, ranks in now]:
            return now
        return [(total + one, ranks) for (total, _), (one, ranks) in zip(earlier, now, strict=True)]

    def _covers(self, shape: Shape, count: int, gradients: Sequence[Tensor | None]) -> bool:
        """Whether all ``count`` gradients of a shape were summed over groups that together cover all ranks."""
        handed = tuple(tuple(one.shape) for one in gradients if one is not None)
        groups = [ranks for ranks, sums in self._sums.items() if sums[shape] >= count]
        groups += [ranks for ranks, shapes in self._reducers if shapes == handed]
        return self._reaches_all(groups)

    def _reaches_all(self, groups: Sequence[Ranks]) -> bool:
        """Whether ``groups`` reach every rank that shares the parameters; for none, whether no other rank shares them."""
        rank, world_size = int(communication.get_rank()), int(communication.get_group_size())
        return reaches(self._ownership, rank, world_size, groups)

    def _forget(self) -> None:
        self._sums.clear()
        self._given.clear()
        self._added.clear()
        self._handed, self._usual = (), None
        self._compared.clear()
        self._reducers.clear()


def _is_taped(gradient: Any) -> bool:
    return not isinstance(gradient, (Tensor, type(None)))


def _is_copy(gradient: Any) -> bool:
    return hasattr(gradient, SUMMED)


def _elements(x: Tensor) -> Floats:
    return np.asarray(on_host(x), dtype=np.float64).ravel()


def _factor(x: Floats, of: Floats) -> float | None:
    """The factor if ``x`` is a multiple of ``of``, 1 if both are zeros. Non-finite elements must be at the same positions."""
    finite = np.isfinite(x) & np.isfinite(of)
    if not np.array_equal(np.isfinite(x), np.isfinite(of)):
        return None
    x, of = x[finite], of[finite]
    square = float(of @ of)
    if not square:
        return None if x.any() else 1.0
    factor = float(x @ of) / square
    return factor if factor >= 0 and np.linalg.norm(x - factor * of) <= ROUNDING * np.linalg.norm(x) else None


def _adds(operator: Operator, args: Sequence[Any]) -> bool:
    if isinstance(operator, Kernel):
        return str(args[operator.places["op_type"]]).lower() in ("sum", "avg")
    return str(getattr(args[0], "op", "")).lower() == "sum"


def _group_of(reducer: Any) -> str:
    allreduce = getattr(reducer, "allreduce", None) or reducer.op_list[0]
    return str(allreduce.group)


def _ranks_of(group: str) -> Ranks:
    return tuple(sorted(int(rank) for rank in communication.get_process_group_ranks(group)))


NOT_SUMMED: Final = (
    "each backward returns its own gradient, and MindSpore keeps no sum of them: with monitor_mbs_grad there is a row "
    "of each micro-batch; without it, steps with several micro-batches have no row"
)

SHARED: Final = "a step had fewer backwards than micro-batches: a row of several micro-batches has the number of one of them"


class MindSporeGradients:
    """Takes gradients of MindSpore (``GradientSource``)."""

    def __init__(self, rows: GradientRows) -> None:
        attached = rows.attached
        self._rows, self._framework = rows, attached.framework
        self._due, self._clock, self._note = attached.recorder.due("wg_distribution"), attached.clock, attached.note
        self._failures = attached.failures
        self.hooked: Sequence[NamedParameter] = rows.unreduced.parameters
        self.reading: Reading = "unknown"
        self.reductions = MindSporeReductions(attached.watch.ownership, attached.failures)
        self._arrived: Counter[NamedParameter] = Counter()
        self._arrived_in = attached.clock.step
        self._program = program_of(attached.watch.chunks[0])
        self._hooks_of_python = HooksOfPython(attached.failures)
        if self._program is not None and attached.config.checks_replicas:
            self._program.check()

    def begin_step(self) -> None:
        """Nothing to do: the first gradient of a step discards the counts of earlier ones."""

    def before_reading(self, turn: OptimizerTurn) -> None:
        self.reductions.begin_reading(self._framework.handed, self._waiting(turn.held))

    def after_reading(self, turn: OptimizerTurn, not_reduced: str) -> None:
        """Add the notes. Of ``turn.scaling`` there is none: the gradients are unscaled before the hooks see them."""
        self.reading = "scaled" if self._framework.scales_itself(turn.optimizer) else "unknown"
        if not_reduced:
            self._note("grad_reduced", not_reduced)
        if in_no_group := self.reductions.undeclared:
            self._failures.advise(IN_NO_GROUP, in_no_group)
            self._note(IN_NO_GROUP, in_no_group)
        if self._rows.each_micro_step:
            self._note_shared_backwards()
        elif self._clock.micro_steps > 1:
            self._rows.note_local(NOT_SUMMED)

    def remove(self) -> None:
        """All hooks are those of ``register``."""
        self._hooks_of_python.end()

    def _waiting(self, held: ParameterSubset) -> list[tuple[int, ...]]:
        """The shapes of gradients of optimizers that have not stepped yet."""
        if held is None:
            return []
        later = (one for one in self._rows.reduced.parameters if one not in held and one not in self._rows.stepped)
        return [tuple(one.tensor.shape) for one in later if one.tensor.requires_grad]

    def can_be_hooked(self, parameter: NamedParameter) -> bool:
        is_called = self._program is not None or ms.get_context("mode") != ms.GRAPH_MODE
        return is_called and bool(parameter.tensor.requires_grad)

    def register(self, parameter: NamedParameter, read: Callable[[Any], None]) -> Removable:
        if self._program is None:
            return self._hooks_of_python.hook(parameter.tensor, read)
        return self._program.parameter(parameter.tensor, read)

    def found(self, parameter: NamedParameter, argument: Any) -> None:
        """Record a gradient that a backward returns."""
        if not self._due.now:
            return
        self.reductions.arrived()
        if parameter in self._rows.stepped:  # the gradient is of the next step, whose reductions are observed
            return
        if self._clock.micro_steps == 1 or self._rows.each_micro_step:
            self._count(parameter)
            self._rows.unreduced.record(parameter, argument, self._rows.micro_step(parameter))

    def _count(self, parameter: NamedParameter) -> None:
        """Count the backwards of the step that have reached a parameter. Several may share its only row."""
        if self._arrived_in != self._clock.step:
            self._arrived_in = self._clock.step
            self._arrived.clear()
        self._arrived[parameter] += 1
        if self._arrived[parameter] > 1 and not (self._rows.each_micro_step or self._clock.misguessed):
            self._rows.note_local(NOT_ACCUMULATED)

    def _note_shared_backwards(self) -> None:
        backwards: Counter[int] = Counter()
        for parameter, count in self._arrived.items() if self._arrived_in == self._clock.step else ():
            backwards[parameter.chunk] = max(backwards[parameter.chunk], count)
        if any(0 < count <= self._clock.forward[chunk] for chunk, count in backwards.items()):
            self._rows.note_local(SHARED)
