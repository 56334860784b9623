"""The names of a model's modules and parameters, chunk by chunk, and the selected ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from monitor.config import MonitorConfig, Target
from monitor.recording.parameter_series import NamedParameter
from monitor.selection import Ambiguous, ChunkNames, ModuleSelection, TargetSelection, Unmatched, clean_name, squashed

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NamedModule:
    """A module of a chunk, under the name it has in rows."""

    chunk: int
    name: str
    module: Any
    wanted: ModuleSelection | None


class NamedParts(NamedTuple):
    """The modules of a chunk (parents before their children) and its parameters, with the framework's names."""

    modules: Iterable[tuple[str, Any]]
    parameters: Iterable[tuple[str, Any]]


class Targeted(NamedTuple):
    """The modules that targets select.

    Attributes:
        modules: In the order of the model.
        unmatched: The targets without a match.
        ambiguous: The targets that match several names.
    """

    modules: Sequence[NamedModule]
    unmatched: Sequence[Unmatched]
    ambiguous: Sequence[Ambiguous]


class ModelNames:
    """Every module and parameter of a model's chunks.

    A wrapper and the wrapped module have the same name without the wrapper's component. The wrapper is recorded: the inner
    module may be compiled, flattened or recomputed.
    """

    def __init__(self, chunks: Sequence[NamedParts], config: MonitorConfig) -> None:
        self._modules = [_first_of_each_name(chunk.modules) for chunk in chunks]
        self._parameters = [_first_of_each_name(chunk.parameters) for chunk in chunks]
        names = [ChunkNames(tuple(m), tuple(p)) for m, p in zip(self._modules, self._parameters, strict=True)]
        self.selection = TargetSelection(
            config.targets,
            names,
            all_xy=config.all_xy,
            forward_only=config.forward_only,
            backward_only=config.backward_only,
        )
        every = dict.fromkeys(name for chunk in names for name in (*chunk.modules, *chunk.parameters))
        self._row_names = squashed(every) if config.squash_name else {}

    def modules(self) -> Iterator[NamedModule]:
        """Every module, children after their parents."""
        for chunk, modules in enumerate(self._modules):
            for name, module in modules.items():
                yield NamedModule(chunk, self._row_names.get(name, name), module, self.selection.module(chunk, name))

    def targeted(self, targets: Sequence[str]) -> Targeted:
        """The modules that ``targets`` select, by full or short names."""
        names = [ChunkNames(tuple(modules), ()) for modules in self._modules]
        every = dict.fromkeys(targets, Target())
        selection = TargetSelection(every, names, all_xy=False, forward_only=False, backward_only=False)
        full = [(chunk, name) for chunk, modules in enumerate(self._modules) for name in modules]
        found = [module for place, module in zip(full, self.modules(), strict=True) if selection.module(*place) is not None]
        return Targeted(found, selection.unmatched, selection.ambiguous)

    def parameters(self) -> Iterator[NamedParameter]:
        """The selected parameters, in the order of the framework."""
        for chunk, parameters in enumerate(self._parameters):
            for name, parameter in parameters.items():
                if self.selection.parameter(chunk, name):
                    yield NamedParameter(chunk, self._row_names.get(name, name), parameter)


def _first_of_each_name(named: Iterable[tuple[str, T]]) -> dict[str, T]:
    found: dict[str, T] = {}
    for name, part in named:
        found.setdefault(clean_name(name), part)
    return found
