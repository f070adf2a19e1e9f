"""The HSTU network: cached and full passes agree, candidates are independent, weights travel."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hlem_env.errors import ArgumentError, ArtefactError
from hlem_env.live.attention import PagedKv
from hlem_env.live.hstu import Hstu, HstuBatch, HstuConfig, preset

TOLERANCE = 2e-2
SMALL = preset("small")


def tokens_for(count: int, config: HstuConfig, seed: int = 0) -> Tensor:
    return torch.randn(
        count, config.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def pages_for(
    config: HstuConfig, histories: list[int], dtype: torch.dtype, device: str = "cpu"
) -> PagedKv:
    """Shuffled pages with room for the histories, NaN inside; blocks as large as the default's share."""
    block_tokens, blocks_per_page = (128, 8) if config.dim == 512 else (16, 4)
    needs = [
        math.ceil(math.ceil(n / block_tokens) * config.layers / blocks_per_page) for n in histories
    ]
    free = torch.randperm(sum(needs) + 2, generator=torch.Generator().manual_seed(3)).tolist()
    table = torch.full((len(needs), max(needs)), -1, dtype=torch.int32)
    for row, need in zip(table, needs, strict=True):
        row[:need] = torch.tensor([free.pop() for _ in range(need)], dtype=torch.int32)
    shape = (2, block_tokens, config.heads, config.head_dim)
    blocks = torch.full(
        ((sum(needs) + 2) * blocks_per_page, *shape), math.nan, dtype=dtype, device=device
    )
    none = torch.zeros(len(needs), dtype=torch.int32, device=device)
    return PagedKv(blocks, table.to(device), none, 0, config.layers, blocks_per_page)


def run(
    model: Hstu,
    histories: list[Tensor],
    candidates: list[Tensor],
    cached: list[int] | None = None,
    kv: PagedKv | None = None,
) -> Tensor:
    """Scores, on the CPU in float64, of requests whose first `cached` history tokens are in pages."""
    weight = model.positions
    old = cached or [0] * len(histories)
    new = [history[n:] for history, n in zip(histories, old, strict=True)]
    tokens = torch.cat([part for pair in zip(new, candidates, strict=True) for part in pair])
    batch = HstuBatch.build(
        [len(part) for part in new],
        [len(part) for part in candidates],
        old,
        model.config,
        weight.device,
    )
    return model(tokens.to(weight.device, weight.dtype), batch, kv).double().cpu()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    error = float((actual - expected).norm() / expected.norm())
    return math.inf if math.isnan(error) else error


def by_hand(model: Hstu, history: Tensor, candidates: Tensor) -> Tensor:
    """The formulas of one request, written with whole matrices."""
    config, weights = model.config, model.state_dict()
    size, total = len(history), len(history) + len(candidates)
    width = config.heads * config.head_dim

    def norm(x: Tensor, epsilon: float) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()

    mask = torch.tril(torch.ones(total, total, dtype=torch.float64))
    mask[size:, size:] = torch.eye(len(candidates))
    positions = torch.arange(total).clamp(max=size)
    x = torch.cat([history, candidates]) + weights["positions"][positions]
    for layer in range(config.layers):
        z = norm(x, config.norm_epsilon) @ weights[f"layers.{layer}.uvqk"].T
        u, v, q, k = (z * torch.sigmoid(z)).split(width, 1)
        parts = []
        for head in range(config.heads):
            own = slice(head * config.head_dim, (head + 1) * config.head_dim)
            score = q[:, own] @ k[:, own].T / math.sqrt(config.head_dim)
            weight = score * torch.sigmoid(score) / config.scaling_seqlen * mask
            parts.append(weight @ v[:, own])
        attended = norm(torch.cat(parts, 1), config.attention_norm_epsilon)
        x = x + (u * attended) @ weights[f"layers.{layer}.output"].T
    return norm(x[size:], config.norm_epsilon) @ weights["score_weight"] + weights["score_bias"]


