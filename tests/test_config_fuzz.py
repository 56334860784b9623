"""Whatever stands in the file: a valid configuration or one clear error, and nothing else."""

from __future__ import annotations

import copy
import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from evidence import examples
from hypothesis import example, given, settings, strategies as st

from monitor.config import ConfigError, MonitorConfig, load_config
from monitor.config.jsonc import JsonError, parse

THOROUGH = settings(max_examples=examples(120, 1000))
FIELDS = sorted(MonitorConfig.model_fields)
NAMES = [
    *FIELDS,
    *("input", "output", "input_grad", "output_grad", "enable", "cc_codeline", "cc_pre_hook", "cc_log_only", "rules", "dump"),
    *("rule_name", "args", "threshold", "set", "steps", "attention_hook", "linear_hook", "formats", "", "h.0", "0:h.1.mlp"),
]
VALID = {
    "targets": {"language_model.encoder.layers.0": {"input": "tuple[2]:0", "output": "tensor", "output_grad": "tuple[1]:0"}},
    "start_step": 0,
    "collect_times": 100_000_000,
    "module_ranks": [0, 1],
    "xy_distribution": True,
    "cc_distribution": {"enable": False, "cc_codeline": []},
    "alert": {"rules": [], "dump": False},
    "format": "csv",
    "ops": ["min", "max"],
    "eps": 1e-8,
    "append_output": [],
    "l2_targets": {"linear_hook": []},
}
VALID_AND_RICH = VALID | {
    "format": ["csv", "hdf5"],
    "alert": {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}}], "dump": True},
    "on_alert": {"set": {"xy_distribution": True, "targets": {"h.0": {"input": "tensor"}}}, "steps": 5},
}
VALID_TEXT = "// all of it\n" + json.dumps(VALID, indent=2).replace('"eps"', '/* below: zero */ "eps"')


@contextmanager
def file_of(content: bytes) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory, mock.patch.dict(os.environ):
        os.environ.pop("DYNAMIC_MONITOR", None)
        path = Path(directory) / "config.json"
        path.write_bytes(content)
        yield path


def check(content: bytes) -> None:
    """The property: a configuration that reads back as itself, or a message fit for a terminal that names the file."""
    with file_of(content) as path:
        config, message = outcome(path)
        if config is None:
            assert message.startswith(f"{path}: ")
            assert len(message.encode()) < 20_000
            return
        path.write_text(json.dumps(config.model_dump(mode="json")), encoding="utf-8")
        assert load_config(path) == config


def outcome(path: Path) -> tuple[MonitorConfig | None, str]:
    try:
        return load_config(path), ""
    except ConfigError as error:
        return None, str(error)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**60), max_value=10**60)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        [0, 1, -1, 2**63, "1", "true", "tensor", "tuple[2]:0", "tuple[2]:5", "csv", "hdf5", "AnomalyNan", "Dec03_21-34-40"]
    )
    | st.sampled_from(["each", "s,b,h,d", "(", "a{99999999999}", "\ud800", "\x00"])
)


@st.composite
def near_misses(draw: st.DrawFn) -> str:
    """A name of a field with one character dropped, doubled, exchanged or changed in case."""
    name = draw(st.sampled_from([one for one in NAMES if one]))
    at = draw(st.integers(0, len(name) - 1))
    change = draw(st.sampled_from(["", name[at] * 2, "x", "-", name[at].upper()]))
    return name[:at] + change + name[at + 1 :]


names = st.sampled_from(NAMES) | near_misses() | st.text(max_size=10)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=5), max_leaves=6
)


@st.composite
def mutated_texts(draw: st.DrawFn) -> bytes:
    """A valid file with a few places cut out, doubled or overwritten."""
    text = VALID_TEXT.encode()
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        patch = draw(
            st.binary(max_size=4)
            | st.sampled_from([b"", b",", b"[", b"}", b"//", b"/*", b"*/", b'"', b"NaN", b"1e999", b"\\ud8"])
        )
        text = text[:start] + patch + text[draw(st.sampled_from([start, end])) :]
    return text


