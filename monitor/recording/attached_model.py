"""What an attachment records of a model: its named modules and parameters, their series, and the context of the collectors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, TypeVar

from monitor.config import MonitorConfig, Target
from monitor.coordinator.ownership import Ownership
from monitor.failures import Failures
from monitor.recording.backend import FrameworkAdapter, HookSet, Modules, RecordingBackend
from monitor.recording.recorder import RecordedSeries, Recorder
from monitor.recording.run import Run
from monitor.recording.step_clock import Clock
from monitor.selection import Ambiguous, ChunkNames, ModuleSelection, TargetSelection, Unmatched, clean_name, squashed
from monitor.series import (
    CHECKED_KINDS,
    GRADIENT_KINDS,
    LEFT_BY_STEP,
    LOCAL,
    NO_MICRO_STEP,
    PARAMETER_KINDS,
    REPLICA_KIND,
    Placement,
    Ranks,
    Series,
    ranks_of,
)
from monitor.stats.features import own_columns
from monitor.terminal import first_of

# --- The recorded parameters, and the series of one kind for each of them.


@dataclass(frozen=True, eq=False)
class NamedParameter:
    """A recorded parameter.

    Attributes:
        chunk: Virtual pipeline stage.
        name: Name in rows.
    """

    chunk: int
    name: str
    tensor: Any


ParameterSubset = Collection[NamedParameter] | None
"""The recorded parameters that an optimizer steps, in their order. None for all."""


@dataclass(frozen=True, slots=True)
class ComputedRow:
    """A row whose numbers a collector computed.

    Attributes:
        numbers: By column of partials, as for ``Recorder.record_numbers``.
        x: The measured tensor, on the device of the numbers.
        histogram: Number of elements in each bin, int64.
    """

    numbers: Mapping[int, Any]
    x: Any
    histogram: Any = None


@dataclass(frozen=True, slots=True)
class _FirstSeen:
    """The layout and the series of a parameter's first tensor."""

    layout: object
    watched: RecordedSeries | None


