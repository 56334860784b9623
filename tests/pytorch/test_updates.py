"""What is recorded of the optimizer's step as a whole, against float64 references written from the definitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer
from torch.testing._internal.two_tensor import TwoTensor
from watching import Output, attached, train, warnings_in

from monitor.merge.merge import Wanted, merge
from monitor.merge.outputs import read_merged
from monitor.sinks.hdf5 import read_hdf5
from monitor.stats.histograms import UNIT_UPPER

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(7))
Found = dict[tuple[str, int], dict[str, Any]]


def small_model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)


def found(output: Output, kind: str) -> Found:
    rows = output.rows(kind)
    by_place = {(row.name, row.step): row.values for row in rows}
    assert len(by_place) == len(rows)
    return by_place


class Referenced:
    """What a step must have recorded, taken from the tensors around it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.direction: dict[tuple[str, int], float] = {}
        self.ratio: dict[tuple[str, int], float] = {}
        self.update: dict[tuple[str, int], Tensor] = {}
        self.ratio_of_moments: dict[tuple[str, int], Tensor] = {}
        self._step = 0
        self._before: dict[str, Tensor] = {}

    def train(self, steps: int, x: Tensor = X) -> None:
        hooks = [self.optimizer.register_step_pre_hook(self._begins), self.optimizer.register_step_post_hook(self._ended)]
        for step in range(steps):
            self._step = step
            train(self.model, self.optimizer, 1, x * (1 + step))
        for hook in hooks:
            hook.remove()

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
        names = {id(p): name for name, p in self.model.named_parameters()}
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                yield names[id(p)], p, group

    def _begins(self, *_: Any) -> None:
        for name, p, group in self._parameters():
            self._before[name] = p.detach().double().clone()
            state = self.optimizer.state.get(p, {})
            momentum = state.get("exp_avg", state.get("momentum_buffer"))
            assert p.grad is not None
            downhill = -p.grad if group.get("maximize") else p.grad
            agree = 1.0 if momentum is None else (torch.sign(downhill) == torch.sign(momentum)).double().mean().item()
            self.direction[name, self._step] = agree

    def _ended(self, *_: Any) -> None:
        for name, p, group in self._parameters():
            before = self._before[name]
            self.ratio[name, self._step] = ((p.detach().double() - before).norm() / before.norm()).item()
            self._adam(name, self.optimizer.state[p], group)

    def _adam(self, name: str, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "exp_avg_sq" not in state:
            return
        beta1, beta2 = (float(beta) for beta in group["betas"])
        steps = float(state["step"])
        square = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"].double() / (1 - beta2**steps)
        mean = state["exp_avg"].double() / (1 - beta1**steps)
        self.update[name, self._step] = mean / (square.sqrt() + group["eps"])
        self.ratio_of_moments[name, self._step] = torch.where((mean == 0) & (square == 0), 0, mean / square.sqrt())


ADAMS: dict[str, Callable[[nn.Sequential], Optimizer]] = {
    "Adam": lambda model: Adam(model.parameters(), lr=0.1),
    "AdamW": lambda model: AdamW(model.parameters(), lr=0.1, weight_decay=0.3),
    "amsgrad": lambda model: Adam(model.parameters(), lr=0.1, amsgrad=True),
    "maximize": lambda model: Adam(model.parameters(), lr=0.1, maximize=True),
    "hyperparameters in tensors": lambda model: Adam(
        model.parameters(), lr=torch.tensor(0.1), betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    ),
    "groups that differ": lambda model: AdamW(
        [
            {"params": model[0].parameters(), "lr": 0.1, "betas": (0.5, 0.6), "eps": 1e-2},
            {"params": model[2].parameters(), "lr": 0.01, "amsgrad": True},
        ]
    ),
}
ALL = {"mg_direction": True, "update_ratio": True, "ur_distribution": True, "format": ["csv", "hdf5"], "ndigits": 15}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adam", ADAMS)
def test_every_step_of_adam_is_recorded_as_it_was(output: Output, adam: str, dtype: torch.dtype) -> None:
    model = small_model(dtype)
    optimizer = ADAMS[adam](model)
    expected = Referenced(model, optimizer)
    with attached(output, model, optimizer, ops=["norm", "mean", "min", "max"], **ALL):
        expected.train(4, X.to(dtype))
    direction, ratio = found(output, "other"), found(output, "update_ratio")
    assert {place: values["mean"] for place, values in direction.items()} == pytest.approx(expected.direction, rel=1e-12)
    assert {place: values["norm"] for place, values in direction.items()} == pytest.approx(expected.direction, rel=1e-12)
    assert {place: values["update_ratio"] for place, values in ratio.items()} == pytest.approx(expected.ratio, rel=1e-9)
    for kind, vectors in (("adam_update", expected.update), ("adam_ratio", expected.ratio_of_moments)):
        rows = found(output, kind)
        assert {place: values["norm"] for place, values in rows.items()} == pytest.approx(norms(vectors), rel=1e-5)
        assert {place: values["max"] for place, values in rows.items()} == pytest.approx(greatest(vectors), rel=1e-5)


def norms(vectors: dict[tuple[str, int], Tensor]) -> dict[tuple[str, int], float]:
    return {place: vector.norm().item() for place, vector in vectors.items()}


def greatest(vectors: dict[tuple[str, int], Tensor]) -> dict[tuple[str, int], float]:
    return {place: vector.max().item() for place, vector in vectors.items()}


def test_the_direction_in_the_first_step_is_one(output: Output) -> None:
    model = small_model()
    optimizer = Adam(model.parameters())
    with attached(output, model, optimizer, mg_direction=True, ops=["norm", "min", "max", "mean"]):
        train(model, optimizer, 1, X)
    assert [row.values for row in output.rows("other")] == [{"norm": 1.0, "min": 1.0, "max": 1.0, "mean": 1.0}] * 4
    assert [row.name for row in output.rows("other")] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_an_optimizer_without_momentum_has_no_direction(output: Output) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    with attached(output, model, optimizer, mg_direction=True, wg_distribution=True):
        for _ in range(2):
            train(model, optimizer, 1, X)
    assert output.rows("other") == []


def test_the_momentum_of_sgd_has_a_direction(output: Output) -> None:
    model = small_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    expected = Referenced(model, optimizer)
    with attached(output, model, optimizer, mg_direction=True, ops=["mean"], ndigits=15):
        expected.train(3)
    assert expected.direction == pytest.approx({place: values["mean"] for place, values in found(output, "other").items()})
    assert min(expected.direction.values()) < 1.0


def test_a_weight_that_rounding_holds_where_it_is_has_an_update_of_zero(output: Output) -> None:
    """What Adam asks for is not zero; what becomes of it is."""
    model = small_model(torch.bfloat16)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(256.0)
    optimizer = Adam(model.parameters(), lr=1e-3)
    with attached(output, model, optimizer, update_ratio=True, ur_distribution=True, format=["csv", "hdf5"]):
        train(model, optimizer, 1, X.bfloat16())
    rows = found(output, "update_ratio")
    assert {0.0} == {values["update_ratio"] for values in rows.values()}
    assert len(rows) == 4


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_the_update_of_a_complex_weight_counts_real_and_imaginary_parts(output: Output, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 4, dtype=dtype)
    optimizer = Adam(model.parameters(), lr=0.01)
    expected = {}
    with attached(output, model, optimizer, update_ratio=True, optimizer_health=True, ndigits=17):
        for step in range(2):
            before = {name: p.detach().to(torch.complex128, copy=True) for name, p in model.named_parameters()}
            model(X.to(dtype)).abs().sum().backward()
            optimizer.step()
            for name, p in model.named_parameters():
                changed, weight = (p.detach().to(torch.complex128) - before[name]).abs(), before[name].abs()
                expected[name, step] = [changed.square().sum().sqrt().item(), weight.square().sum().sqrt().item()]
    rows = found(output, "update_ratio")
    assert rows.keys() == expected.keys()
    for place, norms in expected.items():
        assert [rows[place]["update_norm"], rows[place]["weight_norm"]] == pytest.approx(norms, rel=1e-12)
    assert output.rows("optimizer_health") == []


def test_only_the_parameters_of_the_targets_have_rows(output: Output) -> None:
    model = small_model()
    optimizer = Adam(model.parameters())
    with attached(output, model, optimizer, targets={"2": {}}, **ALL):
        train(model, optimizer, 1, X)
    for kind in ("other", "update_ratio", "adam_update", "adam_ratio"):
        assert [row.name for row in output.rows(kind)] == ["2.weight", "2.bias"]


def test_the_update_of_what_is_no_adam_is_not_made_up(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    model = small_model()
    optimizer = NAdam(model.parameters())
    with attached(output, model, optimizer, **ALL):
        for _ in range(2):
            train(model, optimizer, 1, X)
    assert output.rows("adam_update") == []
    assert len(output.rows("update_ratio")) == 8
    assert sum("and NAdam is none" in said for said in warnings_in(caplog)) == 1


def test_a_step_that_a_scaler_skips_has_no_update(output: Output) -> None:
    model = small_model()
    optimizer = Adam(model.parameters())
    scaler = GradScaler("cpu", init_scale=4.0)
    with attached(output, model, optimizer, **ALL):
        for x in (X, X * float("inf"), X):
            optimizer.zero_grad()
            scaler.scale(model(x).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert {0, 2} == {row.step for row in output.rows("update_ratio")}
    assert {0, 2} == {row.step for row in output.rows("adam_update")}


def test_nothing_of_a_step_is_kept_after_it(output: Output) -> None:
    """The copies of the weights go with the step, also where it is skipped."""
    model = small_model()
    optimizer = Adam(model.parameters())
    with attached(output, model, optimizer, **ALL) as monitor:
        train(model, optimizer, 1, X)
        ratio, direction, _ = list(monitor._recordings[0].attachment.collectors)
        assert ratio._weights._kept == {}
        assert direction._begins == {}


def test_histograms_of_updates_hold_every_element(output: Output) -> None:
    model = small_model()
    optimizer = Adam(model.parameters())
    expected = Referenced(model, optimizer)
    with attached(output, model, optimizer, **ALL):
        expected.train(3)
    for kind, vectors in (("adam_update", expected.update), ("adam_ratio", expected.ratio_of_moments)):
        rows = read_hdf5(next(output.directory().glob("metrics_*.h5")), kinds=[kind]).to_pylist()
        assert len(vectors) == len(rows)
        for row in rows:
            x = vectors[row["name"], row["step"]].flatten().numpy()
            near = np.abs(x[:, None] - UNIT_UPPER[None, :-1]).min() < 1e-6  # rounding may decide about the bin
            histogram = row["histogram"][: len(UNIT_UPPER)]
            assert x.size == sum(histogram)
            if not near:
                assert np.bincount(np.searchsorted(UNIT_UPPER, x), minlength=len(UNIT_UPPER)).tolist() == histogram


def test_what_is_not_stepped_has_no_update(output: Output) -> None:
    """A parameter without a gradient keeps its moments, which are those of an earlier step."""
    model = small_model()
    optimizer = Adam(model.parameters())
    with attached(output, model, optimizer, **ALL):
        train(model, optimizer, 1, X)
        for _ in range(2):
            model(X).square().mean().backward()
            for p in model[2].parameters():
                p.grad = None
            optimizer.step()
            optimizer.zero_grad()
    for kind in ("adam_update", "adam_ratio"):
        assert [row.step for row in output.rows(kind) if row.name == "2.weight"] == [0]
        assert [row.step for row in output.rows(kind) if row.name == "0.weight"] == [0, 1, 2]


def test_nan_agrees_with_nothing_in_the_first_step_either(output: Output) -> None:
    model = small_model()
    optimizer = Adam(model.parameters())
    with attached(output, model, optimizer, mg_direction=True, ops=["mean", "zeros"]):
        train(model, optimizer, 1, X * float("nan"))
    assert [row.values for row in output.rows("other")] == [{"mean": 0.0, "zeros": 1.0}] * 4


def test_copies_of_weights_do_not_outlive_a_step_that_raises(output: Output) -> None:
    model = small_model()
    optimizer = Adam(model.parameters())
    with attached(output, model, optimizer, **ALL) as monitor:
        ratio, *_ = monitor._recordings[0].attachment.collectors
        model(X).sum().backward()
        failing = optimizer.register_step_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            optimizer.step()
        failing.remove()
        assert len(ratio._weights._kept) == 4
        model(X)
        assert ratio._weights._kept == {}
        optimizer.register_step_pre_hook(fail)
        with pytest.raises(ArithmeticError):
            optimizer.step()
    assert ratio._weights._kept == {}


def test_a_step_whose_closure_runs_the_model_has_all_rows_of_updates(output: Output) -> None:
    model = small_model()
    optimizer = Adam(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(X).square().sum()
        loss.backward()
        return loss

    with attached(output, model, optimizer, **ALL):
        for _ in range(2):
            optimizer.step(closure)
    for kind in ("update_ratio", "other", "adam_update", "adam_ratio"):
        assert [row.step for row in output.rows(kind)] == [0] * 4 + [1] * 4, kind


def fail(*_: Any) -> None:
    raise ArithmeticError


@pytest.mark.parametrize("format_name", ["csv", "hdf5"])
def test_directions_are_there_after_a_merge(output: Output, format_name: str) -> None:
    model = small_model()
    optimizer = Adam(model.parameters())
    expected = Referenced(model, optimizer)
    with attached(output, model, optimizer, mg_direction=True, ops=["mean"], format=format_name, ndigits=15):
        expected.train(3)
    merge(Wanted(output.base, output.base / "merged"))
    (table,) = (output.base / "merged" / "global").glob("mg_direction*")
    rows = read_merged(table).to_pylist()
    (column,) = {"mg_direction", "mean"} & set(rows[0])
    assert {(row["name"], row["step"]): row[column] for row in rows} == pytest.approx(expected.direction)


def test_ops_that_are_set_later_are_counted_from_then_on(output: Output) -> None:
    model = small_model()
    optimizer = Adam(model.parameters())
    with attached(output, model, optimizer, wg_distribution=True, ops=["norm"]) as monitor:
        train(model, optimizer, 1, X)
        monitor.ops = ["norm", "underflow_fp16"]
        train(model, optimizer, 1, X)
    cells = {row.step: row.values.get("underflow_fp16") for row in output.rows("grad_reduced")}
    assert cells[0] is None
    assert cells[1] is not None


def test_an_optimizer_that_calls_a_closure_has_the_updates_of_its_whole_step(output: Output) -> None:
    """A forward begins inside the step, and with every evaluation again."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    expected = {}

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(4, 3)).square().sum()
        loss.backward()
        return loss

    with attached(output, model, optimizer, update_ratio=True, ndigits=17):
        for step in range(2):
            before = model.weight.detach().clone()
            optimizer.step(closure)
            expected[step] = (model.weight.detach() - before).double().norm().item()
    found = {row.step: row.values["update_norm"] for row in output.rows("update_ratio") if row.name == "weight"}
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_gradient_beside_a_weight_that_only_its_class_can_read_is_compared_with_the_momentum(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    """As quantized weights of torchao have plain gradients and momenta. Nothing is sharded."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(TwoTensor(torch.ones(4), torch.ones(4)))

    model = Whole()
    optimizer = SGD(model.parameters(), lr=0.0, momentum=0.5)
    with attached(output, model, optimizer, mg_direction=True, ops=["mean"]):
        for signs in ([1.0, 1, 1, 1], [1.0, 1, -1, -1], [1.0, -1, -9, -9]):
            model.weight.grad = torch.tensor(signs)
            optimizer.step()
    assert [row.values["mean"] for row in output.rows("other")] == [1, 0.5, 0.75]
    assert not [said for said in warnings_in(caplog) if "mg_direction" in said]
