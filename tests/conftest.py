"""What every test may rely on."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell that runs the tests in the background starts them with SIGINT ignored, and every process that they start, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
