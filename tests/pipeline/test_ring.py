import time

import pytest
from pipeline_parts import Copy

from monitor.pipeline.delivery import BATCH_LIMIT_BYTES
from monitor.pipeline.pipeline import Ring


def ring_of(queue_bytes: int, nbytes: int = 100) -> Ring[Copy]:
    return Ring(lambda: Copy(nbytes), queue_bytes)


def taken(ring: Ring[Copy]) -> list[Copy]:
    """Every copy that can be had without waiting."""
    copies = []
    while (copy := ring.take(0.0)) is not None:
        copies.append(copy)
    return copies


def test_copies_are_made_while_all_of_them_stay_within_the_bytes():
    ring = ring_of(350)
    assert len(taken(ring)) == 3
    assert ring.nbytes == 300


def test_two_copies_may_exist_whatever_their_size():
    assert len(taken(ring_of(10))) == 2


def test_a_copy_that_came_back_is_used_again_before_another_is_made():
    ring = ring_of(1000)
    first = ring.take(0.0)
    ring.put_back(first)
    assert ring.take(0.0) is first
    assert len(ring) == 1


def test_a_table_that_grows_shortens_the_ring_as_copies_come_back():
    ring = ring_of(400)
    copies = taken(ring)
    copies[0].nbytes = 200
    for copy in copies:
        ring.put_back(copy)
    assert len(taken(ring)) == 2
    assert ring.nbytes <= 400


def test_the_largest_copy_decides_how_many_there_may_be_since_the_others_will_grow_to_it():
    ring = ring_of(1000)
    ring.take(0.0).nbytes = 300
    assert len(taken(ring)) == 2


def test_taking_waits_for_a_copy_no_longer_than_asked():
    ring = ring_of(200)
    taken(ring)
    began = time.monotonic()
    assert ring.take(0.05) is None
    assert time.monotonic() - began >= 0.05


def test_a_copy_that_cannot_be_made_leaves_the_ring_as_it_was():
    copies = iter([Copy(100)])
    ring = Ring(lambda: next(copies), 1000)
    kept = ring.take(0.0)
    with pytest.raises(StopIteration):
        ring.take(0.0)
    ring.put_back(kept)
    assert ring.take(0.0) is kept


def test_the_ring_is_mostly_free_once_more_than_half_came_back():
    ring = ring_of(300)
    copies = taken(ring)
    ring.put_back(copies[0])
    assert not ring.mostly_free
    ring.put_back(copies[1])
    assert ring.mostly_free


def test_it_is_roomy_until_half_of_it_is_taken_and_again_when_copies_come_back():
    ring = ring_of(1000)
    copies = []
    for _ in range(4):
        copies.append(ring.take(0.0))
        assert ring.may_batch
    copies.append(ring.take(0.0))
    assert not ring.may_batch
    ring.put_back(copies.pop())
    assert ring.may_batch


def test_copies_that_wait_together_hold_a_bounded_number_of_bytes():
    ring = ring_of(1 << 40, nbytes=BATCH_LIMIT_BYTES // 2)
    ring.take(0.0)
    ring.take(0.0)
    assert not ring.may_batch


def test_a_ring_of_two_is_never_roomy_while_one_is_taken():
    ring = ring_of(299, nbytes=100)
    ring.take(0.0)
    assert not ring.may_batch


def test_a_copy_that_has_grown_counts_as_large_as_it_is():
    ring = ring_of(1000, nbytes=10)
    copy = ring.take(0.0)
    assert ring.may_batch
    copy.nbytes = 400
    assert not ring.may_batch
