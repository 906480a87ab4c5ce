// Alternatives of a token: a menu next to the word, with probabilities, for mouse, touch and keyboard.

import { announce, el } from "./dom.js";

const DELAY_MS = 140;
let menu = null; // {element, word, owner}
let timer = 0;

/** Return the text of a token with visible spaces and line ends. */
const visible = (text) => (text.trim() === text && text !== "" ? text : text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣"));
const percent = (p) => (p >= 0.0995 ? `${(100 * p).toFixed(0)} %` : p >= 0.00095 ? `${(100 * p).toFixed(1)} %` : "< 0.1 %");

const HEAT = [0.9, 0.5, 0.2, 0.05, 0.005]; // bounds between the colours of a heat map

/** Return the class of a probability in a heat map: `p0` is likely, `p5` unlikely. */
export const heatOf = (p) => `p${HEAT.filter((bound) => p < bound).length}`;

const likeliness = (token) => heatOf(token.others.find((other) => other.isTaken)?.p ?? 1);

/** Return the colours of a heat map and their probabilities. */
export function legend() {
  const percents = HEAT.map((bound) => String(100 * bound));
  const texts = [`≥ ${percents[0]} %`, ...percents.slice(1).map((low, index) => `${low}–${percents[index]} %`), `< ${percents.at(-1)} %`];
  return el("p", { class: "heat heat-legend", role: "note", "aria-label": "Colours of probabilities" }, el("span", {}, "Probability of each token:"), ...texts.map((text, index) => el("span", { class: `p${index}` }, text)));
}

/** Return the nodes of a text, with a span for each token. Character i of the text is at offsets[i] of the response. */
export function words(tokens, base, text, offsets) {
  const made = [];
  let number = 0;
  for (let low = 0, high = tokens.length; low < high; ) {
    number = (low + high) >> 1;
    if (tokens[number].end <= offsets[0] + base) low = ++number;
    else high = number;
  }
  for (let from = 0; from < text.length; ) {
    while (number < tokens.length && tokens[number].end <= offsets[from] + base) number++;
    let to = from + 1;
    if (number >= tokens.length) to = text.length;
    else while (to < text.length && offsets[to] + base < tokens[number].end) to++;
    const piece = text.slice(from, to);
    if (number >= tokens.length) made.push(piece);
    else made.push(el("span", { class: `word${tokens[number].isChosen ? " chosen" : ""} ${likeliness(tokens[number])}`, "data-token": number }, piece));
    from = to;
  }
  return made;
}

/**
 * Make the words inside `owner` show their alternatives. `tokenOf(index)` is a token of the response, or null;
 * `choose(index, other)` continues with another token; `isBusy()` is true while no token can be chosen.
 */
export function attach(owner, { tokenOf, choose, isBusy }) {
  const open = (word, takesFocus) => {
    const token = tokenOf(Number(word.dataset.token));
    if (token) show(word, owner, token, (other) => choose(Number(word.dataset.token), other), isBusy, takesFocus);
  };
  owner.addEventListener("pointerover", (event) => {
    const word = event.target.closest(".word");
    if (!word || event.pointerType === "touch" || menu?.word === word || isSelecting(event)) return;
    clearTimeout(timer);
    timer = setTimeout(() => word.isConnected && !isSelecting() && open(word, false), DELAY_MS);
  });
  owner.addEventListener("pointerout", (event) => event.pointerType !== "touch" && leave());
  owner.addEventListener("click", (event) => {
    const word = event.target.closest(".word");
    if (word && !event.target.closest("a, button") && !isSelecting()) open(word, false);
  });
  owner.addEventListener("keydown", (event) => {
    if (event.target !== owner || event.ctrlKey || event.metaKey || event.altKey) return;
    const list = [...owner.querySelectorAll(".word")];
    const at = list.findIndex((word) => word === menu?.word);
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step && list.length) {
      event.preventDefault();
      const word = list[at < 0 ? (step > 0 ? 0 : list.length - 1) : Math.max(0, Math.min(list.length - 1, at + step))];
      word.scrollIntoView({ block: "nearest" });
      open(word, false);
      const token = tokenOf(Number(word.dataset.token));
      const taken = token?.others.find((other) => other.isTaken);
      if (taken) announce(`${visible(word.textContent)}, ${percent(taken.p)}. Enter shows ${token.others.length - 1} alternatives.`);
    } else if ((event.key === "Enter" || event.key === "ArrowDown") && menu) {
      event.preventDefault();
      menu.element.querySelector("button:not([disabled])")?.focus();
    }
  });
  owner.addEventListener("blur", () => setTimeout(() => !menu?.element.contains(document.activeElement) && close(), 0));
}

