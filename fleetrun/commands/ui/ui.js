"use strict";
// The address is #token=...&run=...&...: what stands behind # is never sent anywhere by a browser.
const PAUSE_MS = 2000;
const byId = id => document.getElementById(id);
const address = () => new URLSearchParams(location.hash.slice(1));
let runs = [], version = "", shown = {}, charts = {}, takenAt = "", isRunning = false;

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

// What the server has written, in which it has escaped everything that a run says; CHARTS are drawn anew.
const inPlace = new Map();
function put(id, html, charts) {
  if (inPlace.get(id) !== html) byId(id).innerHTML = html;
  inPlace.set(id, html);
  drawCharts(byId(id), charts);
}

// A click on a rank shows its log.
function drawCharts(box, charts) {
  draw(box, charts, address().get("map"), title => { location.hash = led({ map: title }); }, label => {
    const rank = label.startsWith("rank ") ? label.slice(5) : /^[a-z]+ \d+$/.test(label) ? label.replace(" ", ".") : "";
    if (rank) location.hash = led({ rank });
  });
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
    charts = found.charts;
    for (const part of ["head", "progress", "origin"]) put(part, found[part], charts);
    document.title = found.title + ": " + found.result;
    version = found.version;
    const both = other ? await ask("api/runs/" + run + "/beside/" + other) : { beside: "", charts: {} };
    put("beside", both.beside, both.charts);
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
  drawCharts(byId("progress"), charts);
  look();
}

addEventListener("hashchange", follow);
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
follow();
