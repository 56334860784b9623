"""What MindSpore compiles without a monitor, it compiles with one."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from attaching import Output, warnings_in
from compiled_steps import Whole, assert_same, plain, recorded, step_of
from mindspore import Tensor, nn, ops


class Sparse(nn.Cell):
    """The gradient of its table is sparse in compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingLookup(11, 4, sparse=True)
        self.b = nn.Dense(4, 1)

    def construct(self, x: Tensor) -> Tensor:
        return self.b(self.table(x)).sum()


def integers(step: int) -> Tensor:
    return Tensor([[step, 1], [5, 6]], ms.int32)


def lazy_adam(parameters: list[Any]) -> nn.Cell:
    return nn.LazyAdam(parameters, 0.01)


@pytest.mark.parametrize("how", ["graph", "jit"])
def test_sparse_gradients_have_no_rows_and_that_is_said_once(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    loop: dict[str, Any] = {"given": integers}
    bits, rows = recorded(how, Sparse, output, lazy_adam, loop=loop)
    assert bits == plain(how, Sparse, lazy_adam, **loop)
    names = {
        kind: {name for of, name, *_ in rows if of == kind} for kind in ("grad_unreduced", "grad_reduced", "param_updated")
    }
    assert names["grad_unreduced"] == names["grad_reduced"] == {"b.weight", "b.bias"}
    assert "table.embedding_table" in names["param_updated"]
    for (kind, name, step, _), values in rows.items():
        if kind == "param_origin" and step:
            assert values == rows["param_updated", name, step - 1, None]
    assert len([said for said in warnings_in(caplog) if "sparse gradients" in said]) == 1


class Inner(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Dense(4, 4)

    def construct(self, nested: Any, scale: Any = None) -> Tensor:
        if scale is not None:
            return nested[0] * scale
        return self.w(nested[1][0]) * nested[0]


class Nesting(nn.Cell):
    """Passes tuples inside tuples, with None in them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def construct(self, x: Tensor) -> Tensor:
        return self.inner((x * 2.0, (x, None)), None).sum()


@pytest.mark.parametrize("how", ["graph", "jit"])
def test_nested_arguments_with_none_compile(how: str, output: Output) -> None:
    bits, rows = recorded(how, Nesting, output)
    assert bits == plain(how, Nesting)
    names = {name for kind, name, *_ in rows if kind == "actv"}
    assert {"inner.input_0_0", "inner.input_0_1_0", "inner.w.output"} <= names


class Product(nn.Cell):
    """Takes its weight as an argument."""

    def construct(self, x: Tensor, weight: Any) -> Tensor:
        return ops.tanh(ops.matmul(x, weight))


class Borrowing(nn.Cell):
    """Calls one cell with one weight after another, as ``nn.LSTM`` and ``nn.GRU`` do for their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = ms.ParameterTuple([ms.Parameter(ops.zeros((4, 4)), name=f"w{i}") for i in range(3)])
        self.product = Product()

    def construct(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = self.product(x, weight)
        return x.sum()


@pytest.mark.parametrize("how", ["graph", "jit"])
def test_parameters_as_arguments_have_no_rows_as_such_and_that_is_said_once(
    how: str, output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    bits, rows = recorded(how, Borrowing, output)
    assert bits == plain(how, Borrowing)
    _, expected = recorded("dynamic", Borrowing, output)
    without = {key: row for key, row in expected.items() if "product.input_1" not in key[1]}
    assert_same(rows, without)
    assert len(without) < len(expected)
    assert len([said for said in warnings_in(caplog) if "take or return Parameters" in said]) == 1


class Optional(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.norm = nn.Dense(4, 4), nn.LayerNorm((4,))

    def construct(self, x: Tensor, mask: Any = None, scale: Any = None, both: bool = True, *, name: str = "") -> Any:
        x = self.norm(self.w(x))
        if mask is not None:
            x = x + mask
        if scale is not None and name == "scaled":
            x = x * scale
        return (x, x) if both else (x, None)


class WithConstants(nn.Cell):
    """Passes None, numbers and strings by name, as ``nn.TransformerEncoderLayer`` does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = Optional(), nn.LayerNorm((4,))

    def construct(self, x: Tensor) -> Tensor:
        y = self.norm(x + self.a(x, mask=None, scale=None, both=False)[0])
        y = self.norm(y + self.a(y, scale=2.0, name="scaled", mask=x, both=False)[0])
        return ops.tanh(self.norm(y + self.a(x=y, both=False, mask=None)[0])).sum()


@pytest.mark.parametrize("how", ["graph", "jit"])
def test_constants_as_keyword_arguments_compile(how: str, output: Output) -> None:
    bits, rows = recorded(how, WithConstants, output)
    assert bits == plain(how, WithConstants)
    _, expected = recorded("dynamic", WithConstants, output)
    assert_same(rows, expected, 1e-5)


class Flat(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Dense(4, 4), nn.Dense(4, 1)

    def construct(self, x: Tensor) -> Tensor:
        return self.b(ops.tanh(self.a(x))).sum()


def of_any_length(step: int) -> Tensor:
    return Tensor(np.random.default_rng(step).normal(size=(3 + step, 4)).astype(np.float32))


class WithInputs(Whole):
    def __init__(self, net: nn.Cell, optimizer: nn.Cell) -> None:
        super().__init__(net, optimizer)
        self.set_inputs(Tensor(shape=[None, 4], dtype=ms.float32))


@pytest.mark.parametrize("how", ["graph", "jit"])
def test_tensors_of_dynamic_shape_have_no_rows_and_that_is_said_once(
    how: str, output: Output, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dynamic(how: str, net: nn.Cell, optimizer: nn.Cell) -> Any:
        return WithInputs(net, optimizer) if how == "graph" else ms.jit(step_of("dynamic", net, optimizer), dynamic=1)

    loop: dict[str, Any] = {"given": of_any_length}
    _, expected = recorded("dynamic", Flat, output, loop=loop)
    monkeypatch.setattr("compiled_steps.step_of", dynamic)
    bits, rows = recorded(how, Flat, output, loop=loop)
    assert bits == plain(how, Flat, **loop)
    kinds = {"param_origin", "param_updated", "exp_avg", "exp_avg_sq"}
    of_optimizer = {key: values for key, values in expected.items() if key[0] in kinds}
    assert_same({key: values for key, values in rows.items() if key[0] in kinds}, of_optimizer)
    if how == "graph":  # @jit compiles the first steps with their shapes
        others = {key[:2] for key in rows if key[0] not in kinds}
        assert others <= {("actv", ".output"), ("actv_grad", ".output")}
    assert len([said for said in warnings_in(caplog) if "dynamic shape" in said]) == 1
