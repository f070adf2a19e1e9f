"""What a live node is made of, as data: `presets/*.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from hlem_env.errors import ArgumentError, ArtefactError, require, require_choice, require_number

DEVICES = ("cpu", "cuda")
DTYPES = ("float32", "bfloat16")
"""float16 is none: HSTU's attention output is too small for it."""


@dataclass(frozen=True)
class LiveConfig:
    """One live node: device, pool, model, tables, link, and the load that it is meant for.

    Raises:
        ArgumentError: naming the field and what is allowed.
    """

    name: str
    device: str
    dtype: str
    """Of weights, K and V, and embedding rows."""
    # Pool.
    pool_bytes: int
    page_bytes: int
    # Model.
    layers: int
    heads: int
    head_dim: int
    block_tokens: int
    max_history_tokens: int
    # Tables. Rows have heads x head_dim entries, the model's width.
    tables: int
    rows_per_table: int
    # Serving.
    token_budget: int
    """Most tokens that are computed in one batch; a larger request is a batch of its own."""
    epoch_seconds: float
    warmup_epochs: int
    slo_ms: float
    emulated_link_gbps: float | None
    """Bandwidth that missed rows are held to where host and device are one; None: a real link."""
    refill_gbps: float
    """Link bandwidth that refill and prefetch share out, GB/s."""
    # Load.
    mean_history_tokens: float
    candidates: int
    zipf: float
    new_items: int
    utilisation: float
    hot_share: tuple[float, ...]
    requests_per_s: tuple[float, ...]
    """At those hot shares: the load at which this node, at its best alpha, is busy for `utilisation`,
    on the machine that `measured_on` names."""
    probe_ms: float
    """What `LiveNode.probe_ms` measured there: other machines get the load in proportion."""
    measured_on: str
    seed: int = 1
    """Of weights, rows and items."""
    only_graphs: bool = False
    """On a GPU: a batch ends before a request that shares no recorded graph with the others, instead of being
    launched piece by piece, which takes longer than its requests one by one on an H200 (docs/live.md)."""
    prefetch_beside: int = 0
    """Tokens times layers that a batch computes, from which on the missing rows of the next one are fetched
    meanwhile: beside less of it the device waits for the host's planning, longer than that brings
    (docs/live.md)."""
    cpu_threads: int = 1
    """Of torch, while the node works on a CPU. Two are faster while nothing else runs; with other work on
    their cores they wait for each other (docs/live.md)."""

    def __post_init__(self) -> None:
        require_choice("device", self.device, DEVICES)
        require_choice("dtype", self.dtype, DTYPES)
        require(
            isinstance(self.only_graphs, bool), "only_graphs", self.only_graphs, "true or false"
        )
        for name in ("pool_bytes", "page_bytes", "layers", "heads", "head_dim", "block_tokens",
                     "max_history_tokens", "tables", "rows_per_table", "token_budget", "candidates",
                     "new_items", "cpu_threads"):  # fmt: skip
            value = getattr(self, name)
            require_number(name, value, whole=True)
            require(1 <= value <= 2**50, name, value, "1 to 2^50")
        require_number("prefetch_beside", self.prefetch_beside, whole=True)
        require(
            0 <= self.prefetch_beside <= 2**50, "prefetch_beside", self.prefetch_beside, "0 to 2^50"
        )
        for name in ("epoch_seconds", "slo_ms", "refill_gbps", "mean_history_tokens", "utilisation",
                     "probe_ms"):  # fmt: skip
            value = getattr(self, name)
            require_number(name, value)
            require(value > 0, name, value, "above 0")
        require(
            0 <= self.warmup_epochs <= 10_000, "warmup_epochs", self.warmup_epochs, "0 to 10,000"
        )
        require(
            self.pool_bytes >= 100 * self.page_bytes,
            "pool_bytes",
            self.pool_bytes,
            f"at least 100 pages of {self.page_bytes} bytes",
        )
        require(
            len(self.hot_share) == len(self.requests_per_s) >= 1,
            "requests_per_s",
            self.requests_per_s,
            "one for each hot_share",
        )

    @property
    def dim(self) -> int:
        """Width of the model and of an embedding row."""
        return self.heads * self.head_dim

    @property
    def row_bytes(self) -> int:
        """Size of an embedding row."""
        return self.dim * (4 if self.dtype == "float32" else 2)

    @classmethod
    def load(cls, name_or_path: str | Path) -> LiveConfig:
        """A shipped preset by name, or one from a JSON file.

        Raises:
            ArgumentError: no such preset; lists the shipped ones.
            ArtefactError: the file is not one.
        """
        shipped = resources.files("hlem_env.live") / "presets"
        names = sorted(p.name[:-5] for p in shipped.iterdir() if p.name.endswith(".json"))
        if str(name_or_path) in names:
            data = (shipped / f"{name_or_path}.json").read_bytes()
        elif Path(name_or_path).is_file():
            data = Path(name_or_path).read_bytes()
        else:
            allowed = "one of " + ", ".join(names) + ", or the path of a preset's JSON file"
            raise ArgumentError("live preset", str(name_or_path), allowed)
        try:
            values: dict[str, Any] = json.loads(data)
            values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
            return cls(**values)
        except ArgumentError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise ArtefactError(f"{name_or_path} is not a live preset: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)
