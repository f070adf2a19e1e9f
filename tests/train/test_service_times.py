"""What is noted of a served stream, on a node of a few megabytes."""

from dataclasses import replace
from pathlib import Path

import pytest

from hlem_env.errors import ArtefactError
from hlem_env.live.config import LiveConfig
from hlem_env.live.node import LiveNode
from hlem_env.live.time_source import CpuTime
from train import service_times
from train.calibrate import columns, read_record, rows
from train.service_times import Bench, run_streams

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_batch_of_a_stream_is_noted_with_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(
        LiveConfig.load("cpu-small"), pool_bytes=7 * 2**20, layers=1, mean_history_tokens=60,
        max_history_tokens=160, rows_per_table=20_000, emulated_link_gbps=None, epoch_seconds=0.25,
        hot_share=(0.3,), requests_per_s=(70.0,), probe_ms=5.0,
    )  # fmt: skip
    monkeypatch.setattr(service_times, "STREAMS", (("lru", 90),))
    node = LiveNode(config, "lru", time_source=CpuTime())
    counted, evicted = [], []
    execute = LiveNode.execute

    def counting(self, *args):  # type: ignore[no-untyped-def]
        before, evictions = self.embedding.counters(), self.kv.evictions
        done = execute(self, *args)
        evicted.append(self.kv.evictions - evictions)
        counted.append(self.embedding.counters() - before)
        return done

    monkeypatch.setattr(LiveNode, "execute", counting)
    bench = Bench(node)
    states = run_streams(bench, 0.5)
    noted = bench.samples
    assert len(states) == 4  # two epochs without notes, two with
    assert len(noted) > 5
    assert [one.missed_rows for one in noted] == [
        one.unique_misses for one in counted[-len(noted) :]
    ]
    assert [one.hit_rows for one in noted] == [one.hit for one in counted[-len(noted) :]]
    assert [one.evicted for one in noted] == evicted[-len(noted) :]
    assert max(evicted) > 0
    # Under LRU whatever is new is stored.
    assert [one.stored for one in noted] == [sum(one.history) - sum(one.cached) for one in noted]
    assert all(one.kind == "stream" and one.alpha == 0.9 and one.ms > 0 for one in noted)
    assert noted[0].idle_ms == 0 and max(one.idle_ms for one in noted) > 0
    node.close()


def test_samples_are_kept_as_columns() -> None:
    samples = [{"kind": "cold", "cached": [0, 7]}, {"kind": "hot 1", "cached": [9]}]
    assert rows(columns(samples)) == samples


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"samples": [1, 2]}', '{"samples": {"a": [1], "b": []}}']
)
def test_what_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(ArtefactError, match="no record"):
        read_record(tmp_path / "record.json")
