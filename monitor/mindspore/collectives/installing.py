"""Whether communication can be listened to at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monitor.config.model import CcDistribution
from monitor.failures import Failures

if TYPE_CHECKING:
    from monitor.mindspore.collectives.communication import Communication


def communication(wanted: CcDistribution, failures: Failures) -> Communication | None:
    """Listen from now on, if that is wanted and possible; a sentence says where it is not."""
    if not wanted.enable:
        return None
    return failures.guarded("installing the interception of communication", _listening)(wanted, failures)


def _listening(wanted: CcDistribution, failures: Failures) -> Communication:
    # Here, so that a MindSpore that keeps its operators elsewhere loses no more than their rows.
    from monitor.mindspore.collectives.communication import Communication

    return Communication(wanted, failures)
