"""``seed_all``."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from monitor.pytorch import seed_all


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setattr(nn.modules.dropout._DropoutNd, "__init__", nn.modules.dropout._DropoutNd.__init__)


def test_a_seed_repeats_random_numbers() -> None:
    found = []
    for _ in range(2):
        seed_all(7)
        found.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert found[0] == found[1]


def test_dropout_that_is_made_afterwards_drops_nothing() -> None:
    before = nn.Dropout(0.9)
    seed_all(rm_dropout=True)
    assert (before.p, nn.Dropout(0.9).p, nn.Dropout2d(0.9, inplace=True).inplace) == (0.9, 0.0, True)
    assert torch.equal(nn.Dropout(0.9)(torch.ones(100)), torch.ones(100))


@pytest.mark.parametrize("seed", [-1, 1 << 32, 1.5, True])
def test_a_seed_that_is_none_is_refused(seed: object) -> None:
    with pytest.raises(ValueError, match="expected a whole number from 0 to 4294967295"):
        seed_all(seed)
