// The node's page: asks /status for the epochs that closed since, and draws them. Whatever the node
// says is put on the page as text; nothing here parses markup.
"use strict";

const KEEP = 1000; // epochs, as many as the node remembers
const POLL_MS = 1000;
const TIMEOUT_MS = 5000;
const LATE_S = 5; // and four epochs: without an epoch for longer, something stands still
const ROWS = 40;

const state = {
  records: [], // oldest first
  run: null, // of the node's process: epochs count from 0 again after a restart
  cursor: null, // epoch that the legends tell of; null: the last one
  paused: false,
  failedAt: null, // when the node began not to answer, by the wall clock
  newAt: performance.now(), // when the last epoch came
  node: { ready: true, draining: false },
  answered: false,
};

const $ = id => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function html(tag, classes, text) {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  if (text !== undefined) element.textContent = text;
  return element;
}

function svg(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

// Figures as words. What is missing or no number is a dash.

const number = value => (typeof value === "number" && Number.isFinite(value) ? value : null);
const words = format => value => (number(value) === null ? "–" : format(value));
const share = words(v => v.toFixed(2));
const percent = words(v => `${(100 * v).toFixed(0)} %`);
const ms = words(v => `${v < 100 ? v.toFixed(1) : v.toFixed(0)} ms`);
const perSecond = words(v => `${v.toFixed(v < 10 ? 1 : 0)} /s`);
const bytes = words(v => `${(v / 2 ** (v < 2 ** 30 ? 20 : 30)).toFixed(1)} ${v < 2 ** 30 ? "MiB" : "GiB"}`);
const count = words(v => v.toLocaleString("en"));
const signed = v => (v > 0 ? "+" : v < 0 ? "−" : "") + Math.abs(v).toFixed(Number.isInteger(v) ? 0 : 1);
const clock = seconds => new Date(1000 * seconds).toLocaleTimeString("en-GB");

// What the charts show. An epoch whose telemetry was not sound has no duration, and no measurements.

const told = record => record.duration_s > 0;
const measured = pick => record => (told(record) ? number(pick(record)) : null);
const latency = pick => measured(r => (pick(r) > 0 ? pick(r) : null));
// A share of requests says nothing where there were none.
const ofRequests = pick => measured(r => (r.requests > 0 ? pick(r) : null));

const CHARTS = [
  {
    title: "alpha", format: share, top: () => 1,
    lines: [
      { name: "target", look: "s0", step: true, value: r => r.alpha_centi / 100 },
      { name: "resident", look: "s2 dash", value: measured(r => r.alpha_resident) },
      {
        name: "wanted, not applied", look: "s1", dots: true,
        value: r => (r.wanted_alpha_centi === r.next_alpha_centi ? null : r.wanted_alpha_centi / 100),
      },
    ],
  },
  {
    title: "Latency, ms (log scale)", format: ms, log: true, limit: r => number(r.slo_ms),
    lines: [
      { name: "P99", look: "s0", value: latency(r => r.p99_ms) },
      { name: "P50", look: "s2 dash", value: latency(r => r.p50_ms) },
    ],
  },
  {
    title: "Hit rates", format: percent, top: () => 1,
    lines: [
      { name: "KV tokens", look: "s0", value: ofRequests(r => r.kv_hit) },
      { name: "embedding rows", look: "s1 dash", value: ofRequests(r => r.emb_hit) },
    ],
  },
  {
    title: "Workload", format: percent, top: most => Math.max(1, most),
    lines: [
      { name: "working set / pool", look: "s0", value: measured(r => r.working_set) },
      { name: "hot share", look: "s1 dash", value: ofRequests(r => r.hot_share) },
      { name: "utilisation", look: "s2 dotted", value: measured(r => r.utilisation) },
    ],
  },
  {
    title: "Pages by owner", format: count, stacked: true,
    lines: [
      { name: "embedding", look: "a0", value: measured(r => r.embedding_pages) },
      { name: "KV", look: "a1", value: measured(r => r.kv_pages) },
      { name: "free", look: "a2", value: measured(r => r.free_pages) },
    ],
  },
  {
    title: "Requests a second", format: perSecond, top: most => 1.05 * most,
    lines: [
      { name: "completed", look: "s0", value: measured(r => r.requests / r.duration_s) },
      { name: "refused", look: "s1 dash", value: measured(r => r.refused / r.duration_s) },
    ],
  },
];

const HEIGHT = 190;
const WORD = 34; // width of "burst"
const MARGIN = { left: 40, right: 10, top: 16, bottom: 20 };

function build() {
  for (const chart of CHARTS) {
    const figure = html("figure");
    figure.append(html("h3", "", chart.title));
    chart.svg = svg("svg", { role: "img", "aria-label": chart.title });
    const legend = html("ul", "legend");
    chart.told = chart.lines.map(line => {
      const item = html("li");
      item.append(sample(chart, line), line.name, html("b", "", "–"));
      legend.append(item);
      return item.lastChild;
    });
    figure.append(chart.svg, legend);
    $("figures").append(figure);
    chart.svg.addEventListener("pointermove", event => point(chart, event));
    chart.svg.addEventListener("pointerleave", () => moveTo(null));
  }
  new ResizeObserver(() => draw()).observe($("figures"));
}

function sample(chart, line) {
  const picture = svg("svg", { viewBox: "0 0 24 10", "aria-hidden": "true" });
  if (chart.stacked) picture.append(svg("rect", { class: line.look, width: 24, height: 10 }));
  else if (line.dots) picture.append(svg("circle", { class: `dots ${line.look}`, cx: 12, cy: 5, r: 3 }));
  else picture.append(svg("path", { class: `line ${line.look}`, d: "M0 5H24" }));
  return picture;
}

// Drawing: x is the epoch, so that a jump of the system's clock bends nothing.

function shown() {
  return state.records.slice(-Number($("window").value));
}

function draw() {
  const records = shown();
  for (const chart of CHARTS) if (records.length) drawChart(chart, records);
  tellCursor(records);
}

function drawChart(chart, records) {
  const width = Math.max(chart.svg.clientWidth, 160);
  chart.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  const columns = chart.lines.map(line => records.map(line.value));
  if (chart.stacked) stack(columns);
  const y = verticalScale(chart, columns, records);
  const first = records[0].epoch, last = Math.max(records.at(-1).epoch, first + 1);
  const x = epoch =>
    MARGIN.left + ((epoch - first) / (last - first)) * (width - MARGIN.left - MARGIN.right);
  chart.x = { first, last, width };
  const parts = [...spans(records, x), ...axes(chart, y, records, x, width)];
  const epochs = records.map(record => record.epoch);
  const order = chart.lines.map((_, i) => i);
  if (chart.stacked) order.reverse(); // the tallest sum lies lowest
  for (const i of order) parts.push(...drawLine(chart, chart.lines[i], epochs, columns[i], x, y));
  parts.push(...limitLine(chart, y, records, width));
  chart.at = svg("path", { class: "at", d: "" });
  chart.place = x;
  chart.svg.replaceChildren(...parts, chart.at);
}

function stack(columns) {
  for (let i = 1; i < columns.length; i++)
    columns[i] = columns[i].map((v, k) => (v === null ? null : v + (columns[i - 1][k] ?? 0)));
}

function verticalScale(chart, columns, records) {
  const values = columns.flat().filter(value => value !== null);
  const limits = chart.limit ? records.map(chart.limit).filter(value => value !== null) : [];
  const most = Math.max(...values, ...limits, 0);
  const span = HEIGHT - MARGIN.top - MARGIN.bottom;
  if (chart.log) {
    const low = 0.8 * Math.min(...values, ...limits, most || 1) || 1;
    const high = 1.25 * Math.max(most, 2 * low);
    const place = v => HEIGHT - MARGIN.bottom - (Math.log(v / low) / Math.log(high / low)) * span;
    return { place, ticks: logTicks(low, high) };
  }
  const high = (chart.top ? chart.top(most) : most) || 1;
  return { place: v => HEIGHT - MARGIN.bottom - (v / high) * span, ticks: ticks(high) };
}

function ticks(high) {
  const rough = high / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find(factor => factor * power >= rough * 0.999);
  const found = [];
  for (let i = 0; i * step <= high * 1.0001; i++) found.push(i * step);
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10)
    for (const factor of [1, 2, 5])
      if (factor * power >= low && factor * power <= high) found.push(factor * power);
  return found.length > 7 ? found.filter(tick => Number.isInteger(Math.log10(tick))) : found;
}

