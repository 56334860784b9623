from __future__ import annotations

import math
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from sink_rows import SIX_OPS, Measured, Rank
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event

import monitor.sinks
from monitor.series import Series
from monitor.sinks import tensorboard
from monitor.sinks.tensorboard import TensorBoardSink
from monitor.stats.partials import TensorLayout

W = {"grad_reduced": [Measured("w")]}
ROOT = Path(monitor.sinks.__file__).parents[2]


class Scalar(NamedTuple):
    step: int
    value: float


def write(sink: TensorBoardSink, rank: Rank, *steps: int, ops: tuple[str, ...] = ("norm",), kinds: dict = W) -> None:
    for step in steps:
        sink.write(rank.step(step, kinds, ops))


def scalars(directory: Path) -> dict[str, list[Scalar]]:
    """What TensorBoard shows of a directory."""
    run = EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    run.Reload()
    return {tag: [Scalar(one.step, one.value) for one in run.Scalars(tag)] for tag in run.Tags()["scalars"]}


def events(path: Path) -> list[Event]:
    return [Event.FromString(raw) for raw in RawEventFileLoader(str(path)).Load()]


def only_file(directory: Path) -> Path:
    (name,) = os.listdir(directory)
    return directory / name


class TestContent:
    def test_tensorboard_shows_each_op_of_each_tensor_over_steps(self, rank: Rank, out: Path) -> None:
        write(TensorBoardSink(rank.context), rank, 0, 1, 5, ops=("norm", "max"))
        assert scalars(out) == {
            "0:w/rank0/grad_reduced_norm": [(0, 5.0), (1, 5.0), (5, 5.0)],
            "0:w/rank0/grad_reduced_max": [(0, 4.0), (1, 4.0), (5, 4.0)],
        }

    def test_tags_are_those_of_the_series(self, rank: Rank, out: Path) -> None:
        kinds = {
            "actv": [Measured("l.input_0#1", micro_step=0), Measured("l.input_0#1", micro_step=12), Measured("l.output")],
            "grad_unreduced": [Measured('a,"b"\nü', micro_step=1, vpp_stage=3), Measured("x" * 300)],
            "exp_avg": [Measured("")],
        }
        write(TensorBoardSink(rank.context), rank, 0, kinds=kinds, ops=SIX_OPS)
        tags = {
            f"{Series(kind, one.vpp_stage, one.name).tag(0, one.micro_step)}_{op}"
            for kind, measured in kinds.items()
            for one in measured
            for op in SIX_OPS
        }
        assert "0:l.input_0#1:12/rank0/actv_norm" in tags
        assert tags == set(scalars(out))

    def test_nan_and_inf_are_written_and_what_has_no_value_is_not(self, rank: Rank, out: Path) -> None:
        measured = [Measured("n", [math.nan]), Measured("i", [math.inf]), Measured("m", [-math.inf]), Measured("e", [])]
        write(TensorBoardSink(rank.context), rank, 0, kinds={"other": measured}, ops=("mean", "nans"))
        found = {tag: one[0].value for tag, one in scalars(out).items()}
        assert math.isnan(found.pop("0:n/rank0/other_mean"))
        assert found == {
            "0:i/rank0/other_mean": math.inf,
            "0:m/rank0/other_mean": -math.inf,
            **{f"0:{name}/rank0/other_nans": float(name == "n") for name in "nime"},
        }

    def test_what_single_precision_cannot_hold_is_missing_and_not_infinite(self, rank: Rank, out: Path) -> None:
        kinds = {"other": [Measured("w", [1e100, -1.0]), Measured("v", [0.1])]}
        write(TensorBoardSink(rank.context), rank, 0, kinds=kinds, ops=("max", "min"))
        tenth = float(np.float32(0.1))
        assert scalars(out) == {
            "0:w/rank0/other_min": [(0, -1.0)],
            "0:v/rank0/other_max": [(0, tenth)],
            "0:v/rank0/other_min": [(0, tenth)],
        }

    def test_shapes_and_dtypes_are_no_scalars(self, rank: Rank, out: Path) -> None:
        rank.layouts.append(TensorLayout((1,), "torch.bfloat16"))
        write(TensorBoardSink(rank.context), rank, 0, ops=("shape", "nans", "dtype"))
        assert set(scalars(out)) == {"0:w/rank0/grad_reduced_nans"}

    def test_of_replicas_the_norm_is_written(self, rank: Rank, out: Path) -> None:
        write(TensorBoardSink(rank.context), rank, 0, kinds={"replica": [Measured("param_origin/w")]}, ops=("max",))
        assert set(scalars(out)) == {"0:param_origin/w/rank0/replica_norm"}

    def test_a_step_is_one_event_with_its_time(self, rank: Rank, out: Path) -> None:
        begun = time.time()
        sink = TensorBoardSink(rank.context)
        kinds = {kind: [Measured(f"w{i}") for i in range(50)] for kind in ("actv", "exp_avg", "grad_reduced")}
        write(sink, rank, 3, 4, kinds=kinds, ops=SIX_OPS)
        version, start, *steps = events(only_file(out))
        assert version.file_version == "brain.Event:2"
        assert start.session_log.status == start.session_log.START
        assert [(one.step, len(one.summary.value)) for one in steps] == [(3, 900), (4, 900)]
        assert begun <= steps[0].wall_time <= steps[1].wall_time <= time.time()

    def test_a_step_of_very_many_rows_is_several_events_of_that_step(
        self, rank: Rank, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tensorboard, "MOST_BYTES", 600)
        write(TensorBoardSink(rank.context), rank, 7, kinds={"actv": [Measured(f"w{i}") for i in range(10)]}, ops=SIX_OPS)
        _, _, *steps = events(only_file(out))
        assert {one.step for one in steps} == {7}
        assert len(steps) > 2
        assert sum(len(one.summary.value) for one in steps) == 60

    def test_a_step_without_rows_leaves_no_event(self, rank: Rank, out: Path) -> None:
        sink = TensorBoardSink(rank.context)
        write(sink, rank, 0)
        write(sink, rank, 1, kinds={})
        assert len(events(only_file(out))) == 3


