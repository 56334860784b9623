"""The benchmarks, run for real in their quick form. No figure of time is expected: only that figures are there."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NoReturn

import pytest
from evidence import PROVES
from hanging import IDLE_S

import monitor.pytorch  # noqa: F401  before the forks

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fork of this process, which has imported torch and the monitor already."""
    with TemporaryFile("w+") as out, TemporaryFile("w+") as errors:
        if (child := os.fork()) == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            as_program(BENCH / script, arguments)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said = [stream.seek(0) or stream.read() for stream in (out, errors)]
    return subprocess.CompletedProcess([script, *arguments], status, *said)


def as_program(script: Path, arguments: Sequence[str]) -> NoReturn:
    """Run a script as this process, and end with its status."""
    sys.stdin, sys.stdout, sys.stderr = open(os.devnull), os.fdopen(1, "w"), os.fdopen(2, "w")  # noqa: SIM115
    sys.argv, sys.path[:0] = [str(script), *arguments], [str(script.parent)]
    # The project need not be installed for its tests to run.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    sys.modules.pop("dumping", None)  # tests of the dump have a module of that name, too
    status = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def cells_of(table: str) -> list[list[str]]:
    """The rows of a printed table below its header."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line][1:]


def test_precision_dump_prints_what_a_dumped_step_takes(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run("precision_dump.py", "--workload", "quick", "--rounds", "1", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    [row] = cells_of(done.stdout)
    found = json.loads(figures.read_text())
    assert row[:3] == ["quick", "L1", "statistics"]
    assert row[6] == f"{found['step'] / found['plain']:.2f}"


@pytest.mark.skipif(not PROVES, reason="it takes 16 s of five processes: make prove runs it")
def test_overhead_prints_what_being_monitored_costs_and_writes_all_figures_to_a_file(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run("overhead.py", "--quick", "--monitors", "ours", "--json", str(figures))
    assert (done.returncode, done.stderr) == (0, "quick, everything\n")
    [row] = cells_of(done.stdout)
    assert row[:3] == ["quick", "everything", "monitor"]

    [cost] = json.loads(figures.read_text())["costs"]
    assert row[3] == f"{cost['rows']:.0f}"
    assert cost["rows"] > 100
    assert len(cost["cpu"]) == len(cost["wall"]) == 2
    assert cost["same_losses"]


def test_overhead_leaves_the_peer_out_and_says_why_when_there_is_no_interpreter_for_it(tmp_path: Path) -> None:
    done = run("overhead.py", "--quick", "--monitors", "peer", "--peer-python", str(tmp_path / "python"))
    assert done.returncode == 0
    assert "mindstudio-probe is left out: there is no interpreter" in done.stdout
    assert cells_of(done.stdout) == []


def test_overhead_leaves_the_peer_out_and_says_why_when_its_interpreter_cannot_import_it() -> None:
    done = run("overhead.py", "--quick", "--monitors", "peer", "--peer-python", sys.executable)
    assert done.returncode == 0
    assert "has no torch or no msprobe" in done.stdout


@pytest.mark.skipif(not PROVES, reason="it takes 4 s: make prove runs it")
def test_a_measured_process_that_fails_is_reported_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    import stepping
    from stepping import Worker, WorkerError

    monkeypatch.setattr(stepping, "SECONDS_TO_LEAVE", IDLE_S)
    missing = tmp_path / "missing.json"
    failed = pytest.raises(WorkerError, match=r"ended with status 1(.|\n)*missing\.json")
    with Worker(sys.executable, "quick", missing, tmp_path / "worker", "ours", {}) as worker, failed:
        worker.receive()


def test_the_turns_of_a_round_begin_with_another_process_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from stepping import rotated

    assert [rotated("abc", number) for number in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


@pytest.mark.skipif(not PROVES, reason="it takes 12 s: make prove runs it")
def test_collectives_prints_what_a_call_costs_unmonitored_and_monitored() -> None:
    done = run("collectives.py", "--steps", "3", "--calls", "2")
    assert (done.returncode, done.stderr) == (0, "")
    said = [line.split() for line in done.stdout.splitlines()]
    assert said[0][:2] == ["2", "all-reduces"]
    assert [line[:-4] for line in said[2:]] == [["no", "monitor"], ["monitor"]]
    assert float(said[2][2]) > 0 == float(said[2][3])


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """What the benchmark of the kernels printed, and the figures it wrote."""
    figures = tmp_path_factory.mktemp("kernels") / "figures.json"
    done = run("kernels.py", "--quick", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(figures.read_text())


def test_kernels_prints_multiples_of_a_sum_and_errors_against_float64(kernels: tuple[str, dict[str, Any]]) -> None:
    printed, figures = kernels
    tensors = [each["tensor"] for each in figures["speeds"]]
    assert tensors[0] == "normal float32"
    assert tensors[-1] == "1000 elements"
    # The header of the second table stands between the two.
    assert [row[0] for row in cells_of(printed)] == [*tensors, "tensor", *(each["tensor"] for each in figures["errors"])]
    assert all(multiple > 0 for each in figures["speeds"] for multiple in each["multiples"].values())


def test_the_kernel_is_as_accurate_as_promised_on_what_kernels_measures(kernels: tuple[str, dict[str, Any]]) -> None:
    _, figures = kernels
    assert max(each["norm"]["monitor"] for each in figures["errors"]) <= 1e-6
    assert max(each["mean"]["monitor"] for each in figures["errors"]) <= 1e-6


@pytest.mark.skipif(not PROVES, reason="it takes 3 s: make prove runs it")
def test_writer_prints_the_rate_of_each_way_to_write(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run("writer.py", "--rows", "20000", "--steps", "2", "--rounds", "1", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    rates = {each["way"]: each["rate"] for each in json.loads(figures.read_text())}
    assert [row[:2] for row in cells_of(done.stdout)] == [[way, f"{rate:,.0f}"] for way, rate in rates.items()]
    assert "monitor" in rates


def test_rules_prints_what_the_writer_takes_with_them_and_what_a_flood_of_events_does(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run("rules.py", "--rows", "2000", "--steps", "12", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert [row[:2] for row in cells_of(done.stdout)[:2]] == [[c["format"], f"{1e3 * c['alone']:.1f}"] for c in found["costs"]]
    assert [cost["format"] for cost in found["costs"]] == ["csv", "hdf5"]
    assert cells_of(done.stdout)[-1] == [f"{1e3 * found['flood'][when]:.1f}" for when in ("first", "next", "later")]


def test_formats_prints_what_a_million_rows_take_in_each_format(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run("formats.py", "--rows", "2000", "--steps", "5", "--rounds", "1", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    costs = json.loads(figures.read_text())
    assert [row[:2] for row in cells_of(done.stdout)] == [[cost["format"], f"{cost['bytes']:.1f}"] for cost in costs]
    sizes = {cost["format"]: cost["bytes"] for cost in costs}
    assert sizes["hdf5"] < 0.4 * sizes["csv"]
    assert sizes.keys() == {"csv", "hdf5", "parquet", "tensorboard"}


@pytest.mark.skipif(not PROVES, reason="it takes 4 s: make prove runs it")
def test_merging_prints_what_the_command_takes_and_what_reading_the_same_files_takes(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    size = ("--rows", "240", "--steps", "4", "--ranks", "3", "--lengths", "--formats", "parquet", "csv", "--workers", "1")
    done = run("merge.py", *size, "--rounds", "1", "--beside", "polars", "--directory", str(tmp_path), "--json", str(figures))
    assert done.returncode == 0, done.stderr
    rows = cells_of(done.stdout)
    both = [(by, source) for source in ("parquet", "csv") for by in ("monitor", "polars")]
    assert [row[:5] for row in rows] == [[*each, "3", "4", "240"] for each in both]
    assert [float(row[-1]) > 0 for row in rows if row[0] == "polars"] == [True, True]
    assert all(cost["memory"] > 10_000_000 and cost["cpu"] > 0 for cost in json.loads(figures.read_text()))
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


@pytest.mark.skipif(not PROVES, reason="it takes 4 s: make prove runs it")
def test_ranking_prints_what_the_command_takes_for_each_shape_of_events(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    size = ("--events", "400", "--ranks", "4", "--stages", "2", "--layers", "1", "--micro-steps", "2")
    done = run("ranking.py", *size, "--directory", str(tmp_path), "--json", str(figures))
    assert done.returncode == 0, done.stderr
    assert [row[:3] for row in cells_of(done.stdout)] == [[shape, "4", "400"] for shape in ("flood", "sparse", "few ranks")]
    assert all(cost["memory"] > 10_000_000 and cost["cpu"] > 0 for cost in json.loads(figures.read_text())["costs"])
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


def test_dynamic_prints_what_a_step_pays_while_nothing_changes(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run("dynamic.py", "--steps", "1000", "--rounds", "3", "--seconds", "0.1", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    assert [row[:2] for row in cells_of(done.stdout)] == [[each["process"], f"{each['step_us']:.3f}"] for each in found]
    assert [each["process"] for each in found] == ["alone", "rank 0 of 2"]


@pytest.mark.skipif(not PROVES, reason="it takes 3 s: make prove runs it")
def test_features_prints_what_each_costs_and_what_attention_takes(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run("features.py", "--quick", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    written = json.loads(figures.read_text())
    rows = {cost["feature"]: cost["rows"] for cost in written["costs"]}
    assert rows == {
        "attention_hook": 1,
        "attention_head_hook": 3,
        "linear_hook": 5,
        "moe_router_weight_hook": 1,
        "moe_router_logit_hook": 1,
        "attention_hook, all of it": 1,
        "attention_head_hook, all rows": 3,
        "activation_hook, units": 1,
        "activation_hook, blocks": 1,
        "all hooks": 11,
        "mg_direction": 17,
        "update_ratio": 17,
        "ur_distribution": 34,
        "gradients, norms alone": 34,
        "gradients, underflow_e4m3": 34,
        **{f"moe_router_load_hook, {experts} experts": 1 + experts for experts in (8, 64, 256)},
    }
    assert all(len(cost["cpu"]) == 2 for cost in written["costs"])
    assert [row[0] for row in cells_of(done.stdout)][: len(rows)] == list(rows)
    assert 0 <= written["samples"][0]["added"] < 64


def test_training_metrics_prints_what_each_way_costs(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run("training_metrics.py", "--quick", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    costs = json.loads(figures.read_text())["costs"]
    assert [row[0] for row in cells_of(done.stdout)] == [cost["way"] for cost in costs]
    assert [cost["way"] for cost in costs] == ["tensor monitor", "training metrics", "in the loop"]
    assert all(len(cost["collected"]) == len(cost["plain"]) == 2 for cost in costs)


def test_query_prints_what_each_reader_takes_for_each_question(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    # An interpreter of its own: polars hangs in a fork of a process that has used it.
    program = [sys.executable, str(BENCH / "query.py"), "--quick", "--workers", "1"]
    directories = ["--directory", str(tmp_path), "--json", str(figures)]
    done = subprocess.run([*program, *directories], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())
    readers = list(dict.fromkeys(one["reader"] for one in found["answers"]))
    assert [row[0] for row in cells_of(done.stdout)] == readers
    assert {"ours", "ours, again", "ours on ranks", "read_merged", "read_hdf5", "polars-csv"} <= set(readers)
    for question, rows in (("one tensor, all steps", 32), ("largest of a step", 20), ("spread of a step", 10)):
        assert {one["rows"] for one in found["answers"] if one["question"] == question} == {rows}
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


@pytest.mark.skipif(not PROVES, reason="it takes a minute: make prove runs it")
@pytest.mark.parametrize(("ranks", "store"), [(1024, "tcp"), (32, "own")])
def test_ranks_that_compare_copies_stay_within_what_they_may_ask_and_name_the_odd_one(
    tmp_path: Path, ranks: int, store: str
) -> None:
    figures = tmp_path / "figures.json"
    options = ["--ranks", str(ranks), "--store", store, "--requests", "2000" if store == "tcp" else "200"]
    command = [sys.executable, str(BENCH / "copies.py"), *options, "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # a fork could not start processes anew
    (found,) = json.loads(figures.read_text())
    assert f"rank {ranks // 3 + 1} (" in done.stderr
    assert found["said_after"] is not None
    assert found["requests"] <= found["allowed"]


def test_host_cost_prints_what_a_call_takes() -> None:
    done = run("host_cost.py", "--quick", "--tables", "call")
    assert (done.returncode, done.stderr) == (0, "one call\n")
    assert min(int(taken) for _, taken in cells_of(done.stdout)) > 0


@pytest.mark.skipif(not PROVES, reason="it takes 20 s of eight processes: make prove runs it")
def test_host_cost_prints_the_cost_of_a_row_and_writes_all_figures_to_a_file(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run("host_cost.py", "--quick", "--json", str(figures))
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_text())["parts"]
    assert [row[0] for row in cells_of(done.stdout)[: len(found)]] == [one["name"] for one in found]
    assert {len(one["thread"]) for one in found} == {2}
    assert {one["rows"] for one in found} == {found[-1]["rows"]}


def test_compare_runs_finds_a_planted_change_a_public_fault_and_a_healthy_pair(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    # An interpreter of its own: threads of Arrow do not survive the forks that ranks are.
    only = "^single epsilon of a norm|^single gradients not set to zero|^pp-names-float32.*permuted"
    options = ["--only", only, "--keep", str(tmp_path / "runs")]
    program = [sys.executable, str(BENCH / "compare_runs.py"), *options, "--json", str(figures)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    planted, _, public, *_, healthy = cells_of(done.stdout)
    found = json.loads(figures.read_text())
    expected = "0 actv/layers.1.mlp_norm.output"
    assert planted == ["epsilon of a norm", "single", expected, expected, "right"]
    expected = "1 grad_unreduced/head.weight"
    assert public == ["gradients not set to zero", "deepspeedai/DeepSpeed#7839", "single", expected, expected, "right"]
    assert healthy[2] == found["healthy"][0]["verdict"] == "same"
    assert (tmp_path / "runs" / "planted" / "single-epsilon-of-a-norm" / "merged" / "report.json").exists()


def test_spikes_names_the_cause_of_a_planted_one_and_is_silent_about_a_healthy_training(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    only = "^batch 5 mlp 1$|^weights 2 mlp 1( loss)?$|^healthy constant mlp$"
    # An interpreter of its own: threads of Arrow do not survive the forks that ranks are.
    program = [sys.executable, str(BENCH / "spikes.py"), "--only", only, "--json", str(figures)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {(one["part"], one["name"]): one["verdict"] for one in json.loads(figures.read_text())}
    assert verdicts == {
        ("planted", "batch 5 mlp 1"): "right",
        ("planted", "weights 2 mlp 1"): "right",
        ("little", "weights 2 mlp 1 loss"): "cannot tell",
        ("healthy", "healthy constant mlp"): "silent",
    }
