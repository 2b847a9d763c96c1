// What the page shows of the record, and the controls that choose it.

function rival(problem) {
  // the fastest peer that solves the same problem, or the one asked for
  const candidates = problem.results.filter(
    (found) =>
      time(found, state.pass) !== null &&
      (state.against === "best" ? !isOurs(found.name) && !isBound(found.name) : found.name === state.against),
  );
  return candidates.sort((a, b) => time(a, state.pass) - time(b, state.pass))[0] || null;
}

const backends = (found) => [found.backend, found.backward_backend].filter(Boolean);
const isEven = (value) => Math.abs(value - 1) < 0.03;

function speedup(problem) {
  const ours = time(result(problem, "evoattn"), state.pass),
    theirs = time(rival(problem), state.pass);
  return ours && theirs ? theirs / ours : null;
}

// The answer to "is it faster, and by how much", of rows {problem, value} in any order.
function answer(rows) {
  const against = state.against === "best" ? "the fastest peer" : title(state.against);
  if (!rows.length) return `Nothing to compare with ${against} here.`;
  const order = rows.slice().sort((a, b) => a.value - b.value);
  const [first, last] = [order[0], order[order.length - 1]];
  const middle = [order[(order.length - 1) >> 1].value, order[order.length >> 1].value];
  const at = (row) => `${row.value.toFixed(2)}x at ${row.problem.workload.name}`;
  const count = (test) => rows.filter((row) => test(row.value)).length;
  const [faster, slower] = [count((value) => value > 1 && !isEven(value)), count((value) => value < 1 && !isEven(value))];
  return (
    `${PASS_TITLES[state.pass]}, ${state.dtype}: faster than ${against} at ${faster} of ${rows.length} workloads` +
    `${slower ? `, slower at ${slower}` : ""}; ${((middle[0] + middle[1]) / 2).toFixed(2)}x in the median, ` +
    `from ${at(first)} to ${at(last)}.`
  );
}

function overview() {
  const against = state.against === "best" ? "the fastest peer of each" : title(state.against);
  $("overview-note").textContent =
    `How many times as fast evoattn is as ${against}; grey is within 3%. Then milliseconds, the fastest underlined.`;
  const rows = shown()
    .map((problem) => ({ problem, value: speedup(problem) }))
    .filter((row) => row.value !== null);
  $("answer").textContent = answer(rows);
  chart($("speedups"), () =>
    bars(
      $("speedups"),
      rows.map(({ problem, value }) => ({
        name: problem.workload.name,
        value,
        colour: isEven(value) ? "var(--even)" : value > 1 ? "var(--good)" : "var(--bad)",
        text: `${value.toFixed(2)}x${state.against === "best" ? " " + rival(problem).name : ""}`,
      })),
      {
        unit: "x",
        reference: 1,
        label: `Speed-up of evoattn over ${against}, ${PASS_TITLES[state.pass]}; the table has the times`,
      },
    ),
  );
  const present = names.filter((name) => shown().some((problem) => time(result(problem, name), state.pass) !== null));
  const columns = [
    { title: "workload", get: (problem) => problem.workload.name, show: (value) => value },
    { title: "speed-up", get: speedup, show: (value) => (value === null ? "–" : `${value.toFixed(2)}x`) },
    ...present.map((name) => ({
      title: `${title(name)}, ms`,
      get: (problem) => time(result(problem, name), state.pass),
      best: (value, problem) =>
        !isBound(name) &&
        value === least(present.filter((other) => !isBound(other)).map((other) => time(result(problem, other), state.pass))),
    })),
  ];
  columns.splice(present.includes("evoattn") ? present.indexOf("evoattn") + 3 : columns.length, 0, {
    title: "its backend",
    get: (problem) => backends(result(problem, "evoattn") || {}).join(" / ") || null,
    show: (text) => text || "–",
  });
  table(
    $("times"),
    columns,
    shown().filter((problem) => present.some((name) => time(result(problem, name), state.pass) !== null)),
    "Times of all workloads",
  );
}

