"""Fields that MindSpore Transformers has in these sections, and training metrics have no use for.

Source: its page about monitoring (1.6 to 1.9) and the arguments of its callbacks, which a training YAML may set. A name that
is in neither is a typo, and an error.
"""

from __future__ import annotations

from typing import Final

from monitor.config.jsonc import Path

_OF_RUNS: Final = (
    *("origin_epochs", "dataset_size", "initial_epoch", "initial_step", "global_batch_size"),
    *("micro_batch_num", "check_for_nan_in_loss_and_grad"),
)
"""What its trainer hands to both of its monitors."""

OF_SECTIONS: Final[dict[Path, tuple[str, ...]]] = {
    ("monitor_config",): (
        *("check_for_global_norm", "global_norm_spike_threshold", "global_norm_spike_count_threshold"),
        *("stable_rank_config", "use_skip_data_by_global_norm"),
    ),
    ("callbacks", "MFLossMonitor"): (
        *_OF_RUNS,
        *("learning_rate", "micro_batch_interleave_num", "gradient_accumulation_steps"),
        *("calculate_per_token_loss", "print_separate_loss", "enable_tensorboard", "tensorboard_path"),
    ),
    ("callbacks", "TrainingStateMonitor"): (
        *_OF_RUNS,
        *("config", "step_interval", "tensor_model_parallel_size", "use_skip_data_by_global_norm", "embedding_size"),
        "use_local_norm",
    ),
    ("callbacks", "TopkBiasBalanceCallback"): (
        *("balance_via_topk_bias", "topk_bias_update_rate", "num_layers", "mtp_depth", "expert_num"),
        *("micro_batch_num", "gradient_accumulation_steps"),
    ),
}

UNUSED: Final[frozenset[Path]] = frozenset((*section, name) for section, names in OF_SECTIONS.items() for name in names)
