"""The report's page: HTML from results. Everything that comes from outside is escaped."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eval.statistics import ratio_of_means

BEST_STATIC, DESIGN_POINT = "best static in hindsight", "design-point static"
ALPHA_STAR, REACHABLE = "alpha* oracle", "reachable oracle"
FORESEEN = "foreseen oracle"
ORACLES = (ALPHA_STAR, REACHABLE, FORESEEN)
HEADLINE_SEEDS = 16
NONE = "–"

PAPER_GAP = {
    "steady": {"full": 0.019, "ppo": 0.043, "lstm": 0.041, "static": 0.092},
    "trend": {"full": 0.023, "ppo": 0.051, "lstm": 0.069, "static": 0.061},
    "burst": {"full": 0.031, "ppo": 0.042, "lstm": 0.051, "static": 0.072},
}
"""Mean |alpha - alpha*| in arXiv 2605.04450."""
PAPER_ROWS: tuple[tuple[str, str, Callable[[str], bool]], ...] = (
    ("static", "best static", lambda name: name == BEST_STATIC),
    ("ppo", "PPO only", lambda name: name.lower().startswith("ppo-only")),
    ("lstm", "LSTM + OFT + RC", lambda name: name.lower().startswith("lstm+oft+rc")),
    ("full", "full controller", lambda name: name.lower().startswith("smart")),
)
"""Key in `PAPER_GAP`, the paper's controller, which of ours are like it."""


@dataclass(frozen=True)
class Drawing:
    """A figure with its caption."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Section:
    """A workload under one KV policy: a cell of results.json, its figures and what is missing."""

    cell: dict[str, Any]
    drawings: tuple[Drawing, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Learning:
    """Figures of a learning curve; None where it does not say."""

    steps: int
    episodes: int | None
    episodes_to_95: int | None
    best_ratio: float | None
    best_ratio_step: int | None
    best_ratio_episodes: int | None


@dataclass(frozen=True)
class Policy:
    """A policy's folder name, its policy.json, its learning and what is missing."""

    name: str
    about: dict[str, Any]
    learning: Learning | None = None
    svg: str | None = None
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Column:
    """A column of the summary table."""

    key: str
    heading: str
    scale: float
    digits: int


COLUMNS = (
    Column("p99_ms", "P99, ms", 1, 2),
    Column("qos", "QoS, %", 100, 2),
    Column("gap", "gap", 1, 3),
    Column("regret", "P99 regret, %", 100, 1),
    Column("p99_over_best_static", "P99 / best static", 1, 4),
    Column("room_recovered", "room recovered, %", 100, 0),
    Column("movement", "alpha moved", 1, 1),
)


def escaped(value: object) -> str:
    """Text for HTML, quotes included."""
    return html.escape(str(value), quote=True)


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
    parts = [f"<h1>{title}</h1>", _introduction(results, sections)]
    links = (
        "".join(f'<a href="#w{i}">{escaped(name)}</a>' for i, name in enumerate(workloads))
        + '<a href="#learning">Learning curves</a><a href="#origin">Origin</a>'
    )
    parts.append(f"<nav>{links}</nav>")
    parts.append(_glance(sections))
    for i, name in enumerate(workloads):
        group = [section for section in sections if section.cell["workload"] == name]
        parts.append(f'<section><h2 id="w{i}">{escaped(name)}</h2>')
        parts += [_workload(section) for section in group]
        parts.append(_beside_paper(group))
        parts += [_plots(section, opened=n == 0) for n, section in enumerate(group)]
        parts.append("</section>")
    parts.append(_glossary())
    parts.append(_learning(policies))
    parts.append(_origin(results, sections, policies))
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{CSS}</style></head>\n"
        f"<body><main>\n{body}\n</main><script>{SCRIPT}</script></body></html>\n"
    )


def kv_name(policy: object) -> str:
    """A KV policy in words."""
    return {"scan_resistant": "scan-resistant KV cache", "lru": "plain LRU KV cache"}.get(
        str(policy), f"{policy} KV cache"
    )


def estimate(summary: Mapping[str, Any], name: str) -> tuple[float, float, float] | None:
    """(value, low, high) of a summary, or None where it has no such figure."""
    found = summary.get(name)
    if not isinstance(found, Mapping):
        return None
    values = tuple(found.get(key) for key in ("value", "low", "high"))
    if not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
        return None
    value, low, high = (float(v) for v in values if v is not None)
    return value, low, high


