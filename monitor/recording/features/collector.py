"""Collects the features of one attachment: creates their watchers, and reports modules without rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, cast, final

from monitor.config import MonitorConfig
from monitor.failures import LOGGER
from monitor.recording.activations import ModuleCollector
from monitor.recording.attached_model import Attached, ModelNames, NamedModule, NamedParameter
from monitor.recording.backend import HookSet
from monitor.recording.features.reading import NOT_CALLED
from monitor.recording.features.watchers import FeatureWatcher, HookModules, modules_by_hook, warning
from monitor.recording.late_modules import LateModules
from monitor.recording.phases import Collector
from monitor.series import LOCAL, WATCHED_KINDS, Placement, Series, Shard, ranks_of


@final
class FeatureCollector(Collector):
    """The kinds of modules that ``l2_targets`` names, each by the watcher that its entry in ``monitor/series.py`` names.

    Attributes:
        attached: The context of the attachment.
        modules: Tells which calls belong to training.
        reading: The framework's computation of features.
        watchers: All watchers, which share what they find.
    """

    def __init__(self, attached: Attached, names: ModelNames, modules: ModuleCollector) -> None:
        self.attached = attached
        self.modules = modules
        self.reading = attached.backend.features
        self._framework = attached.framework
        self._ownership = ownership = attached.watch.ownership
        self._failures, config = attached.failures, attached.config
        self._hooks = HookSet()
        self._misfits: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._named: set[tuple[str, str]] = set()
        self._reported = False
        found = modules_by_hook(names, config, self.reading)
        if (said := warning(found)) is not None:
            LOGGER.warning("[rank %d] %s", ownership.rank, said)
        self.watchers = [watcher for hook in found for watcher in self._watchers_of(hook, found[hook], config)]
        for watcher in self.watchers:
            watcher.attach(self._hooks)
        self._late = LateModules(attached, _modules_of(found), self._asked, "features")

    def series(self, kind: str, parameter: NamedParameter, seen: Any) -> Series | None:
        """The series of a feature of a weight; None if another rank writes it."""
        known = self.reading.weight_placement(self._framework, self._ownership.rank, parameter, seen)
        placement = self.attached.completed(kind, kind, parameter, known)
        if not self._ownership.writes(placement):
            return None
        series = Series(kind, parameter.chunk, parameter.name)
        self.attached.recorder.table.series.place(series, placement)
        return series

    def data_parallel(self, module: Any, chunk: int, experts: int) -> Placement:
        """The placement of counts that add up over the data-parallel ranks of a router: each rank's are a part.

        ``LOCAL`` if these ranks are not known. Tensor-parallel ranks route the same tokens, and are not among them.
        """
        weight = self.reading.matrix_of(module)
        parameter = NamedParameter(chunk, "", weight)
        known = LOCAL if weight is None else self._framework.placement("grad_reduced", parameter)
        passed, seen = self._ownership.dp_group, self._framework.groups().get("dp", ())
        ranks = known.data_parallel or ranks_of(passed or seen) or known.unclaimed
        if len(ranks) < 2 or self._ownership.rank not in ranks:
            return LOCAL
        return Placement(shard=Shard(ranks, (experts,)))

    def does_not_fit(self, kind: str, name: str, reason: str) -> None:
        """Report at the end of the step that a module has no row."""
        if (kind, name) not in self._named:
            self._named.add((kind, name))
            self._misfits[kind, reason].append(name)

    def before_seal(self) -> None:
        self._late.before_seal()

    def end_step(self, *, collected: bool) -> None:
        if collected:
            self._failures.guarded("ending a step of features", self._end_collected_step)()

    def remove(self) -> None:
        """Take every hook away."""
        self._hooks.remove()
        for watcher in self.watchers:
            watcher.forget_step()

    def _asked(self, names: ModelNames) -> Iterator[NamedModule]:
        return _modules_of(modules_by_hook(names, self.attached.config, self.reading))

    def _end_collected_step(self) -> None:
        """End a collected step. In the first one, report all modules that have no row."""
        if not self._reported:
            for watcher in self.watchers:
                if not watcher.called:
                    self.does_not_fit(watcher.kind, watcher.name, NOT_CALLED)
        if self._misfits:
            self._report_misfits()
        self._reported = True

    def _report_misfits(self) -> None:
        cause = "features without a module" if not self._reported else "features that no longer fit"
        step = self.attached.clock.step
        named = "; ".join(f"{kind}: {reason}: {', '.join(map(repr, who))}" for (kind, reason), who in self._misfits.items())
        self._failures.warn(cause, f"Features that have no row in step {step}: {named}. See docs/features.md.")
        self._misfits.clear()

    def _watchers_of(self, hook: str, found: HookModules, config: MonitorConfig) -> Iterator[FeatureWatcher]:
        watcher = _watcher_of(hook)
        for module in found.modules:
            if self.attached.backend.modules.takes_hooks(module.module):
                yield watcher(module, self, found, config)
            else:
                self.does_not_fit(hook, module.name, "it takes no hooks")


def _modules_of(found: Mapping[str, HookModules]) -> Iterator[NamedModule]:
    return (module for hook in found.values() for module in hook.modules)


def _watcher_of(hook: str) -> type[FeatureWatcher]:
    module, _, name = WATCHED_KINDS[hook].watcher.partition(":")
    return cast("type[FeatureWatcher]", getattr(import_module(module), name))
