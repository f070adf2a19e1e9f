"""The live node on a CPU: what it computes does not depend on what its caches hold."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from hlem_env.live.config import LiveConfig
from hlem_env.live.node import LiveNode
from hlem_env.live.pool import Owner
from hlem_env.live_scenario import live_workload
from hlem_env.scenario import Scenario
from hlem_env.workload.requests import Requests

TOLERANCE = 1e-4
"""Relative; scores are in float32 and sums go in another order."""
CONFIG = replace(
    LiveConfig.load("cpu-small"), pool_bytes=7 * 2**20, mean_history_tokens=100,
    max_history_tokens=160, rows_per_table=5000, emulated_link_gbps=None, token_budget=400,
)  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def some_requests(seconds: float, seed: int = 0, hot_share: float = 0.5) -> Requests:
    scenario = Scenario(steady_hot_share=hot_share)
    workload = live_workload(scenario, CONFIG, entries=20, speed=1.0)
    workload.reset(np.random.default_rng(seed), 0.0)
    return workload.take(seconds)


def node_with(alpha_centi: int) -> LiveNode:
    node = LiveNode(CONFIG)
    node.reset(10_000)
    node.move(alpha_centi)
    return node


def serve(node: LiveNode, requests: Requests) -> tuple[torch.Tensor, int, int]:
    """Scores of all, history tokens reused, rows hit."""
    scores, reused, hits = [], 0, 0
    while len(requests):
        count = node.first_batch(requests)
        done = node.execute(requests[:count], requests[count:], float(requests.arrival_s[0]))
        scores.append(done.scores)
        reused, hits = reused + int(done.reused.sum()), hits + done.rows_hit
        requests = requests[count:]
    return torch.cat(scores), reused, hits


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_scores_are_the_same_with_and_without_a_kv_cache() -> None:
    requests = some_requests(4.0)
    without, none, _ = serve(node_with(100), requests)
    cached, reused, hits = serve(node_with(40), requests)
    assert none == 0 and reused > 0.2 * requests.history_length.sum() and hits > 0
    assert distance(cached, without) < TOLERANCE


def test_scores_are_the_same_while_alpha_moves() -> None:
    requests = some_requests(5.0, seed=1)
    without, _, _ = serve(node_with(100), requests)
    node, scores, reused = node_with(50), [], 0
    for i, alpha_centi in enumerate((50, 80, 30, 0, 20, 100, 60, 10)):
        node.move(alpha_centi)
        part = requests[i * len(requests) // 8 : (i + 1) * len(requests) // 8]
        got, more, _ = serve(node, part)
        scores.append(got)
        reused += more
        assert node.pool.count(Owner.EMBEDDING) == node.pool.pages * alpha_centi // 100
    assert reused > 0
    assert distance(torch.cat(scores), without) < TOLERANCE


def test_scores_are_the_same_in_any_batches() -> None:
    requests = some_requests(2.0, seed=2)
    together, _, _ = serve(node_with(50), requests)
    node, alone = node_with(50), []
    for i in range(len(requests)):
        alone.append(node.execute(requests[i : i + 1], requests[:0], float(i)).scores)
    assert distance(torch.cat(alone), together) < TOLERANCE


def test_a_wrong_kv_page_or_row_shows_in_the_scores() -> None:
    requests = some_requests(2.5, seed=3, hot_share=0.9)
    first, second = requests[: len(requests) // 2], requests[len(requests) // 2 :]
    right = node_with(50)
    serve(right, first)
    expected, reused, _ = serve(right, second)
    assert reused > 0
    wrong_kv = node_with(50)
    serve(wrong_kv, first)
    for page in np.flatnonzero(wrong_kv.pool.owner == Owner.KV):
        blocks = wrong_kv.kv.blocks_per_page
        wrong_kv.kv.blocks[page * blocks : (page + 1) * blocks] *= -1
    assert distance(serve(wrong_kv, second)[0], expected) > 10 * TOLERANCE
    wrong_row = node_with(50)
    serve(wrong_row, first)
    wrong_row.embedding.state.slab.mul_(-1)
    assert distance(serve(wrong_row, second)[0], expected) > 10 * TOLERANCE


def test_a_batch_that_was_interrupted_can_be_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = some_requests(2.0, seed=4, hot_share=0.9)
    expected, reused, _ = serve(node_with(50), requests)
    node, half = node_with(50), len(requests) // 2
    first, _, _ = serve(node, requests[:half])

    def interrupted(*_: object) -> torch.Tensor:
        raise KeyboardInterrupt

    count = node.first_batch(requests[half:])
    with monkeypatch.context() as patch:
        patch.setattr(node.model, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            node.execute(requests[half : half + count], requests[:0], 10.0)
    second, reused_again, _ = serve(node, requests[half:])
    assert distance(torch.cat([first, second]), expected) < TOLERANCE
    assert 0 < reused_again < reused


def test_a_probe_leaves_the_caches_empty() -> None:
    node = LiveNode(CONFIG)
    assert node.probe_ms(repeats=3) > 0
    assert node.kv.stats().entries == 0 and node.embedding.resident_rows == 0


def test_a_rehearsal_evicts_in_both_caches_and_leaves_them_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(CONFIG, pool_bytes=28 * 2**20, max_history_tokens=600, token_budget=2000)
    node, evicted, refused = LiveNode(config), list[int](), list[int]()
    reset = node.reset

    def watched(persistent_users: int) -> None:
        evicted.append(node.embedding.counters().evicted)
        refused.append(node.kv.not_admitted)
        reset(persistent_users)

    monkeypatch.setattr(node, "reset", watched)
    node._rehearse()
    assert len(evicted) == 1 and evicted[0] > node.rows_in_pool // node.pool.pages
    # Some request found the KV cache full and was weighed against what is in it.
    assert refused[0] > 0
    assert node.kv.stats().entries == 0 and node.embedding.resident_rows == 0


def test_closing_twice_is_allowed() -> None:
    node = LiveNode(CONFIG)
    node.close()
    node.close()


def test_batches_keep_to_the_token_budget_and_cached_tokens_do_not_count() -> None:
    node, requests = node_with(0), some_requests(8.0, seed=4, hot_share=0.9)
    most, computed = 0, []
    while len(requests):
        count = node.first_batch(requests)
        done = node.execute(requests[:count], requests[:0], float(requests.arrival_s[0]))
        computed.append((count, int(done.computed.sum())))
        most = max(most, int(requests.history_length[:count].sum()))
        requests = requests[count:]
    assert all(tokens <= CONFIG.token_budget for count, tokens in computed if count > 1)
    assert most > CONFIG.token_budget  # would not have fitted, had it not been cached


def test_with_graphs_alone_a_batch_ends_before_a_request_that_shares_none() -> None:
    """Two whose histories are cached, a stranger, and the first two again."""
    config = replace(CONFIG, pool_bytes=28 * 2**20, max_history_tokens=600, token_budget=3000)
    node = LiveNode(replace(config, only_graphs=True))
    node.reset(100)
    node.move(20)
    length = np.array([400, 400, 400, 400, 400])
    assert 400 + CONFIG.candidates > 256 >= CONFIG.candidates
    requests = Requests(np.zeros(5), np.array([1, 2, 3, 1, 2]), length, np.zeros(5, np.int64))
    assert node.first_batch(requests) == 1  # nothing is cached yet
    for i in (0, 1):
        node.execute(requests[i : i + 1], requests[:0], 0.1 * i)
    assert node.first_batch(requests) == 2
    assert node.first_batch(requests[2:]) == 1
    assert node.first_batch(requests[3:]) == 2


def test_prefetch_is_planned_beside_enough_compute_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a request of so many tokens and more; whoever waits."""
    config = replace(CONFIG, pool_bytes=28 * 2**20, max_history_tokens=600, layers=2)
    node = LiveNode(replace(config, prefetch_beside=2 * (300 + CONFIG.candidates)))
    planned = []

    def watched(waiting: Requests, *_: object) -> bool:
        planned.append(len(waiting))
        return False

    monkeypatch.setattr(node, "_prefetch", watched)
    node.reset(100)
    node.move(20)
    length = np.array([299, 300, 50, 60])
    requests = Requests(np.zeros(4), np.arange(4), length, length)
    for i in range(3):
        node.execute(requests[i : i + 1], requests[i + 1 :], 0.0)
    assert planned == [0, 2, 0]


