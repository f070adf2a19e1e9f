"""The paper's figures beside a cell's, and why they differ where they differ much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval import paper
from eval.names import ALPHA_STAR, BEST_STATIC, DESIGN_POINT, REACHABLE
from eval.ranking import best_policy
from eval.report_html import escaped, figure_cell, kv_name, table
from eval.results import DECISION, GAP, QOS, RATIO, is_saturated
from eval.statistics import ratio_of_means
from hlem_env.mdp import ACTIONS_CENTI

MUCH = 1.5
"""A gap so many times larger or smaller than the paper's is explained."""
MUCH_QOS = 1.0
"""Likewise a difference of so many percentage points."""
UNKNOWN = "other hardware, workload and alpha*; no further reason known"
Cell = Mapping[str, Any]


def paper_html(cells: Sequence[Cell]) -> str:
    """The paper's figures beside those of a workload, or nothing where it is none of its regimes.

    Args:
        cells: of one workload, under different KV policies; the first with alpha* is shown.
    """
    cell = next((c for c in cells if ALPHA_STAR in c["controllers"]), cells[0])
    regime = str(cell["scenario"].get("regime"))
    if regime not in paper.PAPER_GAP or cell["scenario"].get("trace"):
        return ""
    rows = _gap_rows(cell, regime)
    policy = best_policy(cell)
    if policy is not None:
        rows += _policy_rows(cell, cells, regime, policy.name)
    return (
        f"<h3>Beside the paper, {escaped(kv_name(cell['kv_policy']))}</h3>"
        "<p>The paper (arXiv 2605.04450) measured 32 nodes with A100 GPUs, this is one simulated"
        " node: context, not a like-for-like comparison.</p>"
        + table(("figure", "here", "paper", "why they differ"), rows, text_columns=(3,))
    )


def _line(label: str, ours: str, here: str, theirs: str, why: str) -> str:
    small = f"<small>{escaped(ours)}</small>" if ours else ""
    return (
        f"<tr><th scope=row>{label}{small}</th>{here}<td>{theirs}</td>"
        f'<td class="text">{escaped(why)}</td></tr>'
    )


def _gap_rows(cell: Cell, regime: str) -> list[str]:
    """Gaps to alpha* of the controllers that are like the paper's."""
    if ALPHA_STAR not in cell["controllers"]:
        return []
    rows = []
    for key, label, _ in paper.PAPER_ROWS:
        theirs = paper.PAPER_GAP[regime][key]
        ours = [name for name in cell["controllers"] if paper.counterpart(name) == key]
        if not ours:
            rows.append(_line(f"gap, {label}", "", "<td>not run</td>", f"{theirs:.3f}", ""))
        for name in ours:
            figure = GAP.of(cell, name)
            here = "<td>saturated</td>" if figure is None else figure_cell(figure, GAP.digits)
            why = "" if figure is None else gap_reason(cell, regime, key, figure[0])
            rows.append(_line(f"gap, {label}", name, here, f"{theirs:.3f}", why))
    return rows


def gap_reason(cell: Cell, regime: str, key: str, gap: float) -> str:
    """Why a gap is much larger or smaller than the paper's; empty where it is not."""
    theirs = paper.PAPER_GAP[regime][key]
    if theirs / MUCH <= gap <= theirs * MUCH:
        return ""
    if key == "static":
        text = "this split is chosen on each episode's own requests"
        star = cell.get("alpha_star")
        if star:
            low, high = min(star["alpha_centi"]) / 100, max(star["alpha_centi"]) / 100
            text += f", and alpha* goes from {low:.2f} to {high:.2f} in the first episode"
        return text
    bound = GAP.of(cell, REACHABLE) if REACHABLE in cell["controllers"] else None
    if gap < theirs or bound is None:
        return UNKNOWN
    text = f"step limit of {max(ACTIONS_CENTI) / 100:.2f} an epoch: "
    if regime == "burst":
        text += "a burst is over before alpha is there; "
    return text + f"the reachable oracle's own gap is {bound[0]:.3f}"


def _policy_rows(cell: Cell, cells: Sequence[Cell], regime: str, policy: str) -> list[str]:
    """P99, QoS and decision time of the best policy beside the paper's full controller."""
    rows = []
    low, high = (100 * share for share in paper.PAPER_P99_BELOW)
    ratio = RATIO.of(cell, policy)
    below = None if ratio is None else tuple(100 * (1 - ratio[i]) for i in (0, 2, 1))
    here = figure_cell((below[0], below[1], below[2]) if below else None, 1)
    reported = f"{low:.0f} to {high:.0f}<small>all regimes</small>"
    why = p99_reason(cell, cells, policy)
    rows.append(_line("P99 below best static, %", policy, here, reported, why))
    qos, theirs = QOS.of(cell, policy), 100 * paper.PAPER_QOS[regime]
    why = qos_reason(cell, regime, qos[0]) if qos else ""
    reported = f"{theirs:.1f}<small>full controller</small>"
    rows.append(_line("QoS, %", policy, figure_cell(qos, QOS.digits), reported, why))
    decision = DECISION.of(cell, policy)
    if decision is not None:
        here = figure_cell(decision, DECISION.digits)
        reported = f"{paper.PAPER_DECISION_US}<small>full controller</small>"
        why = decision_reason(cell)
        rows.append(_line("decision p50, us", policy, here, reported, why))
    return rows


def p99_reason(cell: Cell, cells: Sequence[Cell], policy: str) -> str:
    """Which static split, what the step limit allows, which KV policy: with this cell's figures."""
    split = "which split: this one is chosen on each seed's own requests"
    design = _percent_below(cell, policy, cell, DESIGN_POINT)
    if design is not None:
        split += f"; below the design-point split it is {design:.1f} %"
    said = [split]
    bound = _percent_below(cell, REACHABLE, cell, BEST_STATIC)
    if bound is not None:
        said.append(
            f"step limit: the reachable oracle is {bound:.1f} % below, and no more was found possible"
        )
    for other in cells:
        if other["kv_policy"] == "lru" and cell["kv_policy"] != "lru":
            against = _percent_below(cell, policy, other, BEST_STATIC)
            if against is not None:
                said.append(
                    f"KV policy: below the best split under plain LRU it is {against:.1f} %"
                )
    return "; ".join(said)


def _percent_below(cell: Cell, name: str, other: Cell, reference: str) -> float | None:
    """By how much a mean P99 is below another's, or None where one of them cannot be told."""
    for c, n in ((cell, name), (other, reference)):
        if n not in c["controllers"] or is_saturated(c, n):
            return None
    if cell["seeds"] != other["seeds"]:
        return None
    mine, theirs = (
        np.array(c["controllers"][n]["p99_ms"], float)
        for c, n in ((cell, name), (other, reference))
    )
    return 100 * (1 - ratio_of_means(mine, theirs).value)


def qos_reason(cell: Cell, regime: str, qos: float) -> str:
    """Why the share within the SLO is far from the paper's; empty where it is not."""
    if abs(qos - 100 * paper.PAPER_QOS[regime]) < MUCH_QOS:
        return ""
    text = f"load here keeps the node busy for {cell['scenario'].get('utilisation')} of the time"
    return text + " at its own best alpha; the load of the paper's nodes is not known"


def decision_reason(cell: Cell) -> str:
    """What of the decision time is the comparison's own."""
    static = DECISION.of(cell, BEST_STATIC)
    if static is None:
        return ""
    return f"about {static[0]:.0f} us are the comparison's checks, as the static splits show"
