"""Whether communication can be listened to at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from monitor.config.model import CcDistribution
from monitor.failures import LOGGER, Failures

if TYPE_CHECKING:
    from monitor.pytorch.collectives.communication import Communication


def communication(wanted: CcDistribution, failures: Failures) -> Communication | None:
    """Listen from now on, if that is wanted and possible; a sentence says where it is not."""
    if not wanted.enable:
        return None
    if not dist.is_available():
        LOGGER.warning("cc_distribution: this torch has no torch.distributed, so there is no communication to record.")
        return None
    from monitor.pytorch.collectives.communication import Communication

    return failures.guarded("installing the interception of communication", Communication)(wanted, failures)
