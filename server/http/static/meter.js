// Numbers of a response, live and after its end, and the use of the context.

import { post } from "./api.js";
import { $, count, duration, el, plural } from "./dom.js";

const ENDS = { length: "the token limit ended it", stopped: "stopped", timeout: "the time limit ended it", lost: "the connection was lost", edited: "edited by hand" };
const COUNT_AFTER_MS = 300;

/** Numbers of a response while it is written. All times are from `performance.now()`. */
export class LiveNumbers {
  constructor() {
    Object.assign(this, { sent: performance.now(), first: 0, last: 0, prompt: 0, cached: null, completion: 0, progress: null });
  }

  /** Take the numbers of an event of the stream. `hasText`: the event had content. */
  take(event, hasText) {
    const { usage, prompt_progress: progress } = event;
    if (progress) {
      this.progress = progress;
      this.prompt = progress.total;
      this.cached = progress.cache;
    }
    if (usage) {
      this.prompt = usage.prompt_tokens;
      this.completion = usage.completion_tokens;
      this.cached = usage.prompt_tokens_details?.cached_tokens ?? this.cached;
    }
    if (hasText) {
      this.last = performance.now();
      this.first ||= this.last;
    }
  }

  /** Return the numbers to store with the response, or null if they are not known. */
  took() {
    const { prompt, cached, completion, first, last, sent } = this;
    if (!prompt) return null;
    const speed = completion > 1 && last - first > 5 ? (1000 * (completion - 1)) / (last - first) : null;
    return { prompt, cached: cached ?? 0, completion, first: (first || performance.now()) - sent, speed };
  }
}

/** Return the line under a response. */
export function numbersOf(node) {
  const parts = [];
  const add = (text, title) => parts.push(el("span", { title }, text));
  const took = node.busy ? node.live?.took() : node.took;
  if (node.busy && node.live && !node.live.first) return waitingFor(node.live);
  if (took) {
    const { completion, speed, first, prompt, cached } = took;
    add(plural(completion, "token"), "tokens of this answer");
    if (speed) add(`${speed.toFixed(speed < 100 ? 1 : 0)} tokens/s`, "after the first token, as this page received them");
    add(`first after ${duration(first)}`, "from sending the question to the first token here");
    if (!node.busy) add(`${count(cached)} of ${plural(prompt, "prompt token")} cached`, "tokens of the prompt that were in the KV cache already");
  }
  if (ENDS[node.finish]) add(ENDS[node.finish]);
  return parts;
}

/** Return the progress until the first token: position in the queue, then the computed part of the prompt. */
function waitingFor({ progress }) {
  if (!progress) return [];
  const { queue_position: place, processed, total, cache } = progress;
  if (place !== null && place !== undefined) return [el("span", {}, place ? `waits behind ${plural(place, "request")}` : "is next in the queue")];
  const bar = el("progress", { max: total, value: processed, "aria-label": "Prompt" });
  return [el("span", {}, bar, ` prompt: ${count(processed)} of ${plural(total, "token")}`), cache ? el("span", {}, `${count(cache)} of them in the cache`) : null].filter(Boolean);
}

/** Use of the context: the tokens of the last turn, and the tokens that the current draft would add. */
export class ContextMeter {
  constructor() {
    Object.assign(this, { place: $("context"), limit: null, used: null, draft: 0, number: 0 });
  }

  /** Show the numbers of the last response; null: there is none. */
  show(took) {
    this.used = took;
    this.draw();
  }

  /** Count the tokens of a message that is not sent yet. */
  weigh(text) {
    clearTimeout(this.timer);
    const number = ++this.number;
    if (!text) {
      this.draft = 0;
      return this.draw();
    }
    this.timer = setTimeout(async () => {
      const found = await countTokens(text);
      if (number !== this.number) return;
      this.draft = found ?? 0;
      this.draw();
    }, COUNT_AFTER_MS);
  }

  draw() {
    const { place, limit, used, draft } = this;
    const before = used ? used.prompt + used.completion : 0;
    const all = before + draft;
    place.hidden = !limit || !all;
    if (place.hidden) return;
    const isOver = all > limit;
    const parts = [`${count(all)} of ${plural(limit, "token")}`, used?.cached && `${count(used.cached)} cached`, draft && `${count(draft)} not sent`, isOver && "more than the context holds"];
    const bar = el("span", { class: "context-bar", "aria-hidden": "true" }, ...[["cached", used?.cached ?? 0], ["used", before - (used?.cached ?? 0)], ["draft", draft]].map(([name, size]) => {
      const part = el("span", { class: name });
      part.style.width = `${Math.min(100, (100 * size) / limit)}%`;
      return part;
    }));
    place.classList.toggle("over", isOver);
    place.replaceChildren(bar, el("span", {}, parts.filter(Boolean).join(" · ")));
    place.title = "Context: the prompt and the answer of the last turn, of which so much was in the KV cache, and what you are writing";
  }
}

/** Return the number of tokens in a text, counted by the server, or null if it does not respond. */
export async function countTokens(text) {
  try {
    return (await post("tokenize", { prompt: text, add_special_tokens: false })).count;
  } catch {
    return null; // the number is optional: sending the message reports the error
  }
}
