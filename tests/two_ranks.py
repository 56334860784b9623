"""How tests start two ranks as users do."""

from __future__ import annotations

import os
from typing import Final

TORCHRUN: Final = ("-m", "torch.distributed.run", "--standalone", "--log-dir", os.devnull, "--nproc-per-node", "2")
"""Arguments of the interpreter. Without a place for logs, torchrun leaves a folder in the temporary directory."""
