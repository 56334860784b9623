"""The demo, run as its reader runs it, and the arithmetic of its claim about cost."""

from __future__ import annotations

import importlib
import json
import math
import re
from pathlib import Path
from types import ModuleType

import pytest
from demo_runs import DEMO, run_python
from recorded_job import RecordedRank
from rich.console import Console
from rich.measure import Measurement
from sink_rows import Measured
from two_ranks import TORCHRUN

from monitor.merge.discovery import choose, discover, runs_of
from monitor.merge.outputs import read_merged
from monitor.sinks.csv import read_csv


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What a demo of five steps printed, and where it recorded, beside an earlier job."""
    base = tmp_path_factory.mktemp("demo")
    earlier = RecordedRank(base, rank=7, world_size=8)
    earlier.write(0, {"grad_reduced": [Measured("w")]})
    earlier.close()
    run = run_python(base, *TORCHRUN, str(DEMO / "train.py"), "--steps", "5")
    assert run.returncode == 0, run.stderr
    return run.stdout, base


def test_both_ranks_record_every_kind_at_the_configured_steps(demo: tuple[str, Path]) -> None:
    kinds = {
        "actv",
        "actv_grad",
        "grad_unreduced",
        "grad_reduced",
        "param_origin",
        "param_updated",
        "exp_avg",
        "exp_avg_sq",
        "run",
    }
    for rank in (0, 1):
        (directory,) = demo[1].glob(f"*-rank{rank}-*")
        # A fresh optimizer has no moments before its first step.
        first = {f"{kind}_0-0.csv" for kind in kinds - {"exp_avg", "exp_avg_sq"}}
        assert {path.name for path in directory.glob("*.csv")} == first | {f"{kind}_4-4.csv" for kind in kinds}


def test_reduced_gradients_agree_between_the_ranks_and_unreduced_ones_do_not(demo: tuple[str, Path]) -> None:
    def norms(kind: str, rank: int) -> list[float]:
        (path,) = demo[1].glob(f"*-rank{rank}-*/{kind}_0-0.csv")
        return read_csv(path)["norm"].to_pylist()

    assert norms("grad_reduced", 0) == norms("grad_reduced", 1)
    assert norms("grad_unreduced", 0) != norms("grad_unreduced", 1)


def test_it_ends_with_the_places_and_the_first_rows_and_what_it_cannot_say(demo: tuple[str, Path]) -> None:
    printed, base = demo
    for directory in base.glob("*-rank[01]-*"):
        assert f"Recorded in {directory}" in printed
    assert "of grad_reduced_0-0.csv" in printed
    assert "module.h.0.attn_norm.weight" in printed
    assert "Too few steps to say what monitoring cost." in printed


def merged_of(base: Path) -> set[Path]:
    return set(base.glob("merged-*"))


def test_its_last_table_is_of_the_merged_data_set(demo: tuple[str, Path]) -> None:
    printed, base = demo
    (merged,) = merged_of(base)
    assert f"Merged into {merged}" in printed
    assert f"Report in {merged / 'report.html'}: open it in a browser." in printed
    assert "uPlot" in (merged / "report.html").read_text(encoding="utf-8")
    assert json.loads((merged / "report.json").read_text())["clean"]
    gradients = read_merged(merged / "global" / "grad_reduced_0-4.csv").to_pylist()
    largest = max((row for row in gradients if row["step"] == 4), key=lambda row: row["norm"])
    table = printed.partition("Global table: the 3 largest gradients of step 4")[2].splitlines()
    (place,) = (number for number, line in enumerate(table) if line.strip() == largest["name"])
    shown = table[place + 3].split()
    assert shown[:4] == ["grad_reduced", "4", "0", f"{largest['norm']:.3g}"]
    assert [line.split()[:3] for line in table[place + 1 : place + 3]] == [["grad_unreduced", "4", rank] for rank in "01"]


def test_the_last_words_are_the_norms_of_the_whole_gradient(demo: tuple[str, Path]) -> None:
    printed, base = demo
    (merged,) = merged_of(base)
    squares = dict.fromkeys((0, 4), 0.0)
    for row in read_merged(merged / "global" / "grad_reduced_0-4.csv").to_pylist():
        squares[row["step"]] += row["norm"] ** 2
    words = f"the norm of the whole model's gradient is {squares[4] ** 0.5:.3g}, after {squares[0] ** 0.5:.3g} at step 0"
    assert words in " ".join(printed.split())


def test_of_the_jobs_in_the_directory_it_merges_its_own_and_says_how_to(demo: tuple[str, Path]) -> None:
    printed, base = demo
    (merged,) = merged_of(base)
    job = re.search(r"trainermon merge \S+ --job (\w+)", printed)
    assert job is not None
    found = discover(base)
    assert len(found.job_ids()) == 2
    own = {one.directory.name for one in runs_of(found, choose(found, job[1]))}
    assert set(json.loads((merged / "report.json").read_text())["directories"]) == own
    assert {name.split("-rank")[1].split("-")[0] for name in own} == {"0", "1"}


def test_started_without_torchrun_it_says_how_to_start_it(tmp_path: Path) -> None:
    run = run_python(tmp_path, str(DEMO / "train.py"))
    assert run.returncode == 1
    assert run.stderr == "The demo is a job of two ranks. Start it with:  make demo\n"
    assert not list(tmp_path.iterdir())


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DEMO)
    return importlib.import_module("cost")


def test_cost_counts_what_a_collected_step_leaves_to_the_step_after_it(cost: ModuleType) -> None:
    first_intervals = [9.0] * 8
    measured = cost.measure(first_intervals + [1.5, 1.25, 1.0, 1.0] * 3, interval=4)
    assert measured == cost.Cost(plain=1.0, added=0.75, samples=3)
    assert measured.ratio == 1.75


def test_cost_is_not_said_before_a_whole_interval_lies_behind_the_warm_up(cost: ModuleType) -> None:
    assert cost.measure([1.0] * 11, interval=4) is None
    assert cost.measure([1.0] * 12, interval=4) == cost.Cost(plain=1.0, added=0.0, samples=1)


@pytest.fixture
def merged(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(DEMO)
    return importlib.import_module("merged")


def gradient(name: str, norm: float, rank: str = "0", step: int = 4, nans: int = 0) -> dict[str, object]:
    return {"name": name, "norm": norm, "ranks": rank, "step": step, "nans": nans}


def test_a_nan_among_the_gradients_is_what_is_said(merged: ModuleType) -> None:
    now = [gradient("w", 3.0), gradient("b", math.nan, nans=2)]
    said = merged.seen([gradient("w", 5.0, step=0)], now, [gradient("w", 3.0), gradient("w", 4.0, rank="1")])
    assert said == (
        "At step 4 the norm of the whole model's gradient is nan, after 5 at step 0. "
        "Before the average it was 3 on rank 0 and 4 on rank 1: what the ranks' batches do not agree on cancels out. "
        "NaN stands in 1 of 4 rows, first b."
    )


def test_the_share_of_the_largest_is_that_of_the_square(merged: ModuleType) -> None:
    said = merged.seen([gradient("w", 3.0)], [gradient("w", 3.0), gradient("b", 4.0)], [])
    assert said.startswith("At step 4 the norm of the whole model's gradient is 5; b makes 64% of its square.")


def test_the_table_of_the_largest_gradients_fits_a_terminal_of_80_columns(merged: ModuleType) -> None:
    longest = gradient("module.h.0.attn.proj.weight", 0.000123456, step=9999)
    longest |= dict.fromkeys(("min", "max", "mean"), -1.25e-13) | {"kind": "grad_unreduced"}
    table = merged._table([longest], [])
    console = Console(width=1000)
    assert Measurement.get(console, console.options, table).minimum <= 80


def test_the_job_is_that_of_this_process_and_no_earlier_one(merged: ModuleType, tmp_path: Path) -> None:
    RecordedRank(tmp_path).close()
    (earlier,) = tmp_path.iterdir()
    with pytest.raises(SystemExit, match="Nothing was recorded"):
        merged.runs_of_this_job(tmp_path, {earlier})
    RecordedRank(tmp_path, job="5e6f7a8b" * 4, suffix="5e6f7a8b").close()
    assert [run.manifest.job_id for run in merged.runs_of_this_job(tmp_path, {earlier})] == ["5e6f7a8b" * 4]


def test_what_hinders_the_merge_is_said_in_a_sentence(merged: ModuleType, tmp_path: Path) -> None:
    RecordedRank(tmp_path).close()
    with pytest.raises(SystemExit, match="Nothing was merged: Job 1a2b3c4d"):
        merged.merge_and_show(Console(quiet=True), merged.runs_of_this_job(tmp_path, set()))
