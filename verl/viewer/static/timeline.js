// Timeline: tracks of controller, ranks and engines, idle time, waits, time per phase over steps, engines and devices.

import { get, metrics } from "./api.js";
import { LineChart, ticks } from "./chart.js";
import { PALETTE, color, duration, h, hideTooltip, percent, select, short, showTooltip, table, textOn, visible } from "./dom.js";
import { nearestStep, stepBar } from "./groups.js";

const ROW = 16, GAP = 8, LABEL = 150, AXIS = 22;
// Phases that contain others, or that are not part of the step.
const NO_PHASES = new Set(["timing_s/step", "timing_s/record"]);
const AFTER_STEP = new Set(["save_checkpoint", "testing"]);

/** Depth of every span among those of its track that contain it; spans are sorted by start. */
export function depths(spans) {
  const open = [];
  return spans.map(([, start, end]) => {
    while (open.length && open.at(-1) <= start + 1e-9) open.pop();
    open.push(end);
    return open.length - 1;
  });
}

export async function renderTimeline(view) {
  const { runs, params } = view;
  const run = Number(params.run ?? 0);
  const { columns, names } = await metrics(run, ["timing_s/step"]);
  const steps = columns.step;
  if (!steps.length) {
    view.container.append(h("p", { class: "note" }, "No step is complete yet."));
    return null;
  }
  const step = nearestStep(steps, params.step === undefined ? undefined : Number(params.step));
  const span = Number(params.span ?? 1);
  const [result, timing, series] = await Promise.all([
    get("timeline", { run, first: step - span + 1, last: step }),
    metrics(run, names.filter((name) => name.startsWith("timing_s/"))),
    get("series", { run }),
  ]);
  const spans = [1, 2, 5, 10, 20].map((count) => [count, count]);
  view.container.append(
    h("section", { class: "bar" }, ...stepBar(view, "timeline", steps, run, step, { span: params.span }).filter(Boolean), select("steps", spans, span, (value) => view.go("timeline", { run, step, span: value })), h("span", { class: "muted" }, "drag: zoom · double click: all")));
  if (result.tracks.length) {
    const tracks = new Tracks(result);
    view.container.append(h("h2", {}, span > 1 ? `Steps ${step - span + 1} to ${step}` : `Step ${step}`), tracks.element, tracks.legend);
  } else view.container.append(h("p", { class: "note" }, "No phases of these steps are recorded."));
  if (result.left_out) view.container.append(h("p", { class: "note" }, `${result.left_out} earlier phases are not shown; choose fewer steps.`));
  view.container.append(h("div", { class: "split" }, breakdown(timing.columns, steps.indexOf(step)), waitTable(result.waits)));
  view.container.append(h("h2", {}, "Time per phase over the run"), trend(timing.columns, runs[run]));
  if (result.events.length) view.container.append(h("h2", {}, "Events"), h("ul", {}, result.events.map((event) => h("li", {}, `${duration(event.time)}: `, h("b", {}, event.kind), ` ${visible(event.message ?? "")}`))));
  view.container.append(...memoryTable(series.memory), ...seriesCharts(series, runs[run].start));
  return null;
}

function breakdown(columns, index) {
  const rows = Object.keys(columns).filter((name) => name.startsWith("timing_s/") && !NO_PHASES.has(name) && columns[name][index] > 0)
    .map((name) => ({ name: name.slice(9), seconds: columns[name][index], median: median(columns[name]) }));
  const total = columns["timing_s/step"]?.[index];
  const bar = (row) => {
    const fill = h("i", { class: "fill" });
    fill.style.width = `${Math.min(100, (100 * row.seconds) / (total || 1))}%`;
    return h("span", { class: "meter" }, fill);
  };
  const list = [
    { name: "name", label: "phase", value: (row) => row.name },
    { name: "seconds", label: "time", value: (row) => row.seconds, show: (row) => duration(row.seconds), numeric: true },
    { name: "share", label: "of the step", value: (row) => row.seconds, show: (row) => (AFTER_STEP.has(row.name) ? h("span", { class: "muted" }, "after the step") : h("span", {}, bar(row), total ? percent(row.seconds / total) : "–")) },
    { name: "median", label: "median of the run", value: (row) => row.median, show: (row) => duration(row.median), numeric: true },
  ];
  return h("div", {}, h("h2", {}, `Step: ${duration(total)}`), table(list, rows, { sort: { column: "seconds", descending: true } }));
}

function waitTable(waits) {
  const list = [
    { name: "step", label: "step", value: (row) => row.step, numeric: true },
    { name: "phase", label: "call", value: (row) => `${row.role}: ${row.phase}` },
    { name: "slowest", label: "slowest", value: (row) => row.slowest, show: (row) => h("span", { class: "one-line" }, visible(row.slowest)) },
    { name: "mean", label: "others waited (mean)", value: (row) => row.mean, show: (row) => duration(row.mean), numeric: true },
    { name: "longest", label: "longest", value: (row) => row.longest, show: (row) => duration(row.longest), numeric: true },
  ];
  const content = waits.length ? table(list, waits, { sort: { column: "mean", descending: true }, limit: 30 }) : h("p", { class: "muted" }, "No call ran on several ranks.");
  return h("div", {}, h("h2", {}, "Who waited for whom"), content);
}

