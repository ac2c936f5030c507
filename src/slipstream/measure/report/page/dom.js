"use strict";

// Elements, numbers and tables. Texts are always set as text, never as markup.

function maker(space) {
  return (name, attributes = {}, ...children) => {
    const node = document.createElementNS(space, name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value === undefined || value === null || value === false) continue;
      if (typeof value === "function") node.addEventListener(key, value);
      else node.setAttribute(key, value);
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return node;
  };
}

const el = maker("http://www.w3.org/1999/xhtml");
const svg = maker("http://www.w3.org/2000/svg");

const text = (x, y, content, kind = "", anchor = "start") =>
  svg("text", { x, y, class: kind, "text-anchor": anchor }, content);
const titled = (node, title) => (node.append(svg("title", {}, title)), node);

const PARTS = ["draft", "verify", "host"]; // of a round's time
const NONE = "–";
const fixed = (value, digits = 2) => (Number.isFinite(value) ? value.toFixed(digits) : NONE);
const times = (value) => (Number.isFinite(value) ? `${value.toFixed(2)} ×` : NONE);
const percent = (value, digits = 1) => (Number.isFinite(value) ? `${(100 * value).toFixed(digits)} %` : NONE);
const span = (interval) => (interval ? `[${fixed(interval[0])}, ${fixed(interval[1])}]` : NONE);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const counted = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

let ids = 0;
const newId = (stem) => `${stem}-${++ids}`;

// A column is { head, value: row => number or text to sort by, show: row => what stands there (default: value) }.
// `sorted`: the column by which rows are sorted, the largest first; default: as they are given.
function table(caption, columns, rows, sorted) {
  const body = el("tbody");
  const heads = columns.map((column, index) => {
    const button = el("button", { type: "button", click: () => sort(index) }, column.head);
    return el("th", { scope: "col", class: index ? "number" : null, "aria-sort": "none" }, button);
  });
  const lines = rows.map((row) => ({
    row,
    line: el(
      "tr",
      {},
      columns.map((column, index) => {
        const shown = (column.show ?? column.value)(row);
        const content = shown instanceof Node ? shown : String(shown ?? NONE);
        return index ? el("td", { class: "number" }, content) : el("th", { scope: "row" }, content);
      }),
    ),
  }));
  body.append(...lines.map(({ line }) => line));

  function sort(index) {
    const down = heads[index].getAttribute("aria-sort") === "descending";
    const sign = down ? 1 : -1;
    heads.forEach((head, i) =>
      head.setAttribute("aria-sort", i !== index ? "none" : down ? "ascending" : "descending"),
    );
    const known = (value) => (typeof value === "string" ? value !== "" : Number.isFinite(value));
    lines.sort((a, b) => {
      const [x, y] = [columns[index].value(a.row), columns[index].value(b.row)];
      if (!known(x) || !known(y)) return known(y) - known(x);
      return sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
    });
    body.append(...lines.map(({ line }) => line));
  }

  if (sorted !== undefined) sort(sorted);
  const head = el("thead", {}, el("tr", {}, heads));
  return el("div", { class: "scroll" }, el("table", {}, el("caption", {}, caption), head, body));
}

function choice(label, options, chosen, change) {
  const id = newId("choice");
  const list = options.map((text, index) => el("option", { value: index, selected: index === chosen && "" }, text));
  const select = el("select", { id, change: () => change(Number(select.value)) }, list);
  return el("p", { class: "choice" }, el("label", { for: id }, label), " ", select);
}

// Names and what they are, two columns.
function facts(pairs) {
  const lines = pairs.filter(([, what]) => what !== undefined && what !== null && what !== "");
  return el("dl", {}, lines.map(([name, what]) => el("div", {}, el("dt", {}, name), el("dd", {}, what))));
}