class ParameterSeries:
    """The series of one kind: one for each parameter that this rank records.

    Attributes:
        kind: The kind of all of them.
    """

    def __init__(self, kind: str, attached: Attached, micro_steps: tuple[int, ...], *, recorded: bool) -> None:
        """Choose the parameters: those that this rank records; all, of which none has a row, if not ``recorded``."""
        self.kind = kind
        self._tensors = attached.backend.tensors
        self._recorder = attached.recorder
        self._series_of = attached.series_of
        self._failures = attached.failures
        self._micro_steps = micro_steps
        self._checked = attached.config.checks_replicas and kind in CHECKED_KINDS
        every = attached.parameters
        self._undecided = {one for one in every if recorded and self._shows_when_seen(one)}
        self._seen: dict[NamedParameter, _FirstSeen] = {}
        certain = [one for one in every if recorded and one not in self._undecided]
        self._watched = {one: watched for one in certain if (watched := self._watch(one)) is not None}
        self._parameters = tuple(one for one in every if one in self._watched or one in self._undecided or not recorded)
        self._recorded = frozenset(self._parameters)

    @property
    def parameters(self) -> Sequence[NamedParameter]:
        """The parameters that this rank records or may record: the placement of a DTensor's gradient shows when it exists."""
        return self._parameters

    def __len__(self) -> int:
        return len(self._parameters)

    @property
    def is_recorded(self) -> bool:
        """Whether this rank records the kind for at least one trained parameter, not counting compared replicas."""
        return any(one.tensor.requires_grad and watched.series.kind == self.kind for one, watched in self._watched.items())

    @property
    def is_read(self) -> bool:
        """Whether this rank reads the kind of at least one trained parameter, to record it or to compare a replica."""
        return any(one.tensor.requires_grad for one in self._watched)

    def known(self, parameter: NamedParameter) -> RecordedSeries | None:
        """The series of a parameter; None if this rank records none, or if that is decided when its tensor is seen."""
        return self._watched.get(parameter)

    def placed(self) -> Iterator[tuple[NamedParameter, Placement]]:
        """The parameters with rows of this kind, not of compared replicas, and their placements as far as they are known."""
        seen = {one: found.watched for one, found in self._seen.items()}
        for parameter, watched in {**self._watched, **seen}.items():
            if watched is not None and watched.series.kind == self.kind:
                yield parameter, self._recorder.table.series.placement(watched.series)

    def record(self, parameter: NamedParameter, x: Any, micro_step: int = 0) -> None:
        """Record one parameter's tensor, if this rank records it. Of a replica only the last micro-step is kept."""
        try:
            watched = self._series_for(parameter, x) if self._undecided else self._watched.get(parameter)
            if watched is not None:
                place = 0 if watched.micro_steps == (NO_MICRO_STEP,) else micro_step
                self._recorder.record(watched, x, place, aliases=False)
        except Exception as error:
            self.missing(parameter.name, error)

    def record_all(self, tensor_of: Callable[[NamedParameter], Any], among: ParameterSubset = None) -> None:
        """Record the tensor that ``tensor_of`` returns for each parameter in ``among``. For None there is no row."""
        found: list[tuple[RecordedSeries, Any]] = []
        undecided, watched_by = self._undecided, self._watched
        for parameter in self._of(among):
            try:
                x = tensor_of(parameter)
                watched = None if x is None else self._series_for(parameter, x) if undecided else watched_by.get(parameter)
            except Exception as error:
                self.missing(parameter.name, error)
                continue
            if x is not None and watched is not None:
                found.append((watched, x))
        self._recorder.record_all(found, self._failed)

    def each(self, look: Callable[[NamedParameter], object], among: ParameterSubset = None) -> None:
        """Call ``look`` for each parameter in ``among``. If it raises for one, the others are still read."""
        with self._tensors.computing():
            for parameter in self._of(among):
                try:
                    look(parameter)
                except Exception as error:
                    self.missing(parameter.name, error)

    def record_computed(self, compute: Callable[[NamedParameter], ComputedRow | None], among: ParameterSubset = None) -> None:
        """Record the row that ``compute`` returns for each parameter in ``among``. For None there is no row."""

        def record(parameter: NamedParameter) -> None:
            watched = self._watched.get(parameter)
            # Replicas are compared by their norm, and a computed row has none.
            computed = compute(parameter) if watched is not None and watched.series.kind == self.kind else None
            if watched is not None and computed is not None:
                self._recorder.record_numbers(watched, computed.numbers, computed.x, histogram=computed.histogram)

        self.each(record, among)

    def _of(self, among: ParameterSubset) -> Iterable[NamedParameter]:
        """The parameters of this rank in ``among``. Looked up in a set, since each parameter may have its own optimizer."""
        return self._parameters if among is None else filter(self._recorded.__contains__, among)

    def _watch(self, parameter: NamedParameter, seen: Any = None) -> RecordedSeries | None:
        series = self._series_of(self.kind, parameter, seen)
        if series is None:
            return None
        micro_steps = self._micro_steps if series.kind == self.kind else (NO_MICRO_STEP,)
        return RecordedSeries(series, micro_steps, checked=self._checked)

    def _series_for(self, parameter: NamedParameter, x: Any) -> RecordedSeries | None:
        """The series that ``x`` belongs to; None if this rank does not record it."""
        if parameter not in self._undecided:
            return self._watched.get(parameter)
        layout = self._tensors.layout_of(x)
        if parameter not in self._seen:
            self._seen[parameter] = _FirstSeen(layout, self._watch(parameter, x))
        if self._seen[parameter].layout == layout:
            return self._seen[parameter].watched
        said = f"The layout of {self.kind} of {parameter.name!r} over the ranks has changed since it was first recorded"
        self._failures.warn(f"layout of {self.kind}", f"{said}. The rows of such tensors are missing.")
        return None

    def _failed(self, watched: RecordedSeries, error: Exception) -> None:
        """Report one tensor that cannot be read. The others are still recorded."""
        self.missing(watched.series.name, error)

    def missing(self, name: str, error: Exception) -> None:
        """Report that a parameter has no row, because its tensor cannot be found or read."""
        self._failures.report(f"reading {self.kind}", error, "This row is missing.", of=name)

    def _shows_when_seen(self, parameter: NamedParameter) -> bool:
        """Whether only the tensor shows the placement: the gradient of a replicated parameter may be a term of a sum, and the
        gradient of a sharded one may be whole on every rank.
        """
        return self.kind in GRADIENT_KINDS and self._tensors.layout_of(parameter.tensor) is not None


