"""The optimizers of ``mindspore.mint.optim``, against numpy in float64.

They are written for Ascend. On a CPU MindSpore's in-place additions change nothing, and the kernel of ``AdamW`` is missing.
Most tests put working operations of MindSpore in their place. The optimizers' own code then calls these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import EVERYTHING, Output, attached, warnings_in
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.mint import optim
from tapping import Job, assert_rows, drawn
from training import Net, array, inputs

STEPS = 3
LR, BETAS, EPS = 0.01, (0.9, 0.5), 1e-3
ALL: dict[str, Any] = EVERYTHING | {
    "xy_distribution": False,
    "update_ratio": True,
    "mg_direction": True,
    "optimizer_health": True,
    "ur_distribution": True,
    "format": ["csv", "hdf5"],
    "run_numbers": True,
}


def add_(x: Tensor, other: Any, *, alpha: float = 1) -> Tensor:
    return x.copy_(mint.add(x, other, alpha=alpha))


def mul_(x: Tensor, other: Any) -> Tensor:
    return x.copy_(mint.mul(x, other))


@pytest.fixture
def working_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "add_", add_)
    monkeypatch.setattr(Tensor, "mul_", mul_)


def apply_adamw(weight: Any, mean: Any, square: Any, greatest: Any, gradient: Tensor, earlier: Tensor, *options: Any) -> None:
    """The kernel of Ascend: ``earlier`` is the number of earlier steps."""
    lr, beta1, beta2, decay, eps, amsgrad, maximize = options
    gradient, step = -gradient if maximize else gradient, float(earlier.asnumpy()[0]) + 1.0
    mean.copy_(mean * beta1 + gradient * (1 - beta1))
    square.copy_(square * beta2 + gradient * gradient * (1 - beta2))
    if amsgrad:
        greatest.copy_(mint.maximum(greatest, square))
    root = mint.sqrt(greatest if amsgrad else square) / (1 - beta2**step) ** 0.5 + eps
    weight.copy_(weight * (1 - lr * decay) - mean / root * (lr / (1 - beta1**step)))


def with_kernel(optimizer: nn.Cell) -> nn.Cell:
    optimizer.adamw_opt = apply_adamw
    return optimizer


def each_alone(parameters: Any) -> list[dict[str, Any]]:
    """A group for each parameter: ``FusedAdamW`` joins those of a group in one tensor, which fails on a CPU."""
    return [{"params": [one]} for one in parameters]


def in_groups(parameters: Any) -> list[dict[str, Any]]:
    return [{"params": parameters[2:], "lr": LR}, {"params": parameters[:2], "lr": LR}]


@dataclass
class Rule:
    """What numpy makes of an optimizer.

    Attributes:
        made: Makes the optimizer.
        decay: Multiple of the weight that is added to the gradient.
        decoupled: Multiple of the weight that is subtracted apart from it.
        keeps_greatest: Whether it stores the greatest second moment, and divides by it.
        sign: -1 if it steps along the gradient.
    """

    made: Callable[[Any], nn.Cell]
    decay: float = 0.0
    decoupled: float = 0.0
    keeps_greatest: bool = False
    sign: float = 1.0
    mean: dict[str, Any] = field(default_factory=dict)
    square: dict[str, Any] = field(default_factory=dict)
    greatest: dict[str, Any] = field(default_factory=dict)

    def step(self, number: int, name: str, gradient: np.ndarray, weight: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors of a parameter's step, by kind."""
        g = self.sign * gradient.astype(np.float64) + self.decay * weight
        m = self.mean[name] = BETAS[0] * self.mean.get(name, 0.0) + (1 - BETAS[0]) * g
        v = self.square[name] = BETAS[1] * self.square.get(name, 0.0) + (1 - BETAS[1]) * g * g
        top = self.greatest[name] = np.maximum(self.greatest.get(name, 0.0), v) if self.keeps_greatest else v
        a, b = (1 - beta ** (number + 1) for beta in BETAS)
        update = m / a / (np.sqrt(top / b) + EPS)
        ratio = np.divide(m / a, np.sqrt(top / b), out=np.zeros_like(m), where=top != 0)
        changed = weight * (1 - LR * self.decoupled) - LR * update
        return {"adam_update": update, "adam_ratio": ratio, "param_updated": changed}


