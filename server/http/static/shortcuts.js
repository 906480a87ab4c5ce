// The keyboard shortcuts of the page, in a dialog.

import { el } from "./dom.js";

const KEYS = [
  ["Message", [["Enter", "send"], ["Shift+Enter", "start a line"], ["Escape", "close what is open, then stop the answer"]]],
  ["An edited question", [["Enter", "send"], ["Shift+Enter", "start a line"], ["Escape", "leave it as it was"]]],
  ["An answer, reached with Tab", [["← →", "go from word to word"], ["Enter or ↓", "go to the alternatives of the word"], ["↑ ↓", "go through them"], ["Enter", "continue from there with this word"], ["Escape", "close them"]]],
  ["Chat, State, Model, reached with Tab", [["← →", "show another"]]],
  ["Everywhere", [["Ctrl+/", "show these keys"]]],
];

export function show() {
  const close = el("button", { class: "primary", onclick: () => dialog.close() }, "Close");
  const rows = ([key, meaning]) => [el("dt", {}, ...key.split(/( or |\+)/).map((part) => (/^( or |\+)$/.test(part) ? part : el("kbd", {}, part)))), el("dd", {}, meaning)];
  const groups = KEYS.map(([title, keys]) => el("section", {}, el("h3", {}, title), el("dl", { class: "keys" }, ...keys.flatMap(rows))));
  const dialog = el("dialog", { class: "wide", "aria-labelledby": "keys-title" }, el("h2", { id: "keys-title" }, "Keys"), ...groups, el("div", { class: "row" }, close));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  close.focus();
}
