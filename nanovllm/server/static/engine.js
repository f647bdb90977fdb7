// The engine page: the KV cache, the queues and the last steps, drawn as the engine reports them.

import { apiKey, element, isDark, onThemeChange, readEvents, request } from "./common.js";

const STATES = ["free", "cached", "used", "shared"]; // by the value of a block's byte
const SHARED = 3;
const MAX_CELL = 22; // CSS pixels, like the next constant
const CACHE_HEIGHT = 380;
const NUM_STEPS = 200;
const ROWS_SHOWN = 24;
const RATE_WINDOW_MS = 3000;
const at = (id) => document.getElementById(id);

let view = null; // the latest snapshot of the engine, with blocks decoded
let frame = null; // the requested animation frame
let followed = 0; // the owner whose blocks are highlighted; 0 = none

// ---- colours: read from the legend, so that only the style sheet defines them ----

let colours = {};

function readColours() {
  const names = [...STATES, "prefill", "decode"];
  colours = Object.fromEntries(names.map((name) => [name, getComputedStyle(at(`swatch-${name}`)).backgroundColor]));
  colours.ink = getComputedStyle(document.body).color;
  colours.faint = getComputedStyle(at("story")).color;
  colours.owners = new Map();
}

function ownerColour(owner) {
  if (!owner) return colours.used;
  if (!colours.owners.has(owner)) {
    const hue = (owner * 137.508 + 60) % 360; // the golden angle: successive owners get different hues
    const lightness = (isDark() ? 0.72 : 0.62) + [0, 0.07, -0.06][owner % 3];
    colours.owners.set(owner, `oklch(${lightness} 0.125 ${hue})`);
  }
  return colours.owners.get(owner);
}

// ---- the cache ----

class BlockGrid {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.numBlocks = 0;
  }

  // All lengths here are device pixels, so that cells have sharp edges.
  layout(numBlocks) {
    const scale = devicePixelRatio;
    const width = Math.floor(this.canvas.parentElement.clientWidth * scale);
    let cell = Math.floor(MAX_CELL * scale);
    const height = () => Math.ceil(numBlocks / Math.floor(width / cell)) * cell;
    while (cell > 2 && height() > CACHE_HEIGHT * scale) cell -= 1;
    const columns = Math.floor(width / cell);
    Object.assign(this, { numBlocks, scale, width, cell, columns, gap: cell >= 4 * scale ? Math.round(scale) : 0 });
    this.canvas.width = columns * cell;
    this.canvas.height = height();
    this.canvas.style.width = `${this.canvas.width / scale}px`;
    this.canvas.style.height = `${this.canvas.height / scale}px`;
    this.forget();
  }

  forget() {
    this.drawn = new Int32Array(this.numBlocks).fill(-1);
  }

  // Only cells that changed are painted: a step changes a few of 100,000 blocks.
  draw({ blocks, owners }) {
    const width = Math.floor(this.canvas.parentElement.clientWidth * devicePixelRatio);
    if (blocks.length !== this.numBlocks || width !== this.width || devicePixelRatio !== this.scale) {
      this.layout(blocks.length);
    }
    for (let i = 0; i < blocks.length; i++) {
      const dimmed = followed !== 0 && owners[i] !== followed && blocks[i] !== SHARED; // of a shared block only one owner is known
      const look = owners[i] * 8 + blocks[i] * 2 + Number(dimmed);
      if (look === this.drawn[i]) continue;
      this.drawn[i] = look;
      this.drawCell(i, blocks[i], owners[i], dimmed);
    }
  }

  drawCell(i, state, owner, dimmed) {
    const { context, cell, gap } = this;
    const x = (i % this.columns) * cell;
    const y = Math.floor(i / this.columns) * cell;
    const size = cell - gap;
    context.clearRect(x, y, cell, cell);
    context.globalAlpha = dimmed ? 0.3 : 1;
    context.fillStyle = state >= 2 ? ownerColour(owner) : colours[STATES[state]];
    if (cell >= 8 * this.scale) {
      context.beginPath();
      context.roundRect(x, y, size, size, 2 * this.scale);
      context.fill();
    } else {
      context.fillRect(x, y, size, size);
    }
    if (state === SHARED) this.markShared(x, y, size);
    context.globalAlpha = 1;
  }

  markShared(x, y, size) {
    const { context, scale } = this;
    if (size < 7 * scale) {
      context.fillStyle = colours.ink;
      context.fillRect(x, y, Math.ceil(size / 2), Math.ceil(size / 2));
      return;
    }
    context.strokeStyle = colours.ink;
    context.lineWidth = 2 * scale;
    context.strokeRect(x + scale, y + scale, size - 2 * scale, size - 2 * scale);
    context.beginPath();
    context.moveTo(x + scale, y + size - scale);
    context.lineTo(x + size - scale, y + scale);
    context.stroke();
  }

  indexAt(x, y) {
    const cell = this.cell / this.scale;
    const column = Math.floor(x / cell);
    const index = Math.floor(y / cell) * this.columns + column;
    return column >= 0 && column < this.columns && index >= 0 && index < this.numBlocks ? index : null;
  }

  box(i) {
    const cell = this.cell / this.scale;
    return { x: (i % this.columns) * cell, y: Math.floor(i / this.columns) * cell, width: cell, height: cell };
  }

  neighbour(i, key) {
    return i + { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns }[key];
  }

  get length() {
    return this.numBlocks;
  }

  describe(i) {
    const state = view.blocks[i];
    const owner = view.owners[i];
    const name = nameOf(owner);
    if (state === 0) return `Block ${i}: free`;
    if (state === 1) return `Block ${i}: cached, free to take; a prompt that begins alike finds it again`;
    if (state === SHARED) return `Block ${i}: shared by several requests${name && `, ${name} among them`}`;
    return `Block ${i}: in use${name && ` by ${name}`}`;
  }
}

