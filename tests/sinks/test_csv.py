from __future__ import annotations

import csv
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pytest
from evidence import examples
from hypothesis import given, settings, strategies as st
from sink_rows import SIX_OPS, Measured, Rank, visible

import monitor.sinks
from monitor.sinks.csv import CsvSink, read_csv

W = {"grad_reduced": [Measured("w")]}
BOTH = {"actv": [Measured("l.output", micro_step=0)], "grad_reduced": [Measured("w")]}


def write(sink: CsvSink, rank: Rank, *steps: int, ops: tuple[str, ...] = ("norm",), kinds: dict = W) -> None:
    for step in steps:
        sink.write(rank.step(step, kinds, ops))


def steps_in(path: Path) -> list[int]:
    return read_csv(path)["step"].to_pylist()


def steps_and_norms(path: Path) -> tuple[list[int], list[float]]:
    table = read_csv(path)
    return table["step"].to_pylist(), table["norm"].to_pylist()


class TestPreparedSteps:
    """Files are the same whether steps were prepared or not."""

    def test_prepared_steps_that_are_written_are_in_the_files(self, tmp_path: Path) -> None:
        texts = []
        for name, prepares in (("prepared", True), ("alone", False)):
            rank = Rank(tmp_path / name, steps_per_record=3)
            sink = CsvSink(rank.context)
            steps = [rank.step(step, W if step % 3 else BOTH, ("norm",) if step < 5 else SIX_OPS) for step in range(9)]
            if prepares:
                sink.prepare(steps[:7])
            for rows in steps:
                if rows.step not in (2, 3):  # which came to nothing
                    sink.write(rows)
            sink.close()
            texts.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
        assert texts[0] == texts[1]
        assert len(texts[0]) > 3

    def test_prepared_steps_that_could_not_be_written_are_discarded(self, rank: Rank, out: Path) -> None:
        sink = CsvSink(rank.context)
        steps = [rank.step(step, BOTH) for step in range(4)]
        sink.prepare(steps)
        out.mkdir(parents=True)
        (out / ".actv_0-4.csv.part").mkdir()
        with pytest.raises(IsADirectoryError):
            sink.write(steps[0])
        (out / ".actv_0-4.csv.part").rmdir()
        for rows in (steps[1], steps[3]):
            sink.write(rows)
        sink.close()
        assert [steps_in(out / f"{kind}_0-4.csv") for kind in BOTH] == [[1, 3], [1, 3]]

    def test_a_new_batch_replaces_the_one_before(self, rank: Rank, out: Path) -> None:
        sink = CsvSink(rank.context)
        sink.prepare([rank.step(step, W) for step in (0, 1)])
        again = [rank.step(step, {"grad_reduced": [Measured("w", [6.0, 8.0])]}) for step in (0, 1)]
        sink.prepare(again)
        for rows in again:
            sink.write(rows)
        sink.close()
        assert steps_and_norms(out / "grad_reduced_0-4.csv") == ([0, 1], [10.0, 10.0])


