"""A damaged or hostile dump ends a comparison with a message, and does not change the dump."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import shutil
import time
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import pytest
import torch
from evidence import examples
from torch import Tensor, nn
from typer.testing import CliRunner

from monitor.compare.cli import app
from monitor.dump.files import FILE
from monitor.pytorch import PrecisionDebugger
from monitor.terminal import plain

EACH: Final = examples(20, 100)
"""Inputs of each kind of damage."""

MOST_MEMORY: Final = 64 << 20
MOST_SECONDS: Final = 10.0

Files = dict[str, bytes]
"""The contents of a dump, by the path of each file in it."""

Damage = Callable[[Random, Path], object]
"""Changes one rank's step, given its directory."""


# --- Two small dumps, with a type that numpy lacks. Their weights differ, so that every tensor is read.


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x).bfloat16()).float()


def dumped(directory: Path, seed: int, config: dict[str, Any]) -> Files:
    torch.manual_seed(seed)
    network = Halves()
    file = directory.with_suffix(".json")
    file.write_text(json.dumps(config))
    debugger = PrecisionDebugger(file, dump_path=directory)
    debugger.start(network)
    network(torch.ones(2, 3)).sum().backward()
    debugger.step()
    debugger.close()
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Files, Files]]:
    """Pairs of dumps: with elements, and with checksums instead."""
    base = tmp_path_factory.mktemp("originals")
    configs = [
        {"task": "tensor", "level": "mix"},
        {"task": "statistics", "level": "mix", "statistics": {"summary_mode": "md5"}},
    ]
    return [(dumped(base / f"a{i}", 0, config), dumped(base / f"b{i}", 1, config)) for i, config in enumerate(configs)]


# --- Damage to the bytes of a file.


def chosen(random: Random, place: Path, pattern: str = "**/*.*") -> Path:
    """A file of a rank's step. Half of them are the file of entries, if it matches."""
    found = sorted(path for path in place.glob(pattern) if path.is_file())
    return random.choice([*found, *[path for path in found if path.name == "dump.json"] * len(found)])


def flip(random: Random, place: Path) -> None:
    file = chosen(random, place)
    content = bytearray(file.read_bytes())
    for _ in range(random.randint(1, 4)):
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    file.write_bytes(content)


def flip_header(random: Random, place: Path) -> None:
    file = a_tensor(random, place)
    content = bytearray(file.read_bytes())
    for _ in range(random.randint(1, 3)):
        content[random.randrange(min(80, len(content)))] = random.choice(b"()[]{}'\",:-0<fiOVSU#\\\n\0\xff")
    file.write_bytes(content)


def cut(random: Random, place: Path) -> None:
    file = chosen(random, place)
    content = file.read_bytes()
    start = random.choice([0, random.randrange(len(content))])
    end = random.choice([len(content), random.randint(start, len(content))])
    file.write_bytes(content[:start] + content[end:])


def insert(random: Random, place: Path) -> None:
    file = chosen(random, place)
    content = file.read_bytes()
    start = random.randint(0, len(content))
    patches = [b"[" * 5_000, b'{"a":' * 2_000, b"NaN", b"1e999", b'"\\ud800"', b"\0" * 9, b"9" * 5_000]
    patch = random.choice([random.randbytes(5), *patches])
    file.write_bytes(content[:start] + patch + content[start:])


def encode(random: Random, place: Path) -> None:
    file = chosen(random, place, "*.json")
    text = file.read_text().replace("Functional", "Fünctional")
    file.write_bytes(text.encode(random.choice(["latin-1", "utf-16", "utf-16-le", "utf-8-sig", "utf-32", "utf-7", "cp037"])))


# --- Damage to the values of a JSON file.

NAMES: Final = [
    *("", "type", "shape", "Max", "a\nb", "\x1b[2J\x1b]0;x\x07", "[/red]", "[bold", ":smile:", "\ud800", "\0", "x" * 300, "٣"),
]


def nested(depth: int, random: Random) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if random.random() < 0.5 else {"a": value}
    return value


