from __future__ import annotations

import subprocess
import sys

import pytest
from hanging import ends

BUSY = "import time\nend = time.process_time() + 2\nwhile time.process_time() < end: pass"


@pytest.mark.parametrize(("script", "ended"), [(BUSY, True), ("import time; time.sleep(60)", False)], ids=["busy", "idle"])
def test_a_slow_job_is_waited_for_and_an_idle_one_is_not(script: str, ended: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        assert ends(lambda: process.poll() is not None, lambda: [process.pid], idle_s=1.2) is ended
        process.kill()


def test_a_job_in_which_one_process_works_does_not_hang() -> None:
    sleeper = "import sys; sys.stdin.read()"
    with (
        subprocess.Popen([sys.executable, "-c", BUSY]) as busy,
        subprocess.Popen([sys.executable, "-c", sleeper], stdin=-1) as idle,
    ):
        assert ends(lambda: busy.poll() is not None, lambda: [busy.pid, idle.pid], idle_s=1.2)
