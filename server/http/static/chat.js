// The chat: sends a conversation, shows its answers as they come, and lets each of them be stopped, edited and branched.

import { attach, close, words } from "./alternatives.js";
import { ApiError, stream } from "./api.js";
import { Conversation } from "./conversation.js";
import { $, announce, copy, count, duration, el, plural } from "./dom.js";
import { Markdown } from "./markdown.js";
import { addToken, align, divide, otherPrefix, wholePrefix } from "./tokens.js";

const ENDS = { length: "the token limit ended it", stopped: "stopped", timeout: "the time limit ended it", lost: "the connection was lost" };
const ROLES = { user: "You", assistant: "Answer", tool: "Result of a function" };

export class Chat {
  /** `askKey` asks for a key and says whether there is one; `unreachable` is called when nothing answers. */
  constructor(settings, { askKey, unreachable }) {
    Object.assign(this, { settings, askKey, unreachable, tree: new Conversation(), views: new Map(), running: null, hasChat: true });
    this.list = $("messages");
    this.question = $("question");
    $("composer").addEventListener("submit", (event) => this.submit(event));
    this.question.addEventListener("input", () => this.fit());
    this.question.addEventListener("keydown", (event) => {
      const isNewLine = event.shiftKey || event.isComposing || matchMedia("(pointer: coarse)").matches;
      if (event.key !== "Enter" || isNewLine) return;
      event.preventDefault();
      if (!this.running) $("composer").requestSubmit();
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && !document.querySelector("dialog[open]") && this.stop());
    $("new-chat").addEventListener("click", () => this.clear());
    $("scroll").addEventListener("scroll", () => (this.follows = this.isAtEnd()), { passive: true });
    this.follows = true;
    this.draw();
  }

  clear() {
    this.stop();
    this.tree.clear();
    this.tree.save();
    this.draw();
    this.question.focus();
  }

  fit() {
    this.question.style.height = "auto";
    this.question.style.height = `${Math.min(this.question.scrollHeight + 2, innerHeight * 0.4)}px`;
  }

  isAtEnd() {
    const box = $("scroll");
    return box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  }

  toEnd() {
    if (this.follows) $("scroll").scrollTop = $("scroll").scrollHeight;
  }

  submit(event) {
    event.preventDefault();
    if (this.running) return this.stop();
    const text = this.question.value;
    if (!text.trim()) return;
    this.question.value = "";
    this.fit();
    this.ask(this.tree.end().id, text);
  }

  /** A question below the node of this id, and its answer. */
  ask(parent, text) {
    this.follows = true;
    this.answer(this.tree.add(parent, "user", { content: text }).id);
  }

  stop() {
    this.running?.abort();
  }

  /** An answer below the node of this id; with `prefix` it goes on from there. */
  async answer(parent, prefix = { raw: "", tokens: [], opensThinking: false }) {
    if (this.running) return;
    const start = divide(prefix.raw, prefix.opensThinking);
    const fields = { ...prefix, reasoning: start.reasoning, content: start.content, calls: [], busy: true, finish: null, error: null, took: null };
    const node = this.tree.add(parent, "assistant", fields);
    this.running = new AbortController();
    this.draw();
    announce("The answer begins.");
    await this.fill(node, prefix);
    node.busy = false;
    this.running = null;
    this.tree.save();
    this.render(node);
    this.controls();
    announce(node.error ? node.error.message : `The answer is complete, ${plural(node.took?.completion ?? 0, "token")}.`);
  }

  async fill(node, prefix) {
    const body = this.body(node, prefix);
    const controller = this.running;
    for (;;) {
      try {
        await this.receive(node, body, controller.signal);
        return;
      } catch (error) {
        if (controller.signal.aborted) {
          node.finish = "stopped";
          return;
        }
        if (!(error instanceof ApiError)) throw error;
        if (error.status === 401 && (await this.askKey())) continue;
        if (error.status === 0) this.unreachable();
        if (error.status === 0 && node.content + node.reasoning !== "") node.finish = "lost";
        else node.error = { message: error.message, requestId: error.requestId };
        return;
      }
    }
  }

  body(node, prefix) {
    const messages = this.tree.messages(node.parent);
    if (this.settings.system) messages.unshift({ role: "system", content: this.settings.system });
    const body = { ...this.settings.fields(), messages, stream: true, stream_options: { include_usage: true } };
    if (prefix.raw) {
      messages.push({ role: "assistant", content: (prefix.opensThinking ? "<think>\n" : "") + prefix.raw });
      Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    }
    return body;
  }

  async receive(node, body, signal) {
    const sent = performance.now();
    let first = 0;
    for await (const event of stream("v1/chat/completions", body, signal)) {
      const choice = event.choices[0];
      if (choice) {
        for (const entry of choice.logprobs?.content ?? []) addToken(node, entry);
        if (this.take(node, choice.delta)) first ||= performance.now();
        if (choice.finish_reason) node.finish = choice.finish_reason;
      }
      if (event.usage) node.took = times(event.usage, sent, first || performance.now());
      this.later(node);
    }
  }

  /** Add a piece of the answer. Returns whether there was anything in it. */
  take(node, delta) {
    if (delta.reasoning_content) {
      if (!node.reasoning && !node.content) node.opensThinking = !node.raw.trimStart().startsWith("<think>");
      node.reasoning += delta.reasoning_content;
    }
    node.content += delta.content ?? "";
    for (const call of delta.tool_calls ?? []) {
      node.calls[call.index] ??= { id: call.id, name: call.function.name, arguments: "" };
      node.calls[call.index].arguments += call.function.arguments ?? "";
    }
    return Boolean(delta.content || delta.reasoning_content || delta.tool_calls);
  }

  /** Show the answer with the next frame: many tokens may come within one. */
  later(node) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.render(node);
    });
  }

  // ------------------------------------------------------------------ what is shown
  draw() {
    close();
    this.views.clear();
    this.list.replaceChildren(...this.tree.path().map((node) => this.view(node)));
    $("empty").hidden = this.tree.nodes[0].chosen !== null;
    this.controls();
    this.toEnd();
  }

  controls() {
    const isBusy = this.running !== null;
    $("send").textContent = isBusy ? "Stop" : "Send";
    $("send").classList.toggle("stop", isBusy);
    $("new-chat").hidden = this.tree.nodes[0].chosen === null;
    this.question.disabled = !this.hasChat;
    $("send").disabled = !this.hasChat;
    for (const button of this.list.querySelectorAll("[data-idle]")) button.disabled = isBusy;
  }

  view(node) {
    const item = el("li", { class: node.role, "aria-label": ROLES[node.role] });
    this.views.set(node.id, { item });
    if (node.role === "assistant") this.answerView(node, item);
    else {
      const text = el("div", { class: "bubble" }, node.content);
      const edit = node.role === "user" && this.button("Edit", () => this.edit(node, item));
      item.append(text, el("div", { class: "row actions" }, this.branches(node), this.button("Copy", (event) => copy(node.content, event.target), false), edit));
    }
    return item;
  }

  answerView(node, item) {
    const thoughts = el("details", { class: "thoughts", hidden: true }, el("summary", {}, "Thoughts"), el("div", { class: "prose" }));
    const body = el("div", { class: "prose", role: "group", tabindex: "0", "aria-label": "Text of the answer; the arrow keys go from word to word" });
    const calls = el("div", { class: "calls" });
    const problem = el("p", { class: "problem" });
    const numbers = el("p", { class: "numbers" });
    const actions = el("div", { class: "row actions" });
    item.append(thoughts, body, calls, problem, numbers, actions);
    const view = this.views.get(node.id);
    const places = () => (view.places ??= align(node) ?? { reasoningAt: 0, contentAt: 0, isLost: true });
    const pieces = (name) => (text, offsets) => (node.tokens.length && !places().isLost ? words(node.tokens, places()[name], text, offsets) : [text]);
    const thoughtText = new Markdown(thoughts.lastChild, pieces("reasoningAt"));
    const answerText = new Markdown(body, pieces("contentAt"));
    Object.assign(view, { thoughts, calls, problem, numbers, actions, body, thoughtText, answerText });
    const choosing = {
      tokenOf: (index) => node.tokens[index] ?? null,
      choose: (index, other) => this.answer(node.parent, otherPrefix(node, index, other)),
      isBusy: () => this.running !== null,
    };
    attach(body, choosing);
    attach(thoughts, choosing);
    this.render(node);
  }

  render(node) {
    const view = this.views.get(node.id);
    if (!view) return;
    view.places = null;
    view.item.setAttribute("aria-busy", node.busy);
    view.thoughts.hidden = !node.reasoning;
    view.thoughts.firstChild.textContent = node.busy && !node.content ? "Thinking …" : "Thoughts";
    view.thoughtText.update(node.reasoning);
    view.answerText.update(node.content);
    view.body.hidden = !node.content && !node.busy;
    view.item.classList.toggle("waiting", node.busy && !node.content && !node.reasoning && !node.calls.length);
    if (node.calls.length) view.calls.replaceChildren(...node.calls.map((call) => callView(call)));
    view.problem.textContent = node.error?.message ?? "";
    if (node.error?.requestId) view.problem.append(el("small", {}, ` Request ${node.error.requestId}.`));
    view.numbers.replaceChildren(...numbersOf(node));
    if (!node.busy) {
      view.actions.replaceChildren(...this.answerActions(node));
      if (node.calls.length && !node.children.length) view.calls.append(this.results(node));
    }
    this.toEnd();
  }

  answerActions(node) {
    const isCut = !node.calls.length && (node.content || node.reasoning) && (node.error || ["length", "stopped", "timeout", "lost"].includes(node.finish));
    return [
      this.branches(node),
      node.content && this.button("Copy", (event) => copy(node.content, event.target), false),
      isCut && this.button("Go on", () => this.answer(node.parent, wholePrefix(node))),
      this.button("Try again", () => this.answer(node.parent)),
    ].filter(Boolean);
  }

  button(label, onclick, isIdleOnly = true) {
    return el("button", { class: "quiet", onclick, "data-idle": isIdleOnly, disabled: isIdleOnly && this.running !== null }, label);
  }

  branches(node) {
    const [place, number] = this.tree.place(node);
    if (number === 1) return null;
    const turn = (step) => () => {
      this.tree.turn(node, step);
      this.tree.save();
      this.draw();
    };
    const step = (label, sign, by, isEnd) => el("button", { class: "quiet", "aria-label": label, "data-idle": !isEnd, disabled: isEnd || this.running !== null, onclick: turn(by) }, sign);
    return el("span", { class: "branches", role: "group", "aria-label": "Branches" }, step("Branch before", "‹", -1, place === 1), el("span", {}, `${place} / ${number}`), step("Next branch", "›", 1, place === number));
  }

  edit(node, item) {
    const area = el("textarea", { "aria-label": "Edit the message", rows: Math.min(12, node.content.split("\n").length + 1) });
    area.value = node.content;
    const send = () => {
      if (area.value.trim()) this.ask(node.parent, area.value);
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.draw();
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    item.replaceChildren(area, el("div", { class: "row actions" }, this.button("Cancel", () => this.draw()), el("button", { class: "primary", onclick: send }, "Send")));
    area.focus();
  }

  /** Fields for what the called functions returned. */
  results(node) {
    const areas = node.calls.map((call) => el("textarea", { rows: 2, class: "mono", "aria-label": `Result of ${call.name}`, placeholder: `What ${call.name} returned` }));
    const send = () => {
      let parent = node.id;
      node.calls.forEach((call, index) => (parent = this.tree.add(parent, "tool", { content: areas[index].value, callId: call.id }).id));
      this.answer(parent);
    };
    return el("div", { class: "results" }, ...areas, this.button(areas.length > 1 ? "Send results" : "Send result", send));
  }
}

