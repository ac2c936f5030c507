// Puts the parts together.

{
  const { runs, certificates, traces } = JSON.parse(document.getElementById("data").textContent);
  const many = runs.length > 1;
  const sections = [
    ...runs.map((run, i) => runSection(run, many ? `Run ${i + 1}: ${run.name}` : `Run: ${run.name}`)),
    ...(many ? [compareSection(runs)] : []),
    ...certificates.map((made) => certificateSection(made, `Certificate: ${made.name}`)),
    ...traces.map(traceSection),
  ];
  document.querySelector("main").replaceChildren(...sections);
  const links = sections.map((section) =>
    el("li", {}, el("a", { href: `#${section.id}` }, section.querySelector("h2").textContent)));
  document.querySelector("nav").append(el("ul", {}, links));
}