@st.composite
def mutated_values(draw: st.DrawFn) -> dict[str, Any]:
    """A valid configuration with one field renamed, and the value of one exchanged at any depth."""
    config = copy.deepcopy(draw(st.sampled_from([VALID, VALID_AND_RICH])))
    for _ in range(draw(st.integers(1, 3))):
        holder: Any = config
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(holder[key], dict | list) and draw(st.booleans()):
                holder = holder[key]
                continue
            if isinstance(holder, dict) and draw(st.booleans()):
                holder[draw(names)] = holder.pop(key)
            else:
                holder[key] = draw(values)
            break
    return config


@THOROUGH
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
@example(b"")
@example(b"\xef\xbb\xbf")
@example(b"\xff\xfe{\x00}\x00")
@example(b"[" * 200_000)
@example(b'{"a":' * 200_000)
@example(b"/*" * 100_000)
@example(b"//\n" * 100_000)
@example(b'"' * 100_001)
@example(b'{"eps": ' + b"9" * 100_000 + b"}")
@example(b'{"cc_distribution": {"cc_codeline": ["' + b"(" * 50_000 + b'"]}}')
def test_random_bytes(content: bytes) -> None:
    check(content)


@THOROUGH
@given(mutated_texts())
def test_valid_files_with_damage(content: bytes) -> None:
    check(content)


@THOROUGH
@given(mutated_values())
def test_valid_configurations_with_wrong_names_and_values(config: dict[str, Any]) -> None:
    check(json.dumps(config).encode())


@THOROUGH
@given(st.dictionaries(names, values, max_size=6))
def test_random_objects_with_names_close_to_ours(config: dict[str, Any]) -> None:
    check(json.dumps(config).encode())


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(min_value=-(10**60), max_value=10**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=examples(80, 500))
@given(json_values, st.sampled_from([None, 0, 2]), st.booleans())
def test_the_parser_agrees_with_the_standard_one_on_every_json_text(value: Any, indent: int | None, ascii_only: bool) -> None:
    assert value == parse(json.dumps(value, indent=indent, ensure_ascii=ascii_only)).value


comments = st.sampled_from([" ", "\n", "\t\r\n", '// to the end: ,]}"\n', '/* [{" \n*/', "/**/", "/*/ */"])


@settings(max_examples=examples(80, 500))
@given(json_values, st.lists(comments, min_size=1, max_size=5))
def test_comments_may_stand_between_any_two_tokens(value: Any, between: list[str]) -> None:
    filler = "".join(between)
    pieces = json.JSONEncoder(separators=(f"{filler},{filler}", f"{filler}:{filler}"), indent=None).encode(value)
    assert value == parse(f"{filler}{pieces}{filler}").value


almost_json = st.text(alphabet='{}[],:"/*\\ \n01.eE+-truefalsn', max_size=40)


def standard(text: str) -> list[Any]:
    """The value by the standard parser, or nothing; what is stricter here (names, numbers) is refused."""
    try:
        return [json.loads(text, object_pairs_hook=once_each, parse_float=finite)]
    except ValueError:
        return []


def once_each(members: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(members)) < len(members):
        raise ValueError
    return dict(members)


def finite(digits: str) -> float:
    if math.isinf(float(digits)):
        raise ValueError
    return float(digits)


def place_of_error(text: str) -> tuple[int, int] | None:
    try:
        parse(text)
    except JsonError as error:
        return error.line, error.column
    return None


@settings(max_examples=examples(150, 1000))
@given(almost_json)
def test_what_the_standard_parser_accepts_is_accepted(text: str) -> None:
    for value in standard(text):
        assert parse(text).value == value


@settings(max_examples=examples(150, 1000))
@given(almost_json)
def test_an_error_lies_inside_the_text_or_at_its_end(text: str) -> None:
    line, column = place_of_error(text) or (1, 1)
    lines = text.split("\n")
    assert 1 <= line <= len(lines)
    assert 1 <= column <= len(lines[line - 1]) + 1
