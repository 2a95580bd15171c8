// Validation: the same prompts over time and across runs; what became correct and what became wrong.

import { get } from "./api.js";
import { color, h, hideTooltip, percent, plural, scaleLegend, select, short, showTooltip, table, visible } from "./dom.js";

const CELL_HEIGHT = 5, STEP_AXIS = 20;

/** Prompts that two validations share, with their values: [{prompt, before, after}]. */
export function compare(before, beforeIndex, after, afterIndex) {
  const places = new Map(before.prompts.map((prompt, index) => [prompt.uid, index]));
  return after.prompts.flatMap((prompt, index) => {
    if (!places.has(prompt.uid)) return [];
    const [x, y] = [valueOf(before, places.get(prompt.uid), beforeIndex), valueOf(after, index, afterIndex)];
    return x === null || y === null ? [] : [{ prompt, before: x, after: y }];
  });
}

function valueOf(result, prompt, step) {
  return result.correct[prompt][step] ?? result.score[prompt][step];
}

export async function renderValidation(view) {
  const { runs, params } = view;
  const withResponses = runs.map((run, number) => [number, run.name]).filter(([number]) => runs[number].steps.validation.length);
  if (!withResponses.length) {
    view.container.append(h("p", { class: "note" }, "No validation responses are recorded (trainer.test_freq, data.val_files)."));
    return null;
  }
  const known = new Set(withResponses.map(([number]) => number));
  const pick = (value, fallback) => (value !== undefined && known.has(Number(value)) ? Number(value) : fallback);
  const after = pick(params.run, withResponses.at(-1)[0]);
  const before = pick(params.base, withResponses[0][0]);
  const [results, base] = await Promise.all([get("validation", { run: after }), get("validation", { run: before })]);
  const stepAfter = indexOf(results.steps, params.step, results.steps.length - 1);
  const stepBefore = indexOf(base.steps, params.from, before === after ? 0 : base.steps.length - 1);
  const go = (values) => view.go("validation", { run: after, base: before, step: results.steps[stepAfter], from: base.steps[stepBefore], ...values });
  const pairs = compare(base, stepBefore, results, stepAfter);
  const gained = pairs.filter((pair) => pair.after > pair.before);
  const lost = pairs.filter((pair) => pair.after < pair.before);
  const isShare = [results, base].every((result) => result.correct.some((row) => row.some((value) => value !== null)));
  const show = isShare ? percent : short;
  const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);
  const detail = h("section", { "aria-live": "polite" });
  const open = async (uid) => {
    view.set({ uid });
    await showPrompt(detail, runs, withResponses, uid);
    detail.scrollIntoView({ block: "nearest" });
  };
  const choose = (label, run, result, index, runKey, stepKey) => h("fieldset", {}, h("legend", {}, label),
    select("run", withResponses, run, (value) => go({ [runKey]: value, [stepKey]: null })),
    select("step", result.steps.map((step) => [step, step]), result.steps[index], (value) => go({ [stepKey]: value })));
  const map = new HeatMap(results, open);
  const isSame = before === after && stepBefore === stepAfter;
  view.container.append(...[
    h("section", { class: "bar" }, choose("before", before, base, stepBefore, "base", "from"), choose("after", after, results, stepAfter, "run", "step")),
    isSame ? h("p", { class: "note" }, results.steps.length === 1 && withResponses.length === 1 ? "There is only one validation until now: nothing to compare." : "The same validation is chosen twice: choose another step or run to compare.") : null,
    !isSame && !pairs.length ? h("p", { class: "note" }, "These validations have no prompt in common: choose others to compare.") : null,
    h("p", {}, `${plural(pairs.length, "prompt")} in both: `, `${isShare ? "correct" : "mean score"} `, h("b", {}, `${show(mean(pairs.map((pair) => pair.before)))} → ${show(mean(pairs.map((pair) => pair.after)))}`),
      `; ${gained.length} better, ${lost.length} worse.`),
    h("div", { class: "split" },
      h("div", {}, h("h2", {}, `Newly correct or better (${gained.length})`), pairTable(gained, open)),
      h("div", {}, h("h2", {}, `Newly wrong or worse (${lost.length})`), pairTable(lost, open))),
    h("h2", {}, `All ${results.prompts.length} prompts over time: ${visible(runs[after].name)}`),
    h("p", { class: "muted" }, "One row per prompt (easiest first), one column per validation (step below it). A click shows the responses. ",
      scaleLegend(isShare ? "wrong" : short(map.low), isShare ? "correct" : short(map.high))),
    map.element, detail].filter(Boolean));
  if (params.uid) await open(params.uid);
  return null;
}

function indexOf(steps, wanted, fallback) {
  const index = wanted === undefined ? -1 : steps.indexOf(Number(wanted));
  return index < 0 ? fallback : index;
}

function pairTable(pairs, open) {
  const columns = [
    { name: "prompt", label: "prompt", value: (pair) => pair.prompt.prompt || pair.prompt.uid, show: (pair) => h("span", { class: "clip" }, visible(pair.prompt.prompt || pair.prompt.uid)) },
    { name: "source", label: "source", value: (pair) => pair.prompt.source },
    { name: "before", label: "before", value: (pair) => pair.before, show: (pair) => short(pair.before), numeric: true },
    { name: "after", label: "after", value: (pair) => pair.after, show: (pair) => short(pair.after), numeric: true },
  ];
  return pairs.length ? table(columns, pairs, { onOpen: (pair) => open(pair.prompt.uid), limit: 100 }) : h("p", { class: "muted" }, "None.");
}

