"use strict";
// Draws the record in #data. All text goes in by textContent: reasons are other libraries' words.
const data = JSON.parse(document.getElementById("data").textContent);
const problems = data.problems;
const COLOURS = ["#d55e00", "#009e73", "#cc79a7", "#e69f00", "#8c6bb1", "#66a61e", "#a6761d", "#7f8c8d", "#e41a1c", "#1b9e77"];
const DASHES = ["", "6 3", "2 3", "8 3 2 3", "12 4", "4 2", "1 3", "10 2 2 2"];
const SVG = ["svg", "rect", "line", "path", "text", "circle", "title"];
const $ = (id) => document.getElementById(id);
const unique = (values) => [...new Set(values)];

function make(tag, attributes = {}, ...children) {
  const node = SVG.includes(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return node;
}

const names = unique(problems.flatMap((problem) => problem.results.map((result) => result.name)));
const title = (name) => data.titles[name] || name;
const isOurs = (name) => name === "evoattn" || name.startsWith("evoattn/");
const isBound = (name) => data.bounds.includes(name);
const others = names.filter((name) => name !== "evoattn");
const shownOf = (name) => (problem) => problem.results.some((found) => found.name === name && (found.times || found.peak_bytes));
const drawn = others.filter((name) => !isBound(name) && problems.some(shownOf(name)));
const place = (name) => Math.max(0, drawn.indexOf(name));
const look = (name, ours, bound, of) => (name === "evoattn" ? ours : isBound(name) ? bound : of[place(name) % of.length]);
const colour = (name) => look(name, "var(--ours)", "var(--even)", COLOURS);
const dash = (name) => look(name, "", "1 3", DASHES);
const result = (problem, name) => problem.results.find((found) => found.name === name);
const time = (found, pass) => (found && found.times && found.times[pass] ? found.times[pass].median_ms : null);
const PASS_TITLES = {
  forward: "forward",
  backward: "backward",
  both: "forward + backward",
  graph_forward: "forward in a CUDA graph",
  graph_both: "forward + backward in a CUDA graph",
};
const timedIn = (pass) => (problem) => problem.results.some((found) => time(found, pass) !== null);
const passes = Object.keys(PASS_TITLES).filter((pass) => problems.some(timedIn(pass)));
const state = { dtype: null, pass: null, workload: null, family: null, against: "best" };
const shown = () => problems.filter((problem) => problem.dtype === state.dtype);
const family = (workload) => workload.name.replace(/\d+(n\d+)?$/, "") || workload.name;
const length = (workload) => workload[(workload.length_axes || ["lq"]).slice(-1)[0]];
const scores = (workload) => workload.b * workload.n * workload.h * workload.lq * workload.lk;

function number(value, digits = 3) {
  if (value === null || value === undefined || value === "") return "–";
  if (typeof value === "string") return value;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6) return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: digits });
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size < 1e-3 ? value.toExponential(1) : value.toPrecision(digits);
}

// ---- tables: columns are {title, get(row) -> value, show(value, row), words, best(value, row) -> bool}

const least = (values) => Math.min(...values.filter((value) => value !== null));

function compare(a, b, down) {
  if (a === null || b === null) return (a === null) - (b === null); // what is missing comes last, whatever the order
  const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
  return down ? -order : order;
}

function cells(columns, row) {
  // one for each column, or the first and in place of the others one with `row.instead`
  const [head, ...rest] = columns.map((column) => {
    const value = column.get(row);
    const best = value !== null && column.best && column.best(value, row);
    const kind = column.words ? "words" : value === null ? "none" : best ? "best" : "";
    return [kind ? { class: kind } : {}, column.show ? column.show(value, row) : number(value)];
  });
  const others = row.instead ? [[{ class: "words", colspan: rest.length }, row.instead]] : rest;
  return [make("th", { scope: "row" }, head[1]), ...others.map(([attributes, words]) => make("td", attributes, words))];
}

function table(id, columns, rows, caption) {
  const sorted = { column: -1, down: false };
  const body = make("tbody");
  const fill = () => {
    const order = rows.slice();
    if (sorted.column >= 0) {
      const get = columns[sorted.column].get;
      order.sort((a, b) => compare(get(a), get(b), sorted.down));
    }
    body.replaceChildren(...order.map((row) => make("tr", { class: row.ours ? "ours" : "" }, ...cells(columns, row))));
  };
  const heads = columns.map((column, index) => {
    const button = make("button", { type: "button" }, column.title);
    button.addEventListener("click", () => {
      sorted.down = sorted.column === index && !sorted.down;
      sorted.column = index;
      for (const head of heads) head.setAttribute("aria-sort", "none");
      heads[index].setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
      fill();
    });
    return make("th", { scope: "col", "aria-sort": "none", class: column.words ? "words" : "" }, button);
  });
  fill();
  $(id).replaceChildren(make("caption", { class: "skip" }, caption), make("thead", {}, make("tr", {}, ...heads)), body);
}

