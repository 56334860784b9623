"""Of several ranks, a copy of a gradient has a row if compiled code has summed it over all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from ranks import SCRIPTS, Ranks, ended_job
from reading_back import Output

from monitor.coordinator.manifest_format import read_manifest
from monitor.recording.parameters import NOT_REDUCED

sys.path.insert(0, str(SCRIPTS))

from compiled_reductions_cells import FACTORS, LOCAL, REDUCED, SIZE, STEPS, WAYS, inputs

MODES = ("graph", "jit")


@pytest.fixture(scope="module")
def job(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return ended_job("compiled_reductions.py", tmp_path_factory.mktemp("job"), base, len(WAYS) * len(MODES))


def expected() -> dict[tuple[int, str], list[float]]:
    """The least and the greatest element and the norm of the mean over the ranks."""
    found = {}
    for step in range(STEPS):
        x = np.mean([inputs(rank, step).astype(np.float64) for rank in range(SIZE)], 0)
        of_bias = FACTORS.astype(np.float64) * len(x)
        for name, mean in (("a.weight", np.outer(FACTORS, x.sum(0))), ("a.bias", of_bias)):
            found[step, name] = [mean.min(), mean.max(), np.linalg.norm(mean)]
    return found


def rows(base: Path, way: str, mode: str) -> dict[tuple[int, str], list[float]]:
    output = Output(base / way / mode)
    return {
        (row.step, row.name): [row.values[op] for op in ("min", "max", "norm")]
        for directory in output.directories()
        for row in output.rows("grad_reduced", directory)
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", REDUCED)
@pytest.mark.usefixtures("job")
def test_gradients_that_compiled_code_sums_have_the_mean_over_the_ranks(base: Path, way: str, mode: str) -> None:
    found = rows(base, way, mode)
    assert found.keys() == expected().keys()
    for key, values in expected().items():
        assert found[key] == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", LOCAL)
@pytest.mark.usefixtures("job")
def test_gradients_that_differ_between_ranks_have_no_row_and_that_is_said(base: Path, way: str, mode: str) -> None:
    assert rows(base, way, mode) == {}
    for directory in Output(base / way / mode).directories():
        note = str(read_manifest(directory / "manifest.json").notes["grad_reduced"])
        assert note.startswith(NOT_REDUCED.partition(":")[0])


def test_training_has_the_bits_of_unmonitored_ranks(job: Ranks) -> None:
    for rank in job.ranks:
        assert [told for told in rank.told if told[2] is not True] == []
