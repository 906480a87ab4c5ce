// The live state: queue, speed, the KV blocks as a map, the time of each rank's steps, LoRA adapters, the oldest requests.

import { ApiError, get } from "./api.js";
import { count, duration, el, plural, seconds } from "./dom.js";

const EVERY_MS = 1000;
const HISTORY = 120; // points of a curve: two minutes
const KEPT = 60; // stored states: the last minute
const BATCHES_EVERY = 5; // states
const TILES = [["generation", "generated tokens/s"], ["prompt", "prompt tokens/s"], ...["running", "waiting", "finished", "refused", "invalid"].map((n) => [n, n]), ["uptime", "up"]];
const BLOCKS = { h: ["held", "used by running requests"], c: ["cached", "prompt prefixes stored for reuse"], f: ["free", "empty"] };

export class StateView {
  constructor(panel, askKey) {
    Object.assign(this, { panel, askKey, isShown: false, timer: null, history: { prompt: [], generation: [] }, parts: null, kept: [], at: null, batches: null });
    document.addEventListener("visibilitychange", () => document.hidden || this.restart());
    addEventListener("resize", () => this.paint());
  }

  restart() {
    clearTimeout(this.timer);
    if (this.isShown && !document.hidden) this.load();
  }

  async load() {
    const number = (this.number = (this.number ?? 0) + 1);
    try {
      const state = await get("v1/state");
      if (number !== this.number) return;
      this.kept.push(state);
      if (this.kept.length > KEPT) {
        this.kept.shift();
        if (this.at) this.at--; // the selected state moves with the others
      }
      this.record(state);
      if (this.rounds++ % BATCHES_EVERY === 0) this.loadBatches();
      this.draw(this.kept[this.at ?? this.kept.length - 1]);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (number !== this.number) return;
      if (error.status === 401 && !(await this.askKey())) return this.say(error.message);
      if (error.status === 404) return this.say("This server does not show its state.");
      this.panel.classList.add("stale");
      if (!this.parts) this.say(error.message);
    }
    clearTimeout(this.timer);
    if (this.isShown) this.timer = setTimeout(() => this.restart(), EVERY_MS);
  }

  say(text) {
    this.parts = null;
    this.panel.replaceChildren(el("p", { class: "problem" }, text));
  }

  draw(state) {
    if (!this.parts || this.parts.engines.length !== state.engines.length) this.build(state);
    this.panel.classList.remove("stale");
    const { tiles, engines } = this.parts;
    this.last = state;
    this.showTime(state);
    const { requests, tokens_per_second: speed } = state;
    const shown = { ...requests, generation: rate(speed.generation), prompt: rate(speed.prompt), uptime: seconds(state.uptime_s) };
    for (const [name, tile] of Object.entries(tiles)) tile.firstChild.textContent = typeof shown[name] === "number" ? count(shown[name]) : shown[name];
    state.engines.forEach((engine, index) => update(engines[index], engine));
    this.parts.replicas.replaceChildren(...state.engines.map(replicaRow));
    this.paint();
  }

  /** Add a new state's points to the curves. */
  record({ tokens_per_second: speed }) {
    for (const name of ["prompt", "generation"]) {
      this.history[name].push(speed[name]);
      if (this.history[name].length > HISTORY) this.history[name].shift();
    }
  }

  /** Show a stored state of the last minute; null: the current state. */
  look(at) {
    this.at = at;
    this.draw(this.kept[at ?? this.kept.length - 1]);
  }

  showTime(state) {
    const { slider, when, live } = this.parts;
    slider.max = this.kept.length - 1;
    slider.value = this.at ?? this.kept.length - 1;
    const age = Math.round(this.kept.at(-1).time - state.time);
    const text = this.at === null ? "now" : `${age} s ago`;
    when.textContent = text;
    slider.setAttribute("aria-valuetext", text);
    live.hidden = this.at === null;
  }

  async loadBatches() {
    try {
      const { data } = await get("v1/batches?limit=20");
      this.batches.hidden = !data.length;
      this.batches.querySelector("tbody").replaceChildren(...data.map(batchRow));
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.batches.hidden = true; // no --batch-dir, or not allowed for this key
    }
  }