// Shaded: bursts, and epochs without sound telemetry. Each span bears its kind for whoever reads it.
function spans(records, x) {
  const kind = r => (told(r) ? (r.state === "normal" ? "" : r.state) : "untold");
  const known = { burst: "burst", recovering: "", untold: "" };
  const found = [];
  let named = -Infinity; // where the last word ends: bursts may follow closely
  for (let i = 0; i < records.length; ) {
    let end = i;
    while (end + 1 < records.length && kind(records[end + 1]) === kind(records[i])) end++;
    const name = kind(records[i]);
    if (name in known) {
      const left = Math.max(x(records[i].epoch - 0.5), MARGIN.left);
      const right = Math.max(x(records[end].epoch + 0.5), left + 1.5);
      const top = MARGIN.top, height = HEIGHT - MARGIN.top - MARGIN.bottom;
      found.push(svg("rect", { class: name, x: left, y: top, width: right - left, height }));
      if (known[name] && left > named) {
        found.push(svg("text", { class: "burst", x: left, y: top - 4 }, known[name]));
        named = left + WORD;
      }
    }
    i = end + 1;
  }
  return found;
}

function axes(chart, y, records, x, width) {
  const parts = [];
  const right = width - MARGIN.right, bottom = HEIGHT - MARGIN.bottom;
  for (const tick of y.ticks) {
    const at = y.place(tick);
    parts.push(svg("path", { class: "gridline", d: `M${MARGIN.left} ${at}H${right}` }));
    parts.push(svg("text", { x: MARGIN.left - 5, y: at + 4, "text-anchor": "end" }, brief(tick, chart)));
  }
  const most = Math.max(2, Math.floor((right - MARGIN.left) / 110));
  for (let i = 0; i < Math.min(most, records.length); i++) {
    const record = records[Math.round((i * (records.length - 1)) / Math.max(most - 1, 1))];
    if (!record) continue;
    const anchor = i === 0 ? "start" : i === most - 1 ? "end" : "middle";
    parts.push(svg("text", { x: x(record.epoch), y: HEIGHT - 5, "text-anchor": anchor }, clock(record.end_unix_s)));
  }
  parts.push(svg("path", { class: "axis", d: `M${MARGIN.left} ${bottom}H${right}` }));
  return parts;
}

