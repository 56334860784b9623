"""``TrainerMon``: construction, arguments, what it says, what it gives back, and that nothing of it stays behind."""

from __future__ import annotations

import copy
import gc
import io
import json
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore
from watching import EVERYTHING, Output, attached, footprint, train, warnings_in

from monitor.config import ConfigError
from monitor.coordinator.manifest_format import read_manifest
from monitor.coordinator.output import OutputError
from monitor.pytorch import TrainerMon
from monitor.pytorch.tensor_reader import TorchTensorReader
from monitor.recording.recorder import Recorder
from monitor.sinks.csv import CsvSink

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(7))
GRADIENTS: dict[str, Any] = {"wg_distribution": True, "ops": ["norm", "max"]}


def small_model(layers: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(5, 5) for _ in range(layers)), nn.Tanh(), nn.Linear(5, 3))


def config_at(path: Path, **config: Any) -> Path:
    path.write_text(json.dumps(config))
    return path


class TestConstruction:
    def test_it_may_come_before_the_process_group(
        self, output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Name and directory are settled at the first record, when the rank is known."""
        monkeypatch.setenv("WORLD_SIZE", "2")
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with TrainerMon(config_at(tmp_path / "c.json", **GRADIENTS), params_have_main_grad=False) as monitor:
            monitor.set_monitor(model, 1, optimizer)
            assert monitor.generate_wgrad_metrics() == ({}, {})
            assert output.directories() == []
            dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
            try:
                train(model, optimizer, 1, X)
            finally:
                dist.destroy_process_group()
        assert "-rank1-" in output.directory().name
        manifest = output.manifest()
        assert (manifest["rank"], manifest["world_size"], manifest["steps"]["written"]["count"]) == (1, 2, 1)

    def test_a_tilde_in_the_output_directory_and_in_the_path_of_the_configuration_is_the_home_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("MONITOR_OUTPUT_DIR", "~/runs/today")
        config_at(tmp_path / "c.json", **GRADIENTS)
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with TrainerMon("~/c.json", params_have_main_grad=False) as monitor:
            monitor.set_monitor(model, 1, optimizer)
            train(model, optimizer, 1, X)
        assert len(list((tmp_path / "runs" / "today").glob("*-rank0-*/grad_reduced_0-0.csv"))) == 1

    def test_a_script_that_changes_its_directory_later_does_not_move_its_output(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("MONITOR_OUTPUT_DIR", "here")
        monitor = TrainerMon(config_at(tmp_path / "c.json", **GRADIENTS), params_have_main_grad=False)
        monkeypatch.chdir(tmp_path / "elsewhere")
        model = small_model()
        monitor.set_monitor(model, 1, SGD(model.parameters(), lr=0.1))
        monitor.close()
        assert [path.parent for path in tmp_path.rglob("manifest.json")] == list((tmp_path / "here").glob("*-rank0-*"))

    def test_a_configuration_that_cannot_be_used_is_one_error(self, output: Output, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="wg_distribution"):
            TrainerMon(config_at(tmp_path / "c.json", wg_distributon=True))
        assert output.directories() == []

    def test_an_output_directory_that_cannot_be_made_is_one_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("MONITOR_OUTPUT_DIR", str(tmp_path / "file" / "below"))
        with pytest.raises(OutputError, match="below"):
            TrainerMon(config_at(tmp_path / "c.json", **GRADIENTS))

    @pytest.mark.usefixtures("output")
    def test_opt_ty_of_older_scripts_is_accepted_and_ignored(self, tmp_path: Path) -> None:
        with pytest.warns(DeprecationWarning, match="opt_ty is ignored"):
            TrainerMon(config_at(tmp_path / "c.json"), opt_ty="Megatron_DistributedOptimizer")


class TestOps:
    def test_a_change_holds_from_the_step_in_progress_on_in_a_file_of_its_own(self, output: Output) -> None:
        """Peers, fault 11: the old header was left over other columns."""
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, step_count_per_record=4, **GRADIENTS) as monitor:
            train(model, optimizer, 2, X)
            monitor.ops = ["nans", "min"]
            train(model, optimizer, 2, X)
        rows = output.rows("grad_reduced")
        assert [set(row.values) for row in rows] == [{"norm", "max"}] * 8 + [{"nans", "min"}] * 8
        assert [row.step for row in rows[::4]] == [0, 1, 2, 3]

    def test_an_unknown_one_is_named_in_a_warning_and_left_out(self, output: Output, caplog: pytest.LogCaptureFixture) -> None:
        model = small_model()
        with attached(output, model, SGD(model.parameters(), lr=0.1), ops=["median", "max"], wg_distribution=True) as monitor:
            assert monitor.ops == ("max",)
        (said,) = warnings_in(caplog)
        assert "median" in said

    def test_with_none_left_it_is_norm_and_a_warning_says_so(self, output: Output, caplog: pytest.LogCaptureFixture) -> None:
        model = small_model()
        with attached(output, model, SGD(model.parameters(), lr=0.1), ops=["max"], wg_distribution=True) as monitor:
            monitor.ops = ["median"]
            assert monitor.ops == ("norm",)
        (said,) = warnings_in(caplog)
        assert "median" in said
        assert "norm" in said

    def test_a_lone_name_is_a_list_of_one(self, output: Output) -> None:
        model = small_model()
        with attached(output, model, SGD(model.parameters(), lr=0.1)) as monitor:
            monitor.ops = "mean"
            assert monitor.ops == ("mean",)


class TestReloadXy:
    def test_activations_are_recorded_from_on_to_off(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, **GRADIENTS) as monitor:
            without = footprint(model, optimizer)
            for step in range(4):
                if step in (1, 3):
                    with pytest.warns(DeprecationWarning, match="dynamic start and stop"):
                        monitor.reload_xy(xy_distribution=step == 1)
                train(model, optimizer, 1, X)
            assert footprint(model, optimizer) == without
        for kind in ("actv", "actv_grad"):
            assert {row.step for row in output.rows(kind)} == {1, 2}
        assert {row.step for row in output.rows("grad_reduced")} == {0, 1, 2, 3}

    def test_off_between_forward_and_backward_leaves_gradients_unread(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, xy_distribution=True, ops=["max"]) as monitor:
            loss = model(X).square().sum()
            with pytest.deprecated_call():
                monitor.reload_xy()
            loss.backward()
            optimizer.step()
            train(model, optimizer, 1, X)
        assert {row.step for row in output.rows("actv")} == {0}


class TestClosing:
    def test_it_takes_every_hook_and_patch_away(self, output: Output) -> None:
        model = small_model()
        optimizer = Adam(model.parameters())
        before = footprint(model, optimizer)
        monitor = attached(output, model, optimizer, **EVERYTHING, stack_info=True)
        monitor.set_monitor(model, 1, optimizer)
        train(model, optimizer, 2, X)
        assert footprint(model, optimizer) != before
        monitor.close()
        assert footprint(model, optimizer) == before

    def test_it_takes_the_hook_of_all_optimizers_away(self, output: Output, tmp_path: Path) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        before = footprint(model, optimizer)
        monitor = TrainerMon(config_at(tmp_path / "c.json", **GRADIENTS), params_have_main_grad=False)
        with pytest.deprecated_call():
            monitor.monitor_gnorm_with_ad(model, 1)
        train(model, optimizer, 1, X)
        monitor.close()
        assert footprint(model, optimizer) == before
        assert len(output.directories()) == 1

    def test_hooks_of_others_stay(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        calls: list[str] = []
        model[0].register_forward_hook(lambda *_: calls.append("forward"))
        with attached(output, model, optimizer, **EVERYTHING):
            model[0].weight.register_post_accumulate_grad_hook(lambda _: calls.append("gradient"))
            optimizer.register_step_post_hook(lambda *_: calls.append("step"))
        train(model, optimizer, 1, X)
        assert calls == ["forward", "gradient", "step"]

    def test_between_forward_and_backward_it_leaves_backward_alone(self, output: Output) -> None:
        model = small_model()
        twin = copy.deepcopy(model)
        monitor = attached(output, model, SGD(model.parameters(), lr=0.1), **EVERYTHING)
        loss = model(X).square().sum()
        monitor.close()
        loss.backward()
        twin(X).square().sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
        assert output.rows("actv_grad") == []

    def test_any_number_of_times(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        monitor = attached(output, model, optimizer, **GRADIENTS)
        train(model, optimizer, 1, X)
        monitor.close()
        first = (output.directory() / "manifest.json").read_bytes()
        train(model, optimizer, 1, X)
        monitor.close()
        assert (output.directory() / "manifest.json").read_bytes() == first
        assert output.manifest()["closed"] is True
        assert {row.step for row in output.rows("grad_reduced")} == {0}

    def test_afterwards_it_attaches_to_nothing(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        monitor = attached(output, model, optimizer, **GRADIENTS)
        monitor.close()
        with pytest.raises(RuntimeError, match="Create a new one"):
            monitor.set_monitor(model, 1, optimizer)

    def test_a_context_closes_at_its_end_and_lets_exceptions_through(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        before = footprint(model, optimizer)
        with pytest.raises(RuntimeError, match="shapes cannot"), attached(output, model, optimizer, **GRADIENTS):
            train(model, optimizer, 1, X.T)
        assert footprint(model, optimizer) == before
        assert output.manifest()["closed"] is True

    def test_before_anything_was_attached_it_does_nothing(self, output: Output, tmp_path: Path) -> None:
        TrainerMon(config_at(tmp_path / "c.json")).close()
        assert output.directories() == []


class TestLettingGo:
    def test_a_monitor_that_no_one_holds_continues_recording(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        attached(output, model, optimizer, **GRADIENTS)
        gc.collect()
        train(model, optimizer, 2, X)
        (listening,) = optimizer._optimizer_step_post_hooks.values()
        assert listening is not None
        wait_for(lambda: {row.step for row in output.rows("grad_reduced")} == {0, 1})

    @pytest.mark.parametrize("config", [EVERYTHING, {**EVERYTHING, "print_struct": True}], ids=["all", "structure"])
    def test_a_model_and_its_monitor_are_collected_once_they_are_not_referenced(
        self, output: Output, config: dict[str, Any]
    ) -> None:
        model = small_model()
        optimizer = Adam(model.parameters())
        monitor = attached(output, model, optimizer, **config)
        model(X).square().sum().backward()
        gone = [weakref.ref(one) for one in (model, optimizer, monitor, model[0].weight)]
        del model, optimizer, monitor
        gc.collect()
        assert [one() for one in gone] == [None] * 4

    def test_a_model_whose_optimizer_is_still_awaited_is_collected_too(self, output: Output, tmp_path: Path) -> None:
        model = small_model()
        before = len(_global_optimizer_pre_hooks)
        monitor = TrainerMon(config_at(tmp_path / "c.json", **EVERYTHING), params_have_main_grad=False)
        with pytest.deprecated_call():
            monitor.monitor_gnorm_with_ad(model, 1)
        gone = [weakref.ref(one) for one in (model, monitor)]
        del model, monitor
        gc.collect()
        assert [one() for one in gone] == [None] * 2
        assert len(_global_optimizer_pre_hooks) == before
        assert len(output.directories()) == 1

    def test_what_a_collected_monitor_had_recorded_is_written(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        attached(output, model, optimizer, step_count_per_record=10, **GRADIENTS)
        train(model, optimizer, 3, X)
        del model, optimizer
        gc.collect()
        wait_for(lambda: {row.step for row in output.rows("grad_reduced")} == {0, 1, 2})


def wait_for(found: Callable[[], bool], seconds: float = 20.0) -> None:
    """Until the writer has come to it."""
    deadline = time.monotonic() + seconds
    while not found() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert found()


class TestFailures:
    """What fails inside the monitor changes nothing in training and is said once a cause."""

    @staticmethod
    def trained(output: Output, model: nn.Module, **config: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        optimizer = Adam(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, **{**EVERYTHING, **config}):
            losses = train(model, optimizer, 3, X)
        return losses, [p.detach() for p in model.parameters()]

    @staticmethod
    def unmonitored(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        twin = copy.deepcopy(model)
        losses = train(twin, Adam(twin.parameters(), lr=0.1), 3, X)
        return losses, [p.detach() for p in twin.parameters()]

    @staticmethod
    def assert_equal(one: tuple[list[torch.Tensor], ...], other: tuple[list[torch.Tensor], ...]) -> None:
        for ours, theirs in zip(one, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    @pytest.mark.parametrize(
        ("of", "method"),
        [(TorchTensorReader, "record"), (TorchTensorReader, "record_all"), (TorchTensorReader, "_slot"), (Recorder, "seal")],
    )
    def test_in_the_recorder(
        self, output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, of: type, method: str
    ) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise MemoryError("no room")

        model = small_model(layers=8)
        expected = self.unmonitored(model)
        monkeypatch.setattr(of, method, fail)
        self.assert_equal(self.trained(output, model), expected)
        said = [message for message in warnings_in(caplog) if "MemoryError" in message]
        assert 1 <= len(said) <= 10
        assert all("Training continues" in message for message in said)

    def test_in_a_sink(self, output: Output, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        """Peers, fault 17: any error of the file system killed training."""

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        model = small_model()
        expected = self.unmonitored(model)
        monkeypatch.setattr(CsvSink, "write", fail)
        self.assert_equal(self.trained(output, model), expected)
        (said,) = [message for message in warnings_in(caplog) if "No space left" in message]
        assert "sink 'csv'" in said
        ((_, lost),) = output.manifest()["lost"]["csv"].items()
        assert lost["ranges"] == [[0, 2, 1]]

    def test_in_making_the_directory_and_what_was_measured_meanwhile_is_in_no_later_step(
        self, output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")  # the directory is made at the first record, when training has begun
        model = nn.ModuleList([nn.Linear(5, 2), nn.Linear(5, 2)])
        optimizer = SGD(model.parameters(), lr=0.1)
        with TrainerMon(config_at(tmp_path / "c.json", **GRADIENTS), params_have_main_grad=False) as monitor:
            monitor.set_monitor(model, 1, optimizer)
            output.base.rmdir()
            output.base.write_text("in the way")
            train(model[0], optimizer, 2, X)
            output.base.unlink()
            train(model[1], optimizer, 1, X)
        assert [(row.step, row.name) for row in output.rows("grad_reduced")] == [(2, "1.weight"), (2, "1.bias")]
        assert len([message for message in warnings_in(caplog) if "OutputError" in message]) == 1


class TestMainGrad:
    """Peers, fault 19: params_have_main_grad left at its default died in backward on plain PyTorch."""

    def test_left_at_its_default_on_plain_parameters_it_reads_grad_and_says_so_once(
        self, output: Output, caplog: pytest.LogCaptureFixture
    ) -> None:
        one, two = small_model(), small_model()
        of_one, of_two = SGD(one.parameters(), lr=0.1), SGD(two.parameters(), lr=0.1)
        with attached(output, one, of_one, params_have_main_grad=True, **GRADIENTS) as monitor:
            monitor.set_monitor(two, 1, of_two)
            train(one, of_one, 2, X)
            train(two, of_two, 2, X)
        (said,) = warnings_in(caplog)
        assert "params_have_main_grad" in said
        assert all(read_manifest(path / "manifest.json").failures == {} for path in output.directories())
        for path in output.directories():
            assert len(output.rows("grad_reduced", path)) == len(output.rows("grad_unreduced", path)) == 8

    def test_parameters_that_have_one_need_no_warning(self, output: Output, caplog: pytest.LogCaptureFixture) -> None:
        model = small_model()
        for p in model.parameters():
            p.main_grad = torch.zeros_like(p)
        attached(output, model, SGD(model.parameters(), lr=0.1), params_have_main_grad=True, **GRADIENTS).close()
        assert warnings_in(caplog) == []


class TestCopies:
    """Peers, fault 13: torch.save(model) failed while monitored."""

    @pytest.fixture
    def monitored(self, output: Output) -> Iterator[tuple[nn.Module, Optimizer]]:
        model = small_model()
        optimizer = Adam(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, **EVERYTHING, stack_info=True):
            train(model, optimizer, 2, X)
            yield model, optimizer

    @staticmethod
    def saved(one: Any) -> bytes:
        file = io.BytesIO()
        torch.save(one, file)
        return file.getvalue()

    @pytest.mark.parametrize("through", ["torch.save", "pickle", "deepcopy"])
    def test_a_copy_of_a_monitored_model_and_its_optimizer_trains_on_like_the_original(
        self, monitored: tuple[nn.Module, Optimizer], through: str
    ) -> None:
        copied, optimizer = {
            "torch.save": lambda both: torch.load(io.BytesIO(self.saved(both)), weights_only=False),
            "pickle": lambda both: pickle.loads(pickle.dumps(both)),
            "deepcopy": copy.deepcopy,
        }[through](monitored)
        ours, theirs = train(*monitored, 3, X), train(copied, optimizer, 3, X)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))

    def test_a_copy_is_not_monitored(self, output: Output, monitored: tuple[nn.Module, Optimizer]) -> None:
        copied, optimizer = copy.deepcopy(monitored)
        train(copied, optimizer, 5, X)
        train(*monitored, 1, X)
        wait_for(lambda: {row.step for row in output.rows("grad_reduced")} == {0, 1, 2})
        assert {row.step for row in output.rows("actv")} == {0, 1, 2}
        assert {row.micro_step for row in output.rows("actv")} == {0}

    def test_a_checkpoint_loads_where_the_monitor_is_not_installed(self, monitored: tuple[nn.Module, Optimizer]) -> None:
        model, optimizer = monitored
        for one in (model, optimizer, model.state_dict(), optimizer.state_dict()):
            assert b"monitor" not in self.saved(one)
            assert b"monitor" not in pickle.dumps(one)


def test_after_close_its_threads_are_gone_and_the_environment_is_as_it_was(output: Output) -> None:
    before, environment = set(threading.enumerate()), dict(os.environ)
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, **EVERYTHING):
        train(model, optimizer, 2, X)
        assert "monitor-writer-rank0" in {thread.name for thread in set(threading.enumerate()) - before}
    wait_for(lambda: set(threading.enumerate()) <= before)
    assert dict(os.environ) == environment