// ---- charts: drawn for the width they have, and again when that changes

const charts = new Map();

function chart(id, render, ...given) {
  charts.set(id, () => $(id).replaceChildren(render(Math.max(300, $(id).clientWidth || 820), ...given)));
  charts.get(id)();
}

let drawnFor = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === drawnFor) return;
  drawnFor = window.innerWidth;
  for (const render of charts.values()) render();
});

const label = (x, y, words, anchor = "start", soft = false) =>
  make("text", { x, y, "text-anchor": anchor, class: soft ? "soft" : "" }, words);
const line = (x1, x2, y1, y2, kind, more = {}) => make("line", { x1, x2, y1, y2, class: kind, ...more });
const picture = (width, height, words) =>
  make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words });

function bars(room, rows, { unit, reference, words }) {
  // rows: {name, value, text, colour, low, high}
  if (!rows.length) return make("p", {}, "Nothing to draw here.");
  const width = Math.min(820, room);
  const margin = (texts) => 16 + 6.6 * Math.max(...texts.map((text) => text.length));
  const [left, right] = [margin(rows.map((row) => row.name)), margin(rows.map((row) => row.text))];
  const step = 26;
  const height = rows.length * step + 24;
  const most = Math.max(...rows.map((row) => row.high || row.value), reference || 0);
  const x = (value) => left + (value / most) * (width - left - right);
  const svg = picture(width, height, words);
  if (reference) {
    svg.append(line(x(reference), x(reference), 0, height - 18, "one", { "stroke-dasharray": "4 3" }));
    svg.append(label(x(reference), height - 4, `${reference}${unit}`, "middle", true));
  }
  rows.forEach((row, index) => {
    const y = index * step + 4;
    const sizes = { x: left, y, width: Math.max(1, x(row.value) - left), height: step - 8, rx: 2, fill: row.colour };
    svg.append(label(left - 8, y + 14, row.name, "end"));
    svg.append(make("rect", sizes, make("title", {}, `${row.name}: ${row.text}`)));
    if (row.high) svg.append(line(x(row.low), x(row.high), y + 9, y + 9, "one"));
    svg.append(label(Math.max(x(row.high || row.value), x(row.value)) + 6, y + 14, row.text));
  });
  return svg;
}

function ticks(low, high) {
  // plain numbers on a logarithmic axis
  const powers = Array.from({ length: 40 }, (_, index) => 10 ** (index - 20));
  const found = powers.flatMap((power) => [power, 3 * power]).filter((value) => value >= low && value <= high);
  return found.length > 1 ? found : [low, high];
}

function lines(room, series, words) {
  // series: {name, points: [[length, value]]}
  const [width, height, left, bottom, top, right] = [Math.min(560, room), 320, 58, 40, 8, 14];
  const points = series.flatMap((one) => one.points);
  const lengths = unique(points.map((point) => point[0])).sort((a, b) => a - b);
  if (lengths.length < 2) return make("p", {}, "One length only: evoattn bench --lengths measures more.");
  const values = points.map((point) => point[1]);
  const [low, high] = [Math.min(...values) / 1.15, Math.max(...values) * 1.15];
  const scale = (value, from, to, start, end) => start + (Math.log(value / from) / Math.log(to / from)) * (end - start);
  const x = (value) => scale(value, lengths[0], lengths[lengths.length - 1], left + 8, width - right - 8);
  const y = (value) => scale(value, low, high, height - bottom, top);
  const svg = picture(width, height, words);
  for (const value of ticks(low, high)) {
    svg.append(line(left, width - right, y(value), y(value), "grid"));
    svg.append(label(left - 6, y(value) + 4, value >= 1 ? value.toLocaleString("en") : number(value, 1), "end", true));
  }
  let last = -Infinity;
  for (const value of lengths) {
    svg.append(line(x(value), x(value), height - bottom, height - bottom + 4, "grid"));
    if (x(value) - last < 30) continue;
    last = x(value);
    svg.append(label(last, height - bottom + 18, value, "middle", true));
  }
  svg.append(label((left + width) / 2, height - 4, "length", "middle", true));
  for (const one of series) {
    const main = one.name === "evoattn";
    const d = one.points.map(([a, b], index) => `${index ? "L" : "M"}${x(a).toFixed(1)},${y(b).toFixed(1)}`).join("");
    const stroke = { stroke: colour(one.name), "stroke-width": main ? 3 : 1.8, "stroke-dasharray": dash(one.name) };
    svg.append(make("path", { d, fill: "none", ...stroke }));
    for (const [a, b] of one.points) {
      const words = make("title", {}, `${title(one.name)}, length ${a}: ${number(b)}`);
      svg.append(make("circle", { cx: x(a), cy: y(b), r: main ? 4 : 3, fill: colour(one.name) }, words));
    }
  }
  return svg;
}
