"""Which table rows the tokens of a batch are: every request's new history, then its candidates.

Items are drawn by hashes when they are asked for (`histories`), so that a batch is described by five
numbers a request. In PyTorch that is about a hundred small operations, which on a GPU cost the host more
than the whole forward pass; there one kernel does it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hlem_env.live.histories import Histories
from hlem_env.live.host_tables import HostTables

CANDIDATE_USER = 1 << 40
"""Candidates are drawn like the items of a user of this id and up, whom no workload has."""


def token_rows(spans: Tensor, tokens: int, histories: Histories, tables: HostTables) -> Tensor:
    """Rows int64 [tokens * tables]: of each token in turn, one a table.

    Args:
        spans: int64 [5, B]: user; index of the first new item of its history; new items; the request's
            first token in the batch; serial number, which the candidates are drawn by.
        tokens: of all requests; each has at least one.
        histories: what users' items are.
        tables: whose rows.
    """
    if spans.is_cuda:
        from hlem_env.live.kernels import token_rows_triton

        return token_rows_triton.token_rows(spans, tokens, histories, tables, CANDIDATE_USER)
    return reference(spans, tokens, histories, tables)


def reference(spans: Tensor, tokens: int, histories: Histories, tables: HostTables) -> Tensor:
    """The same in PyTorch, on any device: it defines the result."""
    user, first, new, start, serial = spans
    token = torch.arange(tokens, device=spans.device)
    request = torch.searchsorted(start, token, right=True) - 1
    within = token - start[request]
    history = within < new[request]
    owner = torch.where(history, user[request], CANDIDATE_USER + serial[request])
    index = torch.where(history, first[request] + within, within - new[request])
    return tables.keys(histories.draw(owner, index)).reshape(-1)
