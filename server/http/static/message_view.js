// The view of one chat message: a question or a response, with its actions.

import { attach, legend, words } from "./alternatives.js";
import { contentOf } from "./conversation.js";
import { copy, el, plural } from "./dom.js";
import { Markdown } from "./markdown.js";
import { numbersOf } from "./meter.js";
import { align, otherPrefix } from "./tokens.js";
import { isInUse, unwatch, watch } from "./windowed.js";

const ROLES = { user: "You", assistant: "Answer", tool: "Result of a function", system: "System" };
const LONG_CHARACTERS = 1500;
const LONG_LINES = 16;
const WINDOWED_FROM = 40; // messages; in a longer chat, messages far from the view are emptied
const CAN_GO_ON = ["length", "stopped", "timeout", "lost", "edited"];

export class MessageView {
  constructor(chat, node) {
    Object.assign(this, { chat, node, isFilled: false });
    this.item = el("li", { class: node.role, "aria-label": ROLES[node.role] });
    this.item.style.minHeight = `${60 + 26 * Math.ceil(node.content.length / 85)}px`; // until it is filled
    if (node.busy) this.fill();
    watch(this.item, (isNear, height) => (isNear ? this.fill() : this.release(height)));
  }

  end() {
    unwatch(this.item);
  }

  /** Show the message. */
  fill() {
    if (this.isFilled) return;
    this.isFilled = true;
    this.item.style.minHeight = "";
    if (this.node.role === "assistant") {
      this.buildAnswer();
      this.render();
      if (this.node.hasTokens && !this.node.tokens) this.loadTokens();
    } else this.buildQuestion();
    this.chat.toEnd();
  }

  /** Remove the message's content from the page while it is far away. */
  release(height) {
    const isFew = this.chat.views.size < WINDOWED_FROM; // so that the browser's own search finds everything
    if (!this.isFilled || isFew || this.node.busy || this.editor || isInUse(this.item)) return;
    this.isFilled = false;
    this.item.style.minHeight = `${height}px`;
    this.reasoningText?.clear();
    this.answerText?.clear();
    this.item.replaceChildren();
  }

  async loadTokens() {
    await this.chat.loadTokens(this.node);
    if (!this.isFilled || this.editor) return;
    this.reasoningText.clear(); // its tokens are known now
    this.answerText.clear();
    this.newTexts();
    this.render();
  }

  // ------------------------------------------------------------------ a question
  buildQuestion() {
    const { node, chat } = this;
    this.text = el("div", { class: "prose bubble" });
    const files = (node.files ?? []).map((file) => el("details", { class: "file" }, el("summary", {}, file.name), el("pre", { tabindex: "0" }, el("code", {}, file.text))));
    this.fold = el("button", { class: "quiet", hidden: true, "aria-expanded": "false", onclick: () => this.unfold() }, "Show all");
    this.actions = el("div", { class: "row actions" },
      chat.branches(node),
      chat.button("Copy", (event) => copy(contentOf(node), event.target), false),
      node.role === "user" && chat.button("Copy link", (event) => copy(chat.linkTo(node.content), event.target), false),
      node.role === "user" && chat.button("Edit", () => this.edit()),
      chat.button("Delete", () => chat.remove(node)));
    this.item.append(...files, this.text, this.fold, this.actions);
    this.text.hidden = !node.content;
    const { content, role } = node;
    if (role === "tool") this.text.replaceChildren(content);
    else new Markdown(this.text).update(content, true);
    const isLong = content.length > LONG_CHARACTERS || content.split("\n", LONG_LINES + 1).length > LONG_LINES;
    this.fold.hidden = !isLong;
    this.text.classList.toggle("folded", isLong && !this.isUnfolded);
  }

  unfold() {
    this.isUnfolded = !this.isUnfolded;
    this.text.classList.toggle("folded", !this.isUnfolded);
    this.fold.textContent = this.isUnfolded ? "Show less" : "Show all";
    this.fold.setAttribute("aria-expanded", this.isUnfolded);
  }

  // ------------------------------------------------------------------ a response
  buildAnswer() {
    const { node, chat } = this;
    this.model = el("p", { class: "model" });
    this.reasoning = el("details", { class: "reasoning", hidden: true }, el("summary", {}, "Reasoning"), el("div", { class: "prose" }));
    this.body = el("div", { class: "prose", role: "group", tabindex: "0", "aria-label": "Text of the answer; the arrow keys go from word to word" });
    this.calls = el("div", { class: "calls" });
    this.problem = el("p", { class: "problem" });
    this.numbers = el("p", { class: "numbers" });
    this.actions = el("div", { class: "row actions" });
    this.item.append(this.model, this.reasoning, this.body, this.calls, this.problem, this.numbers, this.actions);
    const choosing = {
      tokenOf: (index) => node.tokens?.[index] ?? null,
      choose: (index, other) => chat.answer(node.parent, otherPrefix(node, index, other)),
      isBusy: () => chat.running !== null,
    };
    attach(this.body, choosing);
    attach(this.reasoning, choosing);
    this.newTexts();
  }

