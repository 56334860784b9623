"""Selects the modules of each feature, and watches their calls to compute the feature."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Final, NamedTuple, Protocol

from monitor.config import MonitorConfig
from monitor.recording.activations import ModuleCollector
from monitor.recording.attached_model import Attached, ModelNames, NamedModule, NamedParameter
from monitor.recording.backend import HookSet, Shown
from monitor.recording.features import reading
from monitor.recording.features.reading import NO_LOGITS, NO_SCORES, ONE_EXPERT, FeatureReading, MisfitError, Routing, Spread
from monitor.recording.module_calls import CallIndex, Calls, OpenCalls
from monitor.recording.recorder import RecordedSeries
from monitor.selection import Ambiguous, Unmatched, ambiguity_notice, unmatched_text
from monitor.series import WATCHED_KINDS, Placement, Series
from monitor.stats import features, loads
from monitor.stats.features import HEADS, HEADS_ABOVE, SINK_QUERIES
from monitor.stats.partials import COUNT, MAX, SMALLS, SUM, SUMSQ

_MISSED: Final = "l2_targets that match no module of this model (in a pipeline: of this rank's stages)"


Call = Callable[..., None]

_HEADS: Final = ("num_heads", "num_attention_heads", "n_heads", "n_head")
"""Attributes of attention modules, or of their configurations, that give the number of heads."""


class HookModules(NamedTuple):
    """The modules of a hook.

    Attributes:
        named: Whether the configuration names the modules; False if the monitor selected them.
        unmatched: Targets without a match.
        ambiguous: Targets that match several names.
    """

    modules: Sequence[NamedModule]
    named: bool = True
    unmatched: Sequence[Unmatched] = ()
    ambiguous: Sequence[Ambiguous] = ()


def modules_by_hook(names: ModelNames, config: MonitorConfig, reading: FeatureReading) -> Mapping[str, HookModules]:
    """The modules of each hook; empty if no features are recorded."""
    if not config.recording_l2_features:
        return {}
    wanted = {hook: getattr(config.l2_targets, hook) for hook in WATCHED_KINDS}
    found = {hook: _named(names, targets, reading) for hook, targets in wanted.items() if targets}
    if wanted["linear_hook"] == ():
        inner = [_unwrapped(one, reading) for one in names.modules()]
        found["linear_hook"] = HookModules([one for one in inner if _has_matrix(one, reading)], named=False)
    return found


def series_of(hook: str, found: HookModules, reading: FeatureReading) -> int:
    """An estimate of the series of a hook. Heads and experts count as far as a module says their number."""
    counted: dict[str, Callable[[Any], int]] = {
        AttentionHeadWatcher.kind: _heads_of,
        RouterLoadWatcher.kind: partial(_experts_of, reading),
    }
    parts = counted.get(hook)
    return len(found.modules) + (sum(parts(one.module) for one in found.modules) if parts else 0)


def _heads_of(module: Any) -> int:
    places = (module, getattr(module, "config", None))
    said = [getattr(place, name, None) for place in places for name in _HEADS]
    return next((heads for heads in said if isinstance(heads, int)), 0)


def _experts_of(reading: FeatureReading, module: Any) -> int:
    weight = reading.matrix_of(module)
    return 0 if weight is None or len(weight.shape) != 2 else int(weight.shape[0])


def warning(found: Mapping[str, HookModules]) -> str | None:
    """A warning about targets that match no module or several; None if there is none."""
    if not found:
        return "recording_l2_features is true, but l2_targets is empty: no features are recorded. Name modules in l2_targets."
    missed = [f"{hook}: {', '.join(map(unmatched_text, one.unmatched))}" for hook, one in found.items() if one.unmatched]
    said = [f"{_MISSED}: {'; '.join(missed)}."] if missed else []
    several = ambiguity_notice("l2_targets", [one for hook in found.values() for one in hook.ambiguous])
    return " ".join([*said, *([several] if several else [])]) or None


def _named(names: ModelNames, targets: Sequence[str], reading: FeatureReading) -> HookModules:
    modules, unmatched, ambiguous = names.targeted(targets)
    return HookModules([_unwrapped(module, reading) for module in modules], unmatched=unmatched, ambiguous=ambiguous)


def _has_matrix(module: NamedModule, reading: FeatureReading) -> bool:
    """Whether a module has a weight that may be a matrix. A sharded weight shows its shape only when it is gathered."""
    called = type(module.module).__name__, module.name.rpartition(".")[2]
    embeds = reading.embeds(module.module) or any("embedding" in one.lower() for one in called)
    return not embeds and reading.matrix_of(module.module) is not None


def _unwrapped(module: NamedModule, reading: FeatureReading) -> NamedModule:
    return NamedModule(module.chunk, module.name, reading.unwrapped(module.module), module.wanted)


class FeatureContext(Protocol):
    """What watchers share: the ``FeatureCollector``.

    Attributes:
        attached: The context of the attachment.
        modules: Tells which calls belong to training.
        reading: The framework's computation of features.
        watchers: All watchers, which share what they find.
    """

    attached: Attached
    modules: ModuleCollector
    reading: FeatureReading

    @property
    def watchers(self) -> Sequence[FeatureWatcher]: ...

    def series(self, kind: str, parameter: NamedParameter, seen: Any) -> Series | None:
        """The series of a feature of a weight; None if another rank writes it."""

    def data_parallel(self, module: Any, chunk: int, experts: int) -> Placement:
        """The placement of counts that add up over the data-parallel ranks of a router."""

    def does_not_fit(self, kind: str, name: str, reason: str) -> None:
        """Report at the end of the step that a module has no row."""


class FeatureWatcher(ABC):
    """Base of all watchers: counts the training calls of a module, and records a row for each.

    The entry of a kind in ``monitor/series.py`` names its watcher.

    Args:
        found: All modules of its kind.

    Attributes:
        kind: The name of its kind.
        shows: What it needs of a call in compiled code.
        called: Whether the step in progress had a training call.
    """

    kind: str
    shows: Shown = "arguments"

    def __init__(self, module: NamedModule, asked: FeatureContext, found: HookModules, config: MonitorConfig) -> None:
        self.name = module.name
        self.called = False
        self._found, self._config = found, config
        self._module, self._chunk = module.module, module.chunk
        self._asked, self._modules, self._reading = asked, asked.modules, asked.reading
        self._backend, self._failures = asked.attached.backend, asked.attached.failures
        self._recorder, self._clock = asked.attached.recorder, asked.attached.clock
        self._due = self._recorder.due("recording_l2_features")
        self._calls = Calls(self._modules.repetitions())
        self._watched: dict[tuple[int, str], RecordedSeries] = {}
        self._open = OpenCalls()

    @abstractmethod
    def attach(self, hooks: HookSet) -> None:
        """Register the hooks on the module."""

    def forget_step(self) -> None:
        self._calls.forget_step()
        self.called = False
        self._open.clear()

    def restart(self, chunk: int, micro_step: int) -> None:
        if chunk == self._chunk:
            self._calls.restart(micro_step)

    def _around_forward(self, hooks: HookSet, what: str, before: Call, after: Call) -> None:
        """Call ``before`` and ``after`` around each forward."""

        def whole(module: Any, args: Any, kwargs: Any, result: Any, searching: Any, changed: bool) -> None:
            if (result is None or changed) and self._is_watched(module):
                self._misfit(reading.CHANGED_THERE if changed else reading.SHARDED_THERE)
                return
            before(module, args, kwargs, *((searching,) if self.shows == "calls" else ()))
            after(module, args, kwargs, result)

        first, last, both = (self._hook(what, call) for call in (before, after, whole))
        for handle in self._backend.modules.around_forward(self._module, first, last, both, self.shows):
            hooks.add(handle)

    def _hook(self, what: str, call: Callable[..., None]) -> Callable[..., None]:
        def hidden(*args: Any) -> None:
            with self._reading.unseen():
                call(*args)

        return self._failures.guarded(what, hidden, "The feature of this module is missing.", of=self.name)

    def _is_watched(self, module: Any) -> bool:
        # A replica of the module shares the hooks and runs on its own thread. Its calls do not count.
        return self._due.now and module is self._module

    def _begin(self, module: Any) -> CallIndex | None:
        """The call that begins now; None if it is not part of training, or is a recomputation."""
        if self._backend.modules.repeating() or not self._modules.counts(self._chunk, module):
            return None
        if not self.called:
            self.called = True
            self._modules.remember(self)
        return self._calls.begin(self._modules.forwards[self._chunk].micro_step)

    def _open_call(self, module: Any) -> CallIndex | None:
        """Begin a call as ``_begin`` does, with an entry in ``_open`` until the call has ended; None without a feature."""
        if not self._due.now or module is not self._module:  # as ``_is_watched``
            return None
        self._open.mine.append(None)
        return self._begin(module)

    def _record(self, place: CallIndex, numbers: Mapping[int, Any], x: Any, part: str = "") -> None:
        """Record a row of a call.

        Args:
            part: What the name of a row of a part has, such as ``.3``.
        """
        watched = self._watched.get((place.call, part))
        if watched is None:
            watched = self._watched[place.call, part] = self._new_series(self._row_name(place.call, part))
        self._recorder.record_numbers(watched, numbers, x, place.micro_step)

    def _row_name(self, call: int, part: str = "") -> str:
        return f"{self.name}.{WATCHED_KINDS[self.kind].suffix}{part}" + (f"#{call}" if call else "")

    def _new_series(self, name: str) -> RecordedSeries:
        return RecordedSeries(Series(self.kind, self._chunk, name), tuple(range(self._clock.micro_steps)))

    def _misfit(self, reason: str) -> None:
        self._asked.does_not_fit(self.kind, self.name, reason)


class _OpenSearch(NamedTuple):
    """A search in a call of a module.

    Attributes:
        given: Scores of the module's arguments, for the case that the search finds nothing.
        version: Their version before the call.
        reason: Why the arguments do not fit, if they are there.
        tokens: The shape of the argument that has the tokens; None without one.
    """

    search: Any
    place: CallIndex
    given: Any
    version: Any
    reason: str
    tokens: tuple[int, ...] | None


class AttentionWatcher(FeatureWatcher):
    """``attention_hook``: reads Q and K from the module's arguments, or scores from the operators that its forward calls.

    The first watcher of a module reads its attention for all hooks that name the module.
    """

    kind = "attention_hook"
    shows: Shown = "calls"

    def __init__(self, module: NamedModule, asked: FeatureContext, found: HookModules, config: MonitorConfig) -> None:
        super().__init__(module, asked, found, config)
        self._searching = asked.reading.searching(module.module)
        self._heads = config.sa_heads
        self._sharing: list[AttentionWatcher] = []

    def attach(self, hooks: HookSet) -> None:
        first = next(one for one in self._asked.watchers if isinstance(one, AttentionWatcher) and one._module is self._module)
        first._sharing.append(self)
        if first is self:
            self._around_forward(hooks, "reading Q and K", self._before, self._after)

    def forget_step(self) -> None:
        for entry in self._open:
            if entry is not None:
                entry.search.leave()
        super().forget_step()

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], searching: Any = None) -> None:
        """Begin a call.

        Args:
            searching: Makes the search in compiled code.
        """
        place = self._open_call(module)
        if place is None:
            return
        for one in self._sharing:
            one.called = True
        searching = searching or self._searching
        given, reason = self._given(args, kwargs)
        if given is not None and (searching is None or given.certain):
            self._write_all(place, self._measured(given), given.measured)
        elif searching is None:
            self._misfit(reason or NO_SCORES)
        else:
            search = searching(self._failures.guarded("reading Q and K", self._measured, of=self.name), self._misfit)
            version = None if given is None else given.version
            tokens = self._tokens(args, kwargs) if given is None else given.measured.shape
            self._open.mine[-1] = _OpenSearch(search, place, given, version, reason, tokens)
            search.enter()  # `_after` leaves it

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, str]:
        """Scores of the module's arguments, and the reason why they do not fit."""
        try:
            return self._reading.given_scores(args, kwargs, self._config.sa_order), ""
        except MisfitError as misfit:
            return None, str(misfit)

    def _tokens(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...] | None:
        """The shape of the first tensor of numbers, if it has a batch, a sequence and channels."""
        tensors = (*args, *(kwargs.get(name) for name in (*reading.TOKENS, *reading.Q_NAMES)))
        shape = next((one.shape for one in tensors if self._reading.is_floating_point(one)), ())
        return tuple(shape) if len(shape) == 3 else None

    def _after(self, module: Any, _args: Any, _kwargs: Any, result: Any) -> None:
        """Also called when forward raised, then without a result."""
        if not self._open.mine or module is not self._module:
            return
        entry: _OpenSearch | None = self._open.mine.pop()
        if entry is None:
            return
        ended = entry.search.saw
        entry.search.leave()
        if not ended and result is None:
            return  # a part of the attention may be missing
        if entry.search.found is not None:
            self._found_in_call(entry, *entry.search.found)
        elif not ended:
            self._take_given(entry)

    def _found_in_call(self, entry: _OpenSearch, found: Spread, measured: Any) -> None:
        if entry.tokens is None or reading.of_all_queries(entry.tokens, measured.shape[0], measured.shape[2]):
            self._write_all(entry.place, found, measured)
        else:
            self._misfit(reading.PART_OF_QUERIES)

    def _take_given(self, entry: _OpenSearch) -> None:
        if entry.given is None:
            self._misfit(entry.reason or entry.search.reason)
        elif not entry.search.opaque:
            self._misfit(reading.NOT_OPAQUE)
        elif entry.given.version != entry.version:
            self._misfit("its Q and K were changed in its forward")
        else:
            self._write_all(entry.place, self._measured(entry.given), entry.given.measured)

    def _measured(self, scores: Any) -> Spread:
        config, wanted = self._config, [one._heads for one in self._sharing]
        heads = 0 if 0 in wanted else max(wanted)
        with self._reading.beneath():
            return self._reading.spread(scores, heads, config.sa_batch_rows, config.sa_sink_tokens, config.sa_logit_bound)

    def _write_all(self, place: CallIndex, found: Spread, measured: Any) -> None:
        for one in self._sharing:
            one._write(place, found, measured)

    def _write(self, place: CallIndex, found: Spread, measured: Any) -> None:
        with self._reading.beneath():
            total = self._reading.summed(found, self._heads)
        self._record(place, {COUNT: total.queries, SUM: total.entropy, SUMSQ: total.greatest}, measured)

    def _misfit(self, reason: str) -> None:
        for one in self._sharing:
            self._asked.does_not_fit(one.kind, one.name, reason)


