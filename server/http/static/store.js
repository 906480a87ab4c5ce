// Conversations stored in this browser (IndexedDB) across tabs and restarts or, after a switch, only in this tab's
// memory. Each message is a separate record, so the end of a response writes one message and not the whole
// conversation.

import { base } from "./api.js";
import { keep, recall } from "./dom.js";

const TABLES = ["conversations", "nodes", "tokens"];
export const PRESETS = "oarlock-presets"; // presets of settings
const SWITCH = "oarlock-keeps-nothing";

/** Return the storage of presets: only the tab's if nothing is to be stored. */
export const placeOfPresets = () => (recall(SWITCH, "localStorage") ? "sessionStorage" : "localStorage");

const settled = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

/** Records of an IndexedDB database by `key`. The keys of one conversation's records begin with its id. */
class Database {
  static async open() {
    const request = indexedDB.open(`oarlock ${base.pathname}`, 1);
    request.onupgradeneeded = () => TABLES.forEach((name) => request.result.createObjectStore(name, { keyPath: "key" }));
    const opened = new Database();
    opened.database = await settled(request);
    return opened;
  }

  /** Run `work(table)` for each of these tables in one transaction. */
  async write(names, work) {
    const transaction = this.database.transaction(names, "readwrite");
    for (const name of names) work(transaction.objectStore(name), name);
    await new Promise((resolve, reject) => {
      transaction.oncomplete = resolve;
      transaction.onabort = transaction.onerror = () => reject(transaction.error);
    });
  }

  read(name, beginning = "") {
    return settled(this.database.transaction(name).objectStore(name).getAll(IDBKeyRange.bound(beginning, `${beginning}\uffff`)));
  }

  put(records) {
    return this.write(Object.keys(records), (table, name) => records[name].forEach((record) => table.put(record)));
  }

  delete(beginning, names = TABLES) {
    return this.write(names, (table) => table.delete(IDBKeyRange.bound(beginning, `${beginning}\uffff`)));
  }
}

/** The same interface in memory. */
class Memory {
  constructor() {
    this.tables = Object.fromEntries(TABLES.map((name) => [name, new Map()]));
  }

  async read(name, beginning = "") {
    return [...this.tables[name].values()].filter((record) => record.key.startsWith(beginning)).map((record) => structuredClone(record));
  }

  async put(records) {
    for (const [name, list] of Object.entries(records)) for (const record of list) this.tables[name].set(record.key, structuredClone(record));
  }

  async delete(beginning, names = TABLES) {
    for (const name of names) for (const key of [...this.tables[name].keys()]) if (key.startsWith(beginning)) this.tables[name].delete(key);
  }
}

export class Store {
  /** `changed` is called with the id of a conversation that another tab has changed. */
  constructor(changed) {
    this.channel = new BroadcastChannel(`oarlock ${base.pathname}`);
    this.channel.onmessage = (event) => changed(event.data);
    this.records = this.open();
  }

  get keepsNothing() {
    return Boolean(recall(SWITCH, "localStorage"));
  }

  async open() {
    this.isKept = false;
    if (this.keepsNothing) return new Memory();
    try {
      const found = await Database.open();
      this.isKept = true;
      return found;
    } catch {
      return new Memory(); // the browser forbids storage
    }
  }

  /**
   * Stop storing on this machine, or store the content of this tab. The existing content is moved, so nothing is lost.
   */
  async keepNothing(wanted) {
    const before = await this.records;
    const all = Object.fromEntries(await Promise.all(TABLES.map(async (name) => [name, await before.read(name)])));
    const presets = recall(PRESETS, placeOfPresets());
    keep(PRESETS, null, placeOfPresets());
    keep(SWITCH, wanted || null, "localStorage");
    keep(PRESETS, presets, placeOfPresets());
    this.records = this.open();
    await (await this.records).put(all);
    if (wanted) await before.delete("");
    this.channel.postMessage("");
  }

  /** Return the heads of all conversations without their messages, the last changed first. */
  async list() {
    const found = await (await this.records).read("conversations");
    return found.sort((a, b) => b.changed - a.changed);
  }

  /** Return the records of a conversation: {conversations, nodes}, and `tokens` if wanted. */
  async load(id, withTokens = false) {
    const records = await this.records;
    const names = withTokens ? TABLES : TABLES.slice(0, 2);
    return Object.fromEntries(await Promise.all(names.map(async (name) => [name, await records.read(name, id)])));
  }

  /** Return the tokens of one message with their alternatives, or null. */
  async tokens(key) {
    return (await (await this.records).read("tokens", key))[0] ?? null;
  }

  /**
   * Write these records. If there is no room, tries again without the alternatives of tokens; returns false if that
   * fails.
   */
  async put(records) {
    const database = await this.records;
    try {
      await database.put(records);
    } catch {
      try {
        await database.put({ ...records, tokens: [] });
      } catch {
        return false;
      }
    }
    for (const { id } of records.conversations) this.channel.postMessage(id);
    return true;
  }

  /** Delete all records whose key begins with this one: a conversation, or one message. Returns them, for `put`. */
  async delete(key) {
    const gone = await this.load(key, true);
    await (await this.records).delete(key);
    this.channel.postMessage(key);
    return gone;
  }

  /** Return the ids of the conversations whose title or messages contain all these words. */
  async search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const records = await this.records;
    const [heads, nodes] = await Promise.all([records.read("conversations"), records.read("nodes")]);
    const texts = new Map(heads.map((head) => [head.id, [head.title]]));
    for (const node of nodes) texts.get(node.conversation)?.push(node.content ?? "");
    const has = (parts) => words.every((word) => parts.some((part) => part.toLowerCase().includes(word)));
    return new Set([...texts].filter(([, parts]) => has(parts)).map(([id]) => id));
  }
}
