"""How modules and parameters are called, in rows and by people."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final

WRAPPERS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Path components that ``torch.compile``, FSDP and activation checkpointing add to a name."""

_CONTAINER: Final = re.compile(r"(?<![^.])(?:layers?|embeddings?)\.(?=.)", re.DOTALL)
"""A path component that lists things: the short name is what follows it."""

_TELLING: Final = re.compile(r"(?<![^.])(?:final|output|norm)")
"""Where the short name of anything else begins: always with a whole path component."""

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


def squashed(names: Collection[str]) -> dict[str, str]:
    """Each name, and the short one that rows have in its place under ``squash_name``.

    Names that would share a short one stay as they are, and so does a name whose short one is another's full name: the result
    tells apart whatever ``names`` does.
    """
    short = {name: short_name(name) for name in names}
    shared = Counter(short.values())
    bare = Counter(without_module(name) for name in short)
    return {name: part if _is_its_own(name, part, shared, short, bare) else name for name, part in short.items()}


def short_name(name: str) -> str:
    """What stands for a name as far as it alone is concerned.

    That is what follows its first ``layer(s).`` or ``embedding(s).``: ``63.mlp`` for ``module.encoder.layers.63.mlp``. In a
    name without these it is the part from the first ``final…``, ``output…`` or ``norm…`` on.
    """
    match = _CONTAINER.search(name)
    return telling_part(name) if match is None else name[match.end() :]


def telling_part(name: str) -> str:
    """The same with the ``layers.`` in front, which people write, too: ``layers.63.mlp``."""
    match = _CONTAINER.search(name) or _TELLING.search(name)
    return name[match.start() :] if match else name


def _is_its_own(name: str, part: str, shared: Mapping[str, int], full: Collection[str], bare: Mapping[str, int]) -> bool:
    """Whether no other name is found by the short one of this, with or without a leading ``module.``."""
    if part == name:
        return True
    alone = shared[part] == 1 and part not in full and bare[part] == (without_module(name) == part)
    return alone and without_module(part) == part


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
