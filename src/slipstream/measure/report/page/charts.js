// Pictures as SVG. Colours are classes, so that print and dark mode choose them; nothing is told by colour alone.

const WIDTH = 460;
const LEFT = 42;
const RIGHT = 14;

function figure(title, note, picture) {
  return el("figure", {}, el("figcaption", {}, el("strong", {}, title), note ? ` ${note}` : ""), picture);
}

function drawing(height, label, ...children) {
  const box = { viewBox: `0 0 ${WIDTH} ${height}`, role: "img", "aria-label": label };
  return svg("svg", box, ...children);
}

const line = (x1, y1, x2, y2, kind) => svg("line", { x1, y1, x2, y2, class: kind });
const cut = (name, longest = 66) => (name.length > longest ? `${name.slice(0, longest - 1)}…` : name);

function ticks(low, high, count = 5) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough);
  const first = Math.ceil(low / step - 1e-9);
  const last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(6)));
}

const scale = (low, high, from, to) => (value) => from + ((value - low) / (high - low || 1)) * (to - from);

// A grid with a vertical axis; gives its nodes and both scales.
function axes(height, x, y, xTitle, yTitle, xTicks = ticks(...x)) {
  const bottom = height - 36;
  const [X, Y] = [scale(...x, LEFT, WIDTH - RIGHT), scale(...y, bottom, 18)];
  const nodes = [
    ...ticks(...y).flatMap((at) => [
      line(LEFT, Y(at), WIDTH - RIGHT, Y(at), "grid"),
      text(LEFT - 6, Y(at) + 4, at, "tick", "end"),
    ]),
    ...xTicks.map((at) => text(X(at), bottom + 15, at, "tick", "middle")),
    text((LEFT + WIDTH) / 2, height - 4, xTitle, "tick", "middle"),
    text(4, 11, yTitle, "tick"),
  ];
  return { nodes, X, Y };
}

const MARKS = {
  circle: (x, y, kind) => svg("circle", { cx: x, cy: y, r: 4.5, class: kind }),
  square: (x, y, kind) => svg("rect", { x: x - 4, y: y - 4, width: 8, height: 8, class: kind }),
};

// One line per name, with marks and 95 % intervals on it: rows are { name, marks: [{ value, interval, mark, kind }] }.
function intervals(label, rows) {
  const values = rows.flatMap((row) => row.marks.flatMap(({ value, interval }) => [value, ...(interval ?? [])]));
  const known = values.filter(Number.isFinite);
  const bounds = [Math.min(0.9, ...known) - 0.05, Math.max(1.1, ...known) + 0.05];
  const X = scale(...bounds, 8, WIDTH - RIGHT);
  const pitch = 38;
  const bottom = rows.length * pitch + 4;
  const nodes = ticks(...bounds).flatMap((at) => [
    line(X(at), 4, X(at), bottom, at === 1 ? "one" : "grid"),
    text(X(at), bottom + 15, at, "tick", "middle"),
  ]);
  rows.forEach((row, index) => {
    const y = index * pitch + 28;
    nodes.push(text(8, y - 12, cut(row.name), "name"), line(8, y, WIDTH - RIGHT, y, "grid"));
    for (const { value, interval, mark, kind, title } of row.marks.filter((each) => Number.isFinite(each.value))) {
      if (interval) nodes.push(line(X(interval[0]), y, X(interval[1]), y, `whisker ${kind}`));
      nodes.push(titled(MARKS[mark](X(value), y, kind), title ?? `${row.name}: ${fixed(value)}`));
    }
  });
  const spoken = rows.map((row) => `${row.name} ${row.marks.map(({ value }) => fixed(value)).join(" and ")}`);
  return drawing(bottom + 22, `${label}: ${spoken.join("; ")}`, nodes);
}

function acceptanceByDepth(rows, shown) {
  const deepest = Math.max(...rows.map((row) => row.acceptance_by_depth.length));
  if (!shown.acceptance_by_depth.length) return null;
  const depths = Array.from({ length: deepest }, (_, i) => i + 1);
  const { nodes, X, Y } = axes(230, [0.5, deepest + 0.5], [0, 1], "drafted tokens", "share of rounds", depths);
  const path = (rates, kind) => {
    const points = rates.map((rate, i) => `${X(i + 1)},${Y(rate)}`).join(" ");
    return svg("polyline", { points, class: `curve ${kind}` });
  };
  for (const row of rows) nodes.push(titled(path(row.acceptance_by_depth, "other"), row.drafter));
  const [all, given] = [shown.acceptance_by_depth, shown.acceptance_by_depth_conditional];
  nodes.push(path(given, "second dashed"), path(all, "first"));
  given.forEach((rate, i) => nodes.push(titled(MARKS.square(X(i + 1), Y(rate), "second"), percent(rate))));
  all.forEach((rate, i) => nodes.push(titled(MARKS.circle(X(i + 1), Y(rate), "first"), percent(rate))));
  const spoken = all.map((rate, i) => `${i + 1}: ${percent(rate, 0)}`).join(", ");
  const note = "Circles: rounds that accepted so many or more. Squares, dashed: of those that came so far. " +
    "Grey: other drafters.";
  return figure("Acceptance by depth.", note, drawing(230, `Acceptance by depth of ${shown.drafter}: ${spoken}`, nodes));
}

