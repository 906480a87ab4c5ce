// Availability of the server: polls /health, more often while it is down, and reports its status at the top of the
// page.

import { health } from "./api.js";
import { $, el, seconds } from "./dom.js";

const CALM_MS = 10_000;
const EAGER_MS = 1_000;
const WORDS = { ready: "ready", starting: "starting", loading: "loading", draining: "ending", dead: "dead", gone: "no answer" };

export class Connection {
  /** `whenReady` is called each time the server becomes ready. */
  constructor(whenReady) {
    this.whenReady = whenReady;
    this.phase = null;
    this.timer = null;
    document.addEventListener("visibilitychange", () => document.hidden || this.check());
    this.check();
  }

  async check() {
    clearTimeout(this.timer);
    const number = (this.number = (this.number ?? 0) + 1);
    const found = await health();
    if (number !== this.number) return; // another check has begun meanwhile
    const phase = found === null ? "gone" : found.status === "unavailable" && found.state === "ready" ? "dead" : (found.state ?? "gone");
    this.show(phase, found);
    const isReady = phase === "ready";
    if (isReady && this.phase !== "ready") this.whenReady();
    this.phase = phase;
    if (!document.hidden) this.timer = setTimeout(() => this.check(), isReady ? CALM_MS : EAGER_MS);
  }

  show(phase, found) {
    const status = $("status");
    status.dataset.phase = phase;
    const word = status.querySelector(".word");
    const text = found?.status === "degraded" ? "degraded" : (WORDS[phase] ?? phase);
    if (word.textContent !== text) word.textContent = text;
    const banner = $("banner");
    banner.hidden = phase === "ready";
    if (phase === "gone") say(banner, "The server does not respond. This page retries every second; nothing you wrote is lost.");
    else if (phase === "starting" || phase === "loading") {
      const share = found.progress ?? 0;
      const details = [`${Math.round(100 * share)} %`, found.detail].filter(Boolean).join(", ");
      say(banner, `The server is getting ready: ${found.step || "starting"}, ${details}.`, { share, elapsed: found.elapsed_s });
    } else if (phase === "draining") say(banner, "The server is shutting down: it finishes open answers and accepts no new questions.");
    else if (phase === "dead") say(banner, found.reason ?? "The engine has stopped.");
  }
}

/** Show a text at the top. `loading`: progress and seconds of a start; screen readers do not read the seconds. */
function say(banner, text, loading = null) {
  if (banner.firstChild?.textContent !== text) banner.replaceChildren(el("span", {}, text), ...(loading ? [el("progress", { max: 1, "aria-label": "Loading" }), el("span", { class: "soft", "aria-hidden": "true" })] : []));
  if (!loading) return;
  const [, bar, time] = banner.children;
  bar.value = loading.share;
  time.textContent = loading.elapsed === undefined ? "" : `for ${loading.elapsed < 120 ? `${Math.round(loading.elapsed)} s` : seconds(loading.elapsed)}`;
}
