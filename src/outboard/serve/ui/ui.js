// The page at /ui: what /metrics says, each second, and a chat over /v1. It has no state on the server.

const POLL = 1000; // ms between two looks at /metrics
const KEPT = 120_000; // ms that the plots go back
const GAP = 5000; // ms after which two samples are not compared: the page was hidden, or the server away
const RECENT = 10_000; // ms over which requests/s is taken: they are few, and each second alone says little

const byId = (id) => document.getElementById(id);

/** An element with classes, text and children. Text is never read as HTML. */
function make(tag, classes = "", ...content) {
  const element = document.createElement(tag);
  if (classes) element.className = classes;
  element.append(...content);
  return element;
}

/** Sets text that has changed; the rest of the page can be selected while figures move. */
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Numbers as text

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const fine = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

const known = (value) => value !== undefined && value !== null && Number.isFinite(value);

function number(value) {
  if (!known(value)) return "–";
  return Math.abs(value) >= 100 ? whole.format(value) : fine.format(value);
}

function duration(seconds) {
  if (!known(seconds) || seconds < 0) return "–";
  if (seconds < 0.9995) return `${fine.format(seconds * 1000)} ms`;
  if (seconds < 60) return `${fine.format(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

// Requests, and the key that they may need

class KeyWanted extends Error {}

let key = null;
try {
  key = sessionStorage.getItem("outboard-key");
} catch {
  // Storage is forbidden here; the key lasts as long as the page.
}

function setKey(value) {
  key = value;
  byId("forget-key").hidden = key === null;
  try {
    if (key === null) sessionStorage.removeItem("outboard-key");
    else sessionStorage.setItem("outboard-key", key);
  } catch {
    // As above.
  }
}

async function call(path, { headers = {}, ...options } = {}) {
  const used = key;
  const response = await fetch(new URL(`../${path}`, import.meta.url), {
    ...options,
    mode: "same-origin",
    cache: "no-store",
    headers: used === null ? headers : { ...headers, Authorization: `Bearer ${used}` },
  });
  if (response.status === 401) {
    if (used === key) askForKey();
    throw new KeyWanted("The server wants an API key.");
  }
  return response;
}

function askForKey() {
  const form = byId("key-form");
  if (!form.hidden) return;
  say(byId("key-error"), key === null ? "" : "The server did not accept this key.");
  setKey(null);
  form.hidden = false;
  // Whoever is writing a message is not pulled away from it.
  if (byId("prompt").value === "") byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const value = byId("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(value)) {
    say(byId("key-error"), "A key has no spaces, and only letters, digits and signs of ASCII.");
    return;
  }
  setKey(value);
  byId("key").value = "";
  byId("key-form").hidden = true;
  byId("prompt").focus();
  loadModels();
  poll();
});

byId("forget-key").addEventListener("click", () => {
  setKey(null);
  byId("prompt").focus();
  loadModels();
  poll();
});

// Prometheus text

const SAMPLE = /^([A-Za-z_:][\w:]*)(?:\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\})?[ \t]+(\S+)/;
const LABEL = /([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"/g;

/** Name -> series, each with its labels, the text of these, and its value. */
function parseMetrics(text) {
  const families = new Map();
  for (const line of text.split("\n")) {
    const found = SAMPLE.exec(line);
    if (!found) continue;
    const [, name, id = "", value] = found;
    const labels = {};
    for (const [, label, raw] of id.matchAll(LABEL)) {
      labels[label] = raw.replace(/\\(.)/g, (_, sign) => (sign === "n" ? "\n" : sign));
    }
    if (!families.has(name)) families.set(name, []);
    families.get(name).push({ id, labels, value: value === "+Inf" ? Infinity : Number(value) });
  }
  return families;
}

const series = (families, name) => families.get(`outboard:${name}`) ?? [];

function total(families, name) {
  const all = series(families, name);
  return all.length ? all.reduce((sum, { value }) => sum + value, 0) : undefined;
}

/**
 * How much each series of a counter has risen, summed by a label. A counter that fell has begun again at zero, as has one
 * that was not there before.
 */
function rises(before, now, name, label) {
  const earlier = new Map(series(before, name).map(({ id, value }) => [id, value]));
  const sums = new Map();
  for (const { id, labels, value } of series(now, name)) {
    const from = earlier.get(id) ?? 0;
    sums.set(labels[label], (sums.get(labels[label]) ?? 0) + (value >= from ? value - from : value));
  }
  return sums;
}

/** The rise of a counter over all its labels. Labels may be new with the first event that has them: till then it is 0. */
function rise(before, now, name) {
  return [...rises(before, now, name, "model_name").values()].reduce((sum, value) => sum + value, 0);
}

/** A quantile of what a histogram has counted between two samples, taken as even within each bucket. */
function quantile(before, now, name, part) {
  const buckets = [...rises(before, now, `${name}_bucket`, "le")]
    .map(([bound, count]) => [bound === "+Inf" ? Infinity : Number(bound), count])
    .sort((a, b) => a[0] - b[0]);
  const count = buckets.at(-1)?.[1] ?? 0;
  if (count <= 0) return undefined;
  let low = 0;
  let below = 0;
  for (const [bound, upTo] of buckets) {
    if (upTo >= part * count && upTo > below) {
      // Of what lies beyond the last bound, only that bound is known.
      return bound === Infinity ? low : low + ((bound - low) * (part * count - below)) / (upTo - below);
    }
    low = bound;
    below = upTo;
  }
  return undefined;
}

// Engines

const STATES = ["STARTING", "READY", "STALLED", "RESTARTING", "DEAD", "STOPPED"];
const rows = new Map(); // rank -> the cells of its row, and its state

function addRow(rank) {
  const mark = make("span", "mark");
  mark.ariaHidden = "true";
  const stateText = make("span", "state-text");
  const state = make("span", "state", mark, stateText);
  const heading = make("th", "", rank);
  heading.scope = "row";
  const level = make("span");
  const bar = make("span", "bar", level);
  bar.ariaHidden = "true";
  const usage = make("span", "percent");
  const names = ["pid", "incarnation", "running", "waiting", "usage", "steps", "age", "restarts"];
  const cells = Object.fromEntries(names.map((name) => [name, make("td")]));
  cells.usage.append(bar, usage);
  const element = make("tr", "", heading, make("td", "text", state), ...Object.values(cells));
  element.dataset.rank = rank;
  const row = { ...cells, usage, level, state, stateText, element, current: undefined };
  rows.set(rank, row);
  return row;
}

function showEngines(before, now, elapsed) {
  const engines = new Map();
  const names = {
    running: "num_requests_running",
    waiting: "num_requests_waiting",
    usage: "kv_cache_usage_perc",
    pid: "engine_pid",
    incarnation: "engine_incarnation",
    age: "engine_last_step_age_seconds",
    restarts: "engine_restarts_total",
  };
  const engine = (rank) => {
    if (!engines.has(rank)) engines.set(rank, {});
    return engines.get(rank);
  };
  for (const [field, name] of Object.entries(names)) {
    for (const { labels, value } of series(now, name)) if (labels.engine) engine(labels.engine)[field] = value;
  }
  for (const { labels, value } of series(now, "engine_state")) if (value) engine(labels.engine).state = labels.state;
  const steps = before ? rises(before, now, "engine_steps_total", "engine") : new Map();

  for (const [rank, row] of rows) {
    if (!engines.has(rank)) {
      row.element.remove();
      rows.delete(rank);
    }
  }
  const news = [];
  const ranks = [...engines.keys()].sort((a, b) => Number(a) - Number(b) || a.localeCompare(b));
  ranks.forEach((rank, place) => {
    const facts = engines.get(rank);
    const row = rows.get(rank) ?? addRow(rank);
    const state = facts.state ?? "unknown";
    if (row.current !== undefined && row.current !== state) news.push(`Engine ${rank} is ${state}.`);
    row.current = state;
    row.state.dataset.state = STATES.includes(state) ? state : "";
    say(row.stateText, state);
    say(row.pid, facts.pid > 0 ? String(facts.pid) : "–");
    say(row.incarnation, number(facts.incarnation));
    say(row.running, number(facts.running));
    say(row.waiting, number(facts.waiting));
    const percent = Math.min(100, Math.max(0, facts.usage * 100));
    say(row.usage, known(percent) ? `${percent.toFixed(1)}%` : "–");
    row.level.style.width = `${known(percent) ? percent : 0}%`;
    say(row.steps, steps.has(rank) ? number(steps.get(rank) / elapsed) : "–");
    say(row.age, duration(facts.age));
    say(row.restarts, number(facts.restarts));
    const body = byId("engine-rows");
    if (body.children[place] !== row.element) body.insertBefore(row.element, body.children[place] ?? null);
  });
  byId("no-engines").hidden = rows.size > 0;
  if (news.length) say(byId("engine-news"), news.join(" "));
}

// Plots

const SVG = "http://www.w3.org/2000/svg";
const records = []; // what was computed of each sample, oldest first; only `at` where a gap begins
let cursor = null; // the time that the pointer is on, in all plots

function draw(tag, attributes, ...content) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...content);
  return element;
}

/** A step between lines of the grid: 1, 2 or 5 times a power of ten. */
function gridStep(top, least) {
  const rough = Math.max(top / 3, least);
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
}

class Plot {
  constructor(name, format, least, curves) {
    Object.assign(this, { name, format, least, curves });
    this.values = curves.map(() => make("b"));
    const entries = curves.map(({ label }, index) => {
      const line = draw("line", { x1: 1, x2: 21, y1: 5, y2: 5, class: `curve series-${index}` });
      const swatch = draw("svg", { viewBox: "0 0 22 10", "aria-hidden": "true" }, line);
      return make("span", "", swatch, `${label} `, this.values[index]);
    });
    this.ago = make("span", "ago");
    const heading = make("div", "heading", make("span", "name", name), this.ago);
    const caption = make("figcaption", "", heading, make("div", "legend", ...entries));
    this.svg = draw("svg", { role: "img" });
    byId("plots").append(make("figure", "panel plot", caption, this.svg));
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => {
      cursor = null;
      drawPlots();
    });
  }

  point(event) {
    const { left } = this.svg.getBoundingClientRect();
    const part = (event.clientX - left - this.left) / (this.svg.clientWidth - this.left - this.right);
    cursor = this.now - KEPT * (1 - Math.min(1, Math.max(0, part)));
    drawPlots();
  }

  draw(now) {
    this.now = now;
    this.left = 54;
    this.right = 6;
    const width = this.svg.clientWidth;
    const height = this.svg.clientHeight;
    const bottom = height - 18;
    const all = this.curves.flatMap(({ field }) => records.map((record) => record[field]).filter(known));
    const step = gridStep(Math.max(0, ...all), this.least);
    const top = step * Math.max(1, Math.ceil(Math.max(0, ...all) / step - 1e-9));
    const x = (at) => this.left + (width - this.left - this.right) * (1 - (now - at) / KEPT);
    const y = (value) => bottom - (bottom - 8) * (value / top);

    const parts = [];
    for (let line = 0; line * step <= top * 1.001; line += 1) {
      const level = y(line * step);
      parts.push(draw("line", { x1: this.left, x2: width - this.right, y1: level, y2: level, class: "grid" }));
      parts.push(draw("text", { x: this.left - 7, y: level + 4, "text-anchor": "end" }, this.format(line * step)));
    }
    for (const [at, label, anchor] of [[KEPT, "2 min ago", "start"], [KEPT / 2, "1 min", "middle"], [0, "now", "end"]]) {
      parts.push(draw("text", { x: x(now - at), y: height - 3, "text-anchor": anchor }, label));
    }
    this.curves.forEach(({ field }, index) => {
      let path = "";
      let pen = false;
      for (const record of records) {
        if (known(record[field])) {
          const place = `${x(record.at).toFixed(1)} ${y(record[field]).toFixed(1)}`;
          // A line of no length shows a value that has no neighbours, as a dot.
          path += pen ? `L${place}` : `M${place}h0`;
        }
        pen = known(record[field]);
      }
      if (path) parts.push(draw("path", { d: path, class: `curve series-${index}` }));
    });
    const pointed = cursor === null ? undefined : nearest(cursor);
    if (pointed) {
      parts.push(draw("line", { x1: x(pointed.at), x2: x(pointed.at), y1: 8, y2: bottom, class: "cursor" }));
    }
    this.svg.replaceChildren(...parts);
    say(this.ago, pointed ? `${Math.round((now - pointed.at) / 1000)} s ago` : "");
    const sentences = this.curves.map(({ field, label }, index) => {
      const values = records.map((record) => record[field]).filter(known);
      say(this.values[index], this.format(pointed ? pointed[field] : values.at(-1)));
      if (!values.length) return `${label}: no values yet.`;
      const [last, low, high] = [values.at(-1), Math.min(...values), Math.max(...values)].map(this.format);
      return `${label}: last ${last}, lowest ${low}, highest ${high}.`;
    });
    this.svg.setAttribute("aria-label", `${this.name}, last 2 minutes. ${sentences.join(" ")}`);
  }
}

function nearest(at) {
  const distance = (record) => Math.abs(record.at - at);
  return records.reduce((best, record) => (best && distance(best) <= distance(record) ? best : record), undefined);
}

const plots = [
  new Plot("Tokens per second", number, 1, [{ field: "tokens", label: "Generated" }]),
  new Plot("Requests", number, 1, [{ field: "running", label: "Running" }, { field: "waiting", label: "Waiting" }]),
  new Plot("Time to first token", duration, 0.001, [{ field: "first50", label: "p50" }, { field: "first95", label: "p95" }]),
  new Plot("Time per output token", duration, 0.001, [{ field: "each50", label: "p50" }, { field: "each95", label: "p95" }]),
];

function drawPlots() {
  const now = performance.now();
  while (records.length && records[0].at < now - KEPT) records.shift();
  for (const plot of plots) plot.draw(now);
}

new ResizeObserver(drawPlots).observe(byId("plots"));

// What /metrics says

let last = null; // the last sample: when it came, and what it said
let recent = []; // samples of the last seconds, oldest first

function showTiles(now, record) {
  const oldest = recent[0];
  const seconds = oldest ? (record.at - oldest.at) / 1000 : 0;
  const rate = (name) => (seconds > 0 ? rise(oldest.families, now, name) / seconds : undefined);
  say(byId("tile-tokens"), number(record.tokens));
  say(byId("tile-tokens-more"), known(record.prompt) ? `prompts ${number(record.prompt)}/s` : "");
  say(byId("tile-running"), number(record.running));
  const ready = [...rows.values()].filter(({ current }) => current === "READY").length;
  say(byId("tile-running-more"), `${ready} of ${rows.size} ${rows.size === 1 ? "engine" : "engines"} ready`);
  say(byId("tile-waiting"), number(record.waiting));
  const fullest = Math.max(...series(now, "kv_cache_usage_perc").map(({ value }) => value));
  say(byId("tile-waiting-more"), known(fullest) ? `KV use ≤ ${Math.ceil(fullest * 100)}%` : "");
  say(byId("tile-requests"), number(rate("request_success_total")));
  say(byId("tile-requests-more"), `${number(total(now, "request_success_total") ?? 0)} in all`);
  say(byId("tile-refused"), number(total(now, "requests_refused_total") ?? 0));
  const refused = rate("requests_refused_total");
  say(byId("tile-refused-more"), refused > 0 ? `${number(refused)}/s` : "in all");
}

function take(text, at) {
  const now = parseMetrics(text);
  if (last && at - last.at > GAP) {
    records.push({ at: last.at + 1 });
    last = null;
    recent = [];
  }
  const elapsed = last ? (at - last.at) / 1000 : 0;
  const record = { at, running: total(now, "num_requests_running"), waiting: total(now, "num_requests_waiting") };
  if (last) {
    const before = last.families;
    record.tokens = rise(before, now, "generation_tokens_total") / elapsed;
    record.prompt = rise(before, now, "prompt_tokens_total") / elapsed;
    record.first50 = quantile(before, now, "time_to_first_token_seconds", 0.5);
    record.first95 = quantile(before, now, "time_to_first_token_seconds", 0.95);
    record.each50 = quantile(before, now, "request_time_per_output_token_seconds", 0.5);
    record.each95 = quantile(before, now, "request_time_per_output_token_seconds", 0.95);
  }
  records.push(record);
  showEngines(last?.families, now, elapsed);
  showTiles(now, record);
  last = { at, families: now };
  recent.push(last);
  while (recent.length > 1 && at - recent[0].at > RECENT) recent.shift();
}

let connection = "connecting";
let lastAnswer = null; // time of day of the last answer

function connect(state, problem = "") {
  const texts = { live: "Live", lost: "Not reached", key: "Key wanted" };
  connection = state;
  byId("connection").dataset.state = state;
  say(byId("connection-text"), texts[state]);
  // Said once: a live region that changes each second would be read out each second.
  say(byId("lost-text"), problem);
  const since = lastAnswer ? `The figures are those of ${lastAnswer.toLocaleTimeString()}.` : "";
  say(byId("lost-since"), problem && `Trying again each second. ${since}`);
  byId("lost").hidden = !problem;
}

let polling = false;
let timer = 0;

async function poll() {
  clearTimeout(timer);
  if (polling) return;
  polling = true;
  const began = performance.now();
  let text = null;
  try {
    const response = await call("metrics", { signal: AbortSignal.timeout(GAP) });
    if (response.ok) text = await response.text();
    else connect("lost", `The server answers ${response.status} to /metrics.`);
  } catch (error) {
    if (error instanceof KeyWanted) connect("key");
    else connect("lost", "The server cannot be reached.");
  }
  if (text !== null) {
    take(text, performance.now());
    lastAnswer = new Date();
    // What wanted a key no longer does; if /v1 still does, asking for the models says so.
    if (connection === "key") byId("key-form").hidden = true;
    // It may be another server than before, with other models.
    if (connection !== "live" || byId("model").disabled) loadModels();
    connect("live");
  }
  drawPlots();
  polling = false;
  // Without its key there is little to ask for.
  const pause = connection === "key" ? GAP : POLL;
  if (!document.hidden) timer = setTimeout(poll, Math.max(0, pause - (performance.now() - began)));
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else poll();
});

// Chat

let models = null; // the request for them, while it runs
let history = []; // what the model is told, as messages of the API
let answering = null; // aborts the answer that is being streamed

async function loadModels() {
  if (models || !byId("key-form").hidden) return;
  const select = byId("model");
  try {
    models = call("v1/models", { signal: AbortSignal.timeout(GAP) });
    const response = await models;
    if (!response.ok) return;
    const chosen = select.value;
    const ids = (await response.json()).data.map(({ id }) => id);
    select.replaceChildren(...ids.map((id) => new Option(id, id, false, id === chosen)));
    select.disabled = ids.length === 0;
    byId("send").disabled = select.disabled;
  } catch {
    // The poll that finds the server again asks again.
  } finally {
    models = null;
  }
}

/** The data of each event of a text/event-stream. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      // A carriage return at the end may be half of a line's end.
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        else if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Puts a message into the log; returns what is to be filled in. */
function addMessage(role, who, text = "") {
  const parts = { said: make("div", "said", text), facts: make("p", "facts"), error: make("p", "error") };
  parts.element = make("li", `message ${role}`, make("p", "who", who), parts.said, parts.facts, parts.error);
  byId("no-messages").hidden = true;
  byId("messages").append(parts.element);
  return parts;
}

/** Does something that makes the log longer; who reads its end goes on reading its end. */
function following(change) {
  const log = byId("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

function setAnswering(controller) {
  const hadFocus = document.activeElement === byId("stop");
  answering = controller;
  byId("stop").hidden = controller === null;
  byId("send").hidden = controller !== null;
  if (hadFocus) byId("prompt").focus();
}

async function refusal(response) {
  const text = await response.text();
  try {
    const { error, detail } = JSON.parse(text);
    return error?.message ?? String(detail);
  } catch {
    return `The server answered ${response.status}.`;
  }
}

/** Streams one answer into `answer` and tells what became of it. */
async function stream(model, messages, signal, answer) {
  const response = await call("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ model, messages, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw new Error(await refusal(response));
  for await (const data of events(response.body)) {
    if (data === "[DONE]") {
      answer.complete = true;
      return;
    }
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message ?? "The server reported an error.");
    const choice = event.choices?.[0];
    if (choice?.delta?.content) answer.add(choice.delta.content);
    if (choice?.finish_reason) answer.reason = choice.finish_reason;
    if (event.usage) answer.tokens = event.usage.completion_tokens;
  }
}

class Answer {
  constructor(parts) {
    this.parts = parts;
    this.text = "";
    this.chunks = 0;
    this.began = performance.now();
    this.frame = 0;
    parts.element.ariaBusy = "true";
  }

  add(text) {
    this.lastAt = performance.now();
    this.firstAt ??= this.lastAt;
    this.chunks += 1;
    this.text += text;
    // A page that is not shown has no frames; what came meanwhile is shown with the first.
    if (!this.frame) this.frame = requestAnimationFrame(() => this.show());
  }

  show() {
    this.frame = 0;
    following(() => {
      say(this.parts.said, this.text);
      say(this.parts.facts, this.facts());
    });
  }

  facts() {
    if (this.firstAt === undefined) return this.stopped ? "stopped" : "";
    // Without the server's count, a piece of text is taken for a token.
    const tokens = this.tokens ?? this.chunks;
    const about = this.tokens === undefined ? "about " : "";
    const seconds = (this.lastAt - this.firstAt) / 1000;
    const facts = [`first token after ${duration((this.firstAt - this.began) / 1000)}`];
    if (tokens > 1 && seconds > 0) facts.push(`${about}${number((tokens - 1) / seconds)} tokens/s`);
    facts.push(`${about}${whole.format(tokens)} ${tokens === 1 ? "token" : "tokens"}`);
    if (this.reason === "length") facts.push("cut off at the limit of tokens");
    if (this.stopped) facts.push("stopped");
    return facts.join(" · ");
  }

  end(problem) {
    cancelAnimationFrame(this.frame);
    this.parts.element.ariaBusy = "false";
    this.show();
    following(() => say(this.parts.error, problem));
    const ending = this.stopped ? "Stopped." : problem;
    say(byId("chat-news"), [this.text && `Answer: ${this.text}`, ending].filter(Boolean).join(" "));
  }
}

async function send() {
  const prompt = byId("prompt");
  const model = byId("model").value;
  const text = prompt.value;
  if (answering || !model || !text.trim()) return;
  const told = history;
  const controller = new AbortController();
  setAnswering(controller);
  prompt.value = "";
  say(byId("chat-news"), "");
  addMessage("user", "You", text);
  const answer = new Answer(addMessage("assistant", model));
  byId("log").scrollTop = byId("log").scrollHeight;
  told.push({ role: "user", content: text });
  let problem = "";
  try {
    await stream(model, told, controller.signal, answer);
    if (!answer.complete && !answer.reason) problem = "The answer broke off.";
  } catch (error) {
    if (controller.signal.aborted) answer.stopped = true;
    else if (error instanceof TypeError) problem = "The connection to the server was lost.";
    else problem = error.message;
  }
  answer.end(problem);
  if (answer.text) {
    told.push({ role: "assistant", content: answer.text });
  } else if (problem || answer.stopped) {
    // Nothing was answered: the message is not part of the talk, and can be sent again.
    told.pop();
    if (told === history && prompt.value === "") prompt.value = text;
  }
  if (answering === controller) setAnswering(null);
}

function stop() {
  answering?.abort();
}

byId("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});

byId("prompt").addEventListener("keydown", (event) => {
  // While a word is being composed, Enter chooses it.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !event.isComposing) stop();
});

byId("stop").addEventListener("click", stop);

byId("new-chat").addEventListener("click", () => {
  stop();
  history = [];
  byId("messages").replaceChildren();
  byId("no-messages").hidden = false;
  byId("prompt").focus();
});

setKey(key);
poll();
