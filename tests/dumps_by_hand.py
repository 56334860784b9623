"""A dump against what was computed by hand."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from tapes import Tape, Value

STATISTICS: Final = ("Max", "Min", "Mean", "Norm")
FLOAT32: Final[dict[str, Any]] = {"rtol": 2e-4, "atol": 2e-5}
"""What a framework's float32 may be off from float64."""

SUMS: Final = 1e-6
"""What a sum in float32 may be off."""


class Spelling(NamedTuple):
    """What a framework writes of a tensor.

    Attributes:
        more: Keys behind the statistics.
    """

    type: str
    floats: str
    integers: str
    more: tuple[str, ...] = ()


class Spelled(str):
    """The type of a setting that a dump writes without its value."""

    __slots__ = ()


def debugger_of(kind: Callable[..., Any], base: Path, level: str, task: str) -> Any:
    """A debugger of a framework's ``kind`` that dumps below ``base``.

    Args:
        task: Of the configuration; or ``md5``, statistics with checksums.
    """
    summary = {"summary_mode": "md5"} if task == "md5" else {}
    (base / "config.json").write_text(json.dumps({"statistics": summary}))
    named = "tensor" if task == "tensor" else "statistics"
    return kind(base / "config.json", dump_path=base / "out", level=level, task=named)


def assert_tasks_agree(base: Path, dumped: Callable[[Path, str], ByHand]) -> None:
    """Statistics and checksums are those of the elements, however they are asked for.

    Args:
        dumped: Dumps the same once more, below a directory, for a task.
    """
    found = {}
    for task in ("tensor", "statistics", "md5"):
        (base / task).mkdir()
        found[task] = dumped(base / task, task)
    assert found["tensor"].of_elements() == []
    assert found["statistics"].data == found["tensor"].without_files(checksums=False)
    assert found["md5"].data == found["tensor"].without_files(checksums=True)


def points(tape: Tape, names: Sequence[str]) -> dict[str, Any]:
    """What is saved where each of these modules has returned."""
    results = {call.name.split(".{}")[0].partition(".")[2].rpartition(".")[0]: call.results[0] for call in tape.modules}
    saved = {f"{name}.0.debug": results[name] for name in names}
    return saved | {f"{name}_grad.0.debug": results[name].gradient for name in names}


class ByHand:
    """The directory of a rank's step, read, as ``debugger_of`` has it written below ``base``."""

    def __init__(self, base: Path, spelling: Spelling, level: str, task: str) -> None:
        name, checksums = "debug.json" if level == "debug" else "dump.json", task == "md5"
        (self._directory,) = (base / "out" / "step0").iterdir()
        self._whole = json.loads((self._directory / name).read_text())
        self._spelling, self._checksums = spelling, checksums
        self.data: dict[str, Any] = self._whole["data"]

    def differences(self, expected: dict[str, Any]) -> list[str]:
        """Where the dump says something else: other names, other structure, other numbers. Forwards in another order, too."""
        found = [f"order: {a} for {b}" for a, b in zip(_forwards(self.data), _forwards(expected), strict=False) if a != b]
        found += [f"{name}: only in one" for name in self.data.keys() ^ expected.keys()]
        for name in self.data.keys() & expected.keys():
            found += self._of(name, self.data[name], expected[name])
        return found

    def of_elements(self) -> list[str]:
        """Statistics that are not those of the elements that were stored, in float64."""
        found = []
        for leaf in leaves(self.data):
            wide = self._elements(leaf).astype(np.float64)
            sums = {"Mean": wide.mean(), "Norm": np.sqrt((wide * wide).sum())}
            found += [
                f"{leaf} is not {kind(wide)}" for key, kind in (("Max", np.max), ("Min", np.min)) if leaf[key] != kind(wide)
            ]
            close = [np.isclose(leaf[key], number, rtol=SUMS, atol=SUMS * np.abs(wide).mean()) for key, number in sums.items()]
            found += [] if all(close) else [f"{leaf} is not {sums}"]
        return found

    def without_files(self, *, checksums: bool) -> dict[str, Any]:
        """What the task ``statistics`` should say where this is a dump of tensors."""
        data = json.loads(json.dumps(self.data))
        for leaf in leaves(data):
            if checksums:
                leaf["md5"] = f"{zlib.crc32(np.ascontiguousarray(self._elements(leaf)).tobytes()):08x}"
            del leaf["data_name"]
        return data

    def _of(self, place: str, told: Any, expected: Any) -> list[str]:
        if isinstance(expected, (Value, np.ndarray)):
            return self._of_tensor(place, told, expected.array if isinstance(expected, Value) else expected)
        if isinstance(expected, (list, tuple)) and isinstance(told, list) and len(told) == len(expected):
            return [one for i, pair in enumerate(zip(told, expected, strict=True)) for one in self._of(f"{place}.{i}", *pair)]
        if isinstance(expected, dict) and isinstance(told, dict) and list(told) == list(expected):
            return [one for key in expected for one in self._of(f"{place}.{key}", told[key], expected[key])]
        if isinstance(expected, Spelled):
            return [] if told == {"type": expected} else [f"{place}: {told} for {expected}"]
        plain = expected is not None and not isinstance(expected, (list, tuple, dict))
        plainly = {"type": type(expected).__name__, "value": expected} if plain else expected
        return [] if told == plainly else [f"{place}: {told} for {expected}"]

    def _of_tensor(self, place: str, told: Any, expected: np.ndarray) -> list[str]:
        keys = ["type", "dtype", "shape", *STATISTICS, *self._spelling.more]
        keys += ["data_name"] if self._whole["task"] == "tensor" else ["md5"] if self._checksums else []
        if not isinstance(told, dict) or list(told) != keys:
            return [f"{place}: {told} for a tensor of {expected.shape}"]
        dtype = self._spelling.floats if expected.dtype.kind == "f" else self._spelling.integers
        if (told["type"], told["dtype"], told["shape"]) != (self._spelling.type, dtype, list(expected.shape)):
            return [f"{place}: {told} for {dtype} of {expected.shape}"]
        wide = expected.astype(np.float64)
        numbers = [wide.max(), wide.min(), wide.mean(), np.sqrt((wide * wide).sum())]
        close = np.allclose([told[key] for key in STATISTICS], numbers, **FLOAT32)
        if "data_name" in told:
            close = close and np.allclose(self._elements(told), wide, **FLOAT32)
        return [] if close else [f"{place}: {told} for {dict(zip(STATISTICS, numbers, strict=True))}"]

    def _elements(self, leaf: dict[str, Any]) -> np.ndarray:
        return np.load(self._directory / "dump_tensor_data" / leaf["data_name"])


def leaves(tree: Any) -> list[dict[str, Any]]:
    """The tensors in what was read."""
    if isinstance(tree, dict) and "shape" in tree:
        return [tree]
    below = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [leaf for one in below for leaf in leaves(one)]


def _forwards(data: dict[str, Any]) -> list[str]:
    return [name for name in data if "forward" in name.split(".")]
