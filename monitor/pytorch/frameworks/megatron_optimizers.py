"""What the optimizers of torch inside one of Megatron step: fp32 copies of parameters, parts of those, or parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from monitor.pytorch.frameworks.optimizers import innermost
from monitor.recording.protocols import MAX_WRAPPERS

GROUPS: Final = (
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
    ("float16_groups", "fp32_from_float16_groups"),
    ("fp32_from_fp32_groups", "fp32_from_fp32_groups"),
)
"""Where Megatron's optimizers keep parameters of the model, and beside them what is stepped: first those of
``DistributedOptimizer``, then those of ``Float16OptimizerWithFloat16Params``."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """What stands for a parameter of the model in an optimizer of torch.

    Attributes:
        tensor: Its fp32 copy, this rank's part of that, flat, or the parameter itself.
        optimizer: Has the moments, under ``tensor``.
        decoupled: Whether the optimizer keeps master weight and moments in a form of its own (precision-aware).
    """

    tensor: Tensor
    optimizer: Optimizer
    decoupled: bool = False

    @property
    def gradient(self) -> Tensor | None:
        """What it is stepped by: between ``prepare_grads`` and clipping, the reduced gradient without the loss scale."""
        found: Tensor | None = getattr(self.tensor, "decoupled_grad", None) if self.decoupled else self.tensor.grad
        return found


class MasterWeights:
    """The parameters of a model, and what is stepped for each.

    Attributes:
        given: The optimizer that the user passed: Megatron's, or torch's inside it.
        optimizer: The first torch optimizer of them; None on a rank where there is nothing to step.
    """

    def __init__(self, optimizer: Any) -> None:
        """Take what the user passed.

        Raises:
            TypeError: It is no optimizer that is known.
        """
        self.given = _megatrons(optimizer)
        inner = torch_optimizers(self.given) if isinstance(self.given, MegatronOptimizer) else [self.given]
        self.optimizer: Optimizer | None = inner[0] if inner else None
        self._inner = inner
        self._stepping: Any = None
        self._of: dict[int, Stepped] = {}
        if isinstance(self.given, MegatronOptimizer):
            self._adopt(self.given)

    def belong_to(self, optimizer: Any) -> bool:
        """Whether an optimizer of Megatron is, wraps or belongs to the one that was passed. From then on it is looked into."""
        wrapped = torch_optimizers(optimizer)
        if optimizer is not self.given and not any(one is other for one in wrapped for other in self._inner):
            return False
        if optimizer is not self._stepping:
            self._adopt(optimizer)
        return True

    def of(self, parameter: nn.Parameter) -> Stepped | None:
        """None where nothing is stepped for it on this rank, or not seen yet."""
        return self._of.get(id(parameter))

    @property
    def known(self) -> bool:
        """Whether what is stepped is known."""
        return bool(self._of)

    def _adopt(self, optimizer: Any) -> None:
        self._stepping = optimizer
        self._of = {id(p): stepped for member in members(optimizer) for p, stepped in _stepped_by(member)}


def members(optimizer: Any) -> Sequence[Any]:
    """The optimizers that step one after the other in a chained one; of another, itself."""
    chained = getattr(optimizer, "chained_optimizers", None)
    return [optimizer] if chained is None else [member for one in chained for member in members(one)]


def torch_optimizers(optimizer: Any) -> list[Optimizer]:
    """Those that do the work. There is none for a member without parameters."""
    found = (member.optimizer for member in members(optimizer))
    return [inner for inner in found if isinstance(inner, Optimizer)]


def _megatrons(optimizer: Any) -> Any:
    """The optimizer of Megatron inside wrappers of others', or else the optimizer of torch."""
    found = optimizer
    for _ in range(MAX_WRAPPERS):
        if found is None or isinstance(found, MegatronOptimizer):
            break
        found = getattr(found, "optimizer", None)
    if not isinstance(found, MegatronOptimizer):
        return innermost(optimizer)
    if any("LayerWise" in cls.__name__ for cls in type(found).__mro__):
        raise TypeError(
            f"optimizer is a {type(found).__name__}, which cannot be observed: its ranks step whole layers each. "
            "Use the optimizer that get_megatron_optimizer makes."
        )
    return found


def _stepped_by(member: Any) -> Iterator[tuple[nn.Parameter, Stepped]]:
    inner = member.optimizer
    if not isinstance(inner, Optimizer):
        return
    decoupled = bool(getattr(member.config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False))
    for parameter, tensor in _pairs(member, inner, decoupled=decoupled):
        yield parameter, Stepped(tensor, inner, decoupled)


def _pairs(member: Any, inner: Optimizer, *, decoupled: bool) -> Iterator[tuple[nn.Parameter, Tensor]]:
    grouped = [(model, stepped) for model, stepped in GROUPS if hasattr(member, model)]
    for model, stepped in grouped:
        kept = "shard_float16_groups" if decoupled and stepped == "shard_fp32_from_float16_groups" else stepped
        for parameters, tensors in zip(getattr(member, model), getattr(member, kept), strict=True):
            yield from zip(parameters, tensors, strict=True)
    if not grouped:
        yield from ((p, p) for group in inner.param_groups for p in group["params"])