function nameOf(owner) {
  const request = owner && view.running.find((request) => request.owner === owner);
  return request ? shortened(request.id) : "";
}

const shortened = (id) => (id.length > 22 ? `${id.slice(0, 12)}…${id.slice(-8)}` : id);

// ---- the last steps ----

class StepChart {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.steps = []; // {numPrefill, numDecodes, ms}, oldest first
  }

  add(steps) {
    this.steps.push(...steps.map(([, numPrefill, numDecodes, ms]) => ({ numPrefill, numDecodes, ms })));
    this.steps.splice(0, this.steps.length - NUM_STEPS);
  }

  draw() {
    const { context, canvas } = this;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    canvas.width = Math.round(width * devicePixelRatio);
    canvas.height = Math.round(height * devicePixelRatio);
    context.scale(devicePixelRatio, devicePixelRatio);
    this.bar = width / NUM_STEPS;
    this.limit = niceLimit(Math.max(1, ...this.steps.map((step) => step.ms)));
    this.drawScale(width, height);
    this.steps.forEach((step, i) => this.drawStep(step, this.box(i)));
  }

  drawScale(width, height) {
    const { context } = this;
    context.font = "11px system-ui, sans-serif";
    context.strokeStyle = context.fillStyle = colours.faint;
    context.lineWidth = 1;
    for (const share of [0.5, 1]) {
      const y = Math.round(height - share * (height - 18)) - 0.5;
      context.globalAlpha = 0.25;
      context.beginPath();
      context.moveTo(0, y);
      context.lineTo(width, y);
      context.stroke();
      context.globalAlpha = 1;
      context.fillText(`${this.limit * share} ms`, 0, y - 4);
    }
  }

  drawStep({ numPrefill, numDecodes }, { x, y, width, height }) {
    const prefill = (height * numPrefill) / Math.max(1, numPrefill + numDecodes);
    this.context.fillStyle = colours.prefill;
    this.context.fillRect(x, y, width, prefill);
    this.context.fillStyle = colours.decode;
    this.context.fillRect(x, y + prefill, width, height - prefill);
  }

  box(i) {
    const canvasHeight = this.canvas.clientHeight;
    const height = Math.max(1, (this.steps[i].ms / this.limit) * (canvasHeight - 18));
    const x = (NUM_STEPS - this.steps.length + i) * this.bar;
    return { x, y: canvasHeight - height, width: Math.max(1, this.bar - 1), height };
  }

  indexAt(x) {
    const index = Math.floor(x / this.bar) - (NUM_STEPS - this.steps.length);
    return index >= 0 && index < this.steps.length ? index : null;
  }

  neighbour(i, key) {
    return i + { ArrowLeft: -1, ArrowRight: 1, ArrowUp: 0, ArrowDown: 0 }[key];
  }

  get length() {
    return this.steps.length;
  }

  describe(i) {
    const { numPrefill, numDecodes, ms } = this.steps[i];
    return `${ms.toFixed(1)} ms: ${count(numPrefill, "prompt token")}, ${count(numDecodes, "decoded token")}`;
  }
}

