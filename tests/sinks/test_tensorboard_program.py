"""TensorBoard itself, started as its users start it, shows the numbers that the sink wrote."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

import numpy as np
import pytest
from sink_rows import Measured, Rank

from monitor.sinks.tensorboard import TensorBoardSink

DOCUMENT = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
PATIENCE_S = 60
STEPS = 1200
"""More than TensorBoard keeps of a curve unless it is asked for more."""

RUNS = ("Dec03_21-34-40-rank0-1a2b3c4d", "Dec03_21-34-40-rank1-9e8d7c6b")
Fetch = Callable[..., Any]


def value(step: int) -> float:
    """What is measured at ``step``: no single precision number."""
    return 0.1 * (step + 1)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks recorded, the second of them for a single step."""
    base = tmp_path_factory.mktemp("job") / "monitor_output"
    for run, steps in zip(RUNS, (STEPS, 1), strict=True):
        rank = Rank(base / run)
        sink = TensorBoardSink(rank.context)
        for step in range(steps):
            measured = [Measured("w", [value(step)]), Measured("n", [math.nan]), Measured("i", [-math.inf])]
            sink.write(rank.step(step, {"grad_reduced": measured}, ("min", "nans")))
        sink.close()
    return base


@pytest.fixture(scope="module", params=["auto", "false"])
def fetch(logs: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Fetch]:
    """What a TensorBoard that shows ``logs`` answers to a request, with either of the ways in which it loads files."""
    ((shown, every_point),) = re.findall(r"`tensorboard (.*?)`.*`(--samples_per_plugin=\S+)`", DOCUMENT, flags=re.DOTALL)
    own = tmp_path_factory.mktemp("tensorboard")
    command = [sys.executable, "-m", "tensorboard.main", *shown.split(), "--host", "127.0.0.1", "--port", "0"]
    said = own / "said"
    with said.open("wb") as stream:
        process = subprocess.Popen(
            [*command, f"--load_fast={request.param}", every_point],
            stdout=stream,
            stderr=stream,
            env=os.environ | {"TMPDIR": str(own)},
            cwd=logs.parent,
        )
    try:
        address = until(lambda: re.search(r"http://127\.0\.0\.1:\d+", said.read_text()), process, said)[0]
        direct = build_opener(ProxyHandler({}))

        def ask(route: str, **query: str) -> Any:
            with direct.open(f"{address}/data/plugin/scalars/{route}?{urlencode(query)}", timeout=PATIENCE_S) as answer:
                return json.load(answer)

        until(lambda: is_loaded(ask), process, said)
        yield ask
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def is_loaded(ask: Fetch) -> bool:
    """Whether TensorBoard has come to the end of both ranks' files. It shows what it has read while it reads on."""
    last = "0:i/rank0/grad_reduced_nans"
    try:
        tags = ask("tags")
    except HTTPError:  # it answers so while it takes in new series
        return False
    if not all(last in tags.get(run, ()) for run in RUNS):
        return False
    return [ask("scalars", run=run, tag=last)[-1][1] for run in RUNS] == [STEPS - 1, 0]


def until(found: Callable[[], Any], process: subprocess.Popen[bytes], said: Path) -> Any:
    """What ``found`` returns, once that is something."""
    end = time.monotonic() + PATIENCE_S
    while not (result := found()):
        assert process.poll() is None, said.read_text()
        assert time.monotonic() < end, said.read_text()
        time.sleep(0.05)
    return result


def test_each_rank_is_a_run_with_a_tag_for_each_op_of_each_tensor(fetch: Fetch) -> None:
    shown = {run: set(tags) for run, tags in fetch("tags").items()}
    assert shown == {run: {f"0:{name}/rank0/grad_reduced_{op}" for name in "wni" for op in ("min", "nans")} for run in RUNS}


def test_a_curve_has_every_step_with_the_value_that_was_measured(fetch: Fetch) -> None:
    points = fetch("scalars", run=RUNS[0], tag="0:w/rank0/grad_reduced_min")
    assert [(step, shown) for _, step, shown in points] == [(step, float(np.float32(value(step)))) for step in range(STEPS)]


@pytest.mark.parametrize(("name", "spelled", "nans"), [("n", "NaN", 1.0), ("i", "-Infinity", 0.0)])
def test_nan_and_infinity_are_shown_as_such(fetch: Fetch, name: str, spelled: str, nans: float) -> None:
    for op, shown in (("min", spelled), ("nans", nans)):
        ((_, step, last),) = fetch("scalars", run=RUNS[1], tag=f"0:{name}/rank0/grad_reduced_{op}")
        assert (step, last) == (0, shown)
