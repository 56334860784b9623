"""Which modules and parameters are watched, and which tensors of a module."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from monitor.config import Target, TensorSpec

# --- How modules and parameters are called, in rows and by people.

WRAPPERS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Path components that ``torch.compile``, FSDP and activation checkpointing add to a name."""

_CONTAINER: Final = re.compile(r"(?<![^.])(?:layers?|embeddings?)\.(?=.)", re.DOTALL)
"""A path component that lists things: the short name is what follows it."""

_DISTINCTIVE: Final = re.compile(r"(?<![^.])(?:final|output|norm)")
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
    return distinctive_part(name) if match is None else name[match.end() :]


def distinctive_part(name: str) -> str:
    """The same with the ``layers.`` in front, which people write, too: ``layers.63.mlp``."""
    match = _CONTAINER.search(name) or _DISTINCTIVE.search(name)
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


FORWARD_SIDES: Final = ("input", "output")
BACKWARD_SIDES: Final = ("input_grad", "output_grad")
SIDES: Final = (*FORWARD_SIDES, *BACKWARD_SIDES)

MAX_EXPLAINED: Final = 16
"""Targets without a match for which nearest names are sought. Who has more of them has one mistake, made many times."""

_CONSEQUENCE: Final = 'Nothing is recorded of these targets. "print_struct": true writes the names.'

