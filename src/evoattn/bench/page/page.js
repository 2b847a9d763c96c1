"use strict";
// Draws the record in #data. All text goes in by textContent: reasons are other libraries' words.
const data = JSON.parse(document.getElementById("data").textContent);
const problems = data.problems;
const COLOURS = ["#d55e00", "#009e73", "#cc79a7", "#e69f00", "#8c6bb1", "#66a61e", "#a6761d", "#7f8c8d", "#e41a1c", "#1b9e77"];
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "12 4", "4 2", "1 3", "10 2 2 2"];
const $ = (id) => document.getElementById(id);
const unique = (values) => [...new Set(values)];

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "line", "path", "text", "circle", "title"].includes(tag);
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
  return node;
}

const names = unique(problems.flatMap((problem) => problem.results.map((result) => result.name)));
const title = (name) => data.titles[name] || name;
const isOurs = (name) => name === "evoattn" || name.startsWith("evoattn/");
const isBound = (name) => data.bounds.includes(name);
const others = names.filter((name) => name !== "evoattn");
const drawn = others.filter((name) => !isBound(name) &&
  problems.some((problem) => problem.results.some((found) => found.name === name && (found.times || found.peak_bytes))));
const place = (name) => Math.max(0, drawn.indexOf(name));
const colour = (name) => (name === "evoattn" ? "var(--ours)" : isBound(name) ? "var(--even)" : COLOURS[place(name) % COLOURS.length]);
const dash = (name) => (name === "evoattn" ? "" : isBound(name) ? "1 3" : DASHES[place(name) % DASHES.length]);
const result = (problem, name) => problem.results.find((found) => found.name === name);
const time = (found, pass) => (found && found.times && found.times[pass] ? found.times[pass].median_ms : null);
const passes = ["forward", "backward", "both"].filter((pass) =>
  problems.some((problem) => problem.results.some((found) => time(found, pass) !== null)));
const PASS_TITLES = { forward: "forward", backward: "backward", both: "forward + backward" };
const state = { dtype: null, pass: null, workload: null, family: null, against: "best" };
const shown = () => problems.filter((problem) => problem.dtype === state.dtype);
const family = (workload) => workload.name.replace(/\d+(n\d+)?$/, "") || workload.name;
const length = (workload) => workload[(workload.length_axes || ["lq"]).slice(-1)[0]];

function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6) return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: digits });
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size < 1e-3) return value.toExponential(1);
  return value.toPrecision(digits);
}

// ---- tables: columns are {title, get(row) -> value, show(value, row), words, best(value, row, rows) -> bool}

function table(node, columns, rows, caption) {
  const sorted = { column: -1, down: false };
  const body = make("tbody");
  const heads = columns.map((column, index) => {
    const button = make("button", { type: "button" }, column.title);
    const head = make("th", { scope: "col", "aria-sort": "none", class: column.words ? "words" : "" }, button);
    button.addEventListener("click", () => {
      sorted.down = sorted.column === index ? !sorted.down : false;
      sorted.column = index;
      heads.forEach((other, place) =>
        other.setAttribute("aria-sort", place !== index ? "none" : sorted.down ? "descending" : "ascending"));
      fill();
    });
    return head;
  });
  function fill() {
    const order = rows.slice();
    if (sorted.column >= 0) {
      const get = columns[sorted.column].get;
      order.sort((a, b) => compare(get(a), get(b), sorted.down));
    }
    body.replaceChildren(...order.map((row) => make("tr", { class: row.ours ? "ours" : "" }, ...columns.map((column, index) => {
      if (row.instead && index) return index > 1 ? "" : make("td", { class: "words", colspan: columns.length - 1 }, row.instead);
      const value = column.get(row);
      const text = column.show ? column.show(value, row) : number(value);
      if (index === 0) return make("th", { scope: "row" }, text);
      const kind = column.words ? "words" : value === null ? "none" : column.best && column.best(value, row) ? "best" : "";
      return make("td", kind ? { class: kind } : {}, text);
    }).filter((cell) => cell !== ""))));
  }
  fill();
  node.replaceChildren(make("caption", { class: "skip" }, caption), make("thead", {}, make("tr", {}, ...heads)), body);
}

const least = (values) => Math.min(...values.filter((value) => value !== null));

