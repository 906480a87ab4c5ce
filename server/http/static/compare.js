// Comparison of two settings, two seeds or two servers for the same question, and the probability of a text, token by
// token. This is a separate document: only it may connect to servers that the user names.

import { ApiError, base, post, stream } from "./api.js";
import { heatOf, legend, words } from "./alternatives.js";
import { Connection } from "./connection.js";
import { $, count, el, plural, recall } from "./dom.js";
import { Markdown } from "./markdown.js";
import { LiveNumbers, numbersOf } from "./meter.js";
import { requestFields } from "./settings_fields.js";
import { placeOfPresets, PRESETS } from "./store.js";
import { setUpTheme } from "./theme.js";
import { addToken, align } from "./tokens.js";

const MAX_SHOWN = 5000; // tokens of a scored text
setUpTheme();
new Connection(() => {});

class Side {
  constructor(name, settings) {
    const field = (label, properties) => {
      const input = el("input", { type: "text", autocomplete: "off", spellcheck: "false", ...properties, "aria-label": `${label} of ${name}` });
      return [input, el("label", {}, label, input)];
    };
    const fields = Object.entries({
      server: ["Server", { placeholder: base.href, inputmode: "url" }],
      key: ["Its API key", { type: "password" }],
      temperature: ["Temperature", { inputmode: "decimal", placeholder: "as the settings say" }],
      seed: ["Seed", { inputmode: "numeric", placeholder: "as the settings say" }],
    }).map(([id, [label, properties]]) => [id, ...field(label, properties)]);
    this.inputs = Object.fromEntries(fields.map(([id, input]) => [id, input]));
    this.settings = settings;
    this.select = el("select", { "aria-label": `Settings of ${name}` }, ...Object.keys(settings).map((each) => el("option", { value: each }, each)));
    this.model = el("p", { class: "model" });
    this.body = el("div", { class: "prose", role: "group", "aria-label": `Answer of ${name}` });
    this.numbers = el("p", { class: "numbers" });
    this.problem = el("p", { class: "problem", role: "alert" });
    this.element = el("section", { class: "card side", "aria-label": name }, el("h2", {}, name),
      el("label", {}, "Settings", this.select), ...fields.map(([, , label]) => label), this.model, this.body, this.problem, this.numbers);
  }

  /** Ask the question. Resolves when the response has ended for any reason. */
  async ask(question, system, signal) {
    const node = (this.node = { content: "", raw: "", tokens: [], opensThinking: false, reasoning: "", calls: [], busy: true, live: new LiveNumbers() });
    this.text = new Markdown(this.body, (text, offsets) => (align(node) ? words(node.tokens, align(node).contentAt, text, offsets) : [text]));
    this.text.clear();
    this.problem.textContent = this.model.textContent = "";
    this.body.classList.add("heat");
    try {
      const root = this.inputs.server.value.trim() ? new URL(this.inputs.server.value.trim().replace(/\/?$/, "/")) : base;
      const isOther = root.href !== base.href;
      const options = isOther ? { root, key: this.inputs.key.value } : this.inputs.key.value ? { key: this.inputs.key.value } : {};
      for await (const event of stream("v1/chat/completions", this.request(question, system, isOther), signal, options)) {
        const delta = event.choices?.[0]?.delta ?? {};
        this.model.textContent = event.model ?? "";
        for (const entry of event.choices?.[0]?.logprobs?.content ?? []) addToken(node, entry);
        node.content += delta.content ?? "";
        node.reasoning += delta.reasoning_content ?? "";
        node.live.take(event, Boolean(delta.content || delta.reasoning_content));
        this.later();
      }
    } catch (error) {
      if (signal.aborted) node.finish = "stopped";
      else if (error instanceof ApiError) this.problem.textContent = error.message;
      else if (error instanceof TypeError) this.problem.textContent = "This is not the address of a server.";
      else throw error;
    }
    cancelAnimationFrame(this.frame);
    this.frame = null;
    node.busy = false;
    node.took = node.live.took();
    this.draw();
  }

