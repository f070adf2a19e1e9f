"""The report's page: HTML from results. Everything that comes from outside is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval.names import BEST_STATIC, DESIGN_POINT, REACHABLE
from eval.ranking import best_policy, ranking, verdict
from eval.report_cell import Section, cell_html, plots_html
from eval.report_html import NONE, escaped, estimate_cell, kv_name, table
from eval.report_learning import Policy, learning_html
from eval.report_origin import glossary_html, origin_html
from eval.report_paper import paper_html
from eval.report_style import CSS, SCRIPT
from eval.results import is_saturated
from eval.statistics import ratio_of_means

HEADLINE_SEEDS = 16


def render(
    results: Mapping[str, Any], sections: Sequence[Section], policies: Sequence[Policy]
) -> str:
    """The whole page.

    Args:
        results: results.json of eval.compare.
        sections: one for each of its cells.
        policies: the compared ones.
    """
    title = escaped(results.get("title") or "HLEM comparison")
    workloads = list(dict.fromkeys(str(section.cell["workload"]) for section in sections))
    links = "".join(f'<a href="#w{i}">{escaped(name)}</a>' for i, name in enumerate(workloads))
    links += '<a href="#learning">Learning curves</a><a href="#origin">Origin</a>'
    parts = [f"<h1>{title}</h1>", _introduction(results, sections), f"<nav>{links}</nav>"]
    parts.append(_glance(sections))
    for i, name in enumerate(workloads):
        group = [section for section in sections if section.cell["workload"] == name]
        parts.append(f'<section><h2 id="w{i}">{escaped(name)}</h2>')
        parts += [cell_html(section.cell) for section in group]
        parts.append(paper_html([section.cell for section in group]))
        parts += [plots_html(section, opened=n == 0) for n, section in enumerate(group)]
        parts.append("</section>")
    parts += [glossary_html(), learning_html(policies), origin_html(results, sections, policies)]
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{CSS}</style></head>\n"
        f"<body><main>\n{body}\n</main><script>{SCRIPT}</script></body></html>\n"
    )


def _introduction(results: Mapping[str, Any], sections: Sequence[Section]) -> str:
    cells = [section.cell for section in sections]

    def listed(values: Sequence[object]) -> str:
        return ", ".join(escaped(v) for v in dict.fromkeys(values))

    seeds = sorted({int(seed) for cell in cells for seed in cell["seeds"]})
    episodes = sorted({len(cell["seeds"]) for cell in cells})
    lengths = [
        f"{cell['scenario'].get('episode_epochs')} epochs of"
        f" {cell['scenario'].get('epoch_seconds'):g} s"
        for cell in cells
    ]
    kv = " and ".join(escaped(kv_name(k)) for k in dict.fromkeys(c["kv_policy"] for c in cells))
    few = ""
    if episodes and episodes[0] < HEADLINE_SEEDS:
        few = (
            f" <strong>With {episodes[0]} seeds the intervals are rough; take at least"
            f" {HEADLINE_SEEDS} for figures to rely on.</strong>"
        )
    numbers = "no seeds"
    if seeds:
        numbers = f"{' or '.join(map(str, episodes))} seeds ({seeds[0]} to {seeds[-1]})"
    return (
        '<p class="lead">Controllers that set alpha, the embedding cache&#x27;s share of a'
        " node&#x27;s memory pool (the KV cache has the rest), on the same requests to a simulated"
        f" node: {listed([c['workload'] for c in cells])}; {listed(lengths)} each; {numbers};"
        f" {kv}; SLO {results['slo_ms']:g} ms.{few}</p>"
    )


def _glance(sections: Sequence[Section]) -> str:
    """A line a cell: who is first, and how the best policy stands."""
    headings = (
        "workload", "rank 1", "best PPO policy", "baselines ahead / tied / behind",
        "its P99 / best static in hindsight", "its P99 / design-point static",
        "bound: reachable oracle / best static",
    )  # fmt: skip
    rows = [_glance_row(section.cell) for section in sections]
    return "<h2>At a glance</h2>" + table(headings, rows, text_columns=(1, 2))


def _glance_row(cell: Mapping[str, Any]) -> str:
    first = next((place.name for place in ranking(cell) if place.rank == 1), None)
    policy, found = best_policy(cell), verdict(cell)
    name = policy.name if policy else None
    counts = NONE
    if found is not None:
        counts = f"{len(found.ahead)} / {len(found.tied)} / {len(found.behind)}"
    values = [
        f"<th scope=row>{escaped(cell['workload'])}"
        f"<small>{escaped(kv_name(cell['kv_policy']))}</small></th>",
        f"<td class=text>{escaped(first or 'all saturated')}</td>",
        f"<td class=text>{escaped(name or NONE)}"
        + (f"<small>rank {policy.rank}</small></td>" if policy else "</td>"),
        f"<td>{counts}</td>",
        _ratio(cell, name, BEST_STATIC),
        _ratio(cell, name, DESIGN_POINT),
        _ratio(cell, REACHABLE, BEST_STATIC),
    ]
    return "<tr>" + "".join(values) + "</tr>"


def _ratio(cell: Mapping[str, Any], name: str | None, reference: str) -> str:
    """A ratio of mean P99 over seeds as a table cell."""
    controllers = cell["controllers"]
    if name is None or name not in controllers or reference not in controllers:
        return f"<td>{NONE}</td>"
    if is_saturated(cell, name) or is_saturated(cell, reference):
        which = name if is_saturated(cell, name) else reference
        return f"<td>saturated<small>{escaped(which)}</small></td>"
    mine = np.array(controllers[name]["p99_ms"], float)
    theirs = np.array(controllers[reference]["p99_ms"], float)
    return estimate_cell(ratio_of_means(mine, theirs), 3)