class AttentionHeadWatcher(AttentionWatcher):
    """``attention_head_hook``: a row for all heads of a module, and one for each head."""

    kind = "attention_head_hook"

    def __init__(self, module: NamedModule, asked: FeatureContext, found: HookModules, config: MonitorConfig) -> None:
        super().__init__(module, asked, found, config)
        self._heads = 0  # all

    def _write(self, place: CallIndex, found: Spread, measured: Any) -> None:
        with self._reading.beneath():
            total, each = self._reading.summed(found, 0), self._reading.heads_of(found)
        self._record(place, _of_heads(total), measured)
        for head, one in enumerate(each):
            self._record(place, _of_heads(one), measured, f".{head}")


def _of_heads(found: Spread) -> Mapping[int, Any]:
    """The numbers of a row of ``attention_head_hook``, by column of partials."""
    of_queries = {COUNT: found.queries, SUM: found.entropy, SINK_QUERIES: found.sink_queries, SUMSQ: found.sink}
    return {**of_queries, MAX: found.logit, HEADS: found.heads, HEADS_ABOVE: found.above}


class _Formed(NamedTuple):
    """The sums of logits that are computed, and what ``FeatureReading.confirmed`` needs."""

    sums: Any
    logits: Any
    unsure: bool


class LogitWatcher(FeatureWatcher):
    """Finds the logits of a router. A linear layer returns them. For other routers they are computed from input and weight, and
    compared with what the router returns.

    The weight is read before the forward, since it may be gathered only for the forward.
    """

    def __init__(self, module: NamedModule, asked: FeatureContext, found: HookModules, config: MonitorConfig) -> None:
        super().__init__(module, asked, found, config)
        self._returns_logits = asked.reading.is_linear(module.module)

    def attach(self, hooks: HookSet) -> None:
        self._around_forward(hooks, "reading a router", self._before, self._after)

    @abstractmethod
    def _sums_of(self, logits: Any) -> Any:
        """The feature's sums over tokens with these logits."""

    @abstractmethod
    def _sums_from(self, tokens: Any, weight: Any, bias: Any, dtype: Any) -> Any:
        """The feature's sums over these tokens, whose logits are computed."""

    @abstractmethod
    def _record_call(self, place: CallIndex, sums: Any, result: Any, call: reading.RouterCall) -> None:
        """Record the row of a call. ``sums`` is None if logits were not found."""

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        place = self._open_call(module)
        if place is None:
            return
        weight = self._reading.matrix_of(module)
        experts = reading.rows_for(weight, partial(self._reading.tokens_of, args, kwargs))
        self._open.mine[-1] = place, experts, None
        if not self._returns_logits and weight is not None and experts is not None:
            self._open.mine[-1] = place, experts, self._formed(module, args, kwargs, weight)

    def _formed(self, module: Any, args: Any, kwargs: Any, weight: Any) -> _Formed | None:
        """The sums, computed from the tokens that the router receives; None if they or a whole weight are missing."""
        tokens, whole = self._reading.tokens_of(args, kwargs, weight.shape[1]), self._reading.whole_rows(weight)
        if tokens is None or whole is None or whole.shape != weight.shape or not prod(tokens.shape):
            return None
        dtype = self._reading.dtype_of_routing(module, tokens, weight)  # ``beneath`` would hide autocast
        with self._reading.beneath():
            bias = self._reading.bias_of(module, whole.shape[0])
            sums, logits = (form(tokens, whole, bias, dtype) for form in (self._sums_from, self._reading.logits_from))
            return _Formed(sums, logits, bias is not None and not reading.has_correction(module))

    def _after(self, module: Any, args: Any, kwargs: Any, result: Any) -> None:
        if not self._open.mine or module is not self._module:
            return
        call = self._open.mine.pop()
        if call is None or result is None:  # there is no result if forward raised
            return
        place, experts, formed = call
        with self._reading.beneath():
            if formed is None:
                sums = self._sums(result, experts)
            else:
                sums = self._reading.confirmed(formed.sums, formed.logits, result, formed.unsure)
        self._record_call(place, sums, result, reading.RouterCall(self._reading.count_tokens(args, kwargs), experts))

    def _sums(self, result: Any, experts: int | None) -> Any:
        """The sums of the logits that a linear layer returns. Other routers may return values derived from theirs."""
        logits = self._logits(result, experts) if self._returns_logits else None
        return None if logits is None else self._sums_of(logits)

    def _logits(self, result: Any, experts: int | None) -> Any:
        """The logits: a single tensor with a number for each expert. Several tensors cannot be told apart."""
        if not self._reading.is_floating_point(result) or len(result.shape) < 2:
            return None
        if experts is None or experts < 2 or result.shape[-1] != experts:
            return None
        return self._reading.whole_rows(result)


