"""Chooses the numbers of each step, on the writer thread, and passes them on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, final

from monitor.config.loading import ConfigError, config_of
from monitor.config.model import Forward
from monitor.failures import Failures
from monitor.forwarding.targets import ForwardTarget, Function, Number, target_of
from monitor.selection import pattern
from monitor.series import MICRO_STEP_KINDS, RUN_KIND, SeriesTable
from monitor.stats.features import COLUMNS_OF
from monitor.stats.ops import NUMERIC_OPS, derive
from monitor.stats.table import KindRows, StepRows, combined_micro_steps

LEFT_OUT: Final = (
    "forward: {left} numbers of step {step} are not passed on, since {most} others are. Choose by kinds, names and ops, or "
    "raise `most`."
)


@final
class Forwarding:
    """Passes the first ``most`` numbers that fit on, and the same ones in each later step (``Watcher``).

    A row of each series counts: micro-steps are combined.
    """

    def __init__(self, wanted: Forward, series: SeriesTable, target: ForwardTarget, failures: Failures) -> None:
        self._wanted, self._series, self._target, self._failures = wanted, series, target, failures
        self._fits = [pattern(name).fullmatch for name in wanted.names]
        self._ops = [op for op in wanted.ops if op in NUMERIC_OPS]
        if unknown := [op for op in wanted.ops if op not in NUMERIC_OPS]:
            failures.warn("forward", f"forward.ops: {', '.join(unknown)} cannot be passed on: it is no number.")
        self._chosen: dict[tuple[int, str], Number | None] = {}
        self._left = self._passed = 0

    def look(self, rows: StepRows) -> None:
        """Pass the numbers of a step on."""
        before = self._left
        numbers = {
            number: value
            for kind in self._in_order(rows.kinds)
            for op in COLUMNS_OF.get(kind, self._ops)
            for number, value in self._of(kind, op, rows.kinds[kind])
        }
        if self._left > before:
            said = LEFT_OUT.format(left=self._left, step=rows.step, most=self._wanted.most)
            self._failures.warn("numbers that are not passed on", said)
        self._target.put(rows.step, numbers)

    def dropped(self, step: int, reason: str) -> None:
        """The step is lost: nothing is passed on."""

    def save(self) -> None:
        """Nothing to save."""

    def close(self) -> None:
        """The run has ended."""
        self._target.close()

    def _in_order(self, kinds: Iterable[str]) -> list[str]:
        wanted = self._wanted.kinds
        found = [kind for kind in kinds if kind in wanted or not wanted]
        return sorted(found, key=wanted.index if wanted else lambda kind: kind != RUN_KIND)

    def _of(self, kind: str, op: str, rows: KindRows) -> Iterator[tuple[Number, float]]:
        if kind in MICRO_STEP_KINDS:
            rows = combined_micro_steps(rows)
        values, there = derive(op, rows.partials)
        for series, value, has in zip(rows.series.tolist(), values.tolist(), there.tolist(), strict=True):
            number = self._number(series, kind, op) if has else None
            if number is not None:
                yield number, value

    def _number(self, series: int, kind: str, op: str) -> Number | None:
        if (series, op) in self._chosen:
            return self._chosen[series, op]
        number, name = None, self._series[series].name
        if not self._fits or kind == RUN_KIND or any(fits(name) for fits in self._fits):
            if self._passed < self._wanted.most:
                self._passed += 1
                number = Number(kind, name, op)
            else:
                self._left += 1
        self._chosen[series, op] = number
        return number


def forwarding_of(wanted: Forward, failures: Failures) -> dict[str, Callable[[SeriesTable], Forwarding]]:
    """Creates the watcher of a recording, from its series, by its name for failure messages; empty if nothing is passed on.

    Raises:
        ConfigError: The library is not installed, or the port cannot be used.
    """
    if wanted.to is None:
        return {}
    try:
        target = target_of(wanted, failures.rank)
    except (ImportError, OSError) as error:
        raise ConfigError(f"forward: {wanted.to} cannot be used: {error}") from error
    return {"forwarding": lambda series: Forwarding(wanted, series, target, failures)}


def forwarding_to(
    call: Callable[[dict[str, float], int], object], chosen: Mapping[str, Any], failures: Failures
) -> Callable[[SeriesTable], Forwarding]:
    """Likewise, to a function.

    Raises:
        ConfigError: ``chosen``, fields of ``forward``, cannot be used.
    """
    wanted = config_of({"forward": dict(chosen)}).forward
    return lambda series: Forwarding(wanted, series, Function(call), failures)
