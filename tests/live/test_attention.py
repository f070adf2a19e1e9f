"""HSTU's attention: the reference against the formula, the kernels against the reference."""

import math

import pytest
import torch
from torch import Tensor

from hlem_env.errors import ArgumentError
from hlem_env.live.attention import PagedKv, append_history, hstu_attention
from hlem_env.live.kernels import attention_reference

SCALING_SEQLEN = 512


class Case:
    """A batch with random q, k, v and, where `cached` is given, pages that are NaN but for its tokens."""

    def __init__(
        self,
        new: list[int],
        candidates: list[int],
        cached: list[int] | None = None,
        heads: int = 2,
        head_dim: int = 32,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
        block_tokens: int = 8,
        blocks_per_page: int = 4,
        layers: int = 3,
        seed: int = 0,
    ) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.shape, self.dtype, self.device = (heads, head_dim), dtype, device
        self.new, self.cached = new, cached or [0] * len(new)
        self.offsets = self._offsets(new)
        self.candidates = torch.tensor(candidates, dtype=torch.int32, device=device)
        # Like a layer's projection: rows of u, v, q, k beside each other.
        rows = self.random(sum(new), 4)
        self.q, self.k, self.v = rows[:, 2], rows[:, 3], rows[:, 1]
        self.old_k, self.old_v = self.random(sum(self.cached)), self.random(sum(self.cached))
        self.cache = None
        if cached is not None:
            self.cache = self._pages(block_tokens, blocks_per_page, layers)
            empty = self.cache._replace(cached=torch.zeros_like(self.cache.cached))
            append_history(
                self.old_k,
                self.old_v,
                self._offsets(cached),
                torch.zeros_like(self.candidates),
                empty,
            )

    def random(self, *rows: int) -> Tensor:
        shape = (*rows, *self.shape)
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)

    def attend(self, **changes: object) -> Tensor:
        return hstu_attention(
            self.q,
            self.k,
            self.v,
            self.offsets,
            self.candidates,
            scaling_seqlen=SCALING_SEQLEN,
            cache=self.cache,
            **changes,  # type: ignore[arg-type]
        )

    def expected(self) -> Tensor:
        """The reference on the same values in float32, by sequence without any cache, on new rows."""
        out = []
        old_from = new_from = 0
        for new, old, candidates in zip(
            self.new, self.cached, self.candidates.tolist(), strict=True
        ):
            now, before = slice(new_from, new_from + new), slice(old_from, old_from + old)
            k = torch.cat([self.old_k[before], self.k[now]]).float()
            v = torch.cat([self.old_v[before], self.v[now]]).float()
            q = torch.zeros_like(k)
            q[old:] = self.q[now]
            result = attention_reference.attend(
                q,
                k,
                v,
                torch.tensor([0, old + new]),
                torch.tensor([candidates]),
                SCALING_SEQLEN,
                self.shape[1] ** -0.5,
                None,
            )
            out.append(result[old:])
            old_from, new_from = old_from + old, new_from + new
        return torch.cat(out)

    def _offsets(self, lengths: list[int]) -> Tensor:
        ends = torch.tensor([0, *lengths]).cumsum(0)
        return ends.to(self.device, torch.int32)

    def _pages(self, block_tokens: int, blocks_per_page: int, layers: int) -> PagedKv:
        needs = [
            math.ceil(math.ceil((old + new) / block_tokens) * layers / blocks_per_page)
            for old, new in zip(self.cached, self.new, strict=True)
        ]
        pages = sum(needs) + 3
        free = torch.randperm(pages, generator=torch.Generator().manual_seed(5)).tolist()
        table = torch.full((len(needs), max(needs, default=0)), -1, dtype=torch.int32)
        for row, need in zip(table, needs, strict=True):
            row[:need] = torch.tensor([free.pop() for _ in range(need)])
        blocks = torch.full(
            (pages * blocks_per_page, 2, block_tokens, *self.shape),
            math.nan,
            dtype=self.dtype,
            device=self.device,
        )
        cached = torch.tensor(self.cached, dtype=torch.int32, device=self.device)
        return PagedKv(blocks, table.to(self.device), cached, 1, layers, blocks_per_page)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Frobenius, NaN counted as infinite."""
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    return math.inf if torch.isnan(error) else float(error)


def worst_error(case: Case, actual: Tensor) -> float:
    """The largest relative error of any sequence."""
    pairs = zip(
        actual.split(case.new),
        case.expected().split(case.new),
        strict=True,
    )
    return max(relative_error(ours, theirs) for ours, theirs in pairs if len(ours))


def by_hand(q: Tensor, k: Tensor, v: Tensor, history: int) -> Tensor:
    """One sequence without cache, one query and head at a time: [n, heads, head_dim]."""
    out = torch.zeros_like(q)
    for i in range(q.shape[0]):
        seen = {*range(min(i + 1, history)), i}
        for head in range(q.shape[1]):
            for j in sorted(seen):
                score = float(q[i, head] @ k[j, head]) / math.sqrt(q.shape[2])
                weight = score / (1 + math.exp(-score)) / SCALING_SEQLEN
                out[i, head] += weight * v[j, head]
    return out


@pytest.mark.parametrize("candidates", [0, 3, 9])
def test_reference_follows_the_formula(candidates: int) -> None:
    case = Case([9], [candidates])
    expected = by_hand(case.q, case.k, case.v, 9 - candidates)
    torch.testing.assert_close(case.attend(), expected, rtol=1e-12, atol=1e-15)


def test_reference_in_pieces_of_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([30], [7], [20])
    whole = case.attend()
    monkeypatch.setattr(attention_reference, "MAX_SCORES", 300)
    torch.testing.assert_close(case.attend(), whole, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("seed", range(5))
def test_cached_equals_full(seed: int) -> None:
    """History split anywhere between pages and new tokens gives the result of the whole."""
    whole = Case([57, 0, 23], [11, 0, 5], seed=seed)
    split = Case([57, 0, 23], [11, 0, 5], seed=seed)
    full = whole.attend().split(whole.new)
    for old in (1, 8, 17, 18):
        split.new, split.cached = [57 - old, 0, 23 - old], [old, 0, old]
        split.old_k = torch.cat([whole.k[:old], whole.k[57 : 57 + old]])
        split.old_v = torch.cat([whole.v[:old], whole.v[57 : 57 + old]])
        rows = torch.cat([torch.arange(old, 57), torch.arange(57 + old, 80)])
        split.q, split.k, split.v = whole.q[rows], whole.k[rows], whole.v[rows]
        split.offsets = split._offsets(split.new)
        split.cache = split._pages(8, 4, 3)
        append_history(
            split.old_k,
            split.old_v,
            split._offsets(split.cached),
            torch.zeros_like(split.candidates),
            split.cache._replace(cached=torch.zeros_like(split.cache.cached)),
        )
        parts = split.attend().split(split.new)
        for part, expected in zip(parts, full, strict=True):
            tail = expected[len(expected) - len(part) :]
            torch.testing.assert_close(part, tail, rtol=1e-10, atol=1e-13)


def test_append_writes_new_history_and_nothing_else() -> None:
    case = Case([20, 6, 9], [4, 6, 0], [13, 5, 0])
    assert case.cache is not None
    case.cache.page_table[2] = -1  # not admitted
    before = case.cache.blocks.clone()
    append_history(case.k, case.v, case.offsets, case.candidates, case.cache)
    kept = attention_reference.cached_tokens(case.cache, 0, 29)
    assert torch.equal(kept[0, :13], case.old_k[:13])
    assert torch.equal(kept[0, 13:], case.k[:16])
    assert torch.equal(kept[1, 13:], case.v[:16])
    changed = before.nan_to_num(7.0) != case.cache.blocks.nan_to_num(7.0)
    assert int(changed.any(dim=(3, 4)).sum()) == 2 * 16


def test_candidates_do_not_see_each_other() -> None:
    case = Case([20], [5], [9])
    alone = case.attend()
    case.k[16:], case.v[16:], case.q[16:] = case.random(4), case.random(4), case.random(4)
    assert torch.equal(case.attend()[:16], alone[:16])


def test_sequences_do_not_see_each_other() -> None:
    together = Case([20, 7, 15], [5, 0, 15], [9, 0, 4])
    expected = together.attend().split(together.new)
    together.k[:20], together.v[:20], together.q[:20] = 0, 0, 0
    torch.testing.assert_close(together.attend()[20:27], expected[1], rtol=1e-12, atol=1e-15)
    assert torch.equal(together.attend()[27:], expected[2])


@pytest.mark.parametrize("new", [[], [0], [0, 0]])
def test_no_tokens(new: list[int]) -> None:
    for cached in (None, [3] * len(new)):
        case = Case(new, [0] * len(new), cached)
        assert case.attend().shape == (0, 2, 32)
        if case.cache is not None:
            append_history(case.k, case.v, case.offsets, case.candidates, case.cache)


def test_wrong_arguments_are_refused() -> None:
    case = Case([20, 7], [5, 0], [9, 3])
    assert case.cache is not None
    good = {
        "q": case.q,
        "k": case.k,
        "v": case.v,
        "offsets": case.offsets,
        "candidates": case.candidates,
        "scaling_seqlen": 8,
        "cache": case.cache,
    }
    cache = case.cache
    for name, value in (
        ("q", case.q[0]),
        ("k", case.k[:5]),
        ("v", case.v.float()),
        ("v", case.v.transpose(1, 2).contiguous().transpose(1, 2)),
        ("offsets", case.offsets.long()),
        ("offsets", case.offsets[:2]),
        ("candidates", case.candidates.float()),
        ("candidates", case.candidates[:, None]),
        ("scaling_seqlen", 0),
        ("mask", "none"),
        ("max_new", 0),
        ("cache", cache._replace(blocks=cache.blocks.float())),
        ("cache", cache._replace(blocks=cache.blocks[:, :1])),
        ("cache", cache._replace(page_table=cache.page_table[:1])),
        ("cache", cache._replace(cached=cache.cached.long())),
        ("cache", cache._replace(layer=3)),
        ("cache", cache._replace(blocks_per_page=0)),
    ):
        with pytest.raises(ArgumentError):
            hstu_attention(**{**good, name: value})  # type: ignore[arg-type]


def test_history_without_pages_is_refused() -> None:
    case = Case([20], [5], [9])
    assert case.cache is not None
    case.cache.page_table.fill_(-1)
    with pytest.raises(ArgumentError, match="page"):
        case.attend()


NEW = [0, 1, 130, 700, 517, 128, 64, 1000, 200, 3]
CANDIDATES = [0, 1, 100, 100, 0, 0, 64, 300, 200, 1]
CACHED = [0, 0, 1000, 0, 77, 128, 640, 333, 0, 2900]


def random_batch(seed: int, device: str = "cuda", **sizes: int) -> Case:
    """Lengths from the seed: a few sequences, half of them with cache, some empty."""
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 9, (), generator=generator))
    new = torch.randint(0, 700, (count,), generator=generator)
    new *= torch.rand(count, generator=generator) < 0.9
    candidates = (torch.rand(count, generator=generator) * 1.4 - 0.2).clamp(0, 1) * new
    cached = torch.randint(0, 3000, (count,), generator=generator)
    cached *= torch.rand(count, generator=generator) < 0.5
    if seed % 3 == 0:
        cached = None
    return Case(
        new.tolist(),
        candidates.int().tolist(),
        None if cached is None else cached.tolist(),
        dtype=torch.bfloat16,
        device=device,
        seed=seed,
        **sizes,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [None, CACHED])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_match_the_reference(
    head_dim: int, dtype: torch.dtype, cached: list[int] | None
) -> None:
    case = Case(
        NEW,
        CANDIDATES,
        cached,
        heads=4,
        head_dim=head_dim,
        dtype=dtype,
        device="cuda",
        block_tokens=128,
        blocks_per_page=8,
    )
    for max_new in (None, 1000):
        assert worst_error(case, case.attend(max_new=max_new)) < 5e-3


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_kernels_match_on_random_batches(seed: int) -> None:
    case = random_batch(seed, heads=2, head_dim=64, block_tokens=(32, 128)[seed % 2])
    if sum(case.new):
        assert worst_error(case, case.attend()) < 5e-3


@pytest.mark.gpu
def test_kernel_append_equals_reference() -> None:
    case = Case(
        NEW, CANDIDATES, CACHED, 3, 64, torch.bfloat16, "cuda", block_tokens=128, blocks_per_page=8
    )
    assert case.cache is not None
    case.cache.page_table[3] = -1
    theirs = case.cache._replace(blocks=case.cache.blocks.clone())
    append_history(case.k, case.v, case.offsets, case.candidates, case.cache)
    attention_reference.append(case.k, case.v, case.offsets, case.candidates, theirs)
    assert torch.equal(case.cache.blocks.view(torch.int16), theirs.blocks.view(torch.int16))


@pytest.mark.gpu
def test_many_programs_a_tile_give_the_same_result_every_time() -> None:
    case = Case([300], [100], [15_000], 8, 64, torch.bfloat16, "cuda", 128, 8)
    first = case.attend(max_new=300)
    assert worst_error(case, first) < 5e-3
    for _ in range(5):
        assert torch.equal(case.attend(max_new=300), first)


@pytest.mark.gpu
@pytest.mark.parametrize("with_cache", [False, True])
def test_rows_past_two_to_the_31(with_cache: bool) -> None:
    """A sequence of candidates without history costs little and pushes the next one far."""
    far = 2**31 // (4 * 2 * 64) + 1000
    small = Case([300], [100], [700], 2, 64, torch.bfloat16, "cuda", 128, 8)
    if not with_cache:
        small.cache, small.cached = None, [0]
    rows = torch.zeros(far + 300, 4, 2, 64, dtype=torch.bfloat16, device="cuda")
    rows[far:, 2], rows[far:, 3], rows[far:, 1] = small.q, small.k, small.v
    offsets = torch.tensor([0, far, far + 300], dtype=torch.int32, device="cuda")
    candidates = torch.tensor([far, 100], dtype=torch.int32, device="cuda")
    cache = small.cache
    if cache is not None:
        table = torch.cat([torch.full_like(cache.page_table, -1), cache.page_table])
        none = torch.zeros_like(cache.cached)
        cache = cache._replace(page_table=table, cached=torch.cat([none, cache.cached]))
    out = hstu_attention(
        rows[:, 2],
        rows[:, 3],
        rows[:, 1],
        offsets,
        candidates,
        scaling_seqlen=SCALING_SEQLEN,
        cache=cache,
    )
    assert worst_error(small, out[far:]) < 5e-3


@pytest.mark.gpu
def test_blocks_past_two_to_the_31() -> None:
    case = Case([300], [100], [700], 8, 64, torch.bfloat16, "cuda", 128, 8)
    assert case.cache is not None
    blocks = case.cache.blocks
    extra = 2**31 // blocks[0].numel() // 8 * 8 + 8
    far = torch.full(
        (extra + len(blocks), *blocks.shape[1:]), math.nan, dtype=blocks.dtype, device="cuda"
    )
    cache = case.cache._replace(blocks=far, page_table=case.cache.page_table + extra // 8)
    append_history(
        case.old_k,
        case.old_v,
        case._offsets(case.cached),
        torch.zeros_like(case.candidates),
        cache._replace(cached=torch.zeros_like(cache.cached)),
    )
    assert torch.equal(far[extra:].view(torch.int16), blocks.view(torch.int16))
    case.cache = cache
    assert worst_error(case, case.attend()) < 5e-3


@pytest.mark.gpu
def test_tensors_without_a_kernel_take_the_reference() -> None:
    case = Case([70, 9], [20, 0], [30, 0], head_dim=48, dtype=torch.float32, device="cuda")
    assert worst_error(case, case.attend()) < 1e-3


@pytest.mark.gpu
def test_attention_never_waits_for_the_device() -> None:
    case = Case([300], [100], [5000], 8, 64, torch.bfloat16, "cuda", 128, 8)
    case.attend()
    torch.cuda.set_sync_debug_mode("error")
    try:
        case.attend()
        append_history(case.k, case.v, case.offsets, case.candidates, case.cache)  # type: ignore[arg-type]
    finally:
        torch.cuda.set_sync_debug_mode("default")
