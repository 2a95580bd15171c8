// Overview: learning curves of one or several runs, health, differences of their configurations.

import { get, metrics } from "./api.js";
import { LineChart } from "./chart.js";
import { PALETTE, checkbox, duration, h, select, short, table, visible } from "./dom.js";
import { findingCards } from "./health.js";

const CHARTS = [
  ["Reward", ["reward/mean", "critic/score/mean"]],
  ["Validation", []],
  ["Training loss", ["train/loss"]],
  ["Validation loss", ["val/loss"]],
  ["Response length (tokens)", ["response_length/mean"]],
  ["Truncated responses (share)", ["response_length/clip_ratio"]],
  ["Entropy (nats)", ["actor/entropy"]],
  ["KL divergence (nats)", ["kl/mean", "actor/kl_loss", "actor/approx_kl", "actor/ppo_kl"]],
  ["Gradient norm", ["actor/grad_norm", "train/grad_norm"]],
  ["Clip fraction", ["actor/clipfrac", "actor/pg_clipfrac"]],
  ["Mismatch of rollout and trainer (nats)", ["rollout/log_prob_diff_mean", "rollout_corr/log_prob_diff"]],
  ["Staleness (steps)", ["async/staleness/mean"]],
  ["Step time (s)", ["timing_s/step", "train/step_s"]],
  ["Tokens per second", ["perf/throughput", "perf/tokens_per_second"]],
];
const TOKENS = ["perf/total_num_tokens", "train/learned_tokens"];
const AXES = [["step", "step"], ["time", "time"], ["tokens", "tokens"]];

/** Metrics of validation with their intervals: accuracies, or else the main values. */
export function validationNames(names) {
  const accuracies = names.filter((name) => /^val\/.+\/accuracy$|^val\/accuracy$/.test(name));
  const main = names.filter((name) => /^val-core\/.*\/mean@\d+$/.test(name));
  const shown = main.length ? main : accuracies;
  return shown.map((name) => {
    const bound = (side) => [`${name}/${side}`, `${name.replace("val-core/", "val-aux/")}/${side}`].find((other) => names.includes(other));
    return { name, low: bound("low"), high: bound("high") };
  });
}