async function showPrompt(detail, runs, withResponses, uid) {
  const results = await Promise.all(withResponses.map(([run]) => get("validation_answers", { run, uid }).catch(() => [])));
  const prompt = results.flat().find((response) => response.prompt)?.prompt;
  const rows = results.flatMap((responses, index) => responses.map((response) => ({ ...response, run: runs[withResponses[index][0]].name }))).sort((a, b) => a.step - b.step);
  const truth = rows.find((row) => row.ground_truth)?.ground_truth;
  detail.replaceChildren(h("h2", {}, "Responses over time"), h("pre", {}, visible(prompt ?? "(text not recorded)")), truth ? h("p", {}, "ground truth: ", h("b", {}, visible(truth))) : "",
    ...rows.map((row, index) => h("details", { class: "turn", open: index === rows.length - 1 },
      h("summary", {}, h("span", { class: row.correct === true ? "good" : row.correct === false ? "bad" : "" }, row.correct === true ? "✓ correct" : row.correct === false ? "✗ wrong" : "not scored"),
        ` step ${row.step}${runs.length > 1 ? `, ${visible(row.run)}` : ""} · score ${short(row.score)} · ${plural(row.length, "token")}${row.finish_reason ? `, ${row.finish_reason}` : ""}`),
      responseOf(row))));
}

/** The response; of a pair both responses with their scores. */
function responseOf(row) {
  const rejected = row.turns?.find((turn) => turn.name === "rejected");
  if (!rejected) return h("pre", {}, visible(row.response ?? "(text not recorded)"));
  const card = (name, text) => h("article", { class: "card" }, h("h3", {}, name, h("span", { class: "score" }, short(row.rewards[name]))), h("pre", {}, visible(text)));
  return h("div", { class: "cards" }, card("chosen", row.response), card("rejected", rejected.text));
}

class HeatMap {
  constructor(result, onOpen) {
    this.result = result;
    // Prompts by their mean: easy ones first.
    const means = result.prompts.map((_, index) => {
      const values = result.steps.map((_step, step) => valueOf(result, index, step)).filter((value) => value !== null);
      return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : -1;
    });
    this.order = result.prompts.map((_, index) => index).sort((a, b) => means[b] - means[a]);
    const values = result.prompts.flatMap((_, index) => result.steps.map((_step, step) => valueOf(result, index, step))).filter((value) => value !== null);
    const [low, high] = [Math.min(...values.slice(0, 1e5)), Math.max(...values.slice(0, 1e5))]; // infinite if there are none
    [this.low, this.high] = high < 0 && low < high ? [low, high] : [Math.min(0, low), Math.max(1, high)]; // log-probs are negative
    this.height = Math.min(600, Math.max(40, this.order.length * CELL_HEIGHT));
    this.canvas = h("canvas", { role: "img", "aria-label": `Results of ${result.prompts.length} prompts in ${result.steps.length} validations` });
    this.canvas.style.height = `${this.height + STEP_AXIS}px`;
    this.element = h("div", { class: "canvas" }, this.canvas);
    new ResizeObserver(() => this.draw()).observe(this.element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.canvas.addEventListener("pointermove", (event) => {
      const [prompt, step] = this.at(event);
      showTooltip(event, h("div", {}, `step ${result.steps[step]}: ${short(valueOf(result, prompt, step))}`), h("div", {}, visible(result.prompts[prompt].prompt)));
    });
    this.canvas.addEventListener("pointerleave", hideTooltip);
    this.canvas.addEventListener("click", (event) => onOpen(result.prompts[this.at(event)[0]].uid));
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const index = (value, size, count) => Math.max(0, Math.min(count - 1, Math.floor((value / size) * count)));
    return [this.order[index(event.clientY - box.top, this.height, this.order.length)], index(event.clientX - box.left, box.width, this.result.steps.length)];
  }

  draw() {
    const ratio = devicePixelRatio || 1;
    const width = this.element.clientWidth;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round((this.height + STEP_AXIS) * ratio);
    this.canvas.style.width = `${width}px`;
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const shades = [0, 1, 2, 3, 4, 5, 6, 7].map((level) => color(`--q${level}`));
    const [w, hh] = [width / this.result.steps.length, this.height / this.order.length];
    this.order.forEach((prompt, row) => this.result.steps.forEach((_, step) => {
      const value = valueOf(this.result, prompt, step);
      if (value === null || value === undefined) return;
      context.fillStyle = shades[Math.round((7 * (value - this.low)) / (this.high - this.low))];
      context.fillRect(step * w, row * hh, Math.max(1, w - (w > 4 ? 1 : 0)), Math.max(0.5, hh - (hh > 3 ? 0.5 : 0)));
    }));
    context.strokeStyle = color("--muted");
    context.strokeRect(0.5, 0.5, width - 1, this.height - 1);
    context.fillStyle = color("--muted");
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    const every = Math.ceil(48 / w); // labels must not overlap
    this.result.steps.forEach((step, index) => {
      if (index % every === 0) context.fillText(`${index ? "" : "step "}${step}`, Math.max(20, (index + 0.5) * w), this.height + 14);
    });
  }
}
