"""Every row of trainings that are written with MindSpore's cells and functions, against its own differentiation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import Output, warnings_in
from mindspore import Tensor, mint, nn, ops, parallel
from mindspore.experimental import optim
from tapping import STEPS, Job, Step, array, assert_rows, drawn

from monitor.recording.parameters import NOT_ACCUMULATED


class Layers(nn.Cell):
    """``last(part(first(x)))``."""

    def __init__(self, part: Callable[[], nn.Cell], width: int = 8) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Dense(8, 8), part(), nn.Dense(width, 2)

    def construct(self, x: Tensor) -> Tensor:
        return self.last(self.part(self.first(x)))


class Function(nn.Cell):
    """A function as a cell."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def construct(self, x: Tensor) -> Any:
        return self.function(x)


class TwoLayers(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Dense(8, 5), nn.Dense(5, 2)

    def construct(self, x: Tensor) -> Tensor:
        return self.second(ops.tanh(self.first(x)))


class Loss(nn.Cell):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TwoLayers()

    def construct(self, x: Tensor) -> Tensor:
        return (self.net(x) ** 2).mean()


DATA_OF_LOSS = (".input", "net.input", "net.first.input")


def batch(step: int) -> Tensor:
    return drawn(1000 + step, 6, 8)


def loss_of(net: nn.Cell, step: int) -> Tensor:
    return net(batch(step))


# --- Layers of ``mindspore.mint.nn`` that have a kernel on the CPU, and others with MindSpore's own operations in their place.


def layer_norm(x: Tensor, _shape: Any, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keep_dims=True)
    return centred / ops.sqrt((centred**2).mean(-1, keep_dims=True) + eps) * weight + bias


def embedding(ids: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return ops.gather(weight, ids, 0)


def dropout(x: Tensor, share: float, *_: Any) -> Tensor:
    kept = Tensor((np.random.default_rng(7).uniform(size=x.shape) > share).astype(np.float32))
    return x * kept / (1 - share)


def convolution() -> nn.Cell:
    cell = mint.nn.Conv2d(2, 2, 3, padding=1)
    cell.conv2d = lambda x, weight, bias, *_: ops.conv2d(x, weight, bias, pad_mode="pad", padding=1)
    return cell


class Images(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.convolution, self.last = nn.Dense(8, 2 * 3 * 3), convolution(), nn.Dense(18, 2)

    def construct(self, x: Tensor) -> Tensor:
        return self.last(self.convolution(self.first(x).view(6, 2, 3, 3)).view(6, 18))


class Words(nn.Cell):
    def __init__(self, table: nn.Cell) -> None:
        super().__init__()
        self.table, self.last = table, nn.Dense(8, 2)

    def construct(self, ids: Tensor) -> Tensor:
        return self.last(self.table(ids))


IDS = Tensor(np.array([[1, 2, 3], [4, 5, 1]], np.int32))


def loss_of_words(net: nn.Cell, _step: int) -> Tensor:
    return (net(IDS) ** 2).mean()


MINT = {
    "Linear": Job(lambda: Layers(lambda: mint.nn.Linear(8, 8))),
    "ReLU": Job(lambda: Layers(mint.nn.ReLU)),
    "SiLU": Job(lambda: Layers(mint.nn.SiLU)),
    "Softmax": Job(lambda: Layers(lambda: mint.nn.Softmax(-1))),
    "Sigmoid": Job(lambda: Layers(mint.nn.Sigmoid)),
    "Tanh": Job(lambda: Layers(mint.nn.Tanh)),
    "GroupNorm": Job(lambda: Layers(lambda: mint.nn.GroupNorm(2, 8))),
    "BCEWithLogitsLoss": Job(
        lambda: nn.WithLossCell(TwoLayers(), mint.nn.BCEWithLogitsLoss()),
        lambda net, step: net(batch(step), Tensor(np.full((6, 2), 0.25, np.float32))),
        data=(".input_0", ".input_1", "_backbone.input", "_backbone.first.input", "_loss_fn.input_1"),
    ),
    "LayerNorm": Job(lambda: Layers(lambda: mint.nn.LayerNorm(8))),
    "Dropout": Job(lambda: Layers(lambda: mint.nn.Dropout(0.4))),
    "Conv2d": Job(Images),
    "Embedding": Job(lambda: Words(mint.nn.Embedding(7, 8)), loss_of_words, data=()),
    "Identity": Job(lambda: Layers(mint.nn.Identity), data=(".input", "first.input", "part.input")),
}


@pytest.mark.parametrize("name", MINT)
def test_layers_of_mint(output: Output, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "layer_norm", layer_norm)
    monkeypatch.setattr(ops, "embedding", embedding)
    monkeypatch.setattr(ops.auto_generate, "func_dropout_ext_op", dropout)
    assert_recorded(output, MINT[name])


def assert_recorded(output: Output, job: Job, **config: Any) -> None:
    """All rows are right, and training has the same bits."""
    assert job.train(output, **config) == job.train(None)
    assert_rows(output, job)


# --- Cells that MindSpore offers for training: the loss, the backward, the optimizer, micro-batches.


class NeverOverflows(nn.TrainOneStepWithLossScaleCell):
    """On a CPU MindSpore cannot tell."""

    def get_overflow_status(self, *_: Any) -> Tensor:
        return Tensor(False)


def trains_itself(make: Callable[..., nn.Cell], **options: Any) -> Callable[[Job, nn.Cell, nn.Cell], Step]:
    """A loop that calls one cell a step."""

    def loop(_job: Job, net: nn.Cell, optimizer: nn.Cell) -> Step:
        cell = make(net, optimizer, **options).set_train(True)

        def step(number: int) -> Tensor:
            found = cell(batch(number))
            return found if isinstance(found, Tensor) else found[0]

        return step

    return loop


def returns_gradients(all_inputs: bool) -> Callable[[Job, nn.Cell, nn.Cell], Step]:
    def loop(_job: Job, net: nn.Cell, optimizer: nn.Cell) -> Step:
        cell = nn.ForwardValueAndGrad(net, optimizer.parameters, get_all=all_inputs, get_by_list=True).set_train(True)

        def step(number: int) -> Tensor:
            loss, gradients = cell(batch(number))
            optimizer(gradients[1] if all_inputs else gradients)
            return loss

        return step

    return loop


TARGET = drawn(3, 6, 2)


def with_grad_cell(_job: Job, net: nn.Cell, optimizer: nn.Cell) -> Step:
    cell = nn.WithGradCell(net, nn.MSELoss()).set_train(True)

    def step(number: int) -> Tensor:
        gradients = cell(batch(number), TARGET)
        optimizer(gradients)
        return gradients[0]

    return step


def micro_batches(wrapper: Callable[..., nn.Cell], inputs: str) -> Job:
    """``wrapper`` calls the model once for each half of the batch."""
    split = [f"{inputs}.{half}.{slot}" for half in range(2) for slot in ("input_1", "output")]
    called = [f"network.{name}input{call}" for name in ("", "net.", "net.first.") for call in ("", "#1")]
    return Job(lambda: wrapper(Loss(), 2), loss_of, data=(".input", *split, *called))


WRAPPERS = {
    "TrainOneStepCell": Job(Loss, loss_of, trains_itself(nn.TrainOneStepCell), data=DATA_OF_LOSS),
    "TrainOneStepCell with a sensitivity": Job(
        Loss,
        lambda net, step: loss_of(net, step) * 8.0,
        trains_itself(nn.TrainOneStepCell, sens=8.0, return_grad=True),
        data=DATA_OF_LOSS,
    ),
    "TrainOneStepWithLossScaleCell": Job(
        Loss,
        loss_of,
        trains_itself(NeverOverflows, scale_sense=nn.FixedLossScaleUpdateCell(1024)),
        data=DATA_OF_LOSS,
        scale=1024.0,
    ),
    "ForwardValueAndGrad": Job(Loss, loss_of, returns_gradients(all_inputs=False), data=DATA_OF_LOSS),
    "ForwardValueAndGrad of all inputs": Job(Loss, loss_of, returns_gradients(all_inputs=True), data=()),
    "WithGradCell": Job(TwoLayers, lambda net, step: nn.MSELoss()(net(batch(step)), TARGET), with_grad_cell),
    "WithLossCell": Job(
        lambda: nn.WithLossCell(TwoLayers(), nn.MSELoss()),
        lambda net, step: net(batch(step), TARGET),
        data=(".input_0", ".input_1", "_backbone.input", "_backbone.first.input", "_loss_fn.input_1"),
    ),
    "PipelineCell": micro_batches(nn.PipelineCell, "micro_inputs"),
    "GradAccumulationCell": micro_batches(nn.GradAccumulationCell, "micro_inputs"),
    "MicroBatchInterleaved": micro_batches(nn.MicroBatchInterleaved, "interleave_inputs"),
    "parallel.Pipeline": micro_batches(parallel.nn.Pipeline, "micro_inputs"),
    "parallel.GradAccumulation": micro_batches(parallel.nn.GradAccumulation, "micro_inputs"),
    "parallel.MicroBatchInterleaved": micro_batches(parallel.nn.MicroBatchInterleaved, "interleave_inputs"),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_cells_that_train(output: Output, name: str) -> None:
    assert_recorded(output, WRAPPERS[name])


# --- The functions that differentiate.

Differentiate = Callable[[nn.Cell, Any, Tensor], tuple[Tensor, Any]]
"""The result and the gradients of the parameters, from a model, the parameters and the batch."""


def differentiating(function: Differentiate) -> Callable[[Job, nn.Cell, nn.Cell], Step]:
    def loop(_job: Job, net: nn.Cell, optimizer: nn.Cell) -> Step:
        def step(number: int) -> Tensor:
            result, gradients = function(net, optimizer.parameters, batch(number))
            optimizer(gradients)
            return result

        return step

    return loop


def two(net: nn.Cell, x: Tensor) -> tuple[Tensor, Tensor]:
    y = net(x)
    return (y**2).mean(), y.sum()


def several_outputs(net: nn.Cell, weights: Any, x: Tensor) -> tuple[Tensor, Any]:
    (loss, _), gradients = ms.value_and_grad(lambda x: two(net, x), None, weights)(x)
    return loss, gradients


def has_aux(net: nn.Cell, weights: Any, x: Tensor) -> tuple[Tensor, Any]:
    (loss, _), gradients = ms.value_and_grad(lambda x: two(net, x), None, weights, has_aux=True)(x)
    return loss, gradients


def of_an_input(net: nn.Cell, weights: Any, x: Tensor) -> tuple[Tensor, Any]:
    loss, (_, gradients) = ms.value_and_grad(lambda x: two(net, x)[0], 0, weights)(x)
    return loss, gradients


def with_ids(net: nn.Cell, weights: Any, x: Tensor) -> tuple[Tensor, Any]:
    loss, gradients = ms.value_and_grad(lambda x: two(net, x)[0], None, weights, return_ids=True)(x)
    return loss, tuple(gradient for _, gradient in gradients)


def gradients_alone(net: nn.Cell, weights: Any, x: Tensor) -> tuple[Tensor, Any]:
    gradients = ms.grad(lambda x: two(net, x)[0], None, weights)(x)
    return gradients[0], gradients


def grad_operation(net: nn.Cell, weights: Any, x: Tensor) -> tuple[Tensor, Any]:
    gradients = ops.GradOperation(get_by_list=True)(lambda x: two(net, x)[0], weights)(x)
    return gradients[0], gradients


def set_grad(net: nn.Cell, weights: Any, x: Tensor) -> tuple[Tensor, Any]:
    result = net.set_grad()(x)
    return result, ops.GradOperation(get_by_list=True)(net, weights)(x)


def of_the_cell(net: nn.Cell, weights: Any, x: Tensor) -> tuple[Tensor, Any]:
    result, gradients = ms.value_and_grad(net, None, weights)(x)
    return result, gradients


def with_a_sensitivity(net: nn.Cell, weights: Any, x: Tensor) -> tuple[Tensor, Any]:
    result, gradients = ms.value_and_grad(net, None, weights, sens_param=True)(x, Tensor(np.full((6, 2), 2.0, np.float32)))
    return result, gradients


def first_of_two(net: nn.Cell, step: int) -> Tensor:
    return two(net, batch(step))[0]


FUNCTIONS = {
    "value_and_grad of several outputs": Job(
        TwoLayers, lambda net, step: sum(two(net, batch(step))), differentiating(several_outputs)
    ),
    "value_and_grad with has_aux": Job(TwoLayers, first_of_two, differentiating(has_aux)),
    "value_and_grad of an input": Job(TwoLayers, first_of_two, differentiating(of_an_input), data=()),
    "value_and_grad with ids": Job(TwoLayers, first_of_two, differentiating(with_ids)),
    "value_and_grad of the cell": Job(TwoLayers, lambda net, step: net(batch(step)).sum(), differentiating(of_the_cell)),
    "value_and_grad with a sensitivity": Job(
        TwoLayers, lambda net, step: net(batch(step)).sum() * 2.0, differentiating(with_a_sensitivity)
    ),
    "grad": Job(TwoLayers, first_of_two, differentiating(gradients_alone)),
    "GradOperation": Job(TwoLayers, first_of_two, differentiating(grad_operation)),
    "set_grad": Job(TwoLayers, lambda net, step: net(batch(step)).sum(), differentiating(set_grad)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_differentiate(output: Output, name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert_recorded(output, FUNCTIONS[name])
    assert warnings_in(caplog) == []


def test_a_gradient_of_the_input_alone_is_a_forward_more(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    def both(net: nn.Cell, weights: Any, x: Tensor) -> tuple[Tensor, Any]:
        ms.value_and_grad(lambda x: two(net, x)[0])(x)
        return gradients_alone(net, weights, x)

    job = Job(TwoLayers, first_of_two, differentiating(both))
    assert job.train(output) == job.train(None)
    assert [row.micro_step for row in output.rows("actv_grad") if row.name == ".input"] == [0] * STEPS
    assert len(output.rows("grad_unreduced")) == len(output.rows("grad_reduced")) == 4 * STEPS
    assert any("has more training forwards of the model" in said for said in warnings_in(caplog))


def test_a_row_of_several_backwards_holds_the_last_and_the_manifest_says_so(output: Output) -> None:
    last: dict[tuple[str, int], float] = {}

    def twice(job: Job, net: nn.Cell, optimizer: nn.Cell) -> Step:
        def step(number: int) -> Tensor:
            loss, gradients = ms.value_and_grad(lambda: job.loss(net, number), None, optimizer.parameters)()
            later = ms.grad(lambda: job.loss(net, number + 50), None, optimizer.parameters)()
            for one, gradient in zip(optimizer.parameters, later, strict=True):
                last[one.name, number] = float(np.linalg.norm(array(gradient)))
            optimizer(gradients)
            return loss

        return step

    Job(TwoLayers, loop=twice).train(output)
    found = {(row.name, row.step): row.values["norm"] for row in output.rows("grad_unreduced")}
    assert found == pytest.approx(last, rel=1e-6)
    assert output.manifest()["notes"] == {"grad_unreduced": NOT_ACCUMULATED}


def test_a_backward_of_several_micro_batches_has_one_row_and_the_manifest_says_so(output: Output) -> None:
    net = nn.GradAccumulationCell(Loss(), 2)
    inner: nn.Cell = net.network
    job = Job(lambda: inner, lambda _, step: net(batch(step)))
    job.train(output, monitor_mbs_grad=True)
    unreduced, reduced = output.table("grad_unreduced", "norm"), output.table("grad_reduced", "norm")
    assert {(name, step, None): norm for (name, step, _), norm in unreduced.items()} == pytest.approx(reduced, rel=1e-6)
    assert {at for _, _, at in unreduced} == {1}, "the last of them"
    assert "a step had fewer backwards than micro-batches" in output.manifest()["notes"]["grad_unreduced"]


# --- Parameters and cells that are used several times, in-place operations, views, types of numbers, groups.


class Tied(nn.Cell):
    """One parameter in two cells."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.middle, self.out = nn.Embedding(7, 8), nn.Dense(8, 8), nn.Dense(8, 7, has_bias=False)
        self.out.weight = self.table.embedding_table

    def construct(self, ids: Tensor) -> Tensor:
        return self.out(ops.tanh(self.middle(self.table(ids))))


class Shared(nn.Cell):
    """One cell in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(8, 8)
        self.again = self.first
        self.listed = nn.CellList([self.first, nn.Dense(8, 8)])
        self.named = nn.CellDict({"p": nn.Dense(8, 8), "q": self.first})

    def construct(self, x: Tensor) -> Tensor:
        for cell in (*self.listed, *self.named.values(), self.again):
            x = ops.tanh(cell(x))
        return x


class Keywords(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dense(8, 8)

    def construct(self, pair: Any, *, scale: Tensor, table: Any = None) -> Any:
        x, (y, _) = pair
        return {"h": self.layer(x) * scale, "rest": [y * 2.0, (table["t"] * x, None)], "number": 3}


class CallsKeywords(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.many = nn.Dense(8, 8), Keywords()

    def construct(self, x: Tensor) -> Tensor:
        h = self.first(x)
        found = self.many((ops.tanh(h), (h * 3.0, "text")), scale=ops.sin(h), table={"t": h * 0.5})
        return found["h"] + found["rest"][0] * found["rest"][1][0]


def copied_into(x: Tensor) -> Tensor:
    result = x * 1.0
    result.copy_(ops.tanh(x) * 2.0)
    return result


def changed(x: Tensor) -> Tensor:
    x[0:2] = x[2:4] * 2.0
    return x


def overwritten(x: Tensor) -> Tensor:
    x.copy_(ops.tanh(x))
    return x


def increased(x: Tensor) -> Tensor:
    x = x * 2.0
    x += 1.0
    return x


@ms.jit
def compiled(x: Tensor) -> Tensor:
    return ops.tanh(x) * 2.0


def doubled(x: Any) -> Any:
    return 2.0 * x


def same(x: Any) -> Any:
    return x


class Morphed(nn.Cell):
    """``Morph`` is for the compiler alone."""

    def __init__(self) -> None:
        super().__init__()
        self.morph = ops.Morph(doubled, same, same)

    @ms.jit
    def construct(self, x: Tensor) -> Tensor:
        return self.morph(x)


def of(function: Callable[[Tensor], Any], width: int = 8) -> Job:
    return Job(lambda: Layers(lambda: Function(function), width))


def as_type(dtype: Any) -> nn.Cell:
    net = TwoLayers()
    for parameter in net.get_parameters():
        parameter.set_dtype(dtype)
    return net


def cast_inside() -> nn.Cell:
    net = TwoLayers()
    net.first.to_float(ms.float16)
    net.second.to_float(ms.float32)
    return net


def frozen(*names: str) -> nn.Cell:
    net = TwoLayers()
    for name, parameter in net.parameters_and_names():
        parameter.requires_grad = name not in names
    return net


def grouped(net: nn.Cell) -> Any:
    """Two groups, in another order than the model's."""
    second = {"params": net.second.trainable_params(), "lr": 0.03}
    return [second, {"params": net.first.trainable_params(), "weight_decay": 0.01}]


def halves(net: nn.Cell, step: int) -> Tensor:
    return (net(batch(step).astype(ms.float16)).astype(ms.float32) ** 2).mean()


def amp(level: str) -> Job:
    wrapped = {"O1": (".input", "first.input")}.get(level, (".input", "_backbone.input", "_backbone.first.input"))
    return Job(lambda: ms.amp.auto_mixed_precision(TwoLayers(), level, ms.float16), data=wrapped)


USES = {
    "one parameter in two cells": Job(Tied, loss_of_words, data=()),
    "one cell in several places": Job(Shared),
    "keywords and dictionaries": Job(CallsKeywords),
    "copy_ into a result": of(copied_into),
    "copy_ into an argument": of(lambda x: overwritten(x * 1.0)),
    "an argument of the cell is overwritten": Job(
        lambda: Layers(lambda: nn.SequentialCell(Function(doubled), Function(overwritten)))
    ),
    "elements of an argument of the cell are set": Job(
        lambda: Layers(lambda: nn.SequentialCell(Function(doubled), Function(changed)))
    ),
    "+=": of(increased),
    "view": of(lambda x: x.view(48).view(6, 8)),
    "reshape": of(lambda x: x.reshape(3, 16).reshape(6, 8)),
    "slice": of(lambda x: x[1:4]),
    "transpose": of(lambda x: x.transpose(1, 0).transpose(1, 0)),
    "chunk": of(lambda x: mint.chunk(x, 2, 1)[1], 4),
    "broadcast": of(lambda x: x[:1].broadcast_to((6, 8))),
    "a compiled function": of(compiled),
    "Morph in a compiled cell": Job(lambda: Layers(Morphed), twin=lambda: Layers(lambda: Function(doubled))),
    "float16": Job(lambda: as_type(ms.float16), halves),
    "float16 with Adam": Job(lambda: as_type(ms.float16), halves, optimizer=lambda p: nn.Adam(p, 0.01)),
    "to_float": Job(lambda: TwoLayers().to_float(ms.float16)),
    "to_float of cells": Job(cast_inside),
    "mixed precision O1": amp("O1"),
    "mixed precision O2": amp("O2"),
    "mixed precision O3": amp("O3"),
    "a frozen weight": Job(lambda: frozen("first.weight")),
    "a frozen cell": Job(
        lambda: frozen("first.weight", "first.bias"), data=(".input", "first.input", "first.output", "second.input")
    ),
    "groups of nn": Job(TwoLayers, parameters=grouped, optimizer=lambda p: nn.Adam(p, 0.01)),
    "groups of experimental": Job(TwoLayers, parameters=grouped, optimizer=lambda p: optim.AdamW(p, 0.01)),
}


@pytest.mark.parametrize("name", USES)
def test_uses_of_cells_and_parameters(output: Output, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(output.base)  # mixed precision writes files
    assert_recorded(output, USES[name])


@pytest.mark.usefixtures("recording_ends")
def test_morph_in_the_dynamic_graph_is_refused_by_mindspore_itself(output: Output) -> None:
    job = Job(lambda: Layers(lambda: Function(ops.Morph(doubled, same, same))))
    with pytest.raises(RuntimeError, match=r"^Morph is only supported in GRAPH_MODE\.$"):
        job.train(output)
