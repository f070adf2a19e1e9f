"""HSTU, the model that the node serves, over new tokens and a paged cache of earlier ones.

A layer: `x' = LN(x)`; `u, v, q, k = SiLU(W x')`; `A` = SiLU attention without softmax, divided by the
constant `scaling_seqlen`; `out = x + W_o (u * LN(A v))`. A candidate's score is `w . LN(out) + b`.
Positions are learned and absolute, forward from the start of the history, so that cached keys stay true
while it grows; all candidates of a request share the position behind its history.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from hlem_env.errors import ArtefactError, require, require_choice, require_number
from hlem_env.live.attention import PagedKv, append_history, hstu_attention
from hlem_env.live.layer_ops import layer_norm, silu_

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
QK_GAIN = 0.25
"""Norm of the rows of W that make q and k, at the start; those of u and v have 1. SiLU of small values
is nearly linear, so q k^T varies around 0 and keys count differently. With a gain of 1 all products are
positive, A v is close to the mean of all values, and some wrong keys among many would hardly show."""
OUTPUT_GAIN = 1.7
"""Norm of W_o's rows at the start. u * LN(A v) has a root mean square of 0.6 then, so a layer adds about
1 to tokens of variance 1: attention counts as much as the token itself."""
POSITION_STD = 0.1


@dataclass(frozen=True)
class HstuConfig:
    """Sizes of the model. `weights` of one configuration fit no other."""

    layers: int = 6
    dim: int = 512
    heads: int = 8
    head_dim: int = 64
    max_history_tokens: int = 15_000
    """Longest history; the caller drops the oldest quarter before it grows beyond."""
    scaling_seqlen: int = 16_384
    """The constant that attention is divided by; the real length would make cached results differ."""
    norm_epsilon: float = 1e-6
    """Of LN(x), where x has a variance of about 1."""
    attention_norm_epsilon: float = 1e-18
    """Of LN(A v), which is small: with the initial weights A v of a single token is about
    0.005 / scaling_seqlen = 3e-7, a variance of 1e-13. A common epsilon of 1e-5 would erase it."""

    def __post_init__(self) -> None:
        for name in (
            "layers", "dim", "heads", "head_dim", "max_history_tokens", "scaling_seqlen",
        ):  # fmt: skip
            value = getattr(self, name)
            require_number(name, value, whole=True)
            require(value > 0, name, value, "1 or more")
        for name in ("norm_epsilon", "attention_norm_epsilon"):
            value = getattr(self, name)
            require_number(name, value)
            require(value > 0, name, value, "above 0")


PRESETS = {
    "small": HstuConfig(
        layers=2, dim=64, heads=2, head_dim=32, max_history_tokens=1024, scaling_seqlen=1024
    ),
    "3-layer": HstuConfig(layers=3),
    "6-layer": HstuConfig(layers=6),
}
"""`small` is for a CPU; the others are the paper's sizes."""


def preset(name: str) -> HstuConfig:
    """The configuration of that name. Raises ArgumentError for an unknown one, listing the known."""
    require_choice("preset", name, PRESETS)
    return PRESETS[name]


