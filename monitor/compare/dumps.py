"""Two precision dumps: their entries aligned by step, rank and name, their tensors one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from monitor.compare.values import Compared, ComparisonError, Difference, Finding, of_leaves, of_tensors
from monitor.dump.files import FILE as RECORDS, bits_of, is_being_written, load_tensor
from monitor.dump.values import SHOWN

FILES: Final = ("dump.json", "debug.json")
DATA: Final = "dump_tensor_data"
_STEP: Final = re.compile(r"step([0-9]+)")

DEEPEST: Final = 64
"""Levels of lists and objects in an entry, at most. A dump has a third of that, and reading many more would end Python."""

GREATEST: Final = 1 << 1023
"""A larger integer may be no float64."""

T = TypeVar("T")

Leaves = dict[tuple[str | int, ...], Any]
"""The leaves of an entry, by their places in it."""

Place = tuple[int, str]
"""A step's number, and the name of the rank's directory; ``graph/rank0`` in a part of a dump."""

PARTS: Final = ("", "pynative/", "graph/")
"""The directories with the steps of a dump. Only a dump with compiled cells has parts."""


def is_dump(directory: Path) -> bool:
    """Whether there is a dump in a directory, finished or not, or it is that of one step, or of one rank's step."""
    return bool(_places(directory)) or bool(_unfinished(directory))


def compare(left: Path, right: Path) -> Compared:
    """Compare two dump paths, two directories of a step, or two ranks' directories of a step.

    Directories of a step are compared whatever their numbers. Findings have the number of the left one.

    Raises:
        ComparisonError: There is no dump, or they have no step and rank in common.
    """
    sides = {side: _places(side) for side in (left, right)}
    for side, places in sides.items():
        if killed := [file for file in _unfinished(side) if not is_being_written(file)]:
            raise ComparisonError(f"{killed[0].parent} is of a killed process: run trainermon dump-recover {side} first.")
        if not places:
            raise ComparisonError(f"{side} has no dump.json in it: name a dump_path, or the directory of a rank's step.")
    if all(map(_is_of_one_step, sides)):
        step = next(iter(sides[left]))[0]
        sides[right] = {(step, rank): path for (_, rank), path in sides[right].items()}
    pairs = _aligned(sides[left], sides[right])
    if not pairs:
        raise ComparisonError(f"{left} and {right} have no step and rank in common.")
    tensors, arguments, findings = 0, 0, _places_missing(sides[left], sides[right], pairs)
    for (step, rank), one, other in pairs:
        found = _Pair(step, rank, one, other)
        findings += found.findings()
        tensors += found.tensors
        arguments += found.arguments
    findings.sort(key=lambda finding: (finding.step, finding.rank_order, finding.order))
    return Compared(tensors, findings, arguments)