export async function renderOverview(view) {
  const { runs, params } = view;
  const hidden = new Set((params.hide ?? "").split(",").filter(Boolean).map(Number));
  const settings = { axis: params.axis ?? "step", weight: Number(params.smooth ?? 0), log: params.log === "1", range: null };
  const extra = params.more ? JSON.parse(params.more) : [];
  const grid = h("div", { class: "charts" });
  const charts = new Map();
  const restarts = () => (runs.length > 1 ? [] : runs[0].attempts.slice(1).map((attempt) => ({ x: attempt.first_step, text: "restart" })));
  let data = [];

  const save = () => view.set({
    axis: settings.axis === "step" ? null : settings.axis,
    smooth: settings.weight || null,
    log: settings.log ? "1" : null,
    hide: [...hidden].join(",") || null,
    more: extra.length ? JSON.stringify(extra) : null,
  });
  const load = async () => {
    const wanted = [...CHARTS.flatMap(([, names]) => names), ...TOKENS, ...extra];
    const first = await Promise.all(runs.map((_, run) => metrics(run, wanted)));
    const validation = first.map(({ names }) => validationNames(names));
    const more = await Promise.all(validation.map((entries, run) => (entries.length
      ? metrics(run, entries.flatMap((entry) => [entry.name, entry.low, entry.high].filter(Boolean))) : null)));
    data = first.map((result, run) => ({ ...result, validation: validation[run], columns: { ...result.columns, ...more[run]?.columns } }));
  };
  const xOf = (columns) => {
    if (settings.axis === "time") return columns.time.map((time) => (time === null ? null : time - columns.time[0]));
    const tokens = TOKENS.map((name) => columns[name]).find(Boolean);
    if (settings.axis !== "tokens" || !tokens) return columns.step;
    let sum = 0;
    return tokens.map((count) => (sum += count ?? 0));
  };
  const seriesOf = (names) => data.flatMap(({ columns }, run) => {
    const name = names.find((entry) => columns[entry]?.some((value) => value !== null));
    if (!name || hidden.has(run)) return [];
    return [{ name: runs.length > 1 ? runs[run].name : name, color: PALETTE[run % PALETTE.length], x: xOf(columns), y: columns[name] }];
  });
  const validationSeries = () => data.flatMap(({ columns, validation }, run) => (hidden.has(run) ? [] : validation.map((entry, number) => ({
    name: `${runs.length > 1 ? `${runs[run].name} ` : ""}${entry.name}`,
    color: PALETTE[(runs.length > 1 ? run : number) % PALETTE.length],
    x: xOf(columns), y: columns[entry.name], low: columns[entry.low], high: columns[entry.high],
  }))));
  const zoom = (range) => {
    settings.range = range;
    for (const chart of charts.values()) chart.update({ range });
  };
  const draw = () => {
    const format = settings.axis === "time" ? duration : short;
    const marks = settings.axis === "step" ? restarts() : [];
    for (const [title, names] of [...CHARTS, ...extra.map((name) => [name, [name]])]) {
      const series = title === "Validation" ? validationSeries() : seriesOf(names);
      if (!series.length && !charts.has(title)) continue;
      if (!charts.has(title)) {
        const hasBand = title === "Validation" && series.some((entry) => entry.low);
        charts.set(title, new LineChart(hasBand ? `${title} (band: 95 % interval)` : title, { onZoom: zoom }));
        grid.append(charts.get(title).figure);
      }
      const chart = charts.get(title);
      Object.assign(chart, { xFormat: format, xLabel: settings.axis === "time" ? "time since the start" : settings.axis });
      chart.update({ series, log: settings.log, weight: settings.weight, range: settings.range, marks });
    }
  };
  const change = (values) => {
    Object.assign(settings, values);
    if (values.axis) settings.range = null;
    save();
    draw();
  };

  await load();
  const smoothing = h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: settings.weight, "aria-label": "Smoothing", oninput: () => change({ weight: Number(smoothing.value) }) });
  const known = [...new Set(data.flatMap((entry) => entry.names))].sort();
  const list = h("datalist", { id: "metric-names" }, known.map((name) => h("option", { value: name })));
  const add = h("input", { list: "metric-names", placeholder: "add a metric", "aria-label": "Add a metric", onchange: async () => {
    if (!known.includes(add.value) || extra.includes(add.value)) return;
    extra.push(add.value);
    add.value = "";
    save();
    await load();
    draw();
  } });
  const legend = runs.map((run, number) => {
    const box = checkbox("", !hidden.has(number), (checked) => {
      if (checked) hidden.delete(number);
      else hidden.add(number);
      save();
      draw();
    });
    const key = h("span", { class: "key" });
    key.style.background = `var(${PALETTE[number % PALETTE.length]})`;
    return h("div", { class: "run" }, runs.length > 1 ? box : null, key, h("b", {}, visible(run.name)), " ",
      h("span", { class: `status ${run.status}` }, run.status), ` step ${run.last_step ?? "–"}`,
      run.message ? h("span", { class: "bad" }, ` ${visible(run.message).slice(0, 200)}`) : null,
      h("span", { class: "muted" }, ` ${visible(run.folder)}`));
  });
  const health = h("div", { class: "findings" }, h("p", { class: "muted" }, "checking…"));
  view.container.append(
    h("section", { class: "runs" }, legend),
    h("section", { class: "bar" },
      select("x axis", AXES, settings.axis, (axis) => change({ axis })),
      h("label", { class: "control" }, "smoothing ", smoothing),
      checkbox("logarithmic", settings.log, (log) => change({ log })),
      h("button", { onclick: () => zoom(null) }, "all steps"),
      add, list, h("span", { class: "muted" }, `drag: zoom · double click: all${restarts().length ? " · dashed line: restart" : ""}`)),
    h("h2", {}, "Health"), health, grid, await configSection(runs));
  draw();
  const showHealth = async () => {
    const results = await Promise.all(runs.map((_, run) => get("health", { run })));
    const current = results.flatMap((findings, run) => findings.filter((entry) => entry.is_current).map((entry) => ({ ...entry, run })));
    health.replaceChildren(...(current.length ? findingCards(current, runs, true) : [h("p", { class: "good" }, "No finding for the newest steps.")]));
  };
  showHealth();
  return async () => {
    await load();
    draw();
    await showHealth();
  };
}

async function configSection(runs) {
  const configs = await Promise.all(runs.map((_, run) => get("config", { run })));
  const keys = [...new Set(configs.flatMap(Object.keys))].sort();
  const text = (value) => (value === undefined ? "–" : JSON.stringify(value));
  const differing = keys.filter((key) => new Set(configs.map((config) => text(config[key]))).size > 1);
  const rows = runs.length > 1 ? differing : keys;
  const title = runs.length > 1 ? `Differences of the configurations (${differing.length} of ${keys.length} keys)` : `Configuration (${keys.length} keys)`;
  const body = h("div");
  const filter = h("input", { type: "search", placeholder: "filter keys", "aria-label": "Filter keys", oninput: () => fill() });
  const columns = [{ name: "key", label: "key", value: (key) => key }, ...runs.map((run, number) => ({ name: `run${number}`, label: runs.length > 1 ? visible(run.name) : "value", value: (key) => text(configs[number][key]) }))];
  const fill = () => body.replaceChildren(table(columns, rows.filter((key) => key.includes(filter.value)), { limit: 1000 }));
  fill();
  return h("details", { open: runs.length > 1 && rows.length < 40 }, h("summary", {}, title), filter, body);
}