class RouterLogitWatcher(LogitWatcher):
    """``moe_router_logit_hook``: the entropy of the softmax of the logits."""

    kind = "moe_router_logit_hook"

    def _sums_of(self, logits: Any) -> Routing:
        return self._reading.entropy_of(logits)

    def _sums_from(self, tokens: Any, weight: Any, bias: Any, dtype: Any) -> Routing:
        return self._reading.entropy_from(tokens, weight, bias, dtype)

    def _record_call(self, place: CallIndex, sums: Routing | None, result: Any, call: reading.RouterCall) -> None:
        del call
        if sums is None:
            self._misfit(NO_LOGITS)
            return
        for leaf in self._backend.tensors.paths.outputs(result)[:1]:
            self._record(place, {COUNT: sums.tokens, SUM: sums.entropy}, leaf.tensor)


class RouterLoadWatcher(LogitWatcher):
    """``moe_router_load_hook``: how many tokens go to each expert, and how large the logits are.

    Rows of the ranks of a data-parallel group are parts of one whole: a merge adds their counts.
    """

    kind = loads.LOAD_KIND

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._experts: dict[tuple[int, int], list[RecordedSeries]] = {}

    def _sums_of(self, logits: Any) -> reading.Logits:
        return self._reading.logit_sums_of(logits)

    def _sums_from(self, tokens: Any, weight: Any, bias: Any, dtype: Any) -> reading.Logits:
        return self._reading.logit_sums_from(tokens, weight, bias, dtype)

    def _record_call(self, place: CallIndex, sums: reading.Logits | None, result: Any, call: reading.RouterCall) -> None:
        try:
            with self._reading.beneath():
                chosen = self._reading.choices_of(self._module, result, call)
        except MisfitError as misfit:
            self._misfit(str(misfit))
            return
        experts = self._experts_of(place.call, chosen.counts.shape[0])
        self._record(place, _of_router(chosen, sums), chosen.counts)
        numbers = {COUNT: chosen.total, features.ASSIGNED: chosen.counts}
        self._recorder.record_block(experts, numbers, chosen.counts, place.micro_step)

    def _experts_of(self, call: int, experts: int) -> list[RecordedSeries]:
        """The series of the experts, made in the first call with so many experts, and placed with that of the router."""
        known = self._experts.get((call, experts))
        if known is None:
            router = self._row_name(call)
            names = [loads.expert_name(router, expert) for expert in range(experts)]
            known = self._experts[call, experts] = [self._new_series(name) for name in names]
            parts = self._asked.data_parallel(self._module, self._chunk, experts)
            for name in (router, *names):
                self._recorder.table.series.place(Series(self.kind, self._chunk, name), parts)
        return known


