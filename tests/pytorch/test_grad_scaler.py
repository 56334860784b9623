"""Loss scaling: which gradients are scaled, and the steps that are skipped."""

from __future__ import annotations

import copy
import gc
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, Optimizer
from watching import Output, assert_rows, attached, warnings_in

from monitor.failures import Failures
from monitor.pytorch import TrainerMon
from monitor.pytorch.optimizer_steps import OptimizerSteps

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(7))
GRADIENTS: dict[str, Any] = {"wg_distribution": True, "ops": ["min", "max", "norm", "nans", "infs"], "ndigits": 17}
ORIGINAL = GradScaler.step
SCALE = 256.0
Rows = dict[tuple[str, int, int | None], torch.Tensor]


@pytest.fixture(autouse=True)
def _step_is_left_as_it_was() -> Iterator[None]:
    if GradScaler.step is not ORIGINAL:
        gc.collect()  # a monitor that an earlier test released
    assert GradScaler.step is ORIGINAL
    yield
    assert GradScaler.step is ORIGINAL


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def scaler(**more: Any) -> GradScaler:
    return GradScaler("cpu", init_scale=SCALE, growth_interval=1000, **more)


def backward(model: nn.Module, scale: GradScaler, overflows: bool = False) -> None:
    scale.scale(model(X).square().mean() * (float("inf") if overflows else 1.0)).backward()


def copies(model: nn.Module, step: int) -> Rows:
    return {(name, step, None): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(model: nn.Module, optimizer: Any, scale: GradScaler, overflows: list[bool]) -> None:
    for one in overflows:
        backward(model, scale, one)
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()


def steps(output: Output, status: str, directory: Path | None = None) -> list[int]:
    manifest = json.loads(((directory or output.directory()) / "manifest.json").read_text())
    ranges = manifest["steps"][status]["ranges"]
    return [step for first, last, interval in ranges for step in range(first, last + 1, interval)]


def test_a_skipped_step_is_written_under_its_own_number_with_its_inf_and_marked(output: Output) -> None:
    model = small_model()
    optimizer = Adam(model.parameters())
    scale = scaler()
    with attached(output, model, optimizer, **GRADIENTS):
        train(model, optimizer, scale, [False, True, False, True])
    assert steps(output, "written") == [0, 1, 2, 3]
    assert steps(output, "skipped") == [1, 3]
    finite = {row.step: row.values["infs"] + row.values["nans"] == 0 for row in output.rows("grad_reduced")}
    assert finite == {0: True, 1: False, 2: True, 3: False}
    assert {row.step for row in output.rows("grad_unreduced") if row.values["infs"] or row.values["nans"]} == {1, 3}


def test_unreduced_gradients_are_scaled_and_reduced_ones_are_not_and_the_output_says_so(output: Output) -> None:
    """Peers, fault 15: there was no mark of it."""
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.01)
    scale = scaler()
    unreduced: Rows = {}
    with attached(output, model, optimizer, **GRADIENTS):
        for step in range(2):
            backward(model, scale)
            unreduced |= copies(model, step)
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()
    assert_rows(output, "grad_unreduced", unreduced)
    assert_rows(output, "grad_reduced", {place: x / SCALE for place, x in unreduced.items()})
    assert_rows(output, "other", {("loss_scale", step, None): torch.tensor(SCALE) for step in range(2)})
    assert "multiplied" in output.manifest()["notes"]["loss_scale"]


def test_the_scale_that_is_written_is_the_one_of_the_step(output: Output) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, **GRADIENTS):
        train(model, optimizer, scaler(), [False, True, False])
    assert [row.values["max"] for row in output.rows("other")] == [SCALE, SCALE, SCALE / 2]


def test_gradients_unscaled_and_clipped_by_the_loop_are_reduced_ones(output: Output) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.01)
    scale = scaler()
    with attached(output, model, optimizer, **GRADIENTS):
        backward(model, scale)
        unreduced = copies(model, 0)
        scale.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        reduced = copies(model, 0)
        scale.step(optimizer)
    assert_rows(output, "grad_unreduced", unreduced)
    assert_rows(output, "grad_reduced", reduced)


CLIPPING: dict[str, tuple[bool, float, int]] = {
    "unscaled by the loop": (True, 1.0, 0),
    "still scaled": (False, 1.0, 1),
    "still scaled, and so is the limit": (False, 0.5 * SCALE, 0),
    "nothing is clipped": (False, float("inf"), 0),
}
"""Whether the loop unscales, the limit, and the warnings."""


