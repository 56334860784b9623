"""Every kind of row of a network trained with MindSpore, against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from attaching import attached
from mindspore import Tensor, nn
from mindspore.dataset import GeneratorDataset
from mindspore.experimental import optim
from mindspore.train import Callback, Model
from reading_back import Output
from watching_cells import OPS, PARAMETERS, Array, Reference, TwoLayers, arrays, assert_rows, batch, train, written

from monitor.mindspore import MonitorCallback

ALL: dict[str, Any] = {
    "xy_distribution": True,
    "all_xy": True,
    "wg_distribution": True,
    "mv_distribution": True,
    "param_distribution": True,
    "ops": list(OPS),
    "ndigits": 15,
}
STEPS = 3

OPTIMIZERS: dict[str, Callable[[list[Any]], nn.Cell]] = {
    "nn.Adam": lambda p: nn.Adam(p, 0.01),
    "nn.AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.01),
    "nn.SGD": lambda p: nn.SGD(p, 0.1, momentum=0.9),
    "nn.Momentum": lambda p: nn.Momentum(p, 0.1, 0.9),
    "experimental.AdamW": lambda p: optim.AdamW(p, 0.01, amsgrad=True),
}
STATE = {
    "nn.Adam": {"exp_avg": "moment1", "exp_avg_sq": "moment2"},
    "nn.AdamWeightDecay": {"exp_avg": "moments1", "exp_avg_sq": "moments2"},
    "nn.SGD": {"exp_avg": "accum"},
    "nn.Momentum": {"exp_avg": "moments"},
    "experimental.AdamW": {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "max_exp_avg_sq": "max_exp_avg_sq"},
}


class Witness(Callback):
    """Notes the weights and moments before and after each step, as the training loop sees them."""

    def __init__(self, name: str, net: TwoLayers, optimizer: nn.Cell) -> None:
        super().__init__()
        self.name, self.net, self.optimizer = name, net, optimizer
        self.weights: dict[tuple[int, str], dict[str, Array]] = {}
        self.moments: dict[str, dict[tuple[str, int], Array]] = {kind: {} for kind in STATE[name]}
        self.step = 0

    def look(self, step: int, when: str) -> None:
        self.weights[step, when] = arrays(self.net)
        for kind, attribute in STATE[self.name].items() if when == "before" and step > 0 else ():
            for place, parameter in enumerate(getattr(self.optimizer, attribute)):
                self.moments[kind][PARAMETERS[place], step] = parameter.asnumpy().astype(np.float64)

    def on_train_step_begin(self, run_context: Any) -> None:
        del run_context
        self.look(self.step, "before")

    def on_train_step_end(self, run_context: Any) -> None:
        del run_context
        self.look(self.step, "after")
        self.step += 1

    def each(self, what: Callable[[Reference], dict[str, Array]]) -> dict[tuple[str, int], Array]:
        """What the reference says of every step."""
        computed = {step: Reference(self.weights[step, "before"], *batch(step)) for step in range(STEPS)}
        return {(name, step): x for step, one in computed.items() for name, x in what(one).items()}

    def of_weights(self, when: str) -> dict[tuple[str, int], Array]:
        return {(name, step): x for step in range(STEPS) for name, x in self.weights[step, when].items()}


def by_loop(output: Output, name: str) -> Witness:
    net = TwoLayers()
    optimizer = OPTIMIZERS[name](net.trainable_params())
    witness = Witness(name, net, optimizer)
    with attached(output, net, optimizer, **ALL):
        train(net, optimizer, range(STEPS), witness.look)
    return witness


def by_model(output: Output, name: str) -> Witness:
    net = TwoLayers()
    optimizer = OPTIMIZERS[name](net.trainable_params())
    witness = Witness(name, net, optimizer)
    data = GeneratorDataset([batch(step) for step in range(STEPS)], ["x", "y"], shuffle=False)
    callbacks = [MonitorCallback(written(output, **ALL)), witness]
    Model(net, nn.MSELoss(), optimizer).train(1, data, callbacks=callbacks, dataset_sink_mode=False)
    return witness


@pytest.mark.parametrize(
    ("name", "way"),
    # Model takes no optimizer of mindspore.experimental.
    [(name, way) for name in OPTIMIZERS for way in (by_loop, by_model) if way is by_loop or name.startswith("nn.")],
)
def test_every_kind_is_what_numpy_computes(output: Output, name: str, way: Callable[[Output, str], Witness]) -> None:
    witness = way(output, name)
    assert_rows(output, "actv", witness.each(lambda one: one.activations))
    assert_rows(output, "actv_grad", witness.each(lambda one: one.activation_gradients))
    assert_rows(output, "grad_unreduced", witness.each(lambda one: one.gradients))
    assert_rows(output, "grad_reduced", witness.each(lambda one: one.gradients))
    assert_rows(output, "param_origin", witness.of_weights("before"), rel=1e-12)
    assert_rows(output, "param_updated", witness.of_weights("after"), rel=1e-12)
    for kind, expected in witness.moments.items():
        assert_rows(output, kind, expected, rel=1e-12)
    kinds = {path.name.rpartition("_")[0] for path in output.directory().glob("*.csv")}
    assert kinds == {"actv", "actv_grad", "grad_unreduced", "grad_reduced", "param_origin", "param_updated", *witness.moments}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_that_is_monitored_has_the_same_bits(output: Output, name: str) -> None:
    extras = {"update_ratio": True, "mg_direction": True, "ur_distribution": True, "format": ["csv", "hdf5", "tensorboard"]}
    found = []
    for monitored in (False, True):
        net = TwoLayers()
        optimizer = OPTIMIZERS[name](net.trainable_params())
        monitor = attached(output, net, optimizer, **ALL, **extras) if monitored else None
        losses = train(net, optimizer, range(6))
        if monitor is not None:
            monitor.close()
        state = [one.asnumpy().tobytes() for attribute in STATE[name].values() for one in getattr(optimizer, attribute)]
        found.append((losses, [p.asnumpy().tobytes() for p in net.get_parameters()], state))
    assert found[0] == found[1]


def test_the_input_of_a_network_has_a_gradient_where_somebody_asks_for_it(output: Output) -> None:
    import mindspore as ms

    net = TwoLayers()
    optimizer = nn.SGD(net.trainable_params())
    with attached(output, net, optimizer, **ALL):
        x, y = map(Tensor, batch(0))
        (gradient, of_weights) = ms.grad(lambda x: ((net(x) - y) ** 2).mean(), 0, optimizer.parameters)(x)
        optimizer(of_weights)
    rows = {row.name: row.values for row in output.rows("actv_grad")}
    assert rows["a.input"]["norm"] == pytest.approx(np.linalg.norm(gradient.asnumpy()), rel=1e-6)
    assert rows[".input"]["norm"] == rows["a.input"]["norm"]