def _of_router(chosen: reading.Choices, sums: reading.Logits | None) -> dict[int, Any]:
    """The sums of the row of a router, by column of partials."""
    numbers = {features.ROUTERS: 1.0, features.ASSIGNED: chosen.total}
    if chosen.dropped is not None:
        numbers[features.DROPPED] = chosen.dropped
    if chosen.dropped is None or not chosen.shown:
        numbers[features.UNKNOWN_DROPS] = 1.0
    if sums is not None:
        numbers |= {COUNT: sums.tokens, SUM: sums.squares, MAX: sums.greatest}
    return numbers


MATRICES: Final = SMALLS


class WeightWatcher(FeatureWatcher):
    """Reads the weight of a module before its first forward in a step, when a sharded weight is gathered.

    If a module has no matrix, it is reported only if the user named it.
    """

    def __init__(self, module: NamedModule, asked: FeatureContext, found: HookModules, config: MonitorConfig) -> None:
        super().__init__(module, asked, found, config)
        between_forwards: Any = self._reading.matrix_of(module.module)
        self._parameter = NamedParameter(module.chunk, f"{module.name}.{WATCHED_KINDS[self.kind].suffix}", between_forwards)
        self._of_seen: tuple[tuple[int, ...], RecordedSeries | None] | None = None

    def attach(self, hooks: HookSet) -> None:
        hook = self._hook("reading a weight", self._before)
        hooks.add(self._backend.modules.before_forward(self._module, hook, compiled=True))

    def _before(self, module: Any, _args: Any, _kwargs: Any) -> None:
        if self.called or not self._is_watched(module) or self._begin(module) is None:
            return
        weight = self._reading.matrix_of(module)
        try:
            matrix = self._reading.local_matrix(weight)
            watched = self._series_for(weight, matrix)
            if watched is not None:
                with self._reading.beneath():
                    numbers = self._numbers(matrix)
                self._recorder.record_numbers(watched, numbers, matrix)
        except MisfitError as misfit:
            if self._found.named:
                self._misfit(str(misfit))

    def _series_for(self, weight: Any, matrix: Any) -> RecordedSeries | None:
        """The series of the weight, determined once per shape: the layout of a weight over the ranks does not change."""
        shape = tuple(matrix.shape)
        if self._of_seen is None or self._of_seen[0] != shape:
            series = self._asked.series(self.kind, self._parameter, weight)
            self._of_seen = shape, None if series is None else RecordedSeries(series)
        return self._of_seen[1]

    @abstractmethod
    def _numbers(self, matrix: Any) -> Mapping[int, Any]:
        """The sums of the feature, by column of partials."""


class LinearWatcher(WeightWatcher):
    """``linear_hook``: the norms of the weight."""

    kind = "linear_hook"

    def _numbers(self, matrix: Any) -> Mapping[int, Any]:
        norms = self._reading.norms_of(matrix)
        return {COUNT: prod(matrix.shape), MATRICES: norms.matrices, SUMSQ: norms.squares, MAX: norms.spectral}


class RouterWeightWatcher(WeightWatcher):
    """``moe_router_weight_hook``: the similarity of the rows of the weight, one row for each expert."""

    kind = "moe_router_weight_hook"

    def _numbers(self, matrix: Any) -> Mapping[int, Any]:
        if matrix.shape[0] < 2:
            raise MisfitError(ONE_EXPERT)
        found = self._reading.similarity_of_rows(matrix)
        return {COUNT: found.pairs, MATRICES: 1.0, SUM: found.cosines}