  newTexts() {
    const { node } = this;
    const aligned = () => (this.aligned ??= align(node) ?? { reasoningAt: 0, contentAt: 0, isLost: true });
    const pieces = (name) => (text, offsets) => (node.tokens?.length && !aligned().isLost ? words(node.tokens, aligned()[name], text, offsets) : [text]);
    this.reasoningText = new Markdown(this.reasoning.lastChild, pieces("reasoningAt"), { isWindowed: true });
    this.answerText = new Markdown(this.body, pieces("contentAt"), { isWindowed: true });
  }

  render() {
    const { node, chat } = this;
    if (!this.isFilled || this.editor) return;
    this.aligned = null;
    this.reasoningText.update(node.reasoning, !node.busy || Boolean(node.content));
    this.answerText.update(node.content, !node.busy);
    this.item.setAttribute("aria-busy", Boolean(node.busy));
    this.model.textContent = node.model ?? "";
    this.model.hidden = !node.model;
    this.reasoning.hidden = !node.reasoning;
    this.reasoning.firstChild.textContent = node.busy && !node.content ? "Thinking …" : "Reasoning";
    this.body.hidden = !node.content && !node.busy;
    this.item.classList.toggle("waiting", Boolean(node.busy) && !node.content && !node.reasoning && !node.calls.length);
    if (node.calls.length) this.calls.replaceChildren(...node.calls.map(callView));
    this.problem.textContent = node.error?.message ?? "";
    if (node.error?.requestId) this.problem.append(el("small", {}, ` Request ${node.error.requestId}.`));
    this.numbers.replaceChildren(...numbersOf(node));
    if (!node.busy) this.actions.replaceChildren(...this.answerActions());
    if (!node.busy && node.calls.length && !node.children.length) this.calls.append(chat.results(node));
    chat.toEnd();
  }

  answerActions() {
    const { node, chat } = this;
    const isCut = !node.calls.length && (node.content || node.reasoning) && (node.error || CAN_GO_ON.includes(node.finish));
    return [
      chat.branches(node),
      node.content && chat.button("Copy", (event) => copy(node.content, event.target), false),
      isCut && chat.button("Continue", () => chat.goOn(node)),
      chat.button("Try again", () => chat.answer(node.parent)),
      chat.button("Edit", () => this.edit()),
      node.hasTokens || node.tokens?.length ? this.heatButton() : null,
      node.request && chat.button("Explain", async () => (await import("./explain.js")).explain(node.request), false),
      chat.button("Delete", () => chat.remove(node)),
    ].filter(Boolean);
  }

  /** Return the button that colours each word by its probability. */
  heatButton() {
    const isHot = this.item.classList.contains("heat");
    const button = el("button", { class: "quiet", "aria-pressed": String(isHot), title: "Colour each word by how likely it was" }, "Probabilities");
    button.addEventListener("click", () => {
      const isOn = this.item.classList.toggle("heat");
      button.setAttribute("aria-pressed", isOn);
      this.showLegend(isOn);
    });
    this.showLegend(isHot);
    return button;
  }

  /** Show or remove the legend between the response and its numbers. */
  showLegend(isShown) {
    this.legend?.remove();
    this.legend = isShown ? legend() : null;
    if (isShown) this.numbers.before(this.legend);
  }

  // ------------------------------------------------------------------ edited by hand
  edit() {
    const { node, chat } = this;
    const isAnswer = node.role === "assistant";
    const area = el("textarea", { "aria-label": isAnswer ? "Edit the answer" : "Edit the message", rows: Math.min(16, node.content.split("\n").length + 1) });
    area.value = node.content;
    const send = () => {
      if (area.value.trim() || node.files?.length) (isAnswer ? chat.replaceAnswer(node, area.value) : chat.ask(node.parent, area.value, node.files));
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        chat.draw();
      }
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || isAnswer) return;
      event.preventDefault();
      send();
    });
    this.editor = el("div", { class: "editor" }, area, el("div", { class: "row" }, chat.button("Cancel", () => chat.draw()), el("button", { class: "primary", onclick: send }, isAnswer ? "Save as a branch" : "Send")));
    this.item.replaceChildren(this.editor);
    area.focus();
  }
}

function callView(call) {
  let text = call.arguments;
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // incomplete, or the model's mistake: shown as it is
  }
  return el("div", { class: "call" }, el("div", { class: "code-head" }, el("span", {}, "calls ", el("strong", {}, call.name))), el("pre", { tabindex: "0" }, el("code", {}, text)));
}

export const saidOf = (node) => (node.error ? node.error.message : `The answer is complete, ${plural(node.took?.completion ?? 0, "token")}.`);