function compare(a, b, down) {
  if (a === null || b === null) return (a === null) - (b === null); // what is missing comes last, whatever the order
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  return down ? -order : order;
}

// ---- charts: drawn for the width they have, and again when that changes

const charts = new Map();

function chart(node, render) {
  charts.set(node, render);
  render();
}

let drawnFor = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === drawnFor) return;
  drawnFor = window.innerWidth;
  for (const render of charts.values()) render();
});

function bars(node, rows, { unit, reference, label }) { // rows: {name, value, text, colour, low, high}
  const width = Math.max(300, Math.min(820, node.clientWidth || 820)), narrow = width < 560;
  const left = narrow ? 152 : 190, right = narrow ? 118 : 130, step = 26, height = rows.length * step + 24;
  if (!rows.length) return node.replaceChildren(make("p", {}, "Nothing to draw here."));
  const most = Math.max(...rows.map((row) => row.high || row.value), reference || 0);
  const x = (value) => left + (value / most) * (width - left - right);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  if (reference) {
    svg.append(make("line", { x1: x(reference), x2: x(reference), y1: 0, y2: height - 18, class: "one", "stroke-dasharray": "4 3" }),
      make("text", { x: x(reference), y: height - 4, "text-anchor": "middle", class: "soft" }, `${reference}${unit}`));
  }
  rows.forEach((row, index) => {
    const y = index * step + 4;
    svg.append(
      make("text", { x: left - 8, y: y + 14, "text-anchor": "end" }, row.name),
      make("rect", { x: left, y, width: Math.max(1, x(row.value) - left), height: step - 8, rx: 2, fill: row.colour },
        make("title", {}, `${row.name}: ${row.text}`)));
    if (row.high) svg.append(make("line", { x1: x(row.low), x2: x(row.high), y1: y + 9, y2: y + 9, class: "one" }));
    svg.append(make("text", { x: Math.max(x(row.high || row.value), x(row.value)) + 6, y: y + 14 }, row.text));
  });
  node.replaceChildren(svg);
}

function ticks(low, high) { // plain numbers on a logarithmic axis
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1)
    for (const digit of [1, 3]) if (digit * 10 ** power >= low && digit * 10 ** power <= high) found.push(digit * 10 ** power);
  return found.length > 1 ? found : [low, high];
}

function lines(node, series, label) { // series: {name, points: [[length, value]]}
  const width = Math.max(300, Math.min(560, node.clientWidth || 560)), height = 320, left = 58, bottom = 40, top = 8, right = 14;
  const points = series.flatMap((one) => one.points);
  if (unique(points.map((point) => point[0])).length < 2)
    return node.replaceChildren(make("p", {}, "One length only: evoattn bench --lengths measures more."));
  const lengths = unique(points.map((point) => point[0])).sort((a, b) => a - b);
  const values = points.map((point) => point[1]);
  const [low, high] = [Math.min(...values) / 1.15, Math.max(...values) * 1.15];
  const scale = (value, from, to, start, end) => start + (Math.log(value / from) / Math.log(to / from)) * (end - start);
  const x = (value) => scale(value, lengths[0], lengths[lengths.length - 1], left + 8, width - right - 8);
  const y = (value) => scale(value, low, high, height - bottom, top);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const value of ticks(low, high)) svg.append(
    make("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: "grid" }),
    make("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end", class: "soft" }, value >= 1 ? value.toLocaleString("en") : number(value, 1)));
  let last = -Infinity;
  for (const value of lengths) {
    svg.append(make("line", { x1: x(value), x2: x(value), y1: height - bottom, y2: height - bottom + 4, class: "grid" }));
    if (x(value) - last < 30) continue;
    last = x(value);
    svg.append(make("text", { x: last, y: height - bottom + 18, "text-anchor": "middle", class: "soft" }, value));
  }
  svg.append(make("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle", class: "soft" }, "length"));
  for (const one of series) {
    const path = one.points.map(([a, b], index) => `${index ? "L" : "M"}${x(a).toFixed(1)},${y(b).toFixed(1)}`).join("");
    const main = one.name === "evoattn";
    svg.append(make("path", { d: path, fill: "none", stroke: colour(one.name), "stroke-width": main ? 3 : 1.8, "stroke-dasharray": dash(one.name) }));
    for (const [a, b] of one.points) svg.append(make("circle", { cx: x(a), cy: y(b), r: main ? 4 : 3, fill: colour(one.name) },
      make("title", {}, `${title(one.name)}, length ${a}: ${number(b)}`)));
  }
  node.replaceChildren(svg);
}