function trend(columns) {
  const known = Object.keys(columns).filter((name) => name.startsWith("timing_s/") && !NO_PHASES.has(name)).map((name) => [name, median(columns[name]) ?? 0]).sort((a, b) => b[1] - a[1]);
  const chart = new LineChart("Time of each phase, all steps", { height: 232, yFormat: duration });
  const shown = [["timing_s/step", 0], ...known].filter(([name]) => columns[name]).slice(0, PALETTE.length);
  chart.update({ series: shown.map(([name], number) => ({ name: name.slice(9), color: PALETTE[number], x: columns.step, y: columns[name] })), weight: 0 });
  return chart.figure;
}

function memoryTable({ phases, device_gb: capacity }) {
  if (!phases.length) return [];
  const gb = (value) => (value === null ? "–" : value.toFixed(2));
  const list = [
    { name: "phase", label: "phase", value: (row) => row.phase },
    { name: "planned", label: "planned (GB)", value: (row) => row.planned, show: (row) => gb(row.planned), numeric: true },
    { name: "measured", label: "measured (GB)", value: (row) => row.measured, show: (row) => gb(row.measured), numeric: true },
    { name: "ratio", label: "measured / planned", value: (row) => row.measured / row.planned || null, show: (row) => (row.measured && row.planned ? percent(row.measured / row.planned) : "–"), numeric: true },
  ];
  const size = capacity === null ? "" : ` of ${gb(capacity)}`;
  return [h("h2", {}, "Planned and measured memory"), h("p", { class: "muted" }, `Tensors per device${size}; the plan assumes the longest sequences, measured is the largest value of all steps.`), table(list, phases, { sort: { column: "planned", descending: true } })];
}

function seriesCharts({ engines, devices }, start) {
  const chart = (title, entries, name, scale = 1) => {
    const shown = entries.filter((entry) => entry.columns[name].some((value) => value !== null)).slice(0, PALETTE.length);
    if (!shown.length) return null;
    const plot = new LineChart(title, { xFormat: duration, xLabel: "time since the start" });
    plot.update({ series: shown.map((entry, number) => ({ name: entry.tracks?.[0] ?? entry.name, color: PALETTE[number], x: entry.columns.time.map((time) => time - (start ?? 0)), y: entry.columns[name].map((value) => (value === null ? null : value * scale)) })) });
    return plot.figure;
  };
  const charts = [
    chart("Generated tokens per second", engines, "tokens_per_s"), chart("Running requests", engines, "running"), chart("Waiting requests", engines, "waiting"),
    chart("KV cache in use (share)", engines, "kv_used"), chart("Preempted requests (since the last record)", engines, "preemptions"), chart("Device memory in use (GB)", devices, "memory_used", 1e-9), chart("Memory of tensors (GB)", devices, "memory_tensors", 1e-9),
    chart("Device utilization (share of time)", devices, "utilization"), chart("Power (W)", devices, "power"),
  ].filter(Boolean);
  if (!charts.length) return [];
  const hidden = Math.max(engines.length, devices.length) - PALETTE.length;
  return [h("h2", {}, "Engines and devices"), hidden > 0 ? h("p", { class: "note" }, `The first ${PALETTE.length} are shown; ${hidden} more are recorded.`) : "", h("div", { class: "charts" }, charts)];
}