ADAMS = {
    "Adam": lambda: Rule(lambda p: optim.Adam(p, LR, BETAS, EPS, weight_decay=0.1), decay=0.1),
    "Adam, maximize": lambda: Rule(lambda p: optim.Adam(p, LR, BETAS, EPS, maximize=True), sign=-1.0),
    "Adam, amsgrad": lambda: Rule(lambda p: optim.Adam(p, LR, BETAS, EPS, amsgrad=True)),
    "AdamW": lambda: Rule(lambda p: with_kernel(optim.AdamW(p, LR, BETAS, EPS, 0.1)), decoupled=0.1),
    "AdamW, amsgrad": lambda: Rule(
        lambda p: with_kernel(optim.AdamW(p, LR, BETAS, EPS, 0.1, amsgrad=True)), decoupled=0.1, keeps_greatest=True
    ),
    "AdamW, groups and amsgrad": lambda: Rule(
        lambda p: with_kernel(optim.AdamW(in_groups(p), LR, BETAS, EPS, 0.0, amsgrad=True)), keeps_greatest=True
    ),
    "FusedAdamW": lambda: Rule(lambda p: with_kernel(optim.FusedAdamW(each_alone(p), LR, BETAS, EPS, 0.1)), decoupled=0.1),
    "FusedAdamW, amsgrad": lambda: Rule(
        lambda p: with_kernel(optim.FusedAdamW(each_alone(p), LR, BETAS, EPS, 0.1, amsgrad=True)),
        decoupled=0.1,
        keeps_greatest=True,
    ),
}
Tensors = dict[tuple[str, str, int], np.ndarray]


def trained(net: nn.Cell, optimizer: nn.Cell, rule: Rule) -> Tensors:
    """What each step must have recorded, by kind, name and step."""
    gradients_of = ms.value_and_grad(net, None, optimizer.parameters)
    expected: Tensors = {}
    for number in range(STEPS):
        _, gradients = gradients_of(inputs(number))
        for parameter, gradient in zip(optimizer.parameters, map(array, gradients), strict=True):
            name = parameter.name
            kept = {"exp_avg": rule.mean, "exp_avg_sq": rule.square}
            kept |= {"max_exp_avg_sq": rule.greatest} if rule.keeps_greatest else {}
            found = {kind: of[name] for kind, of in kept.items()} if number else {}
            found |= {"grad_unreduced": gradient, "grad_reduced": gradient, "param_origin": array(parameter)}
            found |= rule.step(number, name, gradient, array(parameter))
            expected |= {(kind, name, number): x for kind, x in found.items()}
        optimizer(gradients)
    return expected


def assert_norms(output: Output, expected: Tensors) -> None:
    kinds = sorted({*(kind for kind, _, _ in expected), "max_exp_avg_sq"})
    found = {(kind, row.name, row.step): row.values["norm"] for kind in kinds for row in output.rows(kind)}
    assert sorted(found) == sorted(expected)
    for place, x in expected.items():
        assert found[place] == pytest.approx(np.linalg.norm(x), rel=1e-5, abs=1e-7), place


@pytest.mark.usefixtures("working_operations")
@pytest.mark.parametrize("name", ADAMS)
def test_the_adams_of_mint_have_all_rows(output: Output, name: str, caplog: pytest.LogCaptureFixture) -> None:
    net, rule = Net(), ADAMS[name]()
    optimizer = rule.made(net.trainable_params())
    with attached(output, net, optimizer, **ALL):
        expected = trained(net, optimizer, rule)
    assert_norms(output, expected)
    assert_health(output, expected, rule)
    assert warnings_in(caplog) == []
    said = {"max_exp_avg_sq": "missing: Adam creates this moment for amsgrad, and does not update it"}
    assert output.manifest()["notes"] == (said if name == "Adam, amsgrad" else {})


