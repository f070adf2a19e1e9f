"""What the node tells of itself: Prometheus' text, read by its own parser, and the epochs as JSON."""

from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving_bridge.scoring import Overloaded
from serving_bridge.server.metrics import Metrics
from serving_bridge.status import EpochRecord
from tests.serving_bridge.server.fake_node import FakeNode, FakeStatus, record, running
from tests.serving_bridge.server.wire import good, send, with_input

Samples = dict[tuple[str, ...], float]


def samples(text: bytes) -> Samples:
    """Value by name and label values, labels in the order of their names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def scrape(node: FakeNode) -> Samples:
    answer = send(node, path="/metrics", method="GET")
    assert answer.status == 200 and answer.headers["content-type"].startswith(
        "text/plain; version=0.0.4"
    )
    return samples(answer.body)


def test_requests_are_counted_by_how_they_ended(node: FakeNode) -> None:
    before = scrape(node)
    send(node, good())
    send(node, with_input(1, shape=[9]))
    send(node, b" " * (node.scorer.limits.body_bytes + 1))
    node.scorer.raises = Overloaded("full", 1.0)
    send(node, good())
    after = scrape(node)
    for outcome in ("served", "invalid", "too_large", "overloaded"):
        key = ("hlem_requests_total", outcome, "rest")
        assert after[key] - before.get(key, 0.0) == 1.0
    served = ("hlem_request_seconds_count", "rest")
    assert after[served] - before.get(served, 0.0) == 1.0
    assert after[("hlem_in_flight_requests",)] == 0.0


def test_an_epoch_shows() -> None:
    status = FakeStatus()
    metrics = Metrics(status)
    status.records += [record(0), record(1, mode="shadow", state="burst", held="")]
    shown = samples(metrics.render())
    wanted: dict[str | tuple[str, ...], float] = {
        "hlem_alpha_target_ratio": 0.52, "hlem_alpha_resident_ratio": 0.48, "hlem_kv_hit_ratio": 0.625,
        "hlem_embedding_hit_ratio": 0.875, "hlem_epoch_p99_seconds": 0.025, "hlem_slo_seconds": 0.03,
        "hlem_queue_requests": 2, ("hlem_pool_pages", "embedding"): 48, ("hlem_pool_pages", "kv"): 44,
        ("hlem_pool_pages", "free"): 5, ("hlem_pool_pages", "pending"): 3, ("hlem_mode", "shadow"): 1,
        ("hlem_mode", "active"): 0, ("hlem_burst_state", "burst"): 1, ("hlem_burst_state", "normal"): 0,
        "hlem_refill_bytes_total": 2e6, "hlem_prefetch_bytes_total": 4e6, "hlem_completed_requests_total": 80,
        "hlem_history_users": 1234, "hlem_history_bytes": 3 * 2**20, "hlem_histories_removed_total": 14,
        "hlem_refused_requests_total": 6, "hlem_decision_seconds_count": 2, "hlem_decisions_held_total": 1,
    }  # fmt: skip
    for name, value in wanted.items():
        key = (name,) if isinstance(name, str) else name
        assert shown[key] == pytest.approx(value), name
    assert shown[("hlem_decision_seconds_sum",)] == pytest.approx(64e-6)


def test_an_epoch_without_sound_telemetry_shows_no_measurement() -> None:
    status = FakeStatus()
    metrics = Metrics(status)
    status.records += [
        record(0),
        record(1, duration_s=0.0, p99_ms=0.0, held="telemetry is missing"),
    ]
    shown = samples(metrics.render())
    for name in ("epoch_p99_seconds", "alpha_resident_ratio", "kv_hit_ratio"):
        assert np.isnan(shown[(f"hlem_{name}",)])
    assert np.isnan(shown[("hlem_pool_pages", "kv")])
    assert shown[("hlem_history_users",)] == 1234  # no measurement of requests
    assert shown[("hlem_epoch",)] == 1 and shown[("hlem_alpha_target_ratio",)] == pytest.approx(
        0.52
    )


def test_an_epoch_counts_once() -> None:
    status = FakeStatus()
    metrics = Metrics(status)
    status.records.append(record(0))
    for _ in range(3):
        metrics.update()
    assert samples(metrics.render())[("hlem_refill_bytes_total",)] == 1e6


def test_metrics_of_two_nodes_are_apart() -> None:
    first, second = Metrics(), Metrics()
    first.in_flight.set(3)
    assert samples(second.render())[("hlem_in_flight_requests",)] == 0.0


def epochs(node: FakeNode, query: str = "") -> Any:
    return send(node, path=f"/status{query}", method="GET")


def test_status_gives_the_epochs_after_one(node: FakeNode) -> None:
    assert epochs(node).json["epochs"] == []
    node.status.records += [record(epoch) for epoch in range(5)]
    assert [found["epoch"] for found in epochs(node).json["epochs"]] == [0, 1, 2, 3, 4]
    found = epochs(node, "?after=3").json["epochs"]
    assert [EpochRecord(**one) for one in found] == [record(4)]
    assert epochs(node, "?after=4").json["epochs"] == []


@pytest.mark.parametrize("after", ["x", "1.5", "-2", "", "1e3", "9" * 19, "%00", "\u0663"])
def test_status_refuses_what_is_no_epoch(node: FakeNode, after: str) -> None:
    assert epochs(node, f"?after={quote(after, safe='%')}").status == 400


def test_status_tells_a_restart_and_a_drain(node: FakeNode) -> None:
    told = epochs(node).json
    assert (told["ready"], told["draining"]) == (True, False)
    with running(FakeNode()) as other:
        # Epochs count from 0 in another process: by this a reader tells them apart.
        assert epochs(other).json["run"] != told["run"] == epochs(node).json["run"]
        other.server.dispatch.draining = True
        told = epochs(other).json
        assert (told["ready"], told["draining"]) == (False, True)