class TestFiles:
    def test_a_file_holds_a_kind_and_a_record(self, rank: Rank, out: Path) -> None:
        sink = CsvSink(rank.context)
        write(sink, rank, *range(10), kinds=BOTH)
        assert {"actv_0-4.csv", "actv_5-9.csv", "grad_reduced_0-4.csv", "grad_reduced_5-9.csv"} == visible(out)
        assert (
            "vpp_stage,name,step,norm\n" + "".join(f"0,w,{i},5.000000\n" for i in range(5, 10))
            == (out / "grad_reduced_5-9.csv").read_text()
        )

    def test_a_record_of_one_step_is_a_file_a_step(self, tmp_path: Path) -> None:
        rank = Rank(tmp_path, steps_per_record=1)
        write(CsvSink(rank.context), rank, 0, 1)
        assert {"grad_reduced_0-0.csv", "grad_reduced_1-1.csv"} == visible(tmp_path)

    def test_what_an_open_record_holds_has_left_the_process(self, rank: Rank, out: Path) -> None:
        write(CsvSink(rank.context), rank, 0)
        assert (out / ".grad_reduced_0-4.csv.part").read_bytes() == b"vpp_stage,name,step,norm\n0,w,0,5.000000\n"

    def test_a_step_beyond_the_record_completes_it_for_every_kind(self, rank: Rank, out: Path) -> None:
        sink = CsvSink(rank.context)
        write(sink, rank, 3, kinds=BOTH)
        write(sink, rank, 6)
        assert {"actv_0-4.csv", "grad_reduced_0-4.csv"} == visible(out)

    def test_closing_shows_everything_and_leaves_no_hidden_file(self, rank: Rank, out: Path) -> None:
        sink = CsvSink(rank.context)
        write(sink, rank, 0, 1, kinds=BOTH)
        sink.close()
        assert {"actv_0-4.csv", "grad_reduced_0-4.csv"} == set(os.listdir(out))

    def test_one_file_a_kind_is_open_at_most(self, rank: Rank) -> None:
        before = len(os.listdir("/proc/self/fd"))
        sink = CsvSink(rank.context)
        write(sink, rank, 0, kinds=BOTH)
        assert before + 2 == len(os.listdir("/proc/self/fd"))
        write(sink, rank, *range(1, 13), kinds=BOTH)
        assert before + 2 == len(os.listdir("/proc/self/fd"))
        sink.close()
        assert before == len(os.listdir("/proc/self/fd"))

    def test_what_a_killed_process_left_hidden_is_not_taken_over(self, rank: Rank, out: Path) -> None:
        out.mkdir()
        (out / ".grad_reduced_0-4.csv.part").write_bytes(b"half a line, " * 100)
        write(CsvSink(rank.context), rank, 3, 4)
        assert steps_in(out / "grad_reduced_0-4.csv") == [3, 4]


class TestUnion:
    def test_a_resumed_run_joins_the_record_of_the_earlier_process(self, rank: Rank, out: Path) -> None:
        names = [Measured('a,"b"\nc'), Measured("plain")]
        first = CsvSink(rank.context)
        write(first, rank, 0, 1, 2, kinds={"other": names})
        first.close()
        second = CsvSink(rank.context)
        write(second, rank, 3, 4, kinds={"other": names})
        assert {"other_0-4.csv"} == visible(out)
        table = read_csv(out / "other_0-4.csv")
        assert table["step"].to_pylist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        assert table["name"].to_pylist() == ['a,"b"\nc', "plain"] * 5

    @pytest.mark.parametrize("directory", [".", "./run", "run/", "../{}/run"])
    def test_however_the_directory_is_given(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, directory: str) -> None:
        monkeypatch.chdir(tmp_path)
        told = Path(directory.format(tmp_path.name))
        rank = Rank(told)
        for steps in ([0, 1], [2, 3], [4, 5]):
            sink = CsvSink(rank.context)
            write(sink, rank, *steps)
            sink.close()
        assert visible(told) == {"grad_reduced_0-4.csv", "grad_reduced_5-9.csv"}

    def test_a_step_written_again_replaces_its_rows_and_the_later_ones(self, rank: Rank, out: Path) -> None:
        write(CsvSink(rank.context), rank, *range(5), kinds={"other": [Measured("line\nbreak", [1.0])]})
        again = CsvSink(rank.context)
        write(again, rank, 2, 3, kinds={"other": [Measured("line\nbreak", [9.0])]})
        again.close()
        table = read_csv(out / "other_0-4.csv")
        assert table["step"].to_pylist() == [0, 1, 2, 3]
        assert table["norm"].to_pylist() == [1.0, 1.0, 9.0, 9.0]

    def test_a_kind_that_comes_late_in_the_record_gets_its_file(self, rank: Rank, out: Path) -> None:
        sink = CsvSink(rank.context)
        write(sink, rank, 0)
        write(sink, rank, 1, 4, kinds=BOTH)
        assert steps_in(out / "actv_0-4.csv") == [1, 4]
        assert steps_in(out / "grad_reduced_0-4.csv") == [0, 1, 4]


