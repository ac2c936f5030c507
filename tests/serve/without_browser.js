// Runs the script of the playground over a stand-in for the DOM: says two things, and prints what it asks the server for.

const html = require("fs").readFileSync(process.argv[2], "utf8");
const scripts = [...html.matchAll(/<script([^>]*)>([\s\S]*?)<\/script>/g)];
const isData = ([, attributes]) => attributes.includes("application/json");
const event = JSON.parse(process.argv[3]);

class Node {
  constructor() {
    Object.assign(this, { children: [], listeners: {}, dataset: {}, value: "", textContent: "", disabled: false });
    this.classList = { add() {}, remove() {}, toggle() {} };
  }
  get parentElement() { return new Node(); }
  append(...nodes) { this.textContent += nodes.filter((each) => typeof each === "string").join(""); }
  replaceChildren() {}
  setAttribute() {}
  remove() {}
  focus() {}
  scrollIntoView() {}
  addEventListener(name, heard) { this.listeners[name] = heard; }
  requestSubmit() { this.listeners.submit({ preventDefault() {} }); }
}

const known = {};
const at = (id) => (known[id] ??= new Node());
at("data").textContent = scripts.find(isData)[2];
const made = () => new Node();
globalThis.Node = Node;
globalThis.location = { origin: "http://here" };
globalThis.requestAnimationFrame = () => {};
globalThis.document = { getElementById: at, createElement: made, createElementNS: made, createTextNode: made, querySelector: made, addEventListener() {} };
const asked = [];
globalThis.fetch = async (path, { body }) => {
  asked.push({ path, ...JSON.parse(body) });
  return new Response(`data: ${JSON.stringify(event)}\n\ndata: [DONE]\n\n`);
};
(0, eval)(scripts.filter((each) => !isData(each)).map((each) => each[2]).join("\n"));
(async () => {
  for (const said of ["Once ", "more"]) {
    at("said").value = said;
    at("ask").requestSubmit();
    await new Promise((done) => setTimeout(done, 200));
  }
  console.log(JSON.stringify(asked));
})();
