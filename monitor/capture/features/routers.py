"""``moe_router_logit_hook``."""

from __future__ import annotations

from math import prod
from typing import Any

from monitor.capture.calls import Place
from monitor.capture.features.results import Routing
from monitor.capture.features.sources import NO_LOGITS
from monitor.capture.features.watching import Asked, FeatureWatcher
from monitor.capture.hooks import HookSet
from monitor.capture.names import NamedModule
from monitor.stats.partials import COUNT, SUM


class RouterLogitWatcher(FeatureWatcher):
    """``moe_router_logit_hook``: the logits are what a linear layer returns. Of others they follow from input and weight,
    which is read before the forward: it may be gathered for that alone.
    """

    kind = "moe_router_logit_hook"

    def __init__(self, module: NamedModule, asked: Asked) -> None:
        super().__init__(module, asked)
        self._returns_logits = asked.reading.is_linear(module.module)
        self._open: list[tuple[Place, int | None, Routing | None] | None] = []

    def attach(self, hooks: HookSet) -> None:
        self._before_forward(hooks, "reading a router", self._before)
        self._after_forward(hooks, "reading logits", self._after)

    def forget_step(self) -> None:
        super().forget_step()
        self._open.clear()

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_watched(module):
            return
        self._open.append(None)
        place = self._begin(module)
        if place is None:
            return
        weight = self._reading.matrix_of(module)
        experts = None if weight is None or len(weight.shape) != 2 else weight.shape[0]
        self._open[-1] = place, experts, None
        if not self._returns_logits and weight is not None and experts is not None:
            self._open[-1] = place, experts, self._formed(module, args, kwargs, weight)

    def _formed(self, module: Any, args: Any, kwargs: Any, weight: Any) -> Routing | None:
        """From what the router is given."""
        tokens, whole = self._reading.tokens_of(args, kwargs, weight.shape[1]), self._reading.whole_rows(weight)
        if tokens is None or whole is None or whole.shape != weight.shape or not prod(tokens.shape):
            return None
        reading = self._reading
        with reading.beneath():
            bias, dtype = reading.bias_of(module, whole.shape[0]), reading.dtype_of_routing(module, tokens, weight)
            return reading.entropy_from(tokens, whole, bias, dtype)

    def _after(self, module: Any, _args: Any, _kwargs: Any, result: Any) -> None:
        if not self._open or module is not self._module:
            return
        call = self._open.pop()
        if call is None or result is None:  # that is what there is when forward raised
            return
        place, experts, formed = call
        # What a router returns may be what it has made of its logits: those that follow from its weight are certain.
        logits = self._logits(result, experts) if formed is None else None
        if logits is not None:
            with self._reading.beneath():
                formed = self._reading.entropy_of(logits)
        if formed is None:
            self._misfit(NO_LOGITS)
            return
        for leaf in self._backend.leaves.outputs(result)[:1]:
            self._record(place.call, {COUNT: formed.tokens, SUM: formed.entropy}, leaf.tensor, place.micro_step)

    def _logits(self, result: Any, experts: int | None) -> Any:
        """A single tensor that has a number for each expert. Of several none can be told from what was made of it."""
        if not self._reading.is_floating_point(result) or len(result.shape) < 2:
            return None
        if experts is None or experts < 2 or result.shape[-1] != experts:
            return None
        return self._reading.whole_rows(result)