class TestOtherColumns:
    """Peers' fault 11: a changed ``ops`` left the old header over other columns."""

    def test_changed_ops_start_a_file_and_both_are_called_after_their_steps(self, rank: Rank, out: Path) -> None:
        sink = CsvSink(rank.context)
        write(sink, rank, 0, 1)
        write(sink, rank, 2, 3, 4, ops=("min", "max"))
        write(sink, rank, 5, 9, ops=("min", "max"))
        assert {"grad_reduced_0-1.csv", "grad_reduced_2-4.csv", "grad_reduced_5-9.csv"} == visible(out)
        assert read_csv(out / "grad_reduced_0-1.csv").column_names == ["vpp_stage", "name", "step", "norm"]
        assert read_csv(out / "grad_reduced_2-4.csv").column_names == ["vpp_stage", "name", "step", "min", "max"]

    def test_a_kind_that_gains_micro_steps_starts_a_file(self, rank: Rank, out: Path) -> None:
        sink = CsvSink(rank.context)
        sink.write(rank.step(0, W, ("norm",)))
        sink.write(rank.step(1, W, ("norm",), micro_step_kinds=frozenset({"grad_reduced"})))
        sink.close()
        assert {"grad_reduced_0-0.csv", "grad_reduced_1-1.csv"} == visible(out)

    def test_a_flush_between_grows_the_file_and_its_name(self, rank: Rank, out: Path) -> None:
        sink = CsvSink(rank.context)
        write(sink, rank, 0)
        write(sink, rank, 1, ops=("min",))
        sink.flush()
        write(sink, rank, 2, ops=("min",))
        sink.close()
        assert {"grad_reduced_0-0.csv", "grad_reduced_1-2.csv"} == visible(out)
        assert steps_in(out / "grad_reduced_1-2.csv") == [1, 2]

    def test_ops_that_change_back_join_their_first_file(self, rank: Rank, out: Path) -> None:
        sink = CsvSink(rank.context)
        write(sink, rank, 0, 1)
        write(sink, rank, 2, ops=("min",))
        write(sink, rank, 3)
        sink.close()
        assert {"grad_reduced_0-3.csv", "grad_reduced_2-2.csv"} == visible(out)
        assert steps_in(out / "grad_reduced_0-3.csv") == [0, 1, 3]

    def test_a_resume_with_other_ops_leaves_the_earlier_file_alone(self, rank: Rank, out: Path) -> None:
        first = CsvSink(rank.context)
        write(first, rank, 0, 1, 2)
        first.close()
        before = (out / "grad_reduced_0-4.csv").read_bytes()
        write(CsvSink(rank.context), rank, 3, 4, ops=SIX_OPS)
        assert {"grad_reduced_0-4.csv", "grad_reduced_3-4.csv"} == visible(out)
        assert before == (out / "grad_reduced_0-4.csv").read_bytes()

    def test_a_third_process_joins_the_file_of_its_ops(self, rank: Rank, out: Path) -> None:
        for steps, ops in (((0, 1), ("norm",)), ((2, 3), ("min",)), ((3, 4), ("min",))):
            sink = CsvSink(rank.context)
            write(sink, rank, *steps, ops=ops)
            sink.close()
        assert {"grad_reduced_0-4.csv", "grad_reduced_2-4.csv"} == visible(out)
        assert steps_in(out / "grad_reduced_2-4.csv") == [2, 3, 4]

    @pytest.mark.parametrize(
        "content", [b"", b"notes\n", b"vpp_stage,name,step,norm\n0,w", b"vpp_stage,name,step,norm\n0,w,x,1\n"]
    )
    def test_a_file_that_is_not_ours_is_never_replaced(self, rank: Rank, out: Path, content: bytes) -> None:
        out.mkdir()
        (out / "grad_reduced_0-4.csv").write_bytes(content)
        (out / "grad_reduced_2-4.csv").write_bytes(content)
        write(CsvSink(rank.context), rank, 2, 4)
        assert content == (out / "grad_reduced_0-4.csv").read_bytes() == (out / "grad_reduced_2-4.csv").read_bytes()
        assert steps_in(out / "grad_reduced_2-4.2.csv") == [2, 4]

    @pytest.mark.parametrize(("before", "now"), [(5, 2), (2, 5)])
    def test_records_of_another_length_are_no_reason_for_a_step_to_be_there_twice(
        self, tmp_path: Path, before: int, now: int
    ) -> None:
        for length, value, steps in ((before, 1.0, range(10)), (now, 2.0, range(4, 7))):
            rank = Rank(tmp_path, length)
            sink = CsvSink(rank.context)
            write(sink, rank, *steps, kinds={"other": [Measured("w", [value])]})
            sink.close()
        norms = {step: norm for path in tmp_path.iterdir() for step, norm in zip(*steps_and_norms(path), strict=True)}
        assert sum(len(steps_in(path)) for path in tmp_path.iterdir()) == len(norms)
        gone = {2: {7}, 5: {7, 8, 9}}[now]  # of the record that was written last
        assert norms == {step: 2.0 if 4 <= step <= 6 else 1.0 for step in range(10) if step not in gone}

    def test_a_name_of_very_many_steps_costs_nothing(self, rank: Rank, out: Path) -> None:
        out.mkdir()
        (out / "notes_0-999999999999999999.csv").write_text("not ours")
        write(CsvSink(rank.context), rank, 3, 4)
        assert steps_in(out / "grad_reduced_0-4.csv") == [3, 4]

    def test_a_directory_in_the_way_is_gone_around(self, rank: Rank, out: Path) -> None:
        (out / "grad_reduced_0-4.csv").mkdir(parents=True)
        write(CsvSink(rank.context), rank, 2, 4)
        assert steps_in(out / "grad_reduced_2-4.csv") == [2, 4]


