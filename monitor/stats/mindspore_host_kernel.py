"""The kernel for tensors in host memory: MindSpore shares that memory with numpy, whose reductions of a chunk in cache take a
fraction of the time of MindSpore's own, and which has a reduction for every dtype.
"""

from __future__ import annotations

from mindspore import Tensor

from monitor.stats.mindspore_tensors import has_data, on_host
from monitor.stats.numpy_kernel import NumpyKernel
from monitor.stats.numpy_tensors import Raw
from monitor.stats.partials import Floats


class HostKernel:
    """Reduces host tensors to table rows. Waits for what was called before, as ``on_host`` does."""

    def __init__(self, eps: float) -> None:
        self._arrays = NumpyKernel(eps)

    def reduce_into(self, x: Tensor, page: Floats, row: int) -> bool:
        """Write the partials of ``x`` into ``page[row]``. False if ``x`` has no data to read; the row is then untouched.

        Raises:
            EarlierFailure: Something that was called before has failed.
        """
        return has_data(x) and self.reduce_array(on_host(x), page, row)

    def reduce_array(self, elements: Raw, page: Floats, row: int) -> bool:
        """The same of what is on the host already."""
        return self._arrays.reduce_into(elements, page, row)
