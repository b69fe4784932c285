// Draws the report from the data in the page. Text of runs is only ever set as text (`textContent`), never as HTML.
"use strict";
(() => {
const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const COLOURS = ["#3b7dea", "#ec6f35", "#23a877", "#b265d9", "#d4a017", "#e0527f", "#15a9bf", "#8c7b6b"];
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const EVENTS = { sync: "#15a9bf", BEMA: "#b265d9", "reference moved": "#15a9bf", resumed: "#8c7b6b", "not finite": "#d93a3a" };
const FIRST_ROWS = 40;
const state = { smoothing: 0, events: true, zoom: null };
const plots = [];

// Elements

function el(tag, options, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options || {})) {
    if (name === "on") for (const [event, call] of Object.entries(value)) node.addEventListener(event, call);
    else if (name === "style") Object.assign(node.style, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false).map((c) => (c instanceof Node ? c : String(c))));
  return node;
}
const swatch = (i) => (RUNS.length > 1 ? el("span", { class: "swatch", style: { background: colour(i) } }) : null);
const colour = (i) => COLOURS[i % COLOURS.length];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const slug = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "-");
function show(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}
function section(title, ...children) {
  return el("section", { id: slug(title) }, el("h2", {}, title), ...children);
}

// Header

function header(titles) {
  const smoothing = el("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: 0, "aria-label": "smoothing", style: { width: "90px" },
    on: { input: (e) => { state.smoothing = Number(e.target.value); plots.forEach((plot) => plot.refill()); } } });
  const events = el("input", { type: "checkbox", checked: true,
    on: { change: (e) => { state.events = e.target.checked; plots.forEach((plot) => plot.chart.redraw(false)); } } });
  return el("header", {},
    el("span", { class: "brand" }, "preftune report"),
    el("nav", {}, titles.map((title) => el("a", { href: "#" + slug(title) }, title))),
    el("label", {}, "smoothing", smoothing),
    el("label", {}, events, "events"),
    el("button", { id: "reset", title: "Show all steps again (or double-click a plot)", on: { click: () => zoom(null) } }, "all steps"),
    themeButton());
}
function themeButton() {
  const names = ["auto", "light", "dark"];
  const button = el("button", { id: "theme", title: "Colours: of the system, light, dark" });
  const stored = () => { try { return localStorage.getItem("preftune-theme"); } catch { return null; } };
  const apply = (name) => {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    button.textContent = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" }[name];
    button.dataset.name = name;
    plots.forEach((plot) => plot.chart.redraw(false));
  };
  button.addEventListener("click", () => {
    const next = names[(names.indexOf(button.dataset.name) + 1) % names.length];
    try { localStorage.setItem("preftune-theme", next); } catch { /* a page from a file may have no storage */ }
    apply(next);
  });
  apply(names.includes(stored()) ? stored() : "auto");
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plots.forEach((plot) => plot.chart.redraw(false)));
  return button;
}

// Summary and health

function summary() {
  const body = RUNS.length === 1 ? single(RUNS[0]) : el("div", { class: "card scroll" }, several());
  return el("section", { id: "summary" },
    el("h1", {}, RUNS.length === 1 ? RUNS[0].name : `${RUNS.length} runs`),
    el("p", { class: "sub" }, RUNS.length === 1 ? RUNS[0].path + " · " : "", "written ", DATA.generated),
    body,
    RUNS.flatMap((run) => run.problems.map((text) => el("p", { class: "problem" }, RUNS.length > 1 ? run.name + ": " : "", text))));
}
function single(run) {
  return [el("div", { class: "tiles" }, run.headlines.map((line) => el("div", { class: "card tile" },
    el("div", { class: "name" }, line.name), el("div", { class: "now" }, show(line.last)), el("div", { class: "was" }, "at first ", show(line.first))))),
  el("dl", { class: "card facts", style: { margin: 0 } }, Object.entries(run.facts).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))))];
}
function several() {
  const facts = [...new Set(RUNS.flatMap((run) => Object.keys(run.facts)))];
  const lines = [...new Set(RUNS.flatMap((run) => run.headlines.map((line) => line.name)))];
  const head = el("tr", {}, el("th"), RUNS.map((run, i) => el("th", { title: run.path }, swatch(i), run.name)));
  const rows = facts.map((name) => el("tr", {}, el("th", {}, name), RUNS.map((run) => el("td", {}, run.facts[name] ?? "–"))));
  const values = lines.map((name) => el("tr", {}, el("th", {}, name), RUNS.map((run) => {
    const line = run.headlines.find((item) => item.name === name);
    if (!line) return el("td", { class: "num none" }, "–");
    return el("td", { class: "num" }, el("span", { class: "from" }, show(line.first)), el("b", {}, show(line.last)));
  })));
  return el("table", {}, head, rows, values);
}
function health() {
  const cards = RUNS.flatMap((run, i) => run.findings.map((finding) => findingCard(run, i, finding)));
  if (!cards.length)
    cards.push(el("div", { class: "card finding fine" }, el("div", { class: "head" }, el("span", { class: "badge" }, "fine"), el("b", {}, "Nothing stands out")),
      el("p", {}, "None of the checks found a pattern of trouble in what was logged.")));
  return section("Health", el("div", { class: "findings" }, cards));
}
function findingCard(run, i, finding) {
  const steps = finding.step === null ? "" : finding.step === finding.last_step ? `step ${finding.step}` : `steps ${finding.step} to ${finding.last_step}`;
  return el("div", { class: "card finding" + (finding.severe ? " severe" : ""), "data-code": finding.code },
    el("div", { class: "head" },
      el("span", { class: "badge" }, finding.severe ? "severe" : "warning"), el("b", {}, finding.title),
      el("span", { class: "where" }, swatch(i), RUNS.length > 1 ? run.name + (steps ? " · " : "") : "", steps)),
    el("p", {}, finding.text),
    el("p", {}, finding.remedy, " ", el("a", { href: `${DATA.docs}/health.md#${finding.code}` }, `${DATA.docs}/health.md#${finding.code}`)));
}

