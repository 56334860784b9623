"""Selects modules, parameters and tensors by the ``targets`` of a configuration, and shortens and compares their names."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from monitor.config import Target, TensorSpec
from monitor.series import encodable

# --- Names of modules and parameters: in rows, and as users write them.

WRAPPERS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Path components that ``torch.compile``, FSDP and activation checkpointing add to a name."""

_CONTAINER: Final = re.compile(r"(?<![^.])(?:layers?|embeddings?)\.(?=.)", re.DOTALL)
"""A path component of a container: the short name is what follows it."""

_DISTINCTIVE: Final = re.compile(r"(?<![^.])(?:final|output|norm)")
"""Where any other short name begins: always at a whole path component."""

_LEADING_MODULES: Final = re.compile(r"(?:module(?:\.|\Z))+")


def clean_name(name: str) -> str:
    """The name without the components that wrappers add, at any position, and ``encodable``; '' for the root.

    ``module``, which DDP and others add, stays.
    """
    return encodable(".".join(component for component in name.split(".") if component not in WRAPPERS))


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
    """Map each name to the short name that rows use under ``squash_name``.

    Different names keep different results. A name stays full if another name has the same short name, or has it as its
    full name.
    """
    short = {name: short_name(name) for name in names}
    shared = Counter(short.values())
    bare = Counter(without_module(name) for name in short)
    return {name: part if _is_its_own(name, part, shared, short, bare) else name for name, part in short.items()}


def short_name(name: str) -> str:
    """The short form of one name, without regard to other names.

    It is what follows the first ``layer(s).`` or ``embedding(s).``: ``63.mlp`` for ``module.encoder.layers.63.mlp``. In a
    name without these it is the part from the first ``final…``, ``output…`` or ``norm…`` on.
    """
    match = _CONTAINER.search(name)
    return distinctive_part(name) if match is None else name[match.end() :]


def distinctive_part(name: str) -> str:
    """The short form with ``layers.`` in front, which users write as well: ``layers.63.mlp``."""
    match = _CONTAINER.search(name) or _DISTINCTIVE.search(name)
    return name[match.start() :] if match else name


def _is_its_own(name: str, part: str, shared: Mapping[str, int], full: Collection[str], bare: Mapping[str, int]) -> bool:
    """Whether the short form finds only this name, with or without a leading ``module.``."""
    if part == name:
        return True
    alone = shared[part] == 1 and part not in full and bare[part] == (without_module(name) == part)
    return alone and without_module(part) == part


class NearestNames:
    """Finds the names that are nearest to a misspelt one, among very many."""

    MOST: Final = 3
    COMPARED: Final = 256
    """Number of names that are compared: one comparison takes up to 0.1 ms. Names that share most components with the given
    one come first. If no name shares a component, names near the root come first."""

    SIMILAR: Final = 0.5
    """Low enough to find a full name by its second half."""

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
        """For each path component, the indices of the names that contain it."""
        holders: dict[str, list[int]] = {}
        for index, name in enumerate(self._names):
            for component in dict.fromkeys(name.split(".")):
                holders.setdefault(component, []).append(index)
        return holders


FORWARD_SIDES: Final = ("input", "output")
BACKWARD_SIDES: Final = ("input_grad", "output_grad")
SIDES: Final = (*FORWARD_SIDES, *BACKWARD_SIDES)

MAX_EXPLAINED: Final = 16
"""Unmatched targets for which nearest names are searched. More of them are usually one mistake, repeated."""

_CONSEQUENCE: Final = 'Nothing is recorded for them. Set "print_struct": true to write all names to module_struct.json.'

_WITH_CHUNK: Final = re.compile(r"([0-9]{1,9}):(.*)", re.DOTALL)

ANY: Final = "*"
"""In a target: any characters of one component of a name; twice, of any number of components."""

NUMBER: Final = "#"
"""In a target with ``ANY``: a number, as the entries of a list of modules have for names."""