class _Pair:
    """One rank's step on both sides."""

    def __init__(self, step: int, rank: str, left: Path, right: Path) -> None:
        self._step, self._rank = step, rank
        self._left, self._right = left, right
        self.tensors = self.arguments = 0

    def findings(self) -> list[Finding]:
        left, right = _entries(self._left), _entries(self._right)
        merged = enumerate(_merged(list(left), list(right)))
        return [one for order, name in merged for one in self._entry(order, name, left, right)]

    def _entry(self, order: int, name: str, left: Mapping[str, Leaves], right: Mapping[str, Leaves]) -> Iterator[Finding]:
        if name not in right:
            yield self._finding(order, name, "missing", "there", "")
            return
        if name not in left:
            yield self._finding(order, name, "added", "", "there")
            return
        own, others = left[name], right[name]
        for path, value in own.items():
            if path not in others:
                yield self._finding(order, _spelled(path), "missing", _shown(value), "")
            else:
                yield from self._values(order, _spelled(path), value, others[path])
        for path in others:
            if path not in own:
                yield self._finding(order, _spelled(path), "added", "", _shown(others[path]))

    def _values(self, order: int, path: str, left: Any, right: Any) -> Iterator[Finding]:
        if not (_is_tensor(left) and _is_tensor(right)):
            self.arguments += 1
            if json.dumps(left, sort_keys=True) != json.dumps(right, sort_keys=True):  # where NaN is NaN
                yield self._finding(order, path, "argument", _shown(left), _shown(right))
            return
        self.tensors += 1
        for what in ("shape", "dtype"):
            if left[what] != right[what]:
                yield self._finding(order, path, what, _shown(left[what]), _shown(right[what]))
        if left["shape"] != right["shape"]:
            return
        if finding := self._file_missing(order, path, left, right):
            yield finding
            return
        files = self._files(left, right)
        stored = [_read(bits_of, file) for file in files]
        own, other = [_shown(list(bits.shape)) for bits, _ in stored] or ["", ""]
        if own != other:  # of the shards that the two processes have stored
            yield self._finding(order, path, "shape", own, other)
            return
        difference = _of_elements(files, stored) if files else of_leaves(left, right, SHOWN)
        if not difference.same:
            yield self._finding(order, path, "values", _statistics(left), _statistics(right), difference)

    def _file_missing(self, order: int, path: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> Finding | None:
        """Elements that both sides name, and one has not."""
        if not (left.get("data_name") and right.get("data_name")):
            return None
        shown = [
            leaf["data_name"] if (side / DATA / leaf["data_name"]).is_file() else "" for side, leaf in self._both(left, right)
        ]
        if bool(shown[0]) == bool(shown[1]):
            return None
        return self._finding(order, path, "missing" if shown[0] else "added", shown[0], shown[1])

    def _files(self, left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Path]:
        """The two files of elements, or none unless both are there."""
        files = [side / DATA / leaf["data_name"] for side, leaf in self._both(left, right) if leaf.get("data_name")]
        return files if len(files) > 1 and all(file.is_file() for file in files) else []

    def _both(self, left: Mapping[str, Any], right: Mapping[str, Any]) -> list[tuple[Path, Mapping[str, Any]]]:
        return [(self._left, left), (self._right, right)]

    def _finding(
        self, order: int, name: str, what: str, left: str, right: str, difference: Difference | None = None
    ) -> Finding:
        return Finding(self._step, self._rank, order, name, what, left, right, difference)


def _places(directory: Path) -> dict[Place, Path]:
    """Every rank's step below a directory, or the directory itself as the only one."""
    if _holds_files(directory):
        return {(_number(directory.absolute().parent) or 0, directory.name): directory}
    step = _number(directory.absolute())
    if step is not None and directory.is_dir():
        return {(step, path.name): path for path in sorted(directory.iterdir()) if _holds_files(path)}
    found = {}
    for part in PARTS if directory.is_dir() else ():
        for path in sorted(directory.glob(f"{part}step*/*")):
            step = _number(path.parent)
            if step is not None and _holds_files(path):
                found[step, part + path.name] = path
    return found


def _holds_files(directory: Path) -> bool:
    return any((directory / name).is_file() for name in FILES)


def _number(directory: Path) -> int | None:
    """The number of the step that a directory is named after."""
    match = _STEP.fullmatch(directory.name)
    return int(match[1]) if match else None


def _is_of_one_step(directory: Path) -> bool:
    return _holds_files(directory) or _number(directory.absolute()) is not None


def _unfinished(directory: Path) -> list[Path]:
    """The records of ranks' steps that were not completed."""
    below = [f"{part}step*/*" for part in PARTS] + ["*"] * (_number(directory.absolute()) is not None)
    found = [file for one in below for file in sorted(directory.glob(f"{one}/{RECORDS}"))]
    return [file for file in (directory / RECORDS, *found) if file.is_file() and ".left" not in file.parent.parent.name]


def _aligned(left: Mapping[Place, Path], right: Mapping[Place, Path]) -> list[tuple[Place, Path, Path]]:
    """By step and rank. A lone process of a step, whose number is of no meaning, goes with the other side's lone one."""
    pairs = [(place, path, right[place]) for place, path in left.items() if place in right]
    if len(left) == len(right) == 1:
        ((place, one),), (other,) = left.items(), right.values()
        return [(place, one, other)] if place[0] == next(iter(right))[0] else pairs
    paired = {place for place, _, _ in pairs}
    for group in sorted({_group(place) for place in left} & {_group(place) for place in right}):
        own, others = ([place for place in side if _group(place) == group] for side in (left, right))
        lone = len(own) == len(others) == 1 and own[0] not in paired
        if lone and all(one[1].rpartition("/")[2].startswith("proc") for one in (*own, *others)):
            pairs.append((own[0], left[own[0]], right[others[0]]))
    return pairs


def _group(place: Place) -> tuple[int, str]:
    """The step, and the part of the dump."""
    return place[0], place[1].rpartition("/")[0]


def _places_missing(
    left: Mapping[Place, Path], right: Mapping[Place, Path], pairs: list[tuple[Place, Path, Path]]
) -> list[Finding]:
    there, here = {other for _, _, other in pairs}, {one for _, one, _ in pairs}
    missing = [Finding(*place, 0, "step", "missing", "there", "") for place, path in left.items() if path not in here]
    return missing + [Finding(*place, 0, "step", "added", "", "there") for place, path in right.items() if path not in there]


def _of_elements(files: list[Path], stored: list[tuple[NDArray[Any], str | None]]) -> Difference:
    (one, kind), (other, other_kind) = stored
    if kind == other_kind and one.dtype == other.dtype and np.array_equal(one, other) and one.tobytes() == other.tobytes():
        return of_tensors(one, other)
    found = of_tensors(*(_read(load_tensor, file) for file in files))
    # Numbers of two types may be equal where their bits are not: the type itself is a finding of its own.
    equal = found.absolute == 0 and (kind, one.dtype) != (other_kind, other.dtype)
    return Difference(same=equal, absolute=found.absolute, relative=found.relative, cosine=found.cosine)


def _entries(directory: Path) -> dict[str, Leaves]:
    for name in FILES:
        if (directory / name).is_file():
            return _read(_parsed, directory / name, "is no file of a dump")
    return {}


def _read(load: Callable[[Path], T], file: Path, fault: str = "cannot be read as a tensor of a dump") -> T:
    try:
        return load(file)
    except (ValueError, OSError, MemoryError, RecursionError) as error:
        raise ComparisonError(f"{file} {fault}: {error}. Dump it anew.") from error


def _parsed(file: Path) -> dict[str, Leaves]:
    """The entries of a file, in execution order.

    Raises:
        OSError: The file cannot be read.
        ValueError: Its content is not that of a dump.
        RecursionError: Its content is nested too deeply for the JSON parser.
    """
    whole = json.loads(file.read_bytes())
    data = whole.get("data") if isinstance(whole, dict) else None
    if not isinstance(data, dict):
        raise ValueError('it has no object "data"')
    entries = {name: dict(_leaves(entry, (name,))) for name, entry in data.items()}
    for leaves in entries.values():
        for path, leaf in leaves.items():
            if _is_tensor(leaf):
                _check_tensor(_spelled(path), leaf)
    return entries


def _check_tensor(name: str, leaf: Mapping[str, Any]) -> None:
    for statistic in SHOWN:
        value = leaf.get(statistic)
        if not (value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < GREATEST)):
            raise ValueError(f"{statistic} of {name} is not a number")
    file = leaf.get("data_name") or ""
    if not isinstance(file, str) or Path(file).name != file:
        raise ValueError(f"data_name of {name} is not the name of a file")


