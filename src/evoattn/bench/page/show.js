// What the page shows of the record, and the controls that choose it.

function rival(problem) {
  // the fastest peer that solves the same problem, or the one asked for
  const isRival = ({ name }) => (state.against === "best" ? !isOurs(name) && !isBound(name) : name === state.against);
  const candidates = problem.results.filter((found) => time(found, state.pass) !== null && isRival(found));
  return candidates.sort((a, b) => time(a, state.pass) - time(b, state.pass))[0] || null;
}

const rivalTitle = (best) => (state.against === "best" ? best : title(state.against));
const backends = (found) => [found.backend, found.backward_backend].filter(Boolean);
const isEven = (value) => Math.abs(value - 1) < 0.03;
const given = (value) => (value === undefined ? null : value);
const peak = (found) => (found && found.peak_bytes ? found.peak_bytes / 2 ** 20 : null);
const workloadColumn = { title: "workload", get: (problem) => problem.workload.name };

function speedup(problem) {
  const [ours, theirs] = [time(result(problem, "evoattn"), state.pass), time(rival(problem), state.pass)];
  return ours && theirs ? theirs / ours : null;
}

// The answer to "is it faster, and by how much", of rows {problem, value} in any order.
function answer(rows) {
  const against = rivalTitle("the fastest peer");
  if (!rows.length) return `Nothing to compare with ${against} here.`;
  const order = rows.slice().sort((a, b) => a.value - b.value);
  const middle = (order[(order.length - 1) >> 1].value + order[order.length >> 1].value) / 2;
  const at = (row) => `${row.value.toFixed(2)}x at ${row.problem.workload.name}`;
  const count = (test) => rows.filter((row) => test(row.value) && !isEven(row.value)).length;
  const slower = count((value) => value < 1);
  return (
    `${PASS_TITLES[state.pass]}, ${state.dtype}: faster than ${against} at ${count((value) => value > 1)} of ${rows.length} ` +
    `workloads${slower ? `, slower at ${slower}` : ""}; ${middle.toFixed(2)}x in the median, ` +
    `from ${at(order[0])} to ${at(order[order.length - 1])}.`
  );
}

function overview() {
  const against = rivalTitle("the fastest peer of each");
  $("overview-note").textContent =
    `How many times as fast evoattn is as ${against}; grey is within 3%. Then milliseconds, the fastest underlined.`;
  const rows = shown()
    .map((problem) => ({ problem, value: speedup(problem) }))
    .filter((row) => row.value !== null);
  $("answer").textContent = answer(rows);
  const shades = rows.map(({ problem, value }) => ({
    name: problem.workload.name,
    value,
    colour: isEven(value) ? "var(--even)" : value > 1 ? "var(--good)" : "var(--bad)",
    text: `${value.toFixed(2)}x${state.against === "best" ? " " + rival(problem).name : ""}`,
  }));
  const words = `Speed-up of evoattn over ${against}, ${PASS_TITLES[state.pass]}; the table has the times`;
  chart("speedups", bars, shades, { unit: "x", reference: 1, words });
  const timed = shown().filter(timedIn(state.pass));
  const present = names.filter((name) => timed.some((problem) => time(result(problem, name), state.pass) !== null));
  const fair = present.filter((name) => !isBound(name));
  const fastest = (problem) => least(fair.map((name) => time(result(problem, name), state.pass)));
  const columns = [
    workloadColumn,
    { title: "speed-up", get: speedup, show: (value) => (value === null ? "–" : `${value.toFixed(2)}x`) },
    ...present.map((name) => ({
      title: `${title(name)}, ms`,
      get: (problem) => time(result(problem, name), state.pass),
      best: (value, problem) => !isBound(name) && value === fastest(problem),
    })),
  ];
  const place = present.includes("evoattn") ? present.indexOf("evoattn") + 3 : columns.length;
  const backend = (problem) => backends(result(problem, "evoattn") || {}).join(" / ") || null;
  columns.splice(place, 0, { title: "its backend", get: backend });
  table("times", columns, timed, "Times of all workloads");
}

function reason(found) {
  const ours = found.name === "evoattn" && found.backend ? `backend ${backends(found).join(", backward ")}` : "";
  return [ours, found.reason ? `${found.status}: ${found.reason}` : ""].filter(Boolean).join("; ");
}

function withSpread(found, pass) {
  const times = found.times && found.times[pass];
  if (!times) return "–";
  const known = given(times.spread_ms) !== null;
  return number(times.median_ms) + (known ? ` ±${((50 * times.spread_ms) / times.median_ms).toFixed(1)}%` : "");
}

function oneBar(found) {
  const [value, samples] = [time(found, state.pass), found.times[state.pass].samples_ms || []];
  const range = samples.length ? { low: Math.min(...samples), high: Math.max(...samples) } : {};
  return { name: title(found.name), value, text: `${number(value)} ms`, colour: colour(found.name), ...range };
}