@dataclass(frozen=True)
class HstuBatch:
    """Where the tokens of a batch belong. Made by `build`; all tensors on the model's device."""

    offsets: Tensor
    """int32 [B + 1]: first new token of each request, and their number."""
    candidates: Tensor
    """int32 [B]: how many of a request's new tokens, its last, are candidates."""
    cached: Tensor
    """int32 [B]: history tokens before the new ones, in the cache."""
    positions: Tensor
    """int32 [N]: row of the position table of each token."""
    candidate_rows: Tensor
    """int32 [sum of candidates]: rows of the candidates among the tokens."""
    max_new: int
    """New tokens of the largest request, or an upper bound of them."""
    any_cached: bool = True
    """Whether any request has cached tokens; without, a faster kernel serves."""

    @classmethod
    def build(
        cls,
        new_history: Sequence[int] | NDArray[np.int64],
        candidates: Sequence[int] | NDArray[np.int64],
        cached: Sequence[int] | NDArray[np.int64] | None,
        config: HstuConfig,
        device: torch.device | str = "cpu",
    ) -> HstuBatch:
        """Lay out a batch from what the host knows; one copy to the device, which nobody waits for.

        Args:
            new_history: [B], history tokens to compute.
            candidates: [B], candidates to score.
            cached: [B], history tokens that the cache has; None for none.
            config: the model's.
            device: where the tensors go.

        Raises
        ------
            ArgumentError: lengths differ, a count is negative, or a history is longer than
                `max_history_tokens`.
        """
        new, tail = np.asarray(new_history, np.int64), np.asarray(candidates, np.int64)
        old = np.zeros_like(new) if cached is None else np.asarray(cached, np.int64)
        for name, counts in (("new_history", new), ("candidates", tail), ("cached", old)):
            require(
                counts.ndim == 1 and len(counts) == len(new) and bool((counts >= 0).all()),
                name,
                counts.tolist(),
                f"{len(new)} counts, 0 or more",
            )
        longest = int((new + old).max(initial=0))
        limit = config.max_history_tokens
        require(longest <= limit, "history tokens", longest, f"at most {limit}; drop the oldest")
        parts = layout(new, tail, old)
        host = torch.empty(
            packed_size(parts), dtype=torch.int32, pin_memory=torch.device(device).type == "cuda"
        )
        pack(parts, host.numpy())
        moved = host.to(torch.device(device), non_blocking=True)
        most = int((new + tail).max(initial=0))
        return cls.of(unpack(parts, moved), most, bool(old.any()))

    @classmethod
    def of(cls, fields: list[Tensor], max_new: int, any_cached: bool) -> HstuBatch:
        """From what `layout` made, on the device."""
        offsets, candidates, cached, positions, candidate_rows = fields
        return cls(
            offsets, candidates, cached, positions, candidate_rows, max_new, any_cached
        )  # fmt: skip


Parts = tuple[NDArray[np.int64], ...]
"""Arrays that travel to the device as one: the first five fields of HstuBatch, perhaps more."""


def layout(new: NDArray[np.int64], tail: NDArray[np.int64], old: NDArray[np.int64]) -> Parts:
    """The first five fields of HstuBatch for new history, candidates and cached tokens, [B] each."""
    lengths = new + tail
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    history = np.repeat(new, lengths)
    positions = np.repeat(old, lengths) + np.minimum(within, history)
    return offsets, tail, old, positions, np.flatnonzero(within >= history)


