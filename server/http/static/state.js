// The live state: queue, speed, the KV blocks as a map, the time of each rank's steps, and the oldest requests.

import { ApiError, get } from "./api.js";
import { count, duration, el, seconds } from "./dom.js";

const EVERY_MS = 1000;
const HISTORY = 120; // points of a curve: two minutes
const TILES = [["generation", "generated tokens/s"], ["prompt", "prompt tokens/s"], ...["running", "waiting", "finished", "refused", "invalid"].map((n) => [n, n]), ["uptime", "up"]];
const BLOCKS = { h: ["held", "used by requests that run"], c: ["cached", "prompt beginnings kept for others"], f: ["free", "empty"] };

export class StateView {
  constructor(panel, askKey) {
    Object.assign(this, { panel, askKey, isShown: false, timer: null, history: { prompt: [], generation: [] }, parts: null });
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
      this.last = state;
      this.draw(state);
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
    const { requests, tokens_per_second: speed } = state;
    for (const name of ["prompt", "generation"]) {
      this.history[name].push(speed[name]);
      if (this.history[name].length > HISTORY) this.history[name].shift();
    }
    const shown = { ...requests, generation: rate(speed.generation), prompt: rate(speed.prompt), uptime: seconds(state.uptime_s) };
    for (const [name, tile] of Object.entries(tiles)) tile.firstChild.textContent = typeof shown[name] === "number" ? count(shown[name]) : shown[name];
    state.engines.forEach((engine, index) => update(engines[index], engine));
    this.paint();
  }

  build(state) {
    const tiles = {};
    for (const [name, label] of TILES) {
      const canvas = name in this.history && el("canvas", { "data-curve": name, "aria-hidden": "true" });
      tiles[name] = el("div", { class: "tile" }, el("strong"), el("span", {}, label), canvas);
    }
    const engines = state.engines.map((engine) => build(engine, state.engines.length > 1));
    this.panel.replaceChildren(el("div", { class: "tiles" }, ...Object.values(tiles)), ...engines.map((parts) => parts.element));
    this.parts = { tiles, engines };
  }

  /** A colour of the style sheet as a canvas can read it. */
  colour(name) {
    const probe = el("span", { class: name });
    this.panel.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  }

  /** Draw the canvases, in the colours of the theme and the pixels of the screen. */
  paint() {
    if (!this.parts || !this.isShown) return;
    const colours = { h: this.colour("accent"), c: this.colour("cached"), f: this.colour("free") };
    for (const canvas of this.panel.querySelectorAll("[data-curve]")) curve(canvas, this.history[canvas.dataset.curve], colours.h);
    this.last?.engines.forEach((engine, index) => map(this.parts.engines[index].map, engine.kv, colours));
  }
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
  const element = el("div", { class: "engine" },
    el("section", { class: "card" }, title("KV blocks"), el("p", { class: "legend" }, ...legend, scale), canvas),
    el("section", { class: "card" }, title("Steps"), steps, table("Time of each rank's steps", ["Rank", "Last", "Median", ""], ranks)),
    el("section", { class: "card wide" }, title("Oldest requests"), table("Oldest requests", ["Request", "State", "Age", "Prompt", "Cached", "Written"], oldest)));
  return { element, map: canvas, scale, steps, ranks, oldest };
}

const table = (label, heads, body) => el("div", { class: "table" }, el("table", { "aria-label": label }, el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))), body));

function update(parts, engine) {
  const { kv, step, slowest } = engine;
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
  const rows = slowest.map((request) => el("tr", {}, el("td", { class: "mono" }, request.id), ...[request.state, seconds(request.age_s), count(request.prompt_tokens), count(request.cached_tokens), count(request.output_tokens)].map((text) => el("td", {}, text))));
  parts.oldest.replaceChildren(...(rows.length ? rows : [el("tr", {}, el("td", { colspan: "6", class: "soft" }, "None: the server is idle."))]));
}

const time = (ms) => (ms === null || ms === undefined ? "–" : duration(ms));

/** Prepare a canvas for its place; returns [context, width, height] in pixels of the page. */
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

/** Runs such as h12c40f2000, in the order of the blocks: a square for each. */
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
