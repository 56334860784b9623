"""Cases of communication, a step each, told so that two runs can be compared bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from communicating import Attach
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Case = Callable[[], Any]

torch.set_warn_always(True)  # so that the second run says what the first did


def numbers(*shape: int, salt: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Others on each rank, the same in each run."""
    generator = torch.Generator().manual_seed(100 * salt + dist.get_rank())
    return torch.randn(shape, generator=generator).to(dtype)


def told(value: Any) -> Any:
    """As JSON holds it; of a tensor all that can be seen of it, its bits among the rest."""
    if isinstance(value, Tensor):
        return _told_of(value)
    if isinstance(value, Mapping):
        return {str(key): told(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [told(one) for one in value]
    return value if isinstance(value, (bool, int, str, type(None))) else repr(value)


def _told_of(x: Tensor) -> dict[str, Any]:
    node, inference = x.grad_fn, x.is_inference()
    return {
        "type": type(x).__name__,
        "dtype": str(x.dtype),
        "shape": list(x.shape),
        "stride": list(x.stride()),
        "version": None if inference else x._version,
        "inference": inference,
        "requires_grad": x.requires_grad,
        "leaf": x.is_leaf,
        "hooks": len(x._backward_hooks or ()),
        "graph": [] if node is None else _graph(node),
        "bits": _bits(x),
    }


def _graph(node: Any) -> list[Any]:
    """The names of the nodes, each followed by those that it leads to."""
    return [node.name(), *(_graph(one) for one, _ in node.next_functions if one is not None)]


def _bits(x: Tensor) -> list[int]:
    local = x._local_tensor if isinstance(x, DTensor) else x
    local = getattr(local, "elem", local)  # which somebody may not have waited for yet
    return local.detach().contiguous().flatten().view(torch.uint8).tolist()


def outcome(case: Case) -> dict[str, Any]:
    """What a case gives, or the exception that it raises, and what is warned of meanwhile."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", ".*torch.jit.*", DeprecationWarning)  # of what torch loads when it is first needed
        try:
            found: dict[str, Any] = {"told": told(case())}
        except Exception as error:
            found = {"raised": [type(error).__name__, str(error)]}
    return found | {"warned": [[one.category.__name__, str(one.message)[:200]] for one in caught]}


def each_in_a_step(attach: Attach, cases: Mapping[str, Case]) -> dict[str, Any]:
    """The outcome of every case, and all that is random at the end."""
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    attach(model, optimizer)
    found = {}
    for name, case in cases.items():
        model(torch.ones(1, 2)).sum().backward()
        found[name] = outcome(case)
        optimizer.step()
        optimizer.zero_grad()
    return {"cases": found, "random": torch.get_rng_state().tolist(), "grad": torch.is_grad_enabled()}
