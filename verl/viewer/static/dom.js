// Elements, texts and numbers. Texts of a model are data: they are only ever inserted as text nodes.

export const PALETTE = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6"];

/** Create an element. `attributes`: `on<event>` adds a listener, `class` and others are set; null is left out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Show control characters and characters that change the direction of text, instead of executing them. */
export function visible(text) {
  return String(text ?? "").replace(
    // eslint-disable-next-line no-control-regex
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g,
    (character) => {
      const code = character.charCodeAt(0);
      return code < 0x20 ? String.fromCharCode(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
    },
  );
}

/** A number with a few significant digits. */
export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  if (size >= 1e12) return `${(value / 1e12).toPrecision(3)}T`;
  if (size >= 1e9) return `${(value / 1e9).toPrecision(3)}G`;
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  return size < 1e-3 && size > 0 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(value < 0.1 && value > 0 ? 1 : 0)} %`;
}

/** A number of things: 1 token, 2 tokens; ? if it is unknown. */
export function plural(count, noun) {
  return `${count ?? "?"} ${noun}${count === 1 ? "" : "s"}`;
}

/** Legend of a sequential colour scale, from the colour of `low` to that of `high`. */
export function scaleLegend(low, high) {
  return h("span", { class: "scale muted" }, `${low} `, Array.from({ length: 8 }, (_, index) => h("i", { class: `q${index}` })), ` ${high}`);
}

/** Seconds as 12 ms, 3.4 s, 5 min, 3.2 h. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 1) return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  if (seconds < 120) return `${seconds.toFixed(1)} s`;
  return seconds < 7200 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** Local time as 2026-11-18 17:38:55. */
export function clock(seconds) {
  if (!seconds) return "–";
  const date = new Date(1000 * seconds);
  const pad = (value) => String(value).padStart(2, "0");
  return `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
}

/** Labels of axis ticks: as many digits as their distance needs, so that no two are equal. */
export function tickLabels(values, format = short) {
  const labels = values.map(format);
  const gap = values.length > 1 ? Math.abs(values[1] - values[0]) : 0;
  if (format !== short || new Set(labels).size === labels.length || !(gap > 0)) return labels;
  return values.map((value) => value.toFixed(Math.max(0, Math.min(12, Math.ceil(-Math.log10(gap) - 1e-6)))));
}

/** The value of a CSS colour variable in the current theme. */
export function color(variable) {
  return getComputedStyle(document.documentElement).getPropertyValue(variable).trim();
}

/** Black or white, whichever is readable on a background `#rrggbb`. */
export function textOn(background) {
  const [r, g, b] = [1, 3, 5].map((place) => parseInt(background.slice(place, place + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 125 ? "#000" : "#fff";
}

export function select(label, options, chosen, onChange) {
  const box = h("select", { onchange: () => onChange(box.value), "aria-label": label });
  for (const [value, text] of options) box.append(h("option", { value, selected: String(value) === String(chosen) }, visible(text)));
  return h("label", { class: "control" }, `${label} `, box);
}

export function checkbox(label, checked, onChange) {
  const box = h("input", { type: "checkbox", checked, onchange: () => onChange(box.checked) });
  return h("label", { class: "control" }, box, ` ${label}`);
}

/** A table. `columns`: [{name, label, value(row), show(row), numeric}]; rows are sorted by clicks on the header. */
export function table(columns, rows, { onOpen = null, selected = () => false, sort = null, limit = 500 } = {}) {
  let order = sort ?? { column: null, descending: false };
  const body = h("tbody");
  const head = h("tr");
  const fill = () => {
    const sorted = [...rows];
    const column = columns.find((entry) => entry.name === order.column);
    if (column) {
      const sign = order.descending ? -1 : 1;
      sorted.sort((a, b) => {
        const [x, y] = [column.value(a), column.value(b)];
        if (x === y) return 0;
        if (x === null || x === undefined) return 1;
        if (y === null || y === undefined) return -1;
        return x < y ? -sign : sign;
      });
    }
    body.replaceChildren(...sorted.slice(0, limit).map((row) => {
      const cells = columns.map((entry) => h("td", { class: entry.numeric ? "number" : null }, (entry.show ?? ((r) => visible(entry.value(r))))(row)));
      const open = onOpen && ((event) => {
        if (event.type === "click" || event.key === "Enter") onOpen(row);
      });
      return h("tr", { class: onOpen ? "link" : null, tabindex: onOpen ? 0 : null, onclick: open, onkeydown: open, "aria-selected": selected(row) ? "true" : null }, ...cells);
    }));
    head.replaceChildren(...columns.map((entry) => {
      const state = order.column === entry.name ? (order.descending ? "descending" : "ascending") : "none";
      const turn = () => {
        order = { column: entry.name, descending: order.column === entry.name ? !order.descending : Boolean(entry.numeric) };
        fill();
      };
      const mark = { ascending: " ▲", descending: " ▼", none: "" }[state];
      return h("th", { "aria-sort": state, class: entry.numeric ? "number" : null }, h("button", { class: "plain", onclick: turn, title: entry.title ?? null }, entry.label + mark));
    }));
  };
  fill();
  const left = rows.length > limit ? h("p", { class: "note" }, `${rows.length - limit} more rows are not shown.`) : null;
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, head), body), left);
}

let tooltipBox = null;

export function showTooltip(event, ...children) {
  tooltipBox ??= document.getElementById("tooltip");
  tooltipBox.replaceChildren(...children);
  tooltipBox.hidden = false;
  const { width, height } = tooltipBox.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, innerWidth - width - 8);
  const above = event.clientY + 18 + height > innerHeight;
  tooltipBox.style.left = `${Math.max(4, left)}px`;
  tooltipBox.style.top = `${above ? Math.max(4, event.clientY - height - 12) : event.clientY + 18}px`;
}

export function hideTooltip() {
  if (tooltipBox) tooltipBox.hidden = true;
}
