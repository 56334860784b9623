"""Which modules have which features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from torch import nn

from monitor.capture.names import ModelNames, NamedModule
from monitor.config import MonitorConfig
from monitor.pytorch.features.sources import matrix_of
from monitor.selection import Unmatched, told

SUFFIXES: Final = {
    "attention_hook": "attention",
    "linear_hook": "linear",
    "moe_router_weight_hook": "moe_router",
    "moe_router_logit_hook": "moe_router",
}
"""What a series of each hook is called, behind its module."""

_WRAPPED: Final = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class Chosen(NamedTuple):
    """The modules of a hook.

    Attributes:
        named: Whether the configuration names them, and did not leave the choice to the monitor.
        unmatched: What it names and the model does not have.
    """

    modules: Sequence[NamedModule]
    named: bool = True
    unmatched: Sequence[Unmatched] = ()


def chosen(names: ModelNames, config: MonitorConfig) -> Mapping[str, Chosen]:
    """By hook; empty where no features are recorded."""
    if not config.recording_l2_features:
        return {}
    wanted = {hook: getattr(config.l2_targets, hook) for hook in SUFFIXES}
    found = {hook: _named(names, targets) for hook, targets in wanted.items() if targets}
    if wanted["linear_hook"] == ():
        found["linear_hook"] = Chosen([one for one in map(_unwrapped, names.modules()) if _has_matrix(one)], named=False)
    return found


def warning(found: Mapping[str, Chosen]) -> str | None:
    """What the user should know of the choice; None if nothing."""
    if not found:
        return "recording_l2_features is true and l2_targets names no module: there will be no features."
    missed = [f"{hook}: {', '.join(map(told, one.unmatched))}" for hook, one in found.items() if one.unmatched]
    if not missed:
        return None
    return f"l2_targets that name no module of this model (of a pipeline, of this rank's part of it): {'; '.join(missed)}."


def _named(names: ModelNames, targets: Sequence[str]) -> Chosen:
    modules, unmatched = names.targeted(targets)
    return Chosen([_unwrapped(module) for module in modules], unmatched=unmatched)


def _has_matrix(module: NamedModule) -> bool:
    """Whether it has a weight that may be a matrix: one that is cut over ranks shows what it is when it is gathered."""
    called = type(module.module).__name__, module.name.rpartition(".")[2]
    embeds = isinstance(module.module, nn.Embedding | nn.EmbeddingBag) or any("embedding" in one.lower() for one in called)
    return not embeds and matrix_of(module.module) is not None


def _unwrapped(module: NamedModule) -> NamedModule:
    """What FSDP and activation checkpointing have wrapped: that is where weights are whole."""
    inner = module.module
    while (within := next((getattr(inner, name) for name in _WRAPPED if name in inner._modules), None)) is not None:
        inner = within
    return NamedModule(module.chunk, module.name, inner, module.wanted)