OPS = (("max",), ("max", "norm"))
events = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 8), st.sampled_from(OPS)),
        st.tuples(st.sampled_from(["flush", "restart"])),
    ),
    max_size=25,
)


@settings(max_examples=examples(40, 150))
@given(events, st.sampled_from([1, 3, 5]))
def test_whatever_happens_the_files_hold_each_step_once(happened: list[tuple], steps_per_record: int) -> None:
    """Flushes, restarts, steps that run back and ops that change, in any order."""
    expected: dict[tuple[str, ...], dict[int, float]] = {ops: {} for ops in OPS}
    with tempfile.TemporaryDirectory() as directory:
        rank = Rank(Path(directory), steps_per_record)
        sink = CsvSink(rank.context)
        for number, (event, *arguments) in enumerate(happened):
            if event == "write":
                step, ops = arguments
                sink.write(rank.step(step, {"other": [Measured("w", [number])]}, ops))
                end = step - step % steps_per_record + steps_per_record
                for rows in expected.values():  # of a record that runs back, all columns lose what came after
                    for later in range(step, end):
                        rows.pop(later, None)
                expected[ops][step] = float(number)
            else:
                sink.flush() if event == "flush" else sink.close()
                sink = sink if event == "flush" else CsvSink(rank.context)
        sink.close()
        assert {ops: sorted(rows.items()) for ops, rows in expected.items()} == found_in(Path(directory))


def found_in(directory: Path) -> dict[tuple[str, ...], list[tuple[int, float]]]:
    """Step and ``max`` of every row in the directory, by the ops of its file."""
    found: dict[tuple[str, ...], list[tuple[int, float]]] = {ops: [] for ops in OPS}
    for name in os.listdir(directory):
        table = read_csv(directory / name)
        found[tuple(table.column_names[3:])] += zip(table["step"].to_pylist(), table["max"].to_pylist(), strict=True)
    return {ops: sorted(rows) for ops, rows in found.items()}


class TestFaults:
    """Peers' fault 17: any error of the file system killed the run."""

    def test_a_step_is_in_the_files_of_all_kinds_or_of_none(self, rank: Rank, out: Path, file_size_limit) -> None:
        sink = CsvSink(rank.context)
        kinds = {"exp_avg": [Measured("w")], "grad_reduced": [Measured(f"w{i}") for i in range(100)]}
        write(sink, rank, 0, kinds=kinds)
        file_size_limit((out / ".grad_reduced_0-4.csv.part").stat().st_size + 5)
        with pytest.raises(OSError, match="large"):
            write(sink, rank, 1, kinds=kinds)
        file_size_limit(None)
        sink.close()
        assert steps_in(out / "exp_avg_0-4.csv") == [0]
        assert steps_in(out / "grad_reduced_0-4.csv") == [0] * 100

    def test_a_record_whose_first_step_did_not_fit_begins_with_the_next(self, rank: Rank, out: Path, file_size_limit) -> None:
        sink = CsvSink(rank.context)
        file_size_limit(len("vpp_stage,name,step,norm\n") + 5)
        with pytest.raises(OSError, match="large"):
            write(sink, rank, 0)
        file_size_limit(None)
        write(sink, rank, 1)
        sink.close()
        assert steps_in(out / "grad_reduced_0-4.csv") == [1]

    def test_too_many_open_files(self, rank: Rank, out: Path) -> None:
        resource = pytest.importorskip("resource")
        sink = CsvSink(rank.context)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                write(sink, rank, 0, kinds=BOTH)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        write(sink, rank, 1, kinds=BOTH)
        sink.close()
        assert [1] == steps_in(out / "grad_reduced_0-4.csv") == steps_in(out / "actv_0-4.csv")


