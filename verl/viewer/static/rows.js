// Supervised runs: rows of fine-tuning with values per token; pairs of a reward model side by side.

import { conversation } from "./answer.js";
import { get } from "./api.js";
import { Scatter } from "./chart.js";
import { nearestStep, searchBar, stepBar } from "./groups.js";
import { h, percent, plural, select, short, table, visible } from "./dom.js";

const ROW_VALUES = { trained_tokens: "trained tokens", tokens: "length (tokens)", loss: "loss (nats per token)" };
const PAIR_VALUES = { rejected_score: "score of the rejected response", chosen_score: "score of the chosen response", margin: "margin", loss: "loss (nats)", chosen_tokens: "length of the chosen response (tokens)", rejected_tokens: "length of the rejected response (tokens)" };
const PAIR_FILTERS = {
  all: ["all pairs", () => true],
  wrong: ["wrong", (pair) => pair.correct === false],
  right: ["correct", (pair) => pair.correct === true],
  other: ["ties and equal scores", (pair) => pair.correct === null],
};

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

function entriesOf(columns) {
  return columns.uid.map((_, index) => Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[index]])));
}

function sampleNote(entries, noun) {
  const recorded = entries.filter((entry) => entry.recorded).length;
  return recorded < entries.length ? h("span", { class: "note" }, ` Tokens of ${plural(recorded, noun)} are recorded (a uniform sample, trainer.record.max_mb_per_step).`) : null;
}

function chosenStep(view, kind) {
  const run = Number(view.params.run ?? 0);
  const steps = view.runs[run].steps[kind];
  return [run, steps, nearestStep(steps, view.params.step === undefined ? undefined : Number(view.params.step))];
}

function textCell(text, uid) {
  return h("span", { class: "clip" }, visible(text ?? uid));
}

/** Scatter plot of entries with selectable axes. */
function scatterPlot(view, title, values, axes, open) {
  const scatter = new Scatter(title, (point) => open(point.uid));
  const settings = { x: view.params.x in values ? view.params.x : axes[0], y: view.params.y in values ? view.params.y : axes[1] };
  let shown = [];
  const draw = () => scatter.update(shown, values[settings.x], values[settings.y]);
  const update = (entries, toPoint) => {
    shown = entries.map((entry) => ({ x: entry[settings.x], y: entry[settings.y], uid: entry.uid, ...toPoint(entry) }));
    draw();
  };
  const control = (axis, change) => select(axis, Object.entries(values), settings[axis], (value) => {
    settings[axis] = value;
    view.set(settings);
    change();
  });
  return { element: scatter.element, update, control };
}

/** The rows of a step of fine-tuning. */
export async function renderRows(view) {
  const [run, steps, step] = chosenStep(view, "rows");
  const rows = entriesOf((await get("rows", { run, step })).columns);
  const open = (uid) => view.go("answer", { run, step, uid });
  const hits = h("div");
  const plot = scatterPlot(view, "Rows", ROW_VALUES, ["trained_tokens", "loss"], open);
  const draw = () => plot.update(rows, (row) => ({
    color: "--c0", lines: [visible(row.prompt ?? "").slice(0, 120), `loss ${short(row.loss)} · ${short(row.trained_tokens)} of ${plural(row.tokens, "token")} trained`],
  }));
  const columns = [
    { name: "prompt", label: "prompt", value: (row) => row.prompt ?? row.uid, show: (row) => textCell(row.prompt, row.uid) },
    { name: "loss", label: "loss", title: "mean of −log-prob over the trained tokens, before the update", value: (row) => row.loss, show: (row) => short(row.loss), numeric: true },
    { name: "trained_tokens", label: "trained tokens", value: (row) => row.trained_tokens, numeric: true },
    { name: "tokens", label: "tokens", value: (row) => row.tokens, numeric: true },
  ];
  const trained = rows.reduce((sum, row) => sum + row.trained_tokens, 0);
  view.container.append(
    h("section", { class: "bar" }, ...stepBar(view, "groups", steps, run, step, { x: view.params.x, y: view.params.y }).filter(Boolean)),
    h("p", {}, `${plural(rows.length, "row")}, ${plural(trained, "trained token")}; mean loss of the rows `, h("b", {}, short(mean(rows.map((row) => row.loss).filter((loss) => loss !== null)))), ".", sampleNote(rows, "row")),
    searchBar(view, run, step, hits), hits,
    h("section", { class: "bar" }, plot.control("x", draw), plot.control("y", draw)),
    plot.element, h("p", { class: "muted" }, "Open a row to see its tokens."),
    table(columns, rows, { onOpen: (row) => open(row.uid), sort: { column: "loss", descending: true } }));
  draw();
  return null;
}

