// Conversations as files: JSON with every branch, which can be imported, and Markdown of the visible branch.

import { Conversation, contentOf } from "./conversation.js";

const FORM = "oarlock-conversations";
const ROLES = { user: "Question", assistant: "Answer", tool: "Result of a function", system: "System" };
const IS_TEXT = (value) => typeof value === "string";
const IS_OBJECT = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** Return conversations, given as records of the store, as JSON. */
export function toJson(all) {
  const conversations = all.map(({ conversations: [head], nodes }) => ({
    title: head.title, isNamed: head.isNamed, chosen: head.chosen,
    messages: nodes.map(({ id, parent, role, content, reasoning, calls, callId, files, chosen, finish, took, model }) => ({ id, parent, role, content, reasoning, calls, callId, files, chosen, finish, took, model })),
  }));
  return JSON.stringify({ form: FORM, version: 1, conversations }, null, 1);
}

export function toMarkdown(records) {
  const tree = new Conversation(records);
  const parts = [`# ${tree.head.title}`];
  for (const node of tree.path()) {
    parts.push(`## ${ROLES[node.role]}`, contentOf(node));
    for (const call of node.calls ?? []) parts.push(`Calls \`${call.name}\`:\n\n\`\`\`json\n${call.arguments}\n\`\`\``);
  }
  return parts.join("\n\n") + "\n";
}

/**
 * Return the conversations of a file, as records with new ids. A list of messages in the API's format is one
 * conversation. Throws an `Error` that describes the fault of the file.
 */
export function fromJson(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  const messages = Array.isArray(found) ? found : found?.messages;
  const list = found?.form === FORM ? found.conversations : Array.isArray(messages) ? [{ messages: chained(messages) }] : null;
  if (!Array.isArray(list)) throw new Error(`The file has neither "form": "${FORM}" nor a list of messages.`);
  const all = list.map((each, index) => recordsOf(each, `Conversation ${index + 1}`)).filter((records) => records.conversations.length);
  if (!all.length) throw new Error("The file contains no message.");
  return all;
}

const chained = (messages) => messages.map((message, index) => IS_OBJECT(message) && ({ ...message, id: String(index), parent: index ? String(index - 1) : "" }));

function recordsOf(given, name) {
  const tree = new Conversation();
  const ids = new Map([["", ""]]);
  const chosen = new Map([["", given?.chosen]]);
  if (!Array.isArray(given?.messages)) throw new Error(`${name} has no list "messages".`);
  for (const [index, message] of given.messages.entries()) {
    const where = `Message ${index + 1} of ${name.toLowerCase()}`;
    if (!IS_OBJECT(message)) throw new Error(`${where} is not an object.`);
    if (!ids.has(message.parent)) throw new Error(`${where} has a parent that does not come before it.`);
    if (!IS_TEXT(message.role) || !Object.hasOwn(ROLES, message.role)) throw new Error(`${where} has the role ${JSON.stringify(message.role)}; known are ${Object.keys(ROLES).join(", ")}.`);
    const content = message.content ?? "";
    if (!IS_TEXT(content)) throw new Error(`${where} has a content that is not text.`);
    ids.set(message.id, tree.add(ids.get(message.parent), message.role, fieldsOf(message, content)).id);
    chosen.set(message.id, message.chosen);
  }
  for (const [old, id] of ids) if (ids.has(chosen.get(old))) tree.nodes.get(id).chosen = ids.get(chosen.get(old));
  if (given.isNamed && IS_TEXT(given.title)) tree.rename(given.title);
  return tree.changes() ?? { conversations: [], nodes: [], tokens: [] };
}

function fieldsOf(message, content) {
  const text = (value) => (IS_TEXT(value) ? value : "");
  if (message.role === "tool") return { content, callId: text(message.callId ?? message.tool_call_id) };
  const list = (value) => (Array.isArray(value) ? value.filter(IS_OBJECT) : []);
  if (message.role !== "assistant") return { content, files: list(message.files).map((file) => ({ name: text(file.name), text: text(file.text) })) };
  const calls = list(message.calls ?? message.tool_calls).map((call) => ({ id: text(call.id), name: text(call.name ?? call.function?.name), arguments: text(call.arguments ?? call.function?.arguments) }));
  const took = message.took && Object.fromEntries(Object.entries(message.took).filter(([, value]) => typeof value === "number"));
  return { content, calls, reasoning: text(message.reasoning ?? message.reasoning_content), finish: text(message.finish) || null, error: null, took: took ?? null, opensThinking: false, model: text(message.model) || null };
}
