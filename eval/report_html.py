"""Pieces of HTML that the report's sections share."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from eval.statistics import Estimate

NONE = "–"


@dataclass(frozen=True)
class Drawing:
    """A figure with its caption."""

    svg: str
    caption: str


def escaped(value: object) -> str:
    """Text for HTML, quotes included."""
    return html.escape(str(value), quote=True)


def figure_cell(figure: tuple[float, float, float] | None, digits: int) -> str:
    """A value over its interval; what is not there sorts last."""
    if figure is None:
        return f"<td data-v=inf>{NONE}</td>"
    value, low, high = (f"{v:,.{digits}f}".replace("-", "−") for v in figure)
    return f"<td data-v={figure[0]:.6g}>{value}<small>{low} to {high}</small></td>"


def estimate_cell(estimate: Estimate | None, digits: int, scale: float = 1.0) -> str:
    """Likewise of an estimate."""
    if estimate is None:
        return figure_cell(None, digits)
    values = (scale * estimate.value, scale * estimate.low, scale * estimate.high)
    return figure_cell(values, digits)


def table(
    headings: Sequence[str],
    rows: Sequence[str],
    sortable: bool = False,
    text_columns: Sequence[int] = (),
) -> str:
    """A table in a box of its own that scrolls; headings of a sortable one are buttons.

    Args:
        headings: plain text; a sortable table stands sorted by the first.
        rows: `<tr>` elements.
        sortable: by a click on a heading.
        text_columns: places of those that hold words, not numbers.
    """
    head = "".join(
        f"<th scope=col{' aria-sort=ascending' if i == 0 else ''}>"
        f"<button type=button>{escaped(h)}</button></th>"
        if sortable
        else f"<th scope=col{' class=text' if i in text_columns else ''}>{escaped(h)}</th>"
        for i, h in enumerate(headings)
    )
    kind = ' class="sortable"' if sortable else ""
    return (
        f'<div class="scroll" tabindex=0><table{kind}><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def not_shown(missing: Sequence[str]) -> str:
    """A list of what is missing, or nothing."""
    if not missing:
        return ""
    items = "".join(f"<li>{escaped(what)}</li>" for what in missing)
    return f'<div class="missing">Not shown:<ul>{items}</ul></div>'


def kv_name(policy: object) -> str:
    """A KV policy in words."""
    return {"scan_resistant": "scan-resistant KV cache", "lru": "plain LRU KV cache"}.get(
        str(policy), f"{policy} KV cache"
    )
