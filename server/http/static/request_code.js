// A request as a program: for curl, for Python with OpenAI's client, for JavaScript.

import { base, getKey } from "./api.js";
import { copy, el } from "./dom.js";

// Parameters of OpenAI's Python client; others are passed in its extra_body.
const KNOWN = new Set(["model", "messages", "temperature", "top_p", "max_completion_tokens", "seed", "presence_penalty", "frequency_penalty", "stop", "tools", "response_format", "logprobs", "top_logprobs", "n", "reasoning_effort", "tool_choice", "logit_bias"]);
const OF_STREAMS = ["stream", "stream_options", "return_progress"];

/** Return `body` without the parameters of streams, as [name, text] for each language. */
export function programs(body) {
  const plain = Object.fromEntries(Object.entries(body).filter(([name]) => !OF_STREAMS.includes(name)));
  return [["curl", curl(plain)], ["Python", python(plain)], ["JavaScript", javascript(plain)]];
}

const address = () => new URL("v1/chat/completions", base).href;
const indented = (value, spaces) => JSON.stringify(value, null, 2).replaceAll("\n", `\n${" ".repeat(spaces)}`);

function curl(body) {
  const key = getKey() ? " \\\n  -H \"Authorization: Bearer $OPENAI_API_KEY\"" : "";
  return `curl '${address()}' \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${JSON.stringify(body, null, 2).replaceAll("'", "'\\''")}'`;
}

function python(body) {
  const [named, extra] = [Object.entries(body).filter(([name]) => KNOWN.has(name)), Object.entries(body).filter(([name]) => !KNOWN.has(name))];
  const lines = [...named, ...(extra.length ? [["extra_body", Object.fromEntries(extra)]] : [])].map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`);
  const key = getKey() ? "" : ", api_key=\"none\"";
  return `from openai import OpenAI\n\nclient = OpenAI(base_url=${literal(new URL("v1", base).href)}${key})\nanswer = client.chat.completions.create(\n${lines.join("")})\nprint(answer.choices[0].message.content)\n`;
}

/** Return a value as Python source. JSON strings are valid in Python if they have no lone surrogates. */
function literal(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "string") return JSON.stringify(value.toWellFormed?.() ?? value);
  if (typeof value !== "object") return String(value);
  const inner = `${indent}    `;
  const isList = Array.isArray(value);
  const parts = isList ? value.map((each) => literal(each, inner)) : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each, inner)}`);
  const [open, close] = isList ? "[]" : "{}";
  return parts.length ? `${open}\n${parts.map((part) => `${inner}${part},\n`).join("")}${indent}${close}` : open + close;
}

function javascript(body) {
  const key = getKey() ? ", Authorization: `Bearer ${process.env.OPENAI_API_KEY}`" : "";
  return `const response = await fetch(${JSON.stringify(address())}, {\n  method: "POST",\n  headers: { "Content-Type": "application/json"${key} },\n  body: JSON.stringify(${indented(body, 2)}),\n});\nconst answer = await response.json();\nconsole.log(answer.choices[0].message.content);\n`;
}

/** Show a request in a dialog. */
export function show(body) {
  const code = el("code");
  const choices = programs(body).map(([name, text]) => {
    const button = el("button", { "aria-pressed": "false", onclick: () => {
      for (const each of choices) each.setAttribute("aria-pressed", each === button);
      code.textContent = text;
    } }, name);
    return button;
  });
  const copying = el("button", { onclick: () => copy(code.textContent, copying) }, "Copy");
  const close = el("button", { class: "primary", onclick: () => dialog.close() }, "Close");
  const dialog = el("dialog", { class: "wide", "aria-label": "The request as code" },
    el("h2", {}, "The request as code"), el("p", {}, "The request that the chat would send now, without streaming."),
    el("div", { class: "row choices" }, ...choices), el("pre", { tabindex: "0" }, code), el("div", { class: "row" }, copying, close));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  choices[0].click();
  dialog.showModal();
}
