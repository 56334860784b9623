"""How many tokens went to each expert, and what share that is.

Shares of ranks cannot be averaged: with 3 of 4 tokens at expert 0 on one rank and 0 of 12 on another, its share is 3/16 and not
3/8. So every rank keeps its counts, which add up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TextIO

from monitor.training.config import TENSORBOARD
from monitor.training.scalars import Scalar
from monitor.training.step import StepFacts

FILE: Final = "expert_counts.jsonl"
ON_BOARD: Final = frozenset({TENSORBOARD})

Counts = Mapping[str, Sequence[int]]
"""Of each router, by name: how many tokens went to each expert. A token that goes to two experts counts for both."""

ByStep = dict[int, tuple[int, dict[str, list[int]]]]
"""Of each step, how many ranks the job had, and the counts of one of them."""


class ExpertCounts:
    """Keeps the counts of one rank in ``expert_counts.jsonl``, a line a step: ``{"step": 3, "world": 2, "tokens": …}``,
    where ``world`` is how many ranks there are and ``tokens`` has the counts of each router, ``{"h.0.gate": [4, 0]}``.

    The file is added to, never emptied: a line of a step makes earlier lines of this step and of later ones void.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, directory: Path, world_size: int = 1) -> None:
        self._path = directory / FILE
        self._world = world_size
        self._file: TextIO | None = None

    def read(self, facts: StepFacts) -> dict[str, list[int]]:
        """The counts of a step, waited for and kept."""
        tokens = {name: [int(count) for count in count_of()] for name, count_of in facts.tokens.items()}
        if self._file is None:
            self._file = self._opened()
        self._file.write(json.dumps({"step": facts.step, "world": self._world, "tokens": tokens}) + "\n")
        return tokens

    def _opened(self) -> TextIO:
        """The file, behind its last line: one that a killed process left unfinished is ended."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torn = self._path.exists() and self._path.read_bytes()[-1:] not in (b"", b"\n")
        file = self._path.open("a", encoding="utf-8", buffering=1)
        file.write("\n" if torn else "")
        return file

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
    """The counts of all ranks of the job that has last written to ``dump_path``, added up, by step and router.

    Steps that a rank does not have are left out: what others have of them is not the whole. Of a job that was resumed all steps
    count, also where it had another number of ranks before.
    """
    known: dict[int, ByStep] = {}
    first = _counts_of(dump_path, 0)
    whole: dict[int, dict[str, list[int]]] = {}
    for step, (world, _) in sorted(first.items()):
        for rank in range(world):
            if rank not in known:
                known[rank] = _counts_of(dump_path, rank)
        ranks = [known[rank].get(step) for rank in range(world)]
        found = [one[1] for one in ranks if one is not None and one[0] == world]
        if len(found) == world:
            whole[step] = _sum(found)
    return whole


def _counts_of(dump_path: Path, rank: int) -> ByStep:
    """What a rank has of each step. A line that is not whole is left out."""
    path = dump_path / f"rank_{rank}" / FILE
    found: ByStep = {}
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else ():
        if (one := _read(line)) is not None:
            step, world, tokens = one
            if found and step <= next(reversed(found)):  # the job has begun anew, at this step
                found = {earlier: counts for earlier, counts in found.items() if earlier < step}
            found[step] = world, tokens
    return found


def _read(line: str) -> tuple[int, int, dict[str, list[int]]] | None:
    try:
        one = json.loads(line)
        return int(one["step"]), int(one["world"]), dict(one["tokens"])
    except (ValueError, KeyError, TypeError):
        return None


def _sum(ranks: Iterable[dict[str, list[int]]]) -> dict[str, list[int]]:
    total: dict[str, list[int]] = {}
    for tokens in ranks:
        for name, counts in tokens.items():
            known = total.get(name, [0] * len(counts))
            total[name] = [a + b for a, b in zip(known, counts, strict=True)]
    return total
