"""DeepSpeed's engine at each stage of ZeRO; ``deepspeed_zero.py CASE…``.

Cases record side by side in one process, each below a directory of its own: to import DeepSpeed takes longer than to train.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": os.environ["WORLD_SIZE"]}

import deepspeed
import deepspeed.runtime.zero.muon.muon_optimizer  # which DeepSpeed imports in its first step, for seconds
import deepspeed_uncompiled  # noqa: F401
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine, FusedAdam
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state
from framework_run import Attach, Attached, norm_of
from torch import nn

from monitor.pytorch import TrainerMon

STEPS: Final = 3
CONFIGURED: Final = json.loads(Path(os.environ["MONITOR_CONFIG"]).read_text())
FUSED_ADAM: Final = FusedAdam
OWN_METHODS: Final = {name: getattr(DeepSpeedEngine, name) for name in ("_take_model_step", "allreduce_gradients")}


@dataclass(frozen=True)
class Case:
    """How an engine is set up, and what is handed to the monitor.

    Attributes:
        stage: Of ZeRO.
        dtype: Of the parameters.
        micro_steps: Gradients are accumulated over.
        handed: Which model and which optimizer, an attribute path each, from the engine on.
        zero: What else its configuration says of ZeRO.
        config: What else it says.
        grouped: Whether the monitor is given the data-parallel group.
        overflows: The step whose loss is not finite, if there is one.
        monitor: What else is configured of the monitor.
        fused: Whether DeepSpeed takes the optimizer for its own fused one, which would have to be compiled.
    """

    stage: int
    dtype: torch.dtype = torch.float32
    micro_steps: int = 1
    handed: tuple[str, str] = ("", "")
    zero: tuple[tuple[str, Any], ...] = ()
    config: tuple[tuple[str, Any], ...] = ()
    grouped: bool = True
    overflows: int | None = None
    monitor: tuple[tuple[str, Any], ...] = ()
    fused: bool = False

    def settings(self) -> dict[str, Any]:
        name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self.dtype)
        return {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.micro_steps,
            "gradient_clipping": 1e9,  # binds nothing, and has the norm computed
            "zero_optimization": {"stage": self.stage} | dict(self.zero),
            "steps_per_print": 10**9,
            **({name: {"enabled": True}} if name else {}),
            **dict(self.config),
        }


ROUND_ROBIN: Final = ("round_robin_gradients", True)
SMALL_BUCKETS: Final = ("reduce_bucket_size", 150)
ON_HOST: Final = ("offload_optimizer", {"device": "cpu"})
ANY_OPTIMIZER: Final = ("zero_force_ds_cpu_optimizer", False)
SUMS_IN_FLOAT32: Final = ("data_types", {"grad_accum_dtype": "fp32"})
SCALED: Final = ("fp16", {"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
CASES: Final = {
    "zero0": Case(0, micro_steps=2, handed=("module", "optimizer")),
    "zero0-no-group": Case(0, grouped=False),
    "zero0-bf16": Case(0, torch.bfloat16),
    "zero0-bf16-flat": Case(0, torch.bfloat16, fused=True),
    "zero1": Case(1, micro_steps=2, handed=("module", "optimizer.optimizer"), zero=(SMALL_BUCKETS, ROUND_ROBIN)),
    "zero1-bf16": Case(1, torch.bfloat16, handed=("", "optimizer")),
    "zero1-bf16-float32-sums": Case(1, torch.bfloat16, micro_steps=2, config=(SUMS_IN_FLOAT32,)),
    "zero1-each-micro-step": Case(
        1, torch.bfloat16, micro_steps=2, config=(SUMS_IN_FLOAT32,), monitor=(("monitor_mbs_grad", True),)
    ),
    "zero1-fp16": Case(1, torch.float16, config=(SCALED,), overflows=1),
    "zero2": Case(2, handed=("", "optimizer.optimizer"), zero=(SMALL_BUCKETS,)),
    "zero2-aligned": Case(2, torch.bfloat16, zero=(("parameter_alignment", True),)),
    "zero2-bf16": Case(2, torch.bfloat16, micro_steps=2),
    "zero2-bf16-float32-sums": Case(2, torch.bfloat16, config=(SUMS_IN_FLOAT32,), zero=(("overlap_comm", True),)),
    "zero2-offloaded": Case(2, zero=(ON_HOST,), config=(ANY_OPTIMIZER,)),
    "zero3": Case(3, handed=("module", "optimizer"), zero=(SMALL_BUCKETS, ("sub_group_size", 100))),
    "zero3-bf16": Case(3, torch.bfloat16, micro_steps=2, zero=(("stage3_param_persistence_threshold", 0),)),
    "zero3-fp16": Case(3, torch.float16, config=(SCALED,), overflows=1),
    "zero3-offloaded": Case(3, zero=(ON_HOST,), config=(ANY_OPTIMIZER,)),
}


def model_of(case: Case) -> nn.Sequential:
    """A model with a frozen parameter, and sizes that no number of ranks divides."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 15), nn.Tanh(), nn.Linear(15, 16), nn.Tanh(), nn.Linear(16, 3)).to(case.dtype)
    model[2].bias.requires_grad = False
    return model


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().sum()


