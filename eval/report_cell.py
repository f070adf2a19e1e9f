"""One cell in the report: its ranking, the verdict on the best PPO policy, its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.names import ALPHA_STAR, FORESEEN, REACHABLE, REFERENCES
from eval.ranking import (
    Place,
    against_best_policy,
    basis,
    best_policy,
    ranking,
    verdict_sentences,
)
from eval.report_html import (
    Drawing,
    escaped,
    estimate_cell,
    figure_cell,
    kv_name,
    not_shown,
    table,
)
from eval.results import COLUMNS, P99, RATIO, ROOM, Column, is_saturated
from eval.statistics import Estimate

AGAINST = "P99 − best policy's, ms"


@dataclass(frozen=True)
class Section:
    """A workload under one KV policy: a cell of results.json, its figures and what is missing."""

    cell: dict[str, Any]
    drawings: tuple[Drawing, ...] = ()
    missing: tuple[str, ...] = ()


def cell_html(cell: Mapping[str, Any]) -> str:
    """Heading, verdict, ranking and warnings of a cell."""
    heading = kv_name(cell["kv_policy"])
    verdict = " ".join(verdict_sentences(cell))
    parts = [f"<h3>{escaped(heading[0].upper() + heading[1:])}</h3>"]
    if verdict:
        parts.append(f'<p class="note">{escaped(verdict)}</p>')
    parts += [f"<p>{_conditions(cell)}</p>", _table(cell), _warnings(cell)]
    return "".join(parts)


def plots_html(section: Section, opened: bool) -> str:
    """The figures of a cell, folded away unless `opened`."""
    parts = [
        f"<figure>{d.svg}<figcaption>{escaped(d.caption)}</figcaption></figure>"
        for d in section.drawings
    ]
    figures = f'<div class="figures">{"".join(parts)}</div>' if parts else ""
    name = escaped(kv_name(section.cell["kv_policy"]))
    state = " open" if opened and parts else ""
    missing = not_shown(section.missing)
    return f"<details{state}><summary>Plots, {name}</summary>{figures}{missing}</details>"


def _conditions(cell: Mapping[str, Any]) -> str:
    """How the cell is ranked, its static splits, its room."""
    ranked_by = {
        ROOM: "Ranked by room recovered, the highest first",
        RATIO: "Ranked by P99 / best static, the lowest first",
        P99: "Ranked by P99, the lowest first",
    }[basis(cell)]
    alphas = sorted({float(a) for a in cell["best_static_alpha"]})
    span = " to ".join(f"{a:.2f}" for a in dict.fromkeys((alphas[0], alphas[-1])))
    notes = [ranked_by, f"best static alpha in hindsight {span}"]
    if cell.get("design_point_alpha") is not None:
        notes.append(f"design-point alpha {float(cell['design_point_alpha']):.2f}")
    notes.append(_room(cell))
    return (
        f"{'; '.join(notes)}. {len(cell['seeds'])} seeds; in small print 95 % bootstrap intervals."
    )


def _room(cell: Mapping[str, Any]) -> str:
    if REACHABLE not in cell["controllers"]:
        return "oracles were not searched, so gap, regret and room are not known"
    room = cell["controllers"][REACHABLE]["summary"].get("room")
    if room is None:
        return "room not known where a reference is saturated"
    text = f"room between best static and reachable oracle {100 * room:.1f} %"
    return text if basis(cell) is ROOM else text + ", too little for a share recovered"


def _table(cell: Mapping[str, Any]) -> str:
    against = against_best_policy(cell) if len(cell["seeds"]) > 1 else {}
    policy = best_policy(cell)
    best = policy.name if policy else None
    columns = [c for c in COLUMNS if any(c.of(cell, name) for name in cell["controllers"])]
    columns = columns if P99 in columns else [P99]
    rows = [_row(cell, columns, i, place, best, against) for i, place in enumerate(ranking(cell))]
    headings = ["controller", *(column.heading for column in columns)]
    headings.insert(1 + columns.index(P99) + 1, AGAINST)
    return table(headings, rows, sortable=True)


def _row(
    cell: Mapping[str, Any],
    columns: Sequence[Column],
    position: int,
    place: Place,
    best: str | None,
    against: Mapping[str, Estimate],
) -> str:
    name = place.name
    saturated = is_saturated(cell, name)
    kind = "oracle" if name in REFERENCES else "best" if name == best else ""
    rank = f'<span class="rank">{place.rank or ""}</span>'
    remark = "; ".join(_remarks(cell, name, best))
    small = f"<small>{escaped(remark)}</small>" if remark else ""
    cells = [f"<th scope=row data-v={position}>{rank}<span>{escaped(name)}{small}</span></th>"]
    for column in columns:
        figure = column.of(cell, name)
        if figure is None and column is P99 and saturated:
            cells.append("<td data-v=inf>saturated</td>")
        else:
            cells.append(figure_cell(figure, column.digits))
        if column is P99 and name == best:
            cells.append("<td data-v=0>0</td>")
        elif column is P99:
            cells.append(estimate_cell(against.get(name), column.digits))
    return f'<tr class="{kind}">' + "".join(cells) + "</tr>"


def _remarks(cell: Mapping[str, Any], name: str, best: str | None) -> list[str]:
    remarks = []
    if name in REFERENCES:
        knows_course = name in (ALPHA_STAR, FORESEEN)
        remarks.append("knows the course" if knows_course else "knows the requests")
    if name == best:
        remarks.append("best PPO policy")
    flags = cell["controllers"][name].get("saturated")
    count = sum(map(bool, flags)) if isinstance(flags, list) else 0
    if count and not is_saturated(cell, name):
        remarks.append(f"saturated on {count} of {len(flags)} seeds")
    return remarks


def _warnings(cell: Mapping[str, Any]) -> str:
    parts = [
        f'<p class="warn">{escaped(name)} failed on {len(fault["seeds"])} of'
        f" {len(cell['seeds'])} seeds and has no row: {escaped(fault['reason'])}.</p>"
        for name, fault in (cell.get("failed") or {}).items()
    ]
    parts += [
        f'<p class="warn">{escaped(name)} has a lower P99 than the reachable oracle on a seed:'
        " the oracle&#x27;s search was too narrow there, and its row is no bound.</p>"
        for name in cell.get("bound_violations") or []
    ]
    return "".join(parts)
