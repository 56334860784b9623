"""Tensors in files, those of types that numpy lacks included."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from monitor.dump import load_tensor
from monitor.dump.files import bits_of, save_tensor
from monitor.pytorch.dump.backend import TorchReader


def stored(tmp_path: Path, x: torch.Tensor) -> Path:
    """The file that a dump keeps of ``x``."""
    copy = TorchReader(checksums=False).leaf(x, "x.npy").copy
    assert copy is not None
    save_tensor(tmp_path / "x.npy", copy.array(), copy.dtype)
    return tmp_path / "x.npy"


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """Of a type of one or two bytes, in two dimensions."""
    size = torch.empty(0, dtype=dtype).element_size()
    whole = torch.arange(1 << 8 * size, dtype=torch.int32).to({1: torch.uint8, 2: torch.int16}[size])
    return whole.view(dtype).view(16, -1)


NARROW = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("name", NARROW)
def test_every_number_of_a_type_that_numpy_lacks_is_read_back_as_it_was(tmp_path: Path, name: str) -> None:
    x = every_number(getattr(torch, name))
    assert np.array_equal(load_tensor(stored(tmp_path, x)), x.float().numpy(), equal_nan=True)


@pytest.mark.parametrize("name", NARROW)
def test_the_bits_of_a_type_that_numpy_lacks_are_in_the_file(tmp_path: Path, name: str) -> None:
    x = every_number(getattr(torch, name))
    bits, dtype = bits_of(stored(tmp_path, x))
    assert (dtype, bits.tobytes()) == (name, x.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64])
def test_a_type_that_numpy_has_is_stored_as_it_is(tmp_path: Path, dtype: torch.dtype) -> None:
    x = (torch.arange(12).view(3, 4) - 5).to(dtype)
    path = stored(tmp_path, x)
    assert np.array_equal(np.load(path), x.numpy())
    assert np.load(path).dtype == x.numpy().dtype


def test_a_tensor_without_dimensions_is_read_back(tmp_path: Path) -> None:
    read = load_tensor(stored(tmp_path, torch.tensor(1.5, dtype=torch.bfloat16)))
    assert (read.shape, float(read)) == ((), 1.5)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_halves_of_complex_numbers_are_read_back(tmp_path: Path) -> None:
    x = torch.view_as_complex(torch.tensor([[1.5, -2.0], [0.25, 65504.0]], dtype=torch.float16))
    assert load_tensor(stored(tmp_path, x)).tolist() == [1.5 - 2j, 0.25 + 65504j]


def test_a_transposed_tensor_is_stored_in_its_own_order(tmp_path: Path) -> None:
    x = torch.arange(6.0).view(2, 3).t()
    assert load_tensor(stored(tmp_path, x)).tolist() == x.tolist()


def test_a_file_of_an_unknown_type_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(2, dtype=[("float3", "<u1")]))
    with pytest.raises(ValueError, match="float3"):
        load_tensor(tmp_path / "x.npy")
