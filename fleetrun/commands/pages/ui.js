"use strict";
// The address is #token=...&run=...&...: what stands behind # is never sent anywhere by a browser.
const PAUSE_MS = 2000;
const byId = id => document.getElementById(id);
const address = () => new URLSearchParams(location.hash.slice(1));
let runs = [], shown = {}, run = null;

// The address with CHANGES, in which null takes a word away.
function led(changes) {
  const words = address();
  for (const [name, value] of Object.entries(changes))
    value === null || value === "" ? words.delete(name) : words.set(name, value);
  return "#" + words;
}

async function ask(path) {
  const answer = await fetch(path, { headers: { Authorization: "Bearer " + address().get("token") } });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

// A choice of a map is in the address.
function drawRun() {
  if (!run) return;
  byId("run").replaceChildren(...sections(run, "A", address().get("map"), title => { location.hash = led({ map: title }); }));
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
    link.append(element("b", run.job), element("small", began), element("small", run.processes === 1 ? say("1 process") : say("{} processes", run.processes)),
      element("small", say(run.state)));
    row.append(link);
    if (chosen && run.key !== chosen)
      row.append(element("a", say(run.key === other ? "leave out" : "compare"), { class: "other",
        href: led({ beside: run.key === other ? null : run.key }) }));
    return row;
  });
  byId("runs").replaceChildren(element("h1", "fleetrun"), ...rows);
  if (!rows.length) byId("runs").append(element("p", say("There is no run yet.")));
}

// What goes on -----------------------------------------------------------------------------------

const isAlive = key => runs.some(row => row.key === key && row.is_running);

async function showRun() {
  const [key, other] = [address().get("run"), address().get("beside")];
  if (key !== shown.key) byId("run").hidden = true;
  if (!key) return;
  // What has ended is asked for once more, and then stays.
  if (key !== shown.key || other !== shown.other || shown.isAlive) {
    const isNowAlive = isAlive(key), found = await ask("api/runs/" + key);
    if (key !== address().get("run")) return;
    [shown, run] = [{ key, other, isAlive: isNowAlive }, found];
    byId("run").hidden = false;
    drawRun();
    document.title = run.title + ": " + ending(run);
    byId("beside").replaceChildren(...(other ? [comparison([run, await ask("api/runs/" + other)])] : []));
  }
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
    problem(error instanceof TypeError ? say("fleetrun ui does not answer: it has ended or was restarted.") : error.message);
  }
  isBusy = false;
  // A page that takes long to make is asked for less often.
  const pause = isWanted ? 0 : Math.max(PAUSE_MS, 5 * (performance.now() - began));
  isWanted = false;
  clearTimeout(look.timer);
  look.timer = setTimeout(look, document.hidden ? 10 * pause : pause);
}

// What the address says of the map needs no answer.
function follow() {
  drawRun();
  look();
}

addEventListener("hashchange", follow);
document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
document.documentElement.lang = isChinese ? "zh-CN" : "en";
follow();
