// One response: conversation with turns, trained tokens, a strip of per-token values, reward and its components.

import { get } from "./api.js";
import { color, h, hideTooltip, plural, scaleLegend, select, short, showTooltip, visible } from "./dom.js";

const COLUMNS = {
  rollout_log_probs: "log-prob (rollout), nats",
  trainer_log_probs: "log-prob (trainer)",
  difference: "trainer − rollout",
  advantages: "advantage",
  versions: "version",
  entropy: "entropy (nats)",
  ref_log_probs: "log-prob (reference)",
  teacher_log_probs: "log-prob (teacher)",
  values: "value",
  weights: "importance weight",
  loss_weights: "weight in the loss",
  token_scores: "score on token",
};
const DIVERGING = new Set(["difference", "advantages", "values", "token_scores"]);
const LEVELS = 8;

/** Values that have the darkest colours: [low, high] of a diverging scale, or the ends of a sequential one. */
export function limits(name, values) {
  const known = values.filter((value) => value !== null);
  if (!DIVERGING.has(name)) return name.endsWith("log_probs") ? [0, -5] : [0, Math.max(...known, 1e-9)];
  const sizes = known.map(Math.abs).sort((a, b) => a - b);
  const limit = sizes[Math.floor(0.99 * (sizes.length - 1))] || sizes.at(-1) || 1;
  return [-limit, limit];
}

/** Legend of the colours of a column. */
function scale(name, values) {
  if (name === "versions") return h("span", { class: "muted" }, "one colour per version");
  const isDiverging = DIVERGING.has(name);
  const [low, high] = limits(name, values);
  if (!isDiverging) return scaleLegend(short(low), name.endsWith("log_probs") ? `≤ ${short(high)}` : short(high));
  const boxes = Array.from({ length: 9 }, (_, index) => h("i", { class: `d${index}` }));
  return h("span", { class: "scale muted" }, `≤ ${short(low)} `, boxes, ` ≥ ${short(high)}`);
}

/** Class of the colour of every value: q0 to q7 (sequential), d0 to d8 (diverging) or v0 to v6 (versions). */
export function shades(name, values) {
  if (name === "versions") return values.map((value) => (value === null || value < 0 ? "" : `v${value % 7}`));
  const [, limit] = limits(name, values);
  if (DIVERGING.has(name)) {
    return values.map((value) => (value === null ? "" : `d${4 + Math.max(-4, Math.min(4, Math.round((4 * value) / limit)))}`));
  }
  return values.map((value) => (value === null ? "" : `q${Math.max(0, Math.min(LEVELS - 1, Math.round((value / limit) * (LEVELS - 1))))}`));
}

export async function renderAnswer(view) {
  const { runs, params } = view;
  if (params.uid === undefined) return renderFirst(view);
  const [run, step, sample] = [Number(params.run ?? 0), Number(params.step), Number(params.sample ?? 0)];
  const [result, group] = await Promise.all([get("answer", { run, step, uid: params.uid, sample }), get("group", { run, step, uid: params.uid }).catch(() => null)]);
  const samples = group ? group.responses.map((response) => response.sample_index) : [sample];
  const place = samples.indexOf(sample);
  const go = (offset) => () => samples[place + offset] !== undefined && view.go("answer", { ...params, sample: samples[place + offset], part: null });
  view.onKey("ArrowLeft", go(-1));
  view.onKey("ArrowRight", go(1));
  const number = Math.min(Number(params.part ?? 0), result.parts.length - 1);
  const part = result.parts[number];
  view.container.append(
    h("section", { class: "bar" },
      h("a", { href: view.link("groups", { run, step, uid: params.uid }) }, `← step ${step}`), runs.length > 1 ? ` ${visible(runs[run].name)} ` : null,
      h("button", { onclick: go(-1), disabled: place <= 0, title: "previous response (←)" }, "◀"),
      h("b", {}, `response ${sample} (${plural(samples.length, "response")} in the group)`),
      h("button", { onclick: go(1), disabled: place >= samples.length - 1, title: "next response (→)" }, "▶"),
      result.parts.length > 1 ? select("row", result.parts.map((_, index) => [index, `${index + 1} of ${result.parts.length}`]), number, (value) => view.go("answer", { ...params, part: value })) : null),
    details(part), ...conversation(view, part));
  return null;
}

async function renderFirst(view) {
  const run = Number(view.params.run ?? 0);
  const steps = view.runs[run].steps.trajectories;
  if (!steps.length) {
    view.container.append(h("p", { class: "note" }, `${visible(view.runs[run].name)} has no recorded responses.${view.runs[run].steps.pairs.length ? " Its pairs are on the page Groups." : ""}`));
    return null;
  }
  const step = steps.at(-1);
  const { columns } = await get("groups", { run, step });
  const index = Math.max(0, columns.recorded.indexOf(true));
  return view.go("answer", { run, step, uid: columns.uid[index], sample: columns.samples[index][0] }, true);
}