def _merged(left: list[str], right: list[str]) -> list[str]:
    """The names of both in execution order: one that the right side alone has stands behind what came before it there."""
    known = set(left)
    behind: dict[str | None, list[str]] = {None: []}
    last: str | None = None
    for name in right:
        if name in known:
            last = name
        else:
            behind.setdefault(last, []).append(name)
    return behind[None] + [one for name in left for one in (name, *behind.get(name, ()))]


def _leaves(tree: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Tensors, plain values and what is empty, by where they stand.

    Raises:
        ValueError: The tree is deeper than that of any dump.
    """
    if len(path) > DEEPEST:
        raise ValueError(f"{path[0]} is nested deeper than {DEEPEST} levels")
    if isinstance(tree, dict) and tree and not isinstance(tree.get("type"), str):
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(tree, list) and tree:
        for i, value in enumerate(tree):
            yield from _leaves(value, (*path, i))
    else:
        yield path, tree


def _spelled(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "shape" in value and "dtype" in value


def _shown(value: Any) -> str:
    if _is_tensor(value):
        return f"{value['dtype']} {value['shape']}"
    return json.dumps(value.get("value", value["type"]) if isinstance(value, dict) and "type" in value else value)


def _statistics(leaf: Mapping[str, Any]) -> str:
    said = [f"{name} {leaf[name]:.9g}" for name in SHOWN if leaf.get(name) is not None]
    return ", ".join([*said, *([f"md5 {leaf['md5']}"] if "md5" in leaf else [])])
