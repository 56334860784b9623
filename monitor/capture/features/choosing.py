"""Which modules have which features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from monitor.capture.features.reading import Reading
from monitor.capture.names import ModelNames, NamedModule
from monitor.config import MonitorConfig
from monitor.selection import Ambiguous, Unmatched, noticed, told

SUFFIXES: Final = {
    "attention_hook": "attention",
    "linear_hook": "linear",
    "moe_router_weight_hook": "moe_router",
    "moe_router_logit_hook": "moe_router",
}
"""What a series of each hook is called, behind its module."""


_MISSED: Final = "l2_targets that name no module of this model (of a pipeline, of this rank's part of it)"


class Chosen(NamedTuple):
    """The modules of a hook.

    Attributes:
        named: Whether the configuration names them, and did not leave the choice to the monitor.
        unmatched: What it names and the model does not have.
        ambiguous: What it names and several modules have.
    """

    modules: Sequence[NamedModule]
    named: bool = True
    unmatched: Sequence[Unmatched] = ()
    ambiguous: Sequence[Ambiguous] = ()


def chosen(names: ModelNames, config: MonitorConfig, reading: Reading) -> Mapping[str, Chosen]:
    """By hook; empty where no features are recorded."""
    if not config.recording_l2_features:
        return {}
    wanted = {hook: getattr(config.l2_targets, hook) for hook in SUFFIXES}
    found = {hook: _named(names, targets, reading) for hook, targets in wanted.items() if targets}
    if wanted["linear_hook"] == ():
        inner = [_unwrapped(one, reading) for one in names.modules()]
        found["linear_hook"] = Chosen([one for one in inner if _has_matrix(one, reading)], named=False)
    return found


def warning(found: Mapping[str, Chosen]) -> str | None:
    """What the user should know of the choice; None if nothing."""
    if not found:
        return "recording_l2_features is true and l2_targets names no module: there will be no features."
    missed = [f"{hook}: {', '.join(map(told, one.unmatched))}" for hook, one in found.items() if one.unmatched]
    said = [f"{_MISSED}: {'; '.join(missed)}."] if missed else []
    several = noticed("l2_targets", [one for hook in found.values() for one in hook.ambiguous])
    return " ".join([*said, *([several] if several else [])]) or None


def _named(names: ModelNames, targets: Sequence[str], reading: Reading) -> Chosen:
    modules, unmatched, ambiguous = names.targeted(targets)
    return Chosen([_unwrapped(module, reading) for module in modules], unmatched=unmatched, ambiguous=ambiguous)


def _has_matrix(module: NamedModule, reading: Reading) -> bool:
    """Whether it has a weight that may be a matrix: one that is cut over ranks shows what it is when it is gathered."""
    called = type(module.module).__name__, module.name.rpartition(".")[2]
    embeds = reading.embeds(module.module) or any("embedding" in one.lower() for one in called)
    return not embeds and reading.matrix_of(module.module) is not None


def _unwrapped(module: NamedModule, reading: Reading) -> NamedModule:
    return NamedModule(module.chunk, module.name, reading.unwrapped(module.module), module.wanted)
