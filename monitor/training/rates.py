"""How fast training goes, in the units that users know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SECONDS_PER_DAY: Final = 86_400
BILLION: Final = 1e9
TERA: Final = 1e12


@dataclass(frozen=True, slots=True)
class Rates:
    """Of the steps since rates were last asked for.

    Attributes:
        iteration_time: Seconds a step, the time between steps included.
        throughput: Samples a second and device; None where nobody said how many samples there are.
        model_tflops: 10^12 floating point operations of the model a second, on this device; None where they are not known.
        samples_per_day: 10^9 samples a day, on all devices.
    """

    iteration_time: float
    throughput: float | None = None
    model_tflops: float | None = None
    samples_per_day: float | None = None


class Pace:
    """Adds up steps until somebody asks how fast they were.

    Args:
        devices: How many share the samples.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._last: float | None = None
        self._forget()

    def _forget(self) -> None:
        self._steps, self._samples, self._flops, self._unknown = 0, 0, 0.0, False

    def begin(self, at: float) -> None:
        """The first step began, in the seconds in which ends are told. Later calls say nothing."""
        self._last = at if self._last is None else self._last

    def add(self, samples: int | None, flops: float | None) -> None:
        """A step has ended."""
        self._steps += 1
        self._unknown |= samples is None
        self._samples += samples or 0
        self._flops += flops or 0.0

    def rates(self, now: float) -> Rates:
        """Of the steps added since this was last called, the last of which ended ``now``."""
        seconds, self._last = now - (now if self._last is None else self._last), now
        steps, samples, flops, unknown = self._steps, self._samples, self._flops, self._unknown
        self._forget()
        known = seconds > 0 and not unknown and samples
        throughput = samples / seconds / self._devices if known else None
        return Rates(
            seconds / max(steps, 1),
            throughput,
            flops / seconds / TERA if flops and seconds > 0 else None,
            None if throughput is None else throughput * self._devices * SECONDS_PER_DAY / BILLION,
        )