function callView(call) {
  let text = call.arguments;
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // still being written, or a model's mistake: shown as it is
  }
  return el("div", { class: "call" }, el("div", { class: "code-head" }, el("span", {}, "calls ", el("strong", {}, call.name))), el("pre", { tabindex: "0" }, el("code", {}, text)));
}

function times(usage, sent, first) {
  const last = performance.now();
  const completion = usage.completion_tokens;
  return {
    prompt: usage.prompt_tokens,
    cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
    completion,
    first: first - sent,
    speed: completion > 1 && last - first > 5 ? (1000 * (completion - 1)) / (last - first) : null,
  };
}

function numbersOf(node) {
  const parts = [];
  const add = (text, title) => parts.push(el("span", { title }, text));
  if (node.took) {
    const { completion, speed, first, prompt, cached } = node.took;
    add(plural(completion, "token"), "tokens of this answer");
    if (speed) add(`${speed.toFixed(speed < 100 ? 1 : 0)} tokens/s`, "after the first token, as this page received them");
    add(`first after ${duration(first)}`, "from sending the question to the first token here");
    add(`${count(cached)} of ${plural(prompt, "prompt token")} cached`, "tokens of the prompt that were in the KV cache already");
  }
  if (ENDS[node.finish]) add(ENDS[node.finish]);
  return parts;
}