_WITH_CHUNK: Final = re.compile(r"([0-9]{1,9}):(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class TensorChoice:
    """Which tensors of one side of a module are wanted.

    Attributes:
        wanted: Whether any is.
        length: How many tensors the side is expected to have, None where nothing is expected.
        index: The one element that is wanted, None for all.
    """

    wanted: bool
    length: int | None = None
    index: int | None = None

    def takes(self, position: int) -> bool:
        """Whether the element at ``position`` of the side is wanted."""
        return self.wanted and (self.index is None or self.index == position)


ALL_TENSORS: Final = TensorChoice(wanted=True)
NO_TENSORS: Final = TensorChoice(wanted=False)


@dataclass(frozen=True, slots=True)
class ModuleSelection:
    """What is wanted of one module. At least one side is."""

    input: TensorChoice
    output: TensorChoice
    input_grad: TensorChoice
    output_grad: TensorChoice


@dataclass(frozen=True, slots=True)
class ChunkNames:
    """The full names in one model chunk (virtual pipeline stage), as ``clean_name`` gives them."""

    modules: Sequence[str]
    parameters: Sequence[str]


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A target that names nothing, and up to three names that may have been meant, spelled as targets."""

    target: str
    nearest: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """A target whose short spelling fits several names, all of which it takes."""

    target: str
    names: tuple[str, ...]


class TargetSelection:
    """What the ``targets`` of a configuration select in the chunks of a model.

    A module's target selects its own tensors and every parameter below it. Names are found with or without their leading
    ``module.``, and in full or in their short spelling, whatever rows call them. A name that is met exactly is never taken for
    another one; a short spelling that fits several names takes all of them.
    Where several targets name one module, one with a chunk's number has precedence, and among equals the later one.

    Attributes:
        unmatched: The targets that name nothing, in the order of the configuration.
        ambiguous: The targets whose short spelling fits several names of a chunk.
    """

    def __init__(
        self,
        config_targets: Mapping[str, Target],
        chunks: Sequence[ChunkNames],
        *,
        all_xy: bool,
        forward_only: bool,
        backward_only: bool,
    ) -> None:
        """Match every target.

        Args:
            config_targets: By name, with or without the number of a chunk (``1:layers.0``). Without any, all is selected.
            all_xy: Select the tensors of the modules that no target names, too.
            forward_only: No gradients of activations. With ``backward_only`` no activations at all.
            backward_only: Gradients of activations alone.
        """
        sides = _sides(forward_only=forward_only, backward_only=backward_only)
        self._targeted = bool(config_targets)
        self._others = None if self._targeted and not all_xy else _wanted(Target(), sides)
        self._chunks = [_Chunk(names) for names in chunks] if self._targeted else []
        self.ambiguous: list[Ambiguous] = []
        missed = self._match(config_targets, sides)
        self.unmatched = self._explained([target for target in config_targets if target in missed])

    def module(self, chunk: int, name: str) -> ModuleSelection | None:
        """What is wanted of a module, by its full cleaned name; None for nothing."""
        return self._chunks[chunk].modules.get(name, self._others) if self._targeted else self._others

    def parameter(self, chunk: int, name: str) -> bool:
        """Whether a parameter, by its full cleaned name, is watched."""
        return not self._targeted or self._chunks[chunk].covers(name)

    def warning(self) -> str | None:
        """One message that names every target without a match, None if there is none."""
        if not self.unmatched:
            return None
        named = ", ".join(unmatched_text(one) for one in self.unmatched)
        return f"Targets that match nothing in this model (of a pipeline, in this rank's part of it): {named}. {_CONSEQUENCE}"

    def notice(self) -> str | None:
        """One message that names every target that fits several names, None if there is none."""
        return ambiguity_notice("Targets", self.ambiguous)

    def _match(self, targets: Mapping[str, Target], sides: Collection[str]) -> set[str]:
        """Apply every target, the general ones first; those that matched nothing are returned."""
        missed = set()
        for target in sorted(targets, key=lambda one: _parsed(one)[0] is not None):
            number, name = _parsed(target)
            wanted = _wanted(targets[target], sides)
            matched = [chunk.select(name, wanted) for chunk in self._addressed(number)]
            if not any(matched):
                missed.add(target)
            self.ambiguous += [Ambiguous(target, tuple(found)) for found in matched if _differ(found)]
        return missed

    def _addressed(self, number: int | None) -> Sequence[_Chunk]:
        return self._chunks if number is None else self._chunks[number : number + 1]

    def _explained(self, targets: Sequence[str]) -> tuple[Unmatched, ...]:
        names = NearestNames([name for chunk in self._chunks for name in chunk.names] if targets else [])
        explained = [Unmatched(target, self._nearest(target, names)) for target in targets[:MAX_EXPLAINED]]
        return (*explained, *(Unmatched(target, ()) for target in targets[MAX_EXPLAINED:]))

    def _nearest(self, target: str, names: NearestNames) -> tuple[str, ...]:
        number, name = _parsed(target)
        nearest = names.to(name)
        return nearest if number is None else tuple(self._numbered(near, number) for near in nearest)

    def _numbered(self, name: str, preferred: int) -> str:
        """A name with the number of a chunk that has it."""
        holders = [number for number, chunk in enumerate(self._chunks) if name in chunk.names]
        return f"{preferred if preferred in holders else holders[0]}:{name}"


class _Chunk:
    """The names of one chunk, and what has been selected among them.

    Attributes:
        names: Its modules and parameters.
        modules: What is wanted of each module that a target names.
    """

    def __init__(self, chunk: ChunkNames) -> None:
        self.names = dict.fromkeys((*chunk.modules, *chunk.parameters))
        self.modules: dict[str, ModuleSelection | None] = {}
        self._module_names = frozenset(chunk.modules)
        self._selected: set[str] = set()
        self._spellings = _NameIndex(tuple(self.names))
        # Some frameworks name parameters by paths that are no modules.
        self._ancestors = _NameIndex(tuple(_ancestors(chunk.parameters) - self._module_names))

    def select(self, name: str, wanted: ModuleSelection | None) -> Sequence[str]:
        """Take in a target, whose name may be spelled in any way. The full names of what it selects here."""
        found = (*self._spellings.find(name), *self._ancestors.find(name))
        self._selected.update(found)
        self.modules.update((one, wanted) for one in found if one in self._module_names)
        return found

    def covers(self, parameter: str) -> bool:
        """Whether a parameter or anything above it is selected."""
        return parameter in self._selected or any(above in self._selected for above in parents(parameter))


class _NameIndex:
    """Finds names by any of their spellings."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._short: dict[str, list[str]] = {}
        self._distinctive: dict[str, list[str]] = {}
        self._bare: dict[str, list[str]] = {}
        for name in names:
            self._short.setdefault(short_name(name), []).append(name)
            self._distinctive.setdefault(distinctive_part(name), []).append(name)
            self._bare.setdefault(without_module(name), []).append(name)

    def find(self, spelling: str) -> Sequence[str]:
        """The full names: the one that is met exactly, else those that differ in nothing but their leading ``module.``, else
        all that have this short spelling.
        """
        if spelling in self._names:
            return (spelling,)
        bare = without_module(spelling)
        return self._bare.get(bare) or self._short.get(bare) or self._distinctive.get(bare, [])


def _ancestors(names: Iterable[str]) -> set[str]:
    """Everything above any of the names. The walk up ends where another one has been."""
    places: set[str] = set()
    for name in names:
        for above in parents(name):
            if above in places:
                break
            places.add(above)
    return places


def _parsed(target: str) -> tuple[int | None, str]:
    """The number of the chunk, None for all of them, and the cleaned name."""
    match = _WITH_CHUNK.fullmatch(target)
    return (int(match[1]), clean_name(match[2])) if match else (None, clean_name(target))


def _sides(*, forward_only: bool, backward_only: bool) -> tuple[str, ...]:
    return (*(() if backward_only else FORWARD_SIDES), *(() if forward_only else BACKWARD_SIDES))


def _wanted(target: Target, sides: Collection[str]) -> ModuleSelection | None:
    """What a target wants of a module, as far as these sides are recorded at all; None if that is nothing."""
    asked = {side: _choice(spec) for side, spec in target.named.items()} or dict.fromkeys(SIDES, ALL_TENSORS)
    choices = {side: asked.get(side, NO_TENSORS) if side in sides else NO_TENSORS for side in SIDES}
    return ModuleSelection(**choices) if any(choice.wanted for choice in choices.values()) else None


def _choice(spec: TensorSpec) -> TensorChoice:
    """A tuple without an index means its first element. Of what is not the single tensor announced, everything is taken."""
    if spec.length is None:
        return TensorChoice(wanted=True, length=1)
    return TensorChoice(wanted=True, length=spec.length, index=spec.index or 0)


def _differ(names: Sequence[str]) -> bool:
    """Whether they are names of several things, and not of one that wrappers have listed twice."""
    return len({without_module(name) for name in names}) > 1


def ambiguity_notice(what: str, ambiguous: Sequence[Ambiguous]) -> str | None:
    """What to say of short spellings that fit several names."""
    if not ambiguous:
        return None
    named = "; ".join(f"{one.target!r} ({len(one.names)}: {_first(one.names)})" for one in ambiguous[:MAX_EXPLAINED])
    rest = f"; and {len(ambiguous) - MAX_EXPLAINED} others" if len(ambiguous) > MAX_EXPLAINED else ""
    return f"{what} whose short name fits several names, all of which are taken: {named}{rest}."


def _first(names: Sequence[str]) -> str:
    return ", ".join([*map(repr, names[:3]), *(["…"] if len(names) > 3 else [])])


def unmatched_text(one: Unmatched) -> str:
    """A target that names nothing, as a message has it."""
    nearest = ", ".join(repr(name) for name in one.nearest)
    return f"{one.target!r} (nearest: {nearest})" if nearest else repr(one.target)
