// The chat page: a conversation with streamed answers, and the token counts and times of each answer.

import { RequestFailed, apiKey, element, readEvents, request } from "./common.js";

const PARAMETERS = "nanovllm.parameters";
const smallScreen = matchMedia("(max-width: 60rem)"); // the same width as in the style sheet
const at = (id) => document.getElementById(id);
const [scroller, log, prompt, form, model] = ["scroller", "log", "prompt", "parameters", "model"].map(at);

let turns = []; // {question, answer, node}; a turn with an empty answer (refused, stopped) is not sent again
let answering = null; // the AbortController of the answer that is being streamed

// ---- the conversation ----

async function send() {
  const question = prompt.value.trim();
  if (!question || answering) return;
  prompt.value = "";
  fitPrompt();
  if (smallScreen.matches) showSettings(false); // the settings cover the conversation there
  at("welcome").hidden = true;
  const turn = { question, answer: "", node: element("article", "turn") };
  turn.node.append(element("p", "question", question));
  turns.push(turn);
  log.append(turn.node);
  await answer(turn);
}

async function answer(turn) {
  const controller = new AbortController();
  const view = new AnswerView(() => answer(turn));
  turn.answer = "";
  turn.node.querySelector(".answer")?.remove();
  turn.node.append(view.node);
  setAnswering(controller);
  scroller.scrollTop = scroller.scrollHeight;
  try {
    if (!model.value) await loadModels();
    await receive(requestBody(turn), controller.signal, view);
  } catch (error) {
    view.fail(error);
  } finally {
    turn.answer = view.text;
    view.finish();
    if (answering === controller) setAnswering(null);
  }
}

async function receive(body, signal, view) {
  const headers = { "Content-Type": "application/json" };
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers,
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of readEvents(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new RequestFailed(chunk.error.message);
    view.add(chunk);
  }
  throw new RequestFailed("The connection ended before the answer did.");
}

function requestBody(turn) {
  const { system, ...parameters } = readParameters();
  const messages = system ? [{ role: "system", content: system }] : [];
  for (const { question, answer } of turns.slice(0, turns.indexOf(turn))) {
    if (answer) messages.push({ role: "user", content: question }, { role: "assistant", content: answer });
  }
  messages.push({ role: "user", content: turn.question });
  return { model: model.value, messages, ...parameters, stream: true, stream_options: { include_usage: true } };
}

function setAnswering(controller) {
  const stopHadFocus = document.activeElement === at("stop");
  answering = controller;
  at("send").hidden = controller !== null;
  at("stop").hidden = controller === null;
  log.toggleAttribute("data-busy", controller !== null);
  if (stopHadFocus || document.activeElement === document.body) prompt.focus();
}

function startOver() {
  answering?.abort();
  setAnswering(null);
  turns = [];
  log.replaceChildren();
  at("welcome").hidden = false;
  prompt.focus();
}

// ---- one answer ----

class AnswerView {
  constructor(again) {
    this.text = "";
    this.reasoning = "";
    this.started = performance.now();
    this.firstToken = this.lastToken = null;
    this.numChunks = 0; // an estimate of the number of tokens, until `usage` arrives
    this.usage = this.finishReason = this.frame = null;
    this.failed = false;

    this.node = element("div", "answer");
    this.node.setAttribute("aria-busy", "true"); // screen readers read it when complete, not word by word
    this.thoughts = element("details", "reasoning");
    this.thoughts.append(element("summary", "", "Reasoning"), element("div", "text"));
    this.thoughts.hidden = true;
    this.body = element("div", "text");
    this.numbers = element("span", "numbers", "Waiting for the first token…");
    this.actions = element("span", "actions");
    this.actions.hidden = true;
    this.actions.append(
      copyButton(() => this.text),
      button("Again", () => answering || again(), "again"),
    );
    const foot = element("div", "foot");
    foot.append(this.numbers, this.actions);
    this.node.append(this.thoughts, this.body, foot);
  }

  add(chunk) {
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices[0];
    if (!choice) return;
    const reasoning = choice.delta.reasoning ?? choice.delta.reasoning_content ?? "";
    const text = choice.delta.content ?? "";
    this.finishReason = choice.finish_reason ?? this.finishReason;
    if (!text && !reasoning) return;
    this.lastToken = performance.now();
    this.firstToken ??= this.lastToken;
    this.numChunks += 1;
    this.text += text;
    this.reasoning += reasoning;
    this.frame ??= requestAnimationFrame(() => this.render());
  }

  render() {
    this.frame = null;
    const atEnd = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
    this.thoughts.hidden = !this.reasoning;
    renderText(this.thoughts.lastChild, this.reasoning.trim());
    renderText(this.body, this.text);
    this.numbers.textContent = this.describe();
    if (atEnd) scroller.scrollTop = scroller.scrollHeight;
  }

  describe() {
    if (this.firstToken === null) return this.failed ? "" : "No tokens";
    const numTokens = this.usage?.completion_tokens ?? this.numChunks;
    const seconds = (this.lastToken - this.firstToken) / 1000;
    const parts = [`${this.usage ? "" : "about "}${numTokens} ${numTokens === 1 ? "token" : "tokens"}`];
    if (numTokens > 1 && seconds > 0) parts.push(`${((numTokens - 1) / seconds).toFixed(1)} tokens/s`);
    parts.push(`first token after ${duration(this.firstToken - this.started)}`);
    const numCached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (numCached) parts.push(`${numCached} of ${this.usage.prompt_tokens} prompt tokens cached`);
    if (this.finishReason === "length") parts.push("cut off at the token limit");
    return parts.join(" · ");
  }