def local_gradients(case: Case, batches: list[torch.Tensor]) -> list[dict[str, float]]:
    """What backward alone leaves after each micro-batch of the first step, summed up in float32: norms by name."""
    model = model_of(case)
    summed = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in model.named_parameters() if p.requires_grad}
    norms = []
    for batch in batches:
        model.zero_grad()
        (loss_of(model, batch) / len(batches)).backward()
        for name, total in summed.items():
            total += model.get_parameter(name).grad
        norms.append({name: norm_of([total]) for name, total in summed.items()})
        if case.stage >= 2:  # nothing accumulates
            summed = {name: torch.zeros_like(total) for name, total in summed.items()}
    return norms


def build(case: Case) -> Any:
    """An engine with two parameter groups."""
    model = model_of(case)
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in trained if p.ndim == dimensions] for dimensions in (2, 1))
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.01)
    deepspeed.runtime.engine.FusedAdam = torch.optim.AdamW if case.fused else FUSED_ADAM
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=case.settings(), dist_init_required=False)
    return engine


def train(case: Case, attach: Attach) -> dict[str, Any]:
    """The losses, the norms that DeepSpeed reports, and of each step the norms of what ``Whole`` gathers, by name."""
    engine = build(case)
    model, optimizer = (attrgetter(path)(engine) if path else engine for path in case.handed)
    attach(model, optimizer, case.micro_steps, dp_group=dist.group.WORLD if case.grouped else None)
    whole = Whole(engine, dict(engine.module.named_parameters()))
    told: dict[str, Any] = {"losses": [], "norms": [], "steps": []}
    torch.manual_seed(1 + dist.get_rank())
    batches = [[torch.randn(4, 7, dtype=case.dtype) for _ in range(case.micro_steps)] for _ in range(STEPS)]
    told["local"] = local_gradients(case, batches[0])
    for step in range(STEPS):
        for micro_step in range(case.micro_steps):
            loss = loss_of(engine, batches[step][micro_step])
            engine.backward(loss * float("inf") if step == case.overflows else loss)
            if micro_step == case.micro_steps - 1:
                before = {"grad_reduced": whole.gradients(), "param_origin": whole.weights(), **whole.moments()}
            engine.step()
        told["losses"].append(loss.item().hex())
        told["norms"].append(None if engine.get_global_grad_norm() is None else float(engine.get_global_grad_norm()))
        told["steps"].append({**before, "param_updated": whole.weights()})
    engine.destroy()
    return told


class Whole:
    """What the ranks hold of each parameter together, gathered by DeepSpeed's own functions: norms by name."""

    def __init__(self, engine: Any, parameters: dict[str, nn.Parameter]) -> None:
        self._engine = engine
        self._parameters = parameters
        self._trained = {name: p for name, p in parameters.items() if p.requires_grad}
        groups = zip(getattr(engine.optimizer, "fp16_groups", ()), getattr(engine.optimizer, "fp32_groups", ()), strict=False)
        self._copies = {p: copied for group in groups for p, copied in zip(*group, strict=True)}

    def gradients(self) -> dict[str, float]:
        if getattr(self._engine.optimizer, "round_robin_gradients", False):
            return {}  # DeepSpeed cannot gather them: it looks where they would be in their original order
        return {name: norm_of([safe_get_full_grad(p)]) for name, p in self._trained.items()}

    def weights(self) -> dict[str, float]:
        if hasattr(self._engine.optimizer, "fp32_groups_flat"):
            return {}  # nor these
        return {name: norm_of([self._weight(p)]) for name, p in self._parameters.items()}

    def moments(self) -> dict[str, dict[str, float]]:
        """None in the first step, nor in one that follows nothing but skipped ones."""
        nothing_stepped = self._engine.global_steps == self._engine.skipped_steps
        if nothing_stepped or not self.gradients() or not self.weights():
            return {}
        if hasattr(self._engine.optimizer, "_hp_optimizer_states_linked"):
            # DeepSpeed links them after the first group's first step, when the other groups have none yet.
            self._engine.optimizer._hp_optimizer_states_linked = False
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()
        kinds = ("exp_avg", "exp_avg_sq")
        return {kind: {name: norm_of([self._moment(p, kind)]) for name, p in self._trained.items()} for kind in kinds}

    def _weight(self, p: nn.Parameter) -> torch.Tensor:
        if not p.requires_grad:
            with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
                return p.detach().clone()
        whole_in_float32 = p.dtype == torch.float32 and not hasattr(p, "ds_id")
        stepped = p if whole_in_float32 else self._copies.get(p)
        return safe_get_full_fp32_param(p) if stepped is None else stepped.detach()

    def _moment(self, p: nn.Parameter, kind: str) -> torch.Tensor:
        if self._engine.zero_optimization_stage() > 0:
            return safe_get_full_optimizer_state(p, kind)
        return self._engine.basic_optimizer.state[self._copies.get(p, p)][kind]