def test_network_follows_the_formulas() -> None:
    model = Hstu(SMALL, seed=1, dtype=torch.float64)
    history, candidates = tokens_for(40, SMALL), tokens_for(9, SMALL, 1)
    expected = by_hand(model, history, candidates)
    torch.testing.assert_close(run(model, [history], [candidates]), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("layers", [2, 3])
def test_cached_equals_full(layers: int) -> None:
    """A history that grows over three visits, beside one that is not admitted."""
    config = HstuConfig(layers, 64, 2, 32, 1024, 1024)
    model = Hstu(config, dtype=torch.float64)
    grows, other = tokens_for(150, config), tokens_for(33, config, 1)
    candidates = [tokens_for(12, config, 2), tokens_for(5, config, 3)]
    kv = pages_for(config, [150, 33], torch.float64)
    kv.page_table[1] = -1
    seen = 0
    for length in (37, 80, 80, 150):
        cached = run(model, [grows[:length], other], candidates, [seen, 0], kv)
        full = run(model, [grows[:length], other], candidates)
        assert relative_error(cached, full) < 1e-10
        seen = length


def test_one_wrong_page_shows() -> None:
    """A page overwritten by values as large as its own moves the scores by ten tolerances."""
    model = Hstu(SMALL, dtype=torch.float64)
    history, candidates = tokens_for(150, SMALL), tokens_for(50, SMALL, 2)
    kv = pages_for(SMALL, [150], torch.float64)
    full = run(model, [history], [candidates])
    run(model, [history[:140]], [candidates], [0], kv)
    assert relative_error(run(model, [history], [candidates], [140], kv), full) < 1e-10
    page = int(kv.page_table[0, 1]) * kv.blocks_per_page
    own = kv.blocks[page : page + kv.blocks_per_page]
    scale = own.pow(2).mean().sqrt()
    own.copy_(torch.randn(own.shape, generator=torch.Generator().manual_seed(9)) * scale)
    wrong = run(model, [history], [candidates], [140], kv)
    assert relative_error(wrong, full) > 10 * TOLERANCE


def test_one_wrong_row_shows() -> None:
    """One table row of ten, in one candidate, moves its score by ten tolerances."""
    model = Hstu(SMALL, dtype=torch.float64)
    rows = tokens_for(50 * 10, SMALL, 2).view(50, 10, -1) / math.sqrt(10)
    history, candidates = tokens_for(100, SMALL), rows.sum(1)
    right = run(model, [history], [candidates])
    rows[:, 3] = rows[:, 3].roll(1, 0)
    wrong = run(model, [history], [rows.sum(1)])
    typical = right.pow(2).mean().sqrt()
    assert float((wrong - right).abs().median() / typical) > 10 * TOLERANCE


def test_candidate_is_scored_alone() -> None:
    """Neither the other candidates nor the other requests of the batch change a score."""
    model = Hstu(SMALL, dtype=torch.float64)
    history, candidates = tokens_for(70, SMALL), tokens_for(20, SMALL, 1)
    together = run(model, [history], [candidates])
    reverse = run(model, [history], [candidates.flip(0)]).flip(0)
    torch.testing.assert_close(reverse, together, rtol=1e-10, atol=1e-12)
    alone = run(model, [history], [candidates[7:8]])
    torch.testing.assert_close(alone, together[7:8], rtol=1e-10, atol=1e-12)
    beside = run(
        model,
        [tokens_for(90, SMALL, 5), history, history[:0]],
        [tokens_for(3, SMALL, 6), candidates, candidates[:2]],
    )
    torch.testing.assert_close(beside[3:23], together, rtol=1e-10, atol=1e-12)


def test_empty_requests() -> None:
    model = Hstu(SMALL)
    none = tokens_for(0, SMALL)
    assert run(model, [none, none], [none, none]).shape == (0,)
    scores = run(model, [none, tokens_for(4, SMALL)], [tokens_for(3, SMALL, 1), none])
    assert scores.shape == (3,)
    assert scores.isfinite().all()


def test_batch_layout() -> None:
    batch = HstuBatch.build([3, 0, 2], [2, 1, 0], [10, 0, 4], SMALL)
    assert batch.offsets.tolist() == [0, 5, 6, 8]
    assert batch.positions.tolist() == [10, 11, 12, 13, 13, 0, 4, 5]
    assert batch.candidate_rows.tolist() == [3, 4, 5]
    assert batch.cached.tolist() == [10, 0, 4]
    assert batch.max_new == 5


def test_too_long_history_is_refused() -> None:
    HstuBatch.build([24], [100], [1000], SMALL)
    with pytest.raises(ArgumentError, match="1024"):
        HstuBatch.build([25], [100], [1000], SMALL)
    with pytest.raises(ArgumentError):
        HstuBatch.build([-1], [1], None, SMALL)
    with pytest.raises(ArgumentError):
        HstuBatch.build([1, 2], [1], None, SMALL)


def test_wrong_tokens_and_cache_are_refused() -> None:
    model = Hstu(SMALL)
    batch = HstuBatch.build([4], [2], None, SMALL)
    with pytest.raises(ArgumentError, match="tokens"):
        model(torch.zeros(5, 64), batch)
    with pytest.raises(ArgumentError, match="tokens"):
        model(torch.zeros(6, 64, dtype=torch.float64), batch)
    kv = pages_for(SMALL, [4], torch.float32)._replace(layers=3)
    with pytest.raises(ArgumentError, match="layers"):
        model(torch.zeros(6, 64), batch, kv)


@pytest.mark.parametrize("wrong", [{"layers": 0}, {"dim": 1.5}, {"norm_epsilon": 0.0}])
def test_wrong_sizes_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ArgumentError):
        HstuConfig(**wrong)  # type: ignore[arg-type]


