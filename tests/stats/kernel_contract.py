"""What every kernel keeps to: a class of tests, of which each kernel's test module has a subclass and a fixture ``make``."""

from __future__ import annotations

import math
from collections.abc import Callable

import kernel_corpus as corpus
import numpy as np
import pytest
import torch
from kernel_corpus import EPS, Case, Corpus, normal
from reference import Expected, assert_is, check_sums, checked, derived

from monitor.stats.partials import BITS_LOW, COLUMNS, COUNT, M3, M4, SMALLS, WRITES
from monitor.stats.torch.host_kernel import TorchHostKernel

Reduce = Callable[[torch.Tensor], np.ndarray]
Make = Callable[[float], Reduce]
"""A kernel for a bound of zeros, as a function from a tensor to its row."""


def rows(make: Make, cases: Corpus) -> dict[str, np.ndarray]:
    kernels = {eps: make(eps) for eps in {case.eps for case in cases.values()}}
    return {name: kernels[case.eps](case.x) for name, case in cases.items()}


def differing(found: dict[str, np.ndarray], cases: Corpus, *, higher: bool = False) -> dict[str, str]:
    """The cases whose row is not that of the reference, and how it differs."""
    return {name: said for name, case in cases.items() if (said := difference(found[name], case.expected, higher=higher))}


def difference(row: np.ndarray, expected: Expected, *, higher: bool = False) -> str:
    try:
        assert_is(row, expected, higher=higher)
    except AssertionError as error:
        return str(error)
    return ""


def freed(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(0)
    return x


def functional(x: torch.Tensor) -> torch.Tensor:
    """A part of what torch calls functional: it says that it has memory, and has no address."""
    torch._enable_functionalization(reapply_views=True)
    try:
        return torch._to_functional_tensor(x)[1:]
    finally:
        torch._disable_functionalization()


FREED: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: freed(normal(50)),
    "functional": lambda: functional(normal(50)),
    "functional and more than a thousand": lambda: functional(normal(5000)),
    "more than a chunk": lambda: freed(torch.zeros(corpus.LONG)),
    "behind others": lambda: freed(normal(50)[7:]),
    "bfloat16": lambda: freed(normal(50).bfloat16()[3:]),
    "transposed": lambda: freed(normal(5, 6).t()),
    "every second": lambda: freed(normal(50)[1::2]),
    "expanded": lambda: freed(normal(50, 1).expand(-1, 3)),
    "efficient zeros": lambda: torch._efficientzerotensor((50,)),
    "values of a sparse tensor": lambda: torch.sparse_coo_tensor([[0, 2]], freed(torch.ones(2)), (3,), is_coalesced=True),
}