class TestFiles:
    def test_a_step_can_be_read_at_once(self, rank: Rank, out: Path) -> None:
        sink = TensorBoardSink(rank.context)
        for step in range(3):
            write(sink, rank, step)
            assert [one.step for one in scalars(out)["0:w/rank0/grad_reduced_norm"]] == list(range(step + 1))

    def test_a_resumed_run_adds_a_file_and_the_runs_are_shown_as_one(self, rank: Rank, out: Path) -> None:
        for steps in ((0, 1, 2), (3, 4)):
            sink = TensorBoardSink(rank.context)
            write(sink, rank, *steps)
            sink.close()
        assert len(os.listdir(out)) == 2
        assert [one.step for one in scalars(out)["0:w/rank0/grad_reduced_norm"]] == [0, 1, 2, 3, 4]

    def test_of_a_step_written_again_the_new_one_is_shown_and_none_of_the_old_ones_behind_it(
        self, rank: Rank, out: Path
    ) -> None:
        write(TensorBoardSink(rank.context), rank, 0, 1, 2, 3, ops=("max",))
        again = TensorBoardSink(rank.context)
        write(again, rank, 1, ops=("max",), kinds={"grad_reduced": [Measured("w", [9.0])]})
        write(again, rank, 2, ops=("max",), kinds={"grad_reduced": [Measured("w", [8.0])]})
        write(again, rank, 2, ops=("max",), kinds={"grad_reduced": [Measured("w", [7.0])]})
        assert scalars(out) == {"0:w/rank0/grad_reduced_max": [(0, 4.0), (1, 9.0), (2, 7.0)]}


class TestFaults:
    def test_a_torn_record_at_the_end_hides_nothing_before_it(self, rank: Rank, out: Path) -> None:
        sink = TensorBoardSink(rank.context)
        write(sink, rank, 0, 1, 2)
        sink.close()
        path = only_file(out)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 10)
        assert [one.step for one in scalars(out)["0:w/rank0/grad_reduced_norm"]] == [0, 1]


ENDLESS = """
import itertools, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from sink_rows import Measured, Rank
from monitor.sinks.tensorboard import TensorBoardSink
rank = Rank(Path({out!r}))
sink = TensorBoardSink(rank.context)
for step in itertools.count():
    sink.write(rank.step(step, {{"actv": [Measured(f"w{{i}}") for i in range(200)]}}))
"""


def test_a_killed_process_leaves_whole_steps(tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", ENDLESS.format(tests=str(Path(__file__).parent), out=str(out))], cwd=ROOT)
    end = time.monotonic() + 30
    while not (out.exists() and os.listdir(out) and only_file(out).stat().st_size > 1_000_000):
        assert time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, _, *steps = events(only_file(out))
    assert [(one.step, len(one.summary.value)) for one in steps] == [(i, 1200) for i in range(len(steps))]


def test_the_package_reads_the_checksums_that_were_written(rank: Rank, out: Path) -> None:
    """Records long enough for all that the checksum does."""
    sink = TensorBoardSink(rank.context)
    for step, rows in enumerate((1, 10, 100, 1000)):
        write(sink, rank, step, kinds={"actv": [Measured(f"w{i}") for i in range(rows)]})
    content = only_file(out).read_bytes()
    lengths, place = [], 0
    while place < len(content):
        (length,) = struct.unpack_from("<Q", content, place)
        lengths.append(length)
        place += 8 + 4 + length + 4
    assert [len(one.summary.value) for one in events(only_file(out))] == [0, 0, 1, 10, 100, 1000]
    assert lengths == [one.ByteSize() for one in events(only_file(out))]