/** One row of fine-tuning: conversation with trained tokens marked, log-probs of its tokens. */
export async function renderRow(view) {
  const [run, , step] = chosenStep(view, "rows");
  const { columns } = await get("rows", { run, step });
  const recorded = columns.uid.filter((_, index) => columns.recorded[index]);
  const uid = view.params.uid ?? recorded[0];
  if (uid === undefined) {
    view.container.append(h("p", { class: "note" }, `Step ${step} has no rows with recorded tokens (trainer.record.max_mb_per_step).`));
    return null;
  }
  const { parts: [part] } = await get("row", { run, step, uid });
  const place = recorded.indexOf(uid);
  const go = (offset) => () => recorded[place + offset] !== undefined && view.go("answer", { run, step, uid: recorded[place + offset], column: view.params.column, text: view.params.text });
  view.onKey("ArrowLeft", go(-1));
  view.onKey("ArrowRight", go(1));
  const count = part.columns.mask.length + (part.prompt_tokens?.length ?? 0);
  view.container.append(
    h("section", { class: "bar" },
      h("a", { href: view.link("groups", { run, step }) }, `← step ${step}`), view.runs.length > 1 ? ` ${visible(view.runs[run].name)} ` : "",
      h("button", { onclick: go(-1), disabled: place <= 0, title: "previous row (←)" }, "◀"),
      h("b", {}, `row ${place + 1} of ${recorded.length} of the step`),
      h("button", { onclick: go(1), disabled: place >= recorded.length - 1, title: "next row (→)" }, "▶")),
    h("dl", { class: "details" }, h("dt", {}, "loss"), h("dd", {}, h("b", { class: "score" }, short(part.loss))), h("dt", {}, "tokens"), h("dd", {}, `${count}, trained on ${part.trained_tokens}`)),
    ...conversation(view, part, { model: "trained", environment: "not trained" }));
  return null;
}