  request(question, system, isOther) {
    const texts = { ...this.settings[this.select.value] };
    for (const name of ["temperature", "seed"]) if (this.inputs[name].value.trim()) texts[name] = this.inputs[name].value;
    const told = system || texts.system;
    const messages = [...(told ? [{ role: "system", content: told }] : []), { role: "user", content: question }];
    const fields = { ...requestFields(texts, {}), messages, stream: true, stream_options: { include_usage: true } };
    return isOther ? fields : { ...fields, return_progress: true }; // another server may not know this field
  }

  later() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
    });
  }

  draw() {
    this.text.update(this.node.content, !this.node.busy);
    this.numbers.replaceChildren(...numbersOf(this.node));
  }

  /** Mark the first word after `at` characters of the response; null: none. */
  mark(at) {
    const { node } = this;
    if (at === null || !node.tokens.length) return;
    const start = (align(node)?.contentAt ?? 0) + at;
    const number = node.tokens.findIndex((token) => token.end > start);
    this.body.querySelector(`[data-token="${number}"]`)?.classList.add("chosen");
  }
}

const settings = { "This chat's": recall("oarlock-settings") ?? {}, "The server's defaults": {}, ...recall(PRESETS, placeOfPresets()) };
const sides = ["A", "B"].map((name) => new Side(name, settings));
$("sides").append(...sides.map((side) => side.element));
for (const place of [$("compare-legend"), $("score-legend")]) place.append(legend());
let running = null;

$("compare-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return running.abort();
  running = new AbortController();
  $("compare-send").textContent = "Stop";
  $("verdict").textContent = "";
  $("compare-legend").hidden = false;
  await Promise.all(sides.map((side) => side.ask($("compare-question").value, $("compare-system").value.trim(), running.signal)));
  running = null;
  $("compare-send").textContent = "Ask both";
  compare();
});

/** Report whether both responses are the same, and mark the point at which they differ. */
function compare() {
  const [a, b] = sides.map((side) => side.node.content);
  if (sides.some((side) => side.problem.textContent)) return;
  if (a === b) {
    $("verdict").textContent = "Both answers are the same.";
    return;
  }
  let at = 0;
  while (at < Math.min(a.length, b.length) && a[at] === b[at]) at++;
  $("verdict").textContent = at ? `They are the same for ${plural(at, "character")}; the next word of each is underlined.` : "They differ from the first word on.";
  for (const side of sides) side.mark(at);
}

$("score-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const [place, verdict] = [$("score"), $("score-verdict")];
  verdict.textContent = "…";
  try {
    const answer = await post("v1/completions", { prompt: $("score-text").value, max_tokens: 0, echo: true, logprobs: 5, temperature: 1 });
    place.hidden = $("score-legend").hidden = false;
    verdict.textContent = drawScores(place, answer.choices[0]);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    verdict.textContent = error.message;
  }
});

/** Show each token of a text. Returns the summary of all. */
function drawScores(place, { text, logprobs }) {
  const characters = [...text]; // offsets count characters, not UTF-16 units
  const { tokens, token_logprobs: scores, top_logprobs: top, text_offset: offsets } = logprobs;
  const shown = tokens.slice(0, MAX_SHOWN).map((token, index) => {
    const piece = characters.slice(offsets[index], offsets[index + 1]).join("");
    const p = scores[index] === null ? 1 : Math.exp(scores[index]);
    const expected = Object.entries(top[index] ?? {}).map(([name, score]) => `${JSON.stringify(name)} ${(100 * Math.exp(score)).toFixed(1)} %`);
    return el("span", { class: `word ${heatOf(p)}`, title: scores[index] === null ? "the first" : `${(100 * p).toFixed(2)} %; expected ${expected.join(", ")}` }, piece);
  });
  place.replaceChildren(...shown);
  const known = scores.filter((score) => score !== null);
  const perplexity = Math.exp(-known.reduce((sum, score) => sum + score, 0) / Math.max(1, known.length));
  const rest = tokens.length > MAX_SHOWN ? `, of which ${count(MAX_SHOWN)} are shown` : "";
  return `Perplexity ${perplexity < 1e6 ? perplexity.toPrecision(4) : "above a million"} over ${plural(known.length, "token")}${rest}.`;
}
