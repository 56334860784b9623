"""What the configuration describes and this version cannot do yet.

Whoever builds one of these removes its line, here and nowhere else, and runs ``tools/make_configuration_doc.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from monitor.config.model import MonitorConfig

Asked = Callable[[MonitorConfig], bool]
"""Whether a configuration asks for the capability."""

NOT_BUILT: Final[Mapping[str, Asked]] = {
    "ur_distribution": lambda config: config.ur_distribution,
    "mg_direction": lambda config: config.mg_direction,
}


def not_built(config: MonitorConfig) -> list[str]:
    """One sentence for each capability that is asked for and does not exist yet."""
    return [
        f"{name}: not in this version yet, leave it out or switch it off" for name, asked in NOT_BUILT.items() if asked(config)
    ]
