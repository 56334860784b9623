"""The shape of the code stays within limits; ``python tools/code_ratios.py`` prints where it stands."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools"))

from code_ratios import DOCUMENTED, DOCUMENTS, Module, Ratios, ratios_of, sentences_of  # noqa: E402


@pytest.fixture(scope="module")
def package() -> Ratios:
    return ratios_of(ROOT / "monitor", DOCUMENTS)


def test_modules_are_neither_fragments_nor_long(package: Ratios) -> None:
    assert package.median_lines >= 125
    assert package.fragments <= 0.08
    assert package.longest <= 400


def test_imports_take_little_of_the_code(package: Ratios) -> None:
    assert round(package.imports, 3) <= 0.08


def test_names_of_classes_say_what_they_are(package: Ratios) -> None:
    assert package.namesakes == []
    assert package.share_used_twice <= 0.03


def test_constructors_take_few_parameters(package: Ratios) -> None:
    assert package.long_constructors == []


def test_sentences_are_short_and_plain(package: Ratios) -> None:
    assert [*package.long_sentences, *package.dialect] == []


def test_lines_of_code_are_those_with_code() -> None:
    module = Module(
        "a.py", '"""Says."""\n\n# why\nimport os\n\n\nclass A(b.A):\n    """Is."""\n\n    x = (\n        1,\n    )\n'
    )
    assert module.code_lines == {4, 7, 10, 11, 12}
    assert module.import_lines == 1
    assert Ratios([module], {}).namesakes == ["a.py:A"]


def test_constructors_count_without_self_and_documented_ones_are_left_out(package: Ratios) -> None:
    module = Module("a.py", "class A:\n    def __init__(self, a, b, c, d, e, f, *, g): ...\n")
    assert Ratios([module], {}).long_constructors == [("a.py:A", 7)]
    assert {one.where for module in package.modules for one in module.constructors()} >= DOCUMENTED


def test_a_sentence_ends_at_a_stop_a_paragraph_and_an_item_of_a_list() -> None:
    assert sentences_of("One. Two\nlines\n\nThree:\n- four\n- five") == ["One.", "Two lines", "Three:", "- four", "- five"]