function reason(found) {
  return [
    found.name === "evoattn" && found.backend ? `backend ${backends(found).join(", backward ")}` : "",
    found.reason ? `${found.status}: ${found.reason}` : "",
  ]
    .filter(Boolean)
    .join("; ");
}

function rangeText(found, pass) {
  const times = found.times && found.times[pass];
  if (!times) return "–";
  const spread =
    times.spread_ms === undefined || times.spread_ms === null
      ? ""
      : ` ±${((50 * times.spread_ms) / times.median_ms).toFixed(1)}%`;
  return `${number(times.median_ms)}${spread}`;
}

function one() {
  const problem = shown().find((candidate) => candidate.workload.name === state.workload) || shown()[0];
  if (!problem) return;
  const w = problem.workload;
  const biases = [w.key_mask && "mask", w.pair_bias && "pair bias"].filter(Boolean).join(" and ") || "no bias";
  $("one-note").textContent =
    `${w.where}. B ${w.b}, N ${w.n}, Lq ${w.lq}, Lk ${w.lk}, ` +
    `H ${w.h}${w.kv_heads ? ` (${w.kv_heads} of keys)` : ""}, D ${w.d}, ${biases}: ` +
    `${number(w.b * w.n * w.h * w.lq * w.lk)} scores.`;
  const timed = problem.results
    .filter((found) => time(found, state.pass) !== null)
    .sort((a, b) => time(a, state.pass) - time(b, state.pass));
  chart($("bars"), () =>
    bars(
      $("bars"),
      timed.map((found) => {
        const samples = found.times[state.pass].samples_ms || [];
        return {
          name: title(found.name),
          value: time(found, state.pass),
          text: `${number(time(found, state.pass))} ms`,
          colour: colour(found.name),
          ...(samples.length ? { low: Math.min(...samples), high: Math.max(...samples) } : {}),
        };
      }),
      { unit: " ms", label: `Milliseconds of ${PASS_TITLES[state.pass]} at ${w.name}; the table has the numbers` },
    ),
  );
  const timeless = (found) => !found.times && !found.errors;
  const rows = problem.results.map((found) => ({
    ...found,
    ours: found.name === "evoattn",
    instead: timeless(found) ? reason(found) : "",
  }));
  rows.sort((a, b) => timeless(a) - timeless(b));
  const fair = rows.filter((row) => !isBound(row.name));
  const best = (get) => (value, row) => !isBound(row.name) && value === least(fair.map(get));
  const peak = (row) => (row.peak_bytes ? row.peak_bytes / 2 ** 20 : null);
  const exponent = (value) => (typeof value === "number" ? value.toExponential(1) : value || "–");
  const has = (get) => rows.some((row) => get(row) !== null);
  const value = (x) => (x === undefined || x === null ? null : x);
  const columns = [
    { title: "by", get: (row) => title(row.name), show: (text) => text },
    ...passes.map((pass) => ({
      title: `${PASS_TITLES[pass]}, ms`,
      get: (row) => time(row, pass),
      show: (_, row) => rangeText(row, pass),
      best: best((row) => time(row, pass)),
    })),
    {
      title: `10⁹ scores/s, ${PASS_TITLES[state.pass]}`,
      get: (row) => (time(row, state.pass) ? (w.b * w.n * w.h * w.lq * w.lk) / time(row, state.pass) / 1e6 : null),
    },
    ...passes.map((pass) => ({ title: `host ${PASS_TITLES[pass]}, µs`, get: (row) => value((row.host_us || {})[pass]) })),
    { title: "first call, s", get: (row) => value(row.first_call_s) },
    { title: "peak, MiB", get: peak, best: best(peak) },
    ...["o", "dq", "dk", "dv", "dpair_bias"].map((name) => ({
      title: `error ${name}`,
      get: (row) => value((row.errors || {})[name]),
      show: exponent,
    })),
  ].filter((column) => has(column.get));
  if (rows.some((row) => row.instead || reason(row)))
    columns.push({ title: "notes", get: (row) => reason(row) || null, show: (text) => text || "", words: true });
  table($("detail"), columns, rows, `All that was measured at ${w.name}`);
}

