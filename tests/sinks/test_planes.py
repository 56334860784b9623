from __future__ import annotations

import zlib

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from monitor.sinks.planes import compressed


def shuffled(column: np.ndarray) -> bytes:
    return column.view(np.uint8).reshape(len(column), column.itemsize).T.tobytes()


@settings(max_examples=60, deadline=None)
@given(arrays(np.int64, st.integers(1, 300)), st.integers(1, 40))
def test_zlib_gives_back_the_shuffled_bytes(numbers: np.ndarray, repeated: int) -> None:
    column = np.tile(numbers, repeated)
    assert shuffled(column) == zlib.decompress(compressed(column))


@pytest.mark.parametrize("length", [1, 1000, 65535, 65536, 200_000])
def test_noise_is_stored_in_pieces_that_deflate_allows(length: int) -> None:
    noise = np.random.default_rng(0).integers(0, 2**63, length)
    stream = compressed(noise)
    assert shuffled(noise) == zlib.decompress(stream)
    assert len(stream) <= noise.nbytes * 1.001 + 200


def test_numbers_of_single_precision_take_half_the_bytes() -> None:
    numbers = np.random.default_rng(0).normal(size=20_000).astype(np.float32).astype(np.float64)
    assert len(compressed(numbers)) < 0.56 * numbers.nbytes


@pytest.mark.parametrize("number", [0.0, -0.0, np.nan, 1 / 3])
def test_a_column_of_one_number_takes_next_to_nothing(number: float) -> None:
    column = np.full(20_000, number)
    stream = compressed(column)
    assert shuffled(column) == zlib.decompress(stream)
    assert len(stream) < 1000


def test_zeros_of_either_sign_keep_it() -> None:
    column = np.array([0.0, -0.0] * 10)
    assert shuffled(column) == zlib.decompress(compressed(column))


def test_hdf5_takes_it_for_what_its_own_filters_make() -> None:
    column = np.random.default_rng(0).normal(size=5000)
    with h5py.File.in_memory() as file:
        dataset = file.create_dataset("x", (5000,), "f8", chunks=(5000,), shuffle=True, compression="gzip")
        dataset.id.write_direct_chunk((0,), compressed(column))
        assert column.tolist() == dataset[...].tolist()
