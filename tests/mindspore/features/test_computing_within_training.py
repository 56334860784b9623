"""What is computed in hooks of a network that trains changes nothing of it, and is not changed by how the network computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, value_and_grad
from numpy_definitions import attention_weights, drawn, entropy_and_greatest, exact, number, similarity

from monitor.mindspore.features.attention import spread
from monitor.mindspore.features.matrices import entropy_from, entropy_of, norms_of, similarity_of_rows
from monitor.mindspore.features.reading import given_scores, matrix_of, tokens_of
from monitor.stats.mindspore.tensors import beneath, computing, executor
from monitor.stats.mindspore.updates import adam_vectors, agreement, snapshot, squares_of_update

pytestmark = pytest.mark.usefixtures("where")


class Core(nn.Cell):
    def construct(self, query: Tensor, key: Tensor) -> Tensor:
        scores = mint.matmul(query, mint.transpose(key, 2, 3))
        return mint.matmul(mint.softmax(scores, -1), key)


class Net(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.router = (nn.Dense(8, out) for out in (8, 8, 4))
        self.core = Core()
        for seed, parameter in enumerate(self.get_parameters()):
            parameter.set_data(Tensor(drawn(*parameter.shape, seed=seed) / np.float32(4)))

    def construct(self, x: Tensor) -> Tensor:
        query, key = (one(x).reshape(2, 5, 2, 4).transpose(0, 2, 1, 3) for one in (self.q, self.k))
        mixed = self.core(query, key).transpose(0, 2, 1, 3).reshape(2, 5, 8) + x
        return mint.sum(mint.square(self.router(mixed)))


def flags() -> tuple[bool, bool, bool]:
    return executor.enable_grad(), executor.grad_flag(), executor.requires_grad()


def trained(watch: Callable[[Net], object] | None = None) -> list[bytes]:
    """Losses, gradients and weights of three steps."""
    net, seen = Net().set_train(), []
    optimizer = nn.Adam(net.trainable_params(), learning_rate=0.01)
    if watch is not None:
        watch(net)
    step = value_and_grad(net, None, net.trainable_params())
    for seed in range(3):
        loss, gradients = step(Tensor(drawn(2, 5, 8, seed=100 + seed)))
        optimizer(gradients)
        seen += [one.asnumpy().tobytes() for one in (loss, *gradients, *net.trainable_params())]
    return seen


def look_at_everything(told: list[object]) -> Callable[[Net], object]:
    def watch(net: Net) -> None:
        def before(cell: nn.Cell, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            was = flags()
            scores = given_scores(args, kwargs, "b,h,s,d")
            if scores is not None:
                told.append(spread(scores, 0, 0))
            weight = matrix_of(cell)
            if weight is not None:
                told.extend([norms_of(weight), similarity_of_rows(weight)])
                told.append(entropy_from(tokens_of(args, kwargs, 8), weight, None, ms.float32))
            assert was == flags()

        def after(_cell: nn.Cell, _args: object, output: Tensor) -> None:
            told.append(entropy_of(output))

        def arrived(gradient: Tensor) -> None:
            was = flags()
            told.append(agreement(gradient, gradient))
            told.append(squares_of_update(gradient, snapshot(gradient)))
            told.append([one.numbers() for one in adam_vectors(gradient, mint.square(gradient), 0.1, 0.1, 1e-8, 1e-8)])
            assert was == flags()

        for cell in (net.core, net.router, net.q):
            cell.register_forward_pre_hook(before, with_kwargs=True)
        net.router.register_forward_hook(after)
        for parameter in net.trainable_params():
            parameter.register_hook(arrived)

    return watch


def test_training_has_the_same_bits() -> None:
    told: list[object] = []
    assert trained() == trained(look_at_everything(told))
    assert len(told) == 3 * (1 + 2 * 3 + 1 + 6 * 3)


def test_nothing_that_is_computed_is_recorded() -> None:
    recorded = []

    def watch(net: Net) -> None:
        def before(_cell: nn.Cell, args: tuple[Tensor, ...]) -> None:
            found = spread(given_scores(args, {}, "b,h,s,d"))
            recorded.extend(one._grad_node for one in found if isinstance(one, Tensor))
            recorded.append(None)

        net.core.register_forward_pre_hook(before)

    trained(watch)
    assert set(recorded) == {None}


def test_an_error_leaves_recording_as_it_was() -> None:
    seen = []

    def watch(net: Net) -> None:
        def before(_cell: nn.Cell, _args: object) -> None:
            was = flags()
            with suppress(ZeroDivisionError), computing():
                raise ZeroDivisionError
            seen.append((was, flags()))

        net.core.register_forward_pre_hook(before)

    assert trained() == trained(watch)
    assert seen == [((True, True, True), (True, True, True))] * 3


def test_recording_that_was_off_stays_off() -> None:
    executor.set_enable_grad(False)
    try:
        with beneath(), beneath():
            pass
        assert not executor.enable_grad()
    finally:
        executor.set_enable_grad(True)


def test_a_cell_that_casts_its_operations_does_not_cast_ours() -> None:
    """A sum of squares beyond 65504 is infinite in float16."""
    core, router, told = Core(), nn.Dense(8, 4), []
    router.weight.set_data(Tensor(300 + drawn(4, 8)))
    query, key = (Tensor(drawn(2, 2, 5, 4, seed=seed)) for seed in (0, 1))
    for cell in (core, router):
        cell.to_float(ms.float16).set_train()

    def of_core(_cell: nn.Cell, args: tuple[Tensor, ...]) -> None:
        told.append(spread(given_scores(args, {}, "b,h,s,d"), 0, 0))

    def of_router(cell: nn.Cell, _args: object) -> None:
        told.extend([norms_of(cell.weight), similarity_of_rows(cell.weight)])

    core.register_forward_pre_hook(of_core)
    router.register_forward_pre_hook(of_router)
    assert core(query, key).dtype == ms.float16
    router(Tensor(drawn(3, 8)))
    weights = attention_weights(exact(query.to(ms.float16)), exact(key.to(ms.float16)))
    exactly = attention_weights(exact(query), exact(key))
    found = sum(map(number, told[0].entropy)) / sum(map(number, told[0].queries))
    expected = [entropy_and_greatest(one, 0, 0)[0] for one in (weights, exactly)]
    assert any(found == pytest.approx(one, rel=5e-6) for one in expected)
    matrix = exact(router.weight)
    assert number(told[1].squares) == pytest.approx(np.square(matrix).sum(), rel=1e-6)
    assert number(told[1].spectral) == pytest.approx(np.linalg.norm(matrix, 2), rel=1e-5)
    assert number(told[2].cosines) / 12 == pytest.approx(similarity(matrix), rel=1e-5)
