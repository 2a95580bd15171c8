// Charts on a canvas: lines over steps with smoothing, logarithm and zoom; scatter plots.

import { color, h, hideTooltip, short, showTooltip, tickLabels, visible } from "./dom.js";

const LEFT = 60, RIGHT = 24, TOP = 8, BOTTOM = 34;

/** Exponential moving average with bias correction; null values are skipped. */
export function smooth(values, weight) {
  if (!weight) return values;
  let [sum, total] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** About `count` round numbers between two values, at least `smallest` apart. */
export function ticks(low, high, count, smallest = 0) {
  if (!(high > low)) return [low];
  const raw = Math.max((high - low) / Math.max(1, count), smallest);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
  const values = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) values.push(Math.abs(value) < step * 1e-9 ? 0 : value);
  return values;
}

function logTicks(low, high) {
  const values = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) if (power >= low && power <= high) values.push(power);
  return values.length > 1 ? values : [low, high];
}

class Canvas {
  constructor(label, height) {
    this.height = height;
    this.canvas = h("canvas", { role: "img", tabindex: 0, "aria-label": label });
    this.element = h("div", { class: "canvas" }, this.canvas);
    this.canvas.style.height = `${height}px`;
    new ResizeObserver(() => this.draw()).observe(this.element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  /** Clear the canvas; returns its context and width in CSS pixels. */
  begin() {
    const ratio = devicePixelRatio || 1;
    const width = this.element.clientWidth;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.width = `${width}px`;
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, this.height);
    context.font = "11px system-ui, sans-serif";
    return { context, width };
  }

  /** `x`, `y`: {ticks, labels, place}. `xLabel`: what the x axis shows. */
  axes(context, width, x, y, xLabel = "") {
    context.lineWidth = 1;
    context.strokeStyle = color("--grid");
    context.fillStyle = color("--muted");
    context.textAlign = "right";
    context.textBaseline = "middle";
    y.ticks.forEach((value, index) => {
      const place = Math.round(y.place(value)) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, place);
      context.lineTo(width - RIGHT, place);
      context.stroke();
      context.fillText(y.labels[index], LEFT - 6, place);
    });
    context.textAlign = "center";
    context.textBaseline = "top";
    x.ticks.forEach((value, index) => context.fillText(x.labels[index], x.place(value), this.height - BOTTOM + 6));
    context.textAlign = "right";
    if (xLabel) context.fillText(xLabel, width - RIGHT, this.height - 12);
  }
}

export class LineChart extends Canvas {
  /** `onZoom(range)`: range of x values, or null for all; shared by the charts of a page. */
  constructor(title, { height = 202, onZoom = null, xFormat = short, yFormat = short, xLabel = "step" } = {}) {
    super(title, height);
    Object.assign(this, { title, onZoom, xFormat, yFormat, xLabel, series: [], range: null, log: false, weight: 0, cursor: null, marks: [] });
    this.legend = h("div", { class: "legend" });
    this.figure = h("figure", { class: "chart" }, h("figcaption", {}, visible(title)), this.element, this.legend);
    this.listen();
  }

  /** `series`: [{name, color (CSS variable), x, y, low, high}]. `marks`: [{x, text}] are vertical lines. */
  update({ series = this.series, range = this.range, log = this.log, weight = this.weight, marks = this.marks } = {}) {
    Object.assign(this, { series, range, log, weight, marks });
    this.smoothed = series.map((entry) => smooth(entry.y, weight));
    this.legend.replaceChildren(...(series.length > 1 ? series.map((entry) => {
      const key = h("span", { class: "key" });
      key.style.background = `var(${entry.color})`;
      return h("span", {}, key, visible(entry.name));
    }) : []));
    const last = series[0]?.y.findLast((value) => value !== null);
    this.canvas.setAttribute("aria-label", `${this.title}: line chart, ${series.length} series, last value ${short(last)}`);
    this.draw();
  }

  scale(value) {
    return this.log ? (value > 0 ? Math.log10(value) : null) : value;
  }

