import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hlem_env.live.prefix_hash import prefix_hash

ITEMS = st.lists(st.integers(0, 2**63 - 1), max_size=40)
KEYS = st.integers(0, 2**64 - 1)


def hashed(items: list[int], state: int) -> int:
    return prefix_hash(np.array(items, np.int64), state)


@given(ITEMS, ITEMS, KEYS)
def test_it_goes_on_where_it_stopped(first: list[int], second: list[int], key: int) -> None:
    assert hashed(first + second, key) == hashed(second, hashed(first, key))


@given(ITEMS.filter(len), st.integers(0, 39), st.integers(0, 2**63 - 1), KEYS)
def test_an_edit_of_one_item_always_shows(items: list[int], at: int, other: int, key: int) -> None:
    edited = items.copy()
    edited[at % len(items)] = other
    assert (hashed(edited, key) == hashed(items, key)) == (edited == items)


def test_order_length_and_key_count_and_arrays_may_be_read_only() -> None:
    items = np.zeros(5, np.int64)
    items.flags.writeable = False
    seen = {prefix_hash(items[:n], key) for n in range(6) for key in (1, 2)}
    assert len(seen) == 12
    assert hashed([1, 2], 0) != hashed([2, 1], 0)
