import numpy as np
import pytest

from hlem_env.errors import ArgumentError
from hlem_env.telemetry import EpochStats
from serving_bridge.burst_watch import BurstWatch, WatchSettings
from tests.hlem_env.epochs import make_stats

POOL = 1_000_000


def tick(hot: int, requests: int, working_set: float = 0.5) -> EpochStats:
    flags = np.arange(requests) < hot
    return make_stats(
        [1.0] * requests, is_hot=flags, pool_bytes=POOL, working_set_bytes=working_set * POOL
    )


def taught(share: float, requests: int, settings: WatchSettings | None = None) -> BurstWatch:
    watch = BurstWatch(settings)
    for _ in range(10):
        for _ in range(10):
            assert not watch.see(tick(round(share * requests), requests))
        watch.learn()
    return watch


def alarms(watch: BurstWatch, share: float, requests: int, epochs: int, seed: int) -> int:
    """Alarms on a steady workload, learning as the recovery controller does."""
    rng, found = np.random.default_rng(seed), 0
    for hot in rng.binomial(requests, share, 10 * epochs).reshape(epochs, 10):
        for count in hot:
            if watch.see(tick(int(count), requests)):
                found += 1
                watch.clear()
        watch.learn()
    return found


@pytest.mark.parametrize("requests", [5, 30, 110, 400])
@pytest.mark.parametrize("share", [0.05, 0.6])
def test_steady_workloads_hardly_ever_alarm(requests: int, share: float) -> None:
    # 3 x 240 epochs; allowed is one alarm in 240.
    assert alarms(BurstWatch(), share, requests, 720, seed=1) <= 3


@pytest.mark.parametrize("requests", [0.6, 2.0, 5.0])
@pytest.mark.parametrize("share", [0.06, 0.2])
def test_a_node_with_few_requests_and_few_users_hardly_ever_alarms(
    requests: float, share: float
) -> None:
    """A tick has a request or none, and one user more is a thirtieth of the pool."""
    rng, watch, users, found, epochs = np.random.default_rng(5), BurstWatch(), 2, 0, 720
    for _ in range(epochs):
        for _ in range(10):
            count = int(rng.poisson(requests))
            hot = int(rng.binomial(count, share))
            users += int(hot > 0 and rng.random() < 0.25)
            users -= int(users > 0 and rng.random() < 0.02 * users)
            if watch.see(tick(hot, count, 0.035 * users)):
                found += 1
                watch.clear()
        watch.learn()
    assert found <= 3
    jump = next(i for i in range(300) if watch.see(tick(int(rng.binomial(5, 0.6)), 5)))
    assert jump <= 30 * (1 if share < 0.1 else 3)


def test_the_threshold_is_needed() -> None:
    assert alarms(BurstWatch(WatchSettings(false_alarm_epochs=1)), 0.2, 110, 240, seed=1) > 10


@pytest.mark.parametrize("requests", [30, 110, 400])
def test_a_jump_of_the_hot_share_is_seen_and_sooner_with_more_requests(requests: int) -> None:
    watch = taught(0.15, requests)
    ticks = 1
    while not watch.see(tick(round(0.35 * requests), requests)):
        ticks += 1
    assert ticks <= max(400 // requests, 1)


def test_growth_of_the_working_set_alone_is_seen() -> None:
    watch, working_set, ticks = taught(0.15, 100), 0.5, 0
    while not watch.see(tick(15, 100, working_set)):
        working_set, ticks = working_set + 0.02, ticks + 1
    assert ticks <= 5


def test_a_shrinking_working_set_is_no_burst() -> None:
    watch, working_set = taught(0.15, 100), 0.5
    for _ in range(5):
        for _ in range(10):
            working_set -= 0.005
            assert not watch.see(tick(15, 100, working_set))
        watch.learn()
    assert not any(watch.see(tick(15, 100, working_set)) for _ in range(50))


def test_less_hot_requests_are_no_burst() -> None:
    watch = taught(0.5, 100)
    assert not any(watch.see(tick(10, 100)) for _ in range(100))


def test_the_end_is_seen_when_the_share_is_back_and_not_before() -> None:
    watch = taught(0.15, 110)
    assert not any(watch.see_end(tick(60, 110)) for _ in range(50))
    assert not watch.see_end(tick(17, 110))
    assert any(watch.see_end(tick(17, 110)) for _ in range(3))


def test_a_burst_does_not_teach_unless_it_stays() -> None:
    watch = taught(0.15, 100)
    before = watch.share
    for _ in range(10):
        watch.see(tick(50, 100))
    watch.drop()
    watch.learn()
    assert watch.share == before
    for _ in range(10):
        watch.see(tick(50, 100))
    watch.relearn()
    watch.clear()
    assert watch.share == pytest.approx(0.5)
    assert not any(watch.see(tick(50, 100)) for _ in range(100))


def test_ticks_without_requests_are_harmless() -> None:
    watch = BurstWatch()
    for _ in range(30):
        assert not watch.see(tick(0, 0))
        watch.learn()
    assert watch.share < 0


def test_settings_are_checked() -> None:
    with pytest.raises(ArgumentError, match="least_jump"):
        WatchSettings(least_jump=0.0)
    with pytest.raises(ArgumentError, match="false_alarm_epochs"):
        WatchSettings(false_alarm_epochs=0.5)