function details(part) {
  const entry = (name, value) => (value === null || value === undefined || value === "" ? [] : [h("dt", {}, name), h("dd", {}, value)]);
  const rewards = Object.entries(part.rewards).map(([name, value]) => h("span", { class: "pill" }, `${visible(name)} `, h("b", {}, short(value))));
  const trained = part.columns.mask?.filter((value) => value).length;
  return h("dl", { class: "details" },
    ...entry("reward", h("b", { class: "score" }, short(part.score))), ...entry("components", rewards.length ? h("span", {}, rewards) : null),
    ...entry("scorer", part.reward_info && visible(part.reward_info)), ...entry("ground truth", part.ground_truth && visible(part.ground_truth)),
    ...entry("tokens", part.columns.mask ? `${part.columns.mask.length}, trained on ${trained}` : null),
    ...entry("ended by", `${part.finish_reason ?? "–"}${part.status && part.status !== "finished" ? `, ${visible(part.status)}` : ""}`),
    ...entry("source", visible(part.data_source)), ...entry("agent", part.agent && fields(part.agent)), ...entry("extra", part.extra && fields(part.extra)));
}

/** A JSON object as names and values, without empty ones; other texts as they are. */
function fields(json) {
  let values = null;
  try {
    values = JSON.parse(json);
  } catch {
    // not JSON: shown as a text
  }
  if (values === null || typeof values !== "object") return visible(json);
  const isEmpty = (value) => value === null || value === "" || (typeof value === "object" && !Object.keys(value).length);
  const shown = Object.entries(values).filter(([, value]) => !isEmpty(value));
  const text = (value) => (typeof value === "number" ? short(value) : visible(typeof value === "string" ? value : JSON.stringify(value)));
  return h("span", {}, shown.map(([name, value]) => h("span", { class: "pill" }, `${visible(name)} `, h("b", {}, text(value)))));
}

/** The turns of a response with colours per token, the strip of all tokens, and the prompt. `sources`: names of the sources of turns. */
export function conversation(view, part, sources = { model: "model", environment: "environment" }) {
  const columns = { ...part.columns };
  if (columns.rollout_log_probs && columns.trainer_log_probs) {
    columns.difference = columns.trainer_log_probs.map((value, index) => (value === null || columns.rollout_log_probs[index] === null ? null : value - columns.rollout_log_probs[index]));
  }
  const names = Object.keys(COLUMNS).filter((name) => columns[name]);
  let shown = names.includes(view.params.column) ? view.params.column : names[0];
  const count = columns.mask?.length ?? 0;
  const isText = view.params.text === "1" || !part.tokens;
  const spans = [];
  const turns = [];
  let position = 0;
  for (const turn of part.turns ?? []) {
    const end = position + (turn.tokens ?? 0);
    const isModel = turn.source === "model";
    const body = h("pre", { class: isModel ? "model" : "environment" });
    if (isText) body.append(visible(turn.text ?? "(text not recorded)"));
    else {
      for (let index = position; index < end; index += 1) {
        const token = h("span", { "data-index": index }, tokenText(part.tokens[index]));
        spans[index] = token;
        body.append(token);
      }
    }
    position = end;
    const label = `${isModel ? sources.model : visible(turn.name ?? sources.environment)} · ${plural(turn.tokens, "token")}${turn.reward === null ? "" : ` · reward ${short(turn.reward)}`}`;
    turns.push(isModel ? h("section", { class: "turn" }, h("h3", {}, label), body) : h("details", { class: "turn", open: true }, h("summary", {}, label), body));
  }
  const strip = new Strip(columns, (index) => describe(part, columns, index), (index) => spans[index]?.scrollIntoView({ block: "center" }));
  const legend = h("span");
  const unknown = (part.tokens ?? []).filter((text) => text === null).length;
  const paint = () => {
    if (!shown) return;
    const classes = shades(shown, columns[shown]);
    spans.forEach((token, index) => {
      token.className = `token ${columns.mask?.[index] ? "trained" : "masked"} ${classes[index]}`;
    });
    strip.update(shown, classes);
    legend.replaceChildren(scale(shown, columns[shown]));
  };
  paint();
  const text = h("div", { class: "tokens" }, turns);
  text.addEventListener("pointerover", (event) => {
    const index = event.target.dataset?.index;
    if (index === undefined) return hideTooltip();
    return showTooltip(event, ...describe(part, columns, Number(index)));
  });
  text.addEventListener("pointerleave", hideTooltip);
  const prompt = part.messages ? messages(part.messages) : h("pre", {}, visible(part.prompt ?? "(text not recorded)"));
  return [
    h("section", { class: "bar" },
      names.length ? select("colour", names.map((name) => [name, COLUMNS[name]]), shown, (name) => {
        shown = name;
        view.set({ column: name });
        paint();
      }) : null,
      legend,
      part.tokens ? select("show", [["0", "tokens"], ["1", "text"]], isText ? "1" : "0", (value) => view.go("answer", { ...view.params, text: value === "1" ? "1" : null }, true)) : null,
      h("span", { class: "muted" }, h("span", { class: "token trained" }, "trained"), " ", h("span", { class: "token masked" }, "not trained"), ` · ${plural(count, "token")} · point at a token for its values`)),
    unknown && !isText ? h("p", { class: "muted" }, `▒: ${plural(unknown, "token")} without text (redacted, or not in the tokenizer's vocabulary).`) : null,
    count ? strip.element : null,
    h("details", { class: "turn" }, h("summary", {}, `prompt · ${plural(part.prompt_tokens?.length, "token")}`), prompt), text,
  ].filter(Boolean);
}