@dataclass(frozen=True, slots=True)
class TensorChoice:
    """Which tensors of one side of a module are selected.

    Attributes:
        wanted: Whether any tensor is selected.
        length: How many tensors the side is expected to have; None if any number is accepted.
        index: The selected element; None for all.
    """

    wanted: bool
    length: int | None = None
    index: int | None = None

    def takes(self, position: int) -> bool:
        """Whether the element at ``position`` of the side is selected."""
        return self.wanted and (self.index is None or self.index == position)


ALL_TENSORS: Final = TensorChoice(wanted=True)
NO_TENSORS: Final = TensorChoice(wanted=False)


@dataclass(frozen=True, slots=True)
class ModuleSelection:
    """The selected tensors of one module, on at least one side."""

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
    """A target without a match, and up to three nearest names, written as targets."""

    target: str
    nearest: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """A target whose short name matches several names, and selects all of them."""

    target: str
    names: tuple[str, ...]


class TargetSelection:
    """What the ``targets`` of a configuration select in the chunks of a model.

    A module's target selects its own tensors and every parameter below it. A target matches full or short names, with or
    without their leading ``module.``, also if rows use another form. An exact match excludes all others. A short name
    selects every name that it matches. A target with ``*`` is a pattern of full names, and selects all that it matches. If
    several targets name one module, a name has precedence over a pattern, then a target with a chunk number over one
    without, and among equals the later one.

    Attributes:
        unmatched: The targets without a match, in the order of the configuration.
        ambiguous: The targets whose short name matches several names of a chunk.
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
            config_targets: By name, with or without the number of a chunk (``1:layers.0``). Empty: everything is selected.
            all_xy: Also select the tensors of the modules that no target names.
            forward_only: Select no gradients of activations. With ``backward_only``: no activations at all.
            backward_only: Select only the gradients of activations.
        """
        sides = _sides(forward_only=forward_only, backward_only=backward_only)
        self._targeted = bool(config_targets)
        self._others = None if self._targeted and not all_xy else _wanted(Target(), sides)
        self._chunks = [_Chunk(names) for names in chunks] if self._targeted else []
        self.ambiguous: list[Ambiguous] = []
        missed = self._match(config_targets, sides)
        self.unmatched = self._explained([target for target in config_targets if target in missed])

    def module(self, chunk: int, name: str) -> ModuleSelection | None:
        """The selected tensors of a module, by its full cleaned name; None if there are none."""
        return self._chunks[chunk].modules.get(name, self._others) if self._targeted else self._others

    def parameter(self, chunk: int, name: str) -> bool:
        """Whether a parameter, by its full cleaned name, is watched."""
        return not self._targeted or self._chunks[chunk].covers(name)

    def warning(self) -> str | None:
        """One message that lists every target without a match; None if all have one."""
        if not self.unmatched:
            return None
        named = ", ".join(unmatched_text(one) for one in self.unmatched)
        return f"Targets that match nothing in this model (in a pipeline: in this rank's stages): {named}. {_CONSEQUENCE}"

    def notice(self) -> str | None:
        """One message that lists every target that matches several names; None if there is none."""
        return ambiguity_notice("Targets", self.ambiguous)

    def _match(self, targets: Mapping[str, Target], sides: Collection[str]) -> set[str]:
        """Apply every target, those with precedence last. Returns the targets without a match."""
        missed = set()
        for target in sorted(targets, key=lambda one: (ANY not in one, _parsed(one)[0] is not None)):
            number, name = _parsed(target)
            wanted = _wanted(targets[target], sides)
            matched = [chunk.select(name, wanted) for chunk in self._addressed(number)]
            if not any(matched):
                missed.add(target)
            self.ambiguous += [Ambiguous(target, tuple(found)) for found in matched if ANY not in name and _differ(found)]
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
    """The names of one chunk, and which of them are selected.

    Attributes:
        names: Its modules and parameters.
        modules: The selected tensors of each module that a target names.
    """

    def __init__(self, chunk: ChunkNames) -> None:
        self.names = dict.fromkeys((*chunk.modules, *chunk.parameters))
        self.modules: dict[str, ModuleSelection | None] = {}
        self._module_names = frozenset(chunk.modules)
        self._selected: set[str] = set()
        self._spellings = _NameIndex(tuple(self.names))
        # Some frameworks name parameters by paths that no module has.
        self._ancestors = _NameIndex(tuple(_ancestors(chunk.parameters) - self._module_names))

    def select(self, name: str, wanted: ModuleSelection | None) -> Sequence[str]:
        """Apply a target, whose name may be full or short. Returns the full names that it selects in this chunk."""
        found = (*self._spellings.find(name), *self._ancestors.find(name))
        self._selected.update(found)
        self.modules.update((one, wanted) for one in found if one in self._module_names)
        return found

    def covers(self, parameter: str) -> bool:
        """Whether a parameter or a module that contains it is selected."""
        return parameter in self._selected or any(above in self._selected for above in parents(parameter))