function limitLine(chart, y, records, width) {
  const limit = chart.limit ? chart.limit(records.at(-1)) : null;
  if (limit === null) return [];
  const at = y.place(limit), right = width - MARGIN.right;
  return [
    svg("path", { class: "limit-line", d: `M${MARGIN.left} ${at}H${right}` }),
    svg("text", { class: "limit", x: right, y: at - 4, "text-anchor": "end" }, "SLO"),
  ];
}

function brief(tick, chart) {
  if (chart.format === percent) return `${Math.round(100 * tick)} %`;
  if (tick >= 10000) return `${tick / 1000}k`;
  return String(Number(tick.toPrecision(3)));
}

function drawLine(chart, line, epochs, values, x, y) {
  if (line.dots)
    return values.flatMap((value, i) =>
      value === null
        ? []
        : [svg("circle", { class: `dots ${line.look}`, cx: x(epochs[i]), cy: y.place(value), r: 2.6 })],
    );
  const paths = [];
  for (let i = 0; i < values.length; ) {
    if (values[i] === null) { i++; continue; }
    let end = i;
    while (end + 1 < values.length && values[end + 1] !== null) end++;
    paths.push(stroke(chart, line, epochs, values, i, end, x, y));
    i = end + 1;
  }
  return paths;
}

function stroke(chart, line, epochs, values, start, end, x, y) {
  let d = `M${x(epochs[start]).toFixed(1)} ${y.place(values[start]).toFixed(1)}`;
  for (let i = start + 1; i <= end; i++) {
    const right = x(epochs[i]).toFixed(1), height = y.place(values[i]).toFixed(1);
    d += line.step ? `H${right}V${height}` : `L${right} ${height}`;
  }
  if (start === end) d += "h2"; // a lone epoch is seen, too
  if (!chart.stacked) return svg("path", { class: `line ${line.look}`, d });
  d += `V${y.place(0)}H${x(epochs[start]).toFixed(1)}Z`;
  return svg("path", { class: `area ${line.look}`, d });
}

