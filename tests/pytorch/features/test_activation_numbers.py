"""What a tensor shows of the health of activations is what float64 and a decomposition say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from definitions import active_units, health
from observing import drawn
from torch import Tensor

from monitor.pytorch.features import activations
from monitor.pytorch.features.activations import activation_of, active_share, last_active
from monitor.recording.features import reading
from monitor.recording.features.reading import distance_of_elements


def columns(x: Tensor) -> dict[str, float]:
    found = activation_of(x)
    massive = {"massive": float(found.ratio), "massive_channel": int(found.channel)}
    return {
        **({} if found.ratio == -math.inf else massive),
        **({} if found.rank == -math.inf else {"effective_rank": float(found.rank)}),
        "residual_norm": float(found.norms) / found.tokens,
    }


TENSORS = {
    "a batch of sequences": drawn(3, 17, 24),
    "more elements and tokens than are sampled": drawn(4, 60, 96),
    "one token": drawn(24),
    "one channel": drawn(50, 1),
    "one element": torch.tensor([-3.0]),
    "five dimensions": drawn(2, 3, 4, 5, 6),
    "transposed": drawn(60, 4, 96).transpose(0, 1),
    "channels that are not contiguous": drawn(4, 96, 60).transpose(1, 2),
    "a part of a tensor": drawn(6, 70, 100)[1:, 3:, 2:90],
    "repeated tokens": drawn(1, 1, 40).expand(3, 20, 40),
    "large numbers": drawn(5, 8) * 1e30,
    "small numbers": drawn(5, 8) * 1e-30,
    "one massive activation": drawn(20, 30).index_put((torch.tensor(3), torch.tensor(4)), torch.tensor(-1e6)),
    "after a ReLU": drawn(30, 40).relu(),
    "sparse": drawn(30, 40).sub(2).relu(),
    "some tokens of zeros": drawn(30, 40) * (torch.arange(30) % 3 > 0).unsqueeze(1),
}


@pytest.mark.parametrize("block", [1 << 17, 64], ids=["one block", "many blocks"])
@pytest.mark.parametrize("x", TENSORS.values(), ids=TENSORS)
def test_the_numbers_are_those_of_the_definition(x: Tensor, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "BLOCK", block)
    assert columns(x) == pytest.approx(health(x), rel=1e-12)
    assert np.array_equal(activation_of(x).seen[:-1].numpy(), active_units(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_every_precision_is_read_as_it_is(dtype: torch.dtype) -> None:
    x = drawn(4, 30, 16).to(dtype)
    assert columns(x) == pytest.approx(health(x), rel=1e-12)


@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_squares_of_double_precision_may_leave_its_range(size: float) -> None:
    x = drawn(4, 30, 16).double()
    expected = health(x)
    assert columns(x * size) == pytest.approx({**expected, "residual_norm": expected["residual_norm"] * size}, rel=1e-12)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_never_hidden(wrong: float) -> None:
    x = drawn(40, 10)
    x[33, 7] = wrong
    found = activation_of(x)
    assert all(math.isnan(one) for one in (found.norms, found.ratio, found.rank))
    assert found.seen[-1]


def test_zeros_have_no_ratio_and_no_rank() -> None:
    assert columns(torch.zeros(4, 5)) == {"residual_norm": 0.0}


def test_the_rank_counts_directions_and_not_lengths() -> None:
    x = torch.eye(8)[torch.arange(48) % 6] * torch.logspace(0, 4, 48).unsqueeze(1)
    assert columns(x)["effective_rank"] == pytest.approx(6.0, rel=1e-12)
    assert columns(drawn(1, 24) * drawn(50, 1).abs())["effective_rank"] == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("channels", [1, 2, 768, 4095, 4096, 6 * 5 * 7 * 11 * 13])
def test_elements_are_sampled_from_all_channels_alike(channels: int) -> None:
    tokens = 8192
    places = np.arange(0, tokens * channels, distance_of_elements(tokens * channels, channels)) % channels
    assert len(places) <= reading.ELEMENTS_AT_MOST
    counts = np.bincount(places, minlength=channels)
    assert counts.max() - counts.min() <= 1


def test_the_median_of_a_sample_lies_among_the_middle_elements() -> None:
    x = drawn(1024, 1024)
    median = float(x.abs().max()) / float(activation_of(x).ratio)
    below = float((x.abs() < median).double().mean())
    assert 0.484 < below < 0.516


def test_units_are_active_up_to_the_step_in_which_they_were_last_seen() -> None:
    steps = [[1, 1, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]]
    last = None
    for number, seen in enumerate(steps, start=1):
        last = last_active(last, torch.tensor(seen, dtype=torch.bool), number)
    assert [float(active_share(last, 3, step)) for step in (0, 1, 2)] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    spoiled = last_active(last, torch.tensor([True, True, True, True]), 4)
    assert math.isnan(active_share(spoiled, 3, 3))
    assert float(active_share(spoiled, 3, 4)) == 0.0


def test_nothing_is_kept_of_a_graph_that_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "capturing", lambda device: device.type == "cpu")
    with pytest.raises(reading.MisfitError, match=reading.CAPTURED):
        activation_of(drawn(4, 5))


def test_no_copy_is_larger_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "BLOCK", 512)
    for x in (drawn(64, 8, 16), drawn(64, 8, 16).transpose(0, 1), drawn(9, 70, 33)[1:, 3:, :16], drawn(8, 16, 64).mT):
        blocks = [*activations._blocks(x)]
        assert sum(len(one) for one in blocks) * 16 == x.numel()
        assert all(one.numel() <= 512 or one.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for one in blocks)
        assert max(one.numel() for one in blocks) <= 512
