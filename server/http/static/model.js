// The model's card and limits, and an example request for programs.

import { ApiError, base, get, getKey } from "./api.js";
import { copy, count, el } from "./dom.js";

const CARD = {
  architecture: "Architecture", served_by: "Computed by", num_parameters: "Parameters", max_model_len: "Context", vocab_size: "Vocabulary", dtype: "Numbers",
  kv_cache_dtype: "KV cache", device: "Device", tensor_parallel_size: "Ranks", data_parallel_size: "Replicas",
  batch_invariant: "Same text next to other requests", rank_invariant: "Same text at every number of ranks", chat: "Chat template",
};
const REASONS = { served_by: "served_by_note", batch_invariant: "batch_invariant_reason", rank_invariant: "rank_invariant_reason" };
const UNITS = { max_model_len: "tokens", vocab_size: "tokens", max_body_bytes: "bytes", step_timeout_s: "s", request_timeout_s: "s" };

export class ModelView {
  constructor(panel, askKey) {
    this.panel = panel;
    this.askKey = askKey;
  }

  async load(capabilities) {
    try {
      const list = await get("v1/models");
      this.draw(list.data, capabilities);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401 && (await this.askKey())) return;
      this.panel.replaceChildren(el("p", { class: "problem" }, error.message));
    }
  }

  draw(all, { limits, features, adapters, generation_config: generation, introduction, version }) {
    const models = all.filter((model) => !model.parent);
    const [card] = models;
    const rows = Object.entries(CARD).filter(([name]) => name in card).map(([name, label]) => row(label, shown(name, card[name]), card[REASONS[name]]));
    const names = models.map((model) => model.id);
    this.panel.replaceChildren(
      el("h1", {}, names[0]),
      names.length > 1 ? el("p", { class: "soft" }, `also called ${names.slice(1).join(", ")}`) : "",
      introduction.about ? el("p", { class: "soft" }, introduction.about) : "",
      el("div", { class: "cards" },
        group("Model", rows),
        group("Limits", Object.entries(limits).map(([name, value]) => row(words(name), value === null ? "none" : shown(name, value)))),
        group("Sampling, unless a request says otherwise", [
          ...Object.entries(generation.sampling).map(([name, value]) => row(words(name), shown(name, value), name === "temperature" && value === 0 ? "greedy: always the most likely token" : null)),
          row("from", generation.source ?? "this server"),
        ]),
        adapters ? group("LoRA adapters", adapterRows(adapters, all.filter((model) => model.parent))) : "",
        group("Server", [row("Oarlock", version), row("Prefix cache", shown("", features.prefix_caching)), row("Unknown parameters", features.unknown_parameters)]),
      ),
      el("h2", {}, "From a program"), this.example(names[0], features.chat ? "chat" : features.task),
      getKey() ? "" : el("p", {}, el("a", { href: new URL("docs", base).href }, "Every route and parameter")),
    );
  }

  example(name, form) {
    const [path, body] = {
      chat: ["chat/completions", { messages: [{ role: "user", content: "Hello" }] }], generate: ["completions", { prompt: "Once" }],
      embed: ["embeddings", { input: "Hello" }], score: ["score", { text_1: "a", text_2: "b" }],
    }[form];
    const text = `curl ${new URL("v1", base)}/${path} -H 'Content-Type: application/json'${getKey() ? " -H 'Authorization: Bearer KEY'" : ""} \\\n  -d '${JSON.stringify({ model: name, ...body }).replaceAll("'", "'\\''")}'`;
    const button = el("button", { class: "quiet", onclick: () => copy(text, button) }, "Copy");
    return el("div", { class: "code" }, el("div", { class: "code-head" }, el("span", {}, "curl"), button), el("pre", { tabindex: "0" }, el("code", {}, text)));
  }
}

const words = (name) => (name[0].toUpperCase() + name.slice(1)).replace(/_(s|bytes)$/, "").replaceAll("_", " ");

function shown(name, value) {
  if (typeof value === "boolean") return value ? "yes" : "no";
  return `${typeof value === "number" ? count(value) : value}${UNITS[name] ? ` ${UNITS[name]}` : ""}`;
}

/** Return the rows of the slots for adapters, and of each adapter with the path or hub id that it was loaded from. */
function adapterRows({ max_loras: slots, max_lora_rank: rank, bytes_per_slot_per_rank: bytes }, adapters) {
  const mebibytes = `${(bytes / 2 ** 20).toFixed(1)} MiB per rank`;
  return [row("Slots", count(slots), mebibytes), row("Highest rank", count(rank)), ...adapters.map(({ id, root }) => row(id, root))];
}

const row = (label, value, reason = null) => [el("dt", {}, label), el("dd", {}, value, reason ? el("small", {}, reason) : "")];
const group = (title, rows) => el("section", { class: "card" }, el("h2", {}, title), el("dl", {}, ...rows.flat()));
