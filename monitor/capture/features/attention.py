"""``attention_hook``."""

from __future__ import annotations

from functools import partial
from typing import Any

from monitor.capture.calls import Place
from monitor.capture.features.reading import Search
from monitor.capture.features.sources import NO_SCORES, MisfitError
from monitor.capture.features.watching import Asked, FeatureWatcher
from monitor.capture.hooks import HookSet
from monitor.capture.names import NamedModule
from monitor.stats.partials import COUNT, SUM, SUMSQ


class AttentionWatcher(FeatureWatcher):
    """``attention_hook``: Q and K are what the module is called with, or what its forward hands to torch."""

    kind = "attention_hook"

    def __init__(self, module: NamedModule, asked: Asked, order: str, heads: int, rows: int) -> None:
        super().__init__(module, asked)
        self._order, self._heads, self._rows = order, heads, rows
        self._open: list[Search | None] = []
        self._searching = asked.reading.searching(module.module)

    def attach(self, hooks: HookSet) -> None:
        self._before_forward(hooks, "reading Q and K", self._before)
        self._after_forward(hooks, "leaving an attention", self._after)

    def forget_step(self) -> None:
        super().forget_step()
        while self._open:
            if (mode := self._open.pop()) is not None:
                mode.leave()

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_watched(module):
            return
        self._open.append(None)
        place = self._begin(module)
        if place is None:
            return
        try:
            given = self._reading.given_scores(args, kwargs, self._order)
        except MisfitError as misfit:
            self._misfit(str(misfit))
            return
        if given is not None:
            self._seen(place, given)
        elif self._searching is None:
            self._misfit(NO_SCORES)
        else:
            seen = self._modules.failures.guarded("reading Q and K", self._seen, of=self.name)
            self._open[-1] = mode = self._searching(partial(seen, place), self._misfit)
            mode.enter()  # and the hook behind forward leaves it

    def _after(self, module: Any, _args: Any, _kwargs: Any, result: Any) -> None:
        """Also called when forward raised, then without a result."""
        if not self._open or module is not self._module:
            return
        mode = self._open.pop()
        if mode is not None:
            found, reason = mode.saw, mode.reason
            mode.leave()
            if not found and result is not None:
                self._misfit(reason)

    def _seen(self, place: Place, scores: Any) -> None:
        with self._reading.beneath():
            found = self._reading.spread(scores, self._heads, self._rows)
        numbers = {COUNT: found.queries, SUM: found.entropy, SUMSQ: found.greatest}
        self._record(place.call, numbers, scores.query, place.micro_step)