def is_saturated(cell: Mapping[str, Any], name: str) -> bool:
    """Whether a controller is there, and its cell saturated."""
    columns = cell["controllers"].get(name)
    return columns is not None and bool(columns["summary"].get("saturated"))


def shown(cell: Mapping[str, Any], name: str, column: Column) -> tuple[float, float, float] | None:
    """A figure of a controller in the table's unit, or None where there is none to give.

    A saturated controller has none, nor has a ratio to something saturated.
    """
    if is_saturated(cell, name):
        return None
    if column.key == "p99_over_best_static" and is_saturated(cell, BEST_STATIC):
        return None
    if column.key == "room_recovered" and (
        is_saturated(cell, BEST_STATIC) or is_saturated(cell, REACHABLE)
    ):
        return None
    found = estimate(cell["controllers"][name]["summary"], column.key)
    if found is None:
        return None
    value, low, high = (column.scale * v for v in found)
    return value, low, high


def _introduction(results: Mapping[str, Any], sections: Sequence[Section]) -> str:
    cells = [section.cell for section in sections]
    scenarios = [cell["scenario"] for cell in cells]

    def listed(values: Sequence[object]) -> str:
        return ", ".join(escaped(v) for v in dict.fromkeys(values))

    seeds = sorted({int(seed) for cell in cells for seed in cell["seeds"]})
    episodes = sorted({len(cell["seeds"]) for cell in cells})
    lengths = [
        f"{s.get('episode_epochs')} epochs of {s.get('epoch_seconds'):g} s" for s in scenarios
    ]
    utilisation = [f"{s.get('utilisation')}" for s in scenarios]
    kv = " and ".join(escaped(kv_name(k)) for k in dict.fromkeys(c["kv_policy"] for c in cells))
    conditions = [
        f"{s.get('hardware')} profile, {s.get('tables')} tables, histories of"
        f" {s.get('mean_history_tokens'):g} tokens, population x {s.get('population_factor'):g},"
        f" gather bandwidth x {s.get('gather_scale'):g}"
        for s in scenarios
    ]
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
        " node&#x27;s memory pool (the KV cache has the rest), on the same requests:"
        f" {listed([c['workload'] for c in cells])}; {listed(lengths)} each; {numbers};"
        f" {kv}; SLO {results['slo_ms']:g} ms. <em>Best static in hindsight</em> is, for each seed,"
        " the one split of a 0.02 grid with the lowest P99 on that seed&#x27;s very requests, which"
        " nobody knows beforehand; <em>design-point static</em> is the best split for Steady of the"
        " same preset, left there, which is what an operator has. Load keeps the node busy for"
        f" {listed(utilisation)} of the time at the workload&#x27;s own best alpha under the"
        " scan-resistant KV cache; plain LRU gets the same requests. The node is simulated by the"
        f" surrogate ({listed(conditions)}); no figure here was measured on a GPU.{few}</p>"
    )


def _runnable(cell: Mapping[str, Any]) -> list[str]:
    """Controllers that need no knowledge of the requests to come."""
    return [name for name in cell["controllers"] if name not in (*ORACLES, BEST_STATIC)]


def lowest(cell: Mapping[str, Any]) -> str | None:
    """The controller with the lowest P99 of those that can be run; None if all are saturated."""
    figures = {
        name: figure[0]
        for name in _runnable(cell)
        if (figure := shown(cell, name, COLUMNS[0])) is not None
    }
    return min(figures, key=lambda name: figures[name]) if figures else None


def _glance(sections: Sequence[Section]) -> str:
    rows = []
    for section in sections:
        cell = section.cell
        name = lowest(cell)
        values: list[str] = [
            f"<th scope=row>{escaped(cell['workload'])}"
            f"<small>{escaped(kv_name(cell['kv_policy']))}</small></th>",
            f"<td class=text>{escaped(name) if name else 'all saturated'}</td>",
        ]
        for reference in (BEST_STATIC, DESIGN_POINT):
            values.append(_ratio(cell, name, reference))
        values.append(_ratio(cell, REACHABLE, BEST_STATIC))
        rows.append("<tr>" + "".join(values) + "</tr>")
    headings = (
        "workload", "lowest P99 of what can be run", "its P99 / best static in hindsight",
        "its P99 / design-point static", "bound: reachable oracle / best static",
    )  # fmt: skip
    return "<h2>At a glance</h2>" + _table(headings, rows, sortable=False)


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
    found = ratio_of_means(mine, theirs)
    return _figure_cell((found.value, found.low, found.high), 3)


