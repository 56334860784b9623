"""How modules and parameters are called, in rows and by people."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Final

WRAPPERS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Path components that ``torch.compile``, FSDP and activation checkpointing add to a name."""

_TELLING: Final = re.compile(r"(?<![^.])(?:(?:layers?|embeddings?)\.|final|output|norm)")
"""Where the telling part of a name begins: always with a whole path component."""

_LEADING_MODULES: Final = re.compile(r"(?:module(?:\.|\Z))+")


def clean_name(name: str) -> str:
    """The name without the components that wrappers add, wherever they stand; '' for the root.

    ``module``, which DDP and others add, stays.
    """
    return ".".join(component for component in name.split(".") if component not in WRAPPERS)


def without_module(name: str) -> str:
    """The name without its leading ``module`` components; '' for a wrapped root."""
    match = _LEADING_MODULES.match(name)
    return name[match.end() :] if match else name


def parents(name: str) -> Iterator[str]:
    """The names above a name, nearest first, the root last: ``a.b``, ``a`` and '' for ``a.b.c``."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def squashed(names: Sequence[str]) -> dict[str, str]:
    """Each name, and the shorter one that stands for it.

    A short name begins at the first component that tells what a thing is: ``module.encoder.layers.63.mlp`` becomes
    ``layers.63.mlp``. Names that would share one stay as they are, so the result tells apart whatever ``names`` does.
    """
    # A short name keeps its own beginning, so it can only be equal to a whole name that is counted here under itself.
    short = {name: _telling_part(name) for name in names}
    shared = Counter(short.values())
    return {name: part if shared[part] == 1 else name for name, part in short.items()}


def _telling_part(name: str) -> str:
    match = _TELLING.search(name)
    return name[match.start() :] if match else name


class NearestNames:
    """Finds, among very many names, those that a misspelt one may have meant."""

    MOST: Final = 3
    COMPARED: Final = 256
    """Comparing two names takes up to a tenth of a millisecond: of more names than this, those that share most components
    with the one sought, or where none shares any, the ones nearest to the root."""

    SIMILAR: Final = 0.5
    """A full name where only its second half was given is still found."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(dict.fromkeys(names))

    def to(self, name: str) -> tuple[str, ...]:
        """Up to three names, the nearest first."""
        return tuple(difflib.get_close_matches(name, self._worth_comparing(name), n=self.MOST, cutoff=self.SIMILAR))

    def _worth_comparing(self, name: str) -> list[str]:
        if len(self._names) <= self.COMPARED:
            return self._names
        shared: Counter[int] = Counter()
        for component in dict.fromkeys(name.split(".")):
            shared.update(self._holders.get(component, ()))
        if not shared:
            return sorted(self._names, key=lambda one: one.count("."))[: self.COMPARED]
        return [self._names[index] for index, _ in shared.most_common(self.COMPARED)]

    @cached_property
    def _holders(self) -> dict[str, list[int]]:
        """For each path component, the indices of the names that hold it."""
        holders: dict[str, list[int]] = {}
        for index, name in enumerate(self._names):
            for component in dict.fromkeys(name.split(".")):
                holders.setdefault(component, []).append(index)
        return holders
