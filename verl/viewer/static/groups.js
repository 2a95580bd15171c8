// Groups of a step: scatter plot, table with filters, text search; the responses of a group side by side.

import { get, isExport, search } from "./api.js";
import { Scatter } from "./chart.js";
import { h, percent, plural, scaleLegend, select, short, table, visible } from "./dom.js";

const VALUES = { score_mean: "mean reward", score_std: "std of rewards", length_mean: "mean length (tokens)", staleness: "staleness (versions)", prompt_tokens: "prompt length (tokens)" };
const FILTERS = {
  all: ["all groups", () => true],
  signal: ["with signal", (group) => group.score_std > 0],
  none: ["without signal", (group) => group.score_std === 0],
  best: ["all responses equal, above mean", (group) => group.score_std === 0 && group.isAbove],
  worst: ["all responses equal, below mean", (group) => group.score_std === 0 && !group.isAbove],
  truncated: ["with truncated responses", (group) => group.finish_reasons.includes("length")],
  failed: ["with failed responses", (group) => group.statuses.some((status) => status !== "finished") || group.scores.includes(null)],
};

/** The step nearest to `wanted` in a sorted list. */
export function nearestStep(steps, wanted) {
  if (wanted === undefined || wanted === null || Number.isNaN(wanted)) return steps.at(-1);
  return steps.reduce((best, step) => (Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best), steps[0]);
}

/** Controls to choose run and step. */
export function stepBar(view, page, steps, run, step, keep = {}) {
  const go = (values) => view.go(page, { ...keep, run, step, ...values });
  const index = steps.indexOf(step);
  const slider = h("input", { type: "range", min: 0, max: steps.length - 1, value: index, "aria-label": "Step", onchange: () => go({ step: steps[Number(slider.value)] }) });
  const box = h("input", { type: "number", value: step, min: steps[0], max: steps.at(-1), "aria-label": "Step number", onchange: () => go({ step: nearestStep(steps, Number(box.value)) }) });
  view.onKey("[", () => index > 0 && go({ step: steps[index - 1] }));
  view.onKey("]", () => index < steps.length - 1 && go({ step: steps[index + 1] }));
  return [
    view.runs.length > 1 ? select("run", view.runs.map((entry, number) => [number, entry.name]), run, (value) => view.go(page, { run: value })) : null,
    h("label", { class: "control" }, "step ", box),
    h("button", { onclick: () => index > 0 && go({ step: steps[index - 1] }), disabled: index <= 0, title: "previous step ([)" }, "◀"),
    slider,
    h("button", { onclick: () => index < steps.length - 1 && go({ step: steps[index + 1] }), disabled: index >= steps.length - 1, title: "next step (])" }, "▶"),
  ];
}

