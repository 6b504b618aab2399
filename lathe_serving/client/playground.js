
"use strict";

const ALTERNATIVES = 5;
const UNLIKELY = Math.log(0.0001);  // a token as unlikely as this, or more, has the full colour
const ENDS = { stop: "ended by itself", length: "ended at the limit of new tokens" };

const $ = (id) => document.getElementById(id);
const form = $("form"), question = $("prompt"), stop = $("stop"), key = $("key"), mode = $("mode");

/** Make an element; text is always text, never HTML. */
function make(tag, properties, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function say(element, message) {
  element.textContent = message;
  element.hidden = !message;
}

// The servers.

function headers() {
  const sent = { "Content-Type": "application/json" };
  return key.value ? { ...sent, Authorization: `Bearer ${key.value}` } : sent;
}

async function ask(path, options) {
  let reply;
  try {
    reply = await fetch(path, { ...options, headers: headers() });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("This page's server does not answer. Is lathe playground still running?");
  }
  if (reply.ok) return reply;
  const told = await reply.json().catch(() => ({}));
  const message = told.error?.message ?? `The server answers with status ${reply.status}.`;
  if (reply.status === 401 || reply.status === 403) {
    $("key-row").hidden = false;
    throw new Error(`The server wants an API key: ${message}.`);
  }
  if (reply.status === 429 || reply.status === 503) {
    const seconds = reply.headers.get("Retry-After");
    throw new Error(`The server is busy: ${message}. Ask again ${seconds ? `in ${seconds} s` : "later"}.`);
  }
  throw new Error(message);
}

/** The JSON of the server-sent events of a response. */
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection was lost before the answer was whole.");
    held = (held + value).replaceAll("\r\n", "\n");
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n").filter((line) => line.startsWith("data:"));
      const data = lines.map((line) => line.slice(5)).join("\n").trim();
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

// The answer of one model.

class Pane {
  constructor() {
    const element = $("pane").content.cloneNode(true).firstElementChild;
    for (const name of ["model", "figures", "problem", "answer", "detail", "end"]) {
      this[name] = element.querySelector(`.${name}`);
    }
    this.element = element;
    this.clear();
    const pick = (event) => this.pick(event.target.closest(".token"));
    for (const kind of ["mouseover", "focusin", "click"]) this.answer.addEventListener(kind, pick);
    this.answer.addEventListener("keydown", (event) => this.walk(event));
  }

  get chosen() { return this.model.value === "" ? null : JSON.parse(this.model.value); }

  offer(models, index, mayBeNone) {
    const options = models.map((m) => make("option", { value: JSON.stringify(m) }, m.label));
    if (mayBeNone) options.unshift(make("option", { value: "" }, "no second model"));
    this.model.replaceChildren(...options);
    this.model.selectedIndex = index;
    this.model.disabled = options.length < 2;
  }

  async run(body, signal) {
    const model = this.chosen, { prompt, mode, system, ...rest } = body, isChat = mode === "chat";
    if (isChat && model !== null) this.begin(prompt);
    else this.clear();
    if (model === null) return;
    this.answer.setAttribute("aria-label", `Answer of ${model.label}`);
    this.place.append(make("span", { className: "prompt" }, prompt));
    this.answer.scrollTop = this.answer.scrollHeight;
    this.figures.textContent = "waiting";
    const started = this.started = performance.now();
    try {
      const question = isChat
        ? { messages: [...(system ? [{ role: "system", content: system }] : []), ...this.messages],
            logprobs: true, top_logprobs: ALTERNATIVES }
        : { prompt, logprobs: ALTERNATIVES };
      this.messages.push(this.reply);
      const asked = { ...rest, ...question, model: model.id, stream: true,
        stream_options: { include_usage: true } };
      const reply = await ask(`${model.endpoint}/${isChat ? "chat/" : ""}completions`,
        { method: "POST", body: JSON.stringify(asked), signal });
      for await (const event of events(reply)) {
        if (event.error) throw new Error(event.error.message);
        for (const choice of event.choices) this.take(choice);
        if (event.usage) this.reuse(event.usage);
      }
    } catch (error) {
      if (this.started !== started) return;  // another run has begun
      if (signal.aborted) this.end.textContent = "stopped";
      else say(this.problem, error.message);
    }
    if (!this.count) this.figures.textContent = "";
  }

  clear() {
    this.answer.replaceChildren();
    this.place = this.answer;
    this.tokens = [];
    this.messages = [];
    this.picked = null;
    this.explain(null);
    this.reset();
  }

  /** Begin the next turn of a chat. */
  begin(prompt) {
    if (this.messages.at(-1)?.content === "") this.messages.splice(-2);  // it was not answered
    this.messages.push({ role: "user", content: prompt });
    this.place = make("div", { className: "turn" });
    this.answer.append(this.place);
    this.reset();
  }

  reset() {
    this.figures.textContent = this.end.textContent = "";
    say(this.problem, "");
    this.reply = { role: "assistant", content: "" };
    this.names = [];
    this.count = this.started = 0;
  }

  /** Show a piece: a token each, but for the tokens that only together make a character. */
  take(choice) {
    const parts = choice.delta ? chatTokens(choice) : textTokens(choice);
    const tokens = parts.map((part) => part.name);
    let text = choice.delta ? choice.delta.content ?? "" : choice.text;
    this.reply.content += text;
    while (parts.length && text.startsWith(parts[0].name)) {
      text = text.slice(parts[0].name.length);
      this.show(parts[0].name, [parts.shift()]);
    }
    if (text) this.show(text, parts);
    this.names.push(...tokens);
    this.measure(tokens.length);
    if (choice.finish_reason) {
      this.end.textContent = ENDS[choice.finish_reason] ?? choice.finish_reason;
    }
  }

  show(text, parts) {
    if (!text) return;
    const className = text.includes("\n") ? "token line" : "token";
    const token = make("span", { className, tabIndex: this.tokens.length ? -1 : 0 }, text);
    const least = parts.reduce((least, part) => Math.min(least, part.logprob), 0);
    token.style.setProperty("--unlikely", Math.min(1, least / UNLIKELY).toFixed(3));
    token.setAttribute("role", "button");
    token.setAttribute("aria-pressed", "false");
    token.setAttribute("aria-label", [shown(text), ...parts.map((p) => percent(p.logprob))].join(", "));
    token.parts = parts;
    this.tokens.push(token);
    this.place.append(token);
    const { scrollHeight, scrollTop, clientHeight } = this.answer;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < 100;  // the reader has not scrolled up
    if (isAtEnd) this.answer.scrollTop = scrollHeight;
  }

  reuse({ prompt_tokens, prompt_tokens_details }) {
    const cached = prompt_tokens_details?.cached_tokens;
    if (cached) this.figures.textContent += ` · ${cached} of ${prompt_tokens} prompt tokens cached`;
  }

  measure(count) {
    if (!count) return;
    const seconds = (performance.now() - this.started) / 1000;
    if (!this.count) this.first = seconds;
    this.count += count;
    this.figures.textContent = [`first token after ${(1000 * this.first).toFixed(0)} ms`,
      `${this.count} ${this.count === 1 ? "token" : "tokens"}`,
      `${(this.count / seconds).toFixed(1)} tokens/s`].join(" · ");
  }

  pick(token) {
    if (!token || token === this.picked) return;
    this.tokens[0].tabIndex = -1;
    for (const [other, isIt] of [[this.picked, false], [token, true]]) {
      other?.setAttribute("aria-pressed", String(isIt));
      if (other) other.tabIndex = isIt ? 0 : -1;
    }
    this.picked = token;
    this.explain(token);
  }

  walk(event) {
    const at = this.tokens.indexOf(event.target);
    const last = this.tokens.length - 1;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: last }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    this.tokens[Math.max(0, Math.min(last, to))].focus();
  }

  explain(token) {
    const rows = [];
    for (const { name, logprob, top } of token?.parts ?? []) {
      rows.push(make("p", {}, "The model's probability of ", make("b", {}, shown(name)),
        ` here is ${percent(logprob)}.`));
      const others = Object.entries(top ?? {}).sort((a, b) => b[1] - a[1]);
      rows.push(make("table", {}, ...others.map((other) => row(other, other[0] === name))));
    }
    const hint = "Point at a token, tap it, or use the arrow keys to see its alternatives.";
    this.detail.replaceChildren(...(rows.length ? rows : [make("p", {}, hint)]));
  }
}