  build(state) {
    const tiles = {};
    for (const [name, label] of TILES) {
      const canvas = name in this.history && el("canvas", { "data-curve": name, "aria-hidden": "true" });
      tiles[name] = el("div", { class: "tile" }, el("strong"), el("span", {}, label), canvas);
    }
    const engines = state.engines.map((engine) => build(engine, state.engines.length > 1));
    const slider = el("input", { id: "last-minute", type: "range", min: 0, max: 0, oninput: () => this.look(Number(slider.value) === this.kept.length - 1 ? null : Number(slider.value)) });
    const when = el("span", { class: "soft" });
    const live = el("button", { class: "quiet", hidden: true, onclick: () => this.look(null) }, "Back to now");
    const replicas = el("tbody");
    const many = el("section", { class: "card", hidden: state.engines.length < 2 }, el("h2", {}, "Replicas"), table("Replicas", ["Replica", "State", "Running", "Waiting", "Blocks held", "Cached", "Median step"], replicas));
    this.batches = el("section", { class: "card", hidden: true }, el("h2", {}, "Batches"), table("Batches", ["Batch", "State", "Done", "Failed", "Of", ""], el("tbody")));
    this.panel.replaceChildren(el("div", { class: "time row" }, el("label", { for: "last-minute" }, "The last minute"), slider, when, live), el("div", { class: "tiles" }, ...Object.values(tiles)), many, ...engines.map((parts) => parts.element), this.batches);
    this.parts = { tiles, engines, slider, when, live, replicas };
    this.rounds = 1;
    this.loadBatches();
  }

  /** Return a colour of the style sheet in a format that canvases accept. */
  colour(name) {
    const probe = el("span", { class: name });
    this.panel.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  }

  /** Draw the canvases, in the colours of the theme and the resolution of the screen. */
  paint() {
    if (!this.parts || !this.isShown) return;
    const colours = { h: this.colour("accent"), c: this.colour("cached"), f: this.colour("free") };
    for (const canvas of this.panel.querySelectorAll("[data-curve]")) curve(canvas, this.history[canvas.dataset.curve], colours.h);
    this.last?.engines.forEach((engine, index) => map(this.parts.engines[index].map, engine.kv, colours));
  }
}

const cells = (...texts) => texts.map((text) => el("td", {}, text));
const replicaRow = ({ engine, status, running, waiting, kv, step }) => el("tr", {}, ...cells(String(engine), status, count(running), count(waiting), count(kv.held), count(kv.cached), time(step.median_ms)));

function batchRow({ id, status, request_counts: counts }) {
  const bar = el("progress", { max: Math.max(1, counts.total), value: counts.completed + counts.failed, "aria-label": `Progress of ${id}` });
  return el("tr", {}, el("td", { class: "mono" }, id), ...cells(status.replaceAll("_", " "), count(counts.completed), count(counts.failed), count(counts.total)), el("td", {}, bar));
}

const rate = (value) => (value < 100 ? value.toFixed(1) : count(Math.round(value)));

function build(engine, isOneOfMany) {
  const legend = Object.entries(BLOCKS).map(([kind, [name, meaning]]) => el("span", { title: meaning }, el("i", { class: `key ${kind}` }), el("b", { "data-kv": name }), ` ${name}`));
  const canvas = el("canvas", { class: "map", role: "img" });
  const scale = el("small", { class: "soft" });
  const steps = el("p", { class: "soft" });
  const ranks = el("tbody");
  const oldest = el("tbody");
  const title = (text) => el("h2", {}, isOneOfMany ? `${text}, replica ${engine.engine}` : text);
  const adapters = adaptersCard(title);
  const element = el("div", { class: "engine" },
    el("section", { class: "card" }, title("KV blocks"), el("p", { class: "legend" }, ...legend, scale), canvas),
    el("section", { class: "card" }, title("Steps"), steps, table("Time of each rank's steps", ["Rank", "Last", "Median", ""], ranks)),
    adapters.card,
    el("section", { class: "card wide" }, title("Oldest requests"), table("Oldest requests", ["Request", "State", "Age", "Prompt", "Cached", "Written"], oldest)));
  return { element, map: canvas, scale, steps, ranks, oldest, adapters };
}

/** Return the card of an engine's LoRA adapters, which is hidden until the engine reports some. */
function adaptersCard(title) {
  const summary = el("p", { class: "soft" });
  const rows = el("tbody");
  const card = el("section", { class: "card wide", hidden: true }, title("LoRA adapters"), summary, table("LoRA adapters", ["Adapter", "Memory", "Running", "Waiting"], rows));
  return { card, summary, rows };
}

const MEMORY = { on_disk: "on disk", loading: "being loaded", ready: "host memory" };

function updateAdapters({ card, summary, rows }, adapters) {
  card.hidden = !adapters;
  if (!adapters) return;
  const { slots, in_slots: inSlots, host_limit: limit, in_host_memory: loaded, names, waiting, shown } = adapters;
  const parts = [`${count(inSlots)} of ${plural(slots, "slot")} in use`, `${count(loaded)} of ${count(limit)} in host memory`, plural(names, "name"), waiting && `${plural(waiting, "request")} ${waiting === 1 ? "waits for its" : "wait for their"} adapter`];
  summary.textContent = parts.filter(Boolean).join(" · ");
  const found = shown.map((adapter) => el("tr", {}, el("td", { class: "mono" }, adapter.name), ...cells(adapter.slot ? `slot ${adapter.slot}` : MEMORY[adapter.state], count(adapter.running), count(adapter.waiting))));
  if (names > shown.length) found.push(el("tr", {}, el("td", { colspan: "4", class: "soft" }, `and ${plural(names - shown.length, "other name")}`)));
  rows.replaceChildren(...(found.length ? found : [el("tr", {}, el("td", { colspan: "4", class: "soft" }, "None is loaded."))]));
}

