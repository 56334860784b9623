"""What the formats with one file for all kinds of a record share: files, steps written again, kills, full disks."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from evidence import examples
from hypothesis import given, settings, strategies as st
from sink_rows import Measured, Rank, visible
from spool_forms import BOTH, FORMS, Form, read, write

import monitor.sinks
from monitor.series import Series
from monitor.sinks.arrow import ShardMetadata
from monitor.sinks.files import RecoveredFiles, StepSpan
from monitor.sinks.spool import SpooledSink

ROOT = Path(monitor.sinks.__file__).parents[2]


def steps_in(path: Path) -> list[int]:
    return read(path)["step"].to_pylist()


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def form(request: pytest.FixtureRequest) -> Form:
    return request.param


class TestFiles:
    def test_a_file_holds_a_record_of_all_kinds(self, form: Form, rank: Rank, out: Path) -> None:
        write(form.sink(rank.context), rank, *range(10), kinds=BOTH)
        assert {form.file("0-4"), form.file("5-9")} == visible(out) == set(os.listdir(out))
        table = read(out / form.file("5-9"))
        assert table["kind"].to_pylist() == ["actv"] * 5 + ["grad_reduced"] * 5
        assert table["step"].to_pylist() == [5, 6, 7, 8, 9] * 2

    def test_a_step_beyond_the_record_completes_it(self, form: Form, rank: Rank, out: Path) -> None:
        write(form.sink(rank.context), rank, 3, 6)
        assert {form.file("0-4")} == visible(out)

    def test_closing_shows_everything_and_leaves_no_hidden_file(self, form: Form, rank: Rank, out: Path) -> None:
        sink = form.sink(rank.context)
        write(sink, rank, 0, 1, kinds=BOTH)
        sink.close()
        assert os.listdir(out) == [form.file("0-4")]

    def test_a_sink_that_wrote_nothing_makes_no_directory(self, form: Form, rank: Rank, out: Path) -> None:
        sink = form.sink(rank.context)
        write(sink, rank, 0, kinds={})
        sink.flush()
        sink.close()
        assert not out.exists()

    def test_one_file_is_open_at_most(self, form: Form, rank: Rank) -> None:
        before = len(os.listdir("/proc/self/fd"))
        sink = form.sink(rank.context)
        for steps in (range(1), range(1, 13)):
            write(sink, rank, *steps, kinds=BOTH)
            assert before + 1 == len(os.listdir("/proc/self/fd"))
        sink.close()
        assert before == len(os.listdir("/proc/self/fd"))


class TestUnion:
    def test_a_resumed_run_joins_the_record_of_the_earlier_process_with_its_own_numbers(
        self, form: Form, rank: Rank, out: Path
    ) -> None:
        first = form.sink(rank.context)
        first.write(replace(rank.step(0, {"other": [Measured("a"), Measured("b")]}), status="skipped"))
        write(first, rank, 1, kinds={"other": [Measured("b")]})
        first.close()
        resumed = Rank(out)
        resumed.series.index_of(Series("other", 0, "c"))
        second = form.sink(resumed.context)
        write(second, resumed, 2, kinds={"other": [Measured("c"), Measured("b")], "actv": [Measured("d", micro_step=1)]})
        second.close()
        table = read(out / form.file("0-4"))
        assert table["name"].to_pylist() == ["d", "a", "b", "b", "c", "b"]
        assert table["step"].to_pylist() == [2, 0, 0, 1, 2, 2]
        assert ShardMetadata.unpacked(table.schema.metadata).skipped == (0,)

    def test_a_step_written_again_replaces_its_rows_and_the_later_ones(self, form: Form, rank: Rank, out: Path) -> None:
        first = form.sink(rank.context)
        for step in range(5):
            first.write(replace(rank.step(step, {"other": [Measured("w", [1.0])]}), status="skipped"))
        again = form.sink(rank.context)
        write(again, rank, 2, 3, kinds={"other": [Measured("w", [9.0])]})
        again.close()
        table = read(out / form.file("0-4"))
        assert table["step"].to_pylist() == [0, 1, 2, 3]
        assert table["max"].to_pylist() == [1.0, 1.0, 9.0, 9.0]
        assert ShardMetadata.unpacked(table.schema.metadata).skipped == (0, 1)

    def test_a_kind_that_is_not_written_again_goes_too(self, form: Form, rank: Rank, out: Path) -> None:
        write(form.sink(rank.context), rank, *range(5), kinds=BOTH)
        sink = form.sink(rank.context)
        write(sink, rank, 3)
        sink.close()
        table = read(out / form.file("0-4"))
        assert list(zip(table["kind"].to_pylist(), table["step"].to_pylist(), strict=True)) == [
            *(("actv", step) for step in range(3)),
            *(("grad_reduced", step) for step in range(4)),
        ]

    @pytest.mark.parametrize(("text", "signatures"), [("", 0), ("notes\n", 0), ("", 1), ("", 200)])
    def test_a_file_that_is_not_ours_is_never_replaced(
        self, form: Form, rank: Rank, out: Path, text: str, signatures: int, capfd
    ) -> None:
        content = text.encode() + form.module.FORMAT.signature * signatures
        out.mkdir()
        (out / form.file("0-4")).write_bytes(content)
        (out / form.file("2-4")).write_bytes(content)
        write(form.sink(rank.context), rank, 2, 4)
        assert content == (out / form.file("0-4")).read_bytes() == (out / form.file("2-4")).read_bytes()
        assert steps_in(out / form.file("2-4.2")) == [2, 4]
        assert capfd.readouterr() == ("", "")

    def test_a_directory_in_the_way_is_gone_around(self, form: Form, rank: Rank, out: Path) -> None:
        (out / form.file("0-4")).mkdir(parents=True)
        write(form.sink(rank.context), rank, 2, 4)
        assert steps_in(out / form.file("2-4")) == [2, 4]

    def test_rows_counted_with_another_eps_have_a_file_of_their_own(self, form: Form, rank: Rank, out: Path) -> None:
        write(form.sink(rank.context), rank, *range(5))
        other = form.sink(replace(rank.context, eps=1e-6))
        write(other, rank, 3)
        other.close()
        assert {name: steps_in(out / name) for name in visible(out)} == {form.file("0-4"): [0, 1, 2], form.file("3-3"): [3]}

    def test_files_that_have_steps_in_turns_become_one_in_order(self, form: Form, rank: Rank, out: Path) -> None:
        write(form.sink(rank.context), rank, *range(5))
        shorter = Rank(out, steps_per_record=2)
        write(form.sink(shorter.context), shorter, 2, 3)
        sink = form.sink(rank.context)
        write(sink, rank, 4, kinds=BOTH)
        assert {name: steps_in(out / name) for name in os.listdir(out)} == {form.file("0-4"): [4, 0, 1, 2, 3, 4]}

    def test_a_record_of_another_length_gives_up_what_is_written_again(self, form: Form, rank: Rank, out: Path) -> None:
        write(form.sink(rank.context), rank, *range(5))
        shorter = Rank(out, steps_per_record=2)
        write(form.sink(shorter.context), shorter, 2, 3)
        assert {name: steps_in(out / name) for name in visible(out)} == {form.file("0-4"): [0, 1, 4], form.file("2-3"): [2, 3]}


class TestCut:
    """A record of very many rows, which no memory is to hold."""

    @pytest.fixture(autouse=True)
    def _small(self, form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
        form.limit(monkeypatch, 6000)

    def test_it_becomes_several_shards_called_after_their_steps(self, form: Form, tmp_path: Path) -> None:
        rank = Rank(tmp_path, steps_per_record=10)
        write(form.sink(rank.context), rank, *range(10))
        found = {name: steps_in(tmp_path / name) for name in visible(tmp_path)}
        assert len(found) > 2
        assert {form.file(f"{steps[0]}-{steps[-1]}") for steps in found.values()} == set(found)
        assert list(range(10)) == sorted(itertools.chain(*found.values()))

    def test_a_step_written_again_takes_out_the_shards_behind_it(self, form: Form, tmp_path: Path) -> None:
        rank = Rank(tmp_path, steps_per_record=10)
        write(form.sink(rank.context), rank, *range(10))
        again = form.sink(rank.context)
        write(again, rank, 1, kinds={"grad_reduced": [Measured("w", [9.0])]})
        again.close()
        tables = [read(tmp_path / name) for name in visible(tmp_path)]
        found = [(row["step"], row["max"]) for table in tables for row in table.to_pylist()]
        assert sorted(found) == [(0, 4.0), (1, 9.0)]


EPS = (1e-8, 1e-6)
events = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 8), st.sampled_from(EPS)),
        st.tuples(st.sampled_from(["flush", "restart", "die"])),
    ),
    max_size=20,
)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@settings(max_examples=examples(25, 100))
@given(events, st.sampled_from([1, 3, 5]), st.sampled_from([1, 1 << 26]))
def test_whatever_happens_the_files_hold_each_step_once(
    form: Form, happened: list[tuple], steps_per_record: int, most: int
) -> None:
    """Flushes, restarts, kills, steps that run back and thresholds that change, in any order, whether cut or not."""
    expected: dict[int, tuple[float, float]] = {}
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        form.limit(patch, most)
        rank = Rank(Path(directory), steps_per_record)
        sinks = {eps: form.sink(replace(rank.context, eps=eps)) for eps in EPS}
        at_work = sinks[EPS[0]]
        for number, (event, *arguments) in enumerate(happened):
            if event == "write":
                step, eps = arguments
                if sinks[eps] is not at_work:
                    at_work.close()
                    at_work = sinks[eps] = form.sink(replace(rank.context, eps=eps))
                at_work.write(rank.step(step, {"other": [Measured("w", [number])]}))
                end = step - step % steps_per_record + steps_per_record
                expected = {s: v for s, v in expected.items() if not step <= s < end} | {step: (float(number), eps)}
            elif event == "flush":
                at_work.flush()
            else:
                at_work.close() if event == "restart" else abandon(at_work)
                form.module.recover(Path(directory), -1, 0, 0)
                sinks = {eps: form.sink(replace(rank.context, eps=eps)) for eps in EPS}
                at_work = sinks[EPS[0]]
        at_work.close()
        assert expected == found_in(Path(directory))
        assert set(expected) == form.module.held(Path(directory), StepSpan(0, 8))


def abandon(sink: SpooledSink) -> None:
    """As a kill does: what is written is written, and its files are no longer open."""
    part = sink._shards._part
    if part is not None:
        os.close(part.file._open_file())


def found_in(directory: Path) -> dict[int, tuple[float, float]]:
    """``max`` and eps of every step in the directory; a step that stands twice fails."""
    found: dict[int, tuple[float, float]] = {}
    for name in os.listdir(directory):
        table = read(directory / name)
        eps = ShardMetadata.unpacked(table.schema.metadata).eps
        for row in table.to_pylist():
            assert row["step"] not in found
            found[row["step"]] = row["max"], eps
    return found


class TestLeftBehind:
    """What a killed process had in the making."""

    def test_its_steps_become_visible_and_can_be_gone_on_with(self, form: Form, rank: Rank, out: Path) -> None:
        write(form.sink(rank.context), rank, 0, 1, 2)
        assert form.module.recover(out, -1, 0, 0) == RecoveredFiles({StepSpan(0, 4)}, set(), [])
        assert steps_in(out / form.file("0-4")) == [0, 1, 2]
        sink = form.sink(rank.context)
        write(sink, rank, 2, kinds={"grad_reduced": [Measured("w", [9.0])]})
        sink.close()
        assert os.listdir(out) == [form.file("0-4")]
        assert read(out / form.file("0-4"))["max"].to_pylist() == [4.0, 4.0, 9.0]

    def test_files_that_have_changed_since_are_reported_and_no_others(self, form: Form, rank: Rank, out: Path) -> None:
        write(form.sink(rank.context), rank, 4, 9, 14, 15)
        for number, name in enumerate((form.file("0-4"), form.file("5-9"), form.file("10-14"))):
            os.utime(out / name, ns=(number, number))
        assert form.module.recover(out, 9, 2, 0).ranges == {StepSpan(10, 14), StepSpan(15, 19)}
        assert form.module.held(out, StepSpan(10, 19)) == {14, 15}

    def test_a_step_that_is_not_whole_is_left_out(self, form: Form, rank: Rank, out: Path) -> None:
        write(form.sink(rank.context), rank, 0, 1)
        part = out / form.part("0-4")
        with part.open("r+b") as file:
            file.truncate(part.stat().st_size - 1)
        form.module.recover(out, -1, 0, 0)
        write(form.sink(rank.context), rank, 3, 4)
        assert steps_in(out / form.file("0-4")) == [0, 3, 4]

    def test_what_was_to_be_written_again_stays_where_nothing_was(self, form: Form, rank: Rank, out: Path) -> None:
        write(form.sink(rank.context), rank, *range(5))
        write(form.sink(rank.context), rank, 3, kinds={"grad_reduced": [Measured("w", [9.0])]})
        part = out / form.part("0-4")
        with part.open("r+b") as file:
            file.truncate(part.stat().st_size - 1)
        form.module.recover(out, -1, 0, 0)
        assert {name: steps_in(out / name) for name in os.listdir(out)} == {form.file("0-4"): [0, 1, 2, 3, 4]}

    def test_rows_with_another_eps_between_those_of_the_part_stay(self, form: Form, rank: Rank, out: Path) -> None:
        for step, eps in ((0, 1e-8), (1, 1e-6)):
            sink = form.sink(replace(rank.context, eps=eps))
            write(sink, rank, step)
            sink.close()
        write(form.sink(rank.context), rank, 2)
        form.module.recover(out, -1, 0, 0)
        assert {step: eps for step, (_, eps) in found_in(out).items()} == {0: 1e-8, 1: 1e-6, 2: 1e-8}

    @pytest.mark.parametrize("content", [b"", b"\0" * 1000], ids=len)
    def test_a_part_that_holds_nothing_goes(self, form: Form, out: Path, content: bytes) -> None:
        out.mkdir()
        (out / form.part("0-4")).write_bytes(content)
        assert form.module.recover(out, -1, 0, 0) == RecoveredFiles({StepSpan(0, 4)}, set(), [])
        assert os.listdir(out) == []

    def test_a_damaged_shard_is_set_aside(self, form: Form, rank: Rank, out: Path) -> None:
        write(form.sink(rank.context), rank, 4)
        content = (out / form.file("0-4")).read_bytes()[:-1000]
        (out / form.file("0-4")).unlink()
        (out / form.part("0-4")).write_bytes(content)
        assert form.module.recover(out, -1, 0, 0).aside == [out / (form.file("0-4") + ".damaged")]
        assert (out / (form.file("0-4") + ".damaged")).read_bytes() == content

    def test_a_draft_goes(self, form: Form, rank: Rank, out: Path) -> None:
        write(form.sink(rank.context), rank, 4)
        (out / (form.part("0-4") + ".draft")).write_bytes(b"half")
        form.module.recover(out, -1, 0, 0)
        assert os.listdir(out) == [form.file("0-4")]

    def test_a_shard_that_only_lacked_its_name_gets_it(self, form: Form, rank: Rank, out: Path) -> None:
        write(form.sink(rank.context), rank, 4)
        os.replace(out / form.file("0-4"), out / form.part("0-4"))
        form.module.recover(out, -1, 0, 0)
        assert {name: steps_in(out / name) for name in os.listdir(out)} == {form.file("0-4"): [4]}


class TestFaults:
    def test_a_disk_too_full_for_the_shard_keeps_the_steps_until_there_is_room(
        self, form: Form, rank: Rank, out: Path, file_size_limit
    ) -> None:
        sink = form.sink(rank.context)
        write(sink, rank, 0)
        file_size_limit((out / form.part("0-4")).stat().st_size)
        with pytest.raises(OSError, match="large"):
            sink.flush()
        with pytest.raises(OSError, match="large"):
            write(sink, rank, 1)
        assert os.listdir(out) == [form.part("0-4")]
        file_size_limit(None)
        write(sink, rank, 2)
        sink.close()
        assert steps_in(out / form.file("0-4")) == [0, 2]

    def test_what_is_to_be_written_again_stays_until_it_is(self, form: Form, rank: Rank, out: Path, file_size_limit) -> None:
        write(form.sink(rank.context), rank, *range(5))
        sink = form.sink(rank.context)
        file_size_limit(10)
        with pytest.raises(OSError, match="large"):
            write(sink, rank, 2)
        file_size_limit(None)
        sink.close()
        assert steps_in(out / form.file("0-4")) == [0, 1, 2, 3, 4]

    def test_what_no_shard_can_be_made_of_does_not_keep_the_next_ones_from_being_written(
        self, form: Form, rank: Rank, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(form.module, "FORMAT", replace(form.module.FORMAT, image=fail))
            sink = form.sink(rank.context)
            write(sink, rank, 0)
            lost = f"its steps could not be written as {form.module.FORMAT.called} and are lost: RuntimeError"
            with pytest.raises(OSError, match=lost):
                sink.flush()
            assert os.listdir(out) == []
        sink = form.sink(rank.context)
        write(sink, rank, 1, 4)
        assert steps_in(out / form.file("0-4")) == [1, 4]


def fail(*_: object) -> None:
    raise RuntimeError("no")


ENDLESS = """
import itertools, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from sink_rows import Measured, Rank
from monitor.sinks import make_sink
rank = Rank(Path({out!r}), steps_per_record=3)
sink = make_sink({name!r}, rank.context)
for step in itertools.count():
    sink.write(rank.step(step, {{kind: [Measured(f"w{{i}}") for i in range(200)] for kind in ("actv", "other")}}))
"""


@pytest.mark.parametrize("name", FORMS)
def test_a_killed_process_leaves_whole_shards_and_loses_nothing_once_they_are_put_in_order(tmp_path: Path, name: str) -> None:
    for attempt in range(3):
        out = tmp_path / f"run{attempt}"
        program = ENDLESS.format(tests=str(Path(__file__).parent), out=str(out), name=name)
        process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
        wait_for(lambda out=out, files=4 + attempt: out.exists() and len(visible(out)) >= files)
        process.send_signal(signal.SIGKILL)
        process.wait()
        steps = [step for name in visible(out) for step in steps_in(out / name)]
        assert sorted(list(range(max(steps) + 1)) * 400) == sorted(steps)
        FORMS[name].module.recover(out, -1, 0, 0)
        again = [step for name in os.listdir(out) for step in steps_in(out / name)]
        assert sorted(list(range(max(again) + 1)) * 400) == sorted(again)
        assert len(steps) <= len(again)


def wait_for(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
