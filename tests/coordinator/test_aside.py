import errno
import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from filelock import FileLock

from monitor.coordinator.output import JobIdentity, OutputError, rotate_stale_output

EARLIER = JobIdentity("0" * 32, "Dec03_21-34-40")
JOB = JobIdentity("1a2b3c4d" * 4, "Dec04_08-00-00")
LATER = JobIdentity("f" * 32, "Dec05_08-00-00")
RANKS = 4


def run_of_a_rank(base, rank, identity=JOB):
    """What every rank does: make room, then write its own files at once."""
    moved = rotate_stale_output(base, "anomaly_detected", identity)
    own = base / "anomaly_detected" / f"rank{rank}"
    own.mkdir(parents=True)
    (own / "anomaly.json").write_text(identity.job_id)
    return moved


def texts(directory):
    return {str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*.json")}


def test_what_an_earlier_run_left_is_renamed_and_whole(tmp_path):
    run_of_a_rank(tmp_path, 0, EARLIER)
    moved = rotate_stale_output(tmp_path, "anomaly_detected", JOB)
    assert moved == tmp_path / "anomaly_detected-before-Dec04_08-00-00-1a2b3c4d"
    assert texts(moved) == {"rank0/anomaly.json": EARLIER.job_id}
    assert not (tmp_path / "anomaly_detected").exists()


def test_nothing_left_is_nothing_renamed(tmp_path):
    assert rotate_stale_output(tmp_path / "new", "anomaly_detected", JOB) is None
    assert [path.name for path in (tmp_path / "new").iterdir() if not path.name.startswith(".")] == []


def test_a_file_is_renamed_as_a_directory_is(tmp_path):
    (tmp_path / "module_struct").write_text("old")
    assert rotate_stale_output(tmp_path, "module_struct", JOB).read_text() == "old"


def test_a_rank_that_comes_late_leaves_what_its_job_has_written(tmp_path):
    run_of_a_rank(tmp_path, 0, EARLIER)
    run_of_a_rank(tmp_path, 0)
    assert run_of_a_rank(tmp_path, 1) is None
    assert texts(tmp_path / "anomaly_detected") == {f"rank{rank}/anomaly.json": JOB.job_id for rank in (0, 1)}


def test_a_rank_that_comes_late_does_so_even_where_nothing_was_left(tmp_path):
    run_of_a_rank(tmp_path, 0)
    assert run_of_a_rank(tmp_path, 1) is None


def test_a_late_rank_of_a_job_whose_files_were_set_aside_moves_nothing(tmp_path):
    run_of_a_rank(tmp_path, 0)
    run_of_a_rank(tmp_path, 0, LATER)
    assert rotate_stale_output(tmp_path, "anomaly_detected", JOB) is None


def test_each_run_sets_aside_the_one_before_and_none_is_lost(tmp_path):
    for identity in (EARLIER, JOB, LATER):
        run_of_a_rank(tmp_path, 0, identity)
    assert sorted(texts(tmp_path).values()) == sorted(identity.job_id for identity in (EARLIER, JOB, LATER))


def test_each_name_is_set_aside_by_itself(tmp_path):
    rotate_stale_output(tmp_path, "anomaly_detected", JOB)
    (tmp_path / "module_struct").mkdir()
    assert rotate_stale_output(tmp_path, "module_struct", JOB) is not None


def test_the_list_of_jobs_does_not_grow_without_end(tmp_path):
    for number in range(80):
        rotate_stale_output(tmp_path, "module_struct", JobIdentity(f"{number:032x}", "Dec03_21-34-40"))
    entered = (tmp_path / ".module_struct.jobs").read_text().split()
    assert entered == [f"{number:032x}" for number in range(16, 80)]


@pytest.mark.parametrize("left", [True, False])
def test_ranks_that_start_at_the_same_moment_set_aside_once_and_only_the_old(tmp_path, left):
    """Real processes, let go together, each writing as soon as it may."""
    if left:
        run_of_a_rank(tmp_path, 0, EARLIER)
    context = get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(RANKS, mp_context=context) as pool:
        barrier = manager.Barrier(RANKS)
        moved = list(pool.map(_rank, [(tmp_path, rank, barrier) for rank in range(RANKS)]))
    assert sum(path is not None for path in moved) == int(left)
    assert texts(tmp_path / "anomaly_detected") == {f"rank{rank}/anomaly.json": JOB.job_id for rank in range(RANKS)}
    old = list(tmp_path.glob("anomaly_detected-before-*"))
    assert [texts(path) for path in old] == ([{"rank0/anomaly.json": EARLIER.job_id}] if left else [])


def _rank(arguments):
    base, rank, barrier = arguments
    barrier.wait(60)
    return run_of_a_rank(base, rank)


@pytest.mark.parametrize("absence", [OSError(errno.ENOLCK, "No locks available"), NotImplementedError("no flock")])
def test_a_file_system_without_locks_is_used_without_them(tmp_path, monkeypatch, absence):
    run_of_a_rank(tmp_path, 0, EARLIER)

    def acquire(*_, **__):
        raise absence

    monkeypatch.setattr(FileLock, "acquire", acquire)
    assert run_of_a_rank(tmp_path, 0) is not None
    assert run_of_a_rank(tmp_path, 1) is None


def test_without_locks_the_new_name_keeps_a_rank_from_moving_its_own_job(tmp_path):
    """The list is lost, as if this rank had read it before another entered the job: a directory is in the way."""
    run_of_a_rank(tmp_path, 0, EARLIER)
    run_of_a_rank(tmp_path, 0)
    (tmp_path / ".anomaly_detected.jobs").unlink()
    assert run_of_a_rank(tmp_path, 1) is None


def test_a_lock_that_is_never_released_is_a_clear_error(tmp_path):
    with FileLock(tmp_path / ".module_struct.lock"), pytest.raises(OutputError, match=r"\.module_struct\.lock is held by"):
        rotate_stale_output(tmp_path, "module_struct", JOB, patience_s=0.2)


def test_a_base_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="no output can be written to"):
        rotate_stale_output(tmp_path / "file", "module_struct", JOB)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.mkdir()])
def test_a_list_that_is_no_file_is_refused_before_training(tmp_path, make):
    """To open a pipe would wait for ever."""
    make(tmp_path / ".anomaly_detected.jobs")
    with pytest.raises(OutputError, match="no regular file"):
        rotate_stale_output(tmp_path, "anomaly_detected", JOB)
