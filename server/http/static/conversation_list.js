// The list of conversations in the side bar: search, rename, delete, undo, export and import.

import { $, download, el, notice, pickFile, plural } from "./dom.js";
import { fromJson, toJson, toMarkdown } from "./transfer.js";

const WAIT_MS = 150; // after the last key of a search

export class ConversationList {
  /** `open(id)` shows a conversation; `opened()` returns the id of the current one. */
  constructor(store, { open, opened }) {
    Object.assign(this, { store, open, opened });
    this.list = $("conversation-list");
    this.search = $("search");
    this.search.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.refresh(), WAIT_MS);
    });
    $("export-all").addEventListener("click", () => this.exportAll());
    $("import").addEventListener("click", async () => this.import(await pickFile(".json,application/json")));
    const box = $("keep-nothing");
    box.checked = store.keepsNothing;
    box.addEventListener("change", async () => {
      await store.keepNothing(box.checked);
      notice(box.checked ? "The saved conversations are deleted. New ones end with this tab." : "Conversations are saved in this browser again.");
    });
    this.refresh();
  }

  async refresh() {
    const number = (this.number = (this.number ?? 0) + 1);
    const wanted = this.search.value.trim();
    const [all, found] = await Promise.all([this.store.list(), wanted ? this.store.search(wanted) : null]);
    if (number !== this.number) return; // another refresh has begun meanwhile
    this.isDue = this.list.querySelector("details[open], input:enabled") !== null;
    if (this.isDue) return; // new rows would close an open menu or discard a half-written title
    const shown = all.filter((head) => !found || found.has(head.id));
    this.list.replaceChildren(...shown.map((head) => this.row(head)));
    $("no-conversations").hidden = shown.length > 0;
    $("no-conversations").textContent = wanted ? "Nothing found." : "None yet.";
  }

  /** Mark the current conversation. */
  mark() {
    for (const row of this.list.children) row.firstChild.setAttribute("aria-current", row.dataset.id === this.opened());
  }

  row(head) {
    const title = head.title || "Untitled";
    const choose = el("button", { class: "title", "aria-current": String(head.id === this.opened()), title, onclick: () => this.open(head.id) }, title);
    const more = el("details", { class: "more" },
      el("summary", { "aria-label": `More for ${title}` }, "⋯"),
      el("div", { class: "choices", onclick: () => (more.open = false) },
        el("button", { onclick: () => this.rename(head, row) }, "Rename"),
        el("button", { onclick: () => this.export(head, "json") }, "As JSON"),
        el("button", { onclick: () => this.export(head, "md") }, "As Markdown"),
        el("button", { onclick: () => this.delete(head) }, "Delete")));
    more.addEventListener("focusout", () => setTimeout(() => more.contains(document.activeElement) || (more.open = false), 150));
    more.addEventListener("toggle", () => !more.open && this.isDue && this.refresh());
    more.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !more.open) return;
      event.stopPropagation();
      more.open = false;
      more.firstChild.focus();
    });
    const row = el("li", { "data-id": head.id }, choose, more);
    return row;
  }

  rename(head, row) {
    const field = el("input", { type: "text", "aria-label": "Title", maxlength: "200" });
    field.value = head.title;
    let isDone = false;
    const end = async (isWanted) => {
      if (isDone) return;
      isDone = true;
      field.disabled = true;
      const title = field.value.trim();
      if (isWanted && title) await this.store.put({ conversations: [{ ...head, title, isNamed: true }] });
      if (isWanted && title) this.renamed?.(head.id, title);
      await this.refresh();
    };
    field.addEventListener("blur", () => end(true));
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true);
      if (event.key !== "Escape") return;
      event.stopPropagation();
      end(false);
    });
    row.replaceChildren(field);
    field.select();
  }

  async delete(head) {
    const isOpen = this.opened() === head.id;
    const gone = await this.store.delete(head.id);
    if (isOpen) this.open(null, true);
    await this.refresh();
    notice(`“${head.title || "Untitled"}” is deleted.`, "Undo", async () => {
      await this.store.put(gone);
      await this.refresh();
      if (isOpen) this.open(head.id);
    });
  }

  async export(head, ending) {
    const records = await this.store.load(head.id);
    const name = head.title.replace(/[^\p{L}\p{N} ._-]+/gu, "").replace(/^[ .]+/, "").slice(0, 60).trim() || "conversation";
    if (ending === "md") download(`${name}.md`, toMarkdown(records), "text/markdown");
    else download(`${name}.json`, toJson([records]), "application/json");
  }

  async exportAll() {
    const all = await this.store.list();
    if (!all.length) return notice("There is no conversation to export yet.");
    download("conversations.json", toJson(await Promise.all(all.map((head) => this.store.load(head.id)))), "application/json");
  }

  async import(file) {
    let found;
    try {
      found = fromJson(await file.text());
    } catch (error) {
      notice(`${file.name}: ${error.message}`);
      return;
    }
    const kept = [];
    for (const records of found) if (await this.store.put(records)) kept.push(records);
    await this.refresh();
    if (kept.length < found.length) return notice(`The storage of this browser is full: ${kept.length} of ${plural(found.length, "conversation")} were imported.`);
    notice(found.length === 1 ? "One conversation was imported." : `${found.length} conversations were imported.`);
    if (found.length === 1) this.open(found[0].conversations[0].id);
  }
}