export async function renderGroups(view) {
  const { runs, params } = view;
  const run = Number(params.run ?? 0);
  const steps = runs[run].steps.groups;
  if (!steps.length) {
    view.container.append(h("p", { class: "note" }, `${runs[run].name} has no groups${runs[run].program === "ppo" ? ": no step is complete yet." : ", rows or pairs."}`));
    return null;
  }
  const step = nearestStep(steps, params.step === undefined ? undefined : Number(params.step));
  const result = await get("groups", { run, step });
  const groups = rowsOf(result.columns);
  const range = rewardRange(groups);
  const settings = { x: params.x ?? "length_mean", y: params.y ?? "score_mean", filter: params.filter ?? "all" };
  const body = h("div");
  const detail = h("section", { id: "group", "aria-live": "polite" });
  const hits = h("div");
  let selected = params.uid ?? null;
  const open = async (uid) => {
    selected = uid;
    view.set({ run, step, uid });
    draw();
    await showGroup(view, detail, run, step, groups.find((group) => group.uid === uid));
    detail.scrollIntoView({ block: "nearest" }); // below the table on narrow screens
  };
  const scatter = new Scatter("Groups", (point) => open(point.uid));
  const draw = () => {
    const shown = groups.filter(FILTERS[settings.filter][1]);
    scatter.update(shown.map((group) => ({
      x: group[settings.x], y: group[settings.y], uid: group.uid, isSelected: group.uid === selected,
      color: group.score_std > 0 ? "--c0" : "--c5",
      lines: [visible(group.prompt ?? "").slice(0, 120), `reward ${short(group.score_mean)} ± ${short(group.score_std)} · ${short(group.length_mean)} tokens · staleness ${short(group.staleness)}`],
    })), VALUES[settings.x], VALUES[settings.y]);
    body.replaceChildren(groupTable(shown, selected, open, range));
  };
  const change = (values) => {
    Object.assign(settings, values);
    view.set({ x: settings.x, y: settings.y, filter: settings.filter });
    draw();
  };
  const silent = groups.filter((group) => group.score_std === 0).length;
  const recorded = groups.filter((group) => group.recorded).length;
  const options = Object.entries(VALUES);
  view.container.append(
    h("section", { class: "bar" }, ...stepBar(view, "groups", steps, run, step, { x: params.x, y: params.y, filter: params.filter }).filter(Boolean),
      select("show", Object.entries(FILTERS).map(([name, [text]]) => [name, text]), settings.filter, (filter) => change({ filter }))),
    h("p", {}, `${plural(groups.length, "group")}, ${plural(groups.reduce((sum, group) => sum + group.scores.length, 0), "response")}; `,
      h("b", {}, `${silent} without signal (${percent(silent / groups.length)})`),
      recorded < groups.length || !result.has_responses ? h("span", { class: "note" }, ` Responses of ${result.has_responses ? recorded : 0} groups are recorded${result.has_responses ? " (a uniform sample, trainer.record.max_mb_per_step)" : "; those of this step were deleted to stay within trainer.record.max_gb, or skipped"}.`) : null),
    searchBar(view, run, step, hits), hits,
    h("section", { class: "bar" }, select("x", options, settings.x, (x) => change({ x })), select("y", options, settings.y, (y) => change({ y })),
      h("span", { class: "muted" }, h("span", { class: "key k0" }), "with signal ", h("span", { class: "key k5" }), "without signal"),
      h("span", { class: "muted", id: "reward-colours" }, "rewards in the table: ", scaleLegend(...range.map(short)))),
    h("div", { class: "split" }, h("div", {}, scatter.element, body), detail));
  draw();
  if (selected) await showGroup(view, detail, run, step, groups.find((group) => group.uid === selected));
  return null;
}

function rowsOf(columns) {
  const rows = columns.uid.map((_, index) => Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[index]])));
  const mean = rows.reduce((sum, row) => sum + (row.score_mean ?? 0), 0) / Math.max(1, rows.length);
  return rows.map((row) => ({ ...row, isAbove: row.score_mean >= mean }));
}

/** Rewards with the lightest and the darkest colour, of all groups of the step. */
function rewardRange(groups) {
  return groups.flatMap((group) => group.scores).reduce(([low, high], score) => (score === null ? [low, high] : [Math.min(low, score), Math.max(high, score)]), [0, 1]);
}

function groupTable(groups, selected, open, range) {
  const columns = [
    { name: "prompt", label: "prompt", value: (group) => group.prompt ?? group.uid, show: (group) => h("span", { class: "clip" }, visible(group.prompt ?? group.uid)) },
    { name: "score_mean", label: "reward", value: (group) => group.score_mean, show: (group) => short(group.score_mean), numeric: true },
    { name: "score_std", label: "std of rewards", value: (group) => group.score_std, show: (group) => short(group.score_std), numeric: true },
    { name: "scores", label: "rewards", value: (group) => group.scores.length, show: (group) => scoreCells(group.scores, range), title: "reward of each response" },
    { name: "length_mean", label: "tokens (mean)", value: (group) => group.length_mean, show: (group) => short(group.length_mean), numeric: true },
    { name: "staleness", label: "staleness", value: (group) => group.staleness, show: (group) => short(group.staleness), numeric: true },
    { name: "truncated", label: "truncated", title: "number of truncated responses", value: (group) => group.finish_reasons.filter((reason) => reason === "length").length, numeric: true },
    { name: "data_source", label: "source", value: (group) => group.data_source },
  ];
  return table(columns, groups, { onOpen: (group) => open(group.uid), selected: (group) => group.uid === selected });
}

function scoreCells(scores, [low, high]) {
  return h("span", { class: "cells", title: scores.map(short).join(", ") }, scores.map((score) => h("i", { class: score === null ? "unknown" : `q${Math.round((7 * (score - low)) / (high - low))}` })));
}

