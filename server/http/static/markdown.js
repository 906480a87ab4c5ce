// Markdown as elements, while it streams. Text becomes only text nodes, so a model's output can never be markup of the
// page; links use only http, https and mailto, and nothing is loaded. Every piece of text knows its offset in the
// source, so that it can be matched with its token.

import { colour } from "./code_colours.js";
import { copy, el } from "./dom.js";
import { BLOCK_MATH, formula, mathEnd } from "./math.js";
import { isInUse, unwatch, watch } from "./windowed.js";

const MAX_DEPTH = 12; // nesting of quotes, lists and emphasis; deeper levels are shown as written
const MAX_LABEL = 1000;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+|$)/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|(\d{1,9})[.)])(\s+|$)/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const LINK = /^(https?:\/\/|mailto:)[^\s]+$/i;
const BARE = /^https?:\/\/[^\s<>"')\]]*[^\s<>"')\].,;:!?]/i;
const BREAK = /^<br ?\/?>/i;
const SHIFTED = /^<(sub|sup)>/;
const TASK = /^\[([ xX])\](?=\s|$)/;
const WORD = /[\p{L}\p{N}]/u;
const MAX_MATH_LINES = 60;
const WINDOWED_FROM = 60; // blocks; in a longer text, blocks far from the view are emptied

/**
 * Shows a growing text in `target`. `pieces(text, offsets)` makes the nodes of a text; character i is at offsets[i] of
 * the source. `isWindowed`: empty the blocks of a long text that are far from the visible part.
 */
export class Markdown {
  constructor(target, pieces = (text) => [text], { isWindowed = false } = {}) {
    Object.assign(this, { target, pieces, isWindowed });
    this.done = 0; // the source up to this offset is final
    this.shown = 0; // number of final elements
  }

  /**
   * Show `source`, which begins with the text shown before. Only the last block is rebuilt. `isWhole`: it is complete.
   */
  update(source, isWhole = false) {
    while (this.target.childNodes.length > this.shown) this.target.lastChild.remove();
    const blocks = this.blocks(source, linesOf(source, this.done), isWhole);
    this.target.append(...blocks.map(([node]) => node));
    if (blocks.length > 1) {
      const ended = blocks.slice(0, -1);
      if (this.isWindowed && this.shown + ended.length > WINDOWED_FROM) ended.forEach(([node, start], index) => this.window(source, node, start, blocks[index + 1][1]));
      this.shown += ended.length;
      this.done = blocks.at(-1)[1];
    }
  }

  blocks(source, lines, isWhole) {
    const found = [];
    new Blocks(this.pieces, source, isWhole).read(lines, (node, start) => found.push([node, start]), 0);
    return found;
  }

  /** Empty a block while it is far away. */
  window(source, node, start, end) {
    let shown = node;
    const change = (isNear, height) => {
      if (isNear !== shown.classList.contains("space") || (!isNear && isInUse(shown))) return;
      const next = isNear ? this.blocks(source, linesOf(source.slice(0, end), start), true)[0][0] : el("div", { class: "space" });
      if (!isNear) next.style.height = `${height}px`;
      unwatch(shown);
      shown.replaceWith(next);
      shown = next;
      watch(shown, change);
    };
    watch(shown, change);
  }

  clear() {
    for (const block of this.target.children) unwatch(block);
    this.target.replaceChildren();
    this.done = this.shown = 0;
  }
}

/** Return the lines as [start, end) in the source. */
function linesOf(source, from) {
  const lines = [];
  for (let start = from; start < source.length; ) {
    const found = source.indexOf("\n", start);
    const end = found < 0 ? source.length : found;
    lines.push([start, end]);
    start = end + 1;
  }
  return lines;
}

class Blocks {
  constructor(pieces, source, isWhole) {
    Object.assign(this, { pieces, source, isWhole });
  }

  text([start, end]) {
    return this.source.slice(start, end);
  }

  /** Pass each block of these lines, and its start, to `add`. */
  read(lines, add, depth) {
    for (let at = 0; at < lines.length; ) {
      const first = this.text(lines[at]);
      const start = lines[at][0];
      if (!first.trim()) at++;
      else {
        const [node, next] = this.block(lines, at, first, depth);
        add(node, start);
        at = next;
      }
    }
  }

  block(lines, at, first, depth) {
    const fence = FENCE.exec(first);
    if (fence) return this.code(lines, at, fence);
    const heading = HEADING.exec(first);
    if (heading) return [this.line(`h${Math.min(6, heading[1].length + 1)}`, lines[at], heading[0].length, /\s+#+\s*$/), at + 1];
    if (RULE.test(first)) return [el("hr"), at + 1];
    const math = BLOCK_MATH.test(first) && this.math(lines, at);
    if (math) return math;
    if (depth < MAX_DEPTH && QUOTE.test(first)) return this.quote(lines, at, depth);
    if (depth < MAX_DEPTH && ITEM.test(first)) return this.list(lines, at, depth);
    if (first.includes("|") && at + 1 < lines.length && DIVIDER.test(this.text(lines[at + 1])) && this.text(lines[at + 1]).includes("-")) {
      return this.table(lines, at);
    }
    let end = at + 1;
    while (end < lines.length && !this.endsParagraph(this.text(lines[end]), depth)) end++;
    return [this.inline("p", lines.slice(at, end)), end];
  }

  endsParagraph(line, depth) {
    if (!line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line)) return true;
    if (depth >= MAX_DEPTH) return false;
    const item = ITEM.exec(line);
    return QUOTE.test(line) || (item !== null && item[4] !== "" && (item[3] === undefined || item[3] === "1"));
  }

  code(lines, at, [opening, mark, language]) {
    const indent = opening.length - opening.trimStart().length;
    const closing = new RegExp(`^ {0,3}\\${mark[0]}{${mark.length},}\\s*$`);
    let end = at + 1;
    while (end < lines.length && !closing.test(this.text(lines[end]))) end++;
    const inside = lines.slice(at + 1, end).map(([start, stop]) => {
      const lead = /^ */.exec(this.source.slice(start, stop))[0].length;
      return [start + Math.min(indent, lead), stop];
    });
    const [text, offsets] = this.joined(inside);
    const code = el("code", {}, ...this.pieces(text, offsets));
    // Colours wait for the end of a block: a growing block would be parsed from its start with every word.
    if (end < lines.length || this.isWhole) colour(code, text, offsets, this.pieces, language.toLowerCase());
    const button = el("button", { class: "quiet", onclick: () => copy(text, button) }, "Copy");
    const head = el("div", { class: "code-head" }, el("span", {}, language || "text"), button);
    return [el("div", { class: "code" }, head, el("pre", { tabindex: "0" }, code)), Math.min(end + 1, lines.length)];
  }

  /** Return a formula that begins a line and may span several, or null if it does not end. */
  math(lines, at) {
    const [text, offsets] = this.joined(lines.slice(at, at + MAX_MATH_LINES));
    const lead = text.length - text.trimStart().length;
    const end = mathEnd(text, lead, text.length);
    const rest = end && text.indexOf("\n", end[1]);
    if (!end || text.slice(end[1], rest < 0 ? undefined : rest).trim()) return null;
    const node = el("p", {}, formula(text.slice(lead, end[1]), text.slice(...end[0]), true, () => this.pieces(text.slice(lead, end[1]), offsets.slice(lead, end[1]))));
    return [node, at + text.slice(0, end[1]).split("\n").length];
  }

  quote(lines, at, depth) {
    let end = at;
    const inside = [];
    for (; end < lines.length && QUOTE.test(this.text(lines[end])); end++) {
      inside.push([lines[end][0] + QUOTE.exec(this.text(lines[end]))[0].length, lines[end][1]]);
    }
    const made = el("blockquote");
    this.read(inside, (node) => made.append(node), depth + 1);
    return [made, end];
  }

  list(lines, at, depth) {
    const first = ITEM.exec(this.text(lines[at]));
    const isOrdered = first[3] !== undefined;
    const made = el(isOrdered ? "ol" : "ul", { start: isOrdered && first[3] !== "1" ? first[3] : null });
    while (at < lines.length) {
      const mark = ITEM.exec(this.text(lines[at]));
      if (!mark || (mark[3] !== undefined) !== isOrdered || RULE.test(this.text(lines[at]))) break;
      const width = mark[1].length + mark[2].length + (mark[4].length > 4 ? 1 : Math.max(1, mark[4].length));
      const inside = [[Math.min(lines[at][0] + width, lines[at][1]), lines[at][1]]];
      for (at++; at < lines.length; at++) {
        const line = this.text(lines[at]);
        const lead = line.length - line.trimStart().length;
        if (!line.trim()) {
          const next = lines.slice(at + 1).find((each) => this.text(each).trim());
          const belongs = next && /^ */.exec(this.text(next))[0].length >= Math.min(2, width);
          if (!belongs && !(next && ITEM.test(this.text(next)))) break;
        } else if (lead < Math.min(2, width) && (ITEM.test(line) || this.endsParagraph(line, depth) || !this.text(lines[at - 1]).trim())) break;
        inside.push([Math.min(lines[at][0] + Math.min(lead, width), lines[at][1]), lines[at][1]]);
      }
      made.append(this.item(inside, depth));
    }
    return [made, at];
  }

  /** Return a list item. A single paragraph is added without its <p>. An item that begins with [ ] or [x] has a box. */
  item(inside, depth) {
    const nodes = [];
    const task = TASK.exec(this.text(inside[0]));
    const made = el("li", { class: task ? "task" : null });
    if (task) {
      const isDone = task[1] !== " ";
      made.append(el("input", { type: "checkbox", disabled: true, checked: isDone, "aria-label": isDone ? "Done" : "Not done" }));
      inside[0] = [inside[0][0] + 3, inside[0][1]];
    }
    this.read(inside, (node) => nodes.push(node), depth + 1);
    if (nodes[0]?.tagName === "P") made.append(...nodes.shift().childNodes);
    made.append(...nodes);
    return made;
  }

  table(lines, at) {
    const aligned = this.cells(lines[at + 1]).map((cell) => {
      const rule = this.text(cell).trim();
      return rule.endsWith(":") ? (rule.startsWith(":") ? "center" : "right") : null;
    });
    const row = (line, tag) =>
      el("tr", {}, ...this.cells(line).map((cell, column) => {
        const made = this.inline(tag, [cell]);
        if (aligned[column]) made.classList.add(aligned[column]);
        return made;
      }));
    const body = el("tbody");
    let end = at + 2;
    for (; end < lines.length && this.text(lines[end]).includes("|"); end++) body.append(row(lines[end], "td"));
    const table = el("table", {}, el("thead", {}, row(lines[at], "th")), body);
    return [el("div", { class: "table", tabindex: "0" }, table), end];
  }

  /** Return the cells of a table row as ranges, without the surrounding space. */
  cells([start, end]) {
    const found = [];
    let from = start;
    const add = (to) => {
      let [left, right] = [from, to];
      while (left < right && this.source[left] === " ") left++;
      while (right > left && this.source[right - 1] === " ") right--;
      found.push([left, right]);
      from = to + 1;
    };
    for (let at = start; at < end; at++) {
      if (this.source[at] === "\\") at++;
      else if (this.source[at] === "|") add(at);
    }
    if (from < end) add(end);
    const isEmpty = ([left, right]) => left === right;
    return isEmpty(found[0]) ? found.slice(1) : found;
  }

  line(tag, [start, end], skip, closing) {
    const tail = closing.exec(this.source.slice(start + skip, end));
    return this.inline(tag, [[Math.min(start + skip, end), tail ? start + skip + tail.index : end]]);
  }

  inline(tag, lines) {
    const made = el(tag);
    new Inline(this.pieces, ...this.joined(lines)).read(made, 0, Infinity, 0);
    return made;
  }

  /** Return the lines as one text, and the source offset of each character. */
  joined(lines) {
    let text = "";
    const offsets = [];
    lines.forEach(([start, end], index) => {
      if (index) {
        text += "\n";
        offsets.push(lines[index - 1][1]);
      }
      text += this.source.slice(start, end);
      for (let at = start; at < end; at++) offsets.push(at);
    });
    return [text, offsets];
  }
}

class Inline {
  constructor(pieces, text, offsets) {
    this.pieces = pieces;
    this.text = text;
    this.offsets = offsets;
    this.missing = {}; // marks known not to close before an end, so that they are not searched again
  }

  read(parent, from, to, depth) {
    const end = Math.min(to, this.text.length);
    let plain = from;
    const flush = (until) => this.plain(parent, plain, until);
    for (let at = from; at < end; ) {
      const found = this.markup(at, end, depth);
      if (!found) {
        at++;
        continue;
      }
      flush(at);
      const [node, inside, next] = found;
      if (node) parent.append(node);
      if (inside) this.read(node, ...inside, depth + 1);
      plain = found[3] ?? next;
      at = next;
    }
    flush(end);
  }

  plain(parent, from, to) {
    if (from < to) parent.append(...this.pieces(this.text.slice(from, to), this.offsets.slice(from, to)));
  }

  /** Return the markup that begins here: [element, inner range, end, start of the following text], or null. */
  markup(at, end, depth) {
    const character = this.text[at];
    if (character === "$" || character === "\\") {
      const math = this.math(at, end);
      if (math) return math;
    }
    if (character === "\\" && at + 1 < end && /[\n!-/:-@[-`{-~]/.test(this.text[at + 1])) return [null, null, at + 2, at + 1];
    if (character === "`") return this.codeSpan(at, end);
    const lineEnd = character === "<" && BREAK.exec(this.text.slice(at, Math.min(end, at + 8)));
    if (lineEnd) return [el("br"), null, at + lineEnd[0].length];
    if (depth >= MAX_DEPTH) return null;
    if (character === "*" || character === "_" || character === "~") return this.emphasis(at, end, character);
    if (character === "[") return this.link(at, at, end);
    if (character === "!" && this.text[at + 1] === "[") return this.link(at, at + 1, end);
    const shift = character === "<" && SHIFTED.exec(this.text.slice(at, Math.min(end, at + 5)));
    if (shift) return this.shifted(at, end, shift[1]);
    if (character === "<" || character === "h") return this.bareLink(at, end, character === "<");
    return null;
  }

  math(at, end) {
    const found = mathEnd(this.text, at, end);
    if (!found) return null;
    const [inside, next] = found;
    const whole = this.text.slice(at, next);
    return [formula(whole, this.text.slice(...inside), /^(\$\$|\\\[)/.test(whole), () => this.pieces(whole, this.offsets.slice(at, next))), null, next];
  }

  codeSpan(at, end) {
    const mark = /^`+/.exec(this.text.slice(at, Math.min(end, at + 100)))[0];
    for (let close = this.find(mark, at + mark.length, end); close >= 0; ) {
      let last = close;
      while (this.text[last] === "`") last++;
      if (last - close === mark.length) {
        const node = el("code");
        this.plain(node, at + mark.length, close);
        return [node, null, last];
      }
      close = this.text.indexOf(mark, last);
      if (close >= end) break;
    }
    return [null, null, at + mark.length, at];
  }

  /** Return `<sub>` or `<sup>`, which models use since Markdown has no such mark: no attributes, and closed. */
  shifted(at, end, tag) {
    const from = at + tag.length + 2;
    const close = this.find(`</${tag}>`, from, end);
    return close > from ? [el(tag), [from, close], close + tag.length + 3] : null;
  }

  emphasis(at, end, character) {
    let size = 1;
    while (this.text[at + size] === character && size < 3) size++;
    if (character === "~") {
      if (size !== 2) return null;
    } else size = Math.min(size, 2);
    const after = this.text[at + size];
    if (after === undefined || /\s/.test(after)) return null;
    if (character === "_" && at > 0 && WORD.test(this.text[at - 1])) return null;
    const mark = character.repeat(size);
    for (let close = this.find(mark, at + size + 1, end); close >= 0 && close + size <= end; close = this.text.indexOf(mark, close + 1)) {
      if (/\s/.test(this.text[close - 1]) || this.text[close - 1] === "\\") continue;
      if (size === 1 && ((close + 1 < end && this.text[close + 1] === character) || this.text[close - 1] === character)) {
        close++;
        continue;
      }
      if (character === "_" && WORD.test(this.text[close + size] ?? " ")) continue;
      if (size === 2 && this.text[close + size] === character && close + size < end) close++;
      const node = el(character === "~" ? "del" : size === 2 ? "strong" : "em");
      return [node, [at + size, close], close + size];
    }
    this.missing[mark + end] = at;
    return null;
  }

  link(at, open, end) {
    let depth = 0;
    let close = open;
    const limit = Math.min(end, open + MAX_LABEL);
    for (; close < limit; close++) {
      if (this.text[close] === "\\") close++;
      else if (this.text[close] === "[") depth++;
      else if (this.text[close] === "]" && --depth === 0) break;
    }
    if (close >= limit || this.text[close + 1] !== "(") return null;
    const target = /^\(\s*<?([^\s<>]*?)>?(?:\s+["'(][^"')]*["')])?\s*\)/.exec(this.text.slice(close + 1, Math.min(end, close + 2100)));
    if (!target || !LINK.test(target[1])) return null;
    return [anchor(target[1]), [open + 1, close], close + 1 + target[0].length];
  }

  bareLink(at, end, isAngled) {
    if (!isAngled && at > 0 && WORD.test(this.text[at - 1])) return null;
    const found = BARE.exec(this.text.slice(at + (isAngled ? 1 : 0), Math.min(end, at + 2000)));
    if (!found || (isAngled && this.text[at + 1 + found[0].length] !== ">")) return null;
    const node = anchor(found[0]);
    const start = at + (isAngled ? 1 : 0);
    this.plain(node, start, start + found[0].length);
    return [node, null, start + found[0].length + (isAngled ? 1 : 0)];
  }

  /** Return the index of the next such mark before `end`, or -1. */
  find(mark, from, end) {
    if (this.missing[mark + end] <= from) return -1;
    const found = this.text.indexOf(mark, from);
    if (found >= 0 && found < end) return found;
    this.missing[mark + end] = from;
    return -1;
  }
}

const anchor = (address) => el("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" });
