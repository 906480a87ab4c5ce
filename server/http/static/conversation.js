// A conversation as a tree: an edited question or another answer is a branch beside the first one, and none is lost.

import { keep, recall } from "./dom.js";

const NAME = "oarlock-conversation";

export class Conversation {
  constructor() {
    this.clear();
    const kept = recall(NAME);
    if (kept?.nodes?.length) this.nodes = kept.nodes;
  }

  clear() {
    this.nodes = [{ id: 0, parent: null, role: "root", children: [], chosen: null }];
  }

  /** The nodes that are shown, first to last. */
  path() {
    const shown = [];
    for (let node = this.nodes[0]; node.chosen !== null; ) {
      node = this.nodes[node.chosen];
      shown.push(node);
    }
    return shown;
  }

  /** A new node below `parent`, which is shown from now on. */
  add(parent, role, fields) {
    const node = { id: this.nodes.length, parent, role, children: [], chosen: null, ...fields };
    this.nodes.push(node);
    this.nodes[parent].children.push(node.id);
    this.nodes[parent].chosen = node.id;
    return node;
  }

  /** The last node that is shown. */
  end() {
    return this.path().at(-1) ?? this.nodes[0];
  }

  /** Show another branch beside this node: `step` 1 is the next one, -1 the one before. */
  turn(node, step) {
    const siblings = this.nodes[node.parent].children;
    this.nodes[node.parent].chosen = siblings[siblings.indexOf(node.id) + step];
  }

  /** Where this node stands among its branches: [position from 1, how many]. */
  place(node) {
    const siblings = this.nodes[node.parent].children;
    return [siblings.indexOf(node.id) + 1, siblings.length];
  }

  /** The messages up to the node of this id, as the API takes them. */
  messages(id) {
    const found = [];
    for (let node = this.nodes[id]; node.parent !== null; node = this.nodes[node.parent]) found.unshift(message(node));
    return found;
  }

  /** Keep it for a reload; what does not fit is kept without the words' alternatives. */
  save() {
    const nodes = this.nodes.map((node) => ({ ...node, busy: false }));
    if (!keep(NAME, { nodes })) keep(NAME, { nodes: nodes.map((node) => ({ ...node, tokens: [] })) });
  }
}

function message(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, content: node.content };
  if (node.role !== "assistant") return { role: node.role, content: node.content };
  const calls = node.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  const written = { role: "assistant", content: node.content };
  if (node.reasoning) written.reasoning_content = node.reasoning;
  if (calls.length) written.tool_calls = calls;
  return written;
}
