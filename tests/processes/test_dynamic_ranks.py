"""Data-parallel ranks whose configuration changes while they train: all record the same steps, and compute what they would."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from evidence import sampled
from hanging import until
from launching import Launcher, Started
from recorded import listed, rank_directories
from typer.testing import CliRunner

from monitor.config import MonitorConfig
from monitor.coordinator.manifest_format import MANIFEST_FILE, ConfigurationRecord, ManifestRecord, read_manifest
from monitor.dynamic.cli import app
from monitor.dynamic.controller import digest_of
from monitor.sinks.csv import read_csv

GRADIENTS: dict[str, Any] = {"dynamic_on": True, "wg_distribution": True, "ops": ["norm"], "step_count_per_record": 50}
SOON = 120.0


Start = Callable[..., "Job"]


UNHELD = "parameters of no optimizer"
SAID = {f"nothing of {UNHELD}", UNHELD, "nothing of actv", "nothing of actv_grad"}
"""Of a parameter that no optimizer steps, before and after it has a gradient, and of settings that measure nothing."""


class Job:
    """Ranks that train, and the file that they follow."""

    def __init__(self, launcher: Launcher, directory: Path, ranks: int, *arguments: object, **config: Any) -> None:
        self.path, self.base, self._directory = directory / "config.json", launcher.base, directory
        self.edited: dict[str, MonitorConfig] = {}
        self.edit(**config)
        self.ranks: list[Started] = launcher.start_ranks(
            ranks, "dynamic_ranks.py", self.path, directory, *arguments, brief=True
        )
        for rank in self.ranks:
            rank.wait_for("step 5")

    def edit(self, **config: Any) -> str:
        """As editors do; the digest of what it comes to."""
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps(config))
        draft.replace(self.path)
        wanted = MonitorConfig.model_validate(config)
        self.edited[digest_of(wanted)] = wanted
        return digest_of(wanted)

    def manifests(self) -> list[ManifestRecord]:
        found = [directory / MANIFEST_FILE for directory in rank_directories(self.base)]
        return [read_manifest(path) for path in found if path.exists()]

    def wait_until(self, condition: Callable[[ManifestRecord], object]) -> None:
        """Until it holds of every rank that records."""
        assert until(lambda: all(condition(one) for one in self.manifests()), SOON)

    def wait_for(self, digest: str) -> None:
        self.wait_until(lambda one: one.configurations and one.configurations[-1].digest == digest)

    def train_on(self, steps: int = 20) -> None:
        """Until there were so many more steps."""
        done = self.ranks[0].said().count("step ")
        self.ranks[0].wait_for(f"step {done + steps}")

    def end(self) -> list[dict[str, Any]]:
        """What the ranks have to tell. Training was what it is without the monitor, and no rank missed a step."""
        (self._directory / "stop").touch()
        ends = [rank.end() for rank in self.ranks]
        assert [ended.status for ended in ends] == [0] * len(ends), "\n".join(ended.err[-2000:] for ended in ends)
        told = [json.loads((self._directory / f"rank{rank}.json").read_text()) for rank in range(len(ends))]
        assert all(one["monitored"] == one["plain"] for one in told)
        for one in self.manifests():
            assert (one.dropped, one.lost, one.undecided_since) == ({}, {}, None)
            assert set(one.failures) <= SAID
        return told

    def steps(self, rank: int, kind: str) -> list[int]:
        (directory,) = [found for found in rank_directories(self.base) if f"-rank{rank}-" in found.name]
        tables = [read_csv(path) for path in directory.glob(f"{kind}_[0-9]*.csv")]
        return sorted({step for table in tables for step in table["step"].to_pylist()})


@pytest.fixture
def start(launcher: Launcher, tmp_path: Path) -> Start:
    return lambda ranks, *arguments, **config: Job(launcher, tmp_path, ranks, *arguments, **config)


def seeded_edits(seed: int) -> Iterator[dict[str, Any]]:
    chosen = random.Random(seed)
    for number in range(50):
        yield {
            "dynamic_on": chosen.random() < 0.7,
            "wg_distribution": True,
            "xy_distribution": chosen.random() < 0.3,
            "all_xy": True,
            "step_interval": chosen.choice([1, 1, 2, 3]),
            "collect_times": chosen.choice([5, 1000 + number]),
            "ops": chosen.choice([["norm"], ["min", "max"]]),
            "step_count_per_record": chosen.choice([20, 50]),
        }


def due(log: list[ConfigurationRecord], edited: dict[str, MonitorConfig], end: int, kind: str) -> list[int]:
    """The steps of which there have to be rows, by what was agreed on."""
    steps: list[int] = []
    for one, following in zip(log, [*log[1:], None], strict=True):
        config = edited[one.digest]
        wanted = config.dynamic_on and (config.wg_distribution if kind == "grad_unreduced" else config.xy_distribution)
        last = end if following is None else following.from_step
        steps += list(range(one.from_step, last, config.step_interval))[: config.collect_times] if wanted else []
    return steps


@pytest.mark.parametrize("ranks", sampled([2, 4]))
def test_fifty_edits_at_random_moments_lead_to_the_same_steps_on_all_ranks(start: Start, ranks: int) -> None:
    job = start(ranks, dynamic_on=False)
    moments = random.Random(ranks)
    for config in seeded_edits(ranks):
        time.sleep(moments.choice([0.02, 0.1, 0.2]))
        job.edit(**config)
    job.wait_for(job.edit(**GRADIENTS))
    job.train_on()
    told = job.end()
    first, *others = job.manifests()
    assert len(first.configurations) > 10
    assert all(one.configurations == first.configurations for one in others)
    assert all(one.since == one.from_step for one in first.configurations)
    assert all(one.steps == first.steps for one in others)
    for kind in ("grad_unreduced", "actv"):
        expected = due(list(first.configurations), job.edited, len(told[0]["monitored"]), kind)
        assert all(job.steps(rank, kind) == expected for rank in range(ranks))
    assert listed(first.steps.written) == due(
        list(first.configurations), job.edited, len(told[0]["monitored"]), "grad_unreduced"
    )


def test_a_rank_that_watches_one_more_model_changes_with_the_others(start: Start) -> None:
    """That model is on no other rank, and waits for none."""
    job = start(2, "-1", "copy", dynamic_on=False)
    digest = job.edit(**GRADIENTS)

    def of_all_ranks() -> list[ManifestRecord]:
        return [one for one in job.manifests() if one.watched is not None and "DistributedDataParallel" in one.watched.role]

    assert until(lambda: [len(one.configurations) for one in of_all_ranks()] == [2, 2], SOON)
    job.train_on()
    job.end()
    first, second = of_all_ranks()
    assert {one.job_id for one in job.manifests()} > {first.job_id} == {second.job_id}
    assert first.configurations == second.configurations
    assert (first.configurations[-1].digest, first.steps) == (digest, second.steps)
    assert first.steps.written.count > 10


def test_an_alert_on_one_rank_brings_activations_to_both_for_some_steps_and_the_count_continues(
    start: Start,
) -> None:
    job = start(
        2,
        40,
        **GRADIENTS,
        all_xy=True,
        alert={"rules": [{"rule_name": "AnomalyNan"}], "dump": True},
        on_alert={"set": {"xy_distribution": True}, "steps": 5},
        collect_times=70,
    )
    job.wait_until(lambda one: one.configurations[-1].origin == "return")
    assert until(lambda: not json.loads(job.path.read_text())["dynamic_on"], SOON)
    job.end()
    first, second = job.manifests()
    assert first.configurations == second.configurations
    assert [one.origin for one in first.configurations] == ["start", "alert", "return"]
    begun, back = (one.from_step for one in first.configurations[1:])
    assert back == begun + 5
    assert job.steps(0, "actv") == job.steps(1, "actv") == list(range(begun, back))
    assert job.steps(0, "grad_unreduced") == job.steps(1, "grad_unreduced") == list(range(1, 76))
    assert not (job.base / "anomaly_detected" / "rank0" / "anomaly.json").exists()
    events = json.loads((job.base / "anomaly_detected" / "rank1" / "anomaly.json").read_text())
    assert {event["step"] for event in events.values()} == {40}


def test_a_flipped_bit_on_one_rank_brings_activations_to_both_without_any_rule(start: Start) -> None:
    weights = {"dynamic_on": True, "param_distribution": True, "replica_check": True, "all_xy": True, "ops": ["norm"]}
    job = start(2, 40, "flip", **weights, on_alert={"set": {"xy_distribution": True}, "steps": 5})
    job.wait_until(lambda one: one.configurations[-1].origin == "return")
    job.end()
    for one, rank in zip(job.manifests(), (0, 1), strict=True):
        assert {record.origin for record in one.configurations} == {"start", "alert", "return"}
        begun, back = (record.from_step for record in one.configurations[1:3])
        assert set(range(begun, back)) <= set(job.steps(rank, "actv"))
    (found,) = (bits for one in job.manifests() for bits in one.wrong_bits if bits.check == "copies")
    assert (found.names, found.ranks) == (("module.layers.0.weight",), (0, 1))


def test_communication_is_recorded_from_the_switch_on_until_the_next_and_nothing_stays_patched(
    start: Start,
) -> None:
    job = start(2, **GRADIENTS)
    job.wait_for(job.edit(**GRADIENTS, cc_distribution={"enable": True}))
    job.train_on()
    job.wait_for(job.edit(**GRADIENTS))
    job.train_on()
    told = job.end()
    first, _ = job.manifests()
    begun, back = (one.from_step for one in first.configurations[1:])
    assert job.steps(0, "other") == job.steps(1, "other") == list(range(begun, back))
    rows = [row for path in rank_directories(job.base)[0].glob("other_*.csv") for row in read_csv(path).to_pylist()]
    assert {row["name"].split(".")[0] for row in rows} == {"all_reduce", "broadcast"}
    assert [one["patched"] for one in told] == [[], []]


def test_a_rank_that_is_not_monitored_takes_part_and_begins_to_record_when_it_is_to(start: Start) -> None:
    job = start(2, **GRADIENTS, module_ranks=[0])
    assert len(job.manifests()) == 1
    wanted = job.edit(**GRADIENTS, module_ranks=[1])
    assert until(lambda: len(job.manifests()) == 2, SOON)
    job.wait_for(wanted)
    job.train_on()
    job.wait_for(job.edit(**GRADIENTS))
    job.train_on()
    told = job.end()
    first, second = job.manifests()
    assert first.configurations == second.configurations
    one, other = (record.from_step for record in first.configurations[1:])
    end = len(told[0]["monitored"])
    assert job.steps(0, "grad_unreduced") == [*range(1, one), *range(other, end)]
    assert job.steps(1, "grad_unreduced") == list(range(one, end))


def test_the_command_switches_a_running_job_and_waits_for_all_of_its_ranks(start: Start) -> None:
    job = start(2, dynamic_on=False, wg_distribution=True, ops=["norm"], step_count_per_record=50)

    def control(*arguments: str) -> str:
        done = CliRunner().invoke(app, [str(job.base), *arguments])
        assert done.exit_code == 0, done.output
        return done.output

    assert "off" in control("status")
    control("on", "--wait", "30")
    job.train_on(5)
    said = control("set", "step_interval=2", 'ops=["max"]', "--wait", "30")
    assert "step_interval: 1 -> 2" in said
    job.train_on(5)
    control("off", "--wait", "30")
    table = [line.split() for line in control("status").splitlines() if line.startswith(("0 ", "1 "))]
    job.end()
    first, second = job.manifests()
    assert [(line[0], line[3], line[4]) for line in table] == [
        (str(rank), "off", str(first.configurations[-1].since)) for rank in range(2)
    ]
    assert first.configurations == second.configurations
    assert job.steps(0, "grad_unreduced") == job.steps(1, "grad_unreduced")
    assert len(first.configurations) == 4


def test_a_rank_that_is_killed_while_a_change_is_agreed_on_leaves_the_files_of_the_other_whole(start: Start) -> None:
    job = start(2, **GRADIENTS)
    job.wait_for(digest_of(MonitorConfig.model_validate(GRADIENTS)))
    job.train_on()
    job.edit(**GRADIENTS, xy_distribution=True, all_xy=True)
    job.ranks[1].send(signal.SIGKILL)
    assert job.ranks[1].end().status == -signal.SIGKILL
    assert job.ranks[0].end().status == 1  # of a collective without its peer
    (mine,) = [one for one in job.manifests() if one.rank == 0]
    assert mine.closed
    assert (mine.dropped, mine.lost) == ({}, {})
    incomplete = set(mine.steps.incomplete.steps())  # of which there may be gradients or not
    assert set(mine.steps.written.steps()) - incomplete == set(job.steps(0, "grad_unreduced")) - incomplete
