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
const drawn = others.filter(
  (name) =>
    !isBound(name) &&
    problems.some((problem) => problem.results.some((found) => found.name === name && (found.times || found.peak_bytes))),
);
const place = (name) => Math.max(0, drawn.indexOf(name));
const colour = (name) =>
  name === "evoattn" ? "var(--ours)" : isBound(name) ? "var(--even)" : COLOURS[place(name) % COLOURS.length];
const dash = (name) => (name === "evoattn" ? "" : isBound(name) ? "1 3" : DASHES[place(name) % DASHES.length]);
const result = (problem, name) => problem.results.find((found) => found.name === name);
const time = (found, pass) => (found && found.times && found.times[pass] ? found.times[pass].median_ms : null);
const passes = ["forward", "backward", "both", "graph_forward", "graph_both"].filter((pass) =>
  problems.some((problem) => problem.results.some((found) => time(found, pass) !== null)),
);
const PASS_TITLES = {
  forward: "forward",
  backward: "backward",
  both: "forward + backward",
  graph_forward: "forward in a CUDA graph",
  graph_both: "forward + backward in a CUDA graph",
};
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
        other.setAttribute("aria-sort", place !== index ? "none" : sorted.down ? "descending" : "ascending"),
      );
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
    body.replaceChildren(
      ...order.map((row) =>
        make(
          "tr",
          { class: row.ours ? "ours" : "" },
          ...columns
            .map((column, index) => {
              if (row.instead && index)
                return index > 1 ? "" : make("td", { class: "words", colspan: columns.length - 1 }, row.instead);
              const value = column.get(row);
              const text = column.show ? column.show(value, row) : number(value);
              if (index === 0) return make("th", { scope: "row" }, text);
              const kind = column.words
                ? "words"
                : value === null
                  ? "none"
                  : column.best && column.best(value, row)
                    ? "best"
                    : "";
              return make("td", kind ? { class: kind } : {}, text);
            })
            .filter((cell) => cell !== ""),
        ),
      ),
    );
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

function bars(node, rows, { unit, reference, label }) {
  // rows: {name, value, text, colour, low, high}
  const width = Math.max(300, Math.min(820, node.clientWidth || 820));
  const room = (texts) => 16 + 6.6 * Math.max(...texts.map((text) => text.length));
  const left = room(rows.map((row) => row.name)),
    right = room(rows.map((row) => row.text)),
    step = 26,
    height = rows.length * step + 24;
  if (!rows.length) return node.replaceChildren(make("p", {}, "Nothing to draw here."));
  const most = Math.max(...rows.map((row) => row.high || row.value), reference || 0);
  const x = (value) => left + (value / most) * (width - left - right);
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  if (reference) {
    svg.append(
      make("line", { x1: x(reference), x2: x(reference), y1: 0, y2: height - 18, class: "one", "stroke-dasharray": "4 3" }),
      make("text", { x: x(reference), y: height - 4, "text-anchor": "middle", class: "soft" }, `${reference}${unit}`),
    );
  }
  rows.forEach((row, index) => {
    const y = index * step + 4;
    svg.append(
      make("text", { x: left - 8, y: y + 14, "text-anchor": "end" }, row.name),
      make(
        "rect",
        { x: left, y, width: Math.max(1, x(row.value) - left), height: step - 8, rx: 2, fill: row.colour },
        make("title", {}, `${row.name}: ${row.text}`),
      ),
    );
    if (row.high) svg.append(make("line", { x1: x(row.low), x2: x(row.high), y1: y + 9, y2: y + 9, class: "one" }));
    svg.append(make("text", { x: Math.max(x(row.high || row.value), x(row.value)) + 6, y: y + 14 }, row.text));
  });
  node.replaceChildren(svg);
}

function ticks(low, high) {
  // plain numbers on a logarithmic axis
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1)
    for (const digit of [1, 3]) if (digit * 10 ** power >= low && digit * 10 ** power <= high) found.push(digit * 10 ** power);
  return found.length > 1 ? found : [low, high];
}

function lines(node, series, label) {
  // series: {name, points: [[length, value]]}
  const width = Math.max(300, Math.min(560, node.clientWidth || 560)),
    height = 320,
    left = 58,
    bottom = 40,
    top = 8,
    right = 14;
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
  for (const value of ticks(low, high))
    svg.append(
      make("line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: "grid" }),
      make(
        "text",
        { x: left - 6, y: y(value) + 4, "text-anchor": "end", class: "soft" },
        value >= 1 ? value.toLocaleString("en") : number(value, 1),
      ),
    );
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
    svg.append(
      make("path", {
        d: path,
        fill: "none",
        stroke: colour(one.name),
        "stroke-width": main ? 3 : 1.8,
        "stroke-dasharray": dash(one.name),
      }),
    );
    for (const [a, b] of one.points)
      svg.append(
        make(
          "circle",
          { cx: x(a), cy: y(b), r: main ? 4 : 3, fill: colour(one.name) },
          make("title", {}, `${title(one.name)}, length ${a}: ${number(b)}`),
        ),
      );
  }
  node.replaceChildren(svg);
}
