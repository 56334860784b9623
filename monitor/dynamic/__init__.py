"""Start, stop and reconfigure while training runs: on all ranks at the same step, or on none."""

from monitor.dynamic.consensus import JobConnection
from monitor.dynamic.controller import ConfigJournal, Controller
from monitor.dynamic.proposals import FROM_ALERT, FROM_FILE, FROM_START, RETURN, Switch

__all__ = ["FROM_ALERT", "FROM_FILE", "FROM_START", "RETURN", "ConfigJournal", "Controller", "JobConnection", "Switch"]
