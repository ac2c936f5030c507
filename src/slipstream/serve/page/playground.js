// A chat with the server that sent this page.

const { model, drafter, trace, chat } = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const path = chat ? "/v1/chat/completions" : "/v1/completions"; // without a chat template the text so far is gone on with
let turns = []; // what was said: { role, content }
let failed = null; // the last question, where it got no answer: it is not among the turns
let stopping = null; // of the answer under way
let lastBody = null;

function settled(extra = {}) {
  const number = (id) => (at(id).value === "" ? undefined : Number(at(id).value));
  const system = chat ? at("system").value.trim() : "";
  const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns];
  const body = { model, ...(chat ? { messages } : { prompt: turns.map((turn) => turn.content).join("") }) };
  for (const id of ["temperature", "top_p", "max_tokens", "seed"]) if (number(id) !== undefined) body[id] = number(id);
  const schema = at("schema").value.trim();
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } };
  return { ...body, ...extra };
}

function headers() {
  const key = at("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

// The events of a stream. Throws what the server says is wrong.
async function* asked(body, signal) {
  const reply = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!reply.ok) throw new Error((await reply.json()).error.message);
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// One answer: its text, its figures and clock, and the tree of any of its rounds.
function side(name) {
  const told = el("p", { class: "answer", tabindex: -1 });
  const live = el("h3", { class: "live" }, name);
  const panel = el("div", { class: "panel", hidden: "" });
  const rounds = [];
  let tokens = 0;
  let began = 0;
  let ended = 0;

  function show(number) {
    panel.hidden = false;
    panel.replaceChildren(...roundPart(rounds[number], number, rounds.length, rounds[number].words, show));
    for (const part of told.children) part.classList.toggle("current", part.dataset.round === String(number));
  }
  const opened = (event) => {
    const part = event.target.closest("[data-round]");
    if (!part || (event.key && event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    show(Number(part.dataset.round));
  };
  told.addEventListener("click", opened);
  told.addEventListener("keydown", opened);

  function clock() {
    const seconds = ((ended || performance.now()) - began) / 1000;
    const said = sum(rounds.map((round) => round.pieces.length));
    const tau = rounds.length ? ` τ ${fixed(said / rounds.length)},` : "";
    live.replaceChildren(`${name}: `, el("strong", {}, `${fixed(seconds, 1)} s`), `,${tau} ${fixed(tokens / seconds, 1)} tokens/s, ${counted(tokens, "token")}`);
    if (!ended) requestAnimationFrame(clock);
  }

  function take(event) {
    const choice = event.choices[0];
    if (event.trace) {
      const round = event.trace; // its texts are places in `words`
      const number = rounds.push(round) - 1;
      const kinds = round.pieces.map((_, i) => (i < round.path.length - 1 ? "accepted" : round.kind));
      const pieces = round.pieces.map((piece, i) => el("span", { class: kinds[i] }, piece));
      const label = `round ${number + 1}: ${round.pieces.join("")}`;
      told.append(el("span", { "data-round": number, tabindex: 0, role: "button", "aria-label": label }, pieces));
      tokens += round.pieces.length;
    } else if (choice?.text || choice?.delta?.content) {
      told.append(choice.text || choice.delta.content);
      tokens += 1;
    }
    if (event.usage) tokens = event.usage.completion_tokens;
  }

  const root = el("div", {}, live, told, panel);
  return {
    root,
    text: () => told.textContent,
    begin: () => ((began = performance.now()), clock()),
    end: () => (ended = performance.now()),
    take,
    fail: (fault) => root.append(el("p", { class: "fault", role: "alert" }, fault)),
  };
}

// Have the turns answered, plainly beside it where that is asked for: one after the other, so that neither slows the
// other.
async function answer(section) {
  const sides = el("div", { class: "sides" });
  section.append(sides);
  const plain = at("plain").checked;
  let body;
  try {
    body = settled(plain ? { drafter: "vanilla" } : {});
  } catch (fault) {
    sides.append(el("p", { class: "fault", role: "alert" }, `JSON schema: ${fault.message}`));
    return null;
  }
  lastBody = body;
  const first = await run(body, plain ? "Plain decoding" : drafter, sides);
  if (!first) return null;
  const steps = el("p", { class: "steps" }, el("button", { type: "button", click: () => compare() }, "Plain decoding beside it"));
  const compare = async () => {
    if (!at("stop").disabled) return; // another answer is under way
    steps.remove();
    await run({ ...body, drafter: "vanilla" }, "Plain decoding", sides);
  };
  if (!plain) {
    section.append(steps);
    if (at("beside").checked && !first.stopped) await compare();
  }
  return first.text;
}

async function run(body, name, sides) {
  const made = side(name);
  sides.append(made.root);
  stopping = new AbortController();
  at("stop").disabled = false;
  at("send").disabled = true;
  made.begin();
  let stopped = false;
  try {
    const stream = asked({ ...body, stream: true, stream_options: { include_usage: true }, trace }, stopping.signal);
    for await (const event of stream) made.take(event);
  } catch (fault) {
    stopped = fault.name === "AbortError";
    if (!stopped) {
      made.fail(fault.message);
      return null;
    }
  } finally {
    made.end();
    at("stop").disabled = true;
    at("send").disabled = false;
  }
  at("status").textContent = stopped ? "Stopped." : "Answered.";
  return { text: made.text(), stopped };
}

async function say(content) {
  const talk = turns; // "New" begins another one meanwhile
  failed = null;
  talk.push({ role: "user", content });
  const section = el("section", {}, el("h2", { class: "asked" }, content));
  at("talk").append(section);
  section.scrollIntoView({ block: "start" });
  const said = await answer(section);
  if (said === null) {
    talk.pop();
    if (talk === turns) failed = content;
  } else talk.push({ role: "assistant", content: said });
  at("said").focus();
}

function retry() {
  const last = turns.findLastIndex((turn) => turn.role === "user");
  const content = failed ?? turns[last]?.content;
  if (content === undefined || !at("stop").disabled) return;
  if (failed === null) turns = turns.slice(0, last);
  at("talk").lastElementChild?.remove();
  if (Number(at("temperature").value)) at("seed").value = Number(at("seed").value) + 1;
  say(content);
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

function curl(body) {
  const key = at("key").value.trim() ? " -H 'Authorization: Bearer KEY'" : "";
  return `curl ${location.origin}${path} -H 'Content-Type: application/json'${key} \\\n    -d ${quoted(JSON.stringify(body))}`;
}

function python(body) {
  const { drafter: own, ...rest } = body;
  const literal = (value) => // JSON, but for three words; strings are left alone
    JSON.stringify(value).replace(/"(?:[^"\\]|\\.)*"|\btrue\b|\bfalse\b|\bnull\b/g, (word) => ({ true: "True", false: "False", null: "None" })[word] ?? word);
  const lines = Object.entries(rest).map(([name, value]) => `    ${name}=${literal(value)},`);
  if (own) lines.push(`    extra_body={"drafter": "${own}"},`);
  return `from openai import OpenAI\n\nclient = OpenAI(base_url="${location.origin}/v1", api_key="KEY")\nmade = client.${chat ? "chat." : ""}completions.create(\n${lines.join("\n")}\n)\nprint(made.choices[0].${chat ? "message.content" : "text"})\n`;
}

async function copy(written) {
  let body = lastBody;
  try {
    const said = at("said").value || "What is gravity?";
    body ||= { ...settled(), ...(chat ? { messages: [{ role: "user", content: said }] } : { prompt: said }) };
  } catch (fault) {
    at("status").textContent = `JSON schema: ${fault.message}`;
    return;
  }
  const text = written(body);
  try {
    await navigator.clipboard.writeText(text);
    at("status").textContent = "Copied.";
  } catch {
    at("status").textContent = "This browser does not let pages copy; here it is:";
    at("talk").append(el("pre", {}, text));
  }
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const content = chat ? at("said").value.trim() : at("said").value;
  if (!content.trim() || at("send").disabled) return;
  at("said").value = "";
  say(content);
});
at("said").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  at("ask").requestSubmit();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && stopping?.abort());
at("stop").addEventListener("click", () => stopping?.abort());
at("retry").addEventListener("click", retry);
at("new").addEventListener("click", () => {
  stopping?.abort();
  turns = [];
  failed = null;
  at("talk").replaceChildren();
  at("said").focus();
});
at("curl").addEventListener("click", () => copy(curl));
at("python").addEventListener("click", () => copy(python));
at("said").focus();
if (!chat) {
  document.querySelector("label[for=said]").textContent = "Text to go on with";
  at("system").parentElement.remove();
}