/** The tokens of a piece of text, with their log-probabilities and those of others. */
function textTokens(choice) {
  const { tokens = [], token_logprobs = [], top_logprobs } = choice.logprobs ?? {};
  return tokens.map((name, i) => ({ name, logprob: token_logprobs[i], top: top_logprobs?.[i] }));
}

/** The same of a piece of a chat's answer. */
function chatTokens(choice) {
  return (choice.logprobs?.content ?? []).map(({ token, logprob, top_logprobs }) => (
    { name: token, logprob, top: Object.fromEntries(top_logprobs.map((o) => [o.token, o.logprob])) }));
}

function row([name, logprob], isChosen) {
  const bar = make("div", { className: "bar" });
  bar.style.setProperty("--share", Math.exp(logprob));
  return make("tr", { className: isChosen ? "chosen" : "" }, make("td", { title: name }, shown(name)),
    make("td", {}, percent(logprob)), make("td", {}, bar));
}

/** A token so that spaces, line ends and control characters can be seen. */
function shown(name) {
  return JSON.stringify(name).replace(/[\u007f-\u009f\u2028\u2029\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
    (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

function percent(logprob) {
  if (logprob === null) return "unknown";
  const value = 100 * Math.exp(logprob);
  return value < 0.01 ? "under 0.01 %" : `${value.toPrecision(value < 1 ? 1 : 3)} %`;
}

// The page.

const panes = [new Pane(), new Pane()];
$("panes").append(...panes.map((pane) => pane.element));
let models = [], running = null, attempts = 0;

async function list() {
  const found = [];
  const endpoints = await (await ask("endpoints")).json();
  for (const [endpoint, url] of endpoints.entries()) {
    const { data } = await (await ask(`${endpoint}/models`)).json();
    const ids = new Set(data.map(({ id }) => id));
    for (const { id, root, has_chat_template, generation_config } of data) {
      if (root !== id && ids.has(root)) continue;  // another name of a model that is listed
      const label = endpoints.length > 1 ? `${id} on ${url}` : id;
      found.push({ endpoint, id, label, has_chat_template, generation_config });
    }
  }
  return found;
}

function offer(found) {
  models = found;
  if (!asked.has("mode") && models[0]?.has_chat_template) setMode("chat");
  for (const [name, value] of Object.entries(models[0]?.generation_config ?? {})) {
    const field = form.elements.namedItem(name);
    if (field && !asked.has(name) && field.value === field.defaultValue) field.value = value;
  }
  panes[0].offer(models, 0, false);
  panes[1].offer(models, models.length > 1 ? 2 : 0, true);
  panes[1].element.hidden = models.length < 2;
}

/** Whether there are models to ask. A new key and a submitted form may both ask for them at once:
 * only the last one counts, whichever answer comes first. */
async function ready() {
  const own = ++attempts;
  say($("notice"), "");
  if (models.length) return true;
  try {
    const found = await list();
    if (own === attempts) offer(found);
  } catch (error) {
    if (own !== attempts) return false;
    say($("notice"), error.message);
    if (!$("key-row").hidden) key.focus();
  }
  return own === attempts && models.length > 0;
}

function request() {
  const body = { prompt: question.value };
  for (const field of form.querySelectorAll("[name]")) {
    if (field.value === "") continue;
    body[field.name] = field.type === "number" ? Number(field.value) : field.value;
  }
  return body;
}

function setMode(value) {
  const isChat = (mode.value = value) === "chat";
  $("system-row").hidden = $("new").hidden = !isChat;
  $("prompt-label").textContent = isChat ? "Message" : "Prompt";
  $("generate").textContent = isChat ? "Send" : "Generate";
  $("panes").classList.toggle("chat", isChat);
  for (const field of [form.elements.max_tokens, question]) {  // which a chat leaves empty
    const [before, after] = isChat ? [field.defaultValue, ""] : ["", field.defaultValue];
    if (field.value === before) field.value = after;
  }
  renew();
}

/** Forget the chats. */
function renew() {
  $("verdict").textContent = "";
  for (const pane of panes) pane.clear();
}

/** Where two answers part, in words. */
function verdict() {
  if (!panes.every((pane) => pane.count && pane.problem.hidden)) return "";
  const [one, two] = panes.map((pane) => pane.names);
  const most = Math.max(one.length, two.length);
  for (let i = 0; i < most; i++) {
    if (one[i] !== two[i]) return `The two answers part at token ${i + 1}.`;
  }
  return `The two answers are the same, all ${most} tokens.`;
}

async function generate() {
  running?.abort();
  const own = running = new AbortController();
  stop.disabled = false;
  $("verdict").textContent = "";
  if (await ready()) {
    const body = request();
    if (body.mode === "chat") question.value = "";
    await Promise.all(panes.map((pane) => pane.run(body, own.signal)));
    if (body.mode === "chat" && !panes.some((pane) => pane.reply.content)) question.value ||= body.prompt;
    if (running === own && !own.signal.aborted) $("verdict").textContent = verdict();
  }
  if (running === own) {
    running = null;
    stop.disabled = true;
  }
}

form.addEventListener("submit", (event) => { event.preventDefault(); generate(); });
question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
stop.addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => { running?.abort(); renew(); question.focus(); });
mode.addEventListener("change", () => { running?.abort(); setMode(mode.value); });
key.addEventListener("change", () => ready());
window.addEventListener("pagehide", () => running?.abort());

const asked = new URLSearchParams(location.search);
setMode(asked.get("mode") === "chat" ? "chat" : "text");
for (const [name, value] of asked) {
  const field = name === "prompt" ? question : form.querySelector(`[name="${CSS.escape(name)}"]`);
  if (field) field.value = value;
}
if (asked.has("prompt")) generate();
else ready();
