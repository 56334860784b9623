"""What the configuration describes and this version cannot do yet.

Whoever builds one of these removes its line, here and nowhere else, and runs ``tools/make_configuration_doc.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from monitor.config.model import MonitorConfig

DYNAMIC_VARIABLE: Final = "DYNAMIC_MONITOR"

Asked = Callable[[MonitorConfig, bool], bool]
"""Whether a configuration asks for the capability; the second argument says whether dynamic monitoring was asked for."""

NOT_BUILT: Final[Mapping[str, Asked]] = {
    "ur_distribution": lambda config, _: config.ur_distribution,
    "mg_direction": lambda config, _: config.mg_direction,
    "recording_l2_features": lambda config, _: config.recording_l2_features,
    "on_alert": lambda config, _: config.on_alert is not None,
    f"environment variable {DYNAMIC_VARIABLE}": lambda _, dynamic: dynamic,
}


def not_built(config: MonitorConfig, *, dynamic: bool) -> list[str]:
    """One sentence for each capability that is asked for and does not exist yet."""
    return [
        f"{name}: not in this version yet, leave it out or switch it off"
        for name, asked in NOT_BUILT.items()
        if asked(config, dynamic)
    ]