// Curves

const STEPS = RUNS.flatMap((run) => Object.values(run.series).flatMap((points) => [points[0][0], points[0][points[0].length - 1]]));
const SPAN = STEPS.length ? [Math.min(...STEPS), Math.max(...STEPS)] : [0, 1];
if (SPAN[0] === SPAN[1]) { SPAN[0] -= 1; SPAN[1] += 1; }

function zoom(range) {
  state.zoom = range;
  for (const plot of plots) plot.chart.setScale("x", { min: SPAN[0], max: SPAN[1] });
}
function smooth(values) {
  if (!state.smoothing) return values;
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = state.smoothing * mean + (1 - state.smoothing) * value;
    weight = state.smoothing * weight + (1 - state.smoothing);
    return mean / weight;
  });
}
const short = (name) => name.replace(/^[^/]+\//, "");
function curvesOf(plot) {
  const curves = [];
  const bases = [...new Set(plot.metrics.map((name) => name.replace(/^(eval|test)_/, "")))];
  RUNS.forEach((run, i) => plot.metrics.forEach((metric) => {
    if (!(metric in run.series)) return;
    const base = bases.indexOf(metric.replace(/^(eval|test)_/, ""));
    const apart = base >= 0 && /^(eval|test)_/.test(metric);
    const byRun = RUNS.length > 1;
    curves.push({ run: i, metric, points: run.series[metric],
      label: byRun ? [run.name, bases.length > 1 ? short(bases[base]) : null, apart ? metric.slice(0, 4) : null].filter(Boolean).join(" · ") : metric,
      stroke: colour(byRun ? i : base < 0 ? plot.metrics.indexOf(metric) : base),
      dash: DASHES[(byRun ? plot.metrics.indexOf(metric) : apart ? 1 : 0) % DASHES.length] });
  }));
  return curves;
}
function plotCard(plot) {
  const curves = curvesOf(plot);
  const place = el("div");
  const kinds = plot.marked ? [...new Set(RUNS.flatMap((run) => run.events.map((event) => event.kind)))] : [];
  const card = el("div", { class: "card plot", "data-plot": plot.title },
    el("div", { class: "title" }, plot.title),
    el("div", { class: "note" }, plot.note, plot.note && kinds.length ? " " : "",
      kinds.map((kind) => el("span", { style: { color: EVENTS[kind], marginRight: "8px", whiteSpace: "nowrap" } }, "┊ " + kind))),
    place);
  const self = { card, place, curves, marked: plot.marked, chart: null, refill: null, raw: null };
  const fill = () => {
    const tables = curves.map((curve) => [curve.points[0], smooth(curve.points[1])]);
    self.raw = state.smoothing ? uPlot.join(curves.map((curve) => curve.points)) : null;
    return uPlot.join(tables);
  };
  self.refill = () => self.chart.setData(fill());
  self.chart = new uPlot(options(self), fill(), place);
  plots.push(self);
  return self;
}
function last(values) {
  return values.findLast((value) => value !== null) ?? null;
}
function nearest(u, series, index) {
  const values = u.data[series];
  for (let away = 0; away < values.length; away++) {
    if (values[index - away] != null) return index - away;
    if (values[index + away] != null) return index + away;
  }
  return index;
}
function options(self) {
  const axis = { stroke: () => css("--soft"), grid: { stroke: () => css("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  return {
    width: Math.max(200, self.place.clientWidth || 420), height: 210, padding: [8, 10, 0, 0],
    scales: { x: { time: false, range: () => state.zoom || SPAN }, y: { range: (u, low, high) => padded(low, high) } },
    axes: [{ ...axis, size: 28, space: 60, values: (u, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? tick.toLocaleString("en") : "")) },
           { ...axis, size: (u, values) => 14 + 6.4 * Math.max(2, ...(values || []).map((text) => text.length)), values: (u, ticks) => ticks.map(show) }],
    legend: { live: true, markers: { width: 3, dash: (u, series) => dashName(self.curves[series - 1]?.dash), stroke: (u, series) => self.curves[series - 1]?.stroke } },
    cursor: { points: { size: 7 }, drag: { x: true, y: false, setScale: false },
      dataIdx: nearest, bind: { dblclick: () => () => { zoom(null); return null; } },
      sync: { key: "steps", scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } } },
    series: [{ label: "step", value: (u, value) => (value === null || value === undefined ? "last" : value.toLocaleString("en")) },
      ...self.curves.map((curve) => ({ label: curve.label, stroke: curve.stroke, width: 1.8, dash: curve.dash,
        points: { show: curve.points[0].length <= 30, size: 5, fill: curve.stroke },
        value: (u, value, series, index) => show(index === null || index === undefined ? last(curve.points[1]) : value) }))],
    hooks: {
      setSelect: [(u) => {
        if (u.select.width < 5) return;
        const range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
        u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        zoom(range);
      }],
      drawClear: [(u) => { if (self.marked && state.events) drawEvents(u); }],
      drawSeries: [(u, series) => { if (self.raw && u.series[series].show) drawRaw(u, self.raw, series); }],
    },
  };
}
const dashName = (dash) => (!dash || !dash.length ? "solid" : dash[0] <= 2 ? "dotted" : "dashed");
function padded(low, high) {
  if (low === null || high === null || !isFinite(low)) return [0, 1];
  const room = high > low ? (high - low) * 0.07 : (Math.abs(high) * 0.1 || 1);
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}
function drawEvents(u) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  RUNS.forEach((run) => run.events.forEach((event) => {
    if (event.step < u.scales.x.min || event.step > u.scales.x.max) return;
    const x = Math.round(u.valToPos(event.step, "x", true));
    ctx.strokeStyle = EVENTS[event.kind];
    ctx.globalAlpha = run.events.length > 40 ? 0.3 : 0.75;
    ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
  }));
  ctx.restore();
}
function drawRaw(u, raw, series) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
  ctx.strokeStyle = u.series[series].stroke(u, series); ctx.globalAlpha = 0.28; ctx.lineWidth = devicePixelRatio;
  ctx.beginPath();
  raw[0].forEach((step, i) => {
    const value = raw[series][i];
    if (value == null) return;
    ctx.lineTo(u.valToPos(step, "x", true), u.valToPos(value, "y", true));
  });
  ctx.stroke();
  ctx.restore();
}
function groups() {
  return DATA.groups.map((group) => {
    const grid = el("div", { class: "plots" });
    return { node: section(group.title, grid), draw: () => group.plots.forEach((plot) => drawInto(grid, plot)) };
  });
}
function drawInto(grid, plot) {
  const self = plotCard(plot);
  grid.append(self.card);
  const fit = () => {
    const width = Math.floor(self.place.clientWidth);
    if (width > 100 && width !== self.chart.width) self.chart.setSize({ width, height: self.chart.height });
  };
  fit();
  new ResizeObserver(() => requestAnimationFrame(fit)).observe(self.place);
}

