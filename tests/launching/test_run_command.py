"""``trainermon run``: a program is monitored without a change of its code, and computes the same."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import ROOT, RUN, WITH_TORCHRUN, Directly, Ended, each_ended, ended, rows, weights

import monitor

LOOPS, GUESSED = (Path(__file__).with_name("scripts") / name for name in ("loops.py", "guessed.py"))
FIRST = 2
"""From this step on, all programs have rows: the first one shows the optimizers, and the second one the micro-batches."""


TOGETHER = ("gan", "two_optimizers", "two_optimizers by hand", "replaced", "no_model")
"""Loops that run in one start of the command; the others have one each."""
GUESSES = ("parts", "reentrant", "actor and critic", "before", "threads", "skipped")

Loop = Callable[..., Ended]


@pytest.fixture
def loop(tmp_path: Path, directly: Directly) -> Loop:
    """Runs a loop without the command. It records to the folder of its name."""

    def run(how: str, ranks: int = 1) -> Ended:
        return directly(LOOPS, how, to=tmp_path / how, ranks=ranks)

    return run


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Ended, Path]]:
    """How each of ``TOGETHER`` ended under the command, and where its recordings are."""
    base = tmp_path_factory.mktemp("together")
    done = each_ended([*RUN, sys.executable, str(LOOPS)], TOGETHER, base)
    return {how: (one, base / how / "recorded") for how, one in done.items()}


@pytest.fixture(scope="module")
def guessed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Ended, Path]]:
    """How each of ``GUESSES`` ended under the command, and where its recordings are."""
    base = tmp_path_factory.mktemp("guessed")
    (base / "both.json").write_text('{"wg_distribution": true, "ops": ["norm"], "format": "parquet"}')
    done = each_ended([*RUN, "--config", "both.json", sys.executable, str(GUESSED)], GUESSES, base)
    return {how: (one, base / how / "recorded") for how, one in done.items()}


@pytest.mark.parametrize(
    ("how", "recordings"),
    [
        ("plain", 1),
        ("gan", 2),
        ("two_optimizers", 1),
        ("wrapped", 1),
        ("ranks", 2),
    ],
)
def test_the_rows_are_those_of_a_line_in_the_program(
    how: str, recordings: int, tmp_path: Path, loop: Loop, together: dict[str, tuple[Ended, Path]]
) -> None:
    ranks = 2 if how == "ranks" else 1
    plain, by_hand = loop(how, ranks), loop(f"{how} by hand", ranks)
    if how in together:
        launched, recorded = together[how]
    else:
        python = WITH_TORCHRUN if how == "ranks" else [sys.executable]
        launched, recorded = ended([*RUN, *python, str(LOOPS), how], tmp_path), tmp_path / "recorded"
    assert weights(launched) == weights(by_hand) == weights(plain)
    expected, found = rows(tmp_path / f"{how} by hand", FIRST), rows(recorded, FIRST)
    assert found.keys() == expected.keys()
    assert found == expected
    assert len(found) == recordings
    assert {"grad_reduced", "param_updated"} <= {row["kind"] for table in found.values() for row in table}
    assert launched.stderr.count("trainermon run: attached to") >= recordings
    assert [line for line in launched.stderr.splitlines() if "[monitor] WARNING" in line] == []


def test_what_cannot_be_told_is_left_alone_with_a_warning(together: dict[str, tuple[Ended, Path]]) -> None:
    done, recorded = together["no_model"]
    assert done.returncode == 0
    assert "SGD is not monitored, because no model was found that has its parameters" in done.stderr
    assert not recorded.exists()


def test_a_program_that_attaches_the_monitor_itself_is_left_alone(together: dict[str, tuple[Ended, Path]]) -> None:
    done, recorded = together["two_optimizers by hand"]
    assert weights(done)
    assert done.stderr.count("the program monitors") == 2
    assert len(list(recorded.glob("*-rank*"))) == 1


def test_another_configuration_by_name_or_path(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"mv_distribution": true, "format": "parquet"}')
    for config, kinds in (("gradients", {"grad_reduced"}), ("mine.json", {"exp_avg", "exp_avg_sq"})):
        output = f"out-{Path(config).stem}"
        command = [*RUN, "--config", config, sys.executable, str(LOOPS), "plain"]
        assert ended(command, tmp_path, MONITOR_OUTPUT_DIR=output).returncode == 0
        (table,) = rows(tmp_path / output, FIRST).values()
        assert {row["kind"] for row in table} - {"run", "update_ratio"} == kinds


def test_an_optimizer_that_replaces_another_ends_the_recording_of_its_model(
    loop: Loop, together: dict[str, tuple[Ended, Path]]
) -> None:
    done, recorded = together["replaced"]
    assert weights(done) == weights(loop("replaced"))
    assert "Unhashable begins to step Net later than others. From here on, this model is not monitored." in done.stderr
    (table,) = rows(recorded, 0).values()
    assert {row["step"] for row in table if row["kind"] == "grad_reduced"} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("how", GUESSES)
def test_rows_begin_with_step_1_whatever_the_first_backwards_were(how: str, guessed: dict[str, tuple[Ended, Path]]) -> None:
    done, recorded = guessed[how]
    assert done.returncode == 0, done.stderr[-3000:]
    printed = {int(step): float(norm) for step, norm in re.findall(r"^step (\d+) norm (\S+)$", done.stdout, re.MULTILINE)}
    for kind in ("grad_reduced", "grad_unreduced"):
        scale = 0.25 if how == "skipped" and kind == "grad_unreduced" else 1.0  # twice halved, and not yet taken out
        expected = pytest.approx({step: scale * printed[step] for step in (1, 2, 3)}, rel=1e-6)
        squares: Counter[int] = Counter()
        for row in monitor.open_run(recorded).rows(kind).to_pylist():
            squares[row["step"]] += row["norm"] ** 2
        assert {step: square**0.5 for step, square in squares.items()} == expected


def test_what_was_compiled_in_the_first_step_has_rows_of_activations(tmp_path: Path, loop: Loop) -> None:
    (tmp_path / "activations.json").write_text('{"xy_distribution": true, "all_xy": true, "format": "parquet"}')
    done = ended([*RUN, "--config", "activations.json", sys.executable, str(LOOPS), "compiled"], tmp_path)
    assert weights(done) == weights(loop("compiled"))
    assert "WARNING" not in done.stderr
    (table,) = rows(tmp_path / "recorded", 0).values()
    assert {row["step"] for row in table if row["name"] == "layers.0.output"} == {1, 2, 3, 4, 5}


def test_what_cannot_be_used_is_refused_before_the_command_starts(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"wg_distributon": true}')
    for config, said in (("helth", "did you mean health?"), ("bad.json", "did you mean `wg_distribution`")):
        done = ended([*RUN, "--config", config, sys.executable, "-c", "print('started')"], tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr
        assert "Traceback" not in done.stderr
    missing = ended([*RUN, "no-such-command"], tmp_path)
    assert (missing.returncode, missing.stderr.strip()) == (2, "no-such-command cannot be started: No such file or directory")


def test_arguments_and_the_exit_status_are_those_of_the_command(tmp_path: Path) -> None:
    code = "import sys; print(sys.argv[1:]); raise SystemExit(7)"
    done = ended([*RUN, sys.executable, "-c", code, "--config", "x", "--help", "-v"], tmp_path)
    assert (done.returncode, done.stdout.strip()) == (7, "['--config', 'x', '--help', '-v']")


def test_a_sitecustomize_of_the_environment_is_run_too(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins; builtins.own_was_run = True")
    path = os.pathsep.join([str(own), str(ROOT)])
    done = ended([*RUN, sys.executable, "-c", "print(own_was_run)"], tmp_path, PYTHONPATH=path)
    assert done.stdout.strip() == "True", done.stderr


def test_a_program_without_a_framework_imports_nothing_of_one(tmp_path: Path) -> None:
    code = "import sys; print(sorted({'torch', 'numpy', 'pydantic', 'pyarrow'} & sys.modules.keys()))"
    done = ended([*RUN, sys.executable, "-c", code], tmp_path)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
