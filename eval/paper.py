"""What the paper reports, and how ours is shown beside it.

"One Pool, Two Caches" (arXiv 2605.04450) measured on 32 nodes with A100 GPUs; ours is a simulated
node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from eval.names import BEST_STATIC
from hlem_env.errors import ArtefactError
from hlem_env.machine import command
from hlem_env.workload.regimes import REGIMES

NONE = "-"
FULL = "full controller"
PAPER_GAP = {
    "steady": {"full": 0.019, "ppo": 0.043, "lstm": 0.041, "static": 0.092},
    "trend": {"full": 0.023, "ppo": 0.051, "lstm": 0.069, "static": 0.061},
    "burst": {"full": 0.031, "ppo": 0.042, "lstm": 0.051, "static": 0.072},
}
"""Mean |alpha - alpha*|."""
PAPER_ROWS: tuple[tuple[str, str, Callable[[str], bool]], ...] = (
    ("static", "best static", lambda name: name == BEST_STATIC),
    ("ppo", "PPO only", lambda name: name.lower().startswith("ppo-only")),
    ("lstm", "LSTM + OFT + RC", lambda name: name.lower().startswith("lstm+oft+rc")),
    ("full", FULL, lambda name: name.lower().startswith("smart")),
)
"""Key in `PAPER_GAP`, the paper's controller, which of ours are like it."""
PAPER_P99_BELOW = (0.24, 0.38)
"""By how much the full controller's P99 is under the best static split's, over the regimes."""
PAPER_QOS = {"steady": 0.996, "trend": 0.989, "burst": 0.935}
"""Share of requests within the SLO, full controller."""
PAPER_DECISION_US = 32
"""Of the full controller."""
PAPER_ALPHA = {0.20: 0.51, 0.32: 0.38, 0.50: 0.26, 0.60: 0.23}
"""The full controller's alpha at those hot shares."""


def regimes_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The scan-resistant cells of a result of eval.compare, by regime, in the paper's order.

    Raises:
        ArtefactError: it has none, two of one regime, or one that lacks what a comparison writes.
    """
    try:
        resistant = [
            cell
            for cell in result["cells"]
            if cell["kv_policy"] == "scan_resistant" and cell["scenario"]["trace"] is None
        ]
        cells = {cell["scenario"]["regime"]: cell for cell in resistant}
        workloads = [str(cell["workload"]) for cell in resistant]
        for cell in cells.values():
            for columns in cell["controllers"].values():
                columns["summary"]["saturated"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ArtefactError(f"not a result of eval.compare ({error!r})") from error
    if len(cells) < len(resistant):
        raise ArtefactError(f"one cell for each regime is needed; there are {', '.join(workloads)}")
    found = {regime: cells[regime] for regime in REGIMES if regime in cells}
    if not found:
        raise ArtefactError(
            f"no scan-resistant cell of a regime; one of {', '.join(REGIMES)} is needed"
        )
    return found


def controllers_of(cells: dict[str, dict[str, Any]]) -> list[str]:
    """Names of all controllers, each once, in the cells' order."""
    return list(dict.fromkeys(name for cell in cells.values() for name in cell["controllers"]))


def counterpart(name: str) -> str | None:
    """Key in `PAPER_GAP` of the paper's controller that ours of this name is like.

    Policies that see the working set, an eighth feature, are like none.
    """
    if "(working set)" in name:
        return None
    return next((key for key, _, is_like in PAPER_ROWS if is_like(name)), None)


def markdown(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table under its title."""
    lines = [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]
    return "\n".join([f"**{title}**", "", *lines, ""])


def save(figure: Figure, path: Path, module: str) -> None:
    """Write a PNG that holds the command which made it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"Software": None, "Description": command(module)}
    figure.savefig(path, dpi=120, metadata=about, format="png")
