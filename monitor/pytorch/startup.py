"""The start-up line: what the whole job will write in a collected step."""

from __future__ import annotations

from monitor.config import MonitorConfig
from monitor.failures import LOGGER
from monitor.pytorch.attachment import Watch
from monitor.pytorch.names import ModelNames
from monitor.ranks.estimate import Bounds, KindLoad, estimate
from monitor.ranks.ownership import SAME_AFTER_REDUCTION
from monitor.selection import ModuleSelection
from monitor.series import PARAMETER_KINDS


def announce(watch: Watch, names: ModelNames, config: MonitorConfig) -> None:
    """Log what a step will come to, once for the job; as a warning above the configured bounds.

    How many tensors a module takes and gives shows only in its first call: one of each is reckoned. So is a gradient and
    moments for each parameter that is not frozen.
    """
    monitored = [rank for rank in range(watch.ownership.world_size) if not config.module_ranks or rank in config.module_ranks]
    if not monitored or watch.ownership.rank != monitored[0]:
        return
    reckoned = estimate(
        _loads(watch, names, config, len(monitored)),
        config.formats,
        config.steps_per_record(config.formats[0]),
        config.step_interval,
    )
    bounds = Bounds(config.warn_rows_per_step, config.warn_bytes_per_step, config.warn_files_per_step)
    exceeded = reckoned.exceeded(bounds)
    if exceeded:
        advice = "Name fewer targets, collect less often, or put more steps into a record."
        LOGGER.warning("%s: %s. %s", reckoned.line(), "; ".join(exceeded), advice)
    else:
        LOGGER.info("%s", reckoned.line())


def _loads(watch: Watch, names: ModelNames, config: MonitorConfig, ranks: int) -> dict[str, KindLoad]:
    parameters, steps = list(names.parameters()), watch.grad_acc_steps
    trained, weights = sum(one.tensor.requires_grad for one in parameters), len(parameters)
    each = steps if config.micro_steps == "each" else 1
    loads: dict[str, KindLoad] = {}
    if config.wg_distribution:
        per_micro_step = steps if config.monitor_mbs_grad else 1
        loads["grad_unreduced"] = KindLoad(trained, trained * per_micro_step, ranks)
        loads["grad_reduced"] = KindLoad(trained, trained, ranks)
    if config.param_distribution:
        loads.update({kind: KindLoad(weights, weights, ranks) for kind in PARAMETER_KINDS})
    if config.mv_distribution:
        loads.update({kind: KindLoad(trained, trained, ranks) for kind in ("exp_avg", "exp_avg_sq")})
    if config.xy_distribution:
        wanted = [module.wanted for module in names.modules() if module.wanted is not None]
        forward, backward = sum(map(_forward, wanted)), sum(map(_backward, wanted))
        loads["actv"] = KindLoad(forward, forward * each, ranks)
        loads["actv_grad"] = KindLoad(backward, backward * each, ranks)
    return {kind: _owned(kind, load, watch) for kind, load in loads.items()}


def _owned(kind: str, load: KindLoad, watch: Watch) -> KindLoad:
    """Replicas are written by one rank of each data-parallel group."""
    if kind not in SAME_AFTER_REDUCTION or watch.ownership.dp_group is None:
        return load
    return KindLoad(load.series, load.rows, max(1, load.ranks // max(1, len(watch.ownership.dp_group))))


def _forward(wanted: ModuleSelection) -> int:
    return wanted.input.wanted + wanted.output.wanted


def _backward(wanted: ModuleSelection) -> int:
    return wanted.input_grad.wanted + wanted.output_grad.wanted