// Completions

function completions() {
  if (!DATA.tables.length) return null;
  const stepsOf = (table) => [...new Set(DATA.tables[table].rows.map((row) => row.step))];
  const view = { columns: startColumns(stepsOf), query: "", most: FIRST_ROWS };
  const grid = el("div", { class: "card grid", id: "completions-grid" });
  const count = el("span", { class: "count", id: "completions-count", role: "status" });
  const more = el("button", { style: { marginTop: "10px" }, on: { click: () => { view.most += 200; draw(); } } }, "Show more rows");
  const filter = el("input", { type: "search", id: "completions-filter", placeholder: "Filter prompts and completions", "aria-label": "Filter prompts and completions",
    on: { input: (e) => { view.query = e.target.value.toLowerCase(); view.most = FIRST_ROWS; draw(); } } });
  const add = el("button", { on: { click: () => { view.columns.push({ ...view.columns[view.columns.length - 1] }); draw(); } } }, "+ column");
  const left = DATA.tables.reduce((sum, table) => sum + table.left_out, 0);

  function columnHead(column, i) {
    const source = el("select", { "aria-label": "table", on: { change: (e) => {
      column.table = Number(e.target.value);
      const steps = stepsOf(column.table);
      if (!steps.includes(column.step)) column.step = steps[steps.length - 1];
      draw();
    } } }, DATA.tables.map((table, t) => el("option", { value: t, selected: t === column.table }, tableName(table))));
    const steps = el("select", { "aria-label": "step", class: "step", on: { change: (e) => { column.step = Number(e.target.value); draw(); } } },
      stepsOf(column.table).map((step) => el("option", { value: step, selected: step === column.step }, `step ${step.toLocaleString("en")}`)));
    return [swatch(DATA.tables[column.table].run), DATA.tables.length > 1 ? source : null, steps,
      view.columns.length > 1 ? el("button", { title: "Remove this column", on: { click: () => { view.columns.splice(i, 1); draw(); } } }, "×") : null];
  }
  function draw() {
    const { rows, matched } = completionRows(view.columns);
    const kept = rows.filter((row) => !view.query || row.cells.flat().some((entry) => (entry.prompt + "\n" + entry.completion).toLowerCase().includes(view.query)));
    const shown = kept.slice(0, view.most);
    const width = view.columns.length + (matched ? 1 : 0);
    grid.style.gridTemplateColumns = (matched ? "minmax(140px, .7fr) " : "") + `repeat(${view.columns.length}, minmax(0, 1fr))`;
    const cells = [];
    if (matched) cells.push(el("div", { class: "top" }, "prompt"));
    view.columns.forEach((column, i) => cells.push(el("div", { class: "top pick" }, columnHead(column, i))));
    for (const row of shown) {
      if (matched) cells.push(el("div", {}, text(row.prompt, view.query, "text prompt")));
      row.cells.forEach((entries) => cells.push(el("div", { class: "cell" }, entries.length ? entries.map((entry, i) => answer(entry, view.query, !matched && i === 0)) : el("span", { class: "none" }, "–"))));
    }
    cells.forEach((cell, i) => {
      if (i % width === width - 1) cell.classList.add("end");
      if (i >= cells.length - width) cell.classList.add("last");
    });
    grid.replaceChildren(...cells);
    count.textContent = `${kept.length.toLocaleString("en")} of ${rows.length.toLocaleString("en")} rows` + (left ? ` · ${left.toLocaleString("en")} completions are not in this page` : "");
    more.style.display = kept.length > shown.length ? "" : "none";
  }
  draw();
  return section("Completions", el("div", { class: "tools" }, filter, add, count), el("div", { class: "scroll" }, grid), more);
}
const ONE_TABLE = new Set(DATA.tables.map((table) => table.name)).size === 1;
const tableName = (table) => (RUNS.length > 1 ? RUNS[table.run].name + (ONE_TABLE ? "" : " · " + table.name) : table.name);
function startColumns(stepsOf) {
  const ends = (table) => { const steps = stepsOf(table); return { table, step: steps[steps.length - 1] }; };
  const mains = DATA.tables.map((table, t) => t).filter((t) => DATA.tables.findIndex((other) => other.run === DATA.tables[t].run) === t);
  if (mains.length > 1) return mains.slice(0, 3).map(ends);
  const first = { table: mains[0], step: stepsOf(mains[0])[0] };
  return first.step === ends(mains[0]).step ? [first] : [first, ends(mains[0])];
}
function completionRows(columns) {
  const entries = columns.map((column) => DATA.tables[column.table].rows.filter((row) => row.step === column.step));
  const byPrompt = new Map();
  entries.forEach((list, c) => list.forEach((entry) => {
    if (!byPrompt.has(entry.prompt)) byPrompt.set(entry.prompt, columns.map(() => []));
    byPrompt.get(entry.prompt)[c].push(entry);
  }));
  const cells = [...byPrompt.entries()];
  const shared = cells.filter(([, row]) => row.filter((cell) => cell.length).length > 1).length;
  const matched = columns.length === 1 || shared >= 0.3 * cells.length;
  if (matched) return { matched, rows: cells.map(([prompt, row]) => ({ prompt, cells: row })) };
  const ofColumn = columns.map((column, c) => cells.map(([, row]) => row[c]).filter((cell) => cell.length));
  const longest = Math.max(...ofColumn.map((list) => list.length));
  return { matched, rows: [...Array(longest).keys()].map((i) => ({ prompt: "", cells: ofColumn.map((list) => list[i] || []) })) };
}
function answer(entry, query, withPrompt) {
  const chips = Object.entries(entry.extra).map(([name, value]) => el("span", { class: "chip" }, `${name} ${value}`));
  return el("div", { class: "answer" }, withPrompt ? text(entry.prompt, query, "text prompt") : null,
    entry.completion ? text(entry.completion, query, "text") : el("span", { class: "none" }, "(empty)"),
    chips.length ? el("div", { class: "chips" }, chips) : null);
}
function text(content, query, kind) {
  const node = el("div", { class: kind });
  const low = content.toLowerCase();
  let from = 0;
  if (query && low.length === content.length)
    for (let at = low.indexOf(query); at >= 0; at = low.indexOf(query, from)) {
      node.append(content.slice(from, at), el("mark", {}, content.slice(at, at + query.length)));
      from = at + query.length;
    }
  node.append(content.slice(from));
  return node;
}