/** Return whether text is being selected, or is selected: then no menu opens. */
const isSelecting = (event = null) => Boolean(event?.buttons) || !getSelection().isCollapsed;

function leave() {
  clearTimeout(timer);
  timer = setTimeout(close, 260);
}

/** Close the menu, if it is open. */
export function close() {
  clearTimeout(timer);
  if (!menu) return;
  menu.word.classList.remove("open");
  menu.element.remove();
  menu = null;
}

function show(word, owner, token, choose, isBusy, takesFocus) {
  close();
  const rows = token.others.map((other) => {
    const reason = other.isTaken ? "the current word" : !token.isWhole || other.text === null ? "a part of a character" : isBusy() ? "the answer is still being written" : null;
    const shown = other.text === null ? other.name : visible(other.text);
    const bar = el("span", { class: "bar" });
    bar.style.setProperty("--p", Math.min(1, other.p).toFixed(4));
    const button = el(
      "button",
      { role: "menuitem", disabled: reason !== null, class: other.isTaken ? "taken" : "", title: reason ?? "Continue from here with this word", "aria-label": `${shown}, ${percent(other.p)}${other.isTaken ? ", taken" : ""}`, onclick: () => (close(), choose(other)) },
      bar, el("span", { class: "text" }, shown), el("span", { class: "percent" }, percent(other.p)),
    );
    return el("li", { role: "none" }, button);
  });
  const element = el("div", { class: "menu" }, el("ul", { role: "menu", "aria-label": `Alternatives to ${visible(word.textContent)}` }, ...rows), el("p", {}, "before temperature; click a word to continue"));
  element.addEventListener("pointerenter", () => clearTimeout(timer));
  element.addEventListener("pointerleave", leave);
  element.addEventListener("keydown", (event) => moveIn(event, owner));
  document.body.append(element);
  place(element, word);
  word.classList.add("open");
  menu = { element, word, owner };
  if (takesFocus) element.querySelector("button:not([disabled])")?.focus();
}

function moveIn(event, owner) {
  const buttons = [...menu.element.querySelectorAll("button:not([disabled])")];
  const at = buttons.indexOf(document.activeElement);
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step) buttons[(at + step + buttons.length) % buttons.length].focus();
  else if (event.key === "Escape" || event.key === "Tab") {
    owner.focus();
    close();
  } else return;
  event.preventDefault();
  event.stopPropagation();
}

/** Place the menu above the word if there is room, otherwise below, and inside the window. */
function place(element, word) {
  const at = word.getClientRects()[0] ?? word.getBoundingClientRect();
  const { width, height } = element.getBoundingClientRect();
  const left = Math.max(8, Math.min(innerWidth - width - 8, at.left - 12));
  const top = at.top - height - 6 > 8 ? at.top - height - 6 : at.bottom + 6;
  element.style.left = `${left}px`;
  element.style.top = `${top}px`;
}

document.addEventListener("pointerdown", (event) => {
  if (menu && !menu.element.contains(event.target) && !event.target.closest(".word")) close();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && menu) {
    close();
    event.stopImmediatePropagation();
  }
}, true);
document.addEventListener("selectionchange", () => isSelecting() && close());
addEventListener("resize", close);
addEventListener("scroll", close, true);
