"""``linear_hook`` and ``moe_router_weight_hook``: features of a weight."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from math import prod
from typing import Any, Final

from monitor.capture.features.choosing import SUFFIXES
from monitor.capture.features.sources import ONE_EXPERT, MisfitError
from monitor.capture.features.watching import Asked, FeatureWatcher
from monitor.capture.hooks import HookSet
from monitor.capture.names import NamedModule
from monitor.capture.parameter_series import NamedParameter
from monitor.capture.recorder import Watched
from monitor.stats.partials import COUNT, MAX, SMALLS, SUM, SUMSQ

MATRICES: Final = SMALLS


class WeightWatcher(FeatureWatcher):
    """The weight of a module, before its first forward in a step: whole then, where it is gathered for forward.

    Args:
        named: Whether the user named the module; of others that turn out to have no matrix nothing is said.
    """

    def __init__(self, module: NamedModule, asked: Asked, *, named: bool) -> None:
        super().__init__(module, asked)
        self._named = named
        between_forwards: Any = self._reading.matrix_of(module.module)
        self._parameter = NamedParameter(module.chunk, f"{module.name}.{SUFFIXES[self.kind]}", between_forwards)
        self._of_seen: tuple[tuple[int, ...], Watched | None] | None = None

    def attach(self, hooks: HookSet) -> None:
        self._before_forward(hooks, "reading a weight", self._before)

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
            if self._named:
                self._misfit(str(misfit))

    def _series_for(self, weight: Any, matrix: Any) -> Watched | None:
        """Asked once: how a weight is laid out over the ranks stays."""
        shape = tuple(matrix.shape)
        if self._of_seen is None or self._of_seen[0] != shape:
            series = self._asked.series(self.kind, self._parameter, weight)
            self._of_seen = shape, None if series is None else Watched(series)
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
    """``moe_router_weight_hook``: how alike the rows of the weight are, one for each expert."""

    kind = "moe_router_weight_hook"

    def _numbers(self, matrix: Any) -> Mapping[int, Any]:
        if matrix.shape[0] < 2:
            raise MisfitError(ONE_EXPERT)
        found = self._reading.similarity_of_rows(matrix)
        return {COUNT: found.pairs, MATRICES: 1.0, SUM: found.cosines}
