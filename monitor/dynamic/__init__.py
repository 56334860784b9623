"""Start, stop and reconfigure while training runs: on all ranks at the same step, or on none."""

from monitor.dynamic.controller import Control, Journal
from monitor.dynamic.participant import Job
from monitor.dynamic.proposals import FROM_ALERT, FROM_FILE, FROM_START, RETURN, Switch

__all__ = ["FROM_ALERT", "FROM_FILE", "FROM_START", "RETURN", "Control", "Job", "Journal", "Switch"]
