"""What was dumped before a process was killed is there; and two ranks write beside each other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from dumping import Dump
from launching import Launcher, Nursery, Started
from typer.testing import CliRunner

from monitor.dump.cli import app
from monitor.dump.files import DATA, FILE, LONGEST

KILLED = """
import os, signal, sys, time
import torch, torch.nn.functional as F
from pathlib import Path
from monitor.dump.files import FILE
from monitor.pytorch import PrecisionDebugger

debugger = PrecisionDebugger(dump_path=sys.argv[1], task=sys.argv[2])
debugger.start(rank_id=0)
for n in range(20):
    F.relu(torch.full((3,), float(n)))
records = Path(sys.argv[1]) / "step0" / "rank0" / FILE
while b"relu.19" not in records.read_bytes():
    time.sleep(0.01)
if sys.argv[3] == "torn":
    with open(records, "ab") as file:
        file.write(b'00000000 {"entry": "half of')
os.kill(os.getpid(), signal.SIGKILL)
"""

EXITS = """
import sys
import torch, torch.nn.functional as F
from monitor.pytorch import PrecisionDebugger

debugger = PrecisionDebugger(dump_path=sys.argv[1])
debugger.start(rank_id=0)
F.relu(torch.ones(3))
"""

RANKS = """
import os, sys
import torch, torch.distributed as dist
from monitor.pytorch import PrecisionDebugger

rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
debugger = PrecisionDebugger(dump_path=sys.argv[1] + "/out")
debugger.start()
x = torch.full((2,), float(rank + 1))
dist.all_reduce(x)
gathered = [torch.zeros(2), torch.zeros(2)]
dist.all_gather(gathered, x)
debugger.stop()
debugger.step()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory.mktemp("processes"), nursery)
    yield launcher
    assert launcher.clean_up() == ([], [])


def started(launcher: Launcher, script: str, *arguments: object) -> Started:
    path = launcher.base.with_name(f"{zlib.crc32(script.encode())}.py")
    path.write_text(script)
    return launcher.start(str(path), *arguments)


@pytest.fixture(scope="module")
def exited(tmp_path_factory: pytest.TempPathFactory, launcher: Launcher) -> Path:
    """Where a process has dumped that ended without ``stop``."""
    directory = tmp_path_factory.mktemp("exited")
    assert started(launcher, EXITS, directory).end().status == 0
    return directory


def assert_recovered(directory: Path) -> None:
    outcome = CliRunner().invoke(app, [str(directory)])
    assert outcome.exit_code == 0, outcome.output
    dump = Dump(directory)
    assert list(dump.data) == [f"Functional.relu.{n}.forward" for n in range(20)]
    assert [entry["output"][0]["Max"] for entry in dump.data.values()] == list(range(20))
    assert not (dump.directory / FILE).exists()
    assert len(dump.stack) == 1


def test_what_a_killed_process_had_dumped_is_recovered(tmp_path: Path, launcher: Launcher) -> None:
    assert started(launcher, KILLED, tmp_path, "tensor", "torn").end().status == -signal.SIGKILL
    assert_recovered(tmp_path)


def test_a_complete_dump_outlives_a_second_run_that_is_killed_and_the_recovery_of_that(
    exited: Path, tmp_path: Path, launcher: Launcher
) -> None:
    shutil.copytree(exited, tmp_path, dirs_exist_ok=True)
    complete = (tmp_path / "step0" / "rank0" / "dump.json").read_bytes()
    assert started(launcher, KILLED, tmp_path, "statistics", "whole").end().status == -signal.SIGKILL
    assert_recovered(tmp_path)
    assert (tmp_path / "step0.left1" / "rank0" / "dump.json").read_bytes() == complete


def left_behind(directory: Path) -> Path:
    """The records of one entry."""
    directory.mkdir(parents=True)
    record = json.dumps({"entry": "a", "at": 0, "parent": None, "stack": None, "content": {"Max": 1.0}}).encode()
    (directory / FILE).write_bytes(f"{zlib.crc32(record):08x} ".encode() + record + b"\n")
    return directory


def test_recovery_replaces_no_file_that_has_other_entries(tmp_path: Path) -> None:
    directory = left_behind(tmp_path / "step0" / "rank0")
    for data, status in (({"b": 1}, 1), ({"a": {"Max": 2.0}}, 1), ({"a": {"Max": 1.0}}, 0)):
        (directory / "dump.json").write_text(json.dumps({"data": data}))
        outcome = CliRunner().invoke(app, [str(tmp_path)])
        assert outcome.exit_code == status, outcome.output
        assert json.loads((directory / "dump.json").read_text())["data"] == data
        assert (directory / FILE).exists() == bool(status)


def test_recovery_follows_no_link(tmp_path: Path) -> None:
    directory, outside = left_behind(tmp_path / "dump" / "step0" / "rank0"), tmp_path / "outside"
    outside.mkdir()
    (outside / ".a.npy.01234567").write_text("kept")
    (directory / DATA).symlink_to(outside)
    assert CliRunner().invoke(app, [str(tmp_path / "dump")]).exit_code == 0
    assert (outside / ".a.npy.01234567").read_text() == "kept"


