// Runs the script of a page over a stand-in for the DOM, and prints all texts that it shows.

const html = require("fs").readFileSync(process.argv[2], "utf8");
const scripts = [...html.matchAll(/<script([^>]*)>([\s\S]*?)<\/script>/g)];
const isData = ([, attributes]) => attributes.includes("application/json");
const data = scripts.find(isData)[2];
const texts = [];

class Node {
  constructor() {
    Object.assign(this, { children: [], style: {}, dataset: {}, attributes: {}, textContent: data });
    this.classList = { add() {}, remove() {}, toggle() {} };
  }
  append(...nodes) {
    this.children.push(...nodes);
    texts.push(...nodes.filter((each) => typeof each === "string"));
  }
  replaceChildren(...nodes) {
    this.children = [];
    this.append(...nodes);
  }
  setAttribute(name, value) {
    this.attributes[name] = value;
    texts.push(`${name}="${value}"`);
  }
  get id() { return this.attributes.id; }
  getAttribute(name) { return this.attributes[name] ?? null; }
  removeAttribute(name) { delete this.attributes[name]; }
  addEventListener() {}
  querySelector() { return new Node(); }
  querySelectorAll() { return []; }
  getBoundingClientRect() { return { width: 600, height: 300, left: 0, top: 0 }; }
}

const made = () => new Node();
globalThis.Node = Node;
globalThis.document = {
  createElement: made, createElementNS: made, createTextNode: made, getElementById: made, querySelector: made,
  querySelectorAll: () => [], addEventListener() {}, body: made(), documentElement: made(),
};
globalThis.addEventListener = () => {};
globalThis.matchMedia = () => ({ matches: false, addEventListener() {} });
globalThis.location = { hash: "" };
(0, eval)(scripts.filter((each) => !isData(each)).map((each) => each[2]).join("\n"));
console.log(texts.join("\n"));