def a_value(random: Random) -> Any:
    plain_ones = [None, True, 0, -1, 2**63, 10**400, 1.5, float("nan"), float("inf"), [], {}, [1, "a"], {"type": "x"}]
    tensor = {"type": "torch.Tensor", "dtype": 5, "shape": {"type": []}}
    tensors = [{**tensor, name: [name]} for name in ("Max", "data_name", "md5")]
    deep = nested(random.choice([20, 150, 400, 900]), random)
    return random.choice([*plain_ones, *plain_ones, *tensors, *NAMES, deep, "../../dump.json", "/dev/zero", "."])


def holders(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (dict, list)):
        yield tree
        for one in tree.values() if isinstance(tree, dict) else tree:
            yield from holders(one)


def change_values(change: Callable[[Random, Any, Any], object]) -> Damage:
    """Damage of a few members of objects and lists. ``change`` gets the object or list, and a key in it."""

    def damage(random: Random, place: Path) -> None:
        file = chosen(random, place, "*.json")
        tree = json.loads(file.read_text())
        for _ in range(random.randint(1, 3)):
            filled = [one for one in holders(tree) if one]
            leaves = [one for one in filled if isinstance(one, dict) and "shape" in one]
            if holder := random.choice([random.choice(filled or [None]), random.choice(leaves or filled or [None])]):
                change(random, holder, random.choice(list(holder) if isinstance(holder, dict) else range(len(holder))))
        file.write_text(json.dumps(tree))

    return damage


def replace(random: Random, holder: Any, key: Any) -> None:
    holder[key] = a_value(random)


def remove(_: Random, holder: Any, key: Any) -> None:
    del holder[key]


def rename(random: Random, holder: Any, key: Any) -> None:
    if isinstance(holder, dict):
        holder[random.choice(NAMES)] = holder.pop(key)


def double(random: Random, place: Path) -> None:
    """A key twice, with a value of another type."""
    file = chosen(random, place, "*.json")
    keys = list(re.finditer(r'"[^"\\]*": ', file.read_text()))
    if keys:
        key, text = random.choice(keys), file.read_text()
        file.write_text(f"{text[: key.start()]}{key[0]}{json.dumps(a_value(random))}, {text[key.start() :]}")


def whole_value(random: Random, place: Path) -> None:
    data = random.choice([a_value(random), {"data": a_value(random)}, {"data": {"type": "x", "one": a_value(random)}}])
    (place / "dump.json").write_text(json.dumps(data))


# --- Damage to a file of elements.