// ---- what the page shows

function rival(problem) { // the fastest peer that solves the same problem, or the one asked for
  const candidates = problem.results.filter((found) => time(found, state.pass) !== null &&
    (state.against === "best" ? !isOurs(found.name) && !isBound(found.name) : found.name === state.against));
  return candidates.sort((a, b) => time(a, state.pass) - time(b, state.pass))[0] || null;
}

function speedup(problem) {
  const ours = time(result(problem, "evoattn"), state.pass), theirs = time(rival(problem), state.pass);
  return ours && theirs ? theirs / ours : null;
}

function overview() {
  const against = state.against === "best" ? "the fastest peer of each" : title(state.against);
  $("overview-note").textContent = `${PASS_TITLES[state.pass]}, ${state.dtype}: how many times as fast evoattn is as ${against}; grey is within 3%. Then milliseconds, the fastest underlined.`;
  const rows = shown().map((problem) => ({ problem, value: speedup(problem) })).filter((row) => row.value !== null);
  chart($("speedups"), () => bars($("speedups"), rows.map(({ problem, value }) => ({
    name: problem.workload.name, value, colour: Math.abs(value - 1) < 0.03 ? "var(--even)" : value > 1 ? "var(--good)" : "var(--bad)",
    text: `${value.toFixed(2)}x${state.against === "best" ? " " + rival(problem).name : ""}`,
  })), { unit: "x", reference: 1, label: `Speed-up of evoattn over ${against}, ${PASS_TITLES[state.pass]}; the table has the times` }));
  const present = names.filter((name) => shown().some((problem) => time(result(problem, name), state.pass) !== null));
  const columns = [{ title: "workload", get: (problem) => problem.workload.name, show: (value) => value },
    { title: "speed-up", get: speedup, show: (value) => (value === null ? "–" : `${value.toFixed(2)}x`) },
    ...present.map((name) => ({ title: `${title(name)}, ms`, get: (problem) => time(result(problem, name), state.pass),
      best: (value, problem) => !isBound(name) && value === least(present.filter((other) => !isBound(other)).map((other) => time(result(problem, other), state.pass))) }))];
  table($("times"), columns, shown().filter((problem) => present.some((name) => time(result(problem, name), state.pass) !== null)), "Times of all workloads");
}

function reason(found) {
  return [found.name === "evoattn" && found.backend ? `backend ${found.backend}` : "", found.reason ? `${found.status}: ${found.reason}` : ""].filter(Boolean).join("; ");
}

function rangeText(found, pass) {
  const times = found.times && found.times[pass];
  if (!times) return "–";
  const spread = times.spread_ms === undefined || times.spread_ms === null ? "" : ` ±${((50 * times.spread_ms) / times.median_ms).toFixed(1)}%`;
  return `${number(times.median_ms)}${spread}`;
}

