"""The alert rules, by the names that the configuration has for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from monitor.anomalies.columns import Rule
from monitor.anomalies.nonfinite import AnomalyNan
from monitor.anomalies.turbulence import AnomalyTurbulence

RULES: Final[Mapping[str, Callable[..., Rule]]] = MappingProxyType(
    {rule.name: rule for rule in (AnomalyTurbulence, AnomalyNan)}
)
"""Each is made of the fields of ``args``, by name; their types and bounds are the configuration's."""