  domain() {
    let [left, right, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
    this.series.forEach((entry) => entry.x.forEach((x) => {
      if (x !== null) [left, right] = [Math.min(left, x), Math.max(right, x)];
    }));
    if (this.range) [left, right] = this.range;
    const take = (value) => {
      const scaled = value === null || value === undefined ? null : this.scale(value);
      if (scaled !== null) [low, high] = [Math.min(low, scaled), Math.max(high, scaled)];
    };
    this.series.forEach((entry, number) => entry.x.forEach((x, index) => {
      if (x === null || x < left || x > right) return;
      take(entry.y[index]);
      take(this.smoothed[number][index]);
      if (entry.low) [take(entry.low[index]), take(entry.high[index])];
    }));
    if (low > high) return null;
    // A constant: from 0, so that it is no line in the middle of an arbitrary range.
    if (low === high) [low, high] = this.log ? [low - 1, high + 1] : low === 0 ? [0, 1] : [Math.min(0, low), Math.max(0, high)];
    if (left === right) [left, right] = [left - 1, right + 1];
    const pad = 0.04 * (high - low);
    return { left, right, low: low - pad, high: high + pad };
  }

  draw() {
    const { context, width } = this.begin();
    const domain = this.series.length ? this.domain() : null;
    this.places = null;
    if (!domain || width < 80) {
      context.fillStyle = color("--muted");
      context.fillText(this.log ? "no positive values" : "no values", LEFT, this.height / 2);
      return;
    }
    const { left, right, low, high } = domain;
    const xPlace = (x) => LEFT + ((x - left) / (right - left)) * (width - LEFT - RIGHT);
    const yPlace = (y) => TOP + ((high - y) / (high - low)) * (this.height - TOP - BOTTOM);
    this.places = { xPlace, yPlace, left, right, width };
    const yTicks = this.log ? logTicks(low, high) : ticks(low, high, 6);
    const y = { ticks: yTicks, labels: this.log ? yTicks.map((value) => this.yFormat(10 ** value)) : tickLabels(yTicks, this.yFormat), place: yPlace };
    const xTicks = ticks(left, right, Math.max(2, width / 64), this.xLabel === "step" ? 1 : 0);
    this.axes(context, width, { ticks: xTicks, labels: tickLabels(xTicks, this.xFormat), place: xPlace }, y, this.xLabel);
    context.save();
    context.beginPath();
    context.rect(LEFT - 3, 0, width - LEFT - RIGHT + 6, this.height - BOTTOM + 3);
    context.clip();
    for (const mark of this.marks) {
      context.strokeStyle = color("--muted");
      context.setLineDash([3, 3]);
      context.beginPath();
      context.moveTo(xPlace(mark.x), TOP);
      context.lineTo(xPlace(mark.x), this.height - BOTTOM);
      context.stroke();
      context.setLineDash([]);
    }
    this.series.forEach((entry, number) => {
      const stroke = color(entry.color);
      if (entry.low) this.band(context, entry, stroke);
      if (this.weight) this.line(context, entry.x, entry.y, stroke, 0.25);
      this.line(context, entry.x, this.smoothed[number], stroke, 1);
    });
    this.drawCursor(context);
    context.restore();
  }

  line(context, x, y, stroke, alpha) {
    context.strokeStyle = stroke;
    context.fillStyle = stroke;
    context.globalAlpha = alpha;
    context.lineWidth = 1.6;
    context.beginPath();
    let [points, started] = [[], false];
    for (let index = 0; index < x.length; index += 1) {
      const value = y[index] === null || y[index] === undefined || x[index] === null ? null : this.scale(y[index]);
      if (value === null) continue; // a missing value (validation is rare) is no gap
      const point = [this.places.xPlace(x[index]), this.places.yPlace(value)];
      if (points.length < 40) points.push(point);
      if (started) context.lineTo(...point);
      else context.moveTo(...point);
      started = true;
    }
    context.stroke();
    if (points.length < 40) for (const [px, py] of points) context.fillRect(px - 2, py - 2, 4, 4);
    context.globalAlpha = 1;
  }

  band(context, entry, fill) {
    const known = entry.x.map((_, index) => index).filter((index) => entry.low[index] !== null && entry.high[index] !== null && entry.low[index] !== undefined);
    if (known.length < 2) return;
    context.fillStyle = fill;
    context.globalAlpha = 0.18;
    context.beginPath();
    for (const index of known) context.lineTo(this.places.xPlace(entry.x[index]), this.places.yPlace(this.scale(entry.high[index]) ?? 0));
    for (const index of known.reverse()) context.lineTo(this.places.xPlace(entry.x[index]), this.places.yPlace(this.scale(entry.low[index]) ?? 0));
    context.fill();
    context.globalAlpha = 1;
  }

  drawCursor(context) {
    if (this.drag) {
      context.fillStyle = color("--select");
      context.fillRect(Math.min(...this.drag), TOP, Math.abs(this.drag[1] - this.drag[0]), this.height - TOP - BOTTOM);
    }
    if (this.cursor === null) return;
    context.strokeStyle = color("--muted");
    context.beginPath();
    context.moveTo(this.places.xPlace(this.cursor), TOP);
    context.lineTo(this.places.xPlace(this.cursor), this.height - BOTTOM);
    context.stroke();
  }

  /** Index of the point with a value that is nearest to x. */
  nearest(entry, x) {
    let [best, distance] = [null, Infinity];
    entry.x.forEach((value, index) => {
      if (value === null || entry.y[index] === null || entry.y[index] === undefined) return;
      const gap = Math.abs(value - x);
      if (gap < distance) [best, distance] = [index, gap];
    });
    return best;
  }

  showValues(event, x) {
    const lines = this.series.map((entry, number) => {
      const index = this.nearest(entry, x);
      if (index === null) return null;
      const interval = entry.low?.[index] !== null && entry.low?.[index] !== undefined ? ` (${short(entry.low[index])} – ${short(entry.high[index])})` : "";
      const average = this.weight ? ` · smoothed ${short(this.smoothed[number][index])}` : "";
      this.cursor = entry.x[index];
      const key = h("span", { class: "key" });
      key.style.background = `var(${entry.color})`;
      return h("div", {}, key, `${visible(entry.name)} · ${this.xLabel} ${this.xFormat(entry.x[index])}: `, h("b", {}, this.yFormat(entry.y[index])), interval + average);
    });
    showTooltip(event, ...lines.filter(Boolean));
    this.draw();
  }

  listen() {
    const position = (event) => event.clientX - this.canvas.getBoundingClientRect().left;
    const value = (pixel) => this.places.left + ((pixel - LEFT) / (this.places.width - LEFT - RIGHT)) * (this.places.right - this.places.left);
    this.canvas.addEventListener("pointerdown", (event) => {
      if (!this.places || event.button) return;
      this.drag = [position(event), position(event)];
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.places) return;
      if (this.drag) this.drag[1] = position(event);
      this.showValues(event, value(position(event)));
    });
    this.canvas.addEventListener("pointerup", () => {
      const drag = this.drag;
      this.drag = null;
      if (drag && Math.abs(drag[1] - drag[0]) > 6) this.zoom([value(Math.min(...drag)), value(Math.max(...drag))]);
      else this.draw();
    });
    this.canvas.addEventListener("pointerleave", () => {
      this.cursor = null;
      hideTooltip();
      this.draw();
    });
    this.canvas.addEventListener("dblclick", () => this.zoom(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    if (!this.places || !this.series.length) return;
    if (event.key === "Escape") {
      hideTooltip();
      this.zoom(null);
    } else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      const entry = this.series[0];
      const known = entry.x.filter((x, index) => entry.y[index] !== null && entry.y[index] !== undefined);
      const place = this.cursor === null ? known.length - 1 : known.indexOf(this.cursor) + (event.key === "ArrowLeft" ? -1 : 1);
      const x = known[Math.max(0, Math.min(known.length - 1, place))];
      const box = this.canvas.getBoundingClientRect();
      this.showValues({ clientX: box.left + this.places.xPlace(x), clientY: box.top + 40 }, x);
      event.preventDefault();
      event.stopPropagation();
    }
  }

  zoom(range) {
    if (this.onZoom) this.onZoom(range);
    else this.update({ range });
  }
}

export class Scatter extends Canvas {
  /** `onOpen(point)` is called by a click on a point. */
  constructor(label, onOpen, height = 260) {
    super(label, height);
    Object.assign(this, { onOpen, points: [] });
    this.canvas.addEventListener("pointermove", (event) => {
      const point = this.at(event);
      this.canvas.style.cursor = point ? "pointer" : "default";
      if (point) showTooltip(event, ...point.lines.map((line) => h("div", {}, line)));
      else hideTooltip();
    });
    this.canvas.addEventListener("pointerleave", hideTooltip);
    this.canvas.addEventListener("click", (event) => {
      const point = this.at(event);
      if (point) onOpen(point);
    });
  }

