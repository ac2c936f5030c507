// Runs of bench, and two of them side by side.

const HF = "Hugging Face generate";
const drafters = (run) => run.results.filter((row) => row.drafter !== "vanilla");
const together = (run) => (run.batch > 1 ? `${run.batch} texts at once` : null);
const settings = (run) =>
  [run.target, run.dtype, run.compiled ? "compiled" : null, `T = ${run.temperature}`, together(run)].filter(Boolean).join(", ");

// Speed over a baseline, of all turns together, with its interval where the run has it.
const over = (row, baseline) => ({ value: row.speedup[baseline], interval: row.intervals?.[baseline] ?? null });

const sure = ({ value, interval }) => (interval ? `${fixed(value)} ${span(interval)}` : fixed(value));

function sameness(row) {
  if (row.unexplained) return `no: ${row.unexplained} unexplained`;
  if (row.identical === null || row.identical === undefined) return "in law";
  return row.identical ? "yes" : `${counted(row.divergences.length, "near-tie")}`;
}

function runSection(run, title) {
  const rows = [...run.results].sort((a, b) => over(b, "vanilla").value - over(a, "vanilla").value);
  const best = rows.find((row) => row.drafter !== "vanilla") ?? rows[0];
  const shownPart = el("div");
  const show = (row) => shownPart.replaceChildren(...drafterPart(run, row));
  show(best);
  const id = newId("run");
  return el(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title),
    el("p", { class: "lead" }, settings(run)),
    run.stopped ? el("p", { class: "warning" }, `Stopped early (${run.stopped}): these are the figures until then.`) : null,
    tiles(best),
    el("p", {}, asked(run)),
    el("h3", {}, "Every drafter"),
    resultsTable(run),
    el("div", { class: "figures" }, speeds(rows), timeSplit(rows), againstNodes(drafters(run), best)),
    el("h3", {}, "One drafter"),
    rows.length > 1 ? choice("Drafter:", rows.map((row) => row.drafter), rows.indexOf(best), (i) => show(rows[i])) : null,
    shownPart,
    ...questionsPart(run),
    ...differencesPart(run),
    el("h3", {}, "What was run, and on what"),
    setup(run),
  );
}

function tiles(row) {
  const one = (figure, what, note) =>
    el("li", {}, el("span", { class: "figure" }, figure), el("span", { class: "what" }, what), note ? el("span", { class: "note" }, note) : null);
  const against = (baseline, name) => {
    const { value, interval } = over(row, baseline);
    return one(times(value), name, interval ? `95 %: ${span(interval)}` : null);
  };
  return el(
    "div",
    {},
    el("p", { class: "best" }, "Fastest here: ", el("code", {}, row.drafter)),
    el(
      "ul",
      { class: "tiles" },
      against("vanilla", "plain decoding's speed"),
      against("hf_generate", `${HF}'s speed`),
      one(fixed(row.tau), "tokens per target pass (τ)"),
      one(fixed(row.tokens_per_second, 1), "tokens per second"),
      one(sameness(row), row.identical === false ? "where it parts from plain decoding" : "same text as plain decoding"),
    ),
  );
}

function asked(run) {
  const known = Object.values({ ...run.hf_generate.by_question }).map((each) => each.file);
  const sets = new Set(known.length ? known : run.prompts.map((name) => name.split(":")[0])).size;
  const machine = run.hardware.gpu ?? `${run.hardware.cpu}, ${counted(run.hardware.threads, "thread")}`;
  return `${counted(run.prompts.length, "question")} of ${counted(sets, "set")}, answers of up to ` +
    `${run.max_new_tokens} tokens, on ${machine}.`;
}

function resultsTable(run) {
  const hf = { hf: true, drafter: HF, ...run.hf_generate };
  const ratio = (row, baseline) => (row.hf ? { value: baseline === "hf_generate" ? 1 : null } : over(row, baseline));
  const both = [["× plain", "vanilla"], ["× Hugging Face", "hf_generate"]].map(([head, baseline]) => ({
    head, value: (row) => ratio(row, baseline).value, show: (row) => sure(ratio(row, baseline)),
  }));
  const columns = [
    { head: "drafter", value: (row) => row.drafter },
    ...both,
    { head: "τ", value: (row) => row.tau, show: (row) => fixed(row.tau) },
    { head: "tokens/s", value: (row) => row.tokens_per_second, show: (row) => fixed(row.tokens_per_second, 1) },
    { head: "rows", value: (row) => row.rows },
    ...PARTS.map((part) => ({
      head: `${part} ms`,
      value: (row) => (row.hf ? null : row.ms[part]),
      show: (row) => (row.hf ? NONE : fixed(row.ms[part], 1)),
    })),
    { head: "same text", value: (row) => (row.hf ? "" : sameness(row)), show: (row) => (row.hf ? NONE : sameness(row)) },
  ];
  const known = run.results.some((row) => row.intervals?.vanilla) ? ", with 95 % over questions" : "";
  return table(`Drafters beside both baselines, over all turns${known}. Milliseconds are of a round.`, columns, [...run.results, hf], 1);
}