class KernelContract:
    """All kernels, held to the same reference in extended precision."""

    def held(self, cases: Corpus) -> Corpus:
        """The cases that the kernel is made for."""
        return cases

    def assert_agrees(self, make: Make, corpus: Corpus, *, higher: bool = False) -> None:
        cases = self.held(corpus)
        assert differing(rows(make, cases), cases, higher=higher) == {}

    @pytest.fixture
    def reduce(self, make: Make) -> Reduce:
        return make(EPS)

    def test_every_dtype_agrees_with_the_reference(self, make: Make) -> None:
        self.assert_agrees(make, corpus.dtypes())

    def test_any_magnitude_keeps_its_norm(self, make: Make) -> None:
        self.assert_agrees(make, corpus.magnitudes())

    def test_any_magnitude_of_more_than_a_piece_keeps_its_norm(self, make: Make) -> None:
        self.assert_agrees(make, corpus.long_magnitudes())

    def test_equal_elements_and_many_zeros_and_scales_far_apart_agree_with_the_reference(self, make: Make) -> None:
        self.assert_agrees(make, corpus.distributions())

    @pytest.mark.parametrize("of", [corpus.dtypes, corpus.shapes, corpus.distributions, corpus.magnitudes, corpus.non_finite])
    def test_ops_on_request_are_those_of_the_elements(self, make_higher: Make, of: Callable[[], Corpus]) -> None:
        self.assert_agrees(make_higher, of(), higher=True)

    def test_ops_on_request_of_a_view_and_of_more_than_a_piece_are_those_of_its_elements(self, make_higher: Make) -> None:
        self.assert_agrees(make_higher, corpus.views() | corpus.long_shapes(), higher=True)

    def test_equal_elements_and_no_elements_have_no_kurtosis(self, make_higher: Make) -> None:
        same = {"equal": torch.full((5000,), 0.1), "one": torch.ones(1), "none": torch.empty(0)}
        same |= {"nothing finite": torch.full((3,), math.nan), "equal beside Inf": torch.tensor([0.1, math.inf, 0.1, 0.1])}
        same |= {f"equal float64 of {m:g}": torch.full((70,), m, dtype=torch.float64) for m in (0.1, 1e-200, 1e200)}
        assert [name for name, x in same.items() if "kurtosis" in derived(make_higher(EPS)(x))] == []

    def test_without_an_op_for_them_the_higher_moments_are_not_measured(self, reduce: Reduce) -> None:
        row = reduce(normal(5000))
        assert (row[M3], row[M4]) == (0, 0)
        assert "kurtosis" not in derived(row)

    def test_check_sums_are_those_of_the_words_in_memory(self, make_checked: Make) -> None:
        cases = self.held(corpus.dtypes() | corpus.views() | corpus.non_finite() | corpus.shapes())
        found = {name: checked(row) for name, row in rows(make_checked, cases).items()}
        assert found == {name: check_sums(case.x) for name, case in cases.items()}

    def test_check_sums_of_more_than_a_piece_are_those_of_the_whole(self, make_checked: Make) -> None:
        x = normal(corpus.LONG)
        long = {"float32": x, "bfloat16": x.bfloat16(), "float64 out of range": x.double() * 1e200, "every second": x[::2]}
        cases = self.held({name: Case(each) for name, each in long.items()})
        found = {name: checked(row) for name, row in rows(make_checked, cases).items()}
        assert found == {name: check_sums(case.x) for name, case in cases.items()}

    def test_without_being_asked_for_there_are_no_check_sums(self, reduce: Reduce) -> None:
        assert not reduce(normal(5000))[BITS_LOW:].any()

    def test_the_spread_survives_a_mean_ten_thousand_times_larger(self, reduce: Reduce) -> None:
        x = 100 + 0.01 * normal(200_000)
        assert derived(reduce(x))["std"] == pytest.approx(float(x.double().std(correction=0)), rel=1e-5)

    def test_eps_is_compared_without_rounding(self, make: Make) -> None:
        cases = self.held(corpus.bounds())
        counted = {name: float(row[SMALLS]) for name, row in rows(make, cases).items()}
        assert counted == {name: float((case.x.double().abs() < case.eps).sum()) for name, case in cases.items()}

    def test_a_non_finite_value_is_counted_and_hides_nothing_else(self, make: Make) -> None:
        cases = self.held(corpus.non_finite())
        of_cases = rows(make, cases)
        assert differing(of_cases, cases) == {}
        for name, case in cases.items():
            found, x = dict(zip(COLUMNS, of_cases[name], strict=True)), case.x.double()
            kept = x[torch.isfinite(x)]
            assert (found["min"], found["max"]) == (float(kept.min()), float(kept.max())), name
            assert found["sumsq"] == pytest.approx(float(kept.square().sum())), name

    def test_all_kinds_of_non_finite_values_are_distinguished(self, reduce: Reduce) -> None:
        x = torch.tensor([math.nan, math.inf, math.inf, -math.inf, -math.inf, -math.inf, 2.0])
        found = dict(zip(COLUMNS, reduce(x), strict=True))
        assert (found["nans"], found["posinfs"], found["neginfs"], found["count"]) == (1, 2, 3, 7)
        assert (found["min"], found["max"], found["sum"]) == (2.0, 2.0, 2.0)

    def test_nothing_but_nan_leaves_no_extremes(self, reduce: Reduce) -> None:
        row = reduce(torch.full((5,), math.nan))
        assert derived(row) == pytest.approx(
            dict.fromkeys(("min", "max", "mean", "norm", "absmax", "std", "rms", "absmean"), math.nan)
            | {"nans": 5, "infs": 0, "zeros": 0},
            nan_ok=True,
        )

    def test_an_empty_tensor_is_a_measurement_without_mean_or_extremes(self, reduce: Reduce) -> None:
        for shape in ((0,), (3, 0, 2)):
            row = reduce(torch.empty(shape))
            assert (row[WRITES], row[COUNT]) == (1, 0), shape
            assert derived(row) == {"norm": 0.0, "nans": 0.0, "infs": 0.0}, shape

    def test_any_view_is_read_in_place(self, make: Make) -> None:
        self.assert_agrees(make, corpus.views())

    def test_the_kernels_agree_with_themselves_bit_for_bit(self, reduce: Reduce) -> None:
        x = normal(corpus.LONG)
        assert np.array_equal(reduce(x), reduce(x.clone()))


class TensorContract(KernelContract):
    """What the kernels for torch's tensors keep to besides."""

    def test_sparse_and_nested_tensors_are_all_their_elements_and_inference_tensors_are_read(self, make: Make) -> None:
        self.assert_agrees(make, corpus.layouts())

    def test_terms_of_an_uncoalesced_sparse_tensor_are_summed_first(self, reduce: Reduce) -> None:
        x = torch.sparse_coo_tensor(torch.tensor([[0, 0, 3]]), torch.tensor([1.0, 2.0, 4.0]), (6,))
        assert derived(reduce(x))["norm"] == pytest.approx(5.0)
        assert not x.is_coalesced()

    def test_what_was_freed_is_not_read(self, kernel: Callable[[float], object]) -> None:
        own, page = kernel(EPS), torch.zeros((1, len(COLUMNS)), dtype=torch.float64)
        into = page.numpy() if isinstance(own, TorchHostKernel) else page
        read = [name for name, freed in FREED.items() if own.reduce_into(freed(), into, 0)]
        assert (read, page.any().item()) == ([], False)
