"""Token counts and load of each expert.

Loads of ranks cannot be averaged. If expert 0 gets 3 of 4 tokens on one rank and 0 of 12 on another, its load is 3/16 and not
3/8. So every rank stores its counts, which can be added.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, TextIO

from monitor.training.config import TENSORBOARD
from monitor.training.step import Scalar, StepFacts

FILE: Final = "expert_counts.jsonl"
ON_BOARD: Final = frozenset({TENSORBOARD})

Counts = Mapping[str, Sequence[int]]
"""By router: the number of tokens that went to each expert. A token that goes to two experts counts for both."""

ByStep = dict[int, tuple[int, dict[str, list[int]]]]
"""By step: the world size and the counts of one rank."""


class ExpertCounts:
    """Appends the counts of one rank to ``expert_counts.jsonl``, a line a step: ``{"step": 3, "world": 2, "tokens": …}``.
    ``world`` is the number of ranks; ``tokens`` has the counts of each router, ``{"h.0.gate": [4, 0]}``.

    The file is never truncated: a line of a step invalidates earlier lines of this step and of later ones.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, directory: Path, world_size: int = 1) -> None:
        self._path = directory / FILE
        self._world = world_size
        self._file: TextIO | None = None

    def read(self, facts: StepFacts) -> dict[str, list[int]]:
        """Wait for the counts of a step and append them to the file."""
        tokens = {name: [int(count) for count in count_of()] for name, count_of in facts.tokens.items()}
        if self._file is None:
            self._file = self._opened()
        self._file.write(json.dumps({"step": facts.step, "world": self._world, "tokens": tokens}) + "\n")
        return tokens

    def _opened(self) -> TextIO:
        """Open the file for appending. Ends a last line that a killed process left unfinished."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        torn = self._path.exists() and self._path.read_bytes()[-1:] not in (b"", b"\n")
        file = self._path.open("a", encoding="utf-8", buffering=1)
        file.write("\n" if torn else "")
        return file

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def load(counts: Sequence[int]) -> list[float]:
    """The share of each expert; they sum to 1. Empty if there are no tokens."""
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
    """The summed counts of all ranks of the job that wrote last to ``dump_path``, by step and router.

    A step is left out if a rank lacks it: the sum would be incomplete. All steps of a resumed job count, even if it had another
    number of ranks before.
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
    """The counts of a rank by step. Incomplete lines are skipped."""
    path = dump_path / f"rank_{rank}" / FILE
    found: ByStep = {}
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else ():
        if (one := _read(line)) is not None:
            step, world, tokens = one
            if found and step <= next(reversed(found)):  # the job was restarted at this step
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
