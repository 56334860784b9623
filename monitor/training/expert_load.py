"""How many tokens went to each expert, and what share that is.

Shares of ranks cannot be averaged: with 3 of 4 tokens at expert 0 on one rank and 0 of 12 on another, its share is 3/16 and not
3/8. So every rank keeps its counts, which add up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TextIO

from monitor.training.facts import StepFacts
from monitor.training.model import TENSORBOARD
from monitor.training.scalars import Scalar

FILE: Final = "expert_counts.jsonl"
ON_BOARD: Final = frozenset({TENSORBOARD})

Counts = Mapping[str, Sequence[int]]
"""Of each router, by name: how many tokens went to each expert. A token that goes to two experts counts for both."""


class ExpertCounts:
    """Keeps the counts of one rank in ``expert_counts.jsonl``, a line a step: ``{"step": 3, "tokens": {"h.0.gate": [4, 0]}}``.

    The file is added to, never emptied: of a step that is there twice the later line counts.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._file: TextIO | None = None

    def read(self, facts: StepFacts) -> dict[str, list[int]]:
        """The counts of a step, waited for and kept."""
        tokens = {name: [int(count) for count in count_of()] for name, count_of in facts.tokens.items()}
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8", buffering=1)
        self._file.write(json.dumps({"step": facts.step, "tokens": tokens}) + "\n")
        return tokens

    def close(self) -> None:
        """Let go of the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def load(counts: Sequence[int]) -> list[float]:
    """The share of each expert; they sum to 1. Without a token there is none."""
    total = sum(counts)
    return [count / total for count in counts] if total else []


def load_scalars(step: int, tokens: Counts) -> list[Scalar]:
    """``expert_load/{router}/expert_{i}`` of one step."""
    return [
        Scalar(f"expert_load/{name}/expert_{expert}", share, step, ON_BOARD)
        for name, counts in tokens.items()
        for expert, share in enumerate(load(counts))
    ]


def combined(dump_path: Path) -> dict[int, dict[str, list[int]]]:
    """The counts of all ranks that have written to ``dump_path``, added up, by step and router.

    Steps that a rank does not have are left out: what others have of them is not the whole.
    """
    ranks = [_counts_of(path) for path in sorted(dump_path.glob(f"rank_*/{FILE}"))]
    steps = set.intersection(*(set(one) for one in ranks)) if ranks else set()
    return {step: _sum(one[step] for one in ranks) for step in sorted(steps)}


def _counts_of(path: Path) -> dict[int, dict[str, list[int]]]:
    """A line that a killed process left unfinished is left out."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return {one["step"]: one["tokens"] for one in map(json.loads, lines)}


def _sum(ranks: Iterable[dict[str, list[int]]]) -> dict[str, list[int]]:
    total: dict[str, list[int]] = {}
    for tokens in ranks:
        for name, counts in tokens.items():
            known = total.get(name, [0] * len(counts))
            total[name] = [a + b for a, b in zip(known, counts, strict=True)]
    return total
