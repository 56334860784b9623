"""Watches the outputs of modules: massive activations, dead units, the effective rank and the norms of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from monitor.config import MonitorConfig
from monitor.recording.attached_model import NamedModule
from monitor.recording.backend import HookSet, Shown
from monitor.recording.features import reading, watchers
from monitor.recording.module_calls import CallIndex
from monitor.stats import partials


class ActivationWatcher(watchers.FeatureWatcher):
    """``activation_hook``: reads the first floating-point tensor of the module's output."""

    kind = "activation_hook"
    shows: Shown = "results"

    def __init__(
        self, module: NamedModule, asked: watchers.FeatureContext, found: watchers.HookModules, config: MonitorConfig
    ) -> None:
        super().__init__(module, asked, found, config)
        self._units: dict[int, _Units] = {}

    def attach(self, hooks: HookSet) -> None:
        self._around_forward(hooks, "reading an activation", self._before, self._after)

    def _before(self, module: Any, _args: Any, _kwargs: Any) -> None:
        place = self._open_call(module)
        if place is not None:
            self._open.mine[-1] = place

    def _after(self, module: Any, _args: Any, _kwargs: Any, result: Any) -> None:
        if not self._open.mine or module is not self._module:
            return
        place = self._open.mine.pop()
        if place is None or result is None:  # there is no result if forward raised
            return
        try:
            x = self._output(result)
            with self._reading.beneath():
                numbers = self._numbers(place, x.shape[-1], self._reading.activation_of(x))
            self._record(place, numbers, x)
        except reading.MisfitError as misfit:
            self._misfit(str(misfit))

    def _output(self, result: Any) -> Any:
        """The part of the output that this rank has.

        Raises:
            MisfitError: There is none, or it lacks channels.
        """
        tensors = (leaf.tensor for leaf in self._backend.tensors.paths.outputs(result))
        x = next((one for one in tensors if self._reading.is_floating_point(one) and len(one.shape)), None)
        if x is None:
            raise reading.MisfitError(reading.NO_OUTPUT)
        local = self._reading.whole_rows(x)
        channels = getattr(self._module, "output_size", None)  # Megatron's layers know how many channels all ranks have
        if local is None or (isinstance(channels, int) and x.shape[-1] < channels):
            raise reading.MisfitError(reading.CHANNELS_SPLIT)
        if not prod(local.shape):
            raise reading.MisfitError(reading.NO_ELEMENTS)
        return local

    def _numbers(self, place: CallIndex, channels: int, found: reading.Activation) -> Mapping[int, Any]:
        active = self._active_units(place, channels, found.seen)
        return {
            partials.COUNT: found.tokens,
            partials.SUM: found.norms,
            partials.SMALLS: 1.0,
            partials.SUMSQ: found.rank,
            partials.MAX: found.ratio,
            partials.POSINFS: found.channel,
            partials.NEGINFS: found.channel_squared,
            partials.NANS: 0.0 if active is None else 1.0,
            partials.MIN: partials.EMPTY[partials.MIN] if active is None else active,
        }

    def _active_units(self, place: CallIndex, channels: int, seen: Any) -> reading.Number | None:
        """The share of units that are not dead, in the first micro-step of a step that follows enough others; else None."""
        units = self._units.get(place.call)
        if units is None or units.number != channels:
            units = self._units[place.call] = _Units(channels)
        if units.step != self._clock.step:
            since = units.steps - self._config.dead_after_steps
            units.active = self._reading.active_share(units.last, channels, since) if since >= 0 else None
            units.step, units.steps, units.first = self._clock.step, units.steps + 1, place.micro_step
        units.last = self._reading.last_active(units.last, seen, units.steps)
        return units.active if place.micro_step == units.first else None  # a forward that raised may be repeated


class _Units:
    """When the units of a call were active.

    Attributes:
        number: Their number.
        steps: The number of collected steps in which the call was made.
        step: The last of them, as training counts steps.
        first: Its first micro-step with the call.
        active: The share of units that were active in enough steps before it; None if there were too few.
        last: For each unit, in which of the ``steps`` it was last active, counted from 1; 0 if in none. An array of the
            framework.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.steps, self.step, self.first = 0, -1, 0
        self.active: reading.Number | None = None
        self.last: Any = None