function one() {
  const problem = shown().find((candidate) => candidate.workload.name === state.workload) || shown()[0];
  if (!problem) return;
  const w = problem.workload;
  const biases = [w.key_mask && "mask", w.pair_bias && "pair bias"].filter(Boolean).join(" and ") || "no bias";
  const heads = `H ${w.h}${w.kv_heads ? ` (${w.kv_heads} of keys)` : ""}`;
  $("one-note").textContent =
    `${w.where}. B ${w.b}, N ${w.n}, Lq ${w.lq}, Lk ${w.lk}, ${heads}, D ${w.d}, ${biases}: ${number(scores(w))} scores.`;
  const timed = problem.results
    .filter((found) => time(found, state.pass) !== null)
    .sort((a, b) => time(a, state.pass) - time(b, state.pass));
  const words = `Milliseconds of ${PASS_TITLES[state.pass]} at ${w.name}; the table has the numbers`;
  chart("bars", bars, timed.map(oneBar), { unit: " ms", words });
  const timeless = (found) => !found.times && !found.errors;
  const rows = problem.results.map((found) => ({
    ...found,
    ours: found.name === "evoattn",
    instead: timeless(found) ? reason(found) : "",
  }));
  rows.sort((a, b) => timeless(a) - timeless(b));
  const fair = rows.filter((row) => !isBound(row.name));
  const best = (get) => (value, row) => !isBound(row.name) && value === least(fair.map(get));
  const column = (title, get, more = {}) => ({ title, get, ...more });
  const ofPass = (pass) => (row) => time(row, pass);
  const rate = (row) => (time(row, state.pass) ? scores(w) / time(row, state.pass) / 1e6 : null);
  const error = { show: (value) => (typeof value === "number" ? value.toExponential(1) : number(value)) };
  const columns = [
    column("by", (row) => title(row.name)),
    ...passes.map((pass) =>
      column(`${PASS_TITLES[pass]}, ms`, ofPass(pass), { show: (_, row) => withSpread(row, pass), best: best(ofPass(pass)) }),
    ),
    column(`10⁹ scores/s, ${PASS_TITLES[state.pass]}`, rate),
    ...passes.map((pass) => column(`host ${PASS_TITLES[pass]}, µs`, (row) => given((row.host_us || {})[pass]))),
    column("first call, s", (row) => given(row.first_call_s)),
    column("peak, MiB", peak, { best: best(peak) }),
    ...unique(rows.flatMap((row) => Object.keys(row.errors || {}))).map((name) =>
      column(`error ${name}`, (row) => given((row.errors || {})[name]), error),
    ),
  ].filter(({ get }) => rows.some((row) => get(row) !== null));
  if (rows.some((row) => row.instead || reason(row)))
    columns.push(column("notes", (row) => reason(row) || null, { words: true }));
  table("detail", columns, rows, `All that was measured at ${w.name}`);
}

function growth() {
  const alike = shown()
    .filter((problem) => family(problem.workload) === state.family)
    .sort((a, b) => length(a.workload) - length(b.workload));
  const points = (name, get) => alike.map((problem) => [length(problem.workload), get(result(problem, name))]);
  const series = (get) =>
    names
      .map((name) => ({ name, points: points(name, get).filter((point) => point[1]) }))
      .filter((line) => line.points.length);
  const [times, memory] = [series((found) => time(found, state.pass)), series(peak)];
  $("length-time-title").textContent = `${PASS_TITLES[state.pass]}, ms`;
  chart("length-time", lines, times, `Milliseconds of ${PASS_TITLES[state.pass]} against length`);
  chart("length-memory", lines, memory, "Peak memory against length");
  const keys = unique([...times, ...memory].map((line) => line.name)).map((name) => {
    const key = make("i");
    key.style.borderTop = `3px ${dash(name) ? "dashed" : "solid"} ${colour(name)}`;
    return make("span", {}, key, title(name));
  });
  $("legend").replaceChildren(...keys);
}