def _workload(section: Section) -> str:
    cell = section.cell
    controllers = cell["controllers"]
    alphas = [float(a) for a in cell["best_static_alpha"]]
    span = " to ".join(f"{a:.2f}" for a in sorted({min(alphas), max(alphas)}))
    notes = [f"Best static alpha in hindsight {span}"]
    if cell.get("design_point_alpha") is not None:
        notes.append(f"design-point alpha {float(cell['design_point_alpha']):.2f}")
    notes.append(_room(cell))
    rows = [_row(cell, name) for name in _by_p99(cell)]
    headings = ("controller", *(column.heading for column in COLUMNS))
    heading = kv_name(cell["kv_policy"])
    heading = heading[0].upper() + heading[1:]
    parts = [
        f"<h3>{escaped(heading)}</h3>",
        f"<p>{'; '.join(notes)}. {len(cell['seeds'])} seeds; interquartile means, 95 % bootstrap"
        " intervals below. Lowest P99 first; headings sort.</p>",
        _table(headings, rows, sortable=True),
    ]
    for name, fault in (cell.get("failed") or {}).items():
        parts.append(
            f'<p class="warn">{escaped(name)} failed on {len(fault["seeds"])} of'
            f" {len(cell['seeds'])} seeds and has no row: {escaped(fault['reason'])}.</p>"
        )
    for name in cell.get("bound_violations") or []:
        parts.append(
            f'<p class="warn">{escaped(name)} has a lower P99 than the reachable oracle on a seed:'
            " the oracle&#x27;s search was too narrow there, and its row is no bound.</p>"
        )
    winner = lowest(cell)
    if winner is not None and not winner.lower().startswith(("ppo", "smart")):
        learned = [n for n in controllers if n.lower().startswith(("ppo", "smart"))]
        if learned:
            parts.append(
                f'<p class="note">The lowest P99 here is that of a baseline, {escaped(winner)}, not'
                " of a learned policy.</p>"
            )
    return "".join(parts)


def _room(cell: Mapping[str, Any]) -> str:
    if REACHABLE not in cell["controllers"]:
        return "oracles were not searched, so gap, regret and room are not known"
    room = cell["controllers"][REACHABLE]["summary"].get("room")
    if room is None or is_saturated(cell, BEST_STATIC):
        return "room not known where a reference is saturated"
    text = f"room between best static and reachable oracle {100 * room:.1f} %"
    if estimate(cell["controllers"][REACHABLE]["summary"], "room_recovered") is None:
        text += ", too little for a share recovered"
    return text


def _by_p99(cell: Mapping[str, Any]) -> list[str]:
    def order(name: str) -> float:
        figure = shown(cell, name, COLUMNS[0])
        return math.inf if figure is None else figure[0]

    return sorted(cell["controllers"], key=order)


def _row(cell: Mapping[str, Any], name: str) -> str:
    columns = cell["controllers"][name]
    flags = columns.get("saturated")
    saturated = sum(map(bool, flags)) if isinstance(flags, list) else 0
    remark = ""
    if name in (*ORACLES, BEST_STATIC):
        remark = "knows the requests"
    elif name == lowest(cell):
        remark = "lowest that can be run"
    if saturated and not is_saturated(cell, name):
        remark += f"{', ' if remark else ''}saturated on {saturated} of {len(flags or [])} seeds"
    small = f"<small>{remark}</small>" if remark else ""
    kind = "oracle" if name in (*ORACLES, BEST_STATIC) else "best" if name == lowest(cell) else ""
    cells = [f"<th scope=row>{escaped(name)}{small}</th>"]
    for i, column in enumerate(COLUMNS):
        figure = shown(cell, name, column)
        if figure is None and i == 0 and is_saturated(cell, name):
            cells.append("<td data-v=inf>saturated</td>")
        else:
            cells.append(_figure_cell(figure, column.digits))
    return f'<tr class="{kind}">' + "".join(cells) + "</tr>"


