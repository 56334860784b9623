"""The structure of a model, after which the run ends, and the stacks from which its modules are called."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint
from watching import Output, attached, footprint, train

from monitor.pytorch import RunEnded
from monitor.recording.module_info import StructureCollector

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(7))


class Pair(nn.Module):
    """Takes two tensors, one by keyword, and gives a tensor and a number in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor, *, mask: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.inner(x.double()) * mask, 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pair = Pair()
        self.late = nn.Linear(3, 2, dtype=torch.float64)
        self.unused = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(6, 3, dtype=torch.bool)
        return self.late(self.pair(x, mask=mask)[0])


def structure(output: Output, rank: int = 0) -> dict[str, Any]:
    return json.loads((output.base / "module_struct" / f"rank{rank}" / "module_struct.json").read_text())


def stacks(output: Output) -> dict[str, str]:
    with open(output.directory() / "stack_info.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [list(row) for row in rows] == [["module_name", "stack_info"]] * len(rows)
    return {row["module_name"]: row["stack_info"] for row in rows}


def ended(output: Output, model: nn.Module, steps: int = 1, **config: Any) -> RunEnded:
    """Train until the run ends."""
    optimizer = SGD(model.parameters(), lr=0.1)
    attached(output, model, optimizer, print_struct=True, **config)
    with pytest.raises(RunEnded) as info:
        train(model, optimizer, steps, X)
    return info.value


class TestStructure:
    def test_it_describes_every_module_that_was_called_in_the_spelling_of_targets(self, output: Output) -> None:
        ended(output, Model())
        double, plain = "size=(6, 3), dtype=torch.float64", "size=(6, 5), dtype=torch.float32"
        last = {"config": "tensor", "tensor": "size=(6, 2), dtype=torch.float64"}
        assert structure(output) == {
            "0:pair.inner": {
                "input": {"config": "tuple[1]", "0": "size=(6, 5), dtype=torch.float64"},
                "output": {"config": "tensor", "tensor": double},
                "input_grad": {"config": "tuple[1]"},
                "output_grad": {"config": "tensor", "tensor": double},
            },
            "0:pair": {
                "input": {"config": "tuple[2]", "0": plain, "mask": "size=(6, 3), dtype=torch.bool"},
                "output": {"config": "tuple[2]", "0": double},
                "input_grad": {"config": "tuple[2]"},
                "output_grad": {"config": "tuple[2]", "0": double},
            },
            "0:late": {
                "input": {"config": "tuple[1]", "0": double},
                "output": last,
                "input_grad": {"config": "tuple[1]", "0": double},
                "output_grad": last,
            },
            "0:": {
                "input": {"config": "tuple[1]", "0": plain},
                "output": last,
                "input_grad": {"config": "tuple[1]"},
                "output_grad": last,
            },
        }

    def test_a_target_written_as_it_is_described_selects_what_was_described(self, output: Output) -> None:
        ended(output, Model())
        described = structure(output)["0:late"]
        targets = {"0:late": {side: described[side]["config"] for side in ("input", "output", "input_grad", "output_grad")}}
        model = Model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, xy_distribution=True, targets=targets):
            train(model, optimizer, 1, X)
        (recorded,) = [path for path in output.directories() if output.rows("actv", path)]
        assert [row.name for row in output.rows("actv", recorded)] == ["late.input", "late.output"]
        assert sorted(row.name for row in output.rows("actv_grad", recorded)) == ["late.input", "late.output"]

    def test_the_run_ends_with_the_first_step_with_status_0_and_every_hook_gone(self, output: Output) -> None:
        model = Model()
        optimizer = SGD(model.parameters(), lr=0.1)
        before, start = footprint(model, optimizer), model.late.weight.detach().clone()
        attached(output, model, optimizer, print_struct=True, wg_distribution=True)
        with pytest.raises(RunEnded, match=r"module_struct\.json") as info:
            train(model, optimizer, 3, X)
        assert info.value.code == 0
        assert not torch.equal(model.late.weight, start)
        assert footprint(model, optimizer) == before
        assert output.manifest()["closed"] is True
        assert {row.step for row in output.rows("grad_reduced")} == {0}

    @pytest.mark.parametrize("schedule", [{"collect_times": 0}, {"start_step": 50}, {"step_interval": 7}], ids=str)
    def test_which_steps_are_collected_makes_no_difference(self, output: Output, schedule: dict[str, int]) -> None:
        ended(output, Model(), **schedule)
        assert len(structure(output)) == 4

    def test_a_second_set_monitor_keeps_it_in_mind(self, output: Output) -> None:
        model = Model()
        optimizer = SGD(model.parameters(), lr=0.1)
        monitor = attached(output, model, optimizer, print_struct=True)
        monitor.set_monitor(model, 1, optimizer)
        with pytest.raises(RunEnded):
            train(model, optimizer, 1, X)
        assert len(structure(output)) == 4

    def test_recomputed_and_evaluated_calls_are_not_described(self, output: Output) -> None:
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
        optimizer = SGD(model.parameters(), lr=0.1)
        attached(output, model, optimizer, print_struct=True)
        model.eval()
        model(X[:2])
        model.train()
        checkpoint(model, X, use_reentrant=False).square().sum().backward()
        with pytest.raises(RunEnded):
            optimizer.step()
        assert {entry["input"]["0"] for entry in structure(output).values()} == {"size=(6, 5), dtype=torch.float32"}

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
    def test_scripted_parts_which_take_no_hooks_are_left_out(self, output: Output) -> None:
        model = nn.Sequential(nn.Linear(5, 5), torch.jit.script(nn.Linear(5, 3)))
        ended(output, model, stack_info=True)
        assert set(structure(output)) == {"0:", "0:0"}
        assert set(stacks(output)) == {"0:", "0:0"}

    def test_chunks_are_distinguished(self, output: Output) -> None:
        chunks = [nn.Sequential(nn.Linear(5, 5)), nn.Sequential(nn.Linear(5, 5))]
        optimizer = SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.1)
        attached(output, chunks, optimizer, print_struct=True)
        chunks[1](chunks[0](X)).sum().backward()
        with pytest.raises(RunEnded):
            optimizer.step()
        assert set(structure(output)) == {"0:", "0:0", "1:", "1:0"}

    def test_it_lies_under_its_rank_and_a_rank_that_is_not_monitored_ends_too(
        self, output: Output, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A rank that went on would wait for the others for ever."""
        monkeypatch.setenv("WORLD_SIZE", "4")
        dist.init_process_group("fake", rank=2, world_size=4, store=FakeStore())
        try:
            ended(output, Model(), module_ranks=[0], wg_distribution=True, xy_distribution=True, stack_info=True)
        finally:
            dist.destroy_process_group()
        assert len(structure(output, rank=2)) == 4
        assert sorted(path.name for path in output.directory().iterdir()) == ["manifest.json"]

    def test_a_structure_that_cannot_be_written_ends_the_run_all_the_same(
        self, output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(StructureCollector, "write", fail)
        assert "could not be written" in str(ended(output, Model()))
        assert any("No space left on device" in message for message in caplog.messages)


SCRIPT = """
import sys, torch
from torch import nn
from monitor.pytorch import TrainerMon
model = nn.Linear(5, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
TrainerMon(sys.argv[1], params_have_main_grad=False).set_monitor(model, 1, optimizer)
for step in range(5):
    try:
        model(torch.ones(3, 5)).sum().backward()
        optimizer.step()
    except Exception:
        pass
    print("after step", step)
"""


def structure_written(directory: Path) -> subprocess.CompletedProcess[str]:
    """A run of the script that the structure ended."""
    (directory / "config.json").write_text('{"print_struct": true}')
    command = [sys.executable, "-c", SCRIPT, str(directory / "config.json")]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_what_an_earlier_run_left_is_set_aside(output: Output, tmp_path: Path) -> None:
    structure_written(tmp_path)
    model = nn.Linear(7, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    attached(output, model, optimizer, print_struct=True)
    with pytest.raises(RunEnded):
        train(model, optimizer, 1, torch.ones(3, 7))
    assert structure(output)["0:"]["input"]["0"] == "size=(3, 7), dtype=torch.float32"
    (aside,) = output.base.glob("module_struct-before-*")
    assert "(3, 5)" in (aside / "rank0" / "module_struct.json").read_text()


def test_the_end_of_the_run_passes_through_a_script_that_catches_exceptions(output: Output, tmp_path: Path) -> None:
    ran = structure_written(tmp_path)
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
    assert "Traceback" not in ran.stderr
    assert "print_struct ends the run here" in ran.stderr
    assert set(structure(output)) == {"0:"}


def forward_from_here(model: nn.Module) -> torch.Tensor:
    return model(X)


class TestStacks:
    def test_they_hold_who_calls_each_module_without_machinery(self, output: Output) -> None:
        model = Model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, stack_info=True):
            forward_from_here(model).square().sum().backward()
            optimizer.step()
        found = stacks(output)
        assert set(found) == {"0:", "0:pair", "0:pair.inner", "0:late"}
        frames = found["0:pair.inner"].splitlines()
        assert [frame.split(", in ")[1].split(",")[0] for frame in frames[:4]] == [
            "forward",
            "forward",
            "forward_from_here",
            "test_they_hold_who_calls_each_module_without_machinery",
        ]
        assert frames[0].startswith(f"File {__file__}, line ")
        assert frames[0].endswith("in forward, return self.inner(x.double()) * mask, 1")
        assert not any("nn/modules/module.py" in frame or "/monitor/pytorch/" in frame for frame in frames)

    def test_they_are_of_the_first_step_whether_or_not_it_is_collected(self, output: Output) -> None:
        model = nn.Linear(5, 3)
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, stack_info=True, start_step=50):
            hooks = len(model._forward_pre_hooks)
            train(model, optimizer, 1, X)
            assert set(stacks(output)) == {"0:"}
            assert len(model._forward_pre_hooks) == hooks - 1

    def test_a_run_that_is_closed_within_its_first_step_has_them_too(self, output: Output) -> None:
        model = nn.Linear(5, 3)
        with attached(output, model, SGD(model.parameters(), lr=0.1), stack_info=True):
            forward_from_here(model)
        assert set(stacks(output)) == {"0:"}

    def test_they_are_taken_once(self, output: Output) -> None:
        model = nn.Linear(5, 3)
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, stack_info=True):
            train(model, optimizer, 1, X)
            first = (output.directory() / "stack_info.csv").read_bytes()
            forward_from_here(model).sum().backward()
            optimizer.step()
        assert (output.directory() / "stack_info.csv").read_bytes() == first

    def test_only_targets_have_one_where_there_are_targets(self, output: Output) -> None:
        model = Model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, stack_info=True, targets={"late": {}}):
            train(model, optimizer, 1, X)
        assert set(stacks(output)) == {"0:late"}

    def test_they_are_csv_whatever_the_format(self, output: Output) -> None:
        model = nn.Linear(5, 3)
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, stack_info=True, format="api"):
            train(model, optimizer, 1, X)
        assert set(stacks(output)) == {"0:"}

    def test_a_file_that_cannot_be_written_is_said_once_and_training_continues(
        self, output: Output, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = nn.Linear(5, 3)
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, stack_info=True):
            (output.directory() / "stack_info.csv").mkdir()
            train(model, optimizer, 3, X)
        assert len([message for message in caplog.messages if "stack_info.csv failed" in message]) == 1