  fail(error) {
    if (error.name === "AbortError") {
      this.finishReason = "abort";
      return;
    }
    const message = error instanceof RequestFailed ? error.message : `The server cannot be reached (${error.message}).`;
    this.failed = true;
    const note = element("p", "error", message);
    note.setAttribute("role", "alert");
    this.node.insertBefore(note, this.node.lastChild);
    if (error.status === 401) askForKey();
  }

  finish() {
    if (this.frame !== null) cancelAnimationFrame(this.frame);
    this.render();
    if (this.finishReason === "abort") this.numbers.textContent += " · stopped";
    this.actions.hidden = false;
    this.actions.firstChild.hidden = !this.text;
    this.node.setAttribute("aria-busy", "false");
  }
}

const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);

// ---- text: paragraphs and fenced code; HTML in the model's text is shown as text ----

function splitText(text) {
  const blocks = [];
  let fence = null;
  let lines = [];
  const flush = (kind) => {
    const content = lines.join("\n");
    if (kind === "pre" || content.trim()) blocks.push({ kind, content });
    lines = [];
  };
  for (const line of text.split("\n")) {
    const mark = line.match(/^ {0,3}(`{3,}|~{3,})(.*)$/);
    const closes = fence && mark && mark[1].startsWith(fence) && !mark[2].trim();
    if (closes || (!fence && mark)) {
      flush(fence ? "pre" : "p");
      fence = closes ? null : mark[1];
    } else if (!fence && !line.trim()) {
      flush("p");
    } else {
      lines.push(line);
    }
  }
  if (fence || lines.length) flush(fence ? "pre" : "p");
  return blocks;
}

// Blocks that have not changed keep their DOM nodes, so that a selection survives while the answer grows.
function renderText(node, text) {
  const blocks = splitText(text);
  blocks.forEach(({ kind, content }, i) => {
    let block = node.children[i];
    if (block?.dataset.kind !== kind) {
      const fresh = newBlock(kind);
      if (block) block.replaceWith(fresh);
      else node.append(fresh);
      block = fresh;
    }
    const target = kind === "pre" ? block.firstChild : block;
    if (target.textContent !== content) target.textContent = content;
  });
  while (node.children.length > blocks.length) node.lastChild.remove();
}

function newBlock(kind) {
  const block = element(kind === "pre" ? "div" : "p", kind === "pre" ? "code" : "");
  block.dataset.kind = kind;
  if (kind === "pre") {
    const pre = element("pre");
    pre.tabIndex = 0; // so that long lines can be scrolled with the keyboard
    block.append(
      pre,
      copyButton(() => pre.textContent),
    );
  }
  return block;
}

function button(label, onClick, className = "") {
  const node = element("button", `quiet ${className}`, label);
  node.type = "button";
  node.addEventListener("click", onClick);
  return node;
}

function copyButton(text) {
  const node = button("Copy", async () => {
    node.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => (node.textContent = "Copy"), 1500);
  });
  return node;
}

async function copy(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(
      () => true,
      () => false,
    );
  }
  const area = element("textarea", "hidden"); // navigator.clipboard does not exist over http from another host
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}

// ---- settings ----

function readParameters() {
  const filled = [...new FormData(form)].filter(([, value]) => value.trim() !== "");
  return Object.fromEntries(filled.map(([name, value]) => [name, name === "system" ? value : Number(value)]));
}

function saveParameters() {
  localStorage.setItem(PARAMETERS, JSON.stringify(readParameters()));
}

function restoreParameters() {
  const saved = JSON.parse(localStorage.getItem(PARAMETERS) ?? "{}");
  for (const [name, value] of Object.entries(saved)) {
    if (form.elements[name]) form.elements[name].value = value;
  }
  at("key").value = apiKey.get();
}

function showSettings(open) {
  at("settings").hidden = !open;
  at("settings-toggle").setAttribute("aria-expanded", String(open));
  if (open) form.elements.system.focus();
}

function askForKey() {
  showSettings(true);
  at("key").focus();
}

async function loadModels() {
  const { data } = await (await request("v1/models")).json();
  model.replaceChildren(...data.map(({ id }) => new Option(id, id)));
  at("notice").hidden = true;
}

async function greet() {
  try {
    await loadModels();
  } catch (error) {
    const known = error instanceof RequestFailed;
    at("notice").textContent = known ? error.message : `The server cannot be reached (${error.message}).`;
    at("notice").hidden = false;
    if (error.status === 401) askForKey();
  }
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`; // plus the two borders
}

// ---- event handlers ----

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
prompt.addEventListener("input", fitPrompt);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (answering) {
    answering.abort();
  } else if (!at("settings").hidden) {
    showSettings(false);
    at("settings-toggle").focus();
  }
});
at("stop").addEventListener("click", () => answering?.abort());
at("new").addEventListener("click", startOver);
at("settings-toggle").addEventListener("click", () => showSettings(at("settings").hidden));
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", saveParameters);
form.addEventListener("reset", () => localStorage.removeItem(PARAMETERS));
at("access").addEventListener("submit", (event) => event.preventDefault());
at("key").addEventListener("change", () => {
  apiKey.set(at("key").value);
  greet();
});

restoreParameters();
greet();