function speeds(rows) {
  const lines = rows.map((row) => ({
    name: row.drafter,
    marks: [
      { ...over(row, "hf_generate"), mark: "square", kind: "second" },
      { ...over(row, "vanilla"), mark: "circle", kind: "first" },
    ].map((each, i) => ({ ...each, title: `${row.drafter}: ${fixed(each.value)} × ${i ? "plain decoding" : HF}` })),
  }));
  const note = `Circles: × plain decoding. Squares: × ${HF}. Lines: 95 % over questions, where the run has them.`;
  return figure("Speed.", note, intervals(`Speed over ${HF} and over plain decoding`, lines));
}

function drafterPart(run, row) {
  const others = drafters(run);
  const pictures = [
    acceptanceByDepth(others.length ? others : run.results, row),
    row.acceptance_by_depth.length ? acceptedLengths(row) : null,
    speedByTask(others, row),
  ];
  const parts = [
    ...Object.entries(row.by_file ?? {}).map(([name, part]) => ({ kind: "set", name, ...part, interval: row.tasks[name]?.interval })),
    ...Object.entries(row.by_category).filter(([name]) => !(name in (row.by_file ?? {}))).map(([name, part]) => ({
      kind: "category", name, ...part, interval: part.intervals?.vanilla,
    })),
  ];
  const columns = [
    { head: "task", value: (part) => part.name },
    { head: "kind", value: (part) => part.kind },
    { head: "turns", value: (part) => part.questions },
    { head: "tokens", value: (part) => part.new_tokens },
    { head: "τ", value: (part) => part.tau, show: (part) => fixed(part.tau) },
    { head: "tokens/s", value: (part) => part.tokens_per_second, show: (part) => fixed(part.tokens_per_second, 1) },
    { head: "× plain", value: (part) => part.speedup.vanilla,
      show: (part) => sure({ value: part.speedup.vanilla, interval: part.interval }) },
    { head: "× Hugging Face", value: (part) => part.speedup.hf_generate, show: (part) => sure({ value: part.speedup.hf_generate, interval: part.intervals?.hf_generate }) },
  ];
  return [
    el("p", {}, el("code", {}, row.drafter), row.tree ? ` grows ${row.tree}` : "", ` (law: ${row.law ?? "coupled"}). `, made(row)),
    el("div", { class: "figures" }, pictures),
    table(`${row.drafter} by task`, columns, parts),
  ];
}

// What a speed-up consists of.
function made(row) {
  const of = row.ledger;
  if (!of || row.drafter === "vanilla") return "";
  const names = [["tau", "τ"], ["rows", "rows"], ["draft", "draft"], ["host", "host"], ["prompt", "prompt"]];
  const factors = names.map(([key, name]) => `${name} ${fixed(of[key])}`).join(" × ");
  return `Its speed over plain decoding, over all turns: ${factors} = ${fixed(of.predicted)}, measured ${fixed(of.measured)}.`;
}

function questionsPart(run) {
  const plain = run.results.find((row) => row.drafter === "vanilla");
  const known = drafters(run).filter((row) => Object.keys(row.by_question ?? {}).length);
  if (!known.length || !plain?.by_question) return [];
  const speed = (row, name) => row.by_question[name].new_tokens / row.by_question[name].seconds;
  const columns = [
    { head: "question", value: (name) => name },
    { head: "tokens", value: (name) => plain.by_question[name].new_tokens },
    ...known.map((row) => {
      const value = (name) => speed(row, name) / speed(plain, name);
      return { head: row.drafter, value, show: (name) => fixed(value(name)) };
    }),
  ];
  const names = Object.keys(plain.by_question);
  const shown = table("Every question: × plain decoding", columns, names);
  return [el("details", {}, el("summary", {}, `Every question (${names.length})`), shown)];
}

// What an infinite margin, which JSON does not have, stands for.
function beyond({ margin, token, plain }) {
  if (margin !== null) return null;
  return token < 0 || plain < 0 ? "one has ended" : "outside the support";
}

