"""``seed_all`` for MindSpore: what drops nothing after ``rm_dropout=True``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

mindspore = pytest.importorskip("mindspore")

from mindspore import Tensor, mint, nn, ops  # noqa: E402

from monitor.mindspore import seed_all  # noqa: E402
from monitor.mindspore.dump.backend import CELLS, FUNCTIONS, PRIMITIVES  # noqa: E402

NAMES = {*(name for _, name in FUNCTIONS), "dropout_ext"}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout as it is, when the test is over."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    for kind in (*CELLS, *PRIMITIVES):
        monkeypatch.setattr(kind, "__init__", kind.__init__)
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] == "mindspore":
            for name in NAMES & vars(module).keys():
                monkeypatch.setattr(module, name, vars(module)[name])


def ones(*shape: int) -> Tensor:
    return Tensor(np.ones(shape, np.float32))


def dropped(x: Any) -> int:
    return int((x.asnumpy() != 1).sum())


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: ops.Dropout(keep_prob=0.5), (400,)),
        (lambda: ops.Dropout(0.5), (400,)),
        (lambda: ops.Dropout2D(0.5), (8, 8, 4, 4)),
        (lambda: ops.Dropout3D(keep_prob=0.5), (8, 8, 2, 2, 2)),
    ],
)
def test_no_primitive_drops_anything(make: Callable[[], Any], shape: tuple[int, ...]) -> None:
    seed_all(rm_dropout=True)
    assert dropped(make()(ones(*shape))[0]) == 0


@pytest.mark.parametrize(
    ("place", "name", "shape"),
    [
        (ops, "dropout", (400,)),
        (ops, "dropout1d", (4, 4, 4)),
        (ops, "dropout2d", (4, 4, 4, 4)),
        (ops, "dropout3d", (4, 4, 2, 2, 2)),
        (mint.nn.functional, "dropout", (400,)),
        (mint.nn.functional, "dropout2d", (4, 4, 4, 4)),
        (ops.function.nn_func, "dropout", (400,)),
    ],
)
def test_no_function_drops_anything(place: Any, name: str, shape: tuple[int, ...]) -> None:
    seed_all(rm_dropout=True)
    assert dropped(getattr(place, name)(ones(*shape), p=0.5)) == 0


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.Dropout, (400,)),
        (nn.Dropout1d, (4, 4, 4)),
        (nn.Dropout2d, (4, 4, 4, 4)),
        (nn.Dropout3d, (4, 4, 2, 2, 2)),
        (mint.nn.Dropout, (400,)),
        (mint.nn.Dropout2d, (4, 4, 4, 4)),
    ],
)
def test_no_cell_drops_anything(kind: Any, shape: tuple[int, ...]) -> None:
    seed_all(rm_dropout=True)
    assert dropped(kind(p=0.5).set_train()(ones(*shape))) == 0


def test_no_cell_that_holds_dropout_drops_anything() -> None:
    seed_all(rm_dropout=True)
    x = Tensor(np.random.rand(3, 2, 8).astype(np.float32))
    attention = nn.MultiheadAttention(8, 2, dropout=0.5).set_train()
    recurrent = nn.LSTM(8, 8, num_layers=2, dropout=0.5).set_train()
    for call in (lambda: attention(x, x, x)[0], lambda: recurrent(x)[0]):
        assert np.array_equal(call().asnumpy(), call().asnumpy())


def test_what_is_compiled_drops_nothing() -> None:
    seed_all(rm_dropout=True)

    @mindspore.jit
    def compiled(x: Tensor) -> Tensor:
        return ops.dropout(x, 0.5)

    assert dropped(compiled(ones(400))) == 0


def test_gradients_pass_unchanged() -> None:
    seed_all(rm_dropout=True)
    assert dropped(mindspore.grad(lambda x: ops.dropout(x, 0.5).sum())(ones(4))) == 0
