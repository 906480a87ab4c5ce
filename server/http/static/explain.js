// Explanation of one request from the server's record: its times as a sentence, as a bar, and event by event.

import { ApiError, get } from "./api.js";
import { count, duration, el, plural } from "./dom.js";

const PARTS = [["before_engine", "before the engine"], ["queued", "in the queue"], ["prefill", "prompt"], ["decode", "answer"]];
const EVERY_MS = 1000; // while the dialog is open

/** Show the request of this id in a dialog, and refresh it until the request has ended. */
export function explain(id) {
  const body = el("div", { "aria-live": "polite" });
  const dialog = el("dialog", { class: "wide", "aria-label": `Request ${id}` }, el("h2", { class: "mono" }, id), body,
    el("div", { class: "row" }, el("button", { class: "primary", onclick: () => dialog.close() }, "Close")));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  const load = async () => {
    try {
      const found = await get(`v1/requests/${encodeURIComponent(id)}`);
      body.replaceChildren(...shown(found));
      if (found.state !== "ended" && dialog.isConnected) setTimeout(load, EVERY_MS);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      const why = [401, 403].includes(error.status) ? " Requests are explained to the holder of the admin key alone: oarlock explain." : "";
      body.replaceChildren(el("p", { class: "problem" }, error.message + why));
    }
  };
  load();
}

function shown(found) {
  const { seconds, timeline } = found;
  const whole = Math.max(seconds.total, 1e-9);
  const bar = el("div", { class: "time-bar", "aria-hidden": "true" });
  const legend = el("p", { class: "legend" });
  for (const [name, label] of PARTS) {
    if (!(name in seconds)) continue;
    const part = el("span", { class: `part-${name}` });
    part.style.width = `${(100 * seconds[name]) / whole}%`;
    bar.append(part);
    legend.append(el("span", {}, el("i", { class: `key part-${name}` }), `${label} ${duration(1000 * seconds[name])}`));
  }
  const facts = [found.state, found.adapter && `adapter ${found.adapter}`, found.status && `status ${found.status}`, `${count(found.cached_tokens)} of ${plural(found.prompt_tokens, "prompt token")} cached`, plural(found.completion_tokens, "token"), `${duration(1000 * seconds.total)} in all`];
  const rows = timeline.map(({ at_s: at, event, ...details }) => el("tr", {},
    el("td", {}, duration(1000 * at)), el("td", {}, event),
    el("td", { class: "soft" }, Object.entries(details).map(([name, value]) => `${name.replaceAll("_", " ")} ${Array.isArray(value) ? value.join(", ") : value}`).join(" · "))));
  return [
    el("p", {}, el("strong", {}, found.diagnosis), found.flag ? el("span", {}, " See ", el("code", {}, found.flag), ".") : null),
    el("p", { class: "soft" }, facts.filter(Boolean).join(" · ")), bar, legend,
    el("div", { class: "table" }, el("table", { "aria-label": "Timeline" }, el("tbody", {}, ...rows))),
  ];
}