function niceLimit(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}

// ---- the queues ----

class Queue {
  constructor(list, counter) {
    this.list = list;
    this.counter = counter;
    this.rows = new Map(); // a request keeps its row, so that it keeps the focus and stays under the pointer
  }

  draw(requests, total, longest) {
    this.counter.textContent = total.toLocaleString();
    const seen = new Map();
    requests.slice(0, ROWS_SHOWN).forEach((request, i) => {
      let key = request.id;
      while (seen.has(key)) key += "'"; // all completions of a request have its id
      const row = this.rows.get(key) ?? newRow(request);
      seen.set(key, row);
      fillRow(row, request, longest);
      if (this.list.children[i] !== row) this.list.insertBefore(row, this.list.children[i] ?? null);
    });
    while (this.list.children.length > seen.size) this.list.lastChild.remove();
    this.rows = seen;
    const more = total - seen.size;
    if (more > 0) this.list.append(element("li", "more", `and ${more.toLocaleString()} more`));
  }
}

function newRow(request) {
  const row = element("li");
  row.tabIndex = 0;
  row.title = request.id;
  const bar = element("span", "track");
  bar.append(element("i", "computed"), element("i", "pending"), element("i", "generated"));
  row.append(element("i", "dot"), element("span", "name", shortened(request.id)), bar, element("span", "count"));
  for (const event of ["pointerenter", "focus"]) row.addEventListener(event, () => follow(Number(row.dataset.owner)));
  for (const event of ["pointerleave", "blur"]) row.addEventListener(event, () => follow(0));
  return row;
}

function fillRow(row, { numPrompt, numGenerated, numComputed, owner }, longest) {
  const [dot, , bar, counter] = row.children;
  const computed = Math.min(numComputed, numPrompt);
  row.dataset.owner = owner;
  dot.style.backgroundColor = owner ? ownerColour(owner) : "";
  [computed, numPrompt - computed, numGenerated].forEach((part, i) => {
    bar.children[i].style.width = `${(100 * part) / longest}%`;
    if (i !== 1) bar.children[i].style.backgroundColor = owner ? ownerColour(owner) : "";
  });
  counter.textContent = `${numPrompt.toLocaleString()} + ${numGenerated.toLocaleString()}`;
  const progress = `${computed.toLocaleString()} computed, ${numGenerated.toLocaleString()} generated`;
  row.ariaLabel = `${row.title}: ${count(numPrompt, "prompt token")}, ${progress}`;
}

// ---- numbers and texts ----

class Rate {
  constructor() {
    this.samples = []; // [milliseconds, counter]
  }

  add(counter) {
    if (this.samples.length && counter < this.samples.at(-1)[1]) this.samples = []; // the engine was restarted
    this.samples.push([performance.now(), counter]);
  }

  perSecond() {
    const now = performance.now();
    while (this.samples.length > 1 && this.samples[1][0] < now - RATE_WINDOW_MS) this.samples.shift();
    if (!this.samples.length) return 0;
    const [time, counter] = this.samples[0];
    return now > time ? ((this.samples.at(-1)[1] - counter) * 1000) / (now - time) : 0;
  }
}