@pytest.mark.parametrize("how", CLIPPING)
def test_gradients_clipped_while_they_are_scaled_are_told_once(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    unscales, limit, warnings = CLIPPING[how]
    model, scale = small_model(), scaler()
    optimizer = SGD(model.parameters(), 0.1)
    with attached(output, model, optimizer, **GRADIENTS):
        for _ in range(3):
            backward(model, scale)
            if unscales:
                scale.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()
    said = [one for one in warnings_in(caplog) if "Gradients were clipped to 1 while the loss scale 256 multiplied" in one]
    assert len(said) == warnings


def test_a_clipping_before_the_step_before_is_forgotten(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model, scale = small_model(), scaler()
    optimizer = SGD(model.parameters(), 0.1)
    with attached(output, model, optimizer, **GRADIENTS):
        for clips in (True, False):
            backward(model, scale)
            if clips:
                scale.unscale_(optimizer)
                nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
            scale.step(optimizer)
            scale.update()
    assert [one for one in warnings_in(caplog) if "clipped" in one] == []


def test_a_skipped_step_has_weights_and_moments_before_it_and_none_after(output: Output) -> None:
    model = small_model()
    optimizer = Adam(model.parameters())
    with attached(output, model, optimizer, param_distribution=True, mv_distribution=True):
        train(model, optimizer, scaler(), [False, True])
    found = {kind: [row.step for row in output.rows(kind)] for kind in ("param_origin", "param_updated", "exp_avg")}
    assert found == {"param_origin": [0] * 4 + [1] * 4, "param_updated": [0] * 4, "exp_avg": [1] * 4}


def test_a_skipped_step_ends_though_it_could_not_be_read() -> None:
    class Listener:
        skipped = 0

        def before_step(self, _: Optimizer) -> None:
            raise OSError

        def gradients_ready(self, _: Optimizer) -> None:
            raise OSError

        def loss_scale(self, _: Optimizer, scale: torch.Tensor, scaler: int, *, late: bool) -> None: ...

        def after_step(self, _: Optimizer, *, skipped: bool) -> None:
            self.skipped += skipped

    model, listener, failures = small_model(), Listener(), Failures()
    optimizer = SGD(model.parameters(), lr=0.01)
    steps = OptimizerSteps([optimizer], [model], listener, failures)
    train(model, optimizer, scaler(), [True])
    steps.remove()
    assert listener.skipped == 1
    assert failures.counts == {"reading before the step: OSError": 1, "reading gradients: OSError": 1}


def test_a_scaler_that_is_switched_off_leaves_no_mark(output: Output) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, **GRADIENTS):
        train(model, optimizer, scaler(enabled=False), [False, False])
    assert steps(output, "written") == [0, 1]
    assert (output.rows("other"), output.manifest()["notes"]) == ([], {})


def test_training_with_a_scaler_is_the_same_bit_for_bit(output: Output) -> None:
    model = small_model()
    twin = copy.deepcopy(model)
    optimizer, other = Adam(model.parameters()), Adam(twin.parameters())
    ours, theirs = scaler(), scaler()
    with attached(output, model, optimizer, **GRADIENTS, xy_distribution=True, all_xy=True, param_distribution=True):
        train(model, optimizer, ours, [False, True, False])
    train(twin, other, theirs, [False, True, False])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert ours.state_dict() == theirs.state_dict()


def test_of_two_optimizers_under_one_scaler_only_the_one_that_is_skipped_is_marked(output: Output) -> None:
    one, two = nn.Linear(5, 2), nn.Linear(5, 3)
    of_one, of_two = SGD(one.parameters(), lr=0.01), SGD(two.parameters(), lr=0.01)
    scale = scaler()
    with attached(output, one, of_one, **GRADIENTS) as monitor:
        monitor.set_monitor(two, 1, of_two)
        backward(one, scale)
        backward(two, scale, overflows=True)
        scale.step(of_one)
        scale.step(of_two)
        scale.update()
    skipped = {output.rows("grad_reduced", path)[0].values["infs"] > 0: path for path in output.directories()}
    assert {found: steps(output, "skipped", path) for found, path in skipped.items()} == {False: [], True: [0]}
    assert [steps(output, "written", path) for path in output.directories()] == [[0], [0]]


def test_a_first_step_that_is_skipped_is_counted_also_where_no_optimizer_was_named(output: Output, tmp_path: Path) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.01)
    (tmp_path / "config.json").write_text('{"wg_distribution": true}')
    with TrainerMon(tmp_path / "config.json", params_have_main_grad=False) as monitor:
        with pytest.deprecated_call():
            monitor.monitor_gnorm_with_ad(model, 1)
        train(model, optimizer, scaler(), [True, False])
    assert (steps(output, "written"), steps(output, "skipped")) == ([0, 1], [0])


def test_a_short_step_that_was_unscaled_has_no_unreduced_rows(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    """The scaler's division is not counted in the gradient's version."""
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.01)
    with attached(output, model, optimizer, grad_acc_steps=2, **GRADIENTS):
        train(model, optimizer, scaler(), [False])
    assert output.rows("grad_unreduced") == []
    assert len(output.rows("grad_reduced")) == 4
    assert len([message for message in caplog.messages if "grad_unreduced is missing" in message]) == 1


