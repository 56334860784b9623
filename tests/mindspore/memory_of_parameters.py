"""Writes to the memory of a parameter, as a faulty device does: no operation, and no tensor in place of another."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from mindspore import Parameter
from numpy.typing import NDArray


def words_of(parameter: Parameter) -> NDArray[Any]:
    """The 32-bit words of a parameter on the host, in its shape. Waits for its operations."""
    words = (ctypes.c_uint32 * parameter.size).from_address(parameter.data_ptr())
    return np.ctypeslib.as_array(words).reshape(parameter.shape)