function growth() {
  const of = shown()
    .filter((problem) => family(problem.workload) === state.family)
    .sort((a, b) => length(a.workload) - length(b.workload));
  const series = (get) =>
    names
      .map((name) => ({
        name,
        points: of.map((problem) => [length(problem.workload), get(result(problem, name))]).filter((point) => point[1]),
      }))
      .filter((line) => line.points.length);
  const times = series((found) => time(found, state.pass));
  const memory = series((found) => (found && found.peak_bytes ? found.peak_bytes / 2 ** 20 : null));
  $("length-time-title").textContent = `${PASS_TITLES[state.pass]}, ms`;
  chart($("length-time"), () => lines($("length-time"), times, `Milliseconds of ${PASS_TITLES[state.pass]} against length`));
  chart($("length-memory"), () => lines($("length-memory"), memory, "Peak memory against length"));
  const seen = unique([...times, ...memory].map((line) => line.name));
  $("legend").replaceChildren(
    ...seen.map((name) => {
      const key = make("i");
      key.style.borderTopColor = colour(name);
      if (dash(name)) key.style.borderTopStyle = "dashed";
      return make("span", {}, key, title(name));
    }),
  );
}

function limits() {
  const { exp2_per_s: exp2, copy_bytes_per_s: copy, product_flops_per_s: products, how } = data.ceilings || {};
  const product = (products || {})[state.dtype];
  $("limits-note").textContent =
    exp2 || copy
      ? `Measured in this run: ${number(exp2 ? exp2 / 1e9 : null)} · 10⁹ exp2/s, ` +
        `${number(copy ? copy / 1e9 : null)} GB/s, ` +
        `${number(product ? product / 1e12 : null)} Tflop/s of ${state.dtype} products (${how}). ` +
        "A score takes one exponential in either pass, and for each channel 4 operations forward and 10 backward; the bytes are " +
        "those of inputs and output, once, and twice that backward."
      : `No ceilings were measured${how ? `: ${how}` : ""}.`;
  const percent = (value) => (value === null ? "–" : `${(100 * value).toPrecision(2)}%`);
  const share = (name, pass, amount, ceiling) => (problem) => {
    const found = time(result(problem, name), pass);
    return found && amount(problem) && ceiling ? amount(problem) / (found / 1e3) / ceiling : null;
  };
  const scores = ({ workload: w }) => w.b * w.n * w.h * w.lq * w.lk;
  const columns = [
    { title: "workload", get: (problem) => problem.workload.name, show: (text) => text },
    { title: "exp2, forward", get: share("evoattn", "forward", scores, exp2), show: percent },
    { title: "exp2, backward", get: share("evoattn", "backward", scores, exp2), show: percent },
    { title: "products, forward", get: share("evoattn", "forward", (p) => 4 * p.workload.d * scores(p), product), show: percent },
    { title: "products, backward", get: share("evoattn", "backward", (p) => 10 * p.workload.d * scores(p), product), show: percent },
    { title: "bandwidth, forward", get: share("evoattn", "forward", (problem) => problem.bytes, copy), show: percent },
    { title: "bandwidth, backward", get: share("evoattn", "backward", (problem) => 2 * problem.bytes, copy), show: percent },
  ];
  $("ceilings").parentNode.hidden = !exp2 && !copy && !product;
  table(
    $("ceilings"),
    columns,
    shown().filter((problem) => (result(problem, "evoattn") || {}).times),
    "Share of the ceilings that evoattn reaches",
  );
}

