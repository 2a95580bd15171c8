// Queries: to the server, or to the data inside an exported file.

const exported = document.getElementById("exported");
const entries = exported ? JSON.parse(exported.textContent) : null;

export const isExport = entries !== null;

/** What an exported file leaves out; "" for a server. */
export const omissions = entries?.omissions ?? "";

/** Result of a query. Keys of an export are its parameters in alphabetical order. */
export async function get(query, parameters = {}) {
  const text = new URLSearchParams(Object.entries(parameters).sort()).toString();
  if (isExport) return readEntry(query, parameters);
  const response = await fetch(`/api/${query}${text ? `?${text}` : ""}`);
  const content = await response.json();
  if (!response.ok) throw new Error(content.detail ?? `the server returned ${response.status}`);
  return content;
}

async function readEntry(query, { names, ...parameters }) {
  const key = `${query}?${new URLSearchParams(Object.entries(parameters).sort())}`;
  const packed = entries.data[key];
  if (packed === undefined) throw new Error("This part of the run is not in the exported file.");
  const bytes = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

/** Columns of metrics; `names` may contain metrics that the run does not have. */
export function metrics(run, names) {
  return get("metrics", { run, names: JSON.stringify(names) });
}

/** Search; calls `onResult` for every step. Returns a function that stops it. */
export function search(parameters, onResult, onEnd) {
  const controller = new AbortController();
  (async () => {
    const response = await fetch(`/api/search?${new URLSearchParams(parameters)}`, { signal: controller.signal });
    if (!response.ok) throw new Error((await response.json()).detail);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const result = JSON.parse(line);
        if (result.done) onEnd(result.is_complete ? null : "Only the first hits are shown.");
        else onResult(result);
      }
    }
  })().catch((error) => {
    if (error.name !== "AbortError") onEnd(error.message);
  });
  return () => controller.abort();
}

/**
 * Call `onChange()` when something is recorded, `onState(isConnected)` when the connection opens or is lost.
 * Browsers allow six connections to a server: only visible pages keep one open.
 */
export function follow(onChange, onState) {
  if (isExport) return;
  let source = null;
  let wasOpen = false;
  const close = () => {
    source?.close();
    source = null;
  };
  const open = () => {
    if (source || document.hidden) return;
    source = new EventSource("/api/follow");
    source.onmessage = onChange;
    source.onerror = () => onState(false);
    source.onopen = () => {
      onState(true);
      if (wasOpen) onChange();
      wasOpen = true;
    };
  };
  addEventListener("pagehide", close);
  addEventListener("pageshow", open);
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  open();
}
