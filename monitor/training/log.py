"""Training metrics in the log: one line a step for the run, and one for each metric of its state."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Final

from monitor.failures import LOGGER
from monitor.training.expert_load import Counts, load
from monitor.training.scalars import Scalar

UNITS: Final = {
    "iteration-time": " s",
    "throughput": " samples/s/device",
    "model-flops-throughput-per-npu": " TFLOPS",
}
JUDGED: Final = ("loss", "grad-norm", "device_local_norm", "weight_norm", "device_accum_local_loss")
"""What is said to be not finite, where it is."""
MOST_NAMED: Final = 3
MOST_SHARES: Final = 16
"""Experts of a router whose shares all stand in a line; of more, the least and the greatest do."""


class LogWriter:
    """Writes to the monitor's logger.

    Args:
        total: How many steps there are going to be; 0 where that is not known.
    """

    def __init__(self, rank: int, total: int = 0) -> None:
        self._rank = rank
        self._total = total
        self._since: dict[str, int] = {}

    def run(self, step: int, scalars: Sequence[Scalar], since_last: float, reasons: Iterable[str] = ()) -> None:
        """One line of a step.

        Args:
            since_last: Seconds since the step before has ended.
            reasons: Why numbers are not finite; the line is then a warning.
        """
        shown = ", ".join(f"{one.tag} {_shown(one.value)}{UNITS.get(one.tag, '')}" for one in scalars)
        of = f" of {self._total}" if self._total else ""
        why = "".join(f"; {reason}" for reason in reasons)
        level = logging.WARNING if why else logging.INFO
        LOGGER.log(level, "[rank %d] step %d%s: %s; %.3g s since the last step%s", self._rank, step, of, shown, since_last, why)

    def state(self, scalars: Sequence[Scalar]) -> None:
        """A line for each metric, with the parameters that it is of."""
        for (metric, x), group in groupby(scalars, key=lambda one: (one.metric, one.x)):
            LOGGER.info("[rank %d] step %d: %s", self._rank, x, _joined(metric, list(group)))

    def load(self, step: int, tokens: Counts) -> None:
        """One line with the shares of experts, by router."""
        told = [f"{name} {_shares(load(counts))}" for name, counts in tokens.items() if sum(counts)]
        if told:
            LOGGER.info("[rank %d] step %d: expert_load %s", self._rank, step, "; ".join(told))

    def reasons(self, step: int, scalars: Sequence[Scalar], local: Mapping[str, float], *, skipped: bool) -> list[str]:
        """What is not finite, since when, and where it is first seen.

        Args:
            local: Norms of gradients, by parameter.
        """
        wrong = {one.tag: one.value for one in scalars if one.tag in JUDGED and not math.isfinite(one.value)}
        fine = {one.tag for one in scalars if one.tag not in wrong}  # what is not shown in this step says nothing
        self._since = {tag: since for tag, since in self._since.items() if tag not in fine}
        self._since.update({tag: step for tag in wrong if tag not in self._since})
        said = [f"{tag} is {_shown(value)}, since step {self._since[tag]}" for tag, value in wrong.items()]
        if said and (poisoned := [name for name, norm in local.items() if not math.isfinite(norm)]):
            more = f" and {len(poisoned) - MOST_NAMED} more" if len(poisoned) > MOST_NAMED else ""
            said.append(f"not finite are the gradients of {', '.join(poisoned[:MOST_NAMED])}{more}")
        return [*said, "the optimizer skipped the step"] if skipped else said


def _joined(metric: str, scalars: Sequence[Scalar]) -> str:
    if len(scalars) == 1 and scalars[0].tag == metric:
        return f"{metric} {_shown(scalars[0].value)}"
    return f"{metric} " + ", ".join(f"{one.tag.partition('/')[2]} {_shown(one.value)}" for one in scalars)


def _shares(shares: Sequence[float]) -> str:
    if len(shares) <= MOST_SHARES:
        return " ".join(map(_shown, shares))
    (least, fewest), (most, greatest) = (choose(enumerate(shares), key=itemgetter(1)) for choose in (min, max))
    return f"of {len(shares)} experts from {_shown(fewest)} (expert_{least}) to {_shown(greatest)} (expert_{most})"


def _shown(value: float) -> str:
    return f"{value:.6g}"
