"""Jobs on real ranks: what is merged of their tensors is what one process has that trains the same model whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from evidence import sampled
from recorded_job import merged, tensors

from monitor.merge.report import Report

SCRIPT = "one_model.py"
RANKS = {"fsdp2": 4, "hsdp": 4, "dp-tp": 4, "dp-tp-sharded": 4, "zero3": 2, "copies": 2, "copies-astray": 2}
CUT = ["fsdp2", "hsdp", "dp-tp", "dp-tp-sharded", "zero3"]
KINDS = ("grad_reduced", "param_origin", "param_updated", "exp_avg", "exp_avg_sq")
FORMATS = ["csv", "hdf5"]

Run = Callable[[str], Path]
Norms = list[dict[str, dict[str, float]]]
"""By step, kind and name."""


@pytest.fixture(scope="module")
def truth(launch: Callable[..., Path]) -> Norms:
    return json.loads((launch(SCRIPT, "whole", 1) / "told.json").read_text())


@pytest.fixture(scope="module")
def ran(launch: Callable[..., Path]) -> Run:
    """The directory of a job that has run in both formats at once, and once more its files of CSV alone; both merged."""

    @cache
    def run(how: str) -> Path:
        directory = launch(SCRIPT, how, RANKS[how])
        for path in (directory / "out").glob("*-rank*/*"):
            if path.suffix != ".h5":
                (directory / "csv" / path.parent.name).mkdir(parents=True, exist_ok=True)
                (directory / "csv" / path.parent.name / path.name).write_bytes(path.read_bytes())
        (directory / "out").rename(directory / "hdf5")
        for format in FORMATS:  # noqa: A001
            assert merged(directory / format).clean
        return directory

    return run


def norms(base: Path, kind: str, step: int) -> dict[str, float]:
    rows = [row for row in tensors(base, kind) if row["step"] == step]
    assert len({row["name"] for row in rows}) == len(rows), "a row a tensor"
    return {row["name"]: row["norm"] for row in rows}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("how", CUT)
def test_each_tensor_is_that_of_the_model_in_one_piece(ran: Run, truth: Norms, how: str, format: str) -> None:  # noqa: A002
    base = ran(how) / format
    for step, expected in enumerate(truth):
        for kind in KINDS if step else KINDS[:3]:
            assert expected[kind] == pytest.approx(norms(base, kind, step), rel=1e-5), (kind, step)


@pytest.mark.parametrize("format", FORMATS)
def test_what_each_data_parallel_rank_has_of_its_own_is_a_tensor_of_its_own(ran: Run, format: str) -> None:  # noqa: A002
    rows = tensors(ran("dp-tp") / format, "grad_unreduced")
    assert {row["ranks"] for row in rows if row["name"] == "up.weight"} == {"0 1", "2 3"}


def of_copies(launch: Callable[..., Path], how: str, format: str) -> Report:  # noqa: A002
    base = launch(SCRIPT, how, 2, format=format, replica_check=True, monitor_mbs_grad=True) / "out"
    return merged(base)


@pytest.mark.parametrize("format", sampled(FORMATS, 1))
def test_copies_that_agree_are_compared_and_clean(launch: Callable[..., Path], format: str) -> None:  # noqa: A002
    report = of_copies(launch, "copies", format)
    assert report.clean
    assert report.told()["not_compared"]["count"] == 0


def test_a_copy_that_goes_astray_in_a_micro_step_is_named_from_there_on(launch: Callable[..., Path]) -> None:
    told = of_copies(launch, "copies-astray", "hdf5").told()["disagreements"]
    found = {(one["step"], one["kind"]) for one in told["listed"]}
    assert {kind for step, kind in found if step == 1} == {"grad_unreduced", "grad_reduced", "param_updated"}
    assert {step for step, _ in found} == {1, 2}
    assert {(one["rank"], one["other_rank"]) for one in told["listed"]} == {(1, 0)}
