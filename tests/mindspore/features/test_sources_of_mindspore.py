"""Q and K, weights, biases and tokens are found where cells have them; what does not fit is named."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn
from mindspore.common.initializer import initializer
from numpy_definitions import drawn

from monitor.mindspore.features.reading import bias_of, given_scores, local_matrix, matrix_of, tokens_of, whole_rows
from monitor.recording.features.reading import NO_SCORES, NOT_2D, NOT_WHOLE, OTHER_LENGTHS, MisfitError

SBHD = "s,b,h,d"


def of(*shape: int, dtype: ms.Type = ms.float32) -> Tensor:
    return Tensor(drawn(*shape)).to(dtype)


def not_yet(*shape: int) -> Tensor:
    """As parameters are before their cell is initialized."""
    return initializer("normal", shape, ms.float32)


def test_q_and_k_are_the_first_two_tensors_or_go_by_their_names() -> None:
    query, key, other = of(5, 2, 4, 8), of(5, 2, 2, 8), of(3)
    for args, kwargs in (
        ((query, key, other), {}),
        ((None, query, 3, key), {}),
        ((), {"query_layer": query, "key_layer": key}),
        ((key,), {"query": query}),
        ((query,), {"k": key}),
    ):
        scores = given_scores(args, kwargs, SBHD)
        assert scores is not None
        assert (scores.query is query, scores.key is key) == (True, True)
        assert (scores.scale, scores.places) == (8**-0.5, (1, 2, 0, 3))


@pytest.mark.parametrize("args", [(), (of(5, 2, 8),), (of(5, 2, 8), of(5, 2, 8)), (of(5, 2, 4, 8), of(5, 8))])
def test_a_cell_that_is_called_with_something_else_has_none(args: tuple[Tensor, ...]) -> None:
    assert given_scores(args, {}, SBHD) is None


MISFITS = {
    "lengths": (of(5, 2, 4, 8), of(6, 2, 4, 8), OTHER_LENGTHS),
    "sizes": (of(5, 2, 4, 8), of(5, 2, 4, 6), NO_SCORES),
    "batches": (of(5, 2, 4, 8), of(5, 3, 4, 8), NO_SCORES),
    "heads": (of(5, 2, 4, 8), of(5, 2, 3, 8), NO_SCORES),
    "integers": (of(5, 2, 4, 8, dtype=ms.int32), of(5, 2, 4, 8), NO_SCORES),
    "empty": (of(0, 2, 4, 8), of(0, 2, 4, 8), NOT_WHOLE),
    "not there": (not_yet(5, 2, 4, 8), of(5, 2, 4, 8), NOT_WHOLE),
}


@pytest.mark.parametrize(("query", "key", "reason"), MISFITS.values(), ids=MISFITS)
def test_what_cannot_be_read_as_q_and_k_says_why(query: Tensor, key: Tensor, reason: str) -> None:
    with pytest.raises(MisfitError, match=reason):
        given_scores((query, key), {}, SBHD)


@pytest.mark.parametrize(
    ("given", "fits"), [("causal", True), ("padding_causal", True), ("no_mask", False), ("padding", False)]
)
def test_a_core_attention_that_says_its_mask_must_say_causal(given: str, *, fits: bool) -> None:
    if fits:
        assert given_scores((of(5, 2, 4, 8), of(5, 2, 4, 8)), {"attn_mask_type": given}, SBHD) is not None
        return
    with pytest.raises(MisfitError, match="not causal"):
        given_scores((of(5, 2, 4, 8), of(5, 2, 4, 8)), {"attn_mask_type": given}, SBHD)


class WithLayer(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.wg = mint.nn.Linear(4, 3)


def test_the_matrix_of_a_cell_is_its_weight_or_that_of_its_layer() -> None:
    dense, holder = nn.Dense(4, 3), WithLayer()
    assert matrix_of(dense) is dense.weight
    assert matrix_of(holder) is holder.wg.weight
    assert matrix_of(nn.ReLU()) is None
    assert matrix_of(nn.LayerNorm((4,))) is None


@pytest.mark.parametrize(
    "weight",
    [None, of(3), of(2, 3, 4), of(0, 4), of(2, 3, dtype=ms.int32), not_yet(2, 3), Tensor(np.ones((2, 3), np.complex64))],
    ids=["none", "1-D", "3-D", "empty", "integers", "not there", "complex"],
)
def test_what_is_no_matrix_is_no_matrix(weight: Tensor | None) -> None:
    with pytest.raises(MisfitError, match=NOT_2D):
        local_matrix(weight)


def test_a_matrix_of_any_floating_point_is_one() -> None:
    for dtype in (ms.float32, ms.float16, ms.bfloat16, ms.float64):
        weight = of(2, 3, dtype=dtype)
        assert local_matrix(weight) is weight


def test_a_parameter_that_is_yet_to_be_drawn_is_not_drawn() -> None:
    parameter = not_yet(3, 4)
    assert whole_rows(parameter) is None
    assert parameter.has_init


def test_a_bias_is_one_number_for_each_expert() -> None:
    dense = nn.Dense(4, 3)
    assert bias_of(dense, 3) is dense.bias
    assert bias_of(dense, 4) is None
    assert bias_of(nn.Dense(4, 3, has_bias=False), 3) is None


def test_tokens_are_the_first_tensor_of_the_hidden_size() -> None:
    tokens = of(2, 3, 8)
    assert tokens_of((of(2, 4), tokens, of(5, 8)), {}, 8) is tokens
    assert tokens_of((), {"hidden_states": tokens}, 8) is tokens
    assert tokens_of((of(8), of(2, 8, dtype=ms.int32)), {}, 8) is None
