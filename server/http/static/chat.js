// The chat: sends a conversation, shows responses as they arrive, and lets the user stop, edit and branch them.

import { close } from "./alternatives.js";
import { ApiError, base, stream } from "./api.js";
import { Attachments } from "./attachments.js";
import { Conversation, contentOf } from "./conversation.js";
import { $, announce, el, keep, notice, recall } from "./dom.js";
import { MessageView, saidOf } from "./message_view.js";
import { ContextMeter, LiveNumbers } from "./meter.js";
import { addToken, divide, wholePrefix } from "./tokens.js";

const OPENED = "oarlock-conversation"; // the id of the conversation in this tab
const SAVE_EVERY_MS = 3000; // while a response is written

export class Chat {
  /**
   * `askKey` asks for a key and returns whether there is one; `unreachable` is called if the server does not respond;
   * `saved` is called after a conversation has changed.
   */
  constructor(settings, store, { askKey, unreachable, saved }) {
    Object.assign(this, { settings, store, askKey, unreachable, saved, views: new Map(), running: null, hasChat: true, follows: true });
    this.tree = new Conversation();
    this.list = $("messages");
    this.question = $("question");
    this.meter = new ContextMeter();
    this.attachments = new Attachments(() => this.weigh());
    $("composer").addEventListener("submit", (event) => this.submit(event));
    this.question.addEventListener("input", () => {
      this.fit();
      this.weigh();
    });
    this.question.addEventListener("keydown", (event) => {
      const isNewLine = event.shiftKey || event.isComposing || matchMedia("(pointer: coarse)").matches;
      if (event.key !== "Enter" || isNewLine) return;
      event.preventDefault();
      if (!this.running) $("composer").requestSubmit();
    });
    $("scroll").addEventListener("scroll", () => (this.follows = this.isAtEnd()), { passive: true });
    this.draw();
  }

  /** Show the conversation that this tab showed before. */
  async restore() {
    const id = recall(OPENED);
    if (id) await this.open(id);
  }

  /** Write a message without sending it. */
  write(text) {
    this.question.value = text;
    this.fit();
    this.weigh();
  }

  /**
   * Show the conversation of this id, or a new one. A response that is being written is stopped and kept. Returns
   * whether the conversation is stored here, or null if another one was requested meanwhile.
   */
  async open(id) {
    const number = (this.opening = (this.opening ?? 0) + 1);
    this.isOpening = true;
    if (this.running) {
      this.stop();
      await this.ended;
    }
    const records = id ? await this.store.load(id) : null;
    if (number !== this.opening) return null;
    this.isOpening = false;
    const isFound = Boolean(records?.conversations.length);
    this.tree = new Conversation(isFound ? records : null);
    keep(OPENED, isFound ? id : null);
    this.follows = true;
    this.draw();
    this.saved(null);
    if (!id) this.question.focus();
    return isFound || !id;
  }

  /** Keep the current conversation, even if another one was requested. */
  cancelOpening() {
    this.opening = (this.opening ?? 0) + 1;
    this.isOpening = false;
  }

  async save() {
    const records = this.tree.changes();
    if (!records) return;
    keep(OPENED, this.tree.id);
    if (!(await this.store.put(records))) notice("The storage of this browser is full: the conversation is not saved.");
    this.saved(this.tree.id);
  }

  /** Load the tokens of a stored response, with their alternatives. */
  async loadTokens(node) {
    const found = await this.store.tokens(`${this.tree.id} ${node.id}`);
    node.tokens = found?.tokens ?? [];
    node.raw = found?.raw ?? "";
  }

  fit() {
    this.question.style.height = "auto";
    this.question.style.height = `${Math.min(this.question.scrollHeight + 2, innerHeight * 0.4)}px`;
  }

  weigh() {
    this.meter.weigh(contentOf({ content: this.question.value, files: this.attachments.files }));
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
    if (!text.trim() && !this.attachments.files.length) return;
    this.question.value = "";
    this.fit();
    this.ask(this.tree.end().id, text, this.attachments.take());
    this.weigh();
  }

  /** Add a question below the node of this id, and request its response. */
  ask(parent, text, files = []) {
    this.follows = true;
    return this.answer(this.tree.add(parent, "user", files.length ? { content: text, files } : { content: text }).id);
  }

  stop() {
    this.running?.abort();
  }

  async goOn(node) {
    if (node.hasTokens && !node.tokens) await this.loadTokens(node);
    this.answer(node.parent, wholePrefix({ ...node, tokens: node.tokens ?? [] }));
  }

  /** Request a response below the node of this id; with `prefix` it continues from there. */
  async answer(parent, prefix = { raw: "", tokens: [], opensThinking: false }) {
    if (this.running) return;
    const start = divide(prefix.raw, prefix.opensThinking);
    const fields = { ...prefix, reasoning: start.reasoning, content: start.content, calls: [], model: this.settings.model, busy: true, finish: null, error: null, took: null, live: new LiveNumbers() };
    const node = this.tree.add(parent, "assistant", fields);
    this.running = new AbortController();
    this.draw();
    announce("The answer begins.");
    this.ended = this.complete(node, prefix);
    await this.ended;
  }