const count = (number, noun) => `${number.toLocaleString()} ${noun}${number === 1 ? "" : "s"}`;
const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");
const perSecond = (rate) => `${Math.round(rate.perSecond()).toLocaleString()} tok/s`;

function countStates(blocks) {
  const counts = [0, 0, 0, 0];
  for (const state of blocks) counts[state] += 1;
  return counts;
}

function story(stats, [free, cached, used, shared]) {
  if (!stats.num_running && !stats.num_waiting) {
    const kept = cached
      ? `The cached text of earlier requests fills ${count(cached, "block")}, ready for the next one that begins alike.`
      : "Send it a message and watch the blocks fill.";
    return `The engine is idle. ${kept}`;
  }
  const { num_running: numRunning, num_waiting: numWaiting, num_blocks: numBlocks } = stats;
  const held = `${(used + shared).toLocaleString()} of ${count(numBlocks, "block")}`;
  const sentences = [`${count(numRunning, "request")} ${numRunning === 1 ? "holds" : "hold"} ${held}.`];
  if (shared) {
    const why = "text that several requests begin with is stored once";
    sentences.push(`${count(shared, "block")} ${shared === 1 ? "is" : "are"} shared: ${why}.`);
  }
  if (numWaiting) {
    const why = free + cached < numBlocks / 50 ? "until blocks come free" : "for a place in the batch";
    sentences.push(`${count(numWaiting, "request")} ${numWaiting === 1 ? "waits" : "wait"} ${why}.`);
  }
  return sentences.join(" ");
}

// ---- drawing a snapshot ----

const grid = new BlockGrid(at("blocks"));
const chart = new StepChart(at("steps"));
const running = new Queue(at("running"), at("num-running"));
const waiting = new Queue(at("waiting"), at("num-waiting"));
const generation = new Rate();
const prompts = new Rate();

function show(report) {
  const blocks = Uint8Array.from(atob(report.blocks), (character) => character.charCodeAt(0));
  view = { ...report, blocks, running: report.running.map(named), waiting: report.waiting.map(named) };
  chart.add(report.steps);
  generation.add(report.stats.num_generation_tokens);
  prompts.add(report.stats.num_prompt_tokens);
  frame ??= requestAnimationFrame(draw); // if snapshots come faster than frames, the last one is drawn
}

const named = ([id, numPrompt, numGenerated, numComputed, owner]) => ({
  id,
  numPrompt,
  numGenerated,
  numComputed,
  owner,
});

function draw() {
  frame = null;
  if (!view) return;
  const { stats } = view;
  if (!view.running.some(({ owner }) => owner === followed)) followed = 0; // the followed request has ended
  const counts = countStates(view.blocks);
  const longest = Math.max(1, ...[...view.running, ...view.waiting].map((r) => r.numPrompt + r.numGenerated));
  at("usage").textContent = percent(counts[2] + counts[SHARED], view.blocks.length);
  at("hit-rate").textContent = percent(stats.prefix_hits, stats.prefix_queries);
  at("preemptions").textContent = stats.num_preemptions.toLocaleString();
  at("story").textContent = story(stats, counts);
  drawRates();
  grid.draw(view);
  chart.draw();
  running.draw(view.running, stats.num_running, longest);
  waiting.draw(view.waiting, stats.num_waiting, longest);
  pointer.refresh();
}

function drawRates() {
  at("generation-rate").textContent = perSecond(generation);
  at("prompt-rate").textContent = perSecond(prompts);
}

function follow(owner) {
  if (owner === followed) return;
  followed = owner;
  if (view) grid.draw(view);
}

// ---- pointing at a cell or a bar, by mouse or by keyboard ----

