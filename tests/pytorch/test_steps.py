"""What a step is, which steps are collected, and how each is numbered."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR
from watching import EVERYTHING, Output, assert_rows, attached, train, warnings_in

from monitor.pytorch import TrainerMon
from monitor.pytorch.tensor_reader import TorchTensorReader
from monitor.stats.host.array_kernel import VARIABLE, NativeKernel
from monitor.stats.torch.host_kernel import TorchHostKernel

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(7))
GRADIENTS: dict[str, Any] = {"wg_distribution": True, "ops": ["norm", "min", "max"], "ndigits": 17}


def small_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def steps(output: Output, kind: str = "grad_reduced", directory: Path | None = None) -> list[int]:
    """The steps that a kind has rows of, in the order of the files."""
    return list(dict.fromkeys(row.step for row in output.rows(kind, directory)))


def written(output: Output) -> list[tuple[int, int]]:
    """The ranges of steps in the manifest."""
    return [(first, last) for first, last, _ in output.manifest()["steps"]["written"]["ranges"]]


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the tensors that are being read, as they are. All are read in Python, where this can see it."""
    found: list[str] = []
    one, many = TorchTensorReader.record_in_python, TorchTensorReader.record_all_in_python
    monkeypatch.setenv(VARIABLE, "0")

    def record(reader: TorchTensorReader, watched: Any, *rest: Any, **named: Any) -> None:
        found.append(watched.series.kind)
        one(reader, watched, *rest, **named)

    def record_all(reader: TorchTensorReader, items: Any, failed: Any) -> None:
        found.extend(watched.series.kind for watched, _ in items)
        many(reader, items, failed)

    monkeypatch.setattr(TorchTensorReader, "record_in_python", record)
    monkeypatch.setattr(TorchTensorReader, "record_all_in_python", record_all)
    return found


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways to the numbers of a tensor that are taken, as they are."""
    taken: list[str] = []

    def counting(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            taken.append(name)
            return inner(*args)

        return call

    monkeypatch.setattr(TorchHostKernel, "reduce_into", counting("reduce_into", TorchHostKernel.reduce_into))
    of = NativeKernel.of
    monkeypatch.setattr(NativeKernel, "of", lambda kernel, form: counting("plain", of(kernel, form)))
    return taken


class TestWhichStepsAreCollected:
    @pytest.mark.parametrize(
        ("schedule", "collected"),
        [
            ({}, [0, 1, 2, 3, 4, 5]),
            ({"start_step": 2}, [2, 3, 4, 5]),
            ({"step_interval": 2}, [0, 2, 4]),
            ({"start_step": 1, "step_interval": 3}, [1, 4]),
            ({"collect_times": 2}, [0, 1]),
            ({"start_step": 1, "step_interval": 2, "collect_times": 2}, [1, 3]),
            ({"start_step": 100}, []),
        ],
        ids=str,
    )
    def test_start_interval_and_times_choose_the_steps(
        self, output: Output, schedule: dict[str, int], collected: list[int]
    ) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, **GRADIENTS, **schedule):
            train(model, optimizer, 6, X)
        assert steps(output) == collected
        assert output.manifest()["steps"]["written"]["count"] == len(collected)

    def test_collect_times_0_collects_nothing(self, output: Output, kernel_calls: list[str]) -> None:
        """Peers, fault 9: it still collected a step."""
        model = small_model()
        optimizer = Adam(model.parameters())
        with attached(output, model, optimizer, collect_times=0, **EVERYTHING):
            train(model, optimizer, 3, X)
        assert kernel_calls == []
        assert list(output.directory().glob("*.csv")) == []
        assert output.manifest()["steps"]["written"]["count"] == 0

    def test_a_step_that_is_not_collected_computes_nothing(
        self, output: Output, readings: list[str], kernel_calls: list[str]
    ) -> None:
        model = small_model()
        optimizer = Adam(model.parameters())
        read, computed = [], []
        with attached(output, model, optimizer, step_interval=3, **EVERYTHING):
            for _ in range(5):
                readings.clear()
                kernel_calls.clear()
                train(model, optimizer, 1, X)
                read.append(set(readings))
                computed.append(len(kernel_calls) > 0)
        assert computed == [True, False, False, True, False]
        activations = {"actv", "actv_grad"}
        weights = {"grad_unreduced", "grad_reduced", "param_origin", "param_updated"}
        assert read == [activations | weights, set(), set(), activations | weights | {"exp_avg", "exp_avg_sq"}, set()]

    def test_a_step_that_is_not_collected_takes_no_hook_on_a_gradient(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, start_step=1, **EVERYTHING):
            result = model(X)
            assert not result._backward_hooks
            result.sum().backward()
            optimizer.step()
            result = model(X)
            assert result._backward_hooks

    def test_steps_are_numbered_from_start_iteration(self, output: Output, tmp_path: Path) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        (tmp_path / "config.json").write_text('{"wg_distribution": true, "start_step": 1001, "step_interval": 2}')
        with TrainerMon(tmp_path / "config.json", params_have_main_grad=False) as monitor:
            monitor.set_monitor(model, 1, optimizer, start_iteration=1000)
            train(model, optimizer, 4, X)
        assert steps(output) == [1001, 1003]

    def test_collected_steps_hold_the_same_whether_or_not_others_are(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        expected = {}
        with attached(output, model, optimizer, step_interval=2, **GRADIENTS):
            for step in range(3):
                model(X).square().sum().backward()
                expected |= {(name, step, None): p.grad.clone() for name, p in model.named_parameters() if step != 1}
                optimizer.step()
                optimizer.zero_grad()
        assert_rows(output, "grad_unreduced", expected)
        assert_rows(output, "grad_reduced", expected)


class TestWhatEndsAStep:
    def test_every_step_of_the_optimizer_does_also_one_without_a_backward(self, output: Output) -> None:
        """Peers, fault 1: what the step before had measured was written again."""
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, **GRADIENTS):
            train(model, optimizer, 1, X)
            optimizer.step()
            train(model, optimizer, 1, X)
        assert written(output) == [(0, 2)]
        assert steps(output) == [0, 2]

    def test_a_forward_that_trains_nothing_does_not(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, **EVERYTHING):
            train(model, optimizer, 1, X)
            model.eval()
            model(X)
            model.train()
            with torch.no_grad():
                model(X)
            train(model, optimizer, 1, X)
        assert written(output) == [(0, 1)]
        assert {(row.step, row.micro_step) for row in output.rows("actv")} == {(0, 0), (1, 0)}

    def test_a_step_in_progress_at_close_is_written_as_incomplete(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, **GRADIENTS):
            train(model, optimizer, 2, X)
            model(X).square().sum().backward()
            expected = {(name, 2, None): p.grad.clone() for name, p in model.named_parameters()}
        assert steps(output) == [0, 1]
        assert steps(output, "grad_unreduced") == [0, 1, 2]
        last = {(row.name, row.step, None): row.values["max"] for row in output.rows("grad_unreduced") if row.step == 2}
        assert {place: x.max().item() for place, x in expected.items()} == pytest.approx(last)
        assert output.manifest()["steps"]["incomplete"]["ranges"] == [[2, 2, 1]]

    def test_a_step_that_has_measured_nothing_at_close_is_not_written(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, **GRADIENTS):
            train(model, optimizer, 2, X)
        assert written(output) == [(0, 1)]
        assert output.manifest()["steps"]["incomplete"]["count"] == 0

    def test_a_step_within_a_step_of_the_same_optimizer_does_not(self, output: Output) -> None:
        """Of a class whose ``step`` calls the one of its base, torch runs the hooks for both."""

        class Sub(SGD):
            @torch.no_grad()
            def step(self, closure: Any = None) -> Any:
                super().step()
                return super().step(closure)

        model = small_model()
        optimizer = Sub(model.parameters(), lr=0.1)
        SGD(model.parameters())
        with attached(output, model, optimizer, **GRADIENTS, param_distribution=True):
            train(model, optimizer, 1, X)
            before = {(name, 1, None): p.detach().clone() for name, p in model.named_parameters()}
            train(model, optimizer, 1, X)
            after = {(name, 1, None): p.detach().clone() for name, p in model.named_parameters()}
        assert written(output) == [(0, 1)]
        for kind, expected in (("param_origin", before), ("param_updated", after)):
            rows = {(row.name, row.step, None): row.values["min"] for row in output.rows(kind) if row.step}
            assert rows == pytest.approx({place: x.min().item() for place, x in expected.items()})

    def test_a_step_that_raises_is_not_over_and_the_next_attempt_is_the_same_step(self, output: Output) -> None:
        class Interrupted(SGD):
            interrupted = False

            @torch.no_grad()
            def step(self, closure: Any = None) -> Any:
                if self.interrupted:
                    raise ConnectionError("a link is down")
                return super().step(closure)

        model = small_model()
        optimizer = Interrupted(model.parameters(), lr=0.1)
        expected = {}
        with attached(output, model, optimizer, **GRADIENTS):
            train(model, optimizer, 1, X)
            model(X).square().sum().backward()
            optimizer.interrupted = True
            with pytest.raises(ConnectionError, match="a link is down"):
                optimizer.step()
            optimizer.interrupted = False
            model(X).square().sum().backward()
            expected = {(name, 1, None): p.grad.clone() for name, p in model.named_parameters()}
            optimizer.step()
        assert written(output) == [(0, 1)]
        rows = [row for row in output.rows("grad_reduced") if row.step == 1]
        assert [row.values["max"] for row in rows] == pytest.approx([x.max().item() for x in expected.values()])

    def test_a_forward_that_raises_leaves_the_next_steps_right(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        expected = {}
        with attached(output, model, optimizer, **EVERYTHING):
            train(model, optimizer, 1, X)
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(torch.ones(2, 3))
            for step in (1, 2):
                model(X).square().sum().backward()
                expected |= {(name, step, None): p.grad.clone() for name, p in model.named_parameters()}
                optimizer.step()
                optimizer.zero_grad()
        found = {(row.name, row.step, None): row.values["max"] for row in output.rows("grad_reduced") if row.step}
        assert found == pytest.approx({place: x.max().item() for place, x in expected.items()})
        assert {row.micro_step for row in output.rows("actv") if row.step == 2} == {0}


class TestClosures:
    @staticmethod
    def closure_of(model: nn.Module, optimizer: Optimizer, calls: list[dict[str, torch.Tensor]]) -> Callable[[], torch.Tensor]:
        """A closure that notes the gradients of each of its calls."""

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(X).square().mean()
            loss.backward()
            calls.append({name: p.grad.clone() for name, p in model.named_parameters()})
            return loss

        return closure

    @pytest.mark.parametrize("by_keyword", [False, True])
    def test_gradients_are_read_after_the_closure_given_to_an_optimizer(self, output: Output, by_keyword: bool) -> None:
        model, expected, losses = small_model(), {}, []
        optimizer = Adam(model.parameters(), lr=0.1)
        calls: list[dict[str, torch.Tensor]] = []
        with attached(output, model, optimizer, **GRADIENTS):
            closure = self.closure_of(model, optimizer, calls)
            for step in range(3):
                losses.append(optimizer.step(closure=closure) if by_keyword else optimizer.step(closure))
                expected |= {(name, step, None): x for name, x in calls[-1].items()}
        assert len(calls) == 3
        assert losses[0] > losses[2]
        assert_rows(output, "grad_reduced", expected)
        assert_rows(output, "grad_unreduced", expected)

    def test_an_optimizer_that_calls_its_closure_often_has_the_last_gradients_and_one_step(self, output: Output) -> None:
        model = small_model()
        optimizer = LBFGS(model.parameters(), max_iter=4)
        calls: list[dict[str, torch.Tensor]] = []
        expected = {}
        with attached(output, model, optimizer, **GRADIENTS):
            for step in range(2):
                optimizer.step(self.closure_of(model, optimizer, calls))
                expected |= {(name, step, None): x for name, x in calls[-1].items()}
        assert len(calls) > 4
        assert written(output) == [(0, 1)]
        assert_rows(output, "grad_reduced", expected)

    @pytest.mark.parametrize("kind", [LBFGS, Adam])
    def test_training_with_a_closure_is_the_same_bit_for_bit(self, output: Output, kind: type[Optimizer]) -> None:
        model = small_model()
        twin = copy.deepcopy(model)
        optimizer, other = kind(model.parameters(), lr=0.1), kind(twin.parameters(), lr=0.1)
        with attached(output, model, optimizer, **EVERYTHING):
            ours = [optimizer.step(self.closure_of(model, optimizer, [])) for _ in range(3)]
        theirs = [other.step(self.closure_of(twin, other, [])) for _ in range(3)]
        assert ours == theirs
        assert same_weights(model, twin)

    def test_what_a_closure_raises_comes_through(self, output: Output) -> None:
        def closure() -> torch.Tensor:
            raise ZeroDivisionError("from the closure")

        model = small_model()
        optimizer = Adam(model.parameters())
        with attached(output, model, optimizer, **GRADIENTS), pytest.raises(ZeroDivisionError, match="from the closure"):
            optimizer.step(closure)


class TestCompiledCode:
    """Hooks are left out of what is compiled, and called all the same."""

    @pytest.mark.parametrize("what", ["the optimizer's step", "the whole step"])
    def test_a_compiled_step_is_counted_and_read_and_the_same_bit_for_bit(self, output: Output, what: str) -> None:
        def trained(model: nn.Module, optimizer: Optimizer, found: dict[tuple[str, int, None], torch.Tensor]) -> None:
            optimizer_step = torch.compile(optimizer.step, backend="eager") if "optimizer" in what else optimizer.step

            def step() -> None:
                model(X).square().sum().backward()
                optimizer_step()

            run = torch.compile(step, backend="eager") if "whole" in what else step
            for number in range(3):
                optimizer.zero_grad()
                run()
                found.update({(name, number, None): p.grad.clone() for name, p in model.named_parameters()})

        model = small_model()
        twin = copy.deepcopy(model)
        expected: dict[tuple[str, int, None], torch.Tensor] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = Adam(model.parameters(), lr=0.1)
            with attached(output, model, optimizer, **GRADIENTS, param_distribution=True):
                trained(model, optimizer, expected)
            trained(twin, Adam(twin.parameters(), lr=0.1), {})
        torch._dynamo.reset()
        assert_rows(output, "grad_unreduced", expected)
        assert_rows(output, "grad_reduced", expected)
        assert steps(output, "param_updated") == [0, 1, 2]
        assert same_weights(model, twin)


class TestSchedulers:
    """Peers, fault 7: a scheduler made after the monitor crashed."""

    @pytest.fixture(autouse=True)
    def _no_warnings(self) -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield

    @pytest.mark.parametrize("made", ["before", "after"])
    def test_a_scheduler_works_whenever_it_is_made(self, output: Output, made: str) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.8)
        scheduler = StepLR(optimizer, 1, gamma=0.5) if made == "before" else None
        with attached(output, model, optimizer, **GRADIENTS):
            scheduler = scheduler or StepLR(optimizer, 1, gamma=0.5)
            rates = []
            for _ in range(3):
                train(model, optimizer, 1, X)
                scheduler.step()
                rates.append(scheduler.get_last_lr()[0])
        assert rates == [0.4, 0.2, 0.1]
        assert steps(output) == [0, 1, 2]

    def test_a_scheduler_made_while_monitored_works_after_close(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.8)
        with attached(output, model, optimizer, **GRADIENTS):
            scheduler = StepLR(optimizer, 1, gamma=0.5)
            train(model, optimizer, 1, X)
            scheduler.step()
        train(model, optimizer, 1, X)
        scheduler.step()
        assert scheduler.get_last_lr() == [0.2]
        assert steps(output) == [0]


class TestASecondSetMonitor:
    """Peers, fault 12: it wrapped the optimizer twice, and steps counted double."""

    def test_it_continues_counting_and_doubles_nothing(self, output: Output, readings: list[str]) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, **EVERYTHING) as monitor:
            train(model, optimizer, 1, X)
            once = len(readings)
            monitor.set_monitor(model, 1, optimizer)
            readings.clear()
            train(model, optimizer, 1, X)
        assert len(readings) == once
        assert written(output) == [(0, 1)]
        assert steps(output) == steps(output, "actv") == [0, 1]
        names = [[row.name for row in output.rows("actv_grad") if row.step == step] for step in range(2)]
        assert names[0] == names[1]
        assert len(set(names[0])) == len(names[0])

    def test_its_start_iteration_counts(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, **GRADIENTS) as monitor:
            train(model, optimizer, 1, X)
            monitor.set_monitor(model, 1, optimizer, start_iteration=40)
            train(model, optimizer, 1, X)
        assert steps(output) == [0, 40]

    def test_collect_times_counts_what_was_collected_before(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, collect_times=3, **GRADIENTS) as monitor:
            train(model, optimizer, 2, X)
            monitor.set_monitor(model, 1, optimizer)
            train(model, optimizer, 3, X)
        assert steps(output) == [0, 1, 2]

    def test_a_step_in_progress_is_written_once(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, **GRADIENTS) as monitor:
            model(X).square().sum().backward()
            monitor.set_monitor(model, 1, optimizer)
            model(X).square().sum().backward()
            expected = {(name, 0, None): p.grad.clone() for name, p in model.named_parameters()}
            optimizer.step()
        assert_rows(output, "grad_unreduced", expected)
        assert_rows(output, "grad_reduced", expected)
        assert output.manifest()["steps"]["incomplete"]["count"] == 0

    def test_with_a_new_optimizer_it_follows_that_one(self, output: Output) -> None:
        model = small_model()
        optimizer, later = SGD(model.parameters(), lr=0.1), Adam(model.parameters())
        with attached(output, model, optimizer, **GRADIENTS) as monitor:
            train(model, optimizer, 1, X)
            monitor.set_monitor(model, 1, later)
            train(model, optimizer, 1, X)
            train(model, later, 1, X)
        assert written(output) == [(0, 2)]
        assert {row.step for row in output.rows("grad_reduced")} == {0, 2}

    def test_the_table_does_not_grow_with_each(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        sizes = []
        with attached(output, model, optimizer, **EVERYTHING) as monitor:
            for _ in range(3):
                train(model, optimizer, 1, X)
                (recording,) = monitor._recordings
                sizes.append(sum(page.used for page in recording._recorder.table.pages))
                monitor.set_monitor(model, 1, optimizer)
        assert sizes[0] == sizes[1] == sizes[2]


class TestTwoModelsWithTwoOptimizers:
    def test_the_optimizer_of_one_ends_no_step_of_another_that_shares_a_layer(
        self, output: Output, caplog: pytest.LogCaptureFixture
    ) -> None:
        shared = nn.Linear(5, 5)
        one, two = nn.Sequential(shared, nn.Linear(5, 5)), nn.Sequential(shared, nn.Linear(5, 1))
        of_one, of_two = SGD(one.parameters(), lr=0.1), SGD(two.parameters(), lr=0.1)
        with attached(output, one, of_one, 2, **EVERYTHING), attached(output, two, of_two, **EVERYTHING):
            for _ in range(3):
                made = one(X).detach()
                one(X)
                train(two, of_two, 1, made)
                train(one, of_one, 1, X)
        assert [steps(output, "grad_reduced", path) for path in output.directories()] == [[0, 1, 2]] * 2
        assert [said for said in warnings_in(caplog) if "not passed to set_monitor" in said] == []

    @pytest.mark.parametrize("monitors", [1, 2])
    def test_each_has_steps_and_rows_of_its_own(self, output: Output, monitors: int) -> None:
        one, two = small_model(1), nn.Linear(5, 2)
        of_one, of_two = SGD(one.parameters(), lr=0.1), SGD(two.parameters(), lr=0.1)
        first = attached(output, one, of_one, **EVERYTHING)
        second = attached(output, two, of_two, **EVERYTHING) if monitors == 2 else first
        if monitors == 1:
            first.set_monitor(two, 1, of_two)
        train(one, of_one, 2, X)
        train(two, of_two, 3, X)
        first.close()
        second.close()
        found = {
            (tuple(steps(output, "grad_reduced", path)), frozenset(row.name for row in output.rows("grad_reduced", path)))
            for path in output.directories()
        }
        assert found == {
            ((0, 1), frozenset({"0.weight", "0.bias", "2.weight", "2.bias"})),
            ((0, 1, 2), frozenset({"weight", "bias"})),
        }

    def test_two_monitors_of_one_model_record_the_same(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        with attached(output, model, optimizer, **EVERYTHING), attached(output, model, optimizer, **EVERYTHING):
            train(model, optimizer, 2, X)
        one, other = output.directories()
        for kind in ("actv", "actv_grad", "grad_unreduced", "grad_reduced", "param_origin", "param_updated"):
            assert output.rows(kind, one) == output.rows(kind, other) != []

    @pytest.mark.parametrize("is_closed", [False, True])
    def test_who_attaches_again_hears_that_an_earlier_monitor_still_records(
        self, is_closed: bool, output: Output, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As where a notebook's cell runs twice. Another model may be monitored at the same time."""
        model, other = small_model(), small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        first = attached(output, model, optimizer, **GRADIENTS)
        if is_closed:
            first.close()
        with attached(output, model, optimizer, **GRADIENTS), attached(output, other, SGD(other.parameters()), **GRADIENTS):
            train(model, optimizer, 1, X)
        first.close()
        said = [one.getMessage() for one in caplog.records if "An earlier monitor of this model" in one.getMessage()]
        assert len(said) == (not is_closed)
        assert all(str(output.directories()[0]) in one for one in said)

    def test_closing_one_of_two_leaves_the_other_recording(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        first = attached(output, model, optimizer, **GRADIENTS)
        second = attached(output, model, optimizer, **GRADIENTS)
        train(model, optimizer, 1, X)
        first.close()
        train(model, optimizer, 1, X)
        second.close()
        assert sorted(steps(output, "grad_reduced", path) for path in output.directories()) == [[0], [0, 1]]


class Wrapped:
    """What frameworks hand out in place of an optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class TestWhichOptimizer:
    @pytest.mark.parametrize("depth", [1, 3])
    def test_a_wrapper_is_looked_through(self, output: Output, depth: int) -> None:
        model = small_model()
        optimizer: Any = SGD(model.parameters(), lr=0.1)
        for _ in range(depth):
            optimizer = Wrapped(optimizer)
        with attached(output, model, optimizer, **GRADIENTS):
            train(model, optimizer, 2, X)
        assert steps(output) == [0, 1]

    def test_without_one_it_is_the_first_that_steps_a_parameter_of_the_model(self, output: Output, tmp_path: Path) -> None:
        model, other = small_model(), nn.Linear(5, 5)
        (tmp_path / "config.json").write_text('{"wg_distribution": true, "param_distribution": true}')
        with TrainerMon(tmp_path / "config.json", params_have_main_grad=False) as monitor:
            with pytest.deprecated_call():
                monitor.monitor_gnorm_with_ad(model, 1)
            train(other, SGD(other.parameters(), lr=0.1), 2, X)
            optimizer = SGD(model[2].parameters(), lr=0.1)
            train(model, optimizer, 2, X)
            train(model, SGD(model.parameters(), lr=0.1), 3, X)
        assert steps(output) == steps(output, "param_updated") == [0, 1]

    def test_set_wrapped_optimizer_names_it(self, output: Output, tmp_path: Path) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        (tmp_path / "config.json").write_text('{"wg_distribution": true}')
        with TrainerMon(tmp_path / "config.json", params_have_main_grad=False) as monitor:
            with pytest.deprecated_call():
                monitor.set_wrapped_optimizer(Wrapped(optimizer))
            with pytest.deprecated_call():
                monitor.monitor_gnorm_with_ad(model, 1)
            train(model, SGD(model.parameters(), lr=0.1), 1, X)
            train(model, optimizer, 1, X)
        assert steps(output) == [1]
        assert written(output) == [(0, 1)]