function messages(content) {
  let list;
  try {
    list = JSON.parse(content);
  } catch {
    return h("pre", {}, visible(content));
  }
  if (!Array.isArray(list)) return h("pre", {}, visible(content));
  return h("div", {}, list.map((message) => h("div", { class: "message" }, h("b", {}, visible(message?.role)), h("pre", {}, visible(typeof message?.content === "string" ? message.content : JSON.stringify(message, null, 1))))));
}

function tokenText(text) {
  if (text === null || text === undefined) return "▒";
  return visible(text).replace(/\n/g, "↵\n") || "∅";
}

function describe(part, columns, index) {
  const text = part.tokens ? JSON.stringify(part.tokens[index] ?? "(redacted)") : "";
  const rows = Object.keys(COLUMNS).filter((name) => columns[name]).map((name) => h("tr", {}, h("td", {}, COLUMNS[name]), h("td", { class: "number" }, columns[name][index] === null ? "–" : String(Number(columns[name][index].toPrecision(8))))));
  return [h("div", {}, h("b", {}, visible(text)), ` token ${index}${part.token_ids ? `, id ${part.token_ids[index]}` : ""}, ${columns.mask?.[index] ? "trained" : "not trained"}`), h("table", {}, h("tbody", {}, rows))];
}

/** A strip with one column of pixels per token, or per some tokens. */
class Strip {
  constructor(columns, describeToken, onOpen) {
    this.count = columns.mask?.length ?? 0;
    this.mask = columns.mask ?? [];
    this.classes = [];
    this.canvas = h("canvas", { role: "img", tabindex: 0, "aria-label": "Values of all tokens" });
    this.element = h("div", { class: "canvas strip" }, this.canvas);
    this.cursor = 0;
    const at = (event) => Math.max(0, Math.min(this.count - 1, Math.floor(((event.clientX - this.canvas.getBoundingClientRect().left) / this.element.clientWidth) * this.count)));
    this.canvas.addEventListener("pointermove", (event) => showTooltip(event, ...describeToken(at(event))));
    this.canvas.addEventListener("pointerleave", hideTooltip);
    this.canvas.addEventListener("click", (event) => onOpen(at(event)));
    this.canvas.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      this.cursor = Math.max(0, Math.min(this.count - 1, this.cursor + (event.key === "ArrowLeft" ? -1 : 1)));
      const box = this.canvas.getBoundingClientRect();
      showTooltip({ clientX: box.left + (this.cursor / this.count) * box.width, clientY: box.bottom }, ...describeToken(this.cursor));
      event.stopPropagation();
      event.preventDefault();
    });
    new ResizeObserver(() => this.draw()).observe(this.element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  update(name, classes) {
    this.classes = classes;
    this.canvas.setAttribute("aria-label", `${COLUMNS[name]} of ${this.count} tokens; arrow keys show the values`);
    this.draw();
  }

  draw() {
    const ratio = devicePixelRatio || 1;
    const width = this.element.clientWidth;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(34 * ratio);
    this.canvas.style.width = `${width}px`;
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const colors = new Map();
    const edge = (index) => Math.round((index * width * ratio) / Math.max(1, this.count)) / ratio; // whole pixels: no seams
    for (let index = 0; index < this.count; index += 1) {
      const name = this.classes[index];
      if (name && !colors.has(name)) colors.set(name, color(`--${name}`));
      context.fillStyle = name ? colors.get(name) : color("--grid");
      const [left, size] = [edge(index), Math.max(edge(index + 1) - edge(index), 0.6)];
      context.fillRect(left, 0, size, 26);
      if (this.mask[index]) {
        colors.set("trained", colors.get("trained") ?? color("--c0"));
        context.fillStyle = colors.get("trained");
        context.fillRect(left, 29, size, 4);
      }
    }
  }
}
