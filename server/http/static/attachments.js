// Text files sent with the next message: chosen by button, pasted, or dropped. Each shows its number of tokens.

import { $, count, el, notice, pickFile, plural } from "./dom.js";
import { countTokens } from "./meter.js";

const MAX_BYTES = 4 << 20;
const LONG_PASTE = 4000; // characters; a longer pasted text becomes a file

export class Attachments {
  /** `changed` is called when the list of files changes. */
  constructor(changed) {
    Object.assign(this, { files: [], changed, place: $("files") });
    $("attach").addEventListener("click", async () => this.addAll(await pickFile("", true)));
    $("question").addEventListener("paste", (event) => this.pasted(event));
    const chat = $("chat");
    chat.addEventListener("dragover", (event) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      chat.classList.add("dropping");
    });
    for (const end of ["dragleave", "drop"]) chat.addEventListener(end, (event) => (end === "drop" || !chat.contains(event.relatedTarget)) && chat.classList.remove("dropping"));
    chat.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.addAll([...event.dataTransfer.files]);
    });
  }

  pasted(event) {
    const { files } = event.clipboardData;
    const text = event.clipboardData.getData("text/plain");
    if (!files.length && text.length < LONG_PASTE) return;
    event.preventDefault();
    if (files.length) this.addAll([...files]);
    else this.add("pasted text", text);
  }

  async addAll(files) {
    for (const file of files) {
      if (file.size > MAX_BYTES) notice(`${file.name} is larger than ${MAX_BYTES >> 20} MB.`);
      else await this.read(file);
    }
  }

  async read(file) {
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new TypeError("binary");
      this.add(file.name, text);
    } catch {
      notice(`${file.name} is not UTF-8 text. This model reads only text.`);
    }
  }

  add(name, text) {
    const file = { name, text };
    this.files.push(file);
    const size = el("small", {}, "…");
    const remove = el("button", { class: "quiet", "aria-label": `Remove ${name}`, onclick: () => this.remove(file) }, "×");
    file.chip = el("li", {}, el("span", {}, name), size, remove);
    this.place.append(file.chip);
    countTokens(text).then((tokens) => (size.textContent = tokens === null ? `${count(text.length)} characters` : plural(tokens, "token")));
    this.changed();
  }

  remove(file) {
    this.files = this.files.filter((other) => other !== file);
    file.chip.remove();
    this.changed();
    $("question").focus();
  }

  /** Return the files as stored in a message, and clear the list. */
  take() {
    const taken = this.files.map(({ name, text }) => ({ name, text }));
    this.files = [];
    this.place.replaceChildren();
    return taken;
  }
}