/** The pairs of a step of a reward model; a click shows both responses side by side. */
export async function renderPairs(view) {
  const [run, steps, step] = chosenStep(view, "pairs");
  const pairs = entriesOf((await get("pairs", { run, step })).columns);
  let selected = view.params.uid ?? null;
  let filter = view.params.filter in PAIR_FILTERS ? view.params.filter : "all";
  const detail = h("section", { id: "pair", "aria-live": "polite" });
  const body = h("div");
  const open = async (uid) => {
    selected = uid;
    view.set({ run, step, uid });
    draw();
    await showPair(detail, run, step, pairs.find((pair) => pair.uid === uid));
    detail.scrollIntoView({ block: "nearest" }); // below the table on narrow screens
  };
  const plot = scatterPlot(view, "Pairs", PAIR_VALUES, ["rejected_score", "chosen_score"], open);
  const columns = [
    { name: "prompt", label: "prompt", value: (pair) => pair.prompt ?? pair.uid, show: (pair) => textCell(pair.prompt, pair.uid) },
    { name: "chosen_score", label: "chosen", value: (pair) => pair.chosen_score, show: (pair) => short(pair.chosen_score), numeric: true },
    { name: "rejected_score", label: "rejected", value: (pair) => pair.rejected_score, show: (pair) => short(pair.rejected_score), numeric: true },
    { name: "margin", label: "margin", title: "score of the better response minus that of the other", value: (pair) => pair.margin, show: (pair) => short(pair.margin), numeric: true },
    { name: "correct", label: "correct", value: (pair) => pair.correct, show: (pair) => (pair.correct === null ? "–" : pair.correct ? "yes" : "no") },
    { name: "loss", label: "loss", value: (pair) => pair.loss, show: (pair) => short(pair.loss), numeric: true },
    { name: "lengths", label: "tokens", title: "tokens of the chosen and of the rejected response", value: (pair) => pair.chosen_tokens - pair.rejected_tokens, show: (pair) => `${pair.chosen_tokens} / ${pair.rejected_tokens}`, numeric: true },
  ];
  const draw = () => {
    const shown = pairs.filter(PAIR_FILTERS[filter][1]);
    plot.update(shown, (pair) => ({
      color: pair.correct === false ? "--c5" : "--c0", isSelected: pair.uid === selected,
      lines: [visible(pair.prompt ?? "").slice(0, 120), `chosen ${short(pair.chosen_score)}, rejected ${short(pair.rejected_score)}, margin ${short(pair.margin)}`],
    }));
    body.replaceChildren(table(columns, shown, { onOpen: (pair) => open(pair.uid), selected: (pair) => pair.uid === selected, sort: { column: "margin", descending: false } }));
  };
  const decided = pairs.filter((pair) => pair.correct !== null);
  const keep = { x: view.params.x, y: view.params.y, filter: view.params.filter };
  view.container.append(
    h("section", { class: "bar" }, ...stepBar(view, "groups", steps, run, step, keep).filter(Boolean),
      select("show", Object.entries(PAIR_FILTERS).map(([name, [text]]) => [name, text]), filter, (value) => {
        filter = value;
        view.set({ filter });
        draw();
      })),
    h("p", {}, `${plural(pairs.length, "pair")}; `, h("b", {}, `${percent(mean(decided.map((pair) => Number(pair.correct))))} correct`), `, mean margin ${short(mean(decided.map((pair) => pair.margin)))}.`, sampleNote(pairs, "pair")),
    h("section", { class: "bar" }, plot.control("x", draw), plot.control("y", draw), h("span", { class: "muted" }, h("span", { class: "key k0" }), "correct ", h("span", { class: "key k5" }), "wrong")),
    h("div", { class: "split" }, h("div", {}, plot.element, body), detail));
  draw();
  if (selected) await showPair(detail, run, step, pairs.find((pair) => pair.uid === selected));
  return null;
}

async function showPair(detail, run, step, pair) {
  if (!pair) return detail.replaceChildren(h("p", { class: "note" }, "This pair is not in the step."));
  const texts = await get("pair", { run, step, uid: pair.uid });
  const card = (name, score, tokens, text) => h("article", { class: "card" },
    h("h3", {}, name, h("span", { class: "score" }, short(score))), h("p", { class: "muted" }, plural(tokens, "token")),
    h("pre", { class: "model" }, text === null ? "(text not recorded)" : visible(text)));
  const verdict = pair.correct === null ? "a tie, or equal scores" : pair.correct ? "correct" : "wrong";
  detail.replaceChildren(h("h2", {}, "Pair"),
    h("p", {}, `Margin ${short(pair.margin)} (${verdict}), loss ${short(pair.loss)}, preference ${short(pair.preference)}, weight ${short(pair.weight)}${pair.required_margin ? `, required margin ${short(pair.required_margin)}` : ""}.`),
    h("details", { open: true }, h("summary", {}, "prompt"), h("pre", {}, visible(texts.prompt ?? "(text not recorded)"))),
    h("div", { class: "cards" }, card("chosen", pair.chosen_score, pair.chosen_tokens, texts.chosen), card("rejected", pair.rejected_score, pair.rejected_tokens, texts.rejected)));
  return null;
}
