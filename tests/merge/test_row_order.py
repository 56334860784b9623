from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from monitor.merge.tables import NONE, Texts, distinct, order_by, starts_of_runs

rows = st.integers(0, 60)
small, any_number = st.integers(-3, 3), st.integers(-(2**62), 2**62)


def columns(length: int, numbers: st.SearchStrategy[int]) -> st.SearchStrategy[list[np.ndarray]]:
    return st.lists(arrays(np.int64, length, elements=numbers), min_size=1, max_size=4)


@given(st.data(), rows, st.sampled_from([small, any_number]))
def test_rows_are_put_in_the_order_that_numpys_lexsort_gives(data: st.DataObject, length: int, numbers: object) -> None:
    keys = data.draw(columns(length, numbers))
    order = order_by(keys)
    assert (np.arange(length) if order is None else order).tolist() == np.lexsort(keys[::-1]).tolist()


def test_many_rows_with_large_keys_are_put_in_order() -> None:
    rng = np.random.default_rng(0)
    keys = [rng.integers(0, 1000, 100_000), rng.integers(0, 2**40, 100_000)]
    assert (order_by(keys) == np.lexsort(keys[::-1])).all()


def test_rows_that_are_in_order_are_left_as_they_are() -> None:
    assert order_by([np.array([1, 1, 2]), np.array([5, 5, 0])]) is None


@given(st.data(), rows)
def test_a_run_begins_where_a_row_is_not_like_the_one_before(data: st.DataObject, length: int) -> None:
    keys = data.draw(columns(length, small))
    listed = list(zip(*(key.tolist() for key in keys), strict=True))
    assert starts_of_runs(keys).tolist() == [i for i in range(length) if i == 0 or listed[i] != listed[i - 1]]


@given(st.lists(st.integers(-(2**40), 2**40) | st.integers(0, 9)))
def test_each_number_is_found_once_in_order(numbers: list[int]) -> None:
    assert distinct(np.array(numbers, dtype=np.int64)).tolist() == sorted(set(numbers))


@given(st.lists(st.sampled_from([None, "b", "a", "é", "c"]), max_size=30))
def test_places_of_texts_are_in_order_of_utf8_and_null_comes_last(texts: list[str | None]) -> None:
    values = ["c", "é", "a", "b"]
    codes = np.array([NONE if text is None else values.index(text) for text in texts], dtype=np.int32)
    order = np.argsort(Texts(codes, pa.array(values)).places(), kind="stable")
    assert [texts[row] for row in order] == sorted(texts, key=lambda text: (text is None, (text or "").encode()))


@given(st.lists(st.sampled_from([None, "a", "b", "c"]), max_size=30))
def test_equal_columns_of_text_are_equal_in_every_byte(texts: list[str | None]) -> None:
    used = list(dict.fromkeys(text for text in texts if text is not None))
    for values in (["a", "b", "c"], ["x", "c", "b", "a", "y"]):
        codes = [NONE if text is None else values.index(text) for text in texts]
        made = Texts(np.array(codes, dtype=np.int32), pa.array(values)).in_use()
        assert made.to_pylist() == texts
        assert made.dictionary.to_pylist() == used