async function showGroup(view, detail, run, step, group) {
  if (!group) return detail.replaceChildren(h("p", { class: "note" }, "This group is not in the step."));
  let result;
  try {
    result = await get("group", { run, step, uid: group.uid });
  } catch (error) {
    return detail.replaceChildren(h("h2", {}, "Responses"), h("p", { class: "note" }, visible(error.message)), h("p", {}, `Rewards: ${group.scores.map(short).join(", ")}`));
  }
  const cards = result.responses.map((response) => {
    const href = view.link("answer", { run, step, uid: group.uid, sample: response.sample_index });
    return h("article", { class: "card" },
      h("h3", {}, h("a", { href }, `response ${response.sample_index}`), h("span", { class: "score" }, short(response.score))),
      h("p", { class: "muted" }, `${plural(response.length, "token")}, ${response.trained} trained · ended by ${response.finish_reason}`,
        response.status !== "finished" ? h("b", {}, ` · ${visible(response.status)}`) : null, response.parts > 1 ? ` · ${response.parts} rows` : null),
      response.turns.map((turn) => (turn.source === "model" ? h("pre", { class: "model" }, turn.text === null ? "(text not recorded)" : visible(turn.text) || "(no text: only special or unknown tokens)")
        : h("details", {}, h("summary", {}, visible(`${turn.name ?? "environment"} (${plural(turn.tokens, "token")})`)), h("pre", { class: "environment" }, visible(turn.text))))));
  });
  detail.replaceChildren(h("h2", {}, `Responses of the group (${cards.length})`), h("details", { open: true }, h("summary", {}, "prompt"), h("pre", {}, visible(result.prompt ?? "(text not recorded)"))),
    h("p", { class: "muted" }, "Open a response to see its tokens."), h("div", { class: "cards" }, cards));
  return null;
}

/** Form to search in the texts of a step or of the whole run; results are added to `hits`. */
export function searchBar(view, run, step, hits) {
  if (isExport) return h("p", { class: "note" }, "Search is available in verl view, not in an exported file.");
  let stop = () => {};
  const stopButton = h("button", { type: "button", hidden: true, onclick: () => end() }, "stop");
  const end = () => {
    stop();
    stopButton.hidden = true;
  };
  const input = h("input", { type: "search", placeholder: "search in responses", "aria-label": "Search in responses", maxlength: 200 });
  const scope = h("select", { "aria-label": "Where to search" }, h("option", { value: "step" }, "in this step"), h("option", { value: "run" }, "in the whole run"));
  const begin = (event) => {
    event.preventDefault();
    end();
    hits.replaceChildren();
    if (!input.value) return;
    const [state, list] = [h("p", { class: "muted" }, "searching…"), h("ul", { class: "hits" })];
    hits.append(state, list);
    let [count, responses, searched] = [0, 0, 0];
    const parameters = { run, text: input.value, ...(scope.value === "step" ? { step } : {}) };
    const report = (rest) => state.replaceChildren(`${plural(count, "hit")} in ${plural(responses, "response")} of ${plural(searched, "step")}${rest}`);
    stopButton.hidden = false;
    stop = search(parameters, (result) => {
      searched += 1;
      responses += result.responses;
      count += result.hits.length;
      for (const hit of result.hits) {
        if (list.childElementCount < 200) list.append(h("li", {}, h("a", { href: view.link("answer", { run, step: result.step, uid: hit.uid, sample: hit.sample }) }, `step ${result.step}, response ${hit.sample}`), " ", h("span", { class: "clip" }, marked(hit.text, parameters.text))));
      }
      report(" …");
    }, (problem) => {
      stopButton.hidden = true;
      report(`. ${problem ?? ""}`);
    });
  };
  view.onLeave(() => end());
  view.onKey("/", () => input.focus());
  return h("form", { class: "bar", onsubmit: begin }, input, scope, h("button", {}, "search"), stopButton);
}

function marked(text, wanted) {
  const place = text.toLowerCase().indexOf(wanted.toLowerCase());
  if (place < 0) return visible(text);
  return [visible(text.slice(0, place)), h("mark", {}, visible(text.slice(place, place + wanted.length))), visible(text.slice(place + wanted.length))];
}
