"""What there is to read in a tensor of MindSpore, and whose an error is that reading meets.

Operations run later than they are called, and what goes wrong in one surfaces in the first call that waits, whatever it waits
for; then it is gone. So a read that waits may be handed an error of training's, which it must not keep to itself.
"""

from __future__ import annotations

from mindspore import COOTensor, CSRTensor, Tensor

from monitor.failures import EarlierFailure
from monitor.stats.numpy_tensors import Raw

SPARSE = (COOTensor, CSRTensor)


def has_data(x: Tensor) -> bool:
    """False for what only pretends to have any: parameters that are yet to be initialized (reading them would draw their
    random numbers), tensors of the device ``meta``, and sparse ones, whose elements may be terms of sums.
    """
    return not (isinstance(x, SPARSE) or x.has_init or getattr(x, "is_meta", False))


def on_host(x: Tensor) -> Raw:
    """The elements of a tensor with data. Waits for all that was called before.

    The array shares the memory of a contiguous tensor in host memory; of any other it is a copy. It is read at once and not
    kept: an optimizer writes where it stands.

    Raises:
        EarlierFailure: Something that was called before has failed.
    """
    try:
        array: Raw = x.asnumpy()
    except Exception as error:
        raise EarlierFailure(error) from error
    return array
