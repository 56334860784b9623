"""Histograms of MindSpore's tensors, against a search for each element in float64."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor
from reference import normal

from monitor.stats.histograms import BINS, UPPER
from monitor.stats.host.array_kernel import count_magnitudes
from monitor.stats.mindspore.tensors import on_host


def searched(x: np.ndarray) -> list[int]:
    magnitudes = np.abs(x).astype(np.float64).ravel()
    return np.bincount(np.searchsorted(UPPER, magnitudes[np.isfinite(magnitudes)]), minlength=BINS).tolist()


@pytest.mark.parametrize("dtype", [ms.float32, ms.float16, ms.bfloat16, ms.int64, ms.bool_], ids=str)
def test_every_finite_element_is_in_its_bin(dtype: ms.Type) -> None:
    values = 50 * normal(40_000)
    values[:3] = np.nan, np.inf, 0
    x = Tensor(np.nan_to_num(values, posinf=1) if dtype in (ms.int64, ms.bool_) else values).to(dtype)
    same = x.to(ms.float32).asnumpy()
    assert count_magnitudes(on_host(x)).tolist() == searched(same)


def test_parameters_and_views_are_counted_as_they_stand() -> None:
    x = Parameter(Tensor(normal(30, 20)), name="weight")
    assert count_magnitudes(on_host(x)).tolist() == searched(normal(30, 20))
    assert count_magnitudes(on_host(x.transpose(1, 0)[::2])).tolist() == searched(normal(30, 20).T[::2])