def test_recovery_opens_regular_files_only(tmp_path: Path) -> None:
    for step, make in enumerate((os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir)):
        directory = tmp_path / f"step{step}" / "rank0"
        directory.mkdir(parents=True)
        make(directory / FILE)
    left_behind(tmp_path / "step3" / "rank0")
    outcome = CliRunner().invoke(app, [str(tmp_path)])
    assert outcome.exit_code == 1
    assert outcome.output.count("left as it is") == 3
    assert (tmp_path / "step3" / "rank0" / "dump.json").exists()


def test_records_that_are_no_dump_are_left_as_they_are(tmp_path: Path) -> None:
    (directory := tmp_path / "step0" / "rank0").mkdir(parents=True)
    for content in (b"7", b'"entry"', b"[]", b'{"header": 3, "entry": 4}', b"[" * 100_000):
        (directory / FILE).write_bytes(f"{zlib.crc32(content):08x} ".encode() + content + b"\n")
        outcome = CliRunner().invoke(app, [str(tmp_path)])
        assert outcome.exit_code == 1, outcome.output
        assert (directory / FILE).exists()


def line(number: int, content: object = 1.0) -> bytes:
    record = json.dumps({"entry": f"a{number}", "at": number, "parent": None, "stack": None, "content": content}).encode()
    return f"{zlib.crc32(record):08x} ".encode() + record + b"\n"


LINES = [line(number) for number in range(5)]


@pytest.mark.parametrize(
    ("records", "names"),
    [
        ([*LINES[:2], LINES[2].replace(b'"a2"', b'"b2"'), *LINES[3:]], ["a0", "a1", "a3", "a4"]),
        ([*LINES[:4], LINES[4].replace(b'"a4"', b'"b4"')], ["a0", "a1", "a2", "a3"]),
        ([*LINES[:2], line(2, "x" * LONGEST), *LINES[3:]], ["a0", "a1", "a3", "a4"]),
        ([*LINES[:2], LINES[2][:9] + bytes(3 * len(LINES[2])) + LINES[2][20:], *LINES[3:]], ["a0", "a1", "a3", "a4"]),
        ([*LINES[:2], b"\n", *LINES[3:]], ["a0", "a1", "a3", "a4"]),
        ([*LINES[:2], bytes(4096)], ["a0", "a1"]),
        ([*LINES[:2], b"0" * (LONGEST + 1)], ["a0", "a1"]),
    ],
    ids=[
        "flipped byte",
        "flipped byte in the last line",
        "over the bound",
        "zeros",
        "lost line",
        "zeros at the end",
        "endless line",
    ],
)
def test_damaged_records_cost_no_others_and_are_said_and_kept(tmp_path: Path, records: list[bytes], names: list[str]) -> None:
    (directory := tmp_path / "step0" / "rank0").mkdir(parents=True)
    (directory / FILE).write_bytes(content := b"".join(records))
    for _ in range(2):
        outcome = CliRunner().invoke(app, [str(tmp_path)])
        assert outcome.exit_code == 1, outcome.output
        assert "1 damaged line was" in outcome.output
        assert list(json.loads((directory / "dump.json").read_text())["data"]) == names
        assert (directory / FILE).read_bytes() == content


def test_a_line_that_a_killed_process_was_writing_is_no_damage(tmp_path: Path) -> None:
    (directory := tmp_path / "step0" / "rank0").mkdir(parents=True)
    for end in (1, 9, len(LINES[2]) - 1):
        (directory / FILE).write_bytes(b"".join(LINES[:2]) + LINES[2][:end])
        outcome = CliRunner().invoke(app, [str(tmp_path)])
        assert outcome.exit_code == 0, outcome.output
        assert list(json.loads((directory / "dump.json").read_text())["data"]) == ["a0", "a1"]
        assert not (directory / FILE).exists()


def test_a_process_that_ends_without_stop_has_complete_files(exited: Path) -> None:
    dump = Dump(exited)
    assert list(dump.data) == ["Functional.relu.0.forward"]
    assert not (dump.directory / FILE).exists()


def test_two_ranks_have_a_directory_each_and_what_they_have_sent_and_received(tmp_path: Path, launcher: Launcher) -> None:
    ranks = [started(launcher, RANKS, tmp_path, rank) for rank in range(2)]
    assert [rank.end().status for rank in ranks] == [0, 0]
    for rank in range(2):
        directory = tmp_path / "out" / "step0" / f"rank{rank}"
        data = json.loads((directory / "dump.json").read_text())["data"]
        reduced, gathered = data["Distributed.all_reduce.0.forward"], data["Distributed.all_gather.0.forward"]
        assert reduced["input_args"][0]["Max"] == rank + 1
        assert reduced["output"][0]["Max"] == 3.0
        assert [leaf["Max"] for leaf in gathered["output"][0]] == [3.0, 3.0]
