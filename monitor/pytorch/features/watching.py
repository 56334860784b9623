"""The hooks of one module for one feature: when a call counts, what is read of it, and its row."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from torch import Tensor, nn

<<<<<<< HEAD
from monitor.capture.calls import Place
=======
from monitor.capture.features.results import Routing
>>>>>>> 1a395325991baa98b80b1e2ca4c91b3bc595c06b
from monitor.capture.hooks import HookSet
from monitor.capture.modules import ModuleCollector
from monitor.capture.names import NamedModule
from monitor.capture.parameter_series import NamedParameter
from monitor.capture.recorder import Watched
from monitor.pytorch.calls import Calls, recomputing
from monitor.pytorch.features.attention import Scores, spread
from monitor.pytorch.features.calls_within import CallsWithin
from monitor.pytorch.features.choosing import SUFFIXES
from monitor.pytorch.features.matrices import FollowedMatrix, similarity_of_rows
from monitor.pytorch.features.routing import dtype_of_routing, entropy_from, entropy_of
from monitor.pytorch.features.sources import (
    NO_LOGITS,
    NO_SCORES,
    ONE_EXPERT,
    MisfitError,
    bias_of,
    given_scores,
    local_matrix,
    matrix_of,
    tokens_of,
    whole_rows,
)
from monitor.pytorch.hooks import ModuleHook
from monitor.pytorch.leaves import LEAVES
from monitor.series import Series
from monitor.stats.partials import COUNT, MAX, SMALLS, SUM, SUMSQ
from monitor.stats.torch_modes import beneath, unseen

MATRICES = SMALLS

SWITCHING = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
"""Modules that compute otherwise, and to other bits, while a function mode looks on."""


class Asked(Protocol):
    """Whom watchers ask."""

    modules: ModuleCollector

    def series(self, kind: str, parameter: NamedParameter, seen: Tensor) -> Series | None:
        """The series of a feature of a weight; None where another rank writes it."""

    def does_not_fit(self, kind: str, name: str, reason: str) -> None:
        """Say, with all others of the step, that there is no row of a module."""


class FeatureWatcher:
    """What all features have in common: calls that count are counted, once each.

    Attributes:
        called: Whether a call that counts was seen in the step in progress.
    """

    kind: str

    def __init__(self, module: NamedModule, asked: Asked) -> None:
        self.name = module.name
        self.called = False
        self._module, self._chunk = module.module, module.chunk
        self._asked, self._modules = asked, asked.modules
        self._recorder, self._clock = asked.modules.recorder, asked.modules.clock
        self._calls: Calls | None = None
        self._watched: dict[int, Watched] = {}

    def attach(self, hooks: HookSet) -> None:
        """Register what reads the module."""
        raise NotImplementedError

    def forget_step(self) -> None:
        self._calls = None
        self.called = False

    def restart(self, chunk: int, micro_step: int) -> None:
        if chunk == self._chunk and self._calls is not None:
            self._calls.restart(micro_step)

    def _hook(self, what: str, call: Any) -> ModuleHook:
        def hidden(*args: Any) -> None:
            with unseen():
                call(*args)

        return ModuleHook(self._modules.failures.guarded(what, hidden, "The feature of this module is missing.", of=self.name))

    def _is_watched(self, module: nn.Module) -> bool:
        # A replica that shares our hooks runs on a thread of its own: its calls are not this module's.
        return self._recorder.active and module is self._module

    def _begin(self, module: nn.Module) -> Place | None:
        """The call that begins now; None if it is not of training, or repeats one that was recorded in forward."""
        if recomputing() or not self._modules.counts(self._chunk, module):
            return None
        if self._calls is None:
            self._calls, self.called = Calls(), True
            self._modules.remember(self)
        return self._calls.begin(self._clock.micro_step(self._chunk))

    def _record(self, call: int, numbers: Mapping[int, float | Tensor], x: Tensor, micro_step: int) -> None:
        watched = self._watched.get(call)
        if watched is None:
            name = f"{self.name}.{SUFFIXES[self.kind]}" + (f"#{call}" if call else "")
            micro_steps = tuple(range(self._clock.micro_steps))
            watched = self._watched[call] = Watched(Series(self.kind, self._chunk, name), micro_steps)
        self._recorder.record_numbers(watched, numbers, x, micro_step)

    def _misfit(self, reason: str) -> None:
        self._asked.does_not_fit(self.kind, self.name, reason)


class AttentionWatcher(FeatureWatcher):
    """``attention_hook``: Q and K are what the module is called with, or what its forward hands to torch."""

    kind = "attention_hook"

    def __init__(self, module: NamedModule, asked: Asked, order: str, heads: int, rows: int) -> None:
        super().__init__(module, asked)
        self._order, self._heads, self._rows = order, heads, rows
        self._open: list[CallsWithin | None] = []
        self._looks_within = not any(_is_compiled(one) or isinstance(one, SWITCHING) for one in module.module.modules())

    def attach(self, hooks: HookSet) -> None:
        before, after = self._hook("reading Q and K", self._before), self._hook("leaving an attention", self._after)
        hooks.add(self._module.register_forward_pre_hook(before, with_kwargs=True))
        hooks.add(self._module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def forget_step(self) -> None:
        super().forget_step()
        while self._open:
            if (mode := self._open.pop()) is not None:
                mode.leave()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_watched(module):
            return
        self._open.append(None)
        place = self._begin(module)
        if place is None:
            return
        try:
            given = given_scores(args, kwargs, self._order)
        except MisfitError as misfit:
            self._misfit(str(misfit))
            return
        if given is not None:
            self._seen(place, given)
        elif not self._looks_within:
            self._misfit(NO_SCORES)
        else:
            seen = self._modules.failures.guarded("reading Q and K", self._seen, of=self.name)
            self._open[-1] = mode = CallsWithin(partial(seen, place), self._misfit)
            mode.enter()  # and the hook behind forward leaves it

    def _after(self, module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> None:
        """Also called when forward raised, then without a result."""
        if not self._open or module is not self._module:
            return
        mode = self._open.pop()
        if mode is not None:
            found, reason = mode.saw, mode.reason
            mode.leave()
            if not found and result is not None:
                self._misfit(reason)

    def _seen(self, place: Place, scores: Scores) -> None:
        with beneath():
            found = spread(scores, self._heads, self._rows)
        numbers = {COUNT: found.queries, SUM: found.entropy, SUMSQ: found.greatest}
        self._record(place.call, numbers, scores.query, place.micro_step)


class WeightWatcher(FeatureWatcher):
    """The weight of a module, before its first forward in a step: whole then, where it is gathered for forward.

    Args:
        named: Whether the user named the module; of others that turn out to have no matrix nothing is said.
    """

    def __init__(self, module: NamedModule, asked: Asked, *, named: bool) -> None:
        super().__init__(module, asked)
        self._named = named
        between_forwards: Any = matrix_of(module.module)
        self._parameter = NamedParameter(module.chunk, f"{module.name}.{SUFFIXES[self.kind]}", between_forwards)
        self._of_seen: tuple[tuple[int, ...], Watched | None] | None = None

    def attach(self, hooks: HookSet) -> None:
        hooks.add(self._module.register_forward_pre_hook(self._hook("reading a weight", self._before)))

    def _before(self, module: nn.Module, _args: Any) -> None:
        if self.called or not self._is_watched(module) or self._begin(module) is None:
            return
        weight = matrix_of(module)
        try:
            matrix = local_matrix(weight)
            assert weight is not None
            watched = self._series_for(weight, matrix)
            if watched is not None:
                with beneath():
                    numbers = self._numbers(matrix)
                self._recorder.record_numbers(watched, numbers, matrix)
        except MisfitError as misfit:
            if self._named:
                self._misfit(str(misfit))

    def _series_for(self, weight: Tensor, matrix: Tensor) -> Watched | None:
        """Asked once: how a weight is laid out over the ranks stays."""
        shape = tuple(matrix.shape)
        if self._of_seen is None or self._of_seen[0] != shape:
            series = self._asked.series(self.kind, self._parameter, weight)
            self._of_seen = shape, None if series is None else Watched(series)
        return self._of_seen[1]

    def _numbers(self, matrix: Tensor) -> Mapping[int, float | Tensor]:
        raise NotImplementedError


class LinearWatcher(WeightWatcher):
    """``linear_hook``: the norms of the weight."""

    kind = "linear_hook"

    def __init__(self, module: NamedModule, asked: Asked, *, named: bool) -> None:
        super().__init__(module, asked, named=named)
        self._followed = FollowedMatrix()

    def _numbers(self, matrix: Tensor) -> Mapping[int, float | Tensor]:
        norms = self._followed.norms(matrix)
        return {COUNT: matrix.numel(), MATRICES: 1.0, SUMSQ: norms.squares, MAX: norms.spectral}


class RouterWeightWatcher(WeightWatcher):
    """``moe_router_weight_hook``: how alike the rows of the weight are, one for each expert."""

    kind = "moe_router_weight_hook"

    def _numbers(self, matrix: Tensor) -> Mapping[int, float | Tensor]:
        if matrix.shape[0] < 2:
            raise MisfitError(ONE_EXPERT)
        found = similarity_of_rows(matrix)
        return {COUNT: found.pairs, MATRICES: 1.0, SUM: found.cosines}


class RouterLogitWatcher(FeatureWatcher):
    """``moe_router_logit_hook``: the logits are what a linear layer returns. Of others they follow from input and weight,
    which is read before the forward: it may be gathered for that alone.
    """

    kind = "moe_router_logit_hook"

    def __init__(self, module: NamedModule, asked: Asked) -> None:
        super().__init__(module, asked)
        self._returns_logits = isinstance(module.module, nn.Linear)
        self._open: list[tuple[Place, int | None, Routing | None] | None] = []

    def attach(self, hooks: HookSet) -> None:
        before, after = self._hook("reading a router", self._before), self._hook("reading logits", self._after)
        hooks.add(self._module.register_forward_pre_hook(before, with_kwargs=True))
        hooks.add(self._module.register_forward_hook(after, with_kwargs=True, always_call=True))

    def forget_step(self) -> None:
        super().forget_step()
        self._open.clear()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_watched(module):
            return
        self._open.append(None)
        place = self._begin(module)
        if place is None:
            return
        weight = matrix_of(module)
        experts = None if weight is None or weight.dim() != 2 else weight.shape[0]
        self._open[-1] = place, experts, None
        if not self._returns_logits and weight is not None and experts is not None:
            self._open[-1] = place, experts, self._formed(module, args, kwargs, weight)

    def _formed(self, module: nn.Module, args: Any, kwargs: Any, weight: Tensor) -> Routing | None:
        """From what the router is given."""
        tokens, whole = tokens_of(args, kwargs, weight.shape[1]), whole_rows(weight)
        if tokens is None or whole is None or whole.shape != weight.shape or not tokens.numel():
            return None
        with beneath():
            return entropy_from(tokens, whole, bias_of(module, len(whole)), dtype_of_routing(module, tokens, weight))

    def _after(self, module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> None:
        if not self._open or module is not self._module:
            return
        call = self._open.pop()
        if call is None or result is None:  # that is what there is when forward raised
            return
        place, experts, formed = call
        # What a router returns may be what it has made of its logits: those that follow from its weight are certain.
        logits = _logits(result, experts) if formed is None else None
        if logits is not None:
            with beneath():
                formed = entropy_of(logits)
        if formed is None:
            self._misfit(NO_LOGITS)
            return
        for leaf in LEAVES.outputs(result)[:1]:
            self._record(place.call, {COUNT: formed.tokens, SUM: formed.entropy}, leaf.tensor, place.micro_step)


def _logits(result: Any, experts: int | None) -> Tensor | None:
    """A single tensor that has a number for each expert. Of several none can be told from what was made of it."""
    if not isinstance(result, Tensor) or result.dim() < 2 or not result.is_floating_point():
        return None
    if experts is None or experts < 2 or result.shape[-1] != experts:
        return None
    return whole_rows(result)


def _is_compiled(module: nn.Module) -> bool:
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None
