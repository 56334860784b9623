"""Tensors of every kind, moved by collectives, and what is refused; ``kinds_of_tensors.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from casewise import Case, each_in_a_step, numbers
from communicating import Attach, run
from torch import Tensor

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool,
    torch.complex64,
)  # fmt: skip


def of(dtype: torch.dtype, size: int = 6, salt: int = 0) -> Tensor:
    if dtype.is_floating_point:
        return numbers(size, salt=salt, dtype=dtype)
    if dtype.is_complex:
        return torch.complex(numbers(size, salt=salt), numbers(size, salt=salt + 1))
    return (numbers(size, salt=salt) * 3).abs().to(dtype)


def gathered(dtype: torch.dtype) -> list[Tensor]:
    """One operator that computes nothing, so that gloo has it for every dtype."""
    parts = [torch.zeros(6, dtype=dtype), torch.zeros(6, dtype=dtype)]
    dist.all_gather(parts, of(dtype))
    return parts


def reduced(x: Tensor, op: Any = dist.ReduceOp.SUM) -> list[Tensor]:
    """What went in, and what came out."""
    before = x.clone()
    dist.all_reduce(x, op)
    return [before, x]


def largest_of_integers() -> list[Tensor]:
    return reduced(torch.tensor([2**53 + 1, -3]) + dist.get_rank(), dist.ReduceOp.MAX)


def with_nothing_finite() -> list[Tensor]:
    return reduced(torch.tensor([float("inf"), float("nan"), 1.0, 0.0]))


def every_other() -> list[Tensor]:
    x = numbers(4, 6)
    before = x.clone()
    dist.broadcast(x[:, ::2], 0)
    return [before, x, x[:, ::2]]


def transposed() -> list[Tensor]:
    return reduced(numbers(4, 6).t())


def channels_last() -> list[Tensor]:
    x = numbers(2, 3, 4, 5).to(memory_format=torch.channels_last)
    return reduced(x)


def part_of_a_storage() -> list[Tensor]:
    whole = numbers(10)
    return [*reduced(whole[3:7]), whole]


def sparse() -> list[Tensor]:
    x = torch.sparse_coo_tensor(torch.tensor([[0, 2 + dist.get_rank()]]), numbers(2), (5,)).coalesce()
    return [one.to_dense() for one in reduced(x)]


def conjugated() -> list[Tensor]:
    parts = [torch.zeros(6, dtype=torch.complex64), torch.zeros(6, dtype=torch.complex64)]
    dist.all_gather(parts, of(torch.complex64).conj())
    return parts


def negated() -> list[Tensor]:
    x = torch.complex(numbers(3), numbers(3)).conj().imag  # a view that is negative only by a bit of its own
    parts = [torch.zeros(3), torch.zeros(3)]
    dist.all_gather(parts, x.contiguous())
    return parts


def sizes_differ() -> list[Tensor]:
    parts = [torch.zeros(2), torch.zeros(3)]
    dist.all_gather(parts, numbers(2 + dist.get_rank()))
    return parts


def split_unevenly() -> Tensor:
    rank = dist.get_rank()
    out = torch.zeros(2 if rank == 0 else 4)
    dist.all_to_all_single(out, numbers(3), [1, 1] if rank == 0 else [2, 2], [1, 2])
    return out


def one_list_twice() -> list[Tensor]:
    x = numbers(3)
    dist.all_gather_coalesced([[x, x], [x, x]], [numbers(3, salt=1), numbers(3, salt=2)])
    return [x]


def several_dtypes(call: Callable[[Sequence[Tensor]], Any]) -> list[Any]:
    xs = [of(torch.float32), of(torch.float64), of(torch.int64)]
    return [call(xs), xs]


def sent_several_dtypes() -> list[Tensor]:
    other = 1 - dist.get_rank()
    xs = [of(torch.float32), of(torch.bfloat16, 3), of(torch.int64, 2)]
    outs = [torch.zeros_like(x) for x in xs]
    ops = [dist.P2POp(dist.isend, x, other, tag=place) for place, x in enumerate(xs)]
    ops += [dist.P2POp(dist.irecv, x, other, tag=place) for place, x in enumerate(outs)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return outs


def objects() -> list[Any]:
    rank = dist.get_rank()
    shared: list[Any] = [{"of": rank, "x": numbers(3)}, "text"]
    dist.broadcast_object_list(shared, src=1)
    everybody: list[Any] = [None, None]
    dist.all_gather_object(everybody, {"rank": rank, "x": numbers(2)})
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [["a"], ["bc"]] if rank == 0 else [None, None], src=0)
    at_root: list[Any] = [None, None]
    dist.gather_object(f"from {rank}", at_root if rank == 0 else None, dst=0)
    if rank == 0:
        dist.send_object_list([["list", 3]], dst=1)
    else:
        received: list[Any] = [None]
        dist.recv_object_list(received, src=0)
        mine.append(received)
    return [shared, everybody, mine, at_root]


def coalesced(asynchronous: bool) -> list[Tensor]:
    xs = [numbers(3, salt=1), numbers(5, salt=2)]
    with dist.distributed_c10d._coalescing_manager(async_ops=asynchronous) as together:
        for x in xs:
            dist.all_reduce(x)
    if asynchronous:
        together.wait()
    return xs


def coalesced_gathers() -> list[Tensor]:
    outs = [torch.zeros(6), torch.zeros(4)]
    with dist.distributed_c10d._coalescing_manager():
        for out in outs:
            dist.all_gather_into_tensor(out, numbers(out.numel() // 2))
    return outs


KINDS: dict[str, Case] = {
    **{f"gather {dtype}": partial(gathered, dtype) for dtype in DTYPES},
    **{f"reduce {dtype}": lambda dtype=dtype: reduced(of(dtype)) for dtype in DTYPES},
    "largest of integers": largest_of_integers,
    "nothing finite": with_nothing_finite,
    "scalar": lambda: reduced(numbers()),
    "one": lambda: reduced(numbers(1)),
    "empty": lambda: reduced(torch.empty(0)),
    "empty rows": lambda: reduced(torch.empty(3, 0)),
    "every other": every_other,
    "transposed": transposed,
    "channels last": channels_last,
    "part of a storage": part_of_a_storage,
    "sparse": sparse,
    "conjugated": conjugated,
    "negated": negated,
    "sizes differ": sizes_differ,
    "split unevenly": split_unevenly,
    "one list twice": one_list_twice,
    "all_reduce_coalesced of several dtypes": partial(several_dtypes, dist.all_reduce_coalesced),
    "several dtypes sent": sent_several_dtypes,
    "objects": objects,
    "coalesced": partial(coalesced, False),
    "coalesced, asynchronous": partial(coalesced, True),
    "coalesced gathers": coalesced_gathers,
}
REFUSED: dict[str, Case] = {
    "no tensor": lambda: dist.all_reduce("x"),  # type: ignore[arg-type]
    "mean": lambda: reduced(numbers(3), dist.ReduceOp.AVG),
    "bits of floats": lambda: reduced(numbers(3), dist.ReduceOp.BAND),
    "too few places": lambda: dist.all_gather([torch.zeros(3)], numbers(3)),
    "wrong size": lambda: dist.all_gather_into_tensor(torch.zeros(5), numbers(3)),
    "other dtype": lambda: dist.all_gather_into_tensor(torch.zeros(6, dtype=torch.float64), numbers(3)),
    "no list": lambda: dist.all_gather(numbers(3), numbers(3)),  # type: ignore[arg-type]
    "no one there": lambda: dist.broadcast(numbers(3), 5),
    "to itself": lambda: dist.send(numbers(3), dist.get_rank()),
    "no argument": partial(dist.all_reduce),
    "no such option": lambda: dist.all_reduce(numbers(3), asynchronous=True),  # type: ignore[call-arg]
    "method without arguments": lambda: dist.group.WORLD.allreduce(*[]),  # type: ignore[union-attr]
    "method of nothing": lambda: dist.ProcessGroup.allreduce(None, [numbers(3)]),  # type: ignore[arg-type]
}


def train(attach: Attach) -> dict[str, Any]:
    return each_in_a_step(attach, KINDS | REFUSED)


if __name__ == "__main__":
    run(train)
