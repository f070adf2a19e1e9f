import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from eval.statistics import (
    Estimate,
    difference_of_means,
    interquartile_mean,
    iqm,
    pooled_percentile,
    ratio_of_means,
    ratio_of_pooled_percentiles,
    ratio_of_separate_means,
    resample,
)
from hlem_env.errors import ArgumentError


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([5.0], 5.0),
        ([1.0, 2.0, 9.0], 4.0),  # fewer than 4: the mean
        ([100.0, 2.0, 4.0, -50.0], 3.0),
        ([8.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0, 1000.0], 5.25),  # (3 + 5 + 6 + 7) / 4
        (list(range(16)), 7.5),
        ([1.0, 2.0, 3.0, 4.0, 90.0], 3.0),  # one of five cut at each end
    ],
    ids=str,
)
def test_interquartile_mean_by_hand(values: list[float], mean: float) -> None:
    assert interquartile_mean(np.array(values)) == pytest.approx(mean)
    assert iqm(np.array(values)).value == pytest.approx(mean)


@given(st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=40))
def test_interquartile_mean_is_scipys_trimmed_mean(values: list[float]) -> None:
    mine = interquartile_mean(np.array(values))
    assert mine == pytest.approx(stats.trim_mean(values, 0.25), abs=1e-6)


def test_interquartile_mean_works_along_the_last_axis() -> None:
    values = np.array([[0.0, 1.0, 2.0, 99.0], [4.0, 4.0, 4.0, 4.0]])
    assert interquartile_mean(values).tolist() == [1.5, 4.0]


def test_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    found = [iqm(rng.normal(10, 2, 16)) for _ in range(200)]
    covered = np.mean([e.low <= 10 <= e.high for e in found])
    assert 0.85 <= covered <= 0.99
    assert all(e.low <= e.value <= e.high for e in found)


def test_equal_seeds_have_no_interval() -> None:
    assert iqm(np.full(16, 3.0)) == Estimate(3.0, 3.0, 3.0)
    assert iqm(np.array([3.0])) == Estimate(3.0, 3.0, 3.0)


def test_estimates_repeat_and_ignore_global_state() -> None:
    values = np.random.default_rng(0).normal(size=16)
    first = iqm(values)
    np.random.seed(1)
    assert iqm(values) == first
    assert np.array_equal(resample(5), resample(5))
    assert resample(5).min() == 0 and resample(5).max() == 4


def test_ratio_is_of_means_and_not_a_mean_of_ratios() -> None:
    found = ratio_of_means(np.array([1.0, 9.0]), np.array([1.0, 3.0]))
    assert found.value == 2.5  # the ratios' mean is 2


def test_ratio_is_paired() -> None:
    rng = np.random.default_rng(3)
    seeds = rng.normal(30, 8, 16)  # what differs between seeds is common to both
    paired = ratio_of_means(0.9 * seeds, seeds)
    assert paired.low == pytest.approx(0.9) and paired.high == pytest.approx(0.9)
    shuffled = ratio_of_means(0.9 * rng.permutation(seeds), seeds)
    assert shuffled.high - shuffled.low > 0.05


def test_a_difference_is_paired_and_has_the_paired_t_tests_interval() -> None:
    random = np.random.default_rng(5)
    right = random.normal(30, 4, 300)
    left = right + random.normal(0.2, 1, 300)
    found = difference_of_means(left, right)
    expected = stats.ttest_rel(left, right).confidence_interval(0.95)
    assert found.value == pytest.approx((left - right).mean())
    width = expected.high - expected.low
    assert found.low == pytest.approx(expected.low, abs=0.1 * width)
    assert found.high == pytest.approx(expected.high, abs=0.1 * width)


def test_a_pooled_percentile_is_numpys_of_all_values_and_of_every_resample() -> None:
    rng = np.random.default_rng(1)
    groups = [rng.gamma(2.0, 10.0, n) for n in (3, 0, 40, 1, 7)]
    for share in (0.0, 0.5, 0.99, 1.0):
        found = pooled_percentile(groups, share)
        assert found.value == pytest.approx(np.quantile(np.concatenate(groups), share))
        drawn = [np.concatenate([groups[g] for g in index]) for index in resample(5)]
        samples = [np.quantile(values, share) for values in drawn if values.size]
        assert (found.low, found.high) == pytest.approx(tuple(np.percentile(samples, [2.5, 97.5])))


def test_groups_and_not_values_are_drawn() -> None:
    rng = np.random.default_rng(2)
    alike = [np.full(50, value) for value in rng.normal(100, 10, 12)]
    apart = np.split(rng.permutation(np.concatenate(alike)), 12)
    widths = [e.high - e.low for e in (pooled_percentile(g, 0.5) for g in (alike, apart))]
    assert widths[0] > 2 * widths[1]


def test_a_ratio_of_pooled_percentiles_is_paired() -> None:
    rng = np.random.default_rng(3)
    groups = [rng.normal(mean, 1, 30) for mean in rng.normal(50, 10, 10)]
    found = ratio_of_pooled_percentiles([2 * g for g in groups], groups, 0.9)
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 2.0, 2.0))
    with pytest.raises(ArgumentError, match="empty"):
        ratio_of_pooled_percentiles(groups, [np.empty(0)] * 10, 0.5)


def test_sets_that_are_no_pairs_may_differ_in_number_and_are_drawn_apart() -> None:
    rng = np.random.default_rng(3)
    many, few = rng.normal(10.0, 1.0, 400), rng.normal(5.0, 1.0, 100)
    means = ratio_of_separate_means(many, few)
    assert means.value == pytest.approx(many.mean() / few.mean())
    deviation = 2.0 * np.sqrt((1 / 10) ** 2 / 400 + (1 / 5) ** 2 / 100)
    assert means.high - means.low == pytest.approx(2 * 1.96 * deviation, rel=0.15)
    assert ratio_of_separate_means(few, few).low < 0.97  # as pairs it would be 1 exactly
    groups = [one[None] for one in many], [one[None] for one in few]
    middle = ratio_of_pooled_percentiles(*groups, 0.5, paired=False)
    assert middle.value == pytest.approx(np.median(many) / np.median(few))
    with pytest.raises(ArgumentError, match="groups"):
        ratio_of_pooled_percentiles(*groups, 0.5)
