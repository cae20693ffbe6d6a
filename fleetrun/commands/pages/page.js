// Shows what a run has recorded, as rundata.py describes it: in report.html, and live in `fleetrun ui`.
const STATES = { running: "open", "its launcher was killed": "open" };

function card(title, name, ...content) {
  const box = element("div", "", { class: "card", "data-chart": name });
  box.append(...content);
  return [element("h2", say(title)), box];
}

function table(heads, rows) {
  const made = element("table"), fill = (kind, cells, attributes = {}) => {
    const row = element("tr", "", attributes);
    row.append(...cells.map(cell => element(kind, cell)));
    made.append(row);
  };
  if (heads.length) fill("th", heads);
  for (const [cells, attributes] of rows) fill("td", cells, attributes);
  return made;
}

const ending = run => run.exit_code ? say("{} (exit code {})", run.verdict, run.exit_code) : say(run.verdict);

function heading(run) {
  const numbers = element("div", "", { class: "numbers" });
  for (const [name, value] of run.numbers) {
    const box = element("div");
    box.append(element("b", value), say(name));
    numbers.append(box);
  }
  const kind = run.exit_code ? "bad" : STATES[run.verdict] || "";
  return [element("h1", run.title), element("span", ending(run), { class: "verdict " + kind }), numbers];
}

function link([name, href]) {
  return href ? element("a", name, { href }) : name;
}

// Why the run failed: each sentence, the last output, and the logs of who failed first.
function cause(run) {
  const box = element("div");
  for (const [kind, text, href] of run.cause) {
    const made = element(kind === "stack" ? "pre" : "p");
    made.append(kind === "log" ? link([say(text), href]) : kind === "outcome" ? element("b", text) : text);
    box.append(made);
  }
  return run.cause.length ? card("Cause", "cause", box) : [];
}

// The parts of the page about RUN whose charts begin with LETTER: what happened, and where it came from.
function sections(run, letter, ...ofMaps) {
  const common = { span: run.span, culprits: run.culprits }, parts = [...heading(run), ...cause(run)];
  const add = (title, name, draw, chart) => {
    const [head, box] = card(title, letter + "-" + name);
    draw(box, { ...common, ...chart }, ...ofMaps);
    parts.push(head, box);
  };
  if (run.spans.length) add("Processes", "processes", lanes, run);
  if (run.maps.length) add("Ranks over time", "maps", maps, run);
  for (const [name, title] of [["loss", "Loss"], ["steps", "Steps"]])
    if (run.lines[name].length) add(title, name, lines, { lines: run.lines[name].map(line => ({ ...line, side: "" })) });
  const heads = ["field", "asked", "in effect", "", "why"].map(head => say(head));
  const fields = run.strategy.map(([name, asked, effect, status, why]) =>
    [[name, asked, effect, say(status.replace("_", " ")), why], { class: status }]);
  if (fields.length) parts.push(...card("Strategy", "strategy", table(heads, fields)));
  parts.push(...card("Where it came from", "facts", table([], run.facts.map(([name, value]) => [[say(name), value]]))));
  return parts;
}

function logLinks(run) {
  const box = element("div", "", { class: "logs" });
  box.append(...run.logs.map(log => { const line = element("div"); line.append(link(log)); return line; }));
  return card("Logs", "logs", box);
}

// Two runs side by side: what differs, and their losses and steps over one axis.
function comparison(runs) {
  const box = element("div"), rows = [];
  for (const pairs of [run => run.numbers, run => run.strategy.map(row => ["strategy: " + row[0], row[2]]), run => run.facts]) {
    const [first, other] = runs.map(run => new Map(pairs(run)));
    for (const name of new Set([...first.keys(), ...other.keys()])) {
      const values = [first, other].map(known => known.get(name) || "-");
      if (values[0] !== values[1]) rows.push([[say(name), ...values]]);
    }
  }
  box.append(...runs.map((run, at) => element("h1", "AB"[at] + ": " + run.title)),
    ...card("What differs", "differs", table(["", "A", "B"], rows)));
  const span = Math.max(...runs.map(run => run.span));
  for (const [name, title] of [["loss", "Loss of both"], ["steps", "Steps of both"]]) {
    const both = runs.flatMap((run, at) => run.lines[name].map(line => ({ ...line, name: "AB"[at] + ": " + line.name, side: "AB"[at] })));
    if (!both.length) continue;
    const [head, drawn] = card(title, "both-" + name);
    lines(drawn, { span, culprits: [], lines: both });
    box.append(head, drawn);
  }
  return box;
}

// The page of one or two RUNS in a file.
function show(runs) {
  document.title = runs.map(run => run.title + ": " + ending(run)).join(", ");
  document.documentElement.lang = isChinese ? "zh-CN" : "en";
  const beside = element("div", "", { class: "runs" });
  beside.append(...runs.map((run, at) => {
    const box = element("div", "", { class: "run" });
    box.append(...sections(run, "AB"[at]), ...logLinks(run));
    return box;
  }));
  document.body.style.maxWidth = runs.length > 1 ? "88em" : "64em";
  document.body.append(...(runs.length > 1 ? [comparison(runs)] : []), beside);
}
