"""Megatron-core: ``DistributedDataParallel`` of its own, and optimizers around those of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn
from torch.optim import Optimizer

from monitor.failures import Failures
from monitor.pytorch.frameworks.framework import Framework, LocalGradients
from monitor.pytorch.frameworks.megatron_gradients import MainGradients
from monitor.pytorch.frameworks.megatron_layout import Layout
from monitor.pytorch.frameworks.megatron_optimizers import MasterWeights, members
from monitor.pytorch.frameworks.megatron_patches import check_version, unknown_version
from monitor.pytorch.frameworks.megatron_steps import MegatronSteps
from monitor.pytorch.frameworks.moments import Stepped
from monitor.recording.backend import StepListener, Steps
from monitor.recording.parameter_series import NamedParameter
from monitor.recording.protocols import Removable
from monitor.series import Placement

MEAN: Final = "a rank's own sum over its micro-batches; their mean over the data- and context-parallel ranks is grad_reduced"
PER_TOKEN: Final = (
    "a rank's own sum over its micro-batches; their sum over the data- and context-parallel ranks, divided by the number of "
    "tokens, is grad_reduced"
)
REDUCED: Final = "divided by the loss scale, before clipping"
TIED: Final = "of an embedding that is tied over pipeline stages the sum over these, too"
EXPERTS: Final = (
    "of experts the sum over the ranks that have the same, divided by the number of all data- and context-parallel ranks; each "
    "expert-parallel rank has experts of its own under the same names"
)
DECOUPLED: Final = "missing: a precision-aware optimizer keeps them in a form of its own"


class Megatron(Framework):
    """Model chunks inside Megatron's DistributedDataParallel, stepped by one of its optimizers or by a chained one."""

    name = "megatron"
    tells_twice = True

    def __init__(self, chunks: Sequence[nn.Module], optimizer: Any, *, main_grad: bool) -> None:
        super().__init__(chunks, None, main_grad=main_grad)
        check_version()
        self._weights = MasterWeights(optimizer)
        self.optimizers = () if self._weights.optimizer is None else (self._weights.optimizer,)
        self._wrappers = list(dict.fromkeys(_wrappers(chunks, self._weights.given)))
        if not self._wrappers:
            raise ValueError(
                "No chunk of the model is inside DistributedDataParallel of megatron.core: pass the chunks as they are after "
                "it has wrapped them, and with Megatron's optimizers use no other wrapper (Megatron-FSDP is not observed)."
            )
        try:
            self._layout = Layout(dist.get_rank(), self._wrappers)
        except (AttributeError, KeyError) as error:
            raise ValueError(unknown_version(f"DistributedDataParallel keeps things elsewhere: {error}")) from error

    def groups(self) -> Mapping[str, Sequence[int]]:
        return self._layout.groups()

    def notes(self) -> Mapping[str, str]:
        parameters = [p for wrapper in self._wrappers for p in wrapper.module.parameters()]
        per_token = any(wrapper.config.calculate_per_token_loss for wrapper in self._wrappers)
        special = [TIED] if any(getattr(p, "shared_embedding", False) for p in parameters) else []
        special += [EXPERTS] if any(not getattr(p, "allreduce", True) for p in parameters) else []
        notes = {"grad_unreduced": PER_TOKEN if per_token else MEAN, "grad_reduced": "; ".join([REDUCED, *special])}
        return notes | ({"param_origin": DECOUPLED, "exp_avg": DECOUPLED} if self._decoupled() else {})

    def placement(self, kind: str, parameter: NamedParameter) -> Placement:
        return self._layout.placement(kind, parameter)

    def catch_unreduced(self, parameters: Sequence[NamedParameter], gradients: LocalGradients, failures: Failures) -> Removable:
        return MainGradients(parameters, gradients, failures)

    def reduced(self, parameter: NamedParameter) -> Tensor | None:
        stepped = self._weights.of(parameter.tensor)
        return None if stepped is None else stepped.gradient

    def reduces(self, parameter: NamedParameter) -> bool | None:
        """Its schedules do, before the step."""
        del parameter
        return True

    def weight(self, parameter: NamedParameter) -> Tensor | None:
        stepped = self._weights.of(parameter.tensor)
        if stepped is not None:
            return None if stepped.decoupled else stepped.tensor
        # Of one that is reduced, another rank steps this part; one that is not stays as it is.
        return parameter.tensor if self._weights.known and not parameter.tensor.requires_grad else None

    def stepped(self, parameter: NamedParameter, optimizer: Optimizer) -> Stepped | None:
        del optimizer  # of a chained one the first
        found = self._weights.of(parameter.tensor)
        return None if found is None or found.decoupled else Stepped(found.optimizer, found.tensor)

    def held(self, optimizer: Any) -> None:
        """Of a chained one every member steps at once; what each of them steps, ``weight`` knows."""
        del optimizer

    def steps(self, listener: StepListener, failures: Failures) -> Steps:
        return MegatronSteps(self._weights, listener, failures)

    def _decoupled(self) -> bool:
        stepped = (self._weights.of(p) for chunk in self.chunks for p in chunk.parameters())
        return any(one is not None and one.decoupled for one in stepped)


def _wrappers(chunks: Sequence[nn.Module], optimizer: Any) -> Iterator[DistributedDataParallel]:
    """What wraps the chunks; of chunks that were passed without it, what the optimizer knows."""
    yield from (module for chunk in chunks for module in chunk.modules() if isinstance(module, DistributedDataParallel))
    for member in members(optimizer):
        yield from (one for one in getattr(member, "model_chunks", ()) if isinstance(one, DistributedDataParallel))