def assert_health(output: Output, expected: Tensors, rule: Rule) -> None:
    """Staleness and the share below eps follow from the gradient, with the decay that is added to it, and the moments."""
    squares: dict[str, Any] = {}
    tops: dict[str, Any] = {}
    found = {(row.name, row.step): row.values for row in output.rows("optimizer_health")}
    for (name, step), values in sorted(found.items(), key=lambda item: item[0][1]):
        g = rule.sign * expected["grad_reduced", name, step] + rule.decay * expected["param_origin", name, step]
        squares[name] = BETAS[1] * squares.get(name, 0.0) + (1 - BETAS[1]) * g * g
        top = tops[name] = np.maximum(tops.get(name, 0.0), squares[name]) if rule.keeps_greatest else squares[name]
        bias = 1 - BETAS[1] ** (step + 1)
        lowest = EPS**2 * bias
        assert values["staleness"] == pytest.approx(np.sqrt(np.mean(g * g / np.maximum(top, lowest)) * bias), rel=1e-4)
        assert values["below_eps"] == np.mean(top < lowest)
    assert len(found) == 4 * STEPS


@pytest.mark.usefixtures("working_operations")
@pytest.mark.parametrize("name", ADAMS)
def test_training_has_the_same_bits(output: Output, name: str) -> None:
    ends = []
    for monitored in (False, True):
        net, rule = Net(), ADAMS[name]()
        optimizer = rule.made(net.trainable_params())
        monitor = attached(output, net, optimizer, **ALL) if monitored else None
        trained(net, optimizer, rule)
        if monitor is not None:
            monitor.close()
        ends.append([array(one).tobytes() for one in (*net.get_parameters(), *optimizer.exp_avg, *optimizer.exp_avg_sq)])
    assert ends[0] == ends[1]


@pytest.mark.usefixtures("working_operations")
@pytest.mark.parametrize("sign", [1, -1], ids=["minimize", "maximize"])
def test_the_momentum_of_sgd_is_its_first_moment(output: Output, sign: int) -> None:
    net = Net()
    optimizer = optim.SGD(net.trainable_params(), 0.1, momentum=0.9, weight_decay=0.1, maximize=sign < 0)
    momenta: dict[str, np.ndarray] = {}
    expected: dict[tuple[str, int], float] = {}
    agreement: dict[tuple[str, int], float] = {}
    with attached(output, net, optimizer, **ALL):
        for number in range(STEPS):
            _, gradients = ms.value_and_grad(net, None, optimizer.parameters)(inputs(number))
            for parameter, gradient in zip(optimizer.parameters, map(array, gradients), strict=True):
                name, before = parameter.name, momenta.get(parameter.name)
                if before is not None:
                    expected[name, number] = float(np.linalg.norm(before))
                agreement[name, number] = 1.0 if before is None else np.mean(np.sign(sign * gradient) == np.sign(before))
                g = sign * gradient.astype(np.float64) + 0.1 * array(parameter)
                momenta[name] = g if before is None else 0.9 * before + g
            optimizer(gradients)
    found = {(row.name, row.step): row.values["norm"] for row in output.rows("exp_avg")}
    assert found == pytest.approx(expected, rel=1e-5)
    agrees = {(row.name.removesuffix(".mg_direction"), row.step): row.values["mean"] for row in output.rows("other")}
    assert agrees == pytest.approx(agreement, abs=1e-12)


