"""The run's configuration as TensorBoard shows it: a text for each top-level key of the training YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import yaml

from monitor.training.model import TrainingConfig

_PROFILE: Final = (
    "profile_communication",
    "profile_level",
    "profile_memory",
    "profile_start_step",
    "profile_stop_step",
    "profile_rank_ids",
    "profile_pipeline",
    "init_start_profile",
)
_EVALUATION: Final = ("eval_callbacks", "eval_step_interval", "eval_epoch_interval", "eval_dataset", "eval_dataset_task")
_CHECKPOINT: Final = ("load_ckpt_format", "auto_trans_ckpt", "load_ckpt_async")
_TRANSFORM: Final = ("transform_process_num", "src_strategy_path_or_dir")

DEPENDS: Final[Mapping[str, str]] = {
    "ignore_data_skip": "resume_training",
    **dict.fromkeys(_CHECKPOINT, "load_checkpoint"),
    **dict.fromkeys(_TRANSFORM, "auto_trans_ckpt"),
    **dict.fromkeys(_PROFILE, "profile"),
    **dict.fromkeys(_EVALUATION, "do_eval"),
    "lr_scale_factor": "lr_scale",
}
"""Keys that say something only where another one is shown and is neither false nor empty."""

DEPENDS_ON_FALSE: Final[Mapping[str, str]] = {"data_skip_steps": "ignore_data_skip"}
"""Keys that say something only where another one is shown and is false."""


def texts(config: TrainingConfig) -> dict[str, str]:
    """By tag."""
    document: dict[str, Any] = {str(key): value for key, value in config.document.items()}
    return {key: _spelled(value) for key, value in document.items() if _is_shown(key, document)}


def _is_shown(key: str, document: Mapping[str, Any]) -> bool:
    if key not in document:
        return False
    if (needed := DEPENDS.get(key)) is not None:
        return bool(document.get(needed)) and _is_shown(needed, document)
    if (refuted := DEPENDS_ON_FALSE.get(key)) is not None:
        return document.get(refuted) is False and _is_shown(refuted, document)
    return True


def _spelled(value: Any) -> str:
    """As Markdown, which TensorBoard's page shows: mappings and lists as the block of YAML that they are."""
    if isinstance(value, dict | list):
        block: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
        return f"```\n{block}```"
    return str(value)
