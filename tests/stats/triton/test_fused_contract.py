"""The fused kernels keep to the contract of all kernels."""

from __future__ import annotations

from collections.abc import Callable

import kernel_corpus as corpus
import numpy as np
import pytest
import torch
from evidence import sampled
from kernel_contract import Make, Reduce, TensorContract, differing
from kernel_corpus import EPS, Case, Corpus, numbers

pytest.importorskip("triton")

from interpreted import SMALL, fused

from monitor.stats.partials import COLUMNS
from monitor.stats.triton.launch import FusedKernel
from monitor.stats.triton.reading import FORMATS, Blocks

COARSE = Blocks(lanes=8192, rows=16, parts=4, tiles=4)
"""The interpreter counts operations, not elements."""


class TestFusedKernel(TensorContract):
    def held(self, cases: Corpus) -> Corpus:
        """Of the long ones the smallest and the largest; the interpreter takes half a second for each."""
        return dict(sampled(list(cases.items()), 0, -1)) if cases is corpus.long_magnitudes() else cases

    def test_every_dtype_agrees_with_the_reference(self, make: Make) -> None:  # noqa: ARG002
        """Without the portable kernel's help."""
        assert set(corpus.NUMBERS) <= set(FORMATS)
        cases = {str(dtype): Case(numbers(dtype)) for dtype in FORMATS}
        for higher in sampled((True, False)):
            own, page = fused(EPS, SMALL, higher=higher), torch.zeros(len(cases), len(COLUMNS), dtype=torch.float64)
            assert [name for row, (name, case) in enumerate(cases.items()) if not own.reduces(case.x, page, row)] == []
            assert differing(dict(zip(cases, page.numpy(), strict=True)), cases, higher=higher) == {}

    @pytest.fixture
    def kernel(self) -> Callable[[float], FusedKernel]:
        return lambda eps: fused(eps, SMALL)

    @pytest.fixture
    def make(self) -> Make:
        return lambda eps: into_a_page(fused(eps, COARSE))

    @pytest.fixture
    def make_higher(self) -> Make:
        return lambda eps: into_a_page(fused(eps, COARSE, higher=True))

    @pytest.fixture
    def make_checked(self) -> Make:
        return lambda eps: into_a_page(fused(eps, COARSE, check_sums=True))


def into_a_page(own: FusedKernel) -> Reduce:
    def reduce(x: torch.Tensor) -> np.ndarray:
        page = torch.zeros(3, len(COLUMNS), dtype=torch.float64)
        assert own.reduce_into(x, page, 1)
        assert not page[[0, 2]].any()
        return page[1].numpy()

    return reduce
