"""The job's key: where it comes from, and which files no rank takes it from."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from monitor.coordinator.store_key import KEY_FILE, StoreKeyError, job_key

OTHER_USER = 12_345


def here(directory: Path) -> dict[str, str]:
    """The environment of a rank that writes to ``directory``."""
    return {"MONITOR_OUTPUT_DIR": str(directory)}


def test_the_first_rank_creates_the_key_for_its_user_alone_and_later_ones_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        key = job_key(here(tmp_path / "out"))
    finally:
        os.umask(before)
    assert len(key) == 64
    assert [path.name for path in (tmp_path / "out").iterdir()] == [KEY_FILE]
    assert stat.S_IMODE((tmp_path / "out" / KEY_FILE).stat().st_mode) == 0o600
    assert job_key(here(tmp_path / "out")) == key
    assert job_key(here(tmp_path / "other")) != key


def test_ranks_that_look_at_once_have_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        for number in range(20):
            directory = tmp_path / str(number)
            assert len(set(pool.map(lambda _, directory=directory: job_key(here(directory)), range(16)))) == 1
            assert [path.name for path in directory.iterdir()] == [KEY_FILE]


def test_a_key_in_the_environment_comes_first_and_touches_no_file(tmp_path: Path) -> None:
    assert job_key({"MONITOR_STORE_KEY": "a secret of this job", **here(tmp_path / "out")}) == b"a secret of this job"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("given", ["", "short", "15 characters .."[:15]])
def test_a_secret_that_can_be_guessed_is_refused(tmp_path: Path, given: str) -> None:
    with pytest.raises(
        StoreKeyError, match=f"MONITOR_STORE_KEY has {len(given)} characters. Set MONITOR_STORE_KEY to one secret"
    ):
        job_key({"MONITOR_STORE_KEY": given, **here(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def link(path: Path) -> None:
    job_key(here(path.parent))
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def readable(path: Path) -> None:
    job_key(here(path.parent))
    path.chmod(0o640)


def writable(path: Path) -> None:
    job_key(here(path.parent))
    path.chmod(0o602)


def others(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    job_key(here(path.parent))
    os.chown(path, OTHER_USER, OTHER_USER)


def cut(path: Path) -> None:
    path.touch(0o600)


WRONG: list[tuple[Callable[[Path], None], str]] = [
    (link, "it is a link"),
    (lambda path: path.symlink_to("nowhere"), "it is a link"),
    (readable, "its mode is 640, and must be 600"),
    (writable, "its mode is 602, and must be 600"),
    (others, f"it belongs to the user {OTHER_USER}, and this process to the user 0"),
    (lambda path: path.mkdir(0o700), "it is not a regular file"),
    (lambda path: os.mkfifo(path, 0o600), "it is not a regular file"),
    (cut, "it does not hold a key of 64 characters"),
]


@pytest.mark.parametrize(
    ("make", "why"), WRONG, ids=["link", "dangling", "readable", "writable", "others", "folder", "fifo", "cut"]
)
def test_a_file_that_another_user_may_know_is_refused_with_what_to_do(
    tmp_path: Path, make: Callable[[Path], None], why: str
) -> None:
    make(tmp_path / KEY_FILE)
    with pytest.raises(StoreKeyError) as caught:
        job_key(here(tmp_path))
    said = str(caught.value)
    assert f"the key of the job's store in {tmp_path / KEY_FILE} is not used: {why}. Delete this file" in said
    assert "Set MONITOR_STORE_KEY to one secret of at least 16 characters on all ranks" in said


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreKeyError, match=r"file/out/\.store-key is not used: Not a directory"):
        job_key(here(tmp_path / "file" / "out"))
