// Syntax colours: highlight.js parses the code, and its tree becomes spans around the existing words. It is loaded with
// the first block of code, and a language with the first block in that language.

import { el } from "./dom.js";

const MAX_CHARACTERS = 100_000;
const LANGUAGES = {
  bash: "bash", sh: "bash", shell: "bash", zsh: "bash", console: "bash", c: "c", h: "c", cpp: "cpp", "c++": "cpp", cc: "cpp", hpp: "cpp",
  css: "css", diff: "diff", patch: "diff", go: "go", golang: "go", java: "java", javascript: "javascript", js: "javascript", jsx: "javascript",
  json: "json", jsonl: "json", markdown: "markdown", md: "markdown", python: "python", py: "python", python3: "python", rust: "rust", rs: "rust",
  sql: "sql", typescript: "typescript", ts: "typescript", tsx: "typescript", xml: "xml", html: "xml", svg: "xml", yaml: "yaml", yml: "yaml",
};
const NEEDED = { cpp: ["c"], xml: ["css", "javascript"], markdown: ["xml"], typescript: ["javascript"] };

let core = null;
const loaded = new Map(); // name of a language -> promise
const ready = new Set();

/** Colour `code`, which shows `text`; character i of the text is at offsets[i] of the source. */
export function colour(code, text, offsets, pieces, name) {
  const language = Object.hasOwn(LANGUAGES, name) ? LANGUAGES[name] : null;
  if (!language || !text || text.length > MAX_CHARACTERS) return;
  const draw = () => code.replaceChildren(...spans(core.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode, text, offsets, pieces));
  if (ready.has(language)) draw();
  else load(language).then(() => code.isConnected && draw());
}

function load(language) {
  if (!loaded.has(language)) loaded.set(language, loadNow(language));
  return loaded.get(language);
}

async function loadNow(language) {
  const [{ default: found }, { default: grammar }] = await Promise.all([import("./vendor/highlight.min.js"), import(`./vendor/highlight-${language}.min.js`)]);
  await Promise.all((NEEDED[language] ?? []).map(load));
  core ??= found;
  core.registerLanguage(language, grammar);
  ready.add(language);
}

/** Return the nodes of a tree of scopes and strings; the strings together are `text`. */
function spans(tree, text, offsets, pieces) {
  let at = 0;
  const nodesOf = (branch) =>
    branch.children.flatMap((child) => {
      if (typeof child !== "string") return el("span", { class: /^\w+/.test(child.scope) ? `code-${/^\w+/.exec(child.scope)[0]}` : null }, ...nodesOf(child));
      const start = at;
      at += child.length;
      return pieces(text.slice(start, at), offsets.slice(start, at));
    });
  return nodesOf(tree);
}
