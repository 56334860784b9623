"""Forwards and steps on other threads leave the rows of training as they are without them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from observing import ACTIVATIONS, drawn, seeded
from torch import Tensor, nn
from watching import EVERYTHING, Output, attached, on_two_ranks, warnings_in

ALL: dict[str, Any] = {**EVERYTHING, "ops": ["norm"], "ndigits": 17, "recording_l2_features": True, "update_ratio": True}
KINDS = (
    "actv",
    "actv_grad",
    "grad_unreduced",
    "grad_reduced",
    "param_origin",
    "param_updated",
    "update_ratio",
    "activation_hook",
)
SECONDS = 20


class Halt(nn.Module):
    """Passes its input on. ``here`` is called before that."""

    def __init__(self) -> None:
        super().__init__()
        self.here: Callable[[], object] = bool

    def forward(self, x: Tensor) -> Tensor:
        self.here()
        return x * 1.0


def halting() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Halt(), nn.Linear(4, 4))


def on_another_thread(call: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(call).result(SECONDS)


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(drawn(3, 4, seed=9, dtype=torch.float64) * 100)


class Overlap:
    """An evaluation on another thread that is in the middle of the model when training comes there, and ends before or after
    training does.
    """

    def __init__(self, model: nn.Sequential, *, ends_first: bool) -> None:
        self._model, self._ends_first = model, ends_first
        self._is_in, self._may_end = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(1)

    def begin(self) -> None:
        self._model[1].here = self._here
        self._evaluation = self._pool.submit(evaluate, self._model)
        self._is_in.wait(SECONDS)

    def end(self) -> None:
        self._may_end.set()
        self._evaluation.result(SECONDS)
        self._pool.shutdown()

    def _here(self) -> None:
        if not torch.is_grad_enabled():
            self._is_in.set()
            self._may_end.wait(SECONDS)
        elif self._ends_first:
            self.end()


def trained(output: Output, *others: Callable[[nn.Sequential, int], Callable[[], object]]) -> dict[str, Any]:
    """The rows of three steps, by kind.

    Args:
        others: Called with the model and the step before each forward; return what is called after it.
    """
    model = seeded(halting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = set(output.directories())
    with attached(output, model, optimizer, **ALL, l2_targets={"activation_hook": ["1", "2"]}):
        for step in range(3):
            ends = [other(model, step) for other in others]
            loss = model(drawn(2, 4, seed=step, dtype=torch.float64)).square().sum()
            for end in ends:
                end()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    (directory,) = set(output.directories()) - before
    found = {kind: {(row.name, row.step, row.micro_step): row.values for row in output.rows(kind, directory)} for kind in KINDS}
    assert all(found.values())
    return found


@pytest.mark.parametrize("ends_first", [True, False])
def test_an_evaluation_that_overlaps_a_forward_of_training_has_no_rows(output: Output, ends_first: bool) -> None:
    def overlapping(model: nn.Sequential, step: int) -> Callable[[], object]:
        overlap = Overlap(model, ends_first=ends_first)
        if step != 1:
            return bool
        overlap.begin()
        return bool if ends_first else overlap.end

    assert trained(output, overlapping) == trained(output)


def test_an_evaluation_that_begins_before_a_collected_step_has_no_rows_in_it(output: Output) -> None:
    model = seeded(halting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    overlap = Overlap(model, ends_first=True)
    x = drawn(2, 4, dtype=torch.float64)
    with attached(output, model, optimizer, start_iteration=1, step_interval=2, start_step=2, **ACTIVATIONS):
        overlap.begin()
        optimizer.step()
        model(x).sum().backward()
        optimizer.step()
    found = {(row.name, row.step): row.values["norm"] for row in output.rows("actv") if row.name.startswith("2.")}
    h = model[0](x)
    assert found == pytest.approx({("2.input", 2): h.norm().item(), ("2.output", 2): model[2](h).norm().item()})


def test_an_evaluation_in_the_step_of_an_optimizer_takes_no_rows_away(output: Output) -> None:
    rows = []
    for other in (evaluate, bool):
        model = seeded(halting)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        before = set(output.directories())
        with attached(output, model, optimizer, update_ratio=True, optimizer_health=True, ndigits=17):
            optimizer.register_step_pre_hook(lambda *_, other=other, model=model: on_another_thread(lambda: other(model)))
            for _ in range(2):
                model(drawn(2, 4, dtype=torch.float64)).square().sum().backward()
                optimizer.step()
        (directory,) = set(output.directories()) - before
        rows.append([output.rows(kind, directory) for kind in ("update_ratio", "optimizer_health")])
    beside, alone = rows
    assert beside == alone
    assert [len(one) for one in alone] == [8, 8]


def test_forwards_that_overlap_have_the_rows_of_their_own_micro_steps(output: Output) -> None:
    model = seeded(halting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    inputs = [drawn(2, 4, seed=seed, dtype=torch.float64) for seed in range(2)]
    second_is_in = threading.Event()

    def here() -> None:
        if threading.current_thread() is threading.main_thread():
            second_is_in.set()
        else:
            first_is_in.set()
            second_is_in.wait(SECONDS)

    expected = {}
    for micro_step, x in enumerate(inputs):
        h = model[0](x)
        expected |= {("2.input", micro_step): h.norm().item(), ("2.output", micro_step): model[2](h).norm().item()}
    first_is_in, model[1].here = threading.Event(), here
    with attached(output, model, optimizer, grad_acc_steps=2, xy_distribution=True, all_xy=True, ops=["norm"], ndigits=17):
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(model, inputs[0])
            first_is_in.wait(SECONDS)
            second = model(inputs[1])
            (first.result(SECONDS) + second).sum().backward()
        optimizer.step()
    found = {(row.name, row.micro_step): row.values["norm"] for row in output.rows("actv") if row.name.startswith("2.")}
    assert found == pytest.approx(expected)


def test_a_forward_that_outlives_its_step_has_no_rows_in_the_next_one(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = seeded(halting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    is_in, may_end = threading.Event(), threading.Event()

    def here() -> None:
        if threading.current_thread() is not threading.main_thread():
            is_in.set()
            may_end.wait(SECONDS)

    model[1].here = here
    with attached(output, model, optimizer, xy_distribution=True, all_xy=True, ops=["norm"]), ThreadPoolExecutor(1) as pool:
        late = pool.submit(model, drawn(2, 4, dtype=torch.float64))
        is_in.wait(SECONDS)
        optimizer.step()
        may_end.set()
        late.result(SECONDS)
        optimizer.step()
    assert {row.step for row in output.rows("actv")} == {0}
    assert sum("was in a forward" in line for line in warnings_in(caplog)) == 1


def _reduces_beside_an_evaluation(output: Output) -> None:
    missing = []
    for mode in (True, False):
        for at in ("after backward", "before the copy"):
            model = seeded(lambda: nn.Linear(4, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            before = set(output.directories())

            def beside(here: str, model: nn.Module = model, at: str = at, mode: bool = mode) -> None:
                if here == at:
                    model.train(mode)
                    on_another_thread(lambda: evaluate(model))
                    model.train()

            with attached(output, model, optimizer, wg_distribution=True, ops=["norm"], ndigits=17):
                model(drawn(2, 4, seed=dist.get_rank(), dtype=torch.float64)).square().sum().backward()
                beside("after backward")
                flat = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
                dist.all_reduce(flat)
                beside("before the copy")
                for p, part in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
                    p.grad.copy_(part.view_as(p))  # type: ignore[union-attr]
                optimizer.step()
            (directory,) = set(output.directories()) - before
            found = {row.name: row.values["norm"] for row in output.rows("grad_reduced", directory)}
            expected = {name: p.grad.norm().item() for name, p in model.named_parameters()}  # type: ignore[union-attr]
            if found != pytest.approx(expected):
                missing.append((at, mode, found, expected))
    assert missing == []


def test_an_evaluation_beside_a_reduction_does_not_hide_it(tmp_path: Any) -> None:
    on_two_ranks(_reduces_beside_an_evaluation, tmp_path)
