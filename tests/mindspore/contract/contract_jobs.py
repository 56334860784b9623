"""The table of jobs that both frameworks run, and what no job covers, each with a reason.

A new field of the configuration or a new kind has to be in one of the two: ``test_contract_of_both_frameworks.py`` says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from twins import Stepping

from monitor.series import RUN_KIND
from monitor.stats.ops import OPS

BETAS = (0.75, 0.96875)  # MindSpore's optimizers compute 1 - beta in float32, which of these is exact
ADAMW = Stepping("AdamW", lr=0.01, betas=BETAS, weight_decay=0.01, eps=0.01, amsgrad=True)
RESTING = Stepping("SGD", lr=0.0)
GROUPS = Stepping("AdamW", {"first": {"lr": 0.02}, "layers": {"eps": 0.1}}, lr=0.01, betas=BETAS, eps=0.01)
PAIR = (Stepping("AdamW", {"first": {}}, lr=0.01, betas=BETAS, eps=0.01), Stepping("SGD", {"layers": {}}, lr=0.1, momentum=0.5))

ACTIVATIONS = {"actv", "actv_grad"}
WEIGHTS = {"param_origin", "param_updated"}
ROUTERS = ["gate", "picking", "shown", "cooled"]
MOMENTS = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}


@dataclass(frozen=True)
class Job:
    """What both frameworks train and record.

    Attributes:
        kinds: The kinds that must have rows; no other kind may have any.
        fields: The configuration.
        network: Its name in ``twins.py``.
        optimizers: Each has its turn in every step.
        first: The number of the first step.
        recomputes: Whether the block is recomputed in the backward.
        skipped: The steps in which no optimizer is called.
        clips: The norm that gradients are clipped to.
        faulty: The step that has a NaN among its targets.
        switched: The steps before which ``reload_xy`` is called, and its argument.
        watched: Whether ``monitor.watch`` attaches, and not ``set_monitor``.
        environment: Variables that are set.
    """

    kinds: Collection[str]
    fields: Mapping[str, Any]
    network: str = "blocks"
    optimizers: tuple[Stepping, ...] = (ADAMW,)
    steps: int = 3
    first: int = 0
    micro_batches: int = 1
    recomputes: bool = False
    skipped: Collection[int] = ()
    clips: float | None = None
    faulty: int | None = None
    switched: Mapping[int, bool] = field(default_factory=dict)
    watched: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    def without_monitor(self) -> Job:
        """The same training, with nothing recorded. Equal for many jobs."""
        return replace(self, kinds=(), fields={}, switched={}, watched=False, environment={})


def features(**targets: Any) -> dict[str, Any]:
    return {"recording_l2_features": True, "l2_targets": targets}


JOBS: dict[str, Job] = {
    "activations": Job(ACTIVATIONS, {"xy_distribution": True, "all_xy": True}),
    "activations of targets": Job(
        {*ACTIVATIONS, *WEIGHTS},
        {
            "xy_distribution": True,
            "param_distribution": True,
            "targets": {"**.a": {}, "layers.0": {"output": "tuple[2]:1"}, "first.weight": {}},
        },
    ),
    "activations forward": Job({"actv"}, {"xy_distribution": True, "all_xy": True, "forward_only": True}),
    "activations backward": Job({"actv_grad"}, {"xy_distribution": True, "all_xy": True, "backward_only": True}),
    "activations of calls": Job(ACTIVATIONS, {"xy_distribution": True, "all_xy": True}, network="mixture"),
    "activations switched": Job(
        {*ACTIVATIONS, "grad_reduced"},
        {"all_xy": True, "wg_distribution": True, "wg_reduced_only": True},
        steps=4,
        switched={1: True, 3: False},
    ),
    "activations recomputed": Job(
        {*ACTIVATIONS, "grad_unreduced", "grad_reduced"},
        {"xy_distribution": True, "all_xy": True, "wg_distribution": True},
        recomputes=True,
    ),
    "micro-batches": Job(
        {*ACTIVATIONS, "grad_unreduced", "grad_reduced"},
        {"xy_distribution": True, "all_xy": True, "wg_distribution": True, "monitor_mbs_grad": True},
        micro_batches=2,
    ),
    "micro-batches combined": Job(
        {*ACTIVATIONS, "grad_reduced", "activation_hook"},
        {
            "xy_distribution": True,
            "all_xy": True,
            "micro_steps": "combined",
            "wg_distribution": True,
            "wg_reduced_only": True,
            **features(activation_hook=["layers.0.a"]),
        },
        micro_batches=2,
    ),
    "gradients": Job({"grad_unreduced", "grad_reduced"}, {"wg_distribution": True}),
    "weights": Job(WEIGHTS, {"param_distribution": True, "squash_name": True}),
    "moments": Job(MOMENTS, {"mv_distribution": True}),
    "moments between steps": Job(
        {*MOMENTS, *(f"{kind}_updated" for kind in MOMENTS)},
        {"mv_distribution": True, "replica_check": "all", "ops": ["norm"]},
    ),
    "updates": Job(
        {"update_ratio", "optimizer_health", "mg_direction", "adam_update", "adam_ratio"},
        {
            "update_ratio": True,
            "optimizer_health": True,
            "mg_direction": True,
            "ur_distribution": True,
            "format": ["parquet", "hdf5"],
            "eps": 1e-3,
        },
    ),
    "several optimizers": Job(
        {"grad_reduced", *WEIGHTS, "exp_avg", "exp_avg_sq", "update_ratio", "mg_direction", "optimizer_health", RUN_KIND},
        {
            "wg_distribution": True,
            "wg_reduced_only": True,
            "param_distribution": True,
            "mv_distribution": True,
            "update_ratio": True,
            "mg_direction": True,
            "optimizer_health": True,
            "run_numbers": True,
        },
        optimizers=PAIR,
    ),
    "numbers of the run": Job(
        {RUN_KIND, "grad_unreduced", "grad_reduced"}, {"run_numbers": True, "wg_distribution": True}, optimizers=(GROUPS,)
    ),
    "clipped": Job({RUN_KIND, "grad_unreduced", "grad_reduced"}, {"run_numbers": True, "wg_distribution": True}, clips=0.1),
    "attention": Job(
        {"attention_hook", "attention_head_hook"},
        {
            **features(attention_hook=["core"], attention_head_hook=["core"]),
            "sa_order": "b,s,h,d",
            "sa_heads": 0,
            "sa_batch_rows": 2,
            "sa_logit_bound": 0.5,
            "sa_sink_tokens": 2,
        },
        network="mixture",
    ),
    "matrices": Job({"linear_hook"}, features(linear_hook=[])),
    "routers": Job(
        {"moe_router_weight_hook", "moe_router_logit_hook", "moe_router_load_hook"},
        features(moe_router_weight_hook=ROUTERS, moe_router_logit_hook=ROUTERS, moe_router_load_hook=ROUTERS),
        network="mixture",
    ),
    "outputs": Job(
        {"activation_hook"},
        {**features(activation_hook=["layers.0.a", "layers.0.act", "twice"]), "dead_after_steps": 2},
        steps=4,
    ),
    "every statistic": Job(
        WEIGHTS, {"param_distribution": True, "ops": list(OPS), "ndigits": 17, "eps": 1e-4}, optimizers=(RESTING,)
    ),
    "chosen steps": Job(
        {"actv", "actv_grad", "grad_reduced", *WEIGHTS, *MOMENTS, "mg_direction", "update_ratio", "optimizer_health"}
        | {"adam_update", "adam_ratio", "linear_hook"},
        {
            "start_step": 12,
            "collect_times": 5,
            "step_interval": 2,
            "intervals": {
                "xy_distribution": 4,
                "wg_distribution": 2,
                "param_distribution": 3,
                "mv_distribution": 2,
                "mg_direction": 4,
                "ur_distribution": 3,
                "update_ratio": 2,
                "optimizer_health": 4,
                "recording_l2_features": 3,
            },
            "xy_distribution": True,
            "all_xy": True,
            "wg_distribution": True,
            "wg_reduced_only": True,
            "param_distribution": True,
            "mv_distribution": True,
            "mg_direction": True,
            "ur_distribution": True,
            "update_ratio": True,
            "optimizer_health": True,
            **features(linear_hook=["first"]),
        },
        steps=12,
        first=10,
    ),
    "skipped steps": Job(
        {*ACTIVATIONS, "grad_unreduced", "grad_reduced", *WEIGHTS},
        {"xy_distribution": True, "all_xy": True, "wg_distribution": True, "param_distribution": True},
        steps=4,
        skipped=[1],
    ),
    "alerts": Job(
        {*ACTIVATIONS, "grad_unreduced", "grad_reduced", *WEIGHTS},
        {
            "xy_distribution": True,
            "all_xy": True,
            "wg_distribution": True,
            "param_distribution": True,
            "alert": {
                "rules": [
                    {"rule_name": "AnomalyNan", "args": {"threshold": 1e4}},
                    {"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.3}},
                ],
                "dump": True,
            },
        },
        steps=5,
        faulty=4,
    ),
    "structure": Job((), {"print_struct": True}, steps=1),
    "stacks": Job((), {"stack_info": True}),
    "forwarded": Job(
        {"grad_reduced", "grad_unreduced", RUN_KIND},
        {
            "wg_distribution": True,
            "run_numbers": True,
            "forward": {
                "to": "prometheus",
                "file": "forwarded.prom",
                "kinds": ["run", "grad_reduced"],
                "names": ["layers.**"],
                "ops": ["max", "norm"],
                "most": 9,
            },
        },
    ),
    "files": Job(WEIGHTS, {"param_distribution": True, "format": ["csv"], "ndigits": 9, "step_count_per_record": 2}),
    "in memory": Job((), {"wg_distribution": True, "xy_distribution": True, "all_xy": True, "format": "api"}),
    "dynamic": Job(
        WEIGHTS,
        {"dynamic_on": True, "collect_times": 2, "param_distribution": True},
        steps=5,
        environment={"DYNAMIC_MONITOR": "True"},
    ),
    "watched": Job(
        {*ACTIVATIONS, "grad_reduced", *WEIGHTS},
        {"xy_distribution": True, "all_xy": True, "wg_distribution": True, "wg_reduced_only": True, "param_distribution": True},
        micro_batches=2,
        watched=True,
    ),
}


@dataclass(frozen=True)
class Difference:
    """Rows of a job that the frameworks do not have in common.

    Attributes:
        names: The names of the rows, a pattern.
        columns: A pattern, too.
    """

    job: str
    kind: str
    reason: str
    names: str = "*"
    columns: str = "*"

    def covers(self, job: str, kind: str, name: str, column: str) -> bool:
        patterns = ((job, self.job), (kind, self.kind), (name, self.names), (column, self.columns))
        return all(fnmatchcase(text, pattern) for text, pattern in patterns)


DIFFERENCES = (
    Difference(
        "micro-batches",
        "grad_unreduced",
        "PyTorch's .grad is the sum of the micro-batches so far; MindSpore's backward returns the gradient of one",
    ),
    Difference(
        "activations recomputed",
        "actv_grad",
        "the block uses this output itself, too: in PyTorch its hook sees both uses, in MindSpore only the one outside",
        names="layers.0.output_1",
    ),
    Difference("moments between steps", "*", "each framework rounds in its own way, so that bits differ", columns="checksum"),
    Difference("alerts", "*", "each framework rounds in its own way, so that bits differ", columns="checksum"),
    Difference(
        "several optimizers",
        RUN_KIND,
        "without rows of grad_unreduced, MindSpore cannot tell whether the loop has changed the gradients",
        names="grad_norm*",
    ),
    Difference("clipped", RUN_KIND, "MindSpore returns no norm where it clips", names="grad_norm"),
    Difference(
        "attention", "attention*", "PyTorch's row is measured from the scores, MindSpore's from the queries", columns="shape"
    ),
)
"""Every difference between the rows of the frameworks, with its reason. One that is gone must leave the table."""

RANKS = "needs several ranks: tests/mindspore/test_two_ranks_of_mindspore.py"
COMMUNICATION = "needs several ranks: tests/mindspore/collectives/test_mindspore_communication.py"
WRITER = "a limit of the writer, which sees rows and no framework: tests/pipeline/test_pipeline.py"
ESTIMATE = "a limit of the estimate at the start, which sees series and no framework: tests/pytorch/test_startup.py"

KINDS_OUTSIDE = {"other": COMMUNICATION, "replica": RANKS}
"""Kinds that no job records, each with the reason and the tests that record it."""

FIELDS_OUTSIDE = {
    "module_ranks": RANKS,
    "append_output": "about directories of earlier runs, before a framework is asked: tests/processes/test_append_output.py",
    "cc_distribution.enable": COMMUNICATION,
    "cc_distribution.cc_codeline": COMMUNICATION,
    "cc_distribution.cc_pre_hook": COMMUNICATION,
    "cc_distribution.cc_log_only": COMMUNICATION,
    "intervals.cc_distribution": COMMUNICATION,
    "on_alert": "begins some steps later, as the writer is fast: tests/mindspore/test_mindspore_formats.py",
    "forward.port": "the same text as that of the file: tests/forwarding/test_servers.py",
    "queue_bytes": WRITER,
    "queue_wait_seconds": WRITER,
    "close_seconds": WRITER,
    "signal_seconds": WRITER,
    "max_output_bytes": WRITER,
    "warn_rows_per_step": ESTIMATE,
    "warn_bytes_per_step": ESTIMATE,
    "warn_files_per_step": ESTIMATE,
}
"""Fields that no job sets, each with the reason and its tests."""
