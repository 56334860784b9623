"""A value is changed in the text of a configuration, and nothing else is."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from evidence import examples
from hypothesis import given, settings, strategies as st

from monitor.config.jsonc import JsonError, parse
from monitor.dynamic.config_file import EditError, edited, path_of


@pytest.mark.parametrize(
    ("text", "key", "value", "expected"),
    [
        ("{}", "dynamic_on", True, '{"dynamic_on": true}'),
        ("{ /* all */ }", "dynamic_on", True, '{"dynamic_on": true /* all */ }'),
        ('{"a": 1}', "b", 2, '{"a": 1, "b": 2}'),
        ('{"a": 1,}', "b", 2, '{"a": 1, "b": 2,}'),
        ('{"a" :  1 , "b":2}', "a", [1, 2], '{"a" :  [1, 2] , "b":2}'),
        ('{\n  "a": 1 // one\n}\n', "b", 2, '{\n  "a": 1, // one\n  "b": 2\n}\n'),
        ('{\n  "a": 1, // one\n  // the end\n}\n', "b", 2, '{\n  "a": 1, // one\n  "b": 2,\n  // the end\n}\n'),
        ('{\r\n\t"a": 1 // one\r\n}', "b", 2, '{\r\n\t"a": 1, // one\r\n\t"b": 2\r\n}'),
        ('{\n    "a": {\n        "b": 1\n    }\n}', "a.c", 2, '{\n    "a": {\n        "b": 1,\n        "c": 2\n    }\n}'),
        ('{"a": {"b": 1}}', "a.b", "ü", '{"a": {"b": "ü"}}'),
        ("{}", "a.b.c", None, '{"a": {"b": {"c": null}}}'),
        ('{"t": {"h.0": {}}}', 't["h.0"].input', "tensor", '{"t": {"h.0": {"input": "tensor"}}}'),
        ('{"a": [1, /* two */ 2]}', "a[1]", 3, '{"a": [1, /* two */ 3]}'),
        ('{"a": "x // no comment", "b": 1}', "b", 2, '{"a": "x // no comment", "b": 2}'),
    ],
)
def test_one_value_is_changed(text: str, key: str, value: Any, expected: str) -> None:
    assert edited(text, path_of(key), value) == expected


@pytest.mark.parametrize("key", ["", ".a", "a.", "a..b", "[0]", "a[01]", "a b", "a[", 'a["b]', "1a"])
def test_what_is_no_key_is_said_to_be_none(key: str) -> None:
    with pytest.raises(EditError, match="names no field"):
        path_of(key)


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ('{"a": 1}', "a.b", "a.b cannot be set: a is 1, which is not an object with fields"),
        ('{"a": [1]}', "a.b", "a.b cannot be set: a is [1], which is not an object with fields"),
        ("[]", "a", "a cannot be set: the file is [], which is not an object with fields"),
        ('{"a": {}}', "a[3]", "a[3] cannot be set: there is no element 3; set the whole list"),
        ("{}", "a[0]", "a[0] cannot be set: there is no element 0; set the whole list"),
    ],
)
def test_what_has_no_place_is_said(text: str, key: str, said: str) -> None:
    with pytest.raises(EditError) as error:
        edited(text, path_of(key), 2)
    assert str(error.value) == said


def test_what_is_not_json_is_not_touched() -> None:
    with pytest.raises(JsonError):
        edited('{"a": 1', ("a",), 2)


names = st.text('ab.\\"é', min_size=0, max_size=3)
scalars = st.none() | st.booleans() | st.integers(-9, 9) | st.text('x/*,"é\\ ', max_size=4)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3), max_leaves=8
)
objects = st.dictionaries(names, values, max_size=4)
gaps = st.lists(
    st.sampled_from([" ", "\n", "\r\n", "\t", "\n  ", "// x, y\n", "//\r\n", "/* , } */", "/*\n*/", "  "]), max_size=3
).map("".join)


@st.composite
def documents(draw: st.DrawFn) -> tuple[Any, str]:
    """A value, and one of the many ways to write it down."""
    value = draw(objects)
    return value, draw(gaps) + written(draw, value) + draw(gaps)


def written(draw: st.DrawFn, value: Any) -> str:
    def gap() -> str:
        return draw(gaps)

    if isinstance(value, dict):
        items = [f"{gap()}{json.dumps(k)}{gap()}:{gap()}{written(draw, v)}{gap()}" for k, v in value.items()]
        return "{" + listed(draw, items) + "}"
    if isinstance(value, list):
        return "[" + listed(draw, [f"{gap()}{written(draw, one)}{gap()}" for one in value]) + "]"
    return json.dumps(value, ensure_ascii=draw(st.booleans()))


def listed(draw: st.DrawFn, items: list[str]) -> str:
    trailing = "," + draw(gaps) if items and draw(st.booleans()) else ""
    return ",".join(items) + trailing if items else draw(gaps)


@settings(max_examples=examples(80, 300))
@given(documents(), st.data())
def test_the_loader_reads_the_change_and_every_other_character_is_the_same(
    document: tuple[Any, str], data: st.DataObject
) -> None:
    value, text = document
    old = parse(text)
    assert old.value == value
    places = [path for path in old.spans if path]
    added = [
        (*path, name)
        for path in old.spans
        if isinstance(at(value, path), dict)
        for name in data.draw(st.sets(names, max_size=1))
    ]
    if not (places or added):
        return
    path = data.draw(st.sampled_from([*places, *added]))
    new = data.draw(values)
    result = edited(text, path, new)
    assert parse(result).value == put(value, path, new)
    if path in old.spans:
        start, end = old.spans[path]
        assert (result[:start], result[len(result) - len(text) + end :]) == (text[:start], text[end:])
    else:
        assert is_subsequence(text, result)


def test_two_changes_of_one_place_leave_what_the_second_alone_leaves() -> None:
    text = '{\n  "a": 1, // one\n}\n'
    assert edited(edited(text, ("b",), 1), ("b",), 2) == edited(text, ("b",), 2)


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    value = copy.deepcopy(value)
    at(value, path[:-1])[path[-1]] = new
    return value


def is_subsequence(part: str, whole: str) -> bool:
    rest = iter(whole)
    return all(character in rest for character in part)
