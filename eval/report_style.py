"""Style and script of the report's page."""

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
.sortable tbody th>span{display:table-cell}
.rank{min-width:1.9em;padding-right:.5em;text-align:right;color:var(--muted);font-weight:400}
.sortable th:first-child{min-width:13.5em}
th.text,td.text{text-align:left;min-width:9em}
td.text:last-child{min-width:22em}
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
dd{margin-bottom:10px}th,td{padding:5px 8px}th:first-child{min-width:7.5em}
.sortable th:first-child{min-width:9.5em}
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
