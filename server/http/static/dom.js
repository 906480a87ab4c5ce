// Elements, storage of this tab, and the clipboard. Text is inserted only as text nodes: no code here parses HTML.

const NOTICE_MS = 12_000; // while neither the pointer nor the focus is on it

export const $ = (id) => document.getElementById(id);

/** Return an element. `on…` properties are listeners, the others attributes; false and null omit an attribute. */
export function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  if (tag === "button") made.type = "button";
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

const memory = new Map(); // used if the browser forbids storage

/**
 * Return the value stored under this name, or null. `where`: sessionStorage, which ends with the tab, or localStorage.
 */
export function recall(name, where = "sessionStorage") {
  try {
    return JSON.parse(window[where].getItem(name));
  } catch {
    return memory.get(name) ?? null;
  }
}

/** Store a value. Returns false if there is no room; then it is kept until the page is left. */
export function keep(name, value, where = "sessionStorage") {
  memory.set(name, value);
  try {
    if (value === null) window[where].removeItem(name);
    else window[where].setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** Copy text; `button` confirms it for a moment. */
export async function copy(text, button) {
  const before = button.textContent;
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copied = copyBySelection(text); // over plain http from another machine there is no clipboard object
  }
  button.textContent = copied ? "Copied" : "Not allowed";
  setTimeout(() => (button.textContent = before), 1200);
}

function copyBySelection(text) {
  const area = el("textarea", { class: "hidden", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}

/** Announce a text to screen readers. */
export function announce(text) {
  $("announcer").textContent = text;
}

/** Show a notice above the views for a while, with a button if there is an action. It covers nothing. */
export function notice(text, label = null, action = null) {
  const place = $("notices");
  let timer = 0;
  let pointedAt = false; // :hover would not do: Firefox sets it after its events
  const end = () => {
    clearTimeout(timer);
    shown.remove();
  };
  const wait = () => {
    clearTimeout(timer);
    if (!pointedAt && !shown.matches(":focus-within")) timer = setTimeout(end, NOTICE_MS);
  };
  const point = (event) => {
    pointedAt = event.type === "pointerenter";
    wait();
  };
  const button = label && el("button", { onclick: () => (end(), action()) }, label);
  const shown = el("p", {}, el("span", {}, text), button, el("button", { class: "quiet", "aria-label": "Dismiss", onclick: end }, "×"));
  place.append(shown);
  if (place.children.length > 3) place.firstChild.remove();
  for (const name of ["pointerenter", "pointerleave"]) shown.addEventListener(name, point);
  shown.addEventListener("focusin", wait);
  shown.addEventListener("focusout", () => setTimeout(wait));
  wait();
}

/** Download a text as a file. */
export function download(name, text, type) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Ask the user for a file, or for several. Never resolves if the user chooses none. */
export function pickFile(accept = "", multiple = false) {
  return new Promise((resolve) => {
    const field = el("input", { type: "file", accept: accept || null, multiple });
    field.addEventListener("change", () => resolve(multiple ? [...field.files] : field.files[0]));
    field.click();
  });
}

export const count = (number) => number.toLocaleString("en");

/** Return a number with its noun: "1 token", "3 tokens". */
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

/** Return milliseconds as readable text. */
export function duration(ms) {
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${ms.toFixed(0)} ms` : seconds(ms / 1000);
}

/** Return seconds as readable text, in the unit that leaves two or three digits. */
export function seconds(value) {
  if (value < 120) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min`;
  return value < 172800 ? `${Math.floor(value / 3600)} h` : `${Math.floor(value / 86400)} d`;
}
