"""Parts in a real object store whose server is away or slow, and parts that are killed. Every command is a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from evidence import PROVES
from object_store import ANYONE, BUCKET, Proxy, client_of, s3_server, stored
from recorded_job import RecordedRank, files, merged
from sink_rows import Measured

KINDS = ("grad_reduced", "grad_unreduced", "exp_avg", "exp_avg_sq", "param_origin", "param_updated")
"""A window each."""

SOON = 120.0
COMMAND = "from monitor.merge.cli import app; app(prog_name='monitor-merge')"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what one merge makes of it."""
    base = tmp_path_factory.mktemp("job")
    for rank in range(2):
        one = RecordedRank(base, rank, 2)
        for step in range(5):
            one.write(step, {kind: [Measured(f"{kind}.w{number}") for number in range(3)] for kind in KINDS})
        one.close()
    merged(base)
    return base


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    with s3_server() as port:
        client_of(port).create_bucket(Bucket=BUCKET)
        yield port


@pytest.fixture
def proxy(server: int) -> Iterator[Proxy]:
    proxy = Proxy(server)
    yield proxy
    proxy.away()


class Ran:
    """A command that works on ``s3://bucket/PREFIX`` through a proxy."""

    def __init__(self, job: Path, proxy: Proxy, prefix: str, *options: str, code: str = COMMAND, **environment: str) -> None:
        command = [sys.executable, "-c", code, str(job), "-o", f"s3://{BUCKET}/{prefix}", *options]
        endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "COLUMNS": "400"}
        endpoint["TMPDIR"] = str(job.parent)  # a killed one leaves files there
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, env=os.environ | ANYONE | endpoint | environment, **pipes)

    def end(self) -> tuple[int, str]:
        said, _ = self.process.communicate(timeout=SOON)
        assert ANYONE["AWS_SECRET_ACCESS_KEY"] not in said
        return self.process.returncode, said


def at_rest(client: Any, prefix: str) -> dict[str, bytes]:
    """What is stored when requests that had arrived are done."""
    before: dict[str, bytes] = {}
    while (now := stored(client, prefix)) != before:
        before = now
        time.sleep(0.3)
    return now


def said_to_be_written(objects: dict[str, bytes]) -> set[str]:
    """The files of the records in a store."""
    records = [json.loads(content) for name, content in objects.items() if name.startswith(".done/") and name.endswith(".json")]
    return {name for record in records for name in record[4]}


@pytest.fixture(scope="module", autouse=PROVES)
def outage(job: Path, server: int) -> Iterator[Ran]:
    """A merge whose server is away for ten seconds, while the other tests run."""
    proxy = Proxy(server)
    proxy.on_put = lambda number: proxy.away_for(10.0) if number == 4 else None
    ran = Ran(job, proxy, "away")
    yield ran
    ran.process.kill()


def test_a_part_that_is_killed_loses_nothing_that_was_said_to_be_written_and_is_run_again(
    job: Path, server: int, proxy: Proxy
) -> None:
    client, whole = client_of(server), files(job / "merged")
    held, blocked = threading.Event(), threading.Event()

    def hold(_number: int) -> None:
        """From the second record of a window on nothing arrives, and the first one has."""
        records = [path for path in proxy.put if "/.done/" in path and path.endswith(".json")]
        if len(records) > 1:
            deadline = time.monotonic() + SOON
            while not said_to_be_written(stored(client, "killed")) and time.monotonic() < deadline:
                time.sleep(0.05)
            blocked.set()
            held.wait(SOON)

    proxy.on_put = hold
    killed = Ran(job, proxy, "killed", "--part", "2/2")
    assert blocked.wait(SOON), killed.end()
    killed.process.kill()
    killed.end()
    proxy.on_put = lambda _number: None
    proxy.reset()
    held.set()
    kept = at_rest(client, "killed")
    written = said_to_be_written(kept)
    assert written
    assert {name: kept.get(name) for name in written} == {name: whole[name] for name in written}
    assert "report.json" not in kept

    proxy.put.clear()
    other = Ran(job, proxy, "killed", "--part", "1/2")
    assert other.end()[0] == 0
    status, said = Ran(job, proxy, "killed", "--finish").end()
    assert (status, "They are of parts 2 of 2." in said) == (2, True), said
    status, said = Ran(job, proxy, "killed", "--part", "2/2").end()
    assert status == 0, said
    assert f"Part 2/2 is done. It has 3 ranges of steps; {len(written) // 2} of them were done before." in said
    assert not {f"/{BUCKET}/killed/{name}" for name in written} & set(proxy.put)
    status, said = Ran(job, proxy, "killed", "--finish").end()
    assert status == 0, said
    assert stored(client, "killed") == whole


@pytest.mark.skipif(not PROVES, reason="it takes 5 s: make prove runs it")
def test_a_slow_server_that_breaks_connections_changes_no_byte(job: Path, server: int, proxy: Proxy) -> None:
    proxy.delay = 0.05
    proxy.on_put = lambda number: proxy.reset() if number in (2, 5, 9) else None
    status, said = Ran(job, proxy, "slow", "--workers", "2").end()
    assert status == 0, said
    assert stored(client_of(server), "slow") == files(job / "merged")


def test_a_server_that_does_not_come_back_ends_the_part_with_what_to_do(job: Path, server: int, proxy: Proxy) -> None:
    proxy.on_put = lambda number: proxy.away() if number == 4 else None
    impatient = "from monitor.merge import finished; finished.PATIENCE = 1.0; " + COMMAND
    status, said = Ran(job, proxy, "gone", "--part", "1/1", code=impatient, AWS_MAX_ATTEMPTS="1").end()
    assert status == 2, said
    assert "This part is not done: s3://bucket/gone: " in said
    command = f"trainermon merge {job} -o s3://bucket/gone --format parquet --part 1/1"
    assert f"What is done stays. Run it again:\n  {command}" in said
    assert "Trying again in 0.5 s" in said
    proxy.back()
    proxy.on_put = lambda _number: None
    assert Ran(job, proxy, "gone").end()[0] == 0
    assert stored(client_of(server), "gone") == files(job / "merged")


def test_a_bucket_that_there_is_not_is_said_at_once(job: Path, proxy: Proxy) -> None:
    code = COMMAND.replace("app(", "import sys; sys.argv[3] = 's3://elsewhere/merged'; app(")
    status, said = Ran(job, proxy, "", code=code).end()
    assert status == 2
    assert "bucket does not exist" in said
    assert "Trying again" not in said


@pytest.mark.skipif(not PROVES, reason="it takes 12 s: make prove runs it")
def test_a_server_that_is_away_for_ten_seconds_is_waited_for(job: Path, server: int, outage: Ran) -> None:
    status, said = outage.end()
    assert status == 0, said
    assert stored(client_of(server), "away") == files(job / "merged")
