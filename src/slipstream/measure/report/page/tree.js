// The tree of a round: what was guessed, and what became of it. The server's page draws it, too.

const SHARES = 10000;
const KINDS = {
  accepted: "drafted and accepted",
  corrected: "the target's, where all guesses were wrong",
  bonus: "the target's, behind guesses that were all right",
  plain: "the target's, where nothing was guessed",
};
const LONGEST = 12; // letters of a token in the tree

const visible = (token) => token.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
const shorter = (token) => (token.length > LONGEST ? `${token.slice(0, LONGEST - 1)}…` : token);
const chance = (share) => (share === null || share === undefined ? NONE : share ? percent(share / SHARES, share < 100 ? 2 : share < 1000 ? 1 : 0) : "< 0.01 %");

function roundPart(round, number, total, texts, show) {
  const to = (where, label) =>
    el("button", { type: "button", disabled: (where < 0 || where >= total) && "", click: () => show(where) }, label);
  const guesses = round.texts.length - 1;
  const said = `${counted(guesses, "guess").replace("guesss", "guesses")}, ${round.path.length - 1} accepted; ` +
    `${PARTS.map((part, i) => `${part} ${fixed(round.ms[i], 1)} ms`).join(", ")}.`;
  return [
    el("h4", {}, `Round ${number + 1} of ${total}`),
    el("p", { class: "steps" }, to(number - 1, "Previous"), " ", to(number + 1, "Next"), ` ${said}`),
    tree(round, texts),
    el("p", { class: "legend" }, "✓ accepted. Dashed: the target's own token. p: the target's probability at temperature 1; q: the drafter's."),
    el("details", {}, el("summary", {}, "The same as a table"), nodesTable(round, texts, number)),
  ];
}

function depthsOf(round) {
  const depths = [0];
  round.parents.forEach((above, slot) => slot && (depths[slot] = depths[above] + 1));
  return depths;
}

function nodesTable(round, texts, number) {
  const depths = depthsOf(round);
  const nodes = round.texts.map((at, slot) => ({
    slot, token: visible(texts[at]), depth: depths[slot], p: round.p[slot], q: round.q?.[slot],
    fate: slot === 0 ? "root" : round.path.includes(slot) ? "accepted" : "not accepted",
  }));
  nodes.push({ slot: nodes.length, token: visible(texts[round.own]), depth: round.path.length, p: round.own_p, fate: round.kind });
  const columns = [
    { head: "token", value: (node) => node.token },
    ...["slot", "depth"].map((head) => ({ head, value: (node) => node[head] })),
    ...["p", "q"].map((head) => ({ head, value: (node) => node[head], show: (node) => chance(node[head]) })),
    { head: "what became of it", value: (node) => node.fate },
  ];
  return table(`Nodes of round ${number + 1}`, columns, nodes);
}

const STEP = 150; // from a depth to the next
const BOX = 124;
const PITCH = 44;

function tree(round, texts) {
  const count = round.texts.length;
  const end = round.path.at(-1);
  const above = [...round.parents, end]; // the target's own token is drawn as one more node
  const depths = [...depthsOf(round), round.path.length];
  const below = Array.from({ length: count + 1 }, () => []);
  above.forEach((parent, slot) => slot && below[parent].push(slot));
  const height = [];
  let leaves = 0;
  const place = (slot) => {
    const under = below[slot];
    under.forEach(place);
    height[slot] = under.length ? (height[under[0]] + height[under.at(-1)]) / 2 : leaves++;
  };
  place(0);
  const onPath = (slot) => round.path.includes(slot);
  const kind = (slot) => (slot === count ? round.kind : onPath(slot) ? "accepted" : "rejected");
  const [x, y] = [(slot) => 4 + depths[slot] * STEP, (slot) => 24 + height[slot] * PITCH];
  const edges = above.slice(1).map((parent, i) => {
    const [x1, y1, x2, y2] = [x(parent) + BOX, y(parent), x(i + 1), y(i + 1)];
    const middle = (x1 + x2) / 2;
    return svg("path", { d: `M${x1} ${y1}C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}`, class: `edge ${kind(i + 1)}` });
  });
  const nodes = above.map((_, slot) => {
    const own = slot === count;
    const token = visible(texts[own ? round.own : round.texts[slot]]);
    const p = own ? round.own_p : round.p[slot];
    const q = own ? null : round.q?.[slot];
    const mark = { accepted: "✓ ", corrected: "→ ", bonus: "+ ", plain: "→ ", rejected: "" }[kind(slot)];
    const figures = slot ? `p ${chance(p)}${q === null || q === undefined ? "" : `  q ${chance(q)}`}` : "root";
    const box = { x: x(slot), y: y(slot) - 18, width: BOX, height: 36, rx: 5 };
    return titled(svg("g", { class: `node ${kind(slot)}` }, svg("rect", box),
      text(x(slot) + 6, y(slot) - 4, (slot ? mark : "") + shorter(token), "token"),
      text(x(slot) + 6, y(slot) + 12, figures, "chance")),
      `${token}: ${figures}, ${slot ? kind(slot) : "root"}`);
  });
  const [wide, high] = [Math.max(...depths) * STEP + BOX + 8, leaves * PITCH + 8];
  const label = `Tree of ${counted(count, "node")}, ${round.path.length - 1} accepted; the table below has the same`;
  const drawn = svg("svg", { viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "img", "aria-label": label }, edges, nodes);
  return el("div", { class: "tree", tabindex: 0, role: "group", "aria-label": "Draft tree" }, drawn);
}
