"""Fields of the original's ``config.json`` that this dump has no use for.

Source: the default ``config.json`` of mindstudio-probe 26.2.0 and what its pages about it list (8.3, 26.0). A name
that is not in them is a typo, and an error.
"""

from __future__ import annotations

from typing import Final

from monitor.config.jsonc import Path

OTHER_TASKS: Final = (
    "acc_check",
    "run_ut",
    "overflow_check",
    "free_benchmark",
    "grad_probe",
    "nan_check",
    "structure",
    "exception_dump",
)
"""Sections of tasks that are not recorded here, whatever they hold."""

SWITCHES: Final = ("extra_info", "async_dump", "enable_dataloader", "precision", "dump_enable")
"""Tensors are always read as they are met, statistics are always computed in high precision, and stacks are always kept."""

OF_SECTIONS: Final = {
    "statistics": ("tensor_list", "device"),
    "tensor": ("file_format", "backward_input", "summary_mode", "bench_path", "diff_nums"),
}

UNUSED: Final[frozenset[Path]] = frozenset(
    {(name,) for name in (*OTHER_TASKS, *SWITCHES)}
    | {(section, name) for section, names in OF_SECTIONS.items() for name in names}
)