def _figure_cell(figure: tuple[float, float, float] | None, digits: int) -> str:
    if figure is None:
        return f"<td data-v=inf>{NONE}</td>"
    value, low, high = (f"{v:.{digits}f}".replace("-", "−") for v in figure)
    return f"<td data-v={figure[0]:.6g}>{value}<small>{low} to {high}</small></td>"


def _beside_paper(group: Sequence[Section]) -> str:
    """Gaps here and in the paper, where the regime is one of the paper's."""
    rows = []
    for section in group:
        cell = section.cell
        paper = PAPER_GAP.get(str(cell["scenario"].get("regime")))
        if paper is None or cell["scenario"].get("trace") or ALPHA_STAR not in cell["controllers"]:
            continue
        for key, label, fits in PAPER_ROWS:
            ours = [name for name in cell["controllers"] if fits(name)]
            for name in ours or [None]:
                if name is None:
                    here = "<td>not run</td>"
                elif is_saturated(cell, name):
                    here = "<td>saturated</td>"
                else:
                    here = _figure_cell(shown(cell, name, COLUMNS[2]), 3)
                detail = f"<small>here: {escaped(name)}</small>" if name else ""
                rows.append(
                    f"<tr><th scope=row>{label}{detail}</th>{here}<td>{paper[key]:.3f}</td></tr>"
                )
    if not rows:
        return ""
    return (
        "<h3>Gap beside the paper&#x27;s</h3><p>Mean |alpha − alpha*|. The paper&#x27;s figures"
        " (arXiv 2605.04450) come from its own hardware, workloads and alpha*; they are context,"
        " not a like-for-like comparison.</p>"
        + _table(("controller", "here", "paper, other hardware"), rows, sortable=False)
    )


def _plots(section: Section, opened: bool) -> str:
    parts = [
        f"<figure>{d.svg}<figcaption>{escaped(d.caption)}</figcaption></figure>"
        for d in section.drawings
    ]
    figures = f'<div class="figures">{"".join(parts)}</div>' if parts else ""
    missing = _missing(section.missing)
    name = escaped(kv_name(section.cell["kv_policy"]))
    state = " open" if opened else ""
    return f"<details{state}><summary>Plots, {name}</summary>{figures}{missing}</details>"


def _missing(missing: Sequence[str]) -> str:
    if not missing:
        return ""
    items = "".join(f"<li>{escaped(what)}</li>" for what in missing)
    return f'<div class="missing">Not shown:<ul>{items}</ul></div>'


def _learning(policies: Sequence[Policy]) -> str:
    parts = ['<section><h2 id="learning">Learning curves</h2>']
    if not policies:
        parts.append('<p class="missing">Not shown: no policy folder is named in results.json.</p>')
    else:
        parts.append(
            "<p>“95 % of the final return” is the first episode at which the return, averaged over"
            " five points, made 95 % of its way from its first to its final level. Training draws"
            " another workload for every episode, so the return also says how hard these were; the"
            " evaluation always takes the same workloads.</p>"
        )
    parts.append('<div class="figures">')
    for policy in policies:
        parts.append(f"<figure><h3>{escaped(policy.name)}</h3>")
        if policy.svg:
            parts.append(policy.svg)
        if policy.learning:
            parts.append(f"<figcaption>{_learned(policy.learning)}</figcaption>")
        parts.append(_missing(policy.missing) + "</figure>")
    return "".join(parts) + "</div></section>"


def _learned(learning: Learning) -> str:
    total = f"{learning.steps:,} steps"
    if learning.episodes is not None:
        total += f", {learning.episodes:,} episodes"
    if learning.episodes_to_95 is not None:
        final = f"95 % of the final return after {learning.episodes_to_95:,} episodes"
    else:
        final = (
            "episodes to 95 % of the final return: not measurable, the return did not rise by more"
            " than its noise"
        )
    text = f"{total}; {final}"
    if learning.best_ratio is not None:
        text += f"; lowest evaluation ratio {learning.best_ratio:.4f}"
        text += f" at {learning.best_ratio_step:,} steps"
        if learning.best_ratio_episodes is not None:
            text += f" ({learning.best_ratio_episodes:,} episodes)"
    return escaped(text + ".")