class Hostile:
    """Creates a directory where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


def a_tensor(random: Random, place: Path) -> Path:
    found = sorted(place.glob("dump_tensor_data/*.npy"))
    if not found:
        (place / "dump_tensor_data").mkdir(exist_ok=True)
        (place / "dump_tensor_data" / "none.npy").write_bytes(b"\0")
    return random.choice(found or [place / "dump_tensor_data" / "none.npy"])


def other_elements(random: Random, place: Path) -> None:
    lacking = [
        (name, kind) for name in ("bfloat16", "float8_e5m2", "complex32", "float3") for kind in ("<u2", "u1", "<u4", "<f4")
    ]
    kinds: list[Any] = [
        *("?", "i1", "<u8", "<f2", ">f4", "<f8", "<f16", "<c8", "<M8[ns]", "<m8[s]", "<U3", "S4", "V6", "<U0"),
        *([one] for one in lacking),
        [("bfloat16", "<u2"), ("more", "<f8")],
        [("bfloat16", "<u2", (2,))],
        [("bfloat16", [("inner", "<u2")])],
    ]
    shape = random.choice([(), (0,), (1,), (3,), (2, 3), (3, 3), (3, 2), (0, 3), (1,) * 32])
    array = np.zeros(shape, np.dtype(random.choice(kinds)))
    np.save(a_tensor(random, place), np.asfortranarray(array) if random.random() < 0.2 else array)


def claim(random: Random, place: Path) -> None:
    """A header that says what the file does not hold."""
    kinds = ["'<f4'", "'<U999999999'", "'|V0'", "'|O'", "[('bfloat16', '<u2')]"]
    no_kinds = ["None", "[]", "'<x9'", "(" * 300, "{", "'<f4', (" + "9," * 40]
    sizes = [*["(268435456,)"] * 6, "(10**12,)", "(1000000000000,)", f"({2**62}, 2)", f"({10**40},)"]
    counts = [*sizes, "(-1,)", "(-1, -1)", "(2.5,)", "3", "(True, 6)"]
    text = f"{{'descr': {random.choice(kinds * 4 + no_kinds)}, 'fortran_order': {random.choice(['False', 'True', '1'])}, "
    text += f"'shape': {random.choice(counts)}{random.choice(['}', '}', '}', '', ', ', ')'])}"
    header = text.encode() + random.choice([b"", b"\n", b" " * 20_000])
    version, width = random.choice([*[(b"\1\0", 2)] * 6, (b"\2\0", 4), (b"\3\0", 4), (b"\x09\0", 2)])
    length = random.choice([len(header), len(header), len(header), 256**width - 1]).to_bytes(width, "little")
    a_tensor(random, place).write_bytes(b"\x93NUMPY" + version + length + header + bytes(24))


def unpickle(random: Random, place: Path) -> None:
    content, hostile = io.BytesIO(), Hostile(place.parents[3] / "unpickled")
    kind = random.choice([pickle.dump, objects, archive])
    kind(hostile, content)
    a_tensor(random, place).write_bytes(content.getvalue())


def objects(one: object, content: io.BytesIO) -> None:
    np.save(content, np.array([one, one], dtype=object), allow_pickle=True)


def archive(one: object, content: io.BytesIO) -> None:
    np.savez(content, np.array([one], dtype=object))


# --- Damage to files and directories as such.


def other_kind(random: Random, place: Path) -> None:
    """Something that is not a regular file, or not a readable one."""
    file = chosen(random, place)
    kind = random.choice([file.mkdir, file.touch, lambda: os.mkfifo(file), lambda: file.touch(0), lambda: None])
    file.unlink()
    kind()


def link(random: Random, place: Path) -> None:
    file = random.choice([chosen(random, place), place / "dump_tensor_data", place])
    shutil.rmtree(file) if file.is_dir() else file.unlink(missing_ok=True)
    file.symlink_to(random.choice([file, place.parent / "none", "/dev/zero", "/dev/null", "..", "/", "dump.json"]))


def rename_directory(random: Random, place: Path) -> None:
    steps = ["step" + "9" * 240, "step00", "step-1", "step", "step1.5", "step٣", "stepx\n\x1b[2J"]
    ranks = ["٣", "rank٣", "a\nb", "\x1b[2J\x1b]0;x\x07", "[red]", "[bold", ":smile:", "x" * 255, "rank\udcff\udcfe", "9" * 250]
    place = place.rename(place.with_name(random.choice(ranks)))
    if random.random() < 0.3:
        place.parent.rename(place.parent.with_name(random.choice(steps)))


def leave_records(random: Random, place: Path) -> None:
    records = place / FILE
    whole = b'{"entry": 1}'
    kinds = [
        records.mkdir,
        lambda: os.mkfifo(records),
        lambda: records.symlink_to(random.choice(["dump.json", "none", FILE, "/dev/zero"])),
        lambda: records.write_bytes(random.choice([b"", b"\0" * 99, f"{zlib.crc32(whole):08x} ".encode() + whole + b"\n"])),
    ]
    random.choice(kinds)()


def rename_entry(random: Random, place: Path) -> None:
    """Names in the file of entries that a terminal would take for something else."""
    tree = json.loads((place / "dump.json").read_text())
    names = random.choices(NAMES, k=len(tree["data"]))
    tree["data"] = dict(zip(names, tree["data"].values(), strict=True))
    (place / "dump.json").write_text(json.dumps(tree))


DAMAGE: Final[dict[str, Damage]] = {
    "flip": flip, "flip_header": flip_header, "cut": cut, "insert": insert, "encode": encode,
    "replace": change_values(replace), "replace_more": change_values(replace), "remove": change_values(remove),
    "rename": change_values(rename), "double": double, "whole_value": whole_value, "rename_entry": rename_entry,
    "other_elements": other_elements, "more_elements": other_elements, "claim": claim, "unpickle": unpickle,
    "other_kind": other_kind, "link": link, "rename_directory": rename_directory, "leave_records": leave_records,
}  # fmt: skip


TRACED: Final = ("flip_header", "claim")
"""Damage that may claim much memory. Tracing takes four times as long."""


# --- The property.


def written(directory: Path, files: Files) -> Path:
    """A dump on disk. Returns the directory of its rank."""
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    (place,) = directory.glob("step*/*")
    return place


def state(directory: Path) -> dict[str, tuple[int, ...]]:
    """What a write to a directory would change."""
    found = {}
    for path in [directory, *directory.rglob("*")]:
        about = path.lstat()
        found[str(path)] = (about.st_ino, about.st_mode, about.st_size, about.st_mtime_ns, about.st_ctime_ns)
    return found


def assert_message(sides: Path, case: str, *options: str) -> None:
    """The property of a pair of dumps in ``a`` and ``b``."""
    before, start = state(sides), time.monotonic()
    if tracemalloc.is_tracing():
        tracemalloc.reset_peak()
    outcome = CliRunner().invoke(app, [str(sides / "a"), str(sides / "b"), *options])
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), (case, outcome.exception)
    assert outcome.exit_code in (0, 1, 2), case
    assert "Traceback" not in outcome.output, case
    assert "\x1b" not in outcome.output, case
    assert not sides.with_name("unpickled").exists(), case
    if outcome.exit_code == 2:
        assert outcome.output.startswith("Nothing was compared: "), (case, outcome.output)
        assert plain(str(sides)) in outcome.output, (case, outcome.output)
    assert time.monotonic() - start < MOST_SECONDS, case
    assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY, case
    assert state(sides) == before, case


@pytest.fixture
def _traced(kind: str) -> Iterator[None]:
    if kind in TRACED:
        tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_ends_with_a_message(kind: str, tmp_path: Path, originals: list[tuple[Files, Files]]) -> None:
    for seed in range(EACH):
        sides = tmp_path / str(seed) / "sides"
        pair = originals[seed % 4 == 3]
        places = [written(sides / name, files) for name, files in zip("ab", pair, strict=True)]
        for place in [places[1:], places[:1], places][seed % 3]:
            DAMAGE[kind](Random(f"{kind} {seed}"), place)
        output = ["-o", str(sides.with_name("found.csv"))] if seed % 2 else []
        assert_message(sides, f"{kind}, seed {seed}", *output)
        shutil.rmtree(sides.parent)


def test_shards_of_two_shapes_are_a_difference(tmp_path: Path, originals: list[tuple[Files, Files]]) -> None:
    a, b = (written(tmp_path / name, originals[0][0]) for name in "ab")
    tensor = "Functional.linear.0.forward.output.0.npy"
    np.save(b / "dump_tensor_data" / tensor, np.zeros((1, 3), np.float32))
    outcome = CliRunner().invoke(app, [str(a), str(b)])
    assert outcome.exit_code == 1
    assert f"first: step 0, {a.name}: {tensor.removesuffix('.npy')}: shape: [2, 3] against [1, 3]" in outcome.output


@pytest.mark.usefixtures("_traced")
@pytest.mark.parametrize("kind", ["claim"])
def test_a_header_that_claims_a_gigabyte_takes_no_memory(
    kind: str, tmp_path: Path, originals: list[tuple[Files, Files]]
) -> None:
    a, b = (written(tmp_path / name, originals[0][0]) for name in "ab")
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (268435456,)}\n"
    file = a_tensor(Random(kind), b)
    file.write_bytes(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + bytes(24))
    assert_message(tmp_path, f"{kind} in {a} and {b}")
