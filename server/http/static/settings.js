// The panel of settings: system prompt and sampling parameters, within the ranges that the server itself states.

import { el, keep, recall } from "./dom.js";

const NAME = "oarlock-settings";
const NUMBERS = [
  ["temperature", "Temperature", "0 always takes the most likely word"],
  ["top_p", "Top p", "keep the likeliest words that hold this much probability"],
  ["top_k", "Top k", "keep so many words"],
  ["min_p", "Min p", "keep words at least so likely, beside the likeliest"],
  ["top_n_sigma", "Top n sigma", "keep words whose logit lies within so many standard deviations of the largest"],
  ["max_completion_tokens", "Longest answer", "tokens, thoughts included"],
  ["seed", "Seed", "the same seed, the same answer"],
  ["presence_penalty", "Presence penalty", ""],
  ["frequency_penalty", "Frequency penalty", ""],
  ["repetition_penalty", "Repetition penalty", ""],
];

export class Settings {
  constructor(panel) {
    this.panel = panel;
    this.values = { alternatives: true, ...recall(NAME) };
    this.known = {};
    this.models = [];
    this.judges = []; // of what is typed: each looks at its field again
    this.draw();
  }

  /** Show the ranges and defaults of this server. `known`: parameters by name, as /v1/capabilities describes them.
   * They may come after somebody began to type: the fields stay, and what stands in them is judged again. */
  describe(models, known) {
    this.models = models;
    this.known = known;
    this.offerModels();
    for (const judge of this.judges) judge();
  }

  offerModels() {
    this.select.replaceChildren(...this.models.map((name) => el("option", { value: name }, name)));
    this.select.value = this.models.includes(this.values.model) ? this.values.model : this.models[0];
    for (const part of [this.select, this.select.previousSibling]) part.hidden = this.models.length < 2;
  }

  set(name, value) {
    if (value === "" || value === null) delete this.values[name];
    else this.values[name] = value;
    keep(NAME, this.values);
  }

  draw() {
    const values = this.values;
    const system = el("textarea", { id: "set-system", rows: "4", placeholder: "You are …", oninput: (event) => this.set("system", event.target.value) });
    system.value = values.system ?? "";
    const rows = [el("label", { for: "set-system" }, "System prompt"), system];
    this.select = el("select", { id: "set-model", onchange: (event) => this.set("model", event.target.value) });
    this.judges = [];
    rows.push(el("label", { for: "set-model" }, "Model"), this.select);
    rows.push(el("div", { class: "grid" }, ...NUMBERS.map((entry) => this.number(...entry))));
    rows.push(...this.area("stop", "Stop strings", "one on each line", 2));
    rows.push(...this.area("tools", "Tools", 'JSON: [{"type": "function", "function": {…}}]', 3, true));
    rows.push(...this.area("more", "More parameters", 'JSON: {"reasoning_effort": "low"}', 2, true));
    const box = el("input", { type: "checkbox", id: "set-alternatives", onchange: (event) => this.set("alternatives", event.target.checked) });
    box.checked = values.alternatives;
    rows.push(el("label", { class: "check" }, box, el("span", {}, "Ask for the alternatives of every word")));
    rows.push(el("button", { class: "quiet", onclick: () => this.reset() }, "Back to the server's defaults"));
    this.panel.replaceChildren(el("h2", {}, "Settings"), ...rows);
    this.offerModels();
  }

  reset() {
    this.values = { alternatives: true };
    keep(NAME, this.values);
    this.draw();
  }

  number(name, label, hint) {
    const judge = () => {
      const known = this.known[name] ?? {};
      const range = ["minimum", "maximum"].every((bound) => Math.abs(known[bound] ?? Infinity) < 1e6) ? `${known.minimum} to ${known.maximum}` : "";
      input.placeholder = String(known.default ?? "");
      input.title = [hint, range].filter(Boolean).join("; ");
      const text = input.value.trim();
      const value = Number(text.replace(",", "."));
      const isWrong = text !== "" && !(Number.isFinite(value) && value >= (known.minimum ?? -Infinity) && value <= (known.maximum ?? Infinity));
      input.setAttribute("aria-invalid", isWrong);
      this.set(name, isWrong || text === "" ? "" : value);
    };
    const input = el("input", { type: "text", inputmode: "decimal", id: `set-${name}`, autocomplete: "off", oninput: judge });
    input.value = this.values[name] ?? "";
    judge();
    this.judges.push(judge);
    return el("div", {}, el("label", { for: `set-${name}` }, label), input);
  }

  area(name, label, placeholder, rows, isJson = false) {
    const id = `set-${name}`;
    const area = el("textarea", {
      id, rows, placeholder, spellcheck: "false", class: isJson ? "mono" : "",
      oninput: () => {
        const isWrong = isJson && area.value.trim() !== "" && parsed(area.value) === undefined;
        area.setAttribute("aria-invalid", isWrong);
        if (!isWrong) this.set(name, area.value.trim() === "" ? "" : area.value);
      },
    });
    area.value = this.values[name] ?? "";
    return [el("label", { for: id }, label), area];
  }

  /** The fields of a request. What is left empty is the server's to choose. */
  fields() {
    const found = {};
    for (const [name] of NUMBERS) if (name in this.values) found[name] = this.values[name];
    if (this.models.includes(this.values.model)) found.model = this.values.model;
    const stops = (this.values.stop ?? "").split("\n").filter(Boolean);
    if (stops.length) found.stop = stops;
    const tools = parsed(this.values.tools);
    if (tools) found.tools = tools;
    if (this.values.alternatives) Object.assign(found, { logprobs: true, top_logprobs: 5 });
    return { ...found, ...parsed(this.values.more) };
  }

  get system() {
    return this.values.system ?? "";
  }
}

function parsed(text) {
  if (!text) return null;
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}