function one() {
  const problem = shown().find((candidate) => candidate.workload.name === state.workload) || shown()[0];
  if (!problem) return;
  const w = problem.workload;
  const biases = [w.key_mask && "mask", w.pair_bias && "pair bias"].filter(Boolean).join(" and ") || "no bias";
  $("one-note").textContent = `${w.where}. B ${w.b}, N ${w.n}, Lq ${w.lq}, Lk ${w.lk}, H ${w.h}${w.kv_heads ? ` (${w.kv_heads} of keys)` : ""}, D ${w.d}, ${biases}: ${number(w.b * w.n * w.h * w.lq * w.lk)} scores.`;
  const timed = problem.results.filter((found) => time(found, state.pass) !== null).sort((a, b) => time(a, state.pass) - time(b, state.pass));
  chart($("bars"), () => bars($("bars"), timed.map((found) => {
    const samples = found.times[state.pass].samples_ms || [];
    return { name: title(found.name), value: time(found, state.pass), text: `${number(time(found, state.pass))} ms`, colour: colour(found.name),
      ...(samples.length ? { low: Math.min(...samples), high: Math.max(...samples) } : {}) };
  }), { unit: " ms", label: `Milliseconds of ${PASS_TITLES[state.pass]} at ${w.name}; the table has the numbers` }));
  const timeless = (found) => !found.times && !found.errors;
  const rows = problem.results.map((found) => ({ ...found, ours: found.name === "evoattn", instead: timeless(found) ? reason(found) : "" }));
  rows.sort((a, b) => timeless(a) - timeless(b));
  const fair = rows.filter((row) => !isBound(row.name));
  const best = (get) => (value, row) => !isBound(row.name) && value === least(fair.map(get));
  const peak = (row) => (row.peak_bytes ? row.peak_bytes / 2 ** 20 : null);
  const exponent = (value) => (typeof value === "number" ? value.toExponential(1) : value || "–");
  const has = (get) => rows.some((row) => get(row) !== null);
  const value = (x) => (x === undefined || x === null ? null : x);
  const columns = [
    { title: "by", get: (row) => title(row.name), show: (text) => text },
    ...passes.map((pass) => ({ title: `${PASS_TITLES[pass]}, ms`, get: (row) => time(row, pass), show: (_, row) => rangeText(row, pass), best: best((row) => time(row, pass)) })),
    { title: `10⁹ scores/s, ${PASS_TITLES[state.pass]}`, get: (row) => (time(row, state.pass) ? (w.b * w.n * w.h * w.lq * w.lk) / time(row, state.pass) / 1e6 : null) },
    ...passes.map((pass) => ({ title: `host ${PASS_TITLES[pass]}, µs`, get: (row) => value((row.host_us || {})[pass]) })),
    { title: "first call, s", get: (row) => value(row.first_call_s) },
    { title: "peak, MiB", get: peak, best: best(peak) },
    ...["o", "dq", "dk", "dv", "dpair_bias"].map((name) => ({ title: `error ${name}`, get: (row) => value((row.errors || {})[name]), show: exponent })),
  ].filter((column) => has(column.get));
  columns.push({ title: "notes", get: (row) => reason(row) || null, show: (text) => text || "", words: true });
  table($("detail"), columns, rows, `All that was measured at ${w.name}`);
}

function growth() {
  const of = shown().filter((problem) => family(problem.workload) === state.family)
    .sort((a, b) => length(a.workload) - length(b.workload));
  const series = (get) => names.map((name) => ({ name, points: of.map((problem) => [length(problem.workload), get(result(problem, name))])
    .filter((point) => point[1]) })).filter((line) => line.points.length);
  const times = series((found) => time(found, state.pass));
  const memory = series((found) => (found && found.peak_bytes ? found.peak_bytes / 2 ** 20 : null));
  $("length-time-title").textContent = `${PASS_TITLES[state.pass]}, ms`;
  chart($("length-time"), () => lines($("length-time"), times, `Milliseconds of ${PASS_TITLES[state.pass]} against length`));
  chart($("length-memory"), () => lines($("length-memory"), memory, "Peak memory against length"));
  const seen = unique([...times, ...memory].map((line) => line.name));
  $("legend").replaceChildren(...seen.map((name) => {
    const key = make("i");
    key.style.borderTopColor = colour(name);
    if (dash(name)) key.style.borderTopStyle = "dashed";
    return make("span", {}, key, title(name));
  }));
}

function limits() {
  const { exp2_per_s: exp2, copy_bytes_per_s: copy, how } = data.ceilings || {};
  $("limits-note").textContent = exp2 || copy
    ? `Measured in this run: ${number(exp2 ? exp2 / 1e9 : null)} · 10⁹ exp2/s, ${number(copy ? copy / 1e9 : null)} GB/s (${how}). A forward takes one exponential a score and so does a backward; the bytes are those of inputs and output, once.`
    : `No ceilings were measured${how ? `: ${how}` : ""}.`;
  const percent = (value) => (value === null ? "–" : `${(100 * value).toPrecision(2)}%`);
  const share = (name, pass, amount, ceiling) => (problem) => {
    const found = time(result(problem, name), pass);
    return found && amount(problem) && ceiling ? amount(problem) / (found / 1e3) / ceiling : null;
  };
  const scores = ({ workload: w }) => w.b * w.n * w.h * w.lq * w.lk;
  const columns = [{ title: "workload", get: (problem) => problem.workload.name, show: (text) => text },
    { title: "exp2, forward", get: share("evoattn", "forward", scores, exp2), show: percent },
    { title: "exp2, backward", get: share("evoattn", "backward", scores, exp2), show: percent },
    { title: "bandwidth, forward", get: share("evoattn", "forward", (problem) => problem.bytes, copy), show: percent }];
  $("ceilings").parentNode.hidden = !exp2 && !copy;
  table($("ceilings"), columns, shown().filter((problem) => (result(problem, "evoattn") || {}).times), "Share of the ceilings that evoattn reaches");
}