// The epoch that the legends tell of: under the pointer, by the slider, or the last one.

function point(chart, event) {
  if (!chart.x) return;
  const { first, last, width } = chart.x;
  const across = (event.offsetX - MARGIN.left) / (width - MARGIN.left - MARGIN.right);
  moveTo(Math.round(first + Math.min(Math.max(across, 0), 1) * (last - first)));
}

function moveTo(epoch) {
  state.cursor = epoch;
  tellCursor(shown());
}

function tellCursor(records) {
  if (!records.length) return;
  const last = records.at(-1), first = records[0];
  const record = state.cursor === null ? last : (records.find(r => r.epoch >= state.cursor) ?? last);
  const slider = $("cursor");
  slider.min = first.epoch;
  slider.max = last.epoch;
  slider.value = record.epoch;
  const moment = `epoch ${record.epoch}, ${clock(record.end_unix_s)}`;
  $("moment").textContent = state.cursor === null ? `${moment}, the last` : moment;
  slider.setAttribute("aria-valuetext", moment);
  for (const chart of CHARTS) {
    const told = chart.lines.map(line => chart.format(line.value(record)));
    chart.told.forEach((element, i) => { element.textContent = told[i]; });
    const read = chart.lines.map((line, i) => `${line.name} ${told[i]}`).join(", ");
    chart.svg.setAttribute("aria-label", `${chart.title} by epoch; at ${moment}: ${read}`);
    if (!chart.at) continue;
    const line = state.cursor === null ? "" : `M${chart.place(record.epoch)} ${MARGIN.top}V${HEIGHT - MARGIN.bottom}`;
    chart.at.setAttribute("d", line);
  }
}

// Badges, tiles, table.

function badge(id, text, tone) {
  const element = $(id);
  element.hidden = false;
  element.className = tone ? `badge ${tone}` : "badge";
  element.textContent = text;
}

function tellState() {
  const last = state.records.at(-1);
  const { text, tone, banner } = condition(last);
  badge("badge-node", text, tone);
  $("banner").hidden = !banner;
  $("banner").className = tone === "warn" ? "banner warn" : "banner";
  if ($("banner").textContent !== banner) $("banner").textContent = banner;
  document.querySelector("main").classList.toggle("lost", state.failedAt !== null);
  document.title = tone === "good" ? "HLEM node" : `${text} – HLEM node`;
  if (!last) return;
  badge("badge-mode", `mode ${last.mode}`, last.mode === "active" ? "good" : "warn");
  badge("badge-state", last.state, last.state === "normal" ? "good" : "warn");
  const over = last.p99_ms > last.slo_ms;
  if (!told(last)) badge("badge-slo", "no sound telemetry", "bad");
  else if (!(last.p99_ms > 0)) badge("badge-slo", "no requests", "");
  else badge("badge-slo", over ? "P99 over SLO" : "P99 within SLO", over ? "bad" : "good");
}

function condition(last) {
  if (state.failedAt !== null) {
    const since = new Date(state.failedAt).toLocaleTimeString("en-GB");
    return { text: "no answer", tone: "bad", banner: `The node has not answered since ${since}. What is shown is from before.` };
  }
  if (!state.answered) return { text: "connecting", tone: "", banner: "" };
  if (state.node.draining)
    return { text: "draining", tone: "warn", banner: "The node is draining: it finishes what it has and takes no new requests." };
  if (!state.node.ready)
    return { text: "not ready", tone: "bad", banner: "The node takes no requests: it is starting, or it has failed." };
  const late = (performance.now() - state.newAt) / 1000;
  if (late > LATE_S + 4 * (last ? last.duration_s : 0))
    return { text: "standing still", tone: "bad", banner: `No epoch has ended for ${late.toFixed(0)} s, though the node answers.` };
  return { text: "serving", tone: "good", banner: "" };
}

const gone = r => (r.histories_removed > 0 ? `, ${count(r.histories_removed)} removed` : "");