  /** Receive the response, and store it before it is shown as ended. */
  async complete(node, prefix) {
    const saving = setInterval(() => {
      this.tree.unsaved.add(node.id);
      this.save();
    }, SAVE_EVERY_MS);
    await this.fill(node, prefix);
    clearInterval(saving);
    node.took = node.live.took();
    this.tree.unsaved.add(node.id);
    await this.save();
    node.busy = false;
    this.running = null;
    this.views.get(node.id)?.render();
    this.controls();
    announce(saidOf(node));
  }

  async fill(node, prefix) {
    const body = this.body(node.parent, prefix);
    const controller = this.running;
    await this.save();
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

  /** Return the body of the request for a response below this node. */
  body(parent, prefix = { raw: "" }) {
    const messages = this.tree.messages(parent);
    if (this.settings.system) messages.unshift({ role: "system", content: this.settings.system });
    const body = { ...this.settings.fields(), messages, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, return_progress: true };
    if (prefix.raw) {
      messages.push({ role: "assistant", content: (prefix.opensThinking ? "<think>\n" : "") + prefix.raw });
      Object.assign(body, { continue_final_message: true, add_generation_prompt: false });
    }
    return body;
  }

  async receive(node, body, signal) {
    node.live = new LiveNumbers();
    for await (const event of stream("v1/chat/completions", body, signal)) {
      const choice = event.choices[0];
      Object.assign(node, { model: event.model, request: event.id });
      for (const entry of choice?.logprobs?.content ?? []) addToken(node, entry);
      node.live.take(event, choice ? this.take(node, choice.delta) : false);
      if (choice?.finish_reason) node.finish = choice.finish_reason;
      this.later(node);
    }
  }

  /** Add a delta to the response. Returns whether it had any content. */
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

  /** Show the response with the next frame, since many tokens may arrive within one. */
  later(node) {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = null;
      this.views.get(node.id)?.render();
      this.meter.show(node.busy ? node.live.took() : node.took);
    });
  }

  /** Add the response as edited by the user, as a branch next to the model's response. */
  replaceAnswer(node, content) {
    this.tree.add(node.parent, "assistant", { content, reasoning: "", calls: [], finish: "edited", error: null, took: null, opensThinking: false });
    this.save();
    this.draw();
  }

  /** Delete a message with all messages below it. The notice offers to undo this. */
  async remove(node) {
    const tree = this.tree;
    const gone = tree.remove(node);
    this.draw();
    await this.save();
    const records = await Promise.all(gone.map((each) => this.store.delete(`${tree.id} ${each.id}`)));
    notice(gone.length > 1 ? "The message and what follows it are deleted." : "The message is deleted.", "Undo", async () => {
      tree.restore(gone);
      const changes = tree.changes();
      changes.tokens.push(...records.flatMap(({ tokens }) => tokens));
      await this.store.put(changes); // first stored, then shown: a reload loses nothing that was visible
      if (this.tree === tree) this.draw();
      this.saved(tree.id);
    });
  }

  /** Return the address that opens this page with a question. The part after the # stays in the browser. */
  linkTo(text) {
    return `${base.href}#/chat?${new URLSearchParams({ q: text })}`;
  }

  // ------------------------------------------------------------------ display
  draw() {
    close();
    for (const view of this.views.values()) view.end();
    const nodes = this.tree.path();
    this.views = new Map(nodes.map((node) => [node.id, new MessageView(this, node)]));
    this.list.replaceChildren(...[...this.views.values()].map((view) => view.item));
    $("empty").hidden = !this.tree.isEmpty;
    this.meter.show(nodes.findLast((node) => node.took)?.took ?? null);
    this.controls();
    this.toEnd();
  }

  controls() {
    const isBusy = this.running !== null;
    $("send").textContent = isBusy ? "Stop" : "Send";
    $("send").classList.toggle("stop", isBusy);
    this.question.disabled = !this.hasChat;
    $("send").disabled = !this.hasChat;
    for (const button of this.list.querySelectorAll("[data-idle]")) button.disabled = isBusy;
  }

  button(label, onclick, isIdleOnly = true) {
    return el("button", { class: "quiet", onclick, "data-idle": isIdleOnly, disabled: isIdleOnly && this.running !== null }, label);
  }

  branches(node) {
    const [place, number] = this.tree.place(node);
    if (number === 1) return null;
    const turn = (step) => () => {
      this.tree.turn(node, step);
      this.save();
      this.draw();
    };
    const step = (label, sign, by, isEnd) => el("button", { class: "quiet", "aria-label": label, "data-idle": !isEnd, disabled: isEnd || this.running !== null, onclick: turn(by) }, sign);
    return el("span", { class: "branches", role: "group", "aria-label": "Branches" }, step("Branch before", "‹", -1, place === 1), el("span", {}, `${place} / ${number}`), step("Next branch", "›", 1, place === number));
  }

  /** Return fields for the results of the called functions. */
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
