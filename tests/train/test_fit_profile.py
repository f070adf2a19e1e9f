"""The fit finds the constants that made-up measurements were made with."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hlem_env.errors import ArgumentError
from hlem_env.live.config import LiveConfig
from hlem_env.surrogate.hardware import NodeProfile
from train.calibrate import read_record
from train.fit_profile import fit
from train.host_speed import ColdHost, kept

CONFIG = LiveConfig.load("h100")
LENGTHS = (2500, 5000, 10_000)
OVERHEAD, REQUEST, EAGER, EAGER_LAYER, ROW, KEY = 1.4, 0.05, 0.6, 0.15, 2.2e-5, 2e-6
AHEAD, HIDDEN = 0.9, 0.4
STORE = 1e-6
FULL = {2600: 0.07, 5100: 0.16, 10_100: 0.4}
FEW = {2600: 0.02, 5100: 0.03, 10_100: 0.05}


def sample(
    kind: str, layers: int, lengths: list[int], cached: list[int], missed: int, *, ahead: bool = False,
    host: float = 1.0, store: bool = False,
) -> Any:  # fmt: skip
    """A batch by the model, written down apart from the fit."""
    n = len(lengths)
    new = [length - c + CONFIG.candidates for length, c in zip(lengths, cached, strict=True)]
    hit = sum(new) * CONFIG.tables - missed
    compute = 0.0
    for length, c, tokens in zip(lengths, cached, new, strict=True):
        full, few = FULL[length + 100], FEW[length + 100]
        share = 1.0 if c == 0 else max(tokens - 120, 0) / (length + 100 - 120)
        compute += layers * (few + share * (full - few))
    stored = sum(lengths) - sum(cached) if store else 0
    compute += layers * STORE * stored
    launched = n > 1 and max(new) > 256
    eager = EAGER + layers * EAGER_LAYER if launched else 0.0
    planned = max(host * AHEAD - (0.0 if launched else HIDDEN * compute), 0.0) if ahead else 0.0
    ms = host * (OVERHEAD + REQUEST * (n - 1) + eager) + planned
    ms += compute + missed * ROW + hit * KEY
    return {
        "kind": kind, "alpha": 0.1, "history": lengths, "cached": cached, "missed_rows": missed,
        "hit_rows": hit, "ahead": ahead, "refilling": False, "prefetch_bytes": 5_000_000,
        "stored": stored, "ms": ms,
    }  # fmt: skip


def measured(layers: int, noise: float = 0.0) -> dict[str, Any]:
    """All kinds of one depth."""
    rng = np.random.default_rng(layers)
    samples = []
    for _ in range(8):
        for length in LENGTHS:
            one = [length]
            samples += [
                sample("cold", layers, one, [0], 6 * length),
                sample("again", layers, one, [0], 600),
                sample("ahead", layers, one, [0], 6 * length, ahead=True),
                sample("cold 2", layers, one * 2, [0, 0], 11 * length),
                sample("delta 0.3", layers, one, [int(0.7 * length)], 2 * length),
                sample("mixed 1", layers, one * 2, [length - 10, 0], 6 * length),
                sample("mixed 1", layers, one * 2, [length - 10, 0], 7 * length, ahead=True),
            ]
            samples += [
                sample(f"hot {n}", layers, one * n, [length - 10] * n, 500 * n) for n in (1, 4, 8)
            ]
    for one in samples:
        one["ms"] *= float(np.exp(noise * rng.standard_normal()))
    return {
        "preset": {**CONFIG.to_json(), "layers": layers},
        "hardware": "made up",
        "samples": samples,
        "refill_gbps": {"busy": 2.5, "idle": 9.0},
        "bandwidths": {"gather_gbps": 1e-6 * CONFIG.row_bytes / ROW, "hbm_gbps": 2000.0,
                       "link_gbps": 54.0, "lookup_ns_per_key": 1e6 * KEY},
        "loop": {"median_ms": 0.3, "busy_ms": 0.1},
        "probe_ms": 5.0,
    }  # fmt: skip


def test_constants_come_back() -> None:
    found = fit([measured(3), measured(6)], CONFIG, "made-up")
    assert found.overhead_ms == pytest.approx(OVERHEAD, rel=1e-3)
    assert (found.wake_ms, found.loop_ms) == (0.2, 0.1)
    assert found.request_ms == pytest.approx(REQUEST, rel=1e-3)
    assert found.eager_ms == pytest.approx(EAGER, rel=1e-3)
    assert found.eager_layer_ms == pytest.approx(EAGER_LAYER, rel=1e-3)
    assert found.ahead_ms == pytest.approx(AHEAD, rel=1e-3)
    assert found.ahead_hidden == pytest.approx(HIDDEN, rel=1e-3)
    assert found.hbm_gbps == pytest.approx(2 * CONFIG.row_bytes / KEY * 1e-6, rel=1e-3)
    assert found.gather_gbps == pytest.approx(CONFIG.row_bytes / ROW * 1e-6, rel=1e-3)
    assert found.recompute_layer_ms == pytest.approx(list(FULL.values()), rel=1e-3)
    assert found.append_layer_ms == pytest.approx(list(FEW.values()), rel=1e-3)
    assert found.store_layer_ms == found.evict_ms == 0  # no stream tells them
    assert found.mixed_slowdown == 0
    assert found.refill_gbps == 2.5
    assert found.fit["largest_relative_residual"] < 1e-4
    assert found.probe_ms == {"3": 5.0, "6": 5.0}


def test_what_the_model_cannot_explain_is_residual_and_jitter() -> None:
    found = fit([measured(6, noise=0.2)], CONFIG, "made-up")
    assert 0.01 < found.fit["median_relative_residual"] < 0.2
    low, high = np.percentile(found.jitter_cold, (10, 90))
    assert (low, high) == pytest.approx((np.exp(-1.28 * 0.2), np.exp(1.28 * 0.2)), rel=0.1)


AFTER_IDLE = {0.5: 0.1, 8.0: 0.3, 20.0: 0.8}


def streamed(layers: int, ratios: list[float]) -> dict[str, Any]:
    """What is measured of a depth, with a stream: by turns cached and not, after pauses of every length."""
    rng, samples = np.random.default_rng(layers), []
    for i, ratio in enumerate(ratios):
        length = int(rng.choice(LENGTHS))
        cached = [length - 10] if i % 2 else [0]
        one = sample("stream", layers, [length], cached, 600 if i % 2 else 6 * length)
        one["idle_ms"] = float(rng.uniform(0, 25))
        pause_ms = np.interp(one["idle_ms"], (0.0, *AFTER_IDLE), (0.0, *AFTER_IDLE.values()))
        one["ms"] = ratio * (one["ms"] + float(pause_ms))
        samples.append(one)
    # Two seconds before the stream is noted, and two of it.
    state = [{"python_ms": ms} for ms in (1.0, 1.4, 1.8, 1.2)]
    whole = measured(layers)
    return whole | {"samples": whole["samples"] + samples, "machine_state": state}


def test_streams_tell_what_a_pause_costs_and_few_slow_batches_do_not_move_it() -> None:
    ratios = [3.0 if i % 10 == 0 else 1.0 for i in range(400)]
    found = fit([streamed(3, ratios), streamed(6, ratios)], CONFIG, "made-up")
    assert found.idle_ms == tuple(AFTER_IDLE)
    assert found.after_idle_ms == pytest.approx(list(AFTER_IDLE.values()), rel=0.01)
    assert found.overhead_ms == pytest.approx(OVERHEAD, rel=0.01)
    assert {layers: of["python_ms"] for layers, of in found.host_ms.items()} == pytest.approx(
        {"3": 1.35, "6": 1.35}
    )


def test_batches_beside_a_slow_host_are_left_out() -> None:
    """The sixth of twelve seconds is slow; its queue shows in the three after it."""
    n = 1200
    slow = [5 <= i * 12 // n <= 8 for i in range(n)]
    depth = streamed(6, [4.0 if late else 1.0 for late in slow])
    for i, one in enumerate(depth["samples"][-n:]):  # each second has as many
        one["idle_ms"] = 30.0 + 1e-6 * i - one["ms"]
    host = [1.4] * 24
    host[12 + 5] = 9.0
    depth["machine_state"] = [{"python_ms": ms} for ms in host]
    stay = kept(depth)[-n:]
    assert (stay == slow).mean() < 0.01  # at the borders of the seconds
    found = fit([depth], CONFIG, "made-up")
    assert len(found.jitter) == stay.sum()
    assert found.host_ms["6"]["python_ms"] == pytest.approx(1.4)


def test_a_slow_host_is_no_slow_layer() -> None:
    """The host is slow while one depth is measured, by turns fast and slow in its stream."""
    raw = []
    for layers, cold_ms in ((3, (0.6, 0.6, 0.7, 0.9)), (6, (1.5, 1.5, 1.2, 1.8))):
        depth, mean_ms = measured(layers), 1.15
        fixed = [
            sample(one["kind"], layers, one["history"], one["cached"], one["missed_rows"],
                   ahead=one["ahead"], host=cold_ms[0] / mean_ms) for one in depth["samples"]
        ]  # fmt: skip
        stream = []
        for i in range(400):
            length, cold = LENGTHS[i % 3], i % 2 == 0
            one = sample(
                "stream", layers, [length], [0] if cold else [length - 10], 6 * length if cold else 600,
                host=cold_ms[2 + i // 200] / mean_ms,
            )  # fmt: skip
            stream.append(one | {"idle_ms": 30.0 - one["ms"]})
        state = [{"python_ms": 1.0, "cold_host_ms": ms} for ms in cold_ms]
        raw.append(depth | {"samples": fixed + stream, "machine_state": state})
    found = fit(raw, CONFIG, "made-up")
    means = {layers: ms["cold_host_ms"] for layers, ms in found.host_ms.items()}
    assert means == pytest.approx({"3": 1.15, "6": 1.15})
    assert max(found.after_idle_ms, default=0.0) == pytest.approx(0, abs=0.01)
    assert found.overhead_ms == pytest.approx(OVERHEAD, rel=0.01)
    assert found.eager_layer_ms == pytest.approx(EAGER_LAYER, rel=0.02)
    assert found.recompute_layer_ms == pytest.approx(list(FULL.values()), rel=0.01)


def test_a_missed_row_takes_what_it_took_alone() -> None:
    """Though the stream that misses more has a host of which the samples tell only half how slow it is."""
    raw = []
    for layers in (3, 6):
        depth, stream, state = measured(layers), [], [{"python_ms": 1.0, "cold_host_ms": 1.0}]
        for alpha, per_token, host in ((0.1, 8, 1.2), (0.8, 2, 0.8)):
            for i in range(200):
                length = LENGTHS[i % 3]
                one = sample("stream", layers, [length], [0], per_token * length, host=host)
                stream.append(one | {"alpha": alpha, "idle_ms": 30.0 + 1e-6 * i - one["ms"]})
            state += [{"python_ms": 1.0, "cold_host_ms": 1.0 + 0.5 * (host - 1.0)}] * 4
        whole = {"samples": depth["samples"] + stream, "machine_state": state[1:]}
        raw.append(depth | whole)
    found = fit(raw, CONFIG, "made-up")
    assert found.gather_gbps == pytest.approx(1e-6 * CONFIG.row_bytes / ROW, rel=1e-4)
    # With the row's time left to the fit it is 1.6 times what it is, and these are 20 and 11 % off.
    assert found.append_layer_ms == pytest.approx(list(FEW.values()), rel=0.01)
    assert found.recompute_layer_ms[-1] == pytest.approx(FULL[10_100], rel=0.05)


def test_a_host_that_takes_longer_for_missed_rows_is_not_slow() -> None:
    """Streams at two alphas: the host is as fast beside both, and takes 0.2 ms more where rows are missed."""
    raw = []
    for layers in (3, 6):
        depth, stream, state = measured(layers), [], [{"python_ms": 1.0, "cold_host_ms": 0.85}]
        for alpha, rows in ((0.1, 50_000), (0.8, 10_000)):
            for i in range(200):
                length = LENGTHS[i % 3]
                one = sample("stream", layers, [length], [0] if i % 2 else [length - 10], rows)
                stream.append(one | {"alpha": alpha, "idle_ms": 30.0 - one["ms"]})
            state += [{"python_ms": 1.0, "cold_host_ms": 0.6 + 5e-6 * rows}] * 4
        whole = {"samples": depth["samples"] + stream, "machine_state": state[1:]}
        raw.append(depth | whole)
    cold_host = ColdHost.of(raw)
    assert (cold_host.ms, cold_host.row_ms) == pytest.approx((0.6, 5e-6))
    assert cold_host.slowness(raw[0])[-400:] == pytest.approx(1.0)
    found = fit(raw, CONFIG, "made-up")
    assert found.host_ms["3"]["cold_host_row_ms"] == pytest.approx(5e-6)


EVICT = 0.15


def admitting(layers: int, hosts: dict[float, float]) -> dict[str, Any]:
    """Streams by alpha, each with a host so slow: half of the cold requests are stored, half of those evict.

    In the last one all are stored, and nine in ten evict.
    """
    depth, stream, state = measured(layers), [], list[dict[str, float]]()
    for alpha, host in hosts.items():
        most, evicted = alpha == max(hosts), 0
        for i in range(400):
            length, cold, place = LENGTHS[i % 3], i % 2, i // 6
            stored = bool(cold) and (most or place % 2 == 0)
            evicts = stored and (place % 10 != 0 if most else place % 4 == 0)
            cached = [0] if cold else [length - 10]
            one = sample("stream", layers, [length], cached, 5 * length, host=host, store=stored)
            one |= {"alpha": alpha, "evicted": int(evicts), "ms": one["ms"] + host * EVICT * evicts}
            stream.append(one | {"idle_ms": 30.0 + 1e-6 * i - one["ms"]})
            evicted += evicts
        cold_ms = host * (0.6 + EVICT * evicted / 200)
        state += [{"python_ms": 1.0, "cold_host_ms": cold_ms}] * 4
    state[0] = {"python_ms": 1.0, "cold_host_ms": 0.6}  # of what was timed before
    return depth | {"samples": depth["samples"] + stream, "machine_state": state}


@pytest.mark.parametrize("slowest", (0.1, 0.9))
def test_storing_and_evicting_are_told_apart_from_the_host(slowest: float) -> None:
    """A slow host beside the stream that evicts most, or least, is no dear or cheap eviction."""
    hosts = {alpha: 1.2 if alpha == slowest else 0.9 for alpha in (0.1, 0.8, 0.9)}
    found = fit([admitting(layers, hosts) for layers in (3, 6)], CONFIG, "made-up")
    assert found.evict_ms == pytest.approx(EVICT, rel=0.05)
    assert found.store_layer_ms == pytest.approx(STORE, rel=0.05)
    assert found.host_ms["6"]["cold_host_evict_ms"] == found.evict_ms
    assert found.host_ms["6"]["cold_host_ms"] == pytest.approx(0.6, rel=0.05)
    assert found.overhead_ms == pytest.approx(OVERHEAD, rel=0.02)


def test_where_the_host_does_not_tell_its_speed_the_batches_do() -> None:
    raw = [admitting(layers, dict.fromkeys((0.1, 0.8, 0.9), 1.0)) for layers in (3, 6)]
    found = fit([depth | {"machine_state": []} for depth in raw], CONFIG, "made-up")
    assert found.evict_ms == pytest.approx(EVICT, rel=0.02)
    assert found.store_layer_ms == pytest.approx(STORE, rel=0.02)


def test_times_between_batches_tell_what_choosing_costs() -> None:
    depth = streamed(6, [1.0] * 900)
    gaps = [0.07, 0.09, 0.22, 0.08, 0.2, 0.21, 3.0]
    for i, one in enumerate(depth["samples"][-900:]):
        one["idle_ms"] = gaps[i % len(gaps)] + 1e-9 * i
    found = fit([depth], CONFIG, "made-up")
    assert (found.loop_ms, found.choose_ms) == pytest.approx((0.08, 0.13))
    assert found.wake_ms == pytest.approx(0.3 - 0.08)


def test_jitter_keeps_the_order_of_a_stream() -> None:
    slow = [2.0 if i // 50 % 4 == 3 else 1.0 for i in range(200)]  # fifty slow ones in a row
    found = fit([streamed(6, slow)], CONFIG, "made-up")
    assert len(found.jitter) == len(found.jitter_cold) == len(slow)
    # Even ones are cold: at an odd place stands the last of them.
    assert found.jitter_cold == pytest.approx(slow, rel=0.02)
    assert found.jitter[1:] == pytest.approx(slow[:1] + slow[1:-1], rel=0.02)


def test_no_measurements_are_refused() -> None:
    with pytest.raises(ArgumentError, match="records"):
        fit([], CONFIG, "made-up")


def test_the_shipped_profile_is_the_fit_to_the_measurements_beside_it() -> None:
    """As the page on it says; the machine that fits may round otherwise."""
    records = Path(__file__).parents[2] / "docs" / "results" / "calibrate-h200"
    raw = [read_record(records / f"h200-{layers}-layers.json") for layers in (3, 6)]
    found = fit(raw, LiveConfig.load("h200"), "h200-live").to_json()
    shipped = NodeProfile.load("h200-live").to_json()
    for name in found.keys() - {"fit", "jitter", "jitter_cold", "host_ms"}:
        value = shipped[name]
        same = value if isinstance(value, str) else pytest.approx(value, rel=0.01)
        assert found[name] == same, name