const TILES = [
  ["P99 / SLO", r => `${words(v => v.toFixed(v < 100 ? 1 : 0))(latency(l => l.p99_ms)(r))} / ${number(r.slo_ms) ?? "–"} ms`],
  ["Within SLO", r => percent(ofRequests(o => o.qos)(r))],
  ["alpha", r => share(r.next_alpha_centi / 100)],
  ["KV hits", r => percent(ofRequests(o => o.kv_hit)(r))],
  ["Embedding hits", r => percent(ofRequests(o => o.emb_hit)(r))],
  ["Requests", r => perSecond(told(r) ? r.requests / r.duration_s : null)],
  ["Waiting", r => count(told(r) ? r.backlog : null)],
  ["Pending pages", r => count(told(r) ? r.pending_pages : null)],
  ["Users on disk", r => `${count(r.history_users)}, ${bytes(r.history_bytes)}${gone(r)}`],
];

function tellTiles() {
  const last = state.records.at(-1);
  if (!last) return;
  const box = $("tiles");
  if (!box.children.length)
    for (const [name] of TILES) {
      const tile = html("div");
      tile.append(html("dt", "", name), html("dd"));
      box.append(tile);
    }
  TILES.forEach(([, value], i) => { box.children[i].lastChild.textContent = value(last); });
}

function tellTable() {
  const only = $("filter").value === "moved";
  const moved = r => r.next_alpha_centi !== r.alpha_centi;
  const rows = [];
  for (let i = state.records.length - 1; i >= 0 && rows.length < ROWS; i--) {
    const record = state.records[i];
    if (!only || moved(record) || record.held) rows.push(row(record, moved(record)));
  }
  $("decisions").tBodies[0].replaceChildren(...rows);
}

function row(record, moved) {
  const line = html("tr", record.state === "burst" ? "burst" : moved ? "moved" : "");
  const head = html("th", "", String(record.epoch));
  head.scope = "row";
  head.append(html("small", "", clock(record.end_unix_s)));
  const before = share(record.alpha_centi / 100), after = share(record.next_alpha_centi / 100);
  const layers = Object.entries(record.parts ?? {}).map(([name, part]) => `${name} ${signed(Number(part))}`);
  line.append(
    head,
    html("td", "", moved ? `${before} → ${after}` : after),
    html("td", "", share(record.wanted_alpha_centi / 100)),
    html("td", "text held", record.held),
    html("td", "text layers", layers.join(", ")),
    html("td", "text reason", record.reason),
    html("td", "text", record.mode === "active" ? record.state : `${record.state}, ${record.mode}`),
    html("td", "", words(v => v.toFixed(1))(latency(r => r.p99_ms)(record))),
    html("td", "", words(v => v.toFixed(0))(record.decision_us)),
  );
  return line;
}

function show() {
  tellState();
  if (state.paused || document.hidden) return;
  tellTiles();
  draw();
  tellTable();
}

// Asking the node.

async function ask() {
  const after = state.records.at(-1)?.epoch ?? -1;
  const answer = await fetch(`status?after=${after}`, {
    cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  if (!answer.ok) throw new Error(String(answer.status));
  return answer.json();
}

function take(said) {
  state.failedAt = null;
  state.answered = true;
  state.node = { ready: said.ready !== false, draining: said.draining === true };
  const restarted = state.run !== null && said.run !== state.run;
  state.run = said.run ?? null;
  if (restarted) { state.records = []; state.cursor = null; return true; }
  if (said.epochs.length) state.newAt = performance.now();
  const last = state.records.at(-1)?.epoch ?? -1;
  state.records.push(...said.epochs.filter(record => record.epoch > last));
  state.records.splice(0, Math.max(state.records.length - KEEP, 0));
  return said.epochs.length > 0;
}

async function poll() {
  let news = false;
  try {
    news = take(await ask());
  } catch {
    state.failedAt ??= Date.now();
  }
  if (news) show();
  else tellState();
  setTimeout(poll, POLL_MS);
}

function listen() {
  $("window").addEventListener("change", draw);
  $("filter").addEventListener("change", tellTable);
  $("controls").addEventListener("submit", event => event.preventDefault());
  $("cursor").addEventListener("input", event => {
    const epoch = Number(event.target.value);
    moveTo(epoch === Number(event.target.max) ? null : epoch);
  });
  $("pause").addEventListener("click", () => {
    state.paused = !state.paused;
    $("pause").setAttribute("aria-pressed", String(state.paused));
    show();
  });
  document.addEventListener("visibilitychange", show);
}

build();
listen();
poll();
