"""The recorded model against the same model launched kernel by kernel."""

import numpy as np
import pytest
import torch

from hlem_env.live.hstu import Hstu, HstuBatch, HstuConfig
from hlem_env.live.paged_kv import PagedKv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = 1e-2
"""Relative; half of what bfloat16 is allowed against float32. Matrices of another height take another
kernel, so that sums go in another order."""
CONFIG = HstuConfig(
    layers=2, dim=128, heads=2, head_dim=64, max_history_tokens=4000, scaling_seqlen=4096
)
TABLES, CANDIDATES, BLOCK_TOKENS, BLOCKS_PER_PAGE, COLUMNS = 3, 20, 128, 8, 10


class Setting:
    """A model, pages for eight users, and what their pages hold."""

    def __init__(self, seed: int) -> None:
        from hlem_env.live.hstu_graphs import HstuGraphs

        self.rng = np.random.default_rng(seed)
        self.model = Hstu(CONFIG, seed, "cuda", torch.bfloat16)
        shape = 8 * COLUMNS * BLOCKS_PER_PAGE, 2, BLOCK_TOKENS, CONFIG.heads, CONFIG.head_dim
        generator = torch.Generator("cuda").manual_seed(seed)
        self.blocks = torch.randn(shape, device="cuda", generator=generator).bfloat16() * 0.1
        self.graphs = HstuGraphs(
            self.model, self.blocks, BLOCKS_PER_PAGE, COLUMNS, CONFIG.max_history_tokens
        )
        self.graphs.prepare()

    def check(self, new: list[int], cached: list[int]) -> None:
        """Scores and pages of a batch, both ways, from the same pages."""
        requests = len(new)
        fresh, old = np.array(new), np.array(cached)
        candidates = np.full(requests, CANDIDATES)
        count = int((fresh + candidates).sum())
        rows = torch.randn(count, TABLES, CONFIG.dim, device="cuda").bfloat16()
        pages = np.arange(requests * COLUMNS, dtype=np.int32).reshape(requests, COLUMNS)
        pages[0, -1] = -1
        before = self.blocks.clone()
        batch = HstuBatch.build(fresh, candidates, old, CONFIG, "cuda")
        table = torch.from_numpy(pages).cuda()
        paged = PagedKv(self.blocks, table, batch.cached, 0, CONFIG.layers, BLOCKS_PER_PAGE)
        expected = self.model(rows.sum(1), batch, paged).float()
        written = self.blocks.clone()
        self.blocks.copy_(before)
        shape = self.graphs.shape(fresh + candidates, old)
        assert shape is not None
        scores = self.graphs.run(shape, rows, fresh, candidates, old, pages).float()
        assert scores.shape == expected.shape
        assert ((scores - expected).norm() / expected.norm()).item() < TOLERANCE
        difference = (self.blocks.float() - written.float()).norm() / written.float().norm()
        assert difference.item() < TOLERANCE


def test_one_request_and_small_ones_together_cached_or_not() -> None:
    setting = Setting(0)
    for new, cached in (
        ([10], [3000]),
        ([10], [0]),
        ([0], [130]),
        ([1500], [0]),
        ([1200], [1400]),
        ([10, 0, 100], [2000, 5, 0]),
        ([10] * 8, [1500] * 8),
        ([10, 10, 10], [0, 0, 0]),
        ([0, 107, 108, 109, 200], [1, 7, 0, 300, 1280]),
        ([10] * 5, [300] * 5),
    ):
        setting.check(new, cached)


def test_a_graph_serves_other_batches_of_its_shape() -> None:
    setting = Setting(1)
    shapes = set()
    for _ in range(6):
        new = setting.rng.integers(0, 30, 2).tolist()
        cached = setting.rng.integers(1, 3000, 2).tolist()
        shapes.add(setting.graphs.shape(np.array(new) + CANDIDATES, np.array(cached)))
        setting.check(new, cached)
    assert len(shapes) == 1


def test_recording_leaves_the_pages_alone() -> None:
    setting = Setting(3)
    before = setting.blocks.clone()
    setting.graphs.prepare()
    assert torch.equal(setting.blocks, before)


def test_every_shape_that_is_offered_has_been_recorded() -> None:
    setting = Setting(4)
    for requests in (1, 2, 5, 17, 33, 64):
        for most in (1, 128, 129, 256, 1025, 3999):
            shape = setting.graphs.shape(np.full(requests, most), np.full(requests, 10))
            assert shape is None or shape in setting.graphs.prepared


def test_large_batches_of_several_requests_have_no_graph() -> None:
    setting = Setting(2)
    assert setting.graphs.shape(np.array([900, 900]), np.array([0, 0])) is None
    assert setting.graphs.shape(np.array([3900]), np.array([0])) is not None
    assert setting.graphs.shape(np.array([200_000]), np.array([0])) is None
