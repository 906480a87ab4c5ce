// LaTeX as MathML, which browsers draw and screen readers read. KaTeX is loaded for the first formula.

import { el } from "./dom.js";

const MAX_FORMULA = 4000;
const MAX_TRIES = 8; // candidates for the closing mark
const MAX_KEPT = 500; // drawn formulas
const LIMITS = { output: "mathml", throwOnError: true, strict: "ignore", trust: false, maxSize: 20, maxExpand: 200 };
const VARIANTS = { // where the Latin capitals, small letters and digits begin in Unicode's mathematical alphabets
  bold: [0x1d400, 0x1d41a, 0x1d7ce], italic: [0x1d434, 0x1d44e], "bold-italic": [0x1d468, 0x1d482], script: [0x1d49c, 0x1d4b6],
  fraktur: [0x1d504, 0x1d51e], "double-struck": [0x1d538, 0x1d552, 0x1d7d8], "sans-serif": [0x1d5a0, 0x1d5ba, 0x1d7e2],
  "bold-sans-serif": [0x1d5d4, 0x1d5ee, 0x1d7ec], monospace: [0x1d670, 0x1d68a, 0x1d7f6],
};
const EARLIER = { // letters that had a place before these alphabets
  "\u{1d455}": "ℎ", "\u{1d49d}": "ℬ", "\u{1d4a0}": "ℰ", "\u{1d4a1}": "ℱ", "\u{1d4a3}": "ℋ", "\u{1d4a4}": "ℐ", "\u{1d4a7}": "ℒ", "\u{1d4a8}": "ℳ",
  "\u{1d4ad}": "ℛ", "\u{1d4ba}": "ℯ", "\u{1d4bc}": "ℊ", "\u{1d4c4}": "ℴ", "\u{1d506}": "ℭ", "\u{1d50b}": "ℌ", "\u{1d50c}": "ℑ", "\u{1d515}": "ℜ",
  "\u{1d51d}": "ℨ", "\u{1d53a}": "ℂ", "\u{1d53f}": "ℍ", "\u{1d545}": "ℕ", "\u{1d547}": "ℙ", "\u{1d548}": "ℚ", "\u{1d549}": "ℝ", "\u{1d551}": "ℤ",
};

/** Matches a line that begins with a display formula. */
export const BLOCK_MATH = /^\s{0,3}(\$\$|\\\[)/;

let katex = null;
let loading = null;
let stretch = null;
const made = new Map(); // source of a formula -> MathML

/**
 * Return the formula that begins at `at`: [inner range, end], or null. A `$` before a space, and a `$` that closes
 * after a space or before a digit, are money.
 */
export function mathEnd(text, at, end) {
  const closing = { $$: "$$", "\\(": "\\)", "\\[": "\\]" }[text.slice(at, at + 2)] ?? (text[at] === "$" ? "$" : null);
  const isPlain = closing === "$";
  const from = at + (isPlain ? 1 : 2);
  if (!closing || (isPlain && isSpace(text[from]))) return null;
  const limit = Math.min(end, from + MAX_FORMULA);
  const near = text.slice(from, limit);
  let to = from - 1;
  for (let tries = 0; tries < MAX_TRIES; tries++) {
    const found = near.indexOf(closing, to + 1 - from);
    if (found < 0) return null;
    to = from + found;
    if (closing[0] === "$" && text[to - 1] === "\\") continue;
    if (to === from || (isPlain && (isSpace(text[to - 1]) || /\d/.test(text[to + 1] ?? "")))) continue;
    return [[from, to], to + closing.length];
  }
  return null;
}

const isSpace = (character) => character === undefined || /\s/.test(character);

/** Return an element with a formula. Until it is drawn, or if it is wrong, `nodes()` shows it as written. */
export function formula(whole, source, isDisplay, nodes) {
  const place = el("span", { class: isDisplay ? "math display" : "math" });
  if (katex) draw(place, whole, source, isDisplay, nodes);
  else {
    place.append(...nodes());
    load().then(() => place.isConnected && draw(place, whole, source, isDisplay, nodes));
  }
  return place;
}

function load() {
  loading ??= Promise.all([import("./vendor/katex.min.js"), import("./math_stretch.js")]).then(([, stretching]) => {
    stretch = stretching.stretch;
    katex = self.katex;
  });
  return loading;
}

function draw(place, whole, source, isDisplay, nodes) {
  if (!made.has(whole)) {
    if (made.size >= MAX_KEPT) made.clear();
    made.set(whole, mathml(source, isDisplay));
  }
  const found = made.get(whole);
  if (found.problem) place.title = found.problem;
  place.replaceChildren(...(found.element ? [found.element.cloneNode(true)] : nodes()));
  if (found.element) stretch(place.firstChild);
}

function mathml(source, isDisplay) {
  const holder = document.createElement("span");
  try {
    katex.render(source, holder, { ...LIMITS, displayMode: isDisplay });
  } catch (error) {
    return { problem: error.message };
  }
  for (const letter of holder.querySelectorAll("[mathvariant]")) useAlphabet(letter);
  return { element: holder.querySelector("math") };
}

/** Replace `mathvariant`, of which browsers support only `normal`, by the letters of that alphabet. */
function useAlphabet(letter) {
  const starts = VARIANTS[letter.getAttribute("mathvariant")];
  if (!starts) return;
  letter.removeAttribute("mathvariant");
  letter.textContent = letter.textContent.replace(/[A-Za-z0-9]/g, (character) => {
    const [start, first] = character <= "9" ? [starts[2], "0"] : character <= "Z" ? [starts[0], "A"] : [starts[1], "a"];
    if (start === undefined) return character;
    const found = String.fromCodePoint(start + character.charCodeAt(0) - first.charCodeAt(0));
    return EARLIER[found] ?? found;
  });
}