function differencesPart(run) {
  const rows = run.results.flatMap((row) => row.divergences.map((each) => ({ drafter: row.drafter, ...each })));
  if (!rows.length) return [];
  const columns = [
    { head: "question", value: (each) => each.question },
    ...["drafter", "turn", "position", "token", "plain"].map((head) => ({ head, value: (each) => each[head] })),
    { head: "margin", value: (each) => each.margin, show: (each) => beyond(each) ?? fixed(each.margin, 4) },
  ];
  const shown = table("Tokens that are not plain decoding's, with the margin in logits", columns, rows);
  return [el("details", {}, el("summary", {}, `Differences (${rows.length})`), shown)];
}

const machine = (of) => Object.entries(of.hardware).map(([name, what]) => [name.replaceAll("_", " "), String(what)]);
const versions = (of) => Object.entries(of.versions).map(([name, what]) => [name, what]);

function setup(run) {
  const exactness = run.exactness === "bits" ? "plain decoding, token for token" : `plain decoding up to near-ties within ${run.margin} logits`;
  return facts([
    ["command", run.command ? el("code", {}, run.command) : null],
    ["held to", exactness],
    ["seed", String(run.seed)],
    ...machine(run),
    ...versions(run),
  ]);
}

function compareSection(runs) {
  const chosen = [0, 1];
  const body = el("div");
  const names = runs.map((run, i) => `${i + 1}: ${run.name}`);
  const draw = () => body.replaceChildren(...compared(...chosen.map((i) => ({ ...runs[i], label: `run ${i + 1}` }))));
  const pick = (place) => choice(place ? "with" : "Compare", names, chosen[place], (i) => { chosen[place] = i; draw(); });
  draw();
  return el(
    "section",
    { id: "compare", "aria-labelledby": "compare-title" },
    el("h2", { id: "compare-title" }, "Two runs compared"),
    el("div", { class: "choices" }, pick(0), pick(1)),
    body,
  );
}

function compared(a, b) {
  const names = [...new Set([...a.results, ...b.results].map((row) => row.drafter))];
  const pairs = names.map((name) => ({ name, rows: [a, b].map((run) => run.results.find((row) => row.drafter === name)) }));
  const shared = pairs.filter(({ rows }) => rows.every(Boolean));
  const others = pairs.filter(({ rows }) => !rows.every(Boolean));
  const speed = (row) => (row ? over(row, "vanilla").value : NaN);
  const change = ({ rows: [one, two] }) => speed(two) / speed(one) - 1;
  const signed = (value) => (Number.isFinite(value) ? `${value < 0 ? "−" : "+"}${percent(Math.abs(value))}` : NONE);
  const two = (head, value, digits) => [a, b].map((run, i) => ({
    head: `${head}, ${run.label}`, value: ({ rows }) => value(rows[i]), show: ({ rows }) => fixed(value(rows[i]), digits),
  }));
  const columns = [
    { head: "drafter", value: ({ name }) => name },
    ...two("τ", (row) => row?.tau, 2),
    ...two("× plain", speed, 2),
    { head: "change", value: change, show: (pair) => signed(change(pair)) },
    ...two("× Hugging Face", (row) => (row ? over(row, "hf_generate").value : NaN), 2),
    ...two("tokens/s", (row) => row?.tokens_per_second, 1),
  ];
  const lines = (shared.length ? shared : pairs).map(({ name, rows }) => ({
    name,
    marks: rows.map((row, i) => ({
      ...(row ? over(row, "vanilla") : { value: NaN }), mark: i ? "square" : "circle", kind: i ? "second" : "first",
    })),
  }));
  const note = `× plain decoding, with 95 % over questions. Circles: ${a.label}. Squares: ${b.label}.`;
  return [
    differing(a, b),
    table(`${a.label} (${a.name}) and ${b.label} (${b.name}); change: of × plain`, columns, [...shared, ...others]),
    el("div", { class: "figures" }, figure("Speed of both.", note, intervals("Speed over plain decoding in both runs", lines))),
  ];
}

function differing(a, b) {
  const told = (run) => ({
    target: run.target, precision: run.dtype, compiled: run.compiled ? "yes" : "no", temperature: run.temperature, seed: run.seed,
    "texts at once": run.batch, "tokens per answer": run.max_new_tokens, questions: [...run.prompts].sort().join(" "),
    ...Object.fromEntries([...machine(run), ...versions(run)]),
  });
  const [one, two] = [told(a), told(b)];
  const keys = Object.keys({ ...one, ...two }).filter((key) => String(one[key]) !== String(two[key]));
  if (!keys.length) return el("p", {}, "Both runs have the same settings, questions, machine and versions.");
  const says = (key) => (key === "questions" ? "not the same" : `${one[key] ?? NONE} / ${two[key] ?? NONE}`);
  return el("div", {},
    el("p", {}, "What differs between them. Tokens per second compare on one machine only; × compare across machines with care."),
    facts(keys.map((key) => [key, says(key)])));
}