function acceptedLengths(shown) {
  const survived = [1, ...shown.acceptance_by_depth, 0];
  const shares = survived.slice(0, -1).map((share, i) => Math.max(0, share - survived[i + 1]));
  const high = 1.15 * Math.max(...shares, 0.1);
  const counts = shares.map((_, i) => i);
  const { nodes, X, Y } = axes(230, [-0.5, shares.length - 0.5], [0, high], "accepted tokens", "share of rounds", counts);
  const width = Math.min(44, 0.7 * (X(1) - X(0)));
  shares.forEach((share, i) => {
    const bar = { x: X(i) - width / 2, y: Y(share), width, height: Y(0) - Y(share), class: "first" };
    nodes.push(svg("rect", bar));
    if (shares.length <= 10) nodes.push(text(X(i), Y(share) - 4, percent(share, 0), "value", "middle"));
  });
  const spoken = shares.map((share, i) => `${i}: ${percent(share, 0)}`).join(", ");
  return figure("Accepted lengths.", `Of ${shown.drafter}.`,
    drawing(230, `Accepted lengths of ${shown.drafter}: ${spoken}`, nodes));
}

function speedByTask(rows, shown) {
  const tasks = Object.keys(shown.tasks).length ? (row) => row.tasks : byPart;
  const lines = Object.entries(tasks(shown)).map(([name, { mean, interval }]) => ({
    name,
    marks: [
      ...rows.filter((row) => row !== shown).map((row) => ({
        value: tasks(row)[name]?.mean, mark: "circle", kind: "other", title: `${row.drafter}: ${name}`,
      })),
      { value: mean, interval, mark: "circle", kind: "first" },
    ],
  }));
  if (!lines.length) return null;
  const note = `× plain decoding, of ${shown.drafter}, with 95 % over the questions of a set that has several. ` +
    "Grey: other drafters.";
  return figure("Speed-up by task.", note, intervals(`Speed-up by task of ${shown.drafter}`, lines));
}

const byPart = (row) =>
  Object.fromEntries(Object.entries({ ...row.by_category }).map(([name, part]) => [name, { mean: part.speedup.vanilla }]));

function againstNodes(rows, shown) {
  const known = rows.filter((row) => row.rows);
  if (known.length < 2) return null;
  const most = Math.max(...known.map((row) => row.rows));
  const values = known.flatMap((row) => [row.tau, row.speedup.vanilla]);
  const bounds = [Math.min(0.9, ...values) - 0.05, Math.max(...values) + 0.1];
  const { nodes, X, Y } = axes(250, [0, most * 1.05], bounds, "rows of a target pass", "τ, and × plain decoding");
  for (const row of [...known.filter((each) => each !== shown), ...known.filter((each) => each === shown)]) {
    const [one, two] = row === shown ? ["first", "second"] : ["other", "other hollow"];
    const title = `${row.drafter}: ${counted(row.rows, "row")}, τ ${fixed(row.tau)}, ${times(row.speedup.vanilla)}`;
    const [x, top, low] = [X(row.rows), Y(row.tau), Y(row.speedup.vanilla)];
    nodes.push(line(x, top, x, low, "grid"), titled(MARKS.circle(x, top, one), title), titled(MARKS.square(x, low, two), title));
  }
  const note = `Circles: τ. Squares: speed. In colour: ${shown.drafter}.`;
  const spoken = known.map((row) => `${row.drafter} ${row.rows} rows, τ ${fixed(row.tau)}, ${fixed(row.speedup.vanilla)} times`);
  return figure("τ and speed against nodes.", note, drawing(250, `τ and speed against rows: ${spoken.join("; ")}`, nodes));
}

function timeSplit(rows) {
  const most = Math.max(...rows.map((row) => sum(PARTS.map((part) => row.ms[part]))));
  const X = scale(0, most, 8, WIDTH - 70);
  const pitch = 38;
  const nodes = PARTS.flatMap((part, i) => [
    svg("rect", { x: 8 + 90 * i, y: 2, width: 12, height: 12, class: part }),
    text(26 + 90 * i, 12, part, "tick"),
  ]);
  rows.forEach((row, index) => {
    const y = index * pitch + 40;
    let before = 0;
    nodes.push(text(8, y - 5, cut(row.drafter), "name"));
    PARTS.forEach((part) => {
      const ms = row.ms[part];
      const bar = { x: X(before), y, width: Math.max(0, X(before + ms) - X(before) - 1), height: 13, class: part };
      nodes.push(titled(svg("rect", bar), `${row.drafter}, ${part}: ${fixed(ms, 1)} ms`));
      before += ms;
    });
    nodes.push(text(X(before) + 5, y + 11, `${fixed(before, 1)} ms`, "value"));
  });
  const spoken = rows.map((row) => `${row.drafter} ${PARTS.map((part) => `${part} ${fixed(row.ms[part], 1)} ms`).join(", ")}`);
  return figure("Where a round's time goes.", "Mean of all rounds, without the prompts' passes.",
    drawing(rows.length * pitch + 26, `Time of a round: ${spoken.join("; ")}`, nodes));
}
