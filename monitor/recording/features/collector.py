"""Collects the features of one attachment: creates their watchers, and reports modules without rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from monitor.config import MonitorConfig
from monitor.coordinator.ownership import Ownership
from monitor.failures import LOGGER
from monitor.recording.activations import ModuleCollector
from monitor.recording.backend import HookSet
from monitor.recording.features.reading import NOT_CALLED, FeatureReading
from monitor.recording.features.watchers import (
    AttentionWatcher,
    FeatureWatcher,
    HookModules,
    LinearWatcher,
    RouterLogitWatcher,
    RouterWeightWatcher,
    modules_by_hook,
    warning,
)
from monitor.recording.model_names import ModelNames, NamedModule
from monitor.recording.parameter_series import NamedParameter
from monitor.series import LOCAL, Series


class FeatureCollector:
    """``attention_hook``, ``linear_hook``, ``moe_router_weight_hook``, ``moe_router_logit_hook``.

    Attributes:
        modules: Tells which calls belong to training.
        reading: The framework's computation of features.
    """

    def __init__(
        self,
        names: ModelNames,
        config: MonitorConfig,
        modules: ModuleCollector,
        framework: Any,
        ownership: Ownership,
        reading: FeatureReading,
    ) -> None:
        self.modules = modules
        self.reading = reading
        self._framework = framework
        self._ownership = ownership
        self._hooks = HookSet()
        self._misfits: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._named: set[tuple[str, str]] = set()
        self._reported = False
        found = modules_by_hook(names, config, reading)
        if (said := warning(found)) is not None:
            LOGGER.warning("[rank %d] %s", ownership.rank, said)
        self._watchers = [watcher for hook in found for watcher in self._watchers_of(hook, found[hook], config)]
        for watcher in self._watchers:
            watcher.attach(self._hooks)

    def series(self, kind: str, parameter: NamedParameter, seen: Any) -> Series | None:
        """The series of a feature of a weight; None if another rank writes it."""
        known = self.reading.weight_placement(self._framework, self._ownership.rank, parameter, seen)
        split = bool(getattr(parameter.tensor, "tensor_model_parallel", False))
        placement = self._ownership.placed(kind, known, tensor_parallel=split)
        if not split:
            placement = self._framework.completed(kind, parameter, placement)
            placement = self._ownership.assumed(kind, placement) if known == LOCAL else placement
        if not self._ownership.writes(placement):
            return None
        series = Series(kind, parameter.chunk, parameter.name)
        self.modules.recorder.table.series.place(series, placement)
        return series

    def does_not_fit(self, kind: str, name: str, reason: str) -> None:
        """Report at the end of the step that a module has no row."""
        if (kind, name) not in self._named:
            self._named.add((kind, name))
            self._misfits[kind, reason].append(name)

    def end_step(self) -> None:
        """End a collected step. In the first one, report all modules that have no row."""
        if not self._reported:
            for watcher in self._watchers:
                if not watcher.called:
                    self.does_not_fit(watcher.kind, watcher.name, NOT_CALLED)
        if self._misfits:
            self._report_misfits()
        self._reported = True

    def remove(self) -> None:
        """Take every hook away."""
        self._hooks.remove()
        for watcher in self._watchers:
            watcher.forget_step()

    def _report_misfits(self) -> None:
        cause = "features without a module" if not self._reported else "features that no longer fit"
        step = self.modules.clock.step
        named = "; ".join(f"{kind}: {reason}: {', '.join(map(repr, who))}" for (kind, reason), who in self._misfits.items())
        self.modules.failures.warn(cause, f"Features that have no row in step {step}: {named}. See docs/features.md.")
        self._misfits.clear()

    def _watchers_of(self, hook: str, found: HookModules, config: MonitorConfig) -> Iterator[FeatureWatcher]:
        for module in found.modules:
            if self.modules.backend.modules.takes_hooks(module.module):
                yield self._watcher(hook, module, found, config)
            else:
                self.does_not_fit(hook, module.name, "it takes no hooks")

    def _watcher(self, hook: str, module: NamedModule, found: HookModules, config: MonitorConfig) -> FeatureWatcher:
        if hook == "attention_hook":
            return AttentionWatcher(module, self, config.sa_order, config.sa_heads, config.sa_batch_rows)
        if hook == "moe_router_logit_hook":
            return RouterLogitWatcher(module, self)
        kind = LinearWatcher if hook == "linear_hook" else RouterWeightWatcher
        return kind(module, self, named=found.named)