function reasons() {
  const rows = shown().flatMap((problem) => problem.results.filter((found) => found.status && found.status !== "ok")
    .map((found) => ({ ...found, workload: problem.workload.name })));
  const groups = new Map();
  for (const row of rows) {
    const key = [row.name, row.status, row.reason].join("\n");
    groups.set(key, { ...row, where: [...((groups.get(key) || {}).where || []), row.workload] });
  }
  table($("reasons"), [
    { title: "by", get: (row) => title(row.name), show: (text) => text },
    { title: "state", get: (row) => row.status, show: (text) => text },
    { title: "why", get: (row) => row.reason || "", show: (text) => text, words: true },
    { title: "workloads", get: (row) => row.where.length, show: (_, row) => (row.where.length === shown().length ? "all" : row.where.join(", ")), words: true },
  ], [...groups.values()], "What has no time, and why");
}

function facts() {
  const rows = [...Object.entries(data.machine), ...Object.entries(data.settings || {}), ["finished", data.finished], ["seconds", data.seconds]];
  table($("facts"), [
    { title: "what", get: (row) => row[0], show: (text) => text },
    { title: "value", get: (row) => (Array.isArray(row[1]) ? row[1].join(", ") : String(row[1] === undefined || row[1] === null ? "–" : row[1])), show: (text) => text, words: true },
  ], rows, "Machine and settings");
}

function draw() { overview(); one(); growth(); limits(); reasons(); }

function select(id, options, value) {
  $(id).replaceChildren(...options.map(([name, text]) => make("option", { value: name, ...(name === value ? { selected: "" } : {}) }, text)));
  state[id] = value;
  $(id).addEventListener("change", () => { state[id] = $(id).value; draw(); });
}

function radios(id, options, value) {
  $(id).append(...options.map(([name, text]) => {
    const input = make("input", { type: "radio", name: id, value: name, ...(name === value ? { checked: "" } : {}) });
    input.addEventListener("change", () => { state[id] = name; draw(); });
    return make("label", {}, input, text);
  }));
  state[id] = value;
}

function theme() {
  const choices = ["system", "light", "dark"];
  let place = 0;
  $("theme").addEventListener("click", () => {
    place = (place + 1) % choices.length;
    $("theme").textContent = `Theme: ${choices[place]}`;
    if (place) document.documentElement.dataset.theme = choices[place]; else delete document.documentElement.dataset.theme;
  });
}

function start() {
  theme();
  facts();
  if (!problems.length) { $("state").textContent = "This record holds no problem: the run ended before the first was done."; return; }
  $("state").textContent = { "interrupted": "The run was interrupted: what was measured until then is here.",
    "out of time": "The run's budget ended before all was measured: what is missing says so." }[data.finished] || "";
  const dtypes = unique(problems.map((problem) => problem.dtype));
  radios("dtype", dtypes.map((name) => [name, name]), dtypes[0]);
  radios("pass", passes.map((name) => [name, PASS_TITLES[name]]), passes[0] || "forward");
  select("against", [["best", "the fastest peer"], ...others.map((name) => [name, title(name)])], "best");
  const all = unique(problems.map((problem) => problem.workload.name));
  select("workload", all.map((name) => [name, name]), all[0]);
  const families = unique(problems.map((problem) => family(problem.workload)));
  const lengths = (name) => unique(problems.filter((problem) => family(problem.workload) === name).map((problem) => length(problem.workload))).length;
  families.sort((a, b) => lengths(b) - lengths(a));
  select("family", families.map((name) => [name, `${name} (${lengths(name)} lengths)`]), families[0]);
  draw();
}

start();