// Config, data, environment

function mapping(title, field, only) {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run[field])))].filter((name) => !only || only(name));
  const differs = (name) => new Set(RUNS.map((run) => run[field][name] ?? "–")).size > 1;
  if (!names.length) return null;
  const head = RUNS.length > 1 ? el("tr", {}, el("th", {}, title), RUNS.map((run, i) => el("th", {}, swatch(i), run.name))) : null;
  return el("div", { class: "card scroll" }, el("table", {}, head,
    names.map((name) => el("tr", { class: differs(name) ? "differs" : null }, el("th", {}, name), RUNS.map((run) => el("td", { class: "value" }, run[field][name] ?? "–"))))));
}
function config() {
  const changed = new Set(RUNS.flatMap((run) => run.changed));
  const differs = (name) => new Set(RUNS.map((run) => run.config[name] ?? "–")).size > 1;
  const chosen = mapping("option", "config", (name) => changed.has(name) || differs(name));
  const all = mapping("option", "config");
  if (!all) return null;
  return section("Config", el("h3", {}, "Not the default" + (RUNS.length > 1 ? ", or not the same" : "")), chosen,
    el("details", { class: "card" }, el("summary", {}, "All options ", el("span", { class: "soft" }, `(${Object.keys(RUNS[0].config).length})`)), all),
    el("h3", {}, "Decided by preftune"), mapping("decision", "decisions"));
}
function data() {
  const cards = RUNS.flatMap((run, i) => run.data.map((split) => {
    const labels = [...new Set(Object.values(split.lengths).flatMap(Object.keys))];
    const lengths = Object.entries(split.lengths).map(([column, of]) => el("tr", {}, el("th", {}, column), labels.map((label) => el("td", { class: "num" }, String(of[label] ?? "–")))));
    return el("div", {}, el("h3", {}, swatch(i), RUNS.length > 1 ? run.name + " · " : "", split.name), el("div", { class: "card scroll" },
      el("table", {}, Object.entries(split.counts).map(([name, value]) => el("tr", {}, el("th", {}, name), el("td", { class: "num", colspan: Math.max(1, labels.length) }, value))),
        lengths.length ? el("tr", {}, el("th", {}, "tokens"), labels.map((label) => el("th", {}, label))) : null, lengths)));
  }));
  const identities = mapping("training data", "identity");
  if (!cards.length && !identities) return null;
  const orders = RUNS.filter((run) => run.order !== "-").map((run) => el("p", { class: "sub" }, RUNS.length > 1 ? run.name + ": " : "", "order of rows in the first epoch: sha256 ", run.order.slice(0, 16), "…"));
  return section("Data", el("div", { class: "two" }, cards), identities ? el("h3", {}, "Training data") : null, identities, orders);
}
function environment() {
  const table = mapping("name", "environment");
  return table ? section("Environment", table) : null;
}

// The page

const curves = groups();
const parts = [summary(), health(), ...curves.map((group) => group.node), completions(), config(), data(), environment()].filter(Boolean);
const page = document.getElementById("page");
const titles = parts.map((part) => (part.id === "summary" ? "Summary" : part.querySelector("h2").textContent));
document.title = (RUNS.length === 1 ? RUNS[0].name : RUNS.length + " runs") + " · preftune report";
page.append(header(titles), el("main", {}, parts, el("footer", {}, "Drag over a plot to zoom in on steps, double-click to see all. A click on a name in a legend hides its curve. Plots: uPlot (MIT).")));
curves.forEach((group) => group.draw());
document.documentElement.dataset.ready = "true";
})();
