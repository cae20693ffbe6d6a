"use strict";
// The address is #token=...&run=...&...: what stands behind # is never sent anywhere by a browser.
const PAUSE_MS = 2000;
const byId = id => document.getElementById(id);
const address = () => new URLSearchParams(location.hash.slice(1));
let runs = [], version = "", shown = {}, uses = [], drawn = null, takenAt = "", isRunning = false;

// The address with CHANGES, in which null takes a word away.
function led(changes) {
  const words = address();
  for (const [name, value] of Object.entries(changes))
    value === null || value === "" ? words.delete(name) : words.set(name, value);
  return "#" + words;
}

async function ask(path, method = "GET") {
  const answer = await fetch(path, { method, headers: { Authorization: "Bearer " + address().get("token") } });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

// What the server has drawn, in which it has escaped everything that a run says.
const inPlace = new Map();
function put(id, html) {
  if (inPlace.get(id) === html) return;
  inPlace.set(id, html);
  byId(id).innerHTML = html;
  readings(byId(id));
}

function problem(text) {
  byId("problem").hidden = !text;
  byId("problem").textContent = text;
}

function listRuns() {
  const [chosen, other] = [address().get("run"), address().get("beside")];
  const rows = runs.map(run => {
    const kind = run.is_running ? "running" : run.exit_code === 0 ? "well" : "bad";
    const row = element("div", "", { class: "row " + kind + (run.key === chosen ? " chosen" : "") });
    const link = element("a", "", { href: led({ run: run.key, beside: null }) });
    const began = run.began ? new Date(run.began * 1000).toLocaleString() : "";
    link.append(element("b", run.job), element("small", began), element("small", run.processes + (run.processes === 1 ? " process" : " processes")),
      element("small", run.state));
    row.append(link);
    if (chosen && run.key !== chosen)
      row.append(element("a", run.key === other ? "leave out" : "compare", { class: "other",
        href: led({ beside: run.key === other ? null : run.key }) }));
    return row;
  });
  const elsewhere = runs.findIndex(run => !run.is_here);
  if (elsewhere >= 0) rows.splice(elsewhere, 0, element("h2", "Elsewhere on this host"));
  byId("runs").replaceChildren(element("h1", "fleetrun"), ...rows);
  if (!rows.length) byId("runs").append(element("p", "There is no run yet."));
}

// Maps of ranks over time ------------------------------------------------------------------------

const SHADES = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

function shade(share) {
  const at = Math.min(Math.max(share, 0), 1) * (SHADES.length - 1), near = Math.min(Math.floor(at), SHADES.length - 2);
  return SHADES[near].map((value, index) => value + (at - near) * (SHADES[near + 1][index] - value));
}

function unpacked(use) {
  const bytes = Uint8Array.from(atob(use.values), letter => letter.charCodeAt(0));
  return { ...use, values: new Float32Array(bytes.buffer) };
}

function drawMaps() {
  const chosen = uses.find(use => use.title === address().get("map")) || uses[0];
  byId("kinds").replaceChildren(...uses.map(use => {
    const button = element("button", use.title, { role: "tab", "aria-selected": use === chosen });
    button.addEventListener("click", () => { location.hash = led({ map: use.title }); });
    return button;
  }));
  const canvas = byId("map").firstElementChild;
  canvas.hidden = !chosen;
  drawn = chosen || null;
  if (!chosen) {
    byId("cell").textContent = "No measurements yet; fleetrun takes one every five seconds (--metrics_period).";
    return;
  }
  const [wide, high] = [chosen.at.length, chosen.rows.length];
  const known = chosen.values.filter(value => !Number.isNaN(value)).sort();
  // A few values far above the others would leave these in one colour.
  const [low, middle, top] = [0, 0.5, 0.99].map(share => known[Math.floor((known.length - 1) * share)]);
  const isLog = low > 0 && top > 8 * middle, scaled = isLog ? Math.log : value => value;
  [canvas.width, canvas.height] = [wide, high];
  // Of a row that gets less than a pixel nothing may be seen.
  canvas.style.height = Math.max(120, Math.min(high * 18, Math.max(620, high))) + "px";
  const image = new ImageData(wide, high);
  chosen.values.forEach((value, place) => {
    if (!Number.isNaN(value))
      image.data.set([...shade((scaled(value) - scaled(low)) / ((scaled(top) - scaled(low)) || 1)), 255], 4 * place);
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
  const legend = chosen.title + ": dark " + number(low) + " to bright " + number(top) + " " + chosen.unit +
    (isLog ? " (logarithmic)" : "") + ", " + chosen.rows[0] + " at the top, from " + time(chosen.at[0]) + " to " + time(chosen.at[wide - 1]);
  canvas.setAttribute("aria-label", legend);
  byId("cell").textContent = legend + ". " + outliers(chosen, wide);
}

// The rows that are highest on average, if they stand out.
function outliers(use, wide) {
  const means = use.rows.map((row, place) => {
    const known = use.values.slice(place * wide, (place + 1) * wide).filter(value => !Number.isNaN(value));
    return [row, known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : NaN];
  }).filter(([, mean]) => !Number.isNaN(mean)).sort((one, other) => other[1] - one[1]);
  if (means.length < 3) return "";
  const middle = means[means.length >> 1][1];
  const high = means.filter(([, mean]) => mean > 1.2 * middle).slice(0, 3);
  return high.length ? "Highest on average: " + high.map(([row, mean]) => row + " " + number(mean)).join(", ") +
    "; median " + number(middle) + "." : "";
}

const number = value => String(Number(value.toPrecision(4)));
const time = seconds => seconds < 120 ? number(seconds) + " s" :
  Math.floor(seconds / 60) + " min " + Math.floor(seconds % 60) + " s";

function cellAt(event) {
  const box = event.target.getBoundingClientRect(), wide = drawn.at.length;
  const column = Math.min(Math.floor((event.clientX - box.left) / box.width * wide), wide - 1);
  const row = Math.min(Math.floor((event.clientY - box.top) / box.height * drawn.rows.length), drawn.rows.length - 1);
  return [Math.max(row, 0), Math.max(column, 0), wide];
}

byId("map").addEventListener("mousemove", event => {
  if (!drawn || event.target.tagName !== "CANVAS") return;
  const [row, column, wide] = cellAt(event), value = drawn.values[row * wide + column];
  byId("cell").textContent = drawn.rows[row] + ", at " + time(drawn.at[column]) + ": " +
    (Number.isNaN(value) ? "not measured" : number(value) + " " + drawn.unit) + "; a click shows its log";
});

byId("map").addEventListener("click", event => {
  if (!drawn || event.target.tagName !== "CANVAS") return;
  const label = drawn.rows[cellAt(event)[0]];
  const rank = label.startsWith("rank ") ? label.slice(5) : /^[a-z]+ \d+$/.test(label) ? label.replace(" ", ".") : "";
  if (rank) location.hash = led({ rank });
});

// Logs and stacks --------------------------------------------------------------------------------

let logsKey = "";

async function showLogs(run) {
  const words = new URLSearchParams();
  for (const name of ["rank", "grep", "failed"]) if (address().get(name)) words.set(name, address().get(name));
  const key = run + version + words;
  if (key === logsKey) return;
  logsKey = key;
  const box = byId("logs"), follows = box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
  try {
    const found = await ask("api/runs/" + run + "/logs?" + words);
    box.textContent = found.text;
    byId("found").textContent = "logs: " + found.count + (found.is_cut ? "; the last lines of them" : "");
  } catch (error) {
    box.textContent = "";
    byId("found").textContent = error.message;
  }
  if (follows) box.scrollTop = box.scrollHeight;
}

byId("search").addEventListener("submit", event => {
  event.preventDefault();
  const form = event.target.elements;
  location.hash = led({ rank: form.rank.value, grep: form.grep.value, failed: form.failed.checked ? "1" : null });
});

async function showStacks(run) {
  const { stacks, collectives } = await ask("api/runs/" + run + "/stacks");
  byId("collectives").hidden = !collectives;
  byId("collectives").textContent = collectives;
  const key = JSON.stringify(stacks);
  if (key === takenAt) return;
  takenAt = key;
  // Ranks that stand alike are shown once: heads and addresses of threads tell nothing apart.
  const alike = new Map();
  for (const one of stacks) {
    const body = one.text.replace(/^#.*$/gm, "").replace(/0x[0-9a-f]+/g, "");
    alike.set(body, [...(alike.get(body) || []), one]);
  }
  const groups = [...alike.values()].sort((one, other) => one.length - other.length);
  byId("stacks").replaceChildren(...groups.map(group => {
    const box = element("details");
    const who = group.map(one => one.label).slice(0, 8).join(", ") + (group.length > 8 ? " and " + (group.length - 8) + " more" : "");
    box.append(element("summary", who), element("pre", group[0].text));
    box.open = groups.length <= 2;
    return box;
  }));
  if (!stacks.length) byId("stacks").textContent = "No stacks yet: a hang (--hang_timeout) or the button takes them.";
}

byId("take").addEventListener("click", async () => {
  try {
    await ask("api/runs/" + address().get("run") + "/stacks", "POST");
    byId("taken").textContent = "Requested; they will appear here.";
  } catch (error) {
    byId("taken").textContent = error.message;
  }
});

// What goes on -----------------------------------------------------------------------------------

async function showRun() {
  const [run, other] = [address().get("run"), address().get("beside")];
  if (run !== shown.run) byId("run").hidden = true;
  if (run !== shown.run || other !== shown.other) [shown, version, takenAt] = [{ run, other }, "", ""];
  if (!run) return;
  const found = await ask("api/runs/" + run + "?seen=" + version);
  if (run !== address().get("run")) return;
  isRunning = found.is_running;
  byId("take").hidden = !isRunning;
  if (found.head !== undefined) {
    byId("run").hidden = false;
    for (const part of ["head", "progress", "origin"]) put(part, found[part]);
    document.title = found.title + ": " + found.result;
    uses = found.uses.map(unpacked);
    version = found.version;
    drawMaps();
    put("beside", other ? (await ask("api/runs/" + run + "/beside/" + other)).beside : "");
  }
  await showLogs(run);
  await showStacks(run);
}

let isBusy = false, isWanted = false;

async function look() {
  if (isBusy) { isWanted = true; return; }
  isBusy = true;
  const began = performance.now();
  try {
    runs = await ask("api/runs");
    if (!address().get("run") && runs.length) history.replaceState(null, "", led({ run: runs[0].key }));
    listRuns();
    await showRun();
    problem("");
    document.body.dataset.ready = "yes";
  } catch (error) {
    problem(error instanceof TypeError ? "fleetrun ui does not answer: it has ended or was restarted." : error.message);
  }
  isBusy = false;
  // A page that takes long to make is asked for less often.
  const pause = isWanted ? 0 : Math.max(PAUSE_MS, 5 * (performance.now() - began));
  isWanted = false;
  clearTimeout(look.timer);
  look.timer = setTimeout(look, document.hidden ? 10 * pause : pause);
}

// What the address says of the forms and the map needs no answer, and what somebody types is left alone.
function follow() {
  const form = byId("search").elements;
  for (const name of ["rank", "grep"]) form[name].value = address().get(name) || "";
  form.failed.checked = address().has("failed");
  if (drawn) drawMaps();
  look();
}

addEventListener("hashchange", follow);
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
follow();