function median(values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

class Tracks {
  constructor({ tracks, end, events }) {
    Object.assign(this, { tracks, events, full: [0, end], range: [0, end] });
    const names = [...new Set(tracks.flatMap((track) => track.spans.map((span) => span[0])))];
    const total = new Map(names.map((name) => [name, 0]));
    for (const track of tracks) for (const [name, from, to] of track.spans) total.set(name, total.get(name) + to - from);
    total.set("step", 0); // it contains the others, which need the colors
    names.sort((a, b) => total.get(b) - total.get(a));
    this.colors = new Map(names.map((name, number) => [name, number < PALETTE.length ? PALETTE[number] : "--other"]));
    let top = 4;
    this.rows = tracks.map((track) => {
      const levels = depths(track.spans);
      const row = { track, levels, top, height: ROW * (1 + Math.max(0, ...levels)) };
      top += row.height + GAP;
      return row;
    });
    this.height = top + AXIS;
    this.canvas = h("canvas", { role: "img", tabindex: 0, "aria-label": `Timeline of ${tracks.length} tracks: ${tracks.map((track) => `${track.track} idle ${percent(track.idle)}`).join(", ")}` });
    this.canvas.style.height = `${this.height}px`;
    this.element = h("div", { class: "canvas" }, this.canvas);
    const entry = (variable, text) => {
      const key = h("span", { class: "key" });
      key.style.background = `var(${variable})`;
      return h("span", {}, key, visible(text));
    };
    const others = names.filter((name) => this.colors.get(name) === "--other");
    this.legend = h("div", { class: "legend" }, names.filter((name) => !others.includes(name)).map((name) => entry(this.colors.get(name), name)),
      others.length ? entry("--other", `other: ${others.join(", ")}`) : null, events.length ? entry("--text", "vertical line: event (listed below)") : null);
    new ResizeObserver(() => this.draw()).observe(this.element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.listen();
  }

  place(time) {
    return LABEL + ((time - this.range[0]) / (this.range[1] - this.range[0])) * (this.width - LABEL - 8);
  }

  time(event) {
    const pixel = event.clientX - this.canvas.getBoundingClientRect().left;
    return this.range[0] + ((pixel - LABEL) / (this.width - LABEL - 8)) * (this.range[1] - this.range[0]);
  }

  draw() {
    const ratio = devicePixelRatio || 1;
    this.width = this.element.clientWidth;
    if (this.width < LABEL + 20) return;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.width = `${this.width}px`;
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const resolved = new Map([...this.colors].map(([name, variable]) => [name, color(variable)]));
    const [text, muted, grid] = [color("--text"), color("--muted"), color("--grid")];
    for (const { track, levels, top, height } of this.rows) {
      context.fillStyle = grid;
      context.globalAlpha = 0.35;
      context.fillRect(LABEL, top, this.width - LABEL - 8, height);
      context.globalAlpha = 1;
      context.fillStyle = text;
      context.textAlign = "left";
      context.fillText(track.track.length > 15 ? `…${track.track.slice(-14)}` : track.track, 2, top + ROW / 2);
      context.fillStyle = muted;
      context.textAlign = "right";
      context.fillText(`idle ${percent(track.idle)}`, LABEL - 6, top + ROW / 2);
      context.textAlign = "left";
      track.spans.forEach(([name, from, to], index) => {
        if (to < this.range[0] || from > this.range[1]) return;
        const [left, right] = [Math.max(LABEL, this.place(from)), Math.min(this.width - 8, this.place(to))];
        const y = top + ROW * levels[index];
        context.fillStyle = resolved.get(name);
        context.fillRect(left, y, Math.max(1, right - left - 0.5), ROW - 2);
        if (right - left > 7 * name.length) {
          context.fillStyle = textOn(resolved.get(name));
          context.fillText(name, left + 3, y + ROW / 2);
        }
      });
    }
    context.fillStyle = muted;
    context.textAlign = "center";
    for (const value of ticks(...this.range, this.width / 110)) context.fillText(duration(value), this.place(value), this.height - AXIS / 2);
    for (const event of this.events) {
      context.fillStyle = color("--text");
      context.fillRect(this.place(event.time), 0, 1.5, this.height - AXIS);
    }
    if (this.drag) {
      context.fillStyle = color("--select");
      context.fillRect(this.place(Math.min(...this.drag)), 0, Math.abs(this.place(this.drag[1]) - this.place(this.drag[0])), this.height - AXIS);
    }
  }

  listen() {
    this.canvas.addEventListener("pointerdown", (event) => {
      this.drag = [this.time(event), this.time(event)];
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (this.drag) {
        this.drag[1] = this.time(event);
        return this.draw();
      }
      return this.describe(event);
    });
    this.canvas.addEventListener("pointerup", () => {
      const drag = this.drag;
      this.drag = null;
      if (drag && Math.abs(this.place(drag[1]) - this.place(drag[0])) > 6) this.range = [Math.max(this.full[0], Math.min(...drag)), Math.min(this.full[1], Math.max(...drag))];
      this.draw();
    });
    const all = () => {
      this.range = this.full;
      this.draw();
    };
    this.canvas.addEventListener("dblclick", all);
    this.canvas.addEventListener("keydown", (event) => {
      const width = this.range[1] - this.range[0];
      if (event.key === "Escape") all();
      else if (event.key === "+" || event.key === "-") {
        const half = (event.key === "+" ? 0.25 : 1) * width;
        const middle = (this.range[0] + this.range[1]) / 2;
        this.range = [Math.max(this.full[0], middle - half), Math.min(this.full[1], middle + half)];
        this.draw();
      } else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
        const move = (event.key === "ArrowLeft" ? -0.2 : 0.2) * width;
        const left = Math.max(this.full[0], Math.min(this.full[1] - width, this.range[0] + move));
        this.range = [left, left + width];
        this.draw();
        event.stopPropagation();
      } else return;
      event.preventDefault();
    });
    this.canvas.addEventListener("pointerleave", hideTooltip);
  }

  describe(event) {
    const y = event.clientY - this.canvas.getBoundingClientRect().top;
    const time = this.time(event);
    const row = this.rows.find((entry) => y >= entry.top && y < entry.top + entry.height);
    if (!row) return hideTooltip();
    const level = Math.floor((y - row.top) / ROW);
    const index = row.track.spans.findLastIndex(([, from, to], number) => row.levels[number] === level && from <= time && to >= time);
    if (index < 0) return showTooltip(event, h("div", {}, `${row.track.track}: idle`));
    const [name, from, to, step] = row.track.spans[index];
    return showTooltip(event, h("div", {}, h("b", {}, visible(name)), ` ${duration(to - from)}`), h("div", {}, `${row.track.track}, step ${short(step)}, from ${duration(from)} to ${duration(to)}`));
  }
}
