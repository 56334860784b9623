"""Mutants in a small project of their own, and where those of this project go."""

from __future__ import annotations

import ast
import os
from collections import Counter
from pathlib import Path

import pytest
from mutants import MUTANTS, PROJECT, Mutant, MutantError, Package, mutants_of, place_of, planted, report, run

SMALL = Package("small", ("renamed", "small"), ("tests/renamed", "tests/small"))
MODULE = """
class Sums:
    def of(self, numbers):
        total = sum(numbers)
        return total

    def of_none(self):
        return 0


def mean(numbers):
    total = sum(numbers)
    return total / len(numbers)
"""
TESTS = """
from monitor.small.sums import mean

def test_the_mean_of_equal_numbers_is_that_number():
    assert mean([2, 2]) == 2

def test_the_mean_is_between_the_numbers():
    assert mean([1, 3]) == 2
"""
SLOW = """
import os
import time
from pathlib import Path

def test_slow():
    Path("pid").write_text(str(os.getpid()))
    time.sleep(600)
"""
SIGN = Mutant(SMALL, "mean", "return total / len(numbers)", "return -total / len(numbers)", "a wrong sign")
UNSEEN = Mutant(SMALL, "Sums.of_none", "return 0", "return 1", "off by one")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package and its tests, which look at one of its functions alone."""
    project = tmp_path / "project"
    for path, content in (("monitor/__init__.py", ""), ("monitor/small/sums.py", MODULE), ("tests/small/test_sums.py", TESTS)):
        (project / path).parent.mkdir(parents=True, exist_ok=True)
        (project / path).write_text(content)
    return project


@pytest.mark.parametrize("mutant", mutants_of(MUTANTS), ids=lambda one: one.name)
def test_each_mutant_replaces_one_line_of_the_project(mutant):
    place = place_of(mutant, PROJECT)
    lines = place.path.read_text().split("\n")
    assert lines[place.line].strip() == mutant.before
    lines[place.line] = lines[place.line].replace(mutant.before, mutant.after)
    ast.parse("\n".join(lines))


def test_there_are_ten_different_mutants_for_each_package():
    mutants = mutants_of(MUTANTS)
    assert set(Counter(one.package.name for one in mutants).values()) == {10}
    assert len({(one.name, one.before, one.after) for one in mutants}) == len(mutants)
    assert all(one.before != one.after for one in mutants)


def test_a_mutant_is_killed_by_the_first_test_that_fails_and_survives_where_no_test_looks(project, capsys):
    assert report([SIGN, UNSEEN], project) == 1
    _, _, without, killed, survived, _, count = capsys.readouterr().out.splitlines()
    assert without.startswith("| small without a mutant |")
    wanted = "| `small.mean` | a wrong sign | tests/small/test_sums.py::test_the_mean_of_equal_numbers_is_that_number |"
    assert killed.startswith(wanted)
    assert survived.startswith("| `small.Sums.of_none` | off by one | **survived** |")
    assert count == "1 of 2 mutants were killed."


def test_tests_that_fail_without_a_mutant_are_not_used(project):
    (project / "tests/small/test_sums.py").write_text("def test_wrong():\n    assert False\n")
    with pytest.raises(MutantError, match=r"package small: without a mutant tests/small/test_sums\.py::test_wrong fails"):
        report([SIGN], project)


def test_tests_that_hang_are_ended_and_count_as_failed(project):
    slow, pid = project / "tests/small/test_slow.py", project / "pid"
    slow.write_text(SLOW)
    outcome = run([slow], project, limit=5.0)
    assert outcome.failed == "hangs: ended after 5 s"
    assert not pid.exists() or not Path("/proc", pid.read_text()).exists()


def test_a_mutant_is_in_its_module_for_as_long_as_it_is_planted(project):
    module = project / "monitor/small/sums.py"
    os.utime(module, ns=(0, 1_000_000_000))
    with planted(SIGN, project):
        assert module.read_text() == MODULE.replace(SIGN.before, SIGN.after)
    assert module.read_text() == MODULE
    assert module.stat().st_mtime_ns == 1_000_000_000
    assert [path.name for path in module.parent.glob("*.py*")] == ["sums.py"]


def test_a_line_is_found_in_its_function_whatever_the_module_is_called(project):
    (project / "monitor/renamed").mkdir()
    (project / "monitor/small/sums.py").rename(project / "monitor/renamed/arithmetic.py")
    twice = Mutant(SMALL, "Sums.of", "total = sum(numbers)", "total = 0", "")
    assert place_of(twice, project).line == 3
    assert place_of(SIGN, project).path.name == "arithmetic.py"


def test_a_line_that_is_there_once_is_found_in_a_function_that_was_renamed(project):
    assert place_of(Mutant(SMALL, "average", SIGN.before, SIGN.after, ""), project) == place_of(SIGN, project)


@pytest.mark.parametrize(("line", "count"), [("total = sum(numbers)", 2), ("total = max(numbers)", 0)])
def test_a_line_that_is_not_there_once_is_an_error_that_names_it(project, line, count):
    with pytest.raises(MutantError, match=rf"small\.average: {count} lines are '{line[:9]}"):
        place_of(Mutant(SMALL, "average", line, "total = 0", ""), project)