function limits() {
  const { exp2_per_s: exp2, copy_bytes_per_s: copy, product_flops_per_s: products, how } = data.ceilings || {};
  const product = (products || {})[state.dtype];
  const inUnits = (value, unit) => number(value ? value / unit : null);
  $("limits-note").textContent =
    exp2 || copy
      ? `Measured in this run: ${inUnits(exp2, 1e9)} · 10⁹ exp2/s, ${inUnits(copy, 1e9)} GB/s, ` +
        `${inUnits(product, 1e12)} Tflop/s of ${state.dtype} products (${how}). ` +
        "A score takes one exponential in either pass, and for each channel 4 operations forward and 10 backward; the bytes are " +
        "those of inputs and output, once, and twice that backward."
      : `No ceilings were measured${how ? `: ${how}` : ""}.`;
  const share = (what, pass, amount, ceiling) => ({
    title: `${what}, ${pass}`,
    get: (problem) => {
      const found = time(result(problem, "evoattn"), pass);
      return found && amount(problem) && ceiling ? amount(problem) / (found / 1e3) / ceiling : null;
    },
    show: (value) => (value === null ? "–" : `${(100 * value).toPrecision(2)}%`),
  });
  const both = (what, forward, backward, amount, ceiling) => [
    share(what, "forward", (problem) => forward * amount(problem), ceiling),
    share(what, "backward", (problem) => backward * amount(problem), ceiling),
  ];
  const columns = [
    workloadColumn,
    ...both("exp2", 1, 1, (problem) => scores(problem.workload), exp2),
    ...both("products", 4, 10, ({ workload }) => workload.d * scores(workload), product),
    ...both("bandwidth", 1, 2, (problem) => problem.bytes, copy),
  ];
  $("ceilings").parentNode.hidden = !exp2 && !copy && !product;
  const timed = shown().filter((problem) => (result(problem, "evoattn") || {}).times);
  table("ceilings", columns, timed, "Share of the ceilings that evoattn reaches");
}

function reasons() {
  const groups = new Map();
  for (const problem of shown())
    for (const found of problem.results.filter(({ status }) => status && status !== "ok")) {
      const key = [found.name, found.status, found.reason].join("\n");
      groups.set(key, { ...found, where: [...((groups.get(key) || {}).where || []), problem.workload.name] });
    }
  const everywhere = (where) => (where.length === shown().length ? "all" : where.join(", "));
  const columns = [
    { title: "by", get: (row) => title(row.name) },
    { title: "state", get: (row) => row.status },
    { title: "why", get: (row) => row.reason || "", words: true },
    { title: "workloads", get: (row) => row.where.length, show: (_, row) => everywhere(row.where), words: true },
  ];
  table("reasons", columns, [...groups.values()], "What has no time, and why");
}

function facts() {
  const ended = { finished: data.finished, seconds: data.seconds };
  const rows = Object.entries({ ...data.machine, ...data.settings, ...ended });
  const shown = ([, value]) => (Array.isArray(value) ? value.join(", ") : String(given(value) === null ? "–" : value));
  const columns = [
    { title: "what", get: (row) => row[0] },
    { title: "value", get: shown, words: true },
  ];
  table("facts", columns, rows, "Machine and settings");
}

function draw() {
  for (const part of [overview, one, growth, limits, reasons]) part();
}

function choose(id, value) {
  state[id] = value;
  draw();
}

function select(id, options) {
  $(id).replaceChildren(...options.map(([name, words]) => make("option", { value: name }, words)));
  state[id] = options[0][0];
  $(id).addEventListener("change", () => choose(id, $(id).value));
}

function radios(id, options) {
  for (const [name, words] of options) {
    const input = make("input", { type: "radio", name: id, value: name, ...(name === options[0][0] ? { checked: "" } : {}) });
    input.addEventListener("change", () => choose(id, name));
    $(id).append(make("label", {}, input, words));
  }
  state[id] = options.length ? options[0][0] : "forward";
}

function theme() {
  const choices = ["system", "light", "dark"];
  let place = 0;
  $("theme").addEventListener("click", () => {
    place = (place + 1) % choices.length;
    $("theme").textContent = `Theme: ${choices[place]}`;
    document.documentElement.dataset.theme = choices[place];
  });
}

function start() {
  theme();
  facts();
  if (!problems.length) {
    $("state").textContent = "This record holds no problem: the run ended before the first was done.";
    return;
  }
  const ended = {
    interrupted: "The run was interrupted: this page has the results so far.",
    "out of time": "The run's budget ended before all was measured: what is missing says so.",
  }[data.finished];
  const note = (data.settings || {}).note;
  $("state").textContent = [ended, note && `Note: ${note}.`].filter(Boolean).join(" ");
  const same = (values) => unique(values).map((name) => [name, name]);
  radios("dtype", same(problems.map((problem) => problem.dtype)));
  radios("pass", passes.map((name) => [name, PASS_TITLES[name]]));
  select("against", [["best", "the fastest peer"], ...others.map((name) => [name, title(name)])]);
  select("workload", same(problems.map((problem) => problem.workload.name)));
  const alike = (name) => problems.filter((problem) => family(problem.workload) === name);
  const lengths = (name) => unique(alike(name).map((problem) => length(problem.workload))).length;
  const families = unique(problems.map((problem) => family(problem.workload))).sort((a, b) => lengths(b) - lengths(a));
  select("family", families.map((name) => [name, `${name} (${lengths(name)} lengths)`]));
  draw();
}

start();
