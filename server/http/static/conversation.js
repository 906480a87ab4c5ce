// A conversation as a tree: an edited question or another response is a branch next to the first one, and none is lost.

const PASSING = new Set(["children", "busy", "tokens", "raw", "pending", "live"]); // not part of a stored message
const MAX_TITLE = 60;

let lastTime = 0;

/** Return an id. Ids have one length and sort by time; each id of this tab is later than the one before. */
function newId() {
  lastTime = Math.max(Date.now(), lastTime + 1);
  return lastTime.toString(36).padStart(9, "0") + Math.floor(Math.random() * 2 ** 40).toString(36).padStart(8, "0");
}

export class Conversation {
  /** `records`: as in the store; without them the conversation is new. */
  constructor(records = null) {
    const head = records?.conversations[0];
    this.head = head ?? { id: newId(), title: "", isNamed: false, changed: Date.now(), chosen: null };
    this.root = { id: "", parent: null, role: "root", children: [], chosen: this.head.chosen };
    this.nodes = new Map([["", this.root]]);
    this.unsaved = new Set();
    for (const node of records?.nodes ?? []) this.nodes.set(node.id, { ...node, children: [], tokens: null, raw: "", busy: false });
    for (const node of this.nodes.values()) this.nodes.get(node.parent)?.children.push(node.id);
    for (const node of this.nodes.values()) {
      node.children.sort();
      if (!node.children.includes(node.chosen)) node.chosen = node.children.at(-1) ?? null;
    }
  }

  get id() {
    return this.head.id;
  }

  get isEmpty() {
    return this.root.chosen === null;
  }

  /** Return the visible nodes, from first to last. */
  path() {
    const shown = [];
    for (let node = this.root; node.chosen !== null; ) {
      node = this.nodes.get(node.chosen);
      shown.push(node);
    }
    return shown;
  }

  /** Add a node below `parent` and make it visible. */
  add(parent, role, fields) {
    const node = { id: newId(), parent, role, children: [], chosen: null, tokens: [], raw: "", ...fields };
    this.nodes.set(node.id, node);
    this.nodes.get(parent).children.push(node.id);
    this.choose(node);
    this.unsaved.add(node.id);
    return node;
  }

  /** Return the last visible node. */
  end() {
    return this.path().at(-1) ?? this.root;
  }

  choose(node) {
    this.nodes.get(node.parent).chosen = node.id;
    this.unsaved.add(node.parent);
  }

  /** Show another branch next to this node: `step` 1 is the next branch, -1 the previous one. */
  turn(node, step) {
    const siblings = this.nodes.get(node.parent).children;
    this.choose(this.nodes.get(siblings[siblings.indexOf(node.id) + step]));
  }

  /** Return the position of this node among its branches: [position from 1, number of branches]. */
  place(node) {
    const siblings = this.nodes.get(node.parent).children;
    return [siblings.indexOf(node.id) + 1, siblings.length];
  }

  /** Remove a node and all nodes below it from the tree. Returns them, for `restore`. */
  remove(node) {
    const gone = [node];
    for (const each of gone) gone.push(...each.children.map((id) => this.nodes.get(id)));
    for (const each of gone) {
      this.nodes.delete(each.id);
      this.unsaved.delete(each.id);
    }
    const parent = this.nodes.get(node.parent);
    parent.children = parent.children.filter((id) => id !== node.id);
    parent.chosen = parent.children.at(-1) ?? null;
    this.unsaved.add(parent.id);
    return gone;
  }

  restore(gone) {
    for (const node of gone) {
      this.nodes.set(node.id, node);
      this.unsaved.add(node.id);
    }
    const parent = this.nodes.get(gone[0].parent);
    parent.children = [...parent.children, gone[0].id].sort();
    this.choose(gone[0]);
  }

  /** Return the messages up to the node of this id, in the API's format. */
  messages(id) {
    const found = [];
    for (let node = this.nodes.get(id); node.parent !== null; node = this.nodes.get(node.parent)) found.unshift(message(node));
    return found;
  }

  rename(title) {
    Object.assign(this.head, { title, isNamed: true });
    this.unsaved.add("");
  }

  /** Return the records that have changed since the last call, in the store's format, or null if there are none. */
  changes() {
    if (!this.unsaved.size) return null;
    const first = this.path().find((node) => node.role === "user");
    if (!this.head.isNamed) this.head.title = titleOf(first);
    Object.assign(this.head, { key: this.id, changed: Date.now(), chosen: this.root.chosen });
    const changed = [...this.unsaved].filter((id) => id !== "").map((id) => this.nodes.get(id));
    this.unsaved.clear();
    const keyed = (node) => ({ key: `${this.id} ${node.id}`, conversation: this.id });
    const kept = (node) => Object.fromEntries(Object.entries(node).filter(([name]) => !PASSING.has(name)));
    const tokens = changed.filter((node) => node.tokens?.length);
    for (const node of tokens) node.hasTokens = true;
    return {
      conversations: [{ ...this.head }],
      nodes: changed.map((node) => ({ ...kept(node), ...keyed(node) })),
      tokens: tokens.map((node) => ({ ...keyed(node), raw: node.raw, tokens: node.tokens })),
    };
  }
}

function titleOf(node) {
  const text = (node?.content.trim() || node?.files?.[0]?.name) ?? "";
  const line = text.split("\n", 1)[0];
  return line.length > MAX_TITLE ? `${line.slice(0, MAX_TITLE - 1).trimEnd()}…` : line;
}

/** Return a question preceded by its files, each in a fence longer than any fence inside it. */
export function contentOf(node) {
  const files = (node.files ?? []).map(({ name, text }) => {
    const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}\n\n`;
  });
  return files.join("") + node.content;
}

function message(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, content: node.content };
  if (node.role !== "assistant") return { role: node.role, content: contentOf(node) };
  const calls = node.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  const written = { role: "assistant", content: node.content };
  if (node.reasoning) written.reasoning_content = node.reasoning;
  if (calls.length) written.tool_calls = calls;
  return written;
}
