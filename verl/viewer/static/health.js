// Health: findings with figure and remedy, and the events of the run.

import { get } from "./api.js";
import { clock, h, select, short, table, visible } from "./dom.js";

/** The JSON of an event as `name value, …`; nested names are joined by dots. */
export function readable(json) {
  if (!json) return "";
  let data;
  try {
    data = JSON.parse(json);
  } catch {
    return json;
  }
  const flat = (value, name) => (value !== null && typeof value === "object" && !Array.isArray(value)
    ? Object.entries(value).flatMap(([key, item]) => flat(item, name ? `${name}.${key}` : key))
    : [`${name} ${Array.isArray(value) ? value.join(" ") : short(value)}`]);
  return flat(data, "").join(", ");
}

/** Cards of findings; `run` in each is the number of its run. */
export function findingCards(findings, runs, isShort = false) {
  return findings.map((finding) => {
    const period = finding.first_step === finding.last_step ? `step ${finding.last_step}` : `steps ${finding.first_step} to ${finding.last_step}`;
    const settings = finding.settings.map(([key, value]) => h("code", {}, visible(`${key}=${value}`)));
    const chart = finding.metric && !isShort ? h("a", { href: `#overview?more=${encodeURIComponent(JSON.stringify([finding.metric]))}` }, `chart of ${visible(finding.metric)}`) : null;
    return h("article", { class: `finding ${finding.level}${finding.is_current ? "" : " past"}` },
      h("h3", {}, h("span", { class: "level" }, finding.level === "alert" ? "▲ alert" : "● warning"), ` ${finding.title}`),
      h("p", {}, runs.length > 1 ? h("b", {}, `${visible(runs[finding.run].name)}: `) : null, visible(finding.figure),
        h("span", { class: "muted" }, ` ${period}${finding.is_current ? "" : ", not in the newest steps"}`)),
      h("p", {}, visible(finding.remedy), " ", ...settings.flatMap((code) => [code, " "]), chart));
  });
}

/** A text that is not squeezed to a few characters per line on narrow screens: the table scrolls. */
function longText(text) {
  return text && h("span", { class: "text" }, text);
}

export async function renderHealth(view) {
  const { runs, params } = view;
  const run = Number(params.run ?? 0);
  const list = h("div", { class: "findings" });
  const events = h("div");
  const kinds = new Set();
  const show = async () => {
    const [findings, all] = await Promise.all([get("health", { run }), get("events", { run })]);
    list.replaceChildren(...(findings.length
      ? findingCards(findings.map((finding) => ({ ...finding, run })), runs)
      : [h("p", { class: "good" }, "No finding.")]));
    all.forEach((event) => kinds.add(event.kind));
    const columns = [
      { name: "time", label: "time", value: (event) => event.time, show: (event) => h("span", { class: "one-line" }, clock(event.time)) },
      { name: "step", label: "step", value: (event) => event.step, numeric: true },
      { name: "kind", label: "kind", value: (event) => event.kind, show: (event) => h("span", { class: "one-line" }, visible(event.kind)) },
      { name: "message", label: "message", value: (event) => event.message, show: (event) => longText(visible(event.message)) },
      { name: "data", label: "data", value: (event) => event.data ?? "", show: (event) => longText(visible(readable(event.data))) },
    ];
    events.replaceChildren(table(columns, all, { sort: { column: "time", descending: true } }));
  };
  await show();
  view.container.append(
    runs.length > 1 ? h("section", { class: "bar" }, select("run", runs.map((entry, number) => [number, entry.name]), run, (value) => view.go("health", { run: value }))) : "",
    h("h2", {}, "Findings"), list, h("h2", {}, "Events"), events);
  return show;
}