@dataclass(frozen=True, slots=True)
class AttachmentSpec:
    """The model to record and how to record it.

    Attributes:
        chunks: The model's chunks, one for each virtual pipeline stage.
        framework: Reads gradients, weights and moments.
        grad_acc_steps: Micro-batches a step; the negative of a guess, until the first step has shown it.
        ops: Returns the statistics to write; called for every step, since they may change.
    """

    chunks: Sequence[Any]
    framework: FrameworkAdapter
    grad_acc_steps: int
    config: MonitorConfig
    ownership: Ownership
    ops: Callable[[], tuple[str, ...]]

    @property
    def guesses(self) -> bool:
        """Whether ``grad_acc_steps`` is a guess."""
        return self.grad_acc_steps < 0


@dataclass(frozen=True, slots=True)
class Host:
    """What a recording provides to each of its attachments.

    Attributes:
        run: Returns the run, which the first call creates.
        note_batch: Takes the step and the identifiers of one call.
    """

    recorder: Recorder
    run: Callable[[], Run]
    failures: Failures
    backend: RecordingBackend
    note_batch: Callable[[int, Any], None]


WITHOUT_GROUP: Final = (
    "The pipeline has fewer ranks than the job, and no dp_group was passed to set_monitor. If other ranks hold the same "
    "parts of the model, their rows count as further tensors, and total norms are too large. Pass dp_group, even of one rank."
)
_UNDECLARED: Final = (
    "The gradient of {name} is summed over ranks {ranks} as well, which are in no group that was passed to set_monitor. If "
    "they hold the same weights, as with context parallelism, each dp_group writes rows of them, and norms over all tensors "
    "would count them several times. Pass the group of all ranks over which gradients are summed as dp_group."
)
MAX_LISTED: Final = 3
"""Maximum number of names or ranks in a message."""


def undeclared(name: str, ranks: Ranks) -> str:
    """What is said of ranks that share the gradient of a parameter, and that are in no group."""
    return _UNDECLARED.format(name=name, ranks=first_of(ranks, MAX_LISTED))


def _no_gradients(_parameter: NamedParameter, _gradient: Any) -> bool:
    """Without a collector of gradients every gradient counts as reduced."""
    return True