def refuse(*_: object) -> None:
    raise PermissionError(1, "no")


ENDLESS = """
import itertools, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from sink_rows import Measured, Rank
from monitor.sinks.csv import CsvSink
rank = Rank(Path({out!r}), steps_per_record=3)
sink = CsvSink(rank.context)
for step in itertools.count():
    sink.write(rank.step(step, {{kind: [Measured(f"w\\n{{i}}") for i in range(200)] for kind in ("actv", "other")}}))
"""


def test_a_killed_process_loses_the_open_record_at_most(tmp_path: Path) -> None:
    for attempt in range(3):
        out = tmp_path / f"run{attempt}"
        program = ENDLESS.format(tests=str(Path(__file__).parent), out=str(out))
        process = subprocess.Popen([sys.executable, "-c", program], cwd=Path(monitor.sinks.__file__).parents[2])
        wait_for(lambda out=out, files=9 + attempt: out.exists() and len(visible(out)) >= files)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for kind in ("actv", "other"):
            steps = [step for path in out.glob(f"{kind}_*.csv") for step in steps_in(path)]
            assert sorted(list(range(max(steps) + 1)) * 200) == sorted(steps)


def wait_for(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class TestReading:
    def test_columns_have_the_types_of_what_they_hold(self, rank: Rank, out: Path) -> None:
        measured = [
            Measured("l.in", [1.0, math.nan], micro_step=0),
            Measured("l.out", [math.inf], micro_step=1),
            Measured("e", []),
        ]
        sink = CsvSink(rank.context)
        sink.write(rank.step(0, {"actv": measured}, ("mean", "nans", "infs", "shape", "dtype")))
        sink.close()
        table = read_csv(out / "actv_0-4.csv")
        types = ["int64", "string", "int64", "int64", "double", "int64", "int64", "string", "string"]
        assert types == [str(field.type) for field in table.schema]
        assert table["micro_step"].to_pylist() == [0, 1, None]
        mean = table["mean"].to_pylist()
        assert math.isnan(mean[0])
        assert [math.inf, None] == mean[1:]
        assert table["nans"].to_pylist() == [1, 0, 0]
        assert table["shape"].to_pylist() == ["[1, 2]", "[1, 1]", "[1, 0]"]

    def test_a_name_reads_as_it_was(self, rank: Rank, out: Path) -> None:
        names = ['a,"b"\nc', "", "nan", "NULL", "1.0", "ü"]
        sink = CsvSink(rank.context)
        write(sink, rank, 0, kinds={"other": [Measured(name) for name in names]})
        sink.close()
        assert names == read_csv(out / "other_0-4.csv")["name"].to_pylist()

    def test_the_standard_library_reads_the_same(self, rank: Rank, out: Path) -> None:
        sink = CsvSink(rank.context)
        write(sink, rank, 0, 1, kinds={"other": [Measured('a,"b"\nc', [0.5]), Measured("d", [])]}, ops=SIX_OPS)
        sink.close()
        with (out / "other_0-4.csv").open(newline="") as file:
            plain = [row["mean"] and float(row["mean"]) for row in csv.DictReader(file)]
        assert plain == [0.5, "", 0.5, ""]
        assert read_csv(out / "other_0-4.csv")["mean"].to_pylist() == [0.5, None, 0.5, None]

    def test_a_file_of_something_else_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "x_0-0.csv").write_text("step\nfive\n")
        with pytest.raises(pa.ArrowInvalid):
            read_csv(tmp_path / "x_0-0.csv")
