// What certify found.

function certificateSection(made, title) {
  const id = newId("certificate");
  return el(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title),
    el("p", { class: "lead" }, [made.target, made.dtype, made.compiled ? "compiled" : null].filter(Boolean).join(", ")),
    verdict(made),
    audits(made),
    ...tests(made),
    ...differencesPart(made),
    el("h3", {}, "What was run, and on what"),
    setup(made),
  );
}

function verdict(made) {
  const says = made.stopped ? `Not certified: stopped early (${made.stopped}).` : made.certified ? "Certified." : "Not certified.";
  const kept = made.exactness === "bits" ? "every answer is plain decoding's, token for token" : "every token is plain decoding's, near-ties within the margin aside";
  const wrong = sum(made.results.map((row) => row.unexplained));
  const failed = (made.distribution ?? []).filter((row) => row.p_value < row.significance).length;
  const why = made.certified ? `Here ${kept}.`
    : `${counted(wrong, "token")} without explanation, and ${counted(failed, "failed distribution test")}.`;
  return el("p", { class: made.certified ? "best" : "warning" }, el("strong", {}, says), " ", why);
}

const seen = (row) => `${row.identical} of ${row.questions}`;

function audits(made) {
  const columns = [
    { head: "drafter", value: (row) => row.drafter },
    { head: "T", value: (row) => row.temperature },
    { head: "same answers", value: (row) => row.identical / row.questions, show: seen },
    { head: "tokens", value: (row) => row.tokens },
    { head: "near-ties", value: (row) => row.divergences.length - row.unexplained },
    { head: "largest margin", // a text where it is outside the support: larger than any
      value: (row) => (typeof row.largest_margin === "number" ? row.largest_margin : Number.MAX_VALUE),
      show: (row) => (typeof row.largest_margin === "number" ? row.largest_margin.toPrecision(2) : row.largest_margin) },
    { head: "unexplained", value: (row) => row.unexplained },
  ];
  return table("Answers beside plain decoding's. Margins are in logits.", columns, made.results);
}

function tests(made) {
  const rows = made.distribution ?? [];
  if (!rows.length) return [];
  const distances = Object.keys(rows[0].powers);
  const columns = [
    { head: "drafter", value: (row) => row.drafter },
    { head: "T", value: (row) => row.temperature },
    { head: "law", value: (row) => row.law },
    { head: "tokens", value: (row) => row.tokens },
    { head: "p", value: (row) => row.p_value, show: (row) => fixed(row.p_value, 3) },
    { head: "passes", value: (row) => (row.p_value < row.significance ? "NO" : "yes") },
    { head: `found with ${percent(rows[0].power, 0)}`, value: (row) => row.detectable, show: (row) => fixed(row.detectable, 3) },
    ...distances.map((distance) => ({
      head: `finds ${distance}`, value: (row) => row.powers[distance], show: (row) => percent(row.powers[distance]),
    })),
  ];
  const level = percent(rows[0].significance);
  return [
    el("h3", {}, "Draws against plain decoding's law"),
    el("p", {}, "Each token falls into one of sixteen classes by its place in plain decoding's law, the likeliest tokens first. ",
      `Exact draws fall into each equally often. They fail with a chance of ${level}. A distance is the total variation between `,
      "the classes and equal ones; the last columns say with what chance so many tokens find it. ",
      "What moves within a class, or evens out over contexts, is not seen."),
    table("χ² tests, and what they would find", columns, rows),
    el("div", { class: "figures" }, rows.map((row) => classes(row))),
  ];
}

function classes(row) {
  const height = 170;
  const [even, most] = [row.tokens / row.classes.length, Math.max(...row.classes)];
  const { nodes, X, Y } = axes(height, [0, row.classes.length], [0, most * 1.1 || 1], "class, the likeliest tokens first", "tokens", []);
  const width = X(1) - X(0);
  const bars = row.classes.map((count, i) =>
    titled(svg("rect", { x: X(i) + 2, y: Y(count), width: width - 4, height: Y(0) - Y(count), class: "first" }), `class ${i + 1}: ${count}`));
  const label = `${row.drafter} at T = ${row.temperature}: ${row.classes.join(", ")} tokens by class, ${fixed(even, 1)} expected`;
  return figure(`${row.drafter}, T = ${row.temperature}.`, `Line: ${fixed(even, 1)} tokens, as exact draws have on average.`,
    drawing(height, label, ...nodes, ...bars, line(LEFT, Y(even), WIDTH - RIGHT, Y(even), "one")));
}