const pointer = {
  chart: null, // the chart under the pointer
  index: null,

  show(chart, index) {
    if (index === null || index >= chart.length) return this.hide();
    Object.assign(this, { chart, index });
    const { x, y, width, height } = chart.box(index);
    const frame = chart.canvas.getBoundingClientRect();
    const tooltip = at("tooltip");
    const text = chart.describe(index);
    if (tooltip.textContent !== text) tooltip.textContent = text;
    tooltip.hidden = false;
    const left = Math.min(frame.left + x + width / 2, innerWidth - tooltip.offsetWidth - 12);
    const below = frame.top + y + height + 8;
    const fits = below + tooltip.offsetHeight < innerHeight;
    tooltip.style.left = `${Math.max(8, left)}px`;
    tooltip.style.top = `${fits ? below : frame.top + y - tooltip.offsetHeight - 8}px`;
    this.outline(chart === grid && { left: x, top: y, width, height });
    if (chart === grid) follow(view.owners[index]);
  },

  outline(box) {
    at("cursor").hidden = !box;
    for (const [side, length] of Object.entries(box || {})) at("cursor").style[side] = `${length}px`;
  },

  hide() {
    this.chart = this.index = null;
    at("tooltip").hidden = true;
    this.outline(null);
    follow(0);
  },

  refresh() {
    if (this.chart === grid) this.show(grid, this.index);
  },
};

for (const drawing of [grid, chart]) {
  const { canvas } = drawing;
  canvas.addEventListener(
    "pointermove",
    (event) => view && pointer.show(drawing, drawing.indexAt(event.offsetX, event.offsetY)),
  );
  canvas.addEventListener("pointerleave", () => pointer.hide());
  canvas.addEventListener("blur", () => pointer.hide());
  canvas.addEventListener("focus", () => {
    if (view && canvas.matches(":focus-visible")) pointer.show(drawing, drawing === grid ? 0 : chart.length - 1);
  });
  canvas.addEventListener("keydown", (event) => {
    if (!view || !event.key.startsWith("Arrow")) return;
    event.preventDefault();
    const next = pointer.chart === drawing ? drawing.neighbour(pointer.index, event.key) : 0;
    if (next >= 0 && next < drawing.length) pointer.show(drawing, next);
  });
}

// ---- the connection: open only while the page is visible and not paused ----

let paused = false;
let connection = null;

function setStatus(text, live = false) {
  at("status").textContent = text;
  at("status").classList.toggle("live", live);
}

function connectIfWatched() {
  const watched = !paused && !document.hidden;
  if (watched && !connection) {
    connection = new AbortController();
    listen(connection.signal);
  } else if (!watched && connection) {
    connection.abort();
    connection = null;
    setStatus("Paused");
  }
}

async function listen(signal) {
  for (let delay = 500; !signal.aborted; delay = Math.min(2 * delay, 8000)) {
    try {
      const response = await request("engine/events", { signal });
      setStatus("Live", true);
      at("access").hidden = true;
      for await (const data of readEvents(response)) {
        show(JSON.parse(data));
        delay = 500;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error.status === 401) return askForKey(error.message);
      console.info(error);
    }
    if (signal.aborted) return;
    setStatus("Reconnecting…");
    await new Promise((resolve) => setTimeout(resolve, delay));
  }
}

function askForKey(message) {
  connection = null;
  setStatus(message);
  at("access").hidden = false;
  at("key").focus();
}

function togglePause() {
  paused = !paused;
  at("pause").textContent = paused ? "Resume" : "Pause";
  connectIfWatched();
}

at("pause").addEventListener("click", togglePause);
document.addEventListener("keydown", (event) => {
  const typing = event.target instanceof HTMLInputElement;
  if (event.key.toLowerCase() === "p" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) togglePause();
  if (event.key === "Escape") pointer.hide();
});
at("access").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey.set(at("key").value);
  connectIfWatched();
});
document.addEventListener("visibilitychange", connectIfWatched);
new ResizeObserver(draw).observe(at("blocks").parentElement);
onThemeChange(() => {
  readColours();
  grid.forget();
  draw();
});
setInterval(() => connection && drawRates(), 1000); // an idle engine sends no snapshots, but its rates must fall to zero

readColours();
connectIfWatched();