def is_collected(case: Case, monitored: bool) -> bool:
    """Whether an engine, trained for a step and destroyed, is collected; a monitor that is not referenced does not keep it."""
    engine = build(case)
    if monitored:
        TrainerMon(os.environ["MONITOR_CONFIG"], params_have_main_grad=False).set_monitor(engine, 1, engine)
    loss = loss_of(engine, torch.randn(4, 7, dtype=case.dtype))
    engine.backward(loss)
    engine.step()
    engine.destroy()
    gone = weakref.ref(engine), weakref.ref(engine.module)
    del engine, loss
    gc.collect()
    return all(one() is None for one in gone)


def refusals(engine: Any) -> dict[str, str]:
    """What is said of arguments that cannot be."""
    alien = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    wrong = {
        "another optimizer": (engine, alien),
        "a part of the model": (engine.module[0], engine.optimizer),
        "two engines": ([engine, build(CASES["zero0"])], engine),
    }
    said = {what: refusal(model, optimizer) for what, (model, optimizer) in wrong.items()}
    untrained, *_ = deepspeed.initialize(model=nn.Linear(1, 1), config=CASES["zero0"].settings(), dist_init_required=False)
    said["no optimizer"] = refusal(untrained, untrained)
    del DeepSpeedEngine._take_model_step
    said["an unknown version"] = refusal(engine, engine)
    DeepSpeedEngine._take_model_step = OWN_METHODS["_take_model_step"]
    return said


def refusal(model: Any, optimizer: Any) -> str:
    with pytest.raises(ValueError, match="DeepSpeed") as refused:
        TrainerMon(os.environ["MONITOR_CONFIG"], params_have_main_grad=False).set_monitor(model, 1, optimizer)
    return str(refused.value)


def configure(more: dict[str, Any]) -> None:
    """Have monitors that are made from now on do what they were asked to, and ``more``."""
    os.environ["MONITOR_CONFIG"] = str(Path(os.environ["FRAMEWORK_RESULTS"]) / f"config-of-rank{dist.get_rank()}.json")
    Path(os.environ["MONITOR_CONFIG"]).write_text(json.dumps(CONFIGURED | more))


def patched() -> list[str]:
    """The methods of DeepSpeed's engine that are not its own any more."""
    return [name for name, own in OWN_METHODS.items() if getattr(DeepSpeedEngine, name) is not own]


def unwatched(*_: Any, **__: Any) -> None:
    pass


def compare(case: Case) -> dict[str, Any]:
    """What ``train`` tells, plain and monitored, and which methods are patched while there is a monitor, and afterwards."""
    configure(dict(case.monitor))
    told: dict[str, Any] = {"plain": train(case, unwatched)}
    with Attached() as attach:
        told |= {"monitored": train(case, attach), "patched": patched()}
    return told | {"left": patched()}


def main(names: list[str]) -> None:
    get_accelerator().is_fp16_supported = lambda: True  # it is slow, and right
    gc.freeze()  # DeepSpeed collects garbage whenever it reports memory
    base = Path(os.environ["MONITOR_OUTPUT_DIR"])
    dist.init_process_group("gloo")
    told: dict[str, dict[str, Any]] = {"plain": {}, "monitored": {}}
    for name in names:
        os.environ["MONITOR_OUTPUT_DIR"] = str(base / name)
        compared = compare(CASES[name])
        told["plain"][name], told["monitored"][name] = compared.pop("plain"), compared.pop("monitored")
        told["monitored"][f"patches of {name}"] = compared
    os.environ["MONITOR_OUTPUT_DIR"] = str(base / "not-compared")
    configure({})
    short_lived = CASES["zero1-bf16-float32-sums"], CASES["zero2"]
    for how, monitored in (("plain", False), ("monitored", True)):
        told[how]["gone"] = [is_collected(case, monitored) for case in short_lived]
    told["monitored"]["refused"] = refusals(build(CASES["zero1"]))
    (Path(os.environ["FRAMEWORK_RESULTS"]) / f"rank{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


main(sys.argv[1:] or list(CASES))
