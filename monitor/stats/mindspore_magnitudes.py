"""Histograms of magnitudes of MindSpore's tensors in host memory."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor
from numpy.typing import NDArray

from monitor.stats import numpy_magnitudes
from monitor.stats.mindspore_tensors import has_data, on_host


def count_magnitudes(x: Tensor) -> NDArray[np.int64] | None:
    """The histogram of a tensor on the host, shape ``(BINS,)``; None if it has no data to read.

    Raises:
        EarlierFailure: Something that was called before has failed.
    """
    return numpy_magnitudes.count_magnitudes(on_host(x)) if has_data(x) else None