const table = (label, heads, body) => el("div", { class: "table" }, el("table", { "aria-label": label }, el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))), body));

function update(parts, engine) {
  const { kv, step, slowest } = engine;
  updateAdapters(parts.adapters, engine.adapters);
  for (const [name] of Object.values(BLOCKS)) parts.element.querySelector(`[data-kv=${name}]`).textContent = count(kv[name]);
  const size = kv.cells_of > 1 ? `each square is ${count(kv.cells_of)} blocks of ${kv.block_size} tokens` : `each square is a block of ${kv.block_size} tokens`;
  parts.scale.textContent = size;
  parts.map.setAttribute("aria-label", `${count(kv.total)} KV blocks: ${kv.held} held, ${kv.cached} cached, ${kv.free} free`);
  const times = [["last", step.last_ms], ["median", step.median_ms], ["p99", step.p99_ms]].filter(([, ms]) => ms !== null && ms !== undefined);
  parts.steps.textContent = [`${count(step.count)} steps`, ...times.map(([name, ms]) => `${name} ${duration(ms)}`)].join(" · ");
  const ranks = step.ranks ?? [];
  const longest = Math.max(...ranks.map((rank) => rank.median_ms ?? 0), 1e-9);
  parts.ranks.replaceChildren(...ranks.map((rank) => {
    const bar = el("span", { class: "meter" });
    bar.style.setProperty("--p", ((rank.median_ms ?? 0) / longest).toFixed(3));
    return el("tr", {}, ...[String(rank.rank), time(rank.last_ms), time(rank.median_ms)].map((text) => el("td", {}, text)), el("td", {}, bar));
  }));
  parts.ranks.parentElement.hidden = !ranks.length;
  const explained = async (id) => (await import("./explain.js")).explain(id);
  const rows = slowest.map((request) => el("tr", {}, el("td", {}, el("button", { class: "quiet mono", title: "Explain this request", onclick: () => explained(request.id) }, request.id)), ...[request.adapter ? `${request.state} · ${request.adapter}` : request.state, seconds(request.age_s), count(request.prompt_tokens), count(request.cached_tokens), count(request.output_tokens)].map((text) => el("td", {}, text))));
  parts.oldest.replaceChildren(...(rows.length ? rows : [el("tr", {}, el("td", { colspan: "6", class: "soft" }, "None: the server is idle."))]));
}

const time = (ms) => (ms === null || ms === undefined ? "–" : duration(ms));

/** Fit a canvas to its place; returns [context, width, height] in CSS pixels. */
function prepared(canvas, height) {
  const width = canvas.clientWidth;
  const ratio = devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return [context, width, height];
}

function curve(canvas, values, colour) {
  const [context, width, height] = prepared(canvas, 28);
  const most = Math.max(...values, 1e-9);
  const place = (value, index) => [width - ((values.length - 1 - index) * width) / (HISTORY - 1), height - 1.5 - (value / most) * (height - 4)];
  context.beginPath();
  values.forEach((value, index) => context.lineTo(...place(value, index)));
  Object.assign(context, { strokeStyle: colour, lineWidth: 1.5, lineJoin: "round" });
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(place(0, 0)[0], height);
  context.globalAlpha = 0.12;
  context.fillStyle = colour;
  context.fill();
}

/** Draw runs such as h12c40f2000 in the order of the blocks: one square per cell. */
function map(canvas, kv, colours) {
  const runs = [...kv.map.matchAll(/([hcf])(\d+)/g)].map(([, kind, length]) => [kind, Number(length)]);
  const cells = runs.reduce((sum, [, length]) => sum + length, 0);
  if (!canvas.clientWidth || !cells) return;
  const side = Math.max(3, Math.min(14, Math.floor(Math.sqrt((canvas.clientWidth * 170) / cells))));
  const columns = Math.max(1, Math.floor((canvas.clientWidth + 1) / side));
  const [context] = prepared(canvas, Math.ceil(cells / columns) * side);
  const gap = side > 4 ? 1 : 0.5;
  let at = 0;
  for (const [kind, length] of runs) {
    context.fillStyle = colours[kind];
    for (const end = at + length; at < end; at++) context.fillRect((at % columns) * side, Math.floor(at / columns) * side, side - gap, side - gap);
  }
}