def _glossary() -> str:
    terms = (
        ("P99", "mean over the episode's epochs of the epoch's 99th percentile of latency"),
        ("QoS", "share of all requests within the SLO"),
        ("gap", "mean distance of alpha from alpha*, the alpha that, held since the episode's"
         " start, gives an epoch its lowest mean P99; says little where the curve is flat"),
        ("P99 regret", "P99 over the P99 at alpha* less 1; below 0 is possible, since alpha* is"
         " found on redrawn arrivals and with alpha held"),
        ("reachable oracle", "the best sequence of alphas under the step limit and with the caches'"
         " real delays, found with all requests known: a bound"),
        ("room recovered", "(P99 of best static − P99) / (P99 of best static − P99 of the reachable"
         " oracle); not given where the room is below 2 %; negative is worse than best static"),
        ("alpha moved", "sum of the absolute steps of alpha over the episode"),
        ("saturated", "busy for more than 0.95 of the time, or a growing backlog: the figures would"
         " depend on how long one waits, so none is given"),
    )  # fmt: skip
    items = "".join(f"<dt>{escaped(t)}</dt><dd>{escaped(d)}.</dd>" for t, d in terms)
    return f"<details><summary>What the columns mean</summary><dl>{items}</dl></details>"


def _origin(
    results: Mapping[str, Any], sections: Sequence[Section], policies: Sequence[Policy]
) -> str:
    machine = results.get("machine")
    about = (
        ", ".join(f"{k} {v}".replace("_", " ") for k, v in machine.items() if v is not None)
        if isinstance(machine, Mapping)
        else "not recorded"
    )
    digest = escaped(results.get("load_tables") or "not recorded")
    rows = [
        ("Command", f"<code>{escaped(results.get('command') or 'not recorded')}</code>"),
        ("Machine", escaped(about)),
        (
            "Load tables",
            f"digest <code>{digest}</code>",
        ),
    ]
    for policy in policies:
        config = policy.about.get("mdp_config")
        config = config if isinstance(config, Mapping) else {}
        facts = [
            f"{key} {value}"
            for key, value in (
                ("features", config.get("features")),
                ("reward", config.get("reward")),
                ("seed", policy.about.get("seed")),
                ("weights", str(policy.about.get("weights_sha256", ""))[:12] or None),
            )
            if value is not None
        ]
        revision = escaped(policy.about.get("git_revision") or "not recorded")
        text = f"revision <code>{revision}</code>"
        if facts:
            text += f"; {escaped(', '.join(facts))}"
        rows.append((f"Policy {policy.name}", text))
    records = [
        file
        for section in sections
        for columns in section.cell["controllers"].values()
        for file in (columns.get("record") or [])[:1]
    ]
    example = next((r for r in records if "ppo" in str(r)), records[0] if records else "RECORD")
    rows.append(
        ("Replay", "Every episode is a record. In the folder of this page, <code>python -m"
         f" eval.replay {escaped(example)}</code> runs one again and says whether it matches;"
         " <code>python -m eval.report .</code> draws this page again.")
    )  # fmt: skip
    items = "".join(f"<dt>{escaped(name)}</dt><dd>{text}</dd>" for name, text in rows)
    return f'<footer><h2 id="origin">Origin</h2><dl>{items}</dl></footer>'


