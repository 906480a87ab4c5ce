// The settings panel: system prompt and sampling parameters, within the ranges reported by the server.

import { $, el, keep, notice, recall } from "./dom.js";
import { FIELDS, read, requestFields } from "./settings_fields.js";
import { placeOfPresets, PRESETS } from "./store.js";

const NAME = "oarlock-settings";

export class Settings {
  /** `close` hides the panel; `showCode` shows the request as a program. */
  constructor(panel, { close, showCode }) {
    Object.assign(this, { panel, close, showCode, known: {}, models: [], texts: recall(NAME) ?? {} });
    this.draw();
  }

  /**
   * Show the ranges and defaults of this server. `known`: name -> parameter, as in /v1/capabilities. They may arrive
   * after the user began to type: the fields stay, and their content is checked again.
   */
  describe(models, known) {
    this.models = models;
    this.known = known;
    this.judge();
  }

  /** Offer these names as models. */
  offer(models) {
    this.models = models;
    this.judge();
  }

  set(name, text) {
    if (text === "" || text === undefined) delete this.texts[name];
    else this.texts[name] = text;
    keep(NAME, this.texts);
    this.judge();
  }

  draw() {
    this.inputs = new Map(FIELDS.map((field) => [field.name, this.input(field)]));
    const rows = FIELDS.map((field) => this.row(field));
    const isNumber = (row, index) => FIELDS[index].isNumber;
    this.select = el("select", { id: "set-model", onchange: (event) => this.set("model", event.target.value) });
    this.box = el("input", { type: "checkbox", onchange: (event) => this.set("alternatives", event.target.checked ? "" : false) });
    this.panel.replaceChildren(
      el("div", { class: "panel-head" }, el("h2", {}, "Settings"), el("button", { class: "icon", "aria-label": "Close", onclick: () => this.close() }, "×")),
      this.presets(),
      rows[0],
      el("label", { for: "set-model" }, "Model"), this.select,
      el("div", { class: "grid" }, ...rows.filter(isNumber)),
      ...rows.slice(1).filter((row, index) => !FIELDS[index + 1].isNumber),
      el("label", { class: "check" }, this.box, el("span", {}, "Request alternatives for every word")),
      el("div", { class: "row" },
        el("button", { class: "quiet", onclick: () => this.load({}) }, "Reset to the server's defaults"),
        el("button", { class: "quiet", onclick: () => this.showCode() }, "As code")),
    );
    this.judge();
  }

  input(field) {
    const shared = { id: `set-${field.name}`, "aria-describedby": `why-${field.name}`, oninput: (event) => this.set(field.name, event.target.value) };
    const isCode = !["system", "stop"].includes(field.name);
    const input = field.rows
      ? el("textarea", { ...shared, rows: field.rows, placeholder: field.hint, spellcheck: isCode ? "false" : null, class: isCode ? "mono" : "" })
      : el("input", { ...shared, type: "text", inputmode: "decimal", autocomplete: "off" });
    input.value = this.texts[field.name] ?? "";
    return input;
  }

  row(field) {
    return el("div", {}, el("label", { for: `set-${field.name}` }, field.label), this.inputs.get(field.name), el("small", { id: `why-${field.name}`, class: "why", role: "status" }));
  }

  /** Check all fields: show the reason if a value is wrong, and mark values that differ from the server's defaults. */
  judge() {
    for (const field of FIELDS) {
      const input = this.inputs.get(field.name);
      const known = this.known[field.name] ?? {};
      const found = read(field, this.texts[field.name], this.known);
      const why = input.parentElement.lastChild;
      input.setAttribute("aria-invalid", Boolean(found?.why));
      if (why.textContent !== (found?.why ?? "")) why.textContent = found?.why ?? "";
      input.parentElement.classList.toggle("changed", found !== null);
      if (!field.isNumber) continue;
      const hasRange = ["minimum", "maximum"].every((bound) => Math.abs(known[bound] ?? Infinity) < 1e6);
      input.placeholder = String(known.default ?? "");
      input.title = [field.hint, hasRange && `${known.minimum} to ${known.maximum}`].filter(Boolean).join("; ");
    }
    if ([...this.select.options].map(({ value }) => value).join("\n") !== this.models.join("\n")) this.select.replaceChildren(...this.models.map((name) => el("option", { value: name }, name)));
    this.select.value = this.model;
    for (const part of [this.select, this.select.previousSibling]) part.hidden = this.models.length < 2;
    this.box.checked = this.texts.alternatives !== false;
    const changed = this.changed;
    const label = changed ? `Settings, ${changed} changed` : "Settings";
    $("settings-button").dataset.changed = changed || "";
    $("settings-button").setAttribute("aria-label", label);
    $("settings-button").title = label;
  }

  /** Return the number of values that differ from the server's defaults. */
  get changed() {
    return Object.keys(this.texts).filter((name) => name !== "model" || this.texts.model !== this.models[0]).length;
  }

  /** Load the texts of a preset. */
  load(texts) {
    this.texts = { ...texts };
    keep(NAME, this.texts);
    for (const field of FIELDS) this.inputs.get(field.name).value = this.texts[field.name] ?? "";
    this.judge();
  }

  // ------------------------------------------------------------------ presets
  presets() {
    const select = el("select", { id: "set-preset", "aria-label": "Preset" });
    const name = el("input", { type: "text", "aria-label": "Name of the preset", placeholder: "Save these as …", autocomplete: "off", maxlength: "60" });
    const saved = () => recall(PRESETS, placeOfPresets()) ?? {};
    const fill = (chosen = "") => {
      select.replaceChildren(el("option", { value: "" }, "Presets …"), ...Object.keys(saved()).sort().map((each) => el("option", { value: each }, each)));
      select.value = chosen;
      remove.disabled = !chosen;
    };
    const write = (all, chosen) => {
      keep(PRESETS, all, placeOfPresets());
      fill(chosen);
    };
    const remove = el("button", { class: "quiet", onclick: () => {
      const all = saved();
      const [gone, texts] = [select.value, all[select.value]];
      delete all[gone];
      write(all, "");
      notice(`The preset “${gone}” is deleted.`, "Undo", () => write({ ...saved(), [gone]: texts }, gone));
    } }, "Delete");
    select.addEventListener("change", () => {
      remove.disabled = !select.value;
      if (select.value) this.load(saved()[select.value]);
    });
    const add = () => {
      const wanted = name.value.trim();
      if (!wanted) return name.focus();
      write({ ...saved(), [wanted]: this.texts }, wanted);
      name.value = "";
    };
    name.addEventListener("keydown", (event) => event.key === "Enter" && add());
    fill();
    return el("div", { class: "presets" }, select, remove, name, el("button", { class: "quiet", onclick: add }, "Save"));
  }

  /** Return the fields of a request. The server chooses the values of empty fields. */
  fields() {
    const found = requestFields(this.texts, this.known);
    if (this.chosen) found.model = this.chosen;
    return found;
  }

  /** Return the chosen name, unless the server does not have it. Before the names are known, the choice counts. */
  get chosen() {
    return !this.models.length || this.models.includes(this.texts.model) ? this.texts.model : undefined;
  }

  /** Return the name of the requested model. */
  get model() {
    return this.chosen ?? this.models[0];
  }

  get system() {
    return this.texts.system ?? "";
  }
}