@dataclass(frozen=True, slots=True)
class Attached:
    """The context that the collectors of one attachment share.

    Attributes:
        parameters: The selected parameters, in the order of the framework.
        note: Adds a note to the manifest, from a key and a text.
        is_reduced: Whether a gradient is known to contain every rank's part when the optimizer's step begins.
        kinds: The kinds that this rank records for at least one parameter.
        read: The kinds that it reads: these, and those of which it only compares replicas.
    """

    watch: AttachmentSpec
    parameters: Sequence[NamedParameter]
    recorder: Recorder
    clock: Clock
    failures: Failures
    backend: RecordingBackend
    note: Callable[[str, str], None]
    is_reduced: Callable[[NamedParameter, Any], bool] = _no_gradients
    kinds: set[str] = field(default_factory=set)
    read: set[str] = field(default_factory=set)

    @property
    def config(self) -> MonitorConfig:
        return self.watch.config

    @property
    def framework(self) -> Any:
        """The ``Framework``. A collector of one framework calls further methods of it."""
        return self.watch.framework

    def series(self, kind: str, micro_steps: tuple[int, ...] = (NO_MICRO_STEP,), *, recorded: bool = True) -> ParameterSeries:
        """The series of one kind. If it is not ``recorded``, its parameters are followed, and have no rows."""
        found = ParameterSeries(kind, self, micro_steps, recorded=recorded)
        self.kinds.update([kind] if found.is_recorded else [])
        self.read.update([kind] if found.is_read else [])
        return found

    def series_of(self, kind: str, parameter: NamedParameter, seen: Any = None) -> Series | None:
        """The series of a kind of a parameter on this rank, with its placement; None for a replica that another rank writes.

        With replica checks, such a replica has a series of its norm, except for features, which have no norm.

        Args:
            seen: A tensor that knows its placement, for a parameter that does not show the placement.
        """
        ownership, placement = self.watch.ownership, self.placement(kind, parameter, seen)
        if ownership.writes(placement):
            series = Series(kind, parameter.chunk, parameter.name)
        elif self.config.checks_replicas and ownership.monitored and not own_columns(kind):
            series = Series(REPLICA_KIND, parameter.chunk, f"{kind}/{parameter.name}")
        else:
            return None
        self.recorder.table.series.place(series, placement)
        return series

    def placement(self, kind: str, parameter: NamedParameter, seen: Any = None) -> Placement:
        """The placement, as far as it is known. A parameter of unknown placement is written by every rank."""
        find = self.failures.guarded("placing a parameter", self.watch.framework.placement, of=parameter.name)
        held = kind.removesuffix(LEFT_BY_STEP) if kind not in PARAMETER_KINDS else kind
        known = (None if seen is None else self.backend.tensors.placement_of(seen)) or find(held, parameter) or LOCAL
        return self.completed(kind, held, parameter, self._term(kind, parameter, known))

    def completed(self, kind: str, held: str, parameter: NamedParameter, known: Placement) -> Placement:
        """``known``, completed from passed groups, the model, and what is assumed.

        Args:
            held: The kind of what the framework holds.
        """
        split = bool(getattr(parameter.tensor, "tensor_model_parallel", False))
        placed = self.watch.ownership.placed(kind, known, tensor_parallel=split)
        if split:
            return placed
        complete = self.failures.guarded("placing a parameter", self.watch.framework.completed, of=parameter.name)
        completed = complete(held, parameter, placed, around=self.watch.ownership.may_assume) or placed
        if known == LOCAL:
            completed = self.watch.ownership.assumed(kind, completed)
        if self.watch.ownership.rank == 0 and self.watch.ownership.counts_apart(kind, completed):
            self.failures.warn("ranks without a group", WITHOUT_GROUP)
        return completed

    def _term(self, kind: str, parameter: NamedParameter, known: Placement) -> Placement:
        """Mark a gradient under sequence parallelism as a term of a sum, which the tensor-parallel ranks form later."""
        ranks = ranks_of(self.watch.ownership.tp_group or ())
        marked = kind == "grad_unreduced" and bool(getattr(parameter.tensor, "sequence_parallel", False))
        return replace(known, partial=True, differing=ranks) if marked and len(ranks) > 1 else known


# --- The names of a model's modules and parameters, chunk by chunk, and the selected ones.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NamedModule:
    """A module of a chunk, under the name it has in rows."""

    chunk: int
    name: str
    module: Any
    wanted: ModuleSelection | None


class NamedParts(NamedTuple):
    """The modules of a chunk (parents before their children) and its parameters, with the framework's names."""

    modules: Iterable[tuple[str, Any]]
    parameters: Iterable[tuple[str, Any]]


def hook_parts(roots: Iterable[Any], modules: Modules, hooks: HookSet, begins: Callable[..., None]) -> None:
    """Call ``begins`` before each forward of a part of the roots that have no forward of their own."""
    for root in roots:
        for part in _called_parts(root, modules):
            hooks.add(modules.before_forward(part, begins, compiled=True))