def packed_size(parts: Parts) -> int:
    """Int32 values that the parts take together; each starts at a multiple of 16 bytes.

    Raises:
        ArgumentError: they are too many for int32.
    """
    size = sum(-(-part.size // 4) * 4 for part in parts)
    require(size < 2**31, "tokens of a batch", size, "below 2**31")
    return size


def pack(parts: Parts, to: NDArray[np.int32]) -> None:
    """Write the parts one after the other."""
    start = 0
    for part in parts:
        to[start : start + part.size] = part.ravel()
        start += -(-part.size // 4) * 4


def unpack(parts: Parts, packed: Tensor) -> list[Tensor]:
    """Views of the packed parts, in their shapes."""
    views, start = [], 0
    for part in parts:
        views.append(packed[start : start + part.size].view(part.shape))
        start += -(-part.size // 4) * 4
    return views


class Hstu(nn.Module):
    """The network: tokens in, one score a candidate out.

    Args:
        config: its sizes.
        seed: of the initial weights, the same on every device.
        device: where it runs.
        dtype: of weights, tokens and cache.

    Weights start so that each layer's attention adds as much as the tokens carry, where those have a
    variance of about 1: a wrong page or row then shows in the scores.
    """

    def __init__(
        self,
        config: HstuConfig,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        allowed = "float64, float32 or bfloat16; A v is too small for float16"
        require(dtype in DTYPES, "dtype", dtype, allowed)
        self.config = config
        generator = torch.Generator().manual_seed(seed)
        self.positions = nn.Parameter(
            torch.randn(config.max_history_tokens + 1, config.dim, generator=generator)
            * POSITION_STD
        )
        self.layers = nn.ModuleList(_Layer(config, generator) for _ in range(config.layers))
        self.norm_weight = nn.Parameter(torch.ones(config.dim))
        self.norm_bias = nn.Parameter(torch.zeros(config.dim))
        self.score_weight = nn.Parameter(_rows(1, config.dim, 1.0, generator)[0])
        self.score_bias = nn.Parameter(torch.zeros(1))
        self.requires_grad_(False)
        self.to(device=device, dtype=dtype)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, batch: HstuBatch, kv: PagedKv | None = None) -> Tensor:
        """Scores of all candidates, in the order of the tokens: [sum of candidates].

        K and V of the new history go into the blocks of sequences that have pages, layer by layer.
        Nothing waits for the device.

        Args:
            tokens: [N, dim], a token being the sum of its table rows, without position.
            batch: where they belong.
            kv: the cache with the batch's page table; its `cached` is the batch's, its `layer` is
                not read. None: nothing is cached, nothing is kept.

        Raises
        ------
            ArgumentError: tokens or cache do not fit the batch or the model.
        """
        config, rows = self.config, batch.positions.shape[0]
        require(
            tokens.shape == (rows, config.dim) and tokens.dtype == self.positions.dtype,
            "tokens",
            (tuple(tokens.shape), tokens.dtype),
            f"[{rows}, {config.dim}], {self.positions.dtype}",
        )
        if kv is not None:
            require(kv.layers == config.layers, "kv.layers", kv.layers, f"{config.layers}")
            kv = kv._replace(cached=batch.cached)
        x = tokens + self.positions.index_select(0, batch.positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, batch, None if kv is None else kv._replace(layer=index))
        x = layer_norm(
            x.index_select(0, batch.candidate_rows),
            self.norm_weight,
            self.norm_bias,
            config.norm_epsilon,
        )
        return torch.mv(x, self.score_weight) + self.score_bias

    def save(self, path: str | Path) -> None:
        """Write weights and configuration as one safetensors file."""
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, str(path), {"hstu": json.dumps(asdict(self.config))})

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: HstuConfig | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Hstu:
        """A model from a file that `save` wrote.

        Args:
            path: the file.
            config: what the file must hold; by default whatever it holds.
            device: where the model runs.
            dtype: of the model, whatever that of the file.

        Raises
        ------
            ArtefactError: no such file, not such a file, or not of that configuration.
        """
        try:
            with safe_open(str(path), framework="pt") as file:
                stored = HstuConfig(**json.loads((file.metadata() or {})["hstu"]))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ArtefactError(f"{path} holds no HSTU model: {error}") from error
        if config is not None and config != stored:
            raise ArtefactError(f"{path} holds {stored}, wanted is {config}")
        model = cls(stored, device=device, dtype=dtype)
        try:
            model.load_state_dict(tensors)
        except RuntimeError as error:
            raise ArtefactError(f"{path} does not fit its own configuration: {error}") from error
        return model


class _Layer(nn.Module):
    def __init__(self, config: HstuConfig, generator: torch.Generator) -> None:
        super().__init__()
        self.config = config
        width = config.heads * config.head_dim
        self.norm_weight = nn.Parameter(torch.ones(config.dim))
        self.norm_bias = nn.Parameter(torch.zeros(config.dim))
        gains = torch.tensor([1.0, 1.0, QK_GAIN, QK_GAIN]).repeat_interleave(width)
        self.uvqk = nn.Parameter(_rows(4 * width, config.dim, 1.0, generator) * gains[:, None])
        self.attention_norm_weight = nn.Parameter(torch.ones(width))
        self.attention_norm_bias = nn.Parameter(torch.zeros(width))
        self.output = nn.Parameter(_rows(config.dim, width, OUTPUT_GAIN, generator))

    def forward(self, x: Tensor, batch: HstuBatch, kv: PagedKv | None) -> Tensor:
        """[N, dim], to which the layer adds in place."""
        config = self.config
        width = config.heads * config.head_dim
        normed = layer_norm(x, self.norm_weight, self.norm_bias, config.norm_epsilon)
        projected = functional.linear(normed, self.uvqk)
        # Views: the kernels take strided rows. SiLU of u is left to where u is read.
        u, vqk = projected[:, :width], projected[:, width:]
        silu_(vqk)
        v, q, k = vqk.view(x.shape[0], 3, config.heads, config.head_dim).unbind(1)
        attended = hstu_attention(
            q,
            k,
            v,
            batch.offsets,
            batch.candidates,
            scaling_seqlen=config.scaling_seqlen,
            cache=kv if batch.any_cached else None,
            max_new=batch.max_new,
        )
        if kv is not None:
            append_history(k, v, batch.offsets, batch.candidates, kv, batch.max_new)
        gated = layer_norm(
            attended.flatten(1),
            self.attention_norm_weight,
            self.attention_norm_bias,
            config.attention_norm_epsilon,
            gate=u,
        )
        return x.addmm_(gated, self.output.t())


def _rows(count: int, width: int, norm: float, generator: torch.Generator) -> Tensor:
    """Random directions of the same length: [count, width]."""
    return functional.normalize(torch.randn(count, width, generator=generator), dim=1) * norm
