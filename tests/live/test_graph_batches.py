"""Batches rounded up to a recorded shape, as the model is told of them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hlem_env.live.hstu import layout
from hlem_env.live.hstu_graphs import Shape, describe, first_to_share, shared_shape

COLUMNS = 5
request = st.tuples(st.integers(0, 100), st.integers(1, 28), st.integers(0, 500))
"""New history, candidates, cached tokens: 128 new tokens at most."""


@settings(max_examples=50, deadline=None)
@given(
    requests=st.lists(request, min_size=1, max_size=6),
    spare=st.integers(0, 3),
    width=st.integers(1, COLUMNS),
)
def test_a_rounded_batch_is_the_batch_and_then_candidates_of_nobody(
    requests: list[tuple[int, int, int]], spare: int, width: int
) -> None:
    shape, n = Shape(len(requests) + spare, 128, True), len(requests)
    new, candidates, cached = np.array(requests).T.copy()
    pages = np.arange(n * width, dtype=np.int32).reshape(n, width)
    written = shape.parts(COLUMNS)
    for part in written:
        part.fill(7)  # of the batch before
    describe(written, shape.longest, new, candidates, cached, pages)
    offsets, tails, olds, positions, scored, table = written
    *expected, rows = layout(new, candidates, cached)
    for got, part in zip((offsets, tails, olds, positions, scored), (*expected, rows), strict=True):
        assert got[: part.size].tolist() == part.tolist()
    assert table[:n, :width].tolist() == pages.tolist()
    assert (table[:n, width:] == -1).all() and (table[n:] == -1).all()
    # What fills up has neither history nor cache, and no request of it is longer than the shape's.
    assert offsets[-1] == shape.tokens
    assert np.diff(offsets)[n:].tolist() == tails[n:].tolist()
    assert tails.max() <= shape.longest
    assert not olds[n:].any() and not positions[expected[3].size :].any()
    assert not scored[tails.sum() :].any()
    assert scored[rows.size : tails.sum()].tolist() == list(range(offsets[n], shape.tokens))


@settings(max_examples=100, deadline=None)
@given(new=st.lists(st.sampled_from([100, 128, 129, 256, 257, 9000]), min_size=1, max_size=80))
def test_the_first_to_share_a_graph_are_all_that_can(new: list[int]) -> None:
    count = first_to_share(np.array(new))
    assert count == 1 or shared_shape(count, max(new[:count])) is not None
    if count < len(new):
        assert shared_shape(count + 1, max(new[: count + 1])) is None
