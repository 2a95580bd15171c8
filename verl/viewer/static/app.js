// The application: pages by the fragment of the address, keyboard, live updates.

import { follow, get, isExport, omissions } from "./api.js";
import { renderAnswer } from "./answer.js";
import { h, hideTooltip, visible } from "./dom.js";
import { renderGroups } from "./groups.js";
import { renderHealth } from "./health.js";
import { renderOverview } from "./overview.js";
import { renderPairs, renderRow, renderRows } from "./rows.js";
import { renderTimeline } from "./timeline.js";
import { renderValidation } from "./validation.js";

const PAGES = {
  overview: ["Overview", renderOverview],
  timeline: ["Timeline", renderTimeline],
  groups: ["Groups", (view) => (has(view, "rows") ? renderRows : has(view, "pairs") ? renderPairs : renderGroups)(view)],
  answer: ["Answer", (view) => (has(view, "rows") ? renderRow : renderAnswer)(view)],
  validation: ["Validation", renderValidation],
  health: ["Health", renderHealth],
};
const UPDATE_MS = 700;

let runs = [];
let keys = new Map();
let leave = [];
let update = null;
let rendered = 0;
let timer = null;
let isConnected = true;

/** Whether the chosen run has recorded steps of this kind. */
function has(view, kind) {
  return view.runs[Number(view.params.run ?? 0)]?.steps[kind].length > 0;
}

function address(page, params) {
  const known = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const text = new URLSearchParams(known).toString();
  return `#${page}${text ? `?${text}` : ""}`;
}

function current() {
  const [page, text] = location.hash.slice(1).split("?", 2);
  return { page: page in PAGES ? page : "overview", params: Object.fromEntries(new URLSearchParams(text ?? "")) };
}

function go(page, params, isReplaced = false) {
  if (isReplaced) {
    history.replaceState(null, "", address(page, params));
    render();
  } else location.hash = address(page, params);
}

async function render() {
  const { page, params } = current();
  const number = (rendered += 1);
  leave.forEach((action) => action());
  [keys, leave, update] = [new Map(), [], null];
  hideTooltip();
  showNavigation(page, params);
  const container = h("div", { class: `page ${page}` });
  const view = {
    runs, params, container, go, link: address,
    set(values) {
      Object.assign(params, values);
      history.replaceState(null, "", address(page, params));
    },
    onKey: (key, action) => keys.set(key, action),
    onLeave: (action) => leave.push(action),
  };
  const main = document.getElementById("page");
  main.setAttribute("aria-busy", "true");
  let refresh = null;
  try {
    refresh = await PAGES[page][1](view);
  } catch (error) {
    container.replaceChildren(h("p", { class: "note", role: "alert" }, visible(error.message)));
  }
  if (number !== rendered) return;
  update = refresh;
  main.replaceChildren(container);
  main.setAttribute("aria-busy", "false");
  document.title = `${PAGES[page][0]} – ${runs.map((run) => run.name).join(", ")} – verl view`;
}

function showNavigation(page, params) {
  const links = Object.entries(PAGES).map(([name, [title]], index) => {
    const kept = params.run !== undefined && name !== "overview" ? { run: params.run, ...(["groups", "timeline"].includes(name) ? { step: params.step } : {}) } : {};
    return h("a", { href: address(name, kept), "aria-current": name === page ? "page" : null, title: `key ${index + 1}` }, title);
  });
  document.getElementById("nav").replaceChildren(h("b", {}, "verl"), ...links);
  const isLive = runs.some((run) => run.status === "running");
  const state = isExport ? "exported file" : !isConnected ? "connection lost" : isLive ? "live" : "";
  document.getElementById("run-status").replaceChildren(
    h("span", { class: isLive ? "status running" : "muted" }, state), " ",
    runs.length === 1 ? visible(runs[0].name) : `${runs.length} runs`, runs.length === 1 ? `, step ${runs[0].last_step ?? "–"}` : "");
}

async function reload() {
  timer = null;
  try {
    runs.splice(0, runs.length, ...(await get("runs")));
    const { page, params } = current();
    showNavigation(page, params);
    // Pages of a chosen step do not change; those without one follow the newest step.
    if (update) await update();
    else if (params.step === undefined && params.uid === undefined) await render();
  } catch {
    // The server has stopped: the page shows what it has until the connection is back.
    isConnected = false;
    const { page, params } = current();
    showNavigation(page, params);
  }
}

addEventListener("hashchange", render);
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const page = Object.keys(PAGES)[Number(event.key) - 1];
  const action = page ? () => go(page, {}) : event.key === "j" || event.key === "k" ? () => moveRow(event.key === "j" ? 1 : -1) : keys.get(event.key);
  if (!action) return;
  event.preventDefault();
  action();
});

/** Move the focus to the next or previous row of the tables. */
function moveRow(offset) {
  const rows = [...document.querySelectorAll("tr.link")];
  const place = rows.indexOf(document.activeElement);
  rows[Math.max(0, Math.min(rows.length - 1, place + offset))]?.focus();
}

async function start() {
  if (omissions) {
    const note = document.getElementById("omitted");
    note.textContent = omissions;
    note.hidden = false;
  }
  try {
    runs = await get("runs");
  } catch (error) {
    document.getElementById("page").replaceChildren(h("p", { class: "note", role: "alert" }, visible(error.message)));
    return;
  }
  await render();
  follow(() => {
    timer ??= setTimeout(reload, UPDATE_MS);
  }, (state) => {
    if (state === isConnected) return;
    isConnected = state;
    const { page, params } = current();
    showNavigation(page, params);
  });
}

start();