def _called_parts(root: Any, modules: Modules) -> Iterator[Any]:
    """The outermost modules that a loop can call of a root without a forward, as of a dictionary of networks; mostly none."""
    taken = None
    for name, module in modules.parts(root).modules if modules.never_called(root) else ():
        inside = taken is not None and name.startswith(f"{taken}.")  # parents come before their children
        if not inside and not modules.never_called(module) and modules.takes_hooks(module):
            taken = name
            yield module


class Targeted(NamedTuple):
    """The modules that targets select.

    Attributes:
        modules: In the order of the model.
        unmatched: The targets without a match.
        ambiguous: The targets that match several names.
    """

    modules: Sequence[NamedModule]
    unmatched: Sequence[Unmatched]
    ambiguous: Sequence[Ambiguous]


class ModelNames:
    """Every module and parameter of a model's chunks.

    A wrapper and the wrapped module have the same name without the wrapper's component. The wrapper is recorded: the inner
    module may be compiled, flattened or recomputed.
    """

    def __init__(self, chunks: Sequence[NamedParts], config: MonitorConfig) -> None:
        self._modules = [_first_of_each_name(chunk.modules) for chunk in chunks]
        self._parameters = [_first_of_each_name(chunk.parameters) for chunk in chunks]
        names = [ChunkNames(tuple(m), tuple(p)) for m, p in zip(self._modules, self._parameters, strict=True)]
        self.selection = TargetSelection(
            config.targets,
            names,
            all_xy=config.all_xy,
            forward_only=config.forward_only,
            backward_only=config.backward_only,
        )
        every = dict.fromkeys(name for chunk in names for name in (*chunk.modules, *chunk.parameters))
        self._row_names = squashed(every) if config.squash_name else {}

    def modules(self) -> Iterator[NamedModule]:
        """Every module, children after their parents."""
        for chunk, modules in enumerate(self._modules):
            for name, module in modules.items():
                yield NamedModule(chunk, self._row_names.get(name, name), module, self.selection.module(chunk, name))

    def with_activations(self) -> Iterator[NamedModule]:
        """The modules whose activations the configuration asks for."""
        return (one for one in self.modules() if one.wanted is not None)

    def activation_kinds(self) -> set[str]:
        """The kinds of activations that are recorded for at least one module."""
        wanted = [one.wanted for one in self.with_activations() if one.wanted is not None]
        forward = any(one.input.wanted or one.output.wanted for one in wanted)
        backward = any(one.input_grad.wanted or one.output_grad.wanted for one in wanted)
        return {kind for kind, asked in (("actv", forward), ("actv_grad", backward)) if asked}

    def targeted(self, targets: Sequence[str]) -> Targeted:
        """The modules that ``targets`` select, by full or short names."""
        names = [ChunkNames(tuple(modules), ()) for modules in self._modules]
        every = dict.fromkeys(targets, Target())
        selection = TargetSelection(every, names, all_xy=False, forward_only=False, backward_only=False)
        full = [(chunk, name) for chunk, modules in enumerate(self._modules) for name in modules]
        found = [module for place, module in zip(full, self.modules(), strict=True) if selection.module(*place) is not None]
        return Targeted(found, selection.unmatched, selection.ambiguous)

    def parameters(self) -> Iterator[NamedParameter]:
        """The selected parameters, in the order of the framework. One that several chunks have belongs to the first of them."""
        found = set[int]()
        for chunk, parameters in enumerate(self._parameters):
            for name, parameter in parameters.items():
                if id(parameter) not in found and self.selection.parameter(chunk, name):
                    found.add(id(parameter))
                    yield NamedParameter(chunk, self._row_names.get(name, name), parameter)


def _first_of_each_name(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    found: dict[str, T] = {}
    for name, part in named:
        found.setdefault(clean_name(name), part)
    return found