def test_half_precision_without_range_is_refused() -> None:
    with pytest.raises(ArgumentError, match="bfloat16"):
        Hstu(SMALL, dtype=torch.float16)


def test_presets() -> None:
    assert (preset("6-layer").dim, preset("6-layer").layers, preset("3-layer").layers) == (
        512,
        6,
        3,
    )
    with pytest.raises(ArgumentError, match="small"):
        preset("huge")


def test_weights_come_from_the_seed_or_a_file(tmp_path: Path) -> None:
    model = Hstu(SMALL, seed=4)
    same, other = Hstu(SMALL, seed=4), Hstu(SMALL, seed=5)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True)
    )
    assert not torch.equal(model.positions, other.positions)
    path = tmp_path / "model.safetensors"
    model.save(path)
    loaded = Hstu.load(path, SMALL)
    history, candidates = tokens_for(30, SMALL), tokens_for(4, SMALL, 1)
    assert torch.equal(run(loaded, [history], [candidates]), run(model, [history], [candidates]))


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with pytest.raises(ArtefactError, match="model"):
        Hstu.load(path)
    path.write_bytes(b"no model")
    with pytest.raises(ArtefactError, match="model"):
        Hstu.load(path)
    Hstu(SMALL).save(path)
    with pytest.raises(ArtefactError, match="wanted"):
        Hstu.load(path, preset("6-layer"))
    broken = Hstu(SMALL)
    del broken.layers[1].output
    broken.save(path)
    with pytest.raises(ArtefactError, match="output"):
        Hstu.load(path)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["3-layer", "6-layer"])
def test_bf16_on_the_device_matches_float32(name: str) -> None:
    """Full and cached, against the network in float32 on the device; a wrong page is far off."""
    config = preset(name)
    exact = Hstu(config, device="cuda", dtype=torch.float32)
    model = Hstu(config, device="cuda", dtype=torch.bfloat16)
    histories = [tokens_for(n, config, n).bfloat16() for n in (1500, 0, 700)]
    candidates = [tokens_for(n, config, n).bfloat16() for n in (100, 3, 40)]
    expected = run(exact, histories, candidates)
    assert relative_error(run(model, histories, candidates), expected) < TOLERANCE
    kv = pages_for(config, [1500, 0, 700], torch.bfloat16, "cuda")
    run(model, [h[: len(h) * 4 // 5] for h in histories], candidates, [0, 0, 0], kv)
    cached = run(model, histories, candidates, [1200, 0, 560], kv)
    assert relative_error(cached, expected) < TOLERANCE
    page = int(kv.page_table[0, 1]) * kv.blocks_per_page
    own = kv.blocks[page : page + kv.blocks_per_page]
    own.copy_(torch.randn_like(own) * own.float().pow(2).mean().sqrt())
    wrong = run(model, histories, candidates, [1200, 0, 560], kv)[:100]
    assert relative_error(wrong, expected[:100]) > 10 * TOLERANCE


@pytest.mark.gpu
def test_forward_never_waits_for_the_device() -> None:
    config = preset("3-layer")
    model = Hstu(config, device="cuda", dtype=torch.bfloat16)
    tokens = tokens_for(600, config).to("cuda", torch.bfloat16)
    kv = pages_for(config, [300, 250], torch.bfloat16, "cuda")
    batch = HstuBatch.build([300, 150], [100, 50], [0, 0], config, "cuda")
    model(tokens, batch, kv)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = HstuBatch.build([300, 150], [100, 50], [0, 0], config, "cuda")
        model(tokens, batch, kv)
    finally:
        torch.cuda.set_sync_debug_mode("default")
