"""The programs of ``docs/examples`` on two ranks: with their lines, and unchanged under ``trainermon run``."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from launched import ROOT, RUN, WITH_TORCHRUN, Directly, Ended, ended, rows, weights

import monitor

EXAMPLES = ROOT / "docs" / "examples"
PYTHON = [sys.executable]
SCRIPTS = Path(__file__).with_name("scripts")
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
        preload: What it finds imported where it is run without the command.
        changed: The script that changes its framework for a machine without accelerators, and runs it.
        starts_ranks: Whether it starts the other rank itself.
    """

    script: str
    steps: int
    lost: int = 0
    close: float = 1e-5
    of: str = "grad_reduced"
    warned: tuple[str, ...] = ()
    preload: str = "compiler"
    changed: str = ""
    starts_ranks: bool = False
    variables: tuple[tuple[str, str], ...] = ()

    def command(self, program: Path) -> list[str]:
        """What a user would type."""
        started = [sys.executable] if self.starts_ranks else WITH_TORCHRUN
        return [*started, *map(str, self.words(program))]

    def words(self, program: Path) -> list[Path]:
        return [SCRIPTS / self.changed, program] if self.changed else [program]


INSIDE = ("If the optimizer reduces inside its step, they are local before it.", "has no row of grad_reduced")
CASES = [
    Example("nanogpt.py", 6, lost=1),
    Example("nanochat.py", 6, lost=1, of="param_updated", warned=INSIDE),
    Example("llama_trainer.py", 4, preload="transformers"),
    Example("llama_fsdp2.py", 4),
    Example("with_lightning.py", 4, preload="lightning", starts_ranks=True),
    Example("with_accelerate.py", 5, lost=1, preload="transformers"),
    Example(
        "with_deepspeed.py",
        4,
        preload="deepspeed",
        changed="deepspeed_without_compiling.py",
        variables=(("DS_ACCELERATOR", "cpu"), ("LOCAL_SIZE", "2")),
    ),
    Example("with_torchtitan.py", 4, changed="titan_without_cuda.py", close=1e-4),  # summed up in float32
    Example("with_megatron.py", 5, lost=1, preload="megatron", changed="without_cuda.py"),
]


def norms(done: Ended) -> dict[int, float]:
    """By step, the norm of all gradients that the framework has printed: the same on each rank."""
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"^step (\d+) norm (\S+)$", done.stdout, flags=re.MULTILINE)
    return {int(step): float(norm) for step, norm in found}


@pytest.mark.parametrize("example", CASES, ids=lambda one: one.script)
def test_an_example_records_what_its_framework_reports(example: Example, tmp_path: Path, directly: Directly) -> None:
    text = (EXAMPLES / example.script).read_text()
    shutil.copy(EXAMPLES / "small_gpt.py", tmp_path)
    unchanged, with_lines = tmp_path / "unchanged.py", tmp_path / "by_hand.py"
    unchanged.write_text(ADDED.sub("", text))
    assert "monitor" not in unchanged.read_text().lower()
    with_lines.write_text(text)
    how = {"ranks": 2, "preload": example.preload, **dict(example.variables)}

    plain = directly(*example.words(unchanged), to=tmp_path / "nowhere", **how)
    by_hand = directly(*example.words(with_lines), to=tmp_path / "by_hand", **how)
    launched = ended([*RUN, *example.command(unchanged)], tmp_path, **dict(example.variables))
    assert weights(launched) == weights(by_hand) == weights(plain)
    assert len(weights(by_hand)) == 2
    assert norms(launched) == norms(by_hand) == norms(plain)
    assert len(norms(by_hand)) == example.steps
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
