"""The programs of ``docs/examples`` on two ranks: with their lines, and unchanged under ``trainermon run``."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from evidence import PROVES
from launched import ROOT, RUN, WITH_TORCHRUN, Ended, ended, rows, weights

import monitor

EXAMPLES = ROOT / "docs" / "examples"
PYTHON = [sys.executable]
SCRIPTS = Path(__file__).with_name("scripts")
WITHOUT_CUDA = [*WITH_TORCHRUN, str(SCRIPTS / "without_cuda.py")]
TITAN_WITHOUT_CUDA = [*WITH_TORCHRUN, str(SCRIPTS / "titan_without_cuda.py")]
DEEPSPEED = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}
FIRST = 1
"""The first step that ``trainermon run`` records."""
ADDED = re.compile(r"^.*  # \+$\n", re.MULTILINE)


class Example(NamedTuple):
    """How a program is started.

    Attributes:
        lost: How many steps its line does not record: the first one, if a step has several micro-batches.
        steps: How many it trains.
        close: How exact the printed norms are, as a share.
        of: The kind whose norm it prints.
        warned: What the monitor warns of, on each rank.
        quick: Whether it is also run without the monitor each time, and not only by ``make prove``.
    """

    script: str
    steps: int
    lost: int = 0
    command: list[str] = WITH_TORCHRUN
    variables: tuple[tuple[str, str], ...] = ()
    quick: bool = False
    close: float = 1e-5
    of: str = "grad_reduced"
    warned: tuple[str, ...] = ()


INSIDE = ("If the optimizer reduces inside its step, they are local before it.", "has no row of grad_reduced")
CASES = [
    Example("nanogpt.py", 6, lost=1, quick=True),
    Example("nanochat.py", 6, lost=1, quick=True, of="param_updated", warned=INSIDE),
    Example("llama_trainer.py", 4),
    Example("llama_fsdp2.py", 4),
    Example("with_lightning.py", 4, command=PYTHON),
    Example("with_accelerate.py", 5, lost=1),
    Example("with_deepspeed.py", 4, variables=tuple(DEEPSPEED.items())),
    Example("with_torchtitan.py", 4, command=TITAN_WITHOUT_CUDA, close=1e-4),  # summed up in float32
    Example("with_megatron.py", 5, lost=1, command=WITHOUT_CUDA),
]


def norms(done: Ended) -> dict[int, float]:
    """By step, the norm of all gradients that the framework has printed: the same on each rank."""
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"^step (\d+) norm (\S+)$", done.stdout, flags=re.MULTILINE)
    return {int(step): float(norm) for step, norm in found}


@pytest.mark.parametrize("example", CASES, ids=lambda one: one.script)
def test_an_example_records_what_its_framework_reports(example: Example, tmp_path: Path) -> None:
    text = (EXAMPLES / example.script).read_text()
    shutil.copy(EXAMPLES / "small_gpt.py", tmp_path)
    for name, code in (("by_hand.py", text), ("unchanged.py", ADDED.sub("", text))):
        (tmp_path / name).write_text(code)
    assert "monitor" not in (tmp_path / "unchanged.py").read_text().lower()
    variables = dict(example.variables)

    by_hand = ended([*example.command, "by_hand.py"], tmp_path, MONITOR_OUTPUT_DIR="by_hand", **variables)
    launched = ended([*RUN, *example.command, "unchanged.py"], tmp_path, **variables)
    assert weights(launched) == weights(by_hand)
    assert len(weights(by_hand)) == 2
    assert norms(launched) == norms(by_hand)
    assert len(norms(by_hand)) == example.steps
    if PROVES or example.quick:
        plain = ended([*example.command, "unchanged.py"], tmp_path, **variables)
        assert (weights(plain), norms(plain)) == (weights(by_hand), norms(by_hand))
    for done in (by_hand, launched):
        warned = [line for line in done.stderr.splitlines() if "[monitor] WARNING" in line]
        assert all(any(said in line for said in example.warned) for line in warned), warned
        assert all(any(said in line for line in warned) for said in example.warned)

    recorded = {row["step"]: row for row in monitor.open_run(tmp_path / "by_hand").total_norm(example.of).to_pylist()}
    assert recorded.keys() == set(range(example.lost, example.steps))
    for step, row in recorded.items():
        assert row["total_norm"] == pytest.approx(norms(by_hand)[step], rel=example.close), row["missing"]
    assert rows(tmp_path / "recorded", FIRST) == rows(tmp_path / "by_hand", FIRST) != {}
    assert {row["step"] for table in rows(tmp_path / "recorded", 0).values() for row in table} == {*range(FIRST, example.steps)}
