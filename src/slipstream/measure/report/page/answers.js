// Answers round by round: their text, and a timeline.

function traceSection(trace) {
  const id = newId("trace");
  const many = trace.answers.length > 1;
  return el(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, `${many ? "Answers" : "Answer"}: ${trace.name}`),
    trace.answers.flatMap((answer, i) => answerPart(answer, trace.texts, many ? `Answer ${i + 1}` : null)),
  );
}

function answerPart(answer, texts, title) {
  const { opening, rounds } = answer;
  const kinds = rounds.map((round) => round.pieces.map((_, i) => (i < round.path.length - 1 ? "accepted" : round.kind)));
  const panel = el("div", { class: "panel", "aria-live": "polite" });
  const told = el("p", { class: "answer" }, el("span", { class: "plain", title: "from the prompt's pass" }, opening.first));
  rounds.forEach((round, number) => {
    const pieces = round.pieces.map((piece, i) =>
      el("span", { class: kinds[number][i], title: `round ${number + 1}: ${kinds[number][i]}` }, piece));
    told.append(el("span", { "data-round": number }, pieces));
  });
  const blocks = timeline(rounds, show);
  told.addEventListener("click", (event) => {
    const at = event.target.closest("[data-round]");
    if (at) show(Number(at.dataset.round));
  });

  function show(number) {
    panel.replaceChildren(...roundPart(rounds[number], number, rounds.length, texts, show));
    [...blocks.children].forEach((block, i) => {
      block.setAttribute("aria-pressed", String(i === number));
      block.tabIndex = i === number ? 0 : -1;
    });
    for (const part of told.children) part.classList.toggle("current", part.dataset.round === String(number));
  }

  const lengths = rounds.map((round) => round.path.length);
  show(lengths.indexOf(Math.max(...lengths)));
  return [
    title ? el("h3", {}, title) : null,
    el("p", { class: "lead" }, settings(opening)),
    answerFigures(opening, rounds),
    el("details", {}, el("summary", {}, "The prompt, as the target reads it"), el("p", { class: "answer prompt" }, opening.text)),
    legend(kinds.flat()),
    told,
    el("h3", {}, "Rounds"),
    el("p", {}, "A block is a round: its width is time, its height the tokens that it brought. Choose one, by click or with the arrow keys, to see its tree."),
    el("p", { class: "legend" }, PARTS.map((part) => el("span", {}, el("i", { class: part }), ` ${part} `))),
    blocks,
    panel,
    el("details", {}, el("summary", {}, "How it was made"),
      facts([["command", opening.command ? el("code", {}, opening.command) : null], ["seed", String(opening.seed)],
        ...machine(opening), ...versions(opening)])),
  ].filter(Boolean);
}

function answerFigures(opening, rounds) {
  const tokens = sum(rounds.map((round) => round.pieces.length));
  const seconds = sum(rounds.flatMap((round) => round.ms)) / 1000;
  const said = `${counted(rounds.length, "round")} brought ${counted(tokens, "token")}: τ ${fixed(tokens / rounds.length)}. ` +
    `They took ${fixed(seconds)} s, behind ${fixed(opening.prefill)} s for the prompt.`;
  return el("p", {}, said);
}

function legend(kinds) {
  const count = (kind) => kinds.filter((each) => each === kind).length;
  const known = Object.entries(KINDS).filter(([kind]) => count(kind));
  return el("ul", { class: "legend" }, known.map(([kind, what]) =>
    el("li", {}, el("span", { class: kind }, kind), ` ${count(kind)}: ${what}`)));
}

function timeline(rounds, show) {
  const took = rounds.map((round) => sum(round.ms));
  const short = [...took].sort((a, b) => a - b)[Math.floor(took.length / 10)] || 1;
  const blocks = rounds.map((round, number) => {
    const brought = counted(round.pieces.length, "token");
    const label = `Round ${number + 1}: ${brought}, ${fixed(took[number], 1)} ms`;
    const parts = round.ms.map((ms, i) => {
      const part = el("span", { class: PARTS[i] });
      part.style.flexGrow = ms;
      return part;
    });
    const block = el("button", { type: "button", "aria-label": label, title: label, tabindex: -1, click: () => show(number) }, parts);
    block.style.width = `${Math.min(160, Math.max(24, (24 * took[number]) / short))}px`;
    block.style.height = `${16 + 8 * round.pieces.length}px`;
    return block;
  });
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };
  const move = (event) => {
    const at = blocks.indexOf(event.target);
    if (at < 0 || !(event.key in steps)) return;
    event.preventDefault();
    const next = Math.min(blocks.length - 1, Math.max(0, at + steps[event.key]));
    show(next);
    blocks[next].focus();
  };
  return el("div", { class: "timeline", role: "toolbar", "aria-label": "Rounds", keydown: move }, blocks);
}
