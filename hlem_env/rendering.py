"""Pictures of an episode: alpha against its optimum, P99 against the SLO, hit rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hlem_env.mdp import MdpConfig

_SHADES = " ▁▂▃▄▅▆▇█"
_COLUMNS = 72


@dataclass
class History:
    """What is drawn, epoch by epoch."""

    series: dict[str, list[float]] = field(default_factory=dict)

    def append(self, info: dict[str, Any]) -> None:
        """Add an epoch's info."""
        for key in ("alpha", "alpha_star", "p99_ms", "kv_hit", "emb_hit", "hot_share"):
            self.series.setdefault(key, []).append(float(info[key]))

    def __getitem__(self, key: str) -> list[float]:
        return self.series.get(key, [])

    def __len__(self) -> int:
        return len(self["alpha"])


def draw_text(history: History, config: MdpConfig) -> str:
    """A panel of sparklines, the last 72 epochs."""
    if not len(history):
        return "no epoch yet: call reset()"
    rows = [
        ("alpha", history["alpha"], 1.0, "{:.2f}"),
        ("alpha*", history["alpha_star"], 1.0, "{:.2f}"),
        ("P99 ms", history["p99_ms"], 2 * config.slo_ms, "{:.1f}"),
        ("KV hit", history["kv_hit"], 1.0, "{:.3f}"),
        ("embedding hit", history["emb_hit"], 1.0, "{:.3f}"),
        ("hot share", history["hot_share"], 1.0, "{:.3f}"),
    ]
    lines = [f"epoch {len(history) - 1}   SLO {config.slo_ms:g} ms"]
    for label, values, top, form in rows:
        last = values[-1]
        mark = "  over the SLO" if label == "P99 ms" and last > config.slo_ms else ""
        text = "-" if last < 0 else form.format(last)
        lines.append(f"{label:>14} {_sparkline(values[-_COLUMNS:], top)} {text}{mark}")
    return "\n".join(lines)


def _sparkline(values: list[float], top: float) -> str:
    levels = len(_SHADES) - 1
    scaled = np.clip(np.array(values) / top, 0.0, 1.0)
    return "".join(_SHADES[round(float(v) * levels)] for v in scaled).ljust(_COLUMNS)


def draw_frame(history: History, config: MdpConfig) -> NDArray[np.uint8]:
    """An RGB picture [480, 800, 3]."""
    # Imported here: matplotlib takes half a second, and most runs never draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    top, middle, bottom = figure.subplots(3, 1, sharex=True)
    top.step(range(len(history)), history["alpha"], where="post", label="alpha")
    if min(history["alpha_star"], default=-1.0) >= 0:
        top.plot(history["alpha_star"], "--", label="alpha* (closed form)")
    top.set(ylabel="alpha", ylim=(0, 1))
    middle.plot(history["p99_ms"], label="P99")
    middle.axhline(config.slo_ms, color="tab:red", ls=":", label="SLO")
    middle.set(ylabel="ms", ylim=(0, None))
    for key, label in (("kv_hit", "KV"), ("emb_hit", "embedding"), ("hot_share", "hot share")):
        bottom.plot(history[key], label=label)
    bottom.set(ylabel="hit rate", ylim=(0, 1), xlabel="epoch")
    for axes in (top, middle, bottom):
        axes.legend(loc="upper left", fontsize=7, ncols=3)
    canvas.draw()  # type: ignore[no-untyped-call]
    rgba = np.asarray(canvas.buffer_rgba(), dtype=np.uint8)  # type: ignore[no-untyped-call]
    return rgba[..., :3].copy()