function reasons() {
  const rows = shown().flatMap((problem) =>
    problem.results
      .filter((found) => found.status && found.status !== "ok")
      .map((found) => ({ ...found, workload: problem.workload.name })),
  );
  const groups = new Map();
  for (const row of rows) {
    const key = [row.name, row.status, row.reason].join("\n");
    groups.set(key, { ...row, where: [...((groups.get(key) || {}).where || []), row.workload] });
  }
  table(
    $("reasons"),
    [
      { title: "by", get: (row) => title(row.name), show: (text) => text },
      { title: "state", get: (row) => row.status, show: (text) => text },
      { title: "why", get: (row) => row.reason || "", show: (text) => text, words: true },
      {
        title: "workloads",
        get: (row) => row.where.length,
        show: (_, row) => (row.where.length === shown().length ? "all" : row.where.join(", ")),
        words: true,
      },
    ],
    [...groups.values()],
    "What has no time, and why",
  );
}

function facts() {
  const rows = [
    ...Object.entries(data.machine),
    ...Object.entries(data.settings || {}),
    ["finished", data.finished],
    ["seconds", data.seconds],
  ];
  table(
    $("facts"),
    [
      { title: "what", get: (row) => row[0], show: (text) => text },
      {
        title: "value",
        get: (row) =>
          Array.isArray(row[1]) ? row[1].join(", ") : String(row[1] === undefined || row[1] === null ? "–" : row[1]),
        show: (text) => text,
        words: true,
      },
    ],
    rows,
    "Machine and settings",
  );
}

function draw() {
  overview();
  one();
  growth();
  limits();
  reasons();
}

function select(id, options, value) {
  $(id).replaceChildren(
    ...options.map(([name, text]) => make("option", { value: name, ...(name === value ? { selected: "" } : {}) }, text)),
  );
  state[id] = value;
  $(id).addEventListener("change", () => {
    state[id] = $(id).value;
    draw();
  });
}

function radios(id, options, value) {
  $(id).append(
    ...options.map(([name, text]) => {
      const input = make("input", { type: "radio", name: id, value: name, ...(name === value ? { checked: "" } : {}) });
      input.addEventListener("change", () => {
        state[id] = name;
        draw();
      });
      return make("label", {}, input, text);
    }),
  );
  state[id] = value;
}

function theme() {
  const choices = ["system", "light", "dark"];
  let place = 0;
  $("theme").addEventListener("click", () => {
    place = (place + 1) % choices.length;
    $("theme").textContent = `Theme: ${choices[place]}`;
    if (place) document.documentElement.dataset.theme = choices[place];
    else delete document.documentElement.dataset.theme;
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
    interrupted: "The run was interrupted: what was measured until then is here.",
    "out of time": "The run's budget ended before all was measured: what is missing says so.",
  }[data.finished];
  const note = (data.settings || {}).note;
  $("state").textContent = [ended, note && `Note: ${note}.`].filter(Boolean).join(" ");
  const dtypes = unique(problems.map((problem) => problem.dtype));
  radios(
    "dtype",
    dtypes.map((name) => [name, name]),
    dtypes[0],
  );
  radios(
    "pass",
    passes.map((name) => [name, PASS_TITLES[name]]),
    passes[0] || "forward",
  );
  select("against", [["best", "the fastest peer"], ...others.map((name) => [name, title(name)])], "best");
  const all = unique(problems.map((problem) => problem.workload.name));
  select(
    "workload",
    all.map((name) => [name, name]),
    all[0],
  );
  const families = unique(problems.map((problem) => family(problem.workload)));
  const lengths = (name) =>
    unique(problems.filter((problem) => family(problem.workload) === name).map((problem) => length(problem.workload))).length;
  families.sort((a, b) => lengths(b) - lengths(a));
  select(
    "family",
    families.map((name) => [name, `${name} (${lengths(name)} lengths)`]),
    families[0],
  );
  draw();
}

start();