  /** `points`: [{x, y, color, lines, isSelected}]. */
  update(points, xLabel, yLabel) {
    Object.assign(this, { points: points.filter((point) => point.x !== null && point.y !== null), xLabel, yLabel });
    this.canvas.setAttribute("aria-label", `Scatter plot of ${this.points.length} points: ${xLabel}, ${yLabel}. The table below has the same values.`);
    this.draw();
  }

  draw() {
    const { context, width } = this.begin();
    if (!this.points.length || width < 80) return;
    const bounds = (values) => {
      const [low, high] = [Math.min(...values), Math.max(...values)];
      const pad = 0.06 * (high - low || Math.abs(high) || 1);
      return [low - pad, high + pad];
    };
    const [left, right] = bounds(this.points.map((point) => point.x));
    const [low, high] = bounds(this.points.map((point) => point.y));
    const xPlace = (x) => LEFT + ((x - left) / (right - left)) * (width - LEFT - RIGHT);
    const yPlace = (y) => TOP + 14 + ((high - y) / (high - low)) * (this.height - TOP - BOTTOM - 14);
    const smallest = (name) => (this.points.every((point) => Number.isInteger(point[name])) ? 1 : 0); // tokens and counts
    const [xTicks, yTicks] = [ticks(left, right, width / 64, smallest("x")), ticks(low, high, 5, smallest("y"))];
    this.axes(context, width, { ticks: xTicks, labels: tickLabels(xTicks), place: xPlace }, { ticks: yTicks, labels: tickLabels(yTicks), place: yPlace }, this.xLabel);
    context.textAlign = "left";
    context.fillText(this.yLabel, 4, TOP);
    for (const point of this.points) {
      [point.px, point.py] = [xPlace(point.x), yPlace(point.y)];
      context.globalAlpha = 0.65;
      context.fillStyle = color(point.color);
      context.beginPath();
      context.arc(point.px, point.py, 4.5, 0, 7);
      context.fill();
      context.globalAlpha = 1;
      if (point.isSelected) {
        context.strokeStyle = color("--text");
        context.lineWidth = 2;
        context.stroke();
      }
    }
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let [best, distance] = [null, 100];
    for (const point of this.points) {
      const gap = (point.px - x) ** 2 + (point.py - y) ** 2;
      if (gap < distance) [best, distance] = [point, gap];
    }
    return best;
  }
}

