"""The configuration: a JSON file, read once into a frozen, validated ``MonitorConfig``."""

from monitor.config.loading import ConfigError, load_config
from monitor.config.model import (
    AUTO,
    Alert,
    AlertRule,
    CcDistribution,
    L2Targets,
    MonitorConfig,
    OnAlert,
    RuleArgs,
    Settings,
    Target,
    TensorSpec,
)

__all__ = [
    "AUTO",
    "Alert",
    "AlertRule",
    "CcDistribution",
    "ConfigError",
    "L2Targets",
    "MonitorConfig",
    "OnAlert",
    "RuleArgs",
    "Settings",
    "Target",
    "TensorSpec",
    "load_config",
]