class _NameIndex:
    """Finds names by their full or short form."""

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
        """The full names that match: the exact name; else names that differ only in their leading ``module.``; else all
        names with this short form.
        """
        if spelling in self._names:
            return (spelling,)
        bare = without_module(spelling)
        if ANY in bare:
            matches = pattern(bare).fullmatch
            return [name for some, names in self._bare.items() if some and matches(some) for name in names]
        return self._bare.get(bare) or self._short.get(bare) or self._distinctive.get(bare, [])


def pattern(text: str) -> re.Pattern[str]:
    """A text with ``ANY`` and ``NUMBER`` as a regular expression for whole names."""
    components = {"": "", ANY: "[^.]*", 2 * ANY: ".*", f"{2 * ANY}.": r"(?:.*\.)?", NUMBER: "[0-9]+"}
    parts = re.split(r"(\*\*\.|\*\*|\*|#)", text)
    return re.compile("".join(components.get(part) or re.escape(part) for part in parts), re.DOTALL)


def _ancestors(names: Iterable[str]) -> set[str]:
    """The names above any of ``names``. A walk up ends at a name that was visited before."""
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
    """The tensors that a target selects on these sides of a module; None if there are none."""
    asked = {side: _choice(spec) for side, spec in target.named.items()} or dict.fromkeys(SIDES, ALL_TENSORS)
    choices = {side: asked.get(side, NO_TENSORS) if side in sides else NO_TENSORS for side in SIDES}
    return ModuleSelection(**choices) if any(choice.wanted for choice in choices.values()) else None


def _choice(spec: TensorSpec) -> TensorChoice:
    """A tuple without an index selects its first element. A side that is not the expected single tensor is taken whole."""
    if spec.every:
        return ALL_TENSORS
    if spec.length is None:
        return TensorChoice(wanted=True, length=1)
    return TensorChoice(wanted=True, length=spec.length, index=spec.index or 0)


def _differ(names: Sequence[str]) -> bool:
    """Whether the names are of several objects, and not of one that wrappers list twice."""
    return len({without_module(name) for name in names}) > 1


def ambiguity_notice(what: str, ambiguous: Sequence[Ambiguous]) -> str | None:
    """A message about short names that match several names; None if there are none."""
    if not ambiguous:
        return None
    named = "; ".join(f"{one.target!r} ({len(one.names)}: {_first(one.names)})" for one in ambiguous[:MAX_EXPLAINED])
    rest = f"; and {len(ambiguous) - MAX_EXPLAINED} others" if len(ambiguous) > MAX_EXPLAINED else ""
    return f"{what} whose short name matches several names: {named}{rest}. All matches are recorded."


def _first(names: Sequence[str]) -> str:
    return ", ".join([*map(repr, names[:3]), *(["…"] if len(names) > 3 else [])])


def unmatched_text(one: Unmatched) -> str:
    """A target without a match, and its nearest names, for a message."""
    nearest = ", ".join(repr(name) for name in one.nearest)
    return f"{one.target!r} (nearest: {nearest})" if nearest else repr(one.target)