def _table(headings: Sequence[str], rows: Sequence[str], sortable: bool) -> str:
    head = "".join(
        f"<th scope=col><button type=button>{escaped(h)}</button></th>"
        if sortable
        else f"<th scope=col>{escaped(h)}</th>"
        for h in headings
    )
    kind = ' class="sortable"' if sortable else ""
    return (
        f'<div class="scroll" tabindex=0><table{kind}><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


CSS = """
:root{color-scheme:light dark;--page:#f9f9f7;--surface:#fff;--ink:#1b1b1a;--muted:#6d6c67;
--grid:#e3e2dc;--limit:#d03b3b;--static:#8f8d86;--tint:#eef4fc;--warn:#fdf1dc;
--series-0:#2a78d6;--series-1:#eb6834;--series-2:#1baf7a;--series-3:#4a3aa7;--series-4:#e87ba4;
--series-5:#eda100;--ramp-0:#9ec5f4;--ramp-1:#6da7ec;--ramp-2:#3987e5;--ramp-3:#256abf;
--ramp-4:#184f95;--ramp-5:#0d366b}
@media (prefers-color-scheme:dark){:root{--page:#0f0f0e;--surface:#1a1a19;--ink:#f2f1ec;
--muted:#a5a39b;--grid:#33322f;--limit:#e66767;--static:#8f8d86;--tint:#17263a;--warn:#35280f;
--series-0:#3987e5;--series-1:#e0713f;--series-2:#22a878;--series-3:#9085e9;--series-4:#d55181;
--series-5:#c98500;--ramp-0:#184f95;--ramp-1:#256abf;--ramp-2:#3987e5;--ramp-3:#6da7ec;
--ramp-4:#9ec5f4;--ramp-5:#d6e7fb}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;overflow-wrap:anywhere}
main{max-width:1120px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.7rem;line-height:1.2;margin:0 0 12px}
h2{font-size:1.3rem;margin:40px 0 8px}
h3{font-size:1.02rem;margin:24px 0 4px}
p{margin:4px 0 12px;max-width:78ch}
small{display:block;font-size:.74rem;font-weight:400;color:var(--muted);white-space:nowrap}
nav{display:flex;flex-wrap:wrap;gap:4px 16px}
a{color:var(--series-0)}
.scroll{overflow-x:auto;background:var(--surface);border:1px solid var(--grid);border-radius:8px;
margin:8px 0 16px;max-width:max-content;min-width:0;width:100%}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums;width:100%;
overflow-wrap:normal}
th,td{padding:6px 12px;text-align:right;vertical-align:top;border-bottom:1px solid var(--grid)}
tbody tr:last-child>*{border-bottom:0}
thead th{vertical-align:bottom;font-weight:600;color:var(--muted);min-width:6.2em}
th:first-child{text-align:left;position:sticky;left:0;background:var(--surface);z-index:1;
border-right:1px solid var(--grid);min-width:8.5em}
tbody th{font-weight:500}
tbody th small{white-space:normal}
td.text{text-align:left}
tr.best>*,tr.best>th:first-child{background:var(--tint)}
tr.oracle>th{font-style:italic}
button{font:inherit;color:inherit;background:none;border:0;padding:0;cursor:pointer;
text-align:inherit}
th[aria-sort=ascending] button::after{content:" ▲"}
th[aria-sort=descending] button::after{content:" ▼"}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:16px;
align-items:start}
figure{margin:0;padding:12px;background:var(--surface);border:1px solid var(--grid);
border-radius:8px;min-width:0;max-width:620px}
figure h3{margin-top:0}
figcaption{font-size:.84rem;color:var(--muted)}
svg{display:block;width:100%;height:auto}
details{margin:12px 0}
summary{cursor:pointer;font-weight:600;padding:6px 0}
.warn{background:var(--warn);padding:8px 12px;border-radius:8px}
.note{border-left:3px solid var(--series-1);padding-left:10px}
.missing{font-size:.88rem;color:var(--muted);margin-top:8px}
.missing ul{margin:2px 0;padding-left:20px}
dl{display:grid;grid-template-columns:minmax(7em,max-content) 1fr;gap:6px 16px;font-size:.92rem}
dt{font-weight:600}
dd{margin:0;min-width:0}
code{font-size:.88em;background:var(--surface);border:1px solid var(--grid);border-radius:4px;
padding:0 4px}
@media (max-width:560px){main{padding:16px 12px 40px}dl{grid-template-columns:1fr;gap:0}
dd{margin-bottom:10px}th,td{padding:5px 8px}th:first-child{min-width:7.5em;max-width:9.5em}
figure{padding:8px}}
"""

SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const sign = head.ariaSort === "ascending" ? -1 : 1;
    const key = row => { const cell = row.cells[column];
      return "v" in cell.dataset ? +cell.dataset.v.replace("inf", "Infinity") : cell.textContent; };
    const compare = (a, b) => { const x = key(a), y = key(b);
      if (x === y) return 0;
      if (x === Infinity || y === Infinity) return x === Infinity ? 1 : -1;
      return sign * (typeof x === "number" ? x - y : x.localeCompare(y)); };
    for (const other of heads) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
    body.append(...[...body.rows].sort(compare));
  }));
}
"""