class TestAnOptimizerThatTakesTheScaleInside:
    @staticmethod
    def fused(model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), fused=True)

    def test_a_step_it_skips_is_marked(self, output: Output) -> None:
        model = small_model()
        optimizer = self.fused(model)
        with attached(output, model, optimizer, **GRADIENTS, param_distribution=True):
            train(model, optimizer, scaler(), [False, True, False])
        assert (steps(output, "written"), steps(output, "skipped")) == ([0, 1, 2], [1])
        assert {row.step for row in output.rows("param_updated")} == {0, 2}
        found = [row.values["max"] for row in output.rows("other") if row.name == "found_inf"]
        assert found == [0.0, 1.0, 0.0]

    def test_gradients_it_has_not_unscaled_are_recorded_as_they_are_and_the_manifest_says_so(self, output: Output) -> None:
        model = small_model()
        optimizer = self.fused(model)
        scale = scaler()
        with attached(output, model, optimizer, **GRADIENTS):
            backward(model, scale)
            expected = copies(model, 0)
            scale.step(optimizer)
        assert_rows(output, "grad_reduced", expected)
        assert "multiplied by loss_scale" in output.manifest()["notes"]["grad_reduced"]

    def test_gradients_that_the_loop_unscaled_need_no_such_note(self, output: Output) -> None:
        model = small_model()
        optimizer = self.fused(model)
        scale = scaler()
        with attached(output, model, optimizer, **GRADIENTS):
            backward(model, scale)
            scale.unscale_(optimizer)
            expected = copies(model, 0)
            scale.step(optimizer)
        assert_rows(output, "grad_reduced", expected)
        assert output.manifest()["notes"].keys() == {"loss_scale", "found_inf"}

    def test_it_trains_the_same_bit_for_bit(self, output: Output) -> None:
        model = small_model()
        twin = copy.deepcopy(model)
        optimizer, other = self.fused(model), self.fused(twin)
        with attached(output, model, optimizer, **GRADIENTS):
            train(model, optimizer, scaler(), [False, True, False])
        train(twin, other, scaler(), [False, True, False])
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


@contextmanager
def patched_by_somebody_else() -> Iterator[Callable[..., Any]]:
    """Around whatever ``GradScaler.step`` is now."""
    below = GradScaler.step

    @wraps(below)
    def theirs(scale: GradScaler, *args: Any) -> Any:
        return below(scale, *args)

    GradScaler.step = theirs  # type: ignore[method-assign]
    yield theirs
    GradScaler.step = ORIGINAL  # type: ignore[method-assign]


class TestThePatch:
    def test_it_is_there_while_monitored_and_gone_after_close(self, output: Output) -> None:
        model = small_model()
        monitor = attached(output, model, SGD(model.parameters(), lr=0.1), **GRADIENTS)
        assert GradScaler.step is not ORIGINAL
        monitor.close()
        assert GradScaler.step is ORIGINAL

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_with_two_monitors_it_is_gone_after_the_second_close(self, output: Output, order: tuple[int, int]) -> None:
        models = [small_model(), small_model()]
        monitors = [attached(output, model, SGD(model.parameters(), lr=0.1), **GRADIENTS) for model in models]
        monitors[order[0]].close()
        assert GradScaler.step is not ORIGINAL
        monitors[order[1]].close()
        assert GradScaler.step is ORIGINAL

    def test_it_is_gone_when_a_monitored_model_is_released(self, output: Output) -> None:
        model = small_model()
        attached(output, model, SGD(model.parameters(), lr=0.1), **GRADIENTS)
        del model
        gc.collect()
        assert GradScaler.step is ORIGINAL

    def test_another_patch_above_it_stays_in_place_and_counts_nothing_twice(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        first = attached(output, model, optimizer, **GRADIENTS)
        with patched_by_somebody_else() as theirs:
            first.close()
            assert GradScaler.step is theirs
            with attached(output, model, optimizer, **GRADIENTS):
                train(model, optimizer, scaler(), [True, False])
            assert GradScaler.step is theirs
        (recorded,) = [path for path in output.directories() if output.rows("grad_reduced", path)]
        assert (steps(output, "written", recorded), steps(output, "skipped", recorded)) == ([0, 1], [0])

    def test_what_the_scaler_raises_comes_through(self, output: Output) -> None:
        model = small_model()
        optimizer = SGD(model.parameters(), lr=0.1)
        scale = scaler()
        with attached(output, model, optimizer, **GRADIENTS):
            backward(model, scale)
            scale.step(optimizer)
            with pytest.raises(RuntimeError, match="already been called since the last update"):
                scale.step(optimizer)
        assert {row.step for row in output.rows("grad_reduced")} == {0}
        assert steps(output, "skipped") == []


def test_the_scaler_of_another_model_on_another_thread_ends_no_step(output: Output) -> None:
    model, other = small_model(), small_model()
    optimizer, its = (SGD(one.parameters(), lr=0.1) for one in (model, other))
    scale, other_scale = scaler(), scaler()

    def step_other(*_: Any) -> None:
        thread = threading.Thread(target=train, args=(other, its, other_scale, [False]))
        thread.start()
        thread.join()

    expected: Rows = {}
    with attached(output, model, optimizer, **GRADIENTS):
        optimizer.register_step_pre_hook(step_other)
        for step in range(3):
            backward(model, scale)
            expected |= copies(model, step)
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()
    assert_rows(output, "grad_unreduced", expected)
    assert steps(output, "written") == [0, 1, 2]
    assert steps(output, "skipped") == []