def test_a_batch_runs_with_the_configured_threads_and_leaves_the_process_its_own() -> None:
    node, requests = node_with(50), some_requests(1.0)
    seen = []
    forward = node.model.forward

    def watched(*arguments: object) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return forward(*arguments)  # type: ignore[arg-type]

    node.model.forward = watched  # type: ignore[method-assign]
    torch.set_num_threads(2)
    node.execute(requests[:1], requests[:0], 0.0)
    assert seen == [CONFIG.cpu_threads] == [1]
    assert torch.get_num_threads() == 2


def test_the_hosts_time_is_told_by_kind_of_batch_and_anew_each_time() -> None:
    """Nothing cached, then something; of batches of several nothing is told."""
    node = node_with(50)

    def visit(users: int, tokens: int) -> int:
        history, new = np.full(users, tokens), np.full(users, 10)
        both = Requests(np.zeros(users), np.arange(users), history, new)
        return int(node.execute(both, both[:0], 0.0).reused.sum())

    assert visit(1, 100) == 0
    first = node.take_host_ms()
    assert first["cold_host_ms"] > 0 == first["cached_host_ms"]
    visit(1, 110)  # it is admitted
    node.take_host_ms()
    assert visit(1, 120) > 0
    second = node.take_host_ms()
    assert second["cached_host_ms"] > 0 == second["cold_host_ms"]
    visit(2, 130)
    assert set(node.take_host_ms().values()) == {0.0}
