"""The curve of distinct rows against its full sum and against simulated LRU caches."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hlem_env.errors import ArgumentError
from hlem_env.surrogate.hit_rates import (
    distinct_curve,
    distinct_rows,
    draws_to_fill,
    miss_probability,
)

zipfs = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.0, 2.0))
some = settings(max_examples=30, deadline=None)
tables = st.one_of(st.integers(1, 300), st.integers(1, 100_000))


def popularity(rows: int, zipf: float) -> np.ndarray:
    weight = np.arange(1, rows + 1) ** -zipf
    return weight / weight.sum()


@some
@given(rows=tables, zipf=zipfs, octave=st.floats(-3, 30))
def test_the_curve_is_the_full_sum(rows: int, zipf: float, octave: float) -> None:
    draws = 2.0**octave
    p = popularity(rows, zipf)
    curve = distinct_curve(rows, zipf)
    assert distinct_rows(curve, draws) / rows == pytest.approx(
        -np.expm1(-p * draws).sum() / rows, abs=2e-4
    )
    assert miss_probability(curve, draws) == pytest.approx((p * np.exp(-p * draws)).sum(), abs=1e-3)


@some
@given(rows=tables, zipf=zipfs, octave=st.floats(-3, 30))
def test_few_draws_are_not_lost_in_a_large_table(rows: int, zipf: float, octave: float) -> None:
    """The relative error: a request's few missed rows are a small part of the table."""
    draws = 2.0**octave
    expected = -np.expm1(-popularity(rows, zipf) * draws).sum()
    assert distinct_rows(distinct_curve(rows, zipf), draws) == pytest.approx(expected, rel=1e-3)


@some
@given(rows=tables, zipf=zipfs, share=st.floats(0.001, 0.999))
def test_draws_to_fill_is_the_inverse(rows: int, zipf: float, share: float) -> None:
    curve = distinct_curve(rows, zipf)
    draws = draws_to_fill(curve, share * rows)
    assume(draws < 2.0**50)
    assert distinct_rows(curve, draws) == pytest.approx(share * rows, rel=1e-6)
    exact = -np.expm1(-popularity(rows, zipf) * draws).sum()
    assert exact == pytest.approx(share * rows, rel=1e-3)


@some
@given(rows=tables, zipf=zipfs, data=st.data())
def test_larger_caches_and_more_draws_never_have_fewer_hits(
    rows: int, zipf: float, data: st.DataObject
) -> None:
    curve = distinct_curve(rows, zipf)
    low, high = sorted((data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))))
    assert draws_to_fill(curve, low * rows) <= draws_to_fill(curve, high * rows)
    few, many = 2.0 ** (40 * low), 2.0 ** (40 * high)
    assert miss_probability(curve, many) <= miss_probability(curve, few) + 1e-12
    assert distinct_rows(curve, many) >= distinct_rows(curve, few) * (1 - 1e-9)
    assert distinct_rows(curve, many) <= min(rows, many) * (1 + 1e-6)


@some
@given(rows=tables, zipf=zipfs, more=st.floats(0, 1e9))
def test_a_cache_of_the_whole_table_reaches_for_ever(rows: int, zipf: float, more: float) -> None:
    curve = distinct_curve(rows, zipf)
    assert draws_to_fill(curve, rows + more) == np.inf
    assert miss_probability(curve, np.inf) == pytest.approx(0.0, abs=1e-9)
    assert distinct_rows(curve, np.inf) == pytest.approx(rows, rel=1e-6)


@some
@given(rows=tables, zipf=zipfs)
def test_no_cache_holds_nothing(rows: int, zipf: float) -> None:
    curve = distinct_curve(rows, zipf)
    assert draws_to_fill(curve, 0.0) == 0.0
    assert distinct_rows(curve, 0.0) == 0.0
    assert miss_probability(curve, 0.0) == pytest.approx(1.0)


def test_no_draw_misses_more_than_surely() -> None:
    for zipf in np.arange(0.3, 1.01, 0.05):
        assert miss_probability(distinct_curve(50_000_000, round(float(zipf), 2)), 0.0) <= 1.0


def test_equal_popularity_in_closed_form() -> None:
    curve = distinct_curve(1000, 0.0)
    for draws in (1.0, 10.0, 693.0, 5000.0):
        assert miss_probability(curve, draws) == pytest.approx(np.exp(-draws / 1000), abs=1e-4)
        assert distinct_rows(curve, draws) == pytest.approx(1000 * (1 - np.exp(-draws / 1000)))
    assert draws_to_fill(curve, 500.0) == pytest.approx(1000 * np.log(2), rel=1e-4)


def simulate_lru(keys: np.ndarray, capacity: int, warm: int) -> float:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for at, key in enumerate(keys.tolist()):
        if key in cache:
            cache.move_to_end(key)
            hits += at >= warm
        else:
            cache[key] = None
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits / (keys.size - warm)


@pytest.mark.parametrize("capacity", [50, 500, 2000, 3000])
@pytest.mark.parametrize("zipf", [0.0, 0.6, 0.9, 1.2])
def test_hit_rate_of_a_simulated_lru(zipf: float, capacity: int) -> None:
    """Che's approximation, within a point."""
    rows = 5000
    rng = np.random.default_rng(int(100 * zipf) + capacity)
    keys = rng.choice(rows, size=110_000, p=popularity(rows, zipf))
    curve = distinct_curve(rows, zipf)
    reach = draws_to_fill(curve, capacity)
    assert reach < 60_000
    expected = 1.0 - miss_probability(curve, reach)
    assert simulate_lru(keys, capacity, warm=60_000) == pytest.approx(expected, abs=0.01)


def test_distinct_misses_of_a_batch() -> None:
    """D(A + n) - D(A): what a batch of n draws misses, each row once."""
    rows, zipf, reach, batch = 3000, 0.9, 1500, 800
    rng = np.random.default_rng(8)
    p = popularity(rows, zipf)
    missed = []
    for _ in range(200):
        before = set(rng.choice(rows, size=rng.poisson(reach), p=p).tolist())
        now = set(rng.choice(rows, size=rng.poisson(batch), p=p).tolist())
        missed.append(len(now - before))
    curve = distinct_curve(rows, zipf)
    expected = distinct_rows(curve, reach + batch) - distinct_rows(curve, reach)
    noise = np.std(missed) / np.sqrt(len(missed))
    assert np.mean(missed) == pytest.approx(expected, abs=4 * noise)


def test_the_curve_of_a_table_is_shared_and_cannot_change() -> None:
    curve = distinct_curve(1000, 0.5)
    assert distinct_curve(1000, 0.5) is curve
    with pytest.raises(ValueError, match="read-only"):
        curve["rows"][0] = 1.0


def test_a_table_has_rows() -> None:
    with pytest.raises(ArgumentError, match="rows_per_table=0"):
        distinct_curve(0, 0.9)