@pytest.mark.usefixtures("working_operations")
def test_sgd_without_momentum_has_no_moments(output: Output) -> None:
    net = Net()
    optimizer = optim.SGD(net.trainable_params(), 0.1)
    with attached(output, net, optimizer, **ALL):
        for number in range(STEPS):
            _, gradients = ms.value_and_grad(net, None, optimizer.parameters)(inputs(number))
            optimizer(gradients)
    assert output.rows("exp_avg") == output.rows("other") == []
    assert len(output.rows("param_updated")) == 4 * STEPS


@pytest.mark.usefixtures("working_operations")
def test_the_learning_rate_of_sgd_is_the_one_that_it_steps_with(output: Output) -> None:
    """It ignores what schedules make of ``lr``."""
    net = Net()
    optimizer = optim.SGD(net.trainable_params(), 0.5)
    with attached(output, net, optimizer, **ALL):
        for number in range(2):
            before = array(net.b.bias)
            _, gradients = ms.value_and_grad(net, None, optimizer.parameters)(inputs(number))
            moved = array(gradients[3]) * 0.5
            optimizer(gradients)
            np.testing.assert_allclose(before - array(net.b.bias), moved, rtol=1e-4, atol=1e-7)
            ops.assign(optimizer.param_groups[0]["lr"], Tensor(0.25, ms.float32))
    assert [row.values["value"] for row in output.rows("run") if row.name == "learning_rate.0"] == [0.5, 0.5]


class Elementwise(nn.Cell):
    """Products and sums are what a CPU has for bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((6, 8)), ms.bfloat16), name="weight")
        self.square = Square()

    def construct(self, x: Tensor) -> Tensor:
        return mint.add(self.square(mint.mul(x, self.weight)), self.weight)


class Square(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        return mint.mul(x, x)


@pytest.mark.usefixtures("working_operations")
def test_bfloat16_has_all_rows(output: Output) -> None:
    def loss(net: nn.Cell, step: int) -> Tensor:
        return (net(drawn(step, 6, 8).astype(ms.bfloat16)).astype(ms.float32) ** 2).mean()

    job = Job(Elementwise, loss, optimizer=lambda p: optim.SGD(p, 0.1, momentum=0.9), data=(".input",))
    assert job.train(output, ops=["min", "max", "mean", "norm", "dtype"]) == job.train(None)
    assert_rows(output, job)
    assert {row.values["dtype"] for row in output.rows("grad_reduced")} == {"mindspore.bfloat16"}


# --- Without these operations, as on a CPU.


def test_an_optimizer_without_effect_is_named(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    first = [array(one) for one in net.trainable_params()]
    optimizer = optim.SGD(net.trainable_params(), 0.1, momentum=0.9)
    with attached(output, net, optimizer, wg_distribution=True, param_distribution=True):
        _, gradients = ms.value_and_grad(net, None, optimizer.parameters)(inputs(0))
        optimizer(gradients)
    (said,) = warnings_in(caplog)
    assert "SGD of mindspore.mint.optim changes no weight on this device" in said
    for one, weight in zip(net.trainable_params(), first, strict=True):
        np.testing.assert_array_equal(array(one), weight)
    norms = [{row.name: row.values["norm"] for row in output.rows(kind)} for kind in ("param_origin", "param_updated")]
    assert norms[0] == norms[1]


def step_and_wait(optimizer: nn.Cell, gradients: Any) -> None:
    """MindSpore raises an error when something waits for the operation."""
    optimizer(gradients)
    optimizer.parameters[0].asnumpy()


def test_an_optimizer_without_a_kernel_fails_as_without_the_monitor(output: Output) -> None:
    said = []
    for monitored in (False, True):
        net = Net()
        optimizer = optim.AdamW(net.trainable_params(), LR)
        monitor = attached(output, net, optimizer, **ALL) if monitored else None
        _, gradients = ms.value_and_grad(net, None, optimizer.parameters)(inputs(0))
        with pytest.raises(RuntimeError) as error:
            step_and_wait(optimizer, gradients)
        said.append(str(error.value).splitlines()[0])
        if monitor is not None:
            monitor.close()
    assert said == ["The kernel AdamW unregistered."] * 2
