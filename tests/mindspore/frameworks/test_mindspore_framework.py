"""Where MindSpore's optimizers keep gradients and moments, and what they make of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.experimental import optim
from training import OPTIMIZERS, Net, array, grouped, train

from monitor.mindspore.frameworks.adams import MindSporeMoments
from monitor.mindspore.frameworks.framework import MindSporeFramework, framework_of
from monitor.series import LOCAL

KINDS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
ADAMS = [name for name in OPTIMIZERS if "Adam" in name and "AdaMax" not in name]
WIDE = np.float64


@dataclass(frozen=True)
class Named:
    tensor: Parameter


def watched(net: Net, optimizer: nn.Cell) -> tuple[MindSporeFramework, list[Named]]:
    """As after a step."""
    framework = framework_of([net], optimizer, main_grad=False)
    framework.stepped[id(optimizer)].call_ended()
    return framework, [Named(p) for p in net.trainable_params()]


def kinds_of(framework: MindSporeFramework, parameter: Named) -> dict[str, str]:
    found = {kind: framework.moment(kind, parameter) for kind in KINDS}
    return {kind: one.name.removesuffix(parameter.tensor.name) for kind, one in found.items() if one is not None}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nn.Adam", {"exp_avg": "moment1.", "exp_avg_sq": "moment2."}),
        ("nn.Adam amsgrad", {"exp_avg": "moment1.", "exp_avg_sq": "moment2.", "max_exp_avg_sq": "vhat."}),
        ("nn.LazyAdam", {"exp_avg": "moment1.", "exp_avg_sq": "moment2."}),
        ("nn.AdamWeightDecay", {"exp_avg": "adam_m.", "exp_avg_sq": "adam_v."}),
        ("nn.SGD", {}),
        ("nn.SGD momentum", {"exp_avg": "accum."}),
        ("nn.Momentum", {"exp_avg": "moments."}),
        ("nn.RMSProp", {"exp_avg_sq": "mean_square."}),
        ("nn.AdaMax", {"exp_avg": "moment1."}),
        ("experimental.Adam", {"exp_avg": "exp_avg.", "exp_avg_sq": "exp_avg_sq."}),
        ("experimental.AdamW", {"exp_avg": "exp_avg.", "exp_avg_sq": "exp_avg_sq."}),
        (
            "experimental.AdamW amsgrad",
            {"exp_avg": "exp_avg.", "exp_avg_sq": "exp_avg_sq.", "max_exp_avg_sq": "max_exp_avg_sq."},
        ),
        ("experimental.SGD", {}),
        ("experimental.SGD momentum", {"exp_avg": "accum."}),
    ],
)
def test_each_optimizer_s_moments_are_found_under_its_names(name: str, expected: dict[str, str]) -> None:
    net = Net()
    framework, parameters = watched(net, OPTIMIZERS[name](net.trainable_params()))
    assert [kinds_of(framework, parameter) for parameter in parameters] == [expected] * 4


def test_other_optimizers_have_the_moments_that_they_use() -> None:
    net = Net()
    of = {
        "FTRL": nn.FTRL(net.trainable_params()),
        "Lamb": nn.Lamb(net.trainable_params(), 0.1),
        "RMSProp": nn.RMSProp(net.trainable_params(), momentum=0.5),
        "RMSprop": optim.RMSprop(net.trainable_params()),
        "Adadelta": nn.Adadelta(net.trainable_params()),
        "experimental Adadelta": optim.Adadelta(net.trainable_params()),
        "AdaFactor": nn.AdaFactor(net.trainable_params(), learning_rate=0.1, relative_step=False),
        "AdaFactor without": nn.AdaFactor(net.trainable_params(), learning_rate=0.1, relative_step=False, beta1=0.0),
        "LARS": nn.LARS(nn.Momentum(net.trainable_params(), 0.1, momentum=0.9)),
        "NAdam": optim.NAdam(net.trainable_params()),
        "Adam with amsgrad": optim.Adam(net.trainable_params(), amsgrad=True),
    }
    found = {name: set(kinds_of(watched(net, one)[0], Named(net.a.weight))) for name, one in of.items()}
    assert found == {
        "FTRL": set(),
        "Lamb": {"exp_avg", "exp_avg_sq"},
        "RMSProp": {"exp_avg", "exp_avg_sq"},
        "RMSprop": {"exp_avg_sq"},
        "Adadelta": {"exp_avg_sq"},
        "experimental Adadelta": {"exp_avg_sq"},
        "AdaFactor": {"exp_avg"},
        "AdaFactor without": set(),
        "LARS": {"exp_avg"},
        "NAdam": {"exp_avg", "exp_avg_sq"},
        "Adam with amsgrad": {"exp_avg", "exp_avg_sq"},
    }


@pytest.mark.parametrize("beta1", [0.9, 0.0])
def test_a_note_says_which_moments_ada_factor_keeps_in_parts(beta1: float) -> None:
    net = Net()
    optimizer = nn.AdaFactor(net.trainable_params(), learning_rate=0.1, relative_step=False, beta1=beta1)
    framework, parameters = watched(net, optimizer)
    missing = {kind for kind in ("exp_avg", "exp_avg_sq") if kind not in kinds_of(framework, parameters[0])}
    assert missing == ({"exp_avg_sq"} if beta1 else {"exp_avg", "exp_avg_sq"})
    assert list(framework.notes()) == ["exp_avg_sq"]
    assert framework.notes()["exp_avg_sq"].endswith("or holds no floating-point numbers: 'exp_avg_sq'")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_note_is_made_of_an_optimizer_whose_moments_are_all_there(name: str) -> None:
    net = Net()
    assert set(watched(net, OPTIMIZERS[name](net.trainable_params()))[0].notes()) <= {"loss_scale"}


@pytest.mark.parametrize(
    ("kind", "attribute", "made"),
    [("exp_avg", "moment1", nn.Adam), ("exp_avg_sq", "ms", nn.RMSProp), ("exp_avg_sq", "mean_square", optim.RMSprop)],
)
def test_an_optimizer_that_has_not_stepped_has_no_moments_yet_and_one_that_continues_has(
    kind: str, attribute: str, made: Callable[..., nn.Cell]
) -> None:
    net = Net()
    optimizer = made(net.trainable_params(), 0.01)
    one = Named(net.a.weight)
    fresh = framework_of([net], optimizer, main_grad=False)
    assert fresh.moment(kind, one) is None
    assert fresh.keeps(kind, one)
    train(net, optimizer)
    assert framework_of([net], optimizer, main_grad=False).moment(kind, one) is getattr(optimizer, attribute)[0]


def test_moments_are_those_of_the_parameter_though_groups_have_another_order() -> None:
    net = Net()
    optimizer = nn.Adam(grouped(net), 0.01)
    framework, parameters = watched(net, optimizer)
    train(net, optimizer)
    names = {one.tensor.name: framework.moment("exp_avg", one).name for one in parameters}
    assert names == {name: f"moment1.{name}" for name in ("a.weight", "a.bias", "b.weight", "b.bias")}


def test_momentum_of_one_group_and_none_of_another() -> None:
    net = Net()
    groups = [{"params": net.a.trainable_params(), "momentum": 0.0}, {"params": net.b.trainable_params()}]
    framework, parameters = watched(net, optim.SGD(groups, 0.1, momentum=0.9))
    assert [set(kinds_of(framework, one)) for one in parameters] == [set(), set(), {"exp_avg"}, {"exp_avg"}]


def test_a_parameter_of_a_group_that_was_added_later_has_no_moment_until_there_is_one() -> None:
    net = Net()
    optimizer = optim.AdamW(net.a.trainable_params())
    framework, parameters = watched(net, optimizer)
    optimizer.add_param_group({"params": net.b.trainable_params()})
    assert [set(kinds_of(framework, one)) for one in parameters[2:]] == [set(), set()]


def test_the_reduced_gradient_is_what_the_optimizer_was_handed_in_this_step() -> None:
    net = Net()
    optimizer = nn.SGD(grouped(net), 0.1)
    framework, parameters = watched(net, optimizer)
    gradients = [Tensor(np.full(p.shape, place, np.float32)) for place, p in enumerate(optimizer.parameters)]
    framework.stepped[id(optimizer)].begin_step([*gradients[:3], None])
    handed = [framework.reduced(one) for one in parameters]
    assert handed[0] is gradients[2]
    assert handed[1] is None
    assert handed[2:] == gradients[:2]
    framework.stepped[id(optimizer)].end_step()
    assert framework.reduced(parameters[0]) is None
    framework.stepped[id(optimizer)].begin_step(gradients)
    assert framework.reduced(Named(Parameter(Tensor(1.0), name="of another model"))) is None


def test_a_loss_scale_of_the_optimizer_s_own_is_noted() -> None:
    net = Net()
    assert watched(net, nn.SGD(net.trainable_params(), 0.1))[0].notes() == {}
    assert watched(net, nn.SGD(net.trainable_params(), 0.1, loss_scale=8.0))[0].notes()["loss_scale"].startswith("8.0: ")


def test_what_a_rank_records_is_its_own() -> None:
    net = Net()
    framework, parameters = watched(net, nn.SGD(net.trainable_params(), 0.1))
    assert framework.placement("grad_reduced", parameters[0]) == LOCAL
    assert framework.weight(parameters[0]) is net.a.weight
    assert framework.groups() == {}


def wide(x: float | Tensor) -> np.ndarray:
    return np.asarray(x if isinstance(x, float) else x.asnumpy(), WIDE)


def update(moments: MindSporeMoments) -> np.ndarray:
    """As ``MindSporeMoments`` says that it is computed."""
    a, b = wide(moments.mean_correction), wide(moments.square_correction)
    eps = moments.eps / np.sqrt(b) if moments.eps_on_root else moments.eps
    return wide(moments.mean) / a / (np.sqrt(wide(moments.square) / b) + eps)


@pytest.mark.parametrize("name", ADAMS)
def test_what_is_said_of_an_adam_is_what_it_did_to_the_weights(name: str) -> None:
    net = Net()
    optimizer = OPTIMIZERS[name](net.trainable_params())
    framework, parameters = watched(net, optimizer)
    train(net, optimizer, steps=4)
    before = [array(one.tensor).astype(WIDE) for one in parameters]
    train(net, optimizer, steps=1)
    assert framework.is_adam(optimizer)
    for parameter, weight in zip(parameters, before, strict=True):
        moments = framework.adam_of(parameter)
        # A weight near 1 is rounded by 6e-8, and the learning rate is 0.01.
        np.testing.assert_allclose((weight - array(parameter.tensor)) / 0.01, update(moments), rtol=1e-4, atol=2.5e-5)


@pytest.mark.parametrize("wrong", ["eps_on_root", "corrections"])
def test_another_adam_s_rule_is_distinguished_by_that_test(wrong: str) -> None:
    net = Net()
    optimizer = OPTIMIZERS["experimental.AdamW"](net.trainable_params())
    framework, parameters = watched(net, optimizer)
    weight = array(net.a.weight).astype(WIDE)
    train(net, optimizer, steps=1)
    m = framework.adam_of(parameters[0])
    changed = (
        MindSporeMoments(m.mean, m.square, m.mean_correction, m.square_correction, m.eps, eps_on_root=True, bias=m.bias)
        if wrong == "eps_on_root"
        else MindSporeMoments(m.mean, m.square, 1.0, 1.0, m.eps, eps_on_root=False, bias=m.bias)
    )
    assert np.abs((weight - array(net.a.weight)) / 0.01 - update(changed)).max() > 1e-3


def test_of_optimizers_that_step_otherwise_nothing_is_said() -> None:
    net = Net()
    every = net.trainable_params()
    others = [nn.Adam(every, use_nesterov=True), nn.SGD(every, 0.1), nn.Lamb(every, 0.1), nn.AdaMax(every), optim.NAdam(every)]
    found = [(watched(net, one)[0], one) for one in others]
    assert [(f.is_adam(one), f.adam_of(Named(net.a.weight))) for f, one in found] == [(False, None)] * 5


@pytest.mark.parametrize("given", [None, 0.1, Net(), "adam", nn.SGD], ids=lambda given: type(given).__name__)
def test_what_is_no_optimizer_is_refused_in_one_sentence(given: object) -> None:
    expected = rf"^optimizer is a {type(given).__name__}: expected an optimizer of mindspore\.nn, [^\n]*\.$"
    with pytest.raises(TypeError, match=expected):
        framework_of([Net()], given, main_grad=False)
