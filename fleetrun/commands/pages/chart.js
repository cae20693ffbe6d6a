// Draws the charts of a page from data: over one axis of time, with the ranks that failed marked.
const WIDE = 900, LEFT = 110, RIGHT = 14, TOP = 8, FOOT = 22, LANE = 18, MOST = 620;
const WELL = "#2e9e5b", BAD = "#d33f3f";
const KINDS = { "succeeded": WELL, "failed first": BAD, "stopped with it": "#a3a8b0", "running": "#3b7dd8", "end unknown": "#7fa9de" };
// Two runs beside each other: one in cold colours, the other in warm ones.
const COLORS = { "": ["#3b7dd8", "#e08a1e", "#2e9e5b", "#9a5fd0", "#159aa5", "#7a6a4f", "#c05090", "#808080"],
  A: ["#1f5fb8", "#4a8ae0", "#86b4f0", "#5a4fcf", "#9a93ec", "#159aa5", "#66c4cc", "#3d7f9e"],
  B: ["#c2690c", "#e9973f", "#f3bd82", "#b8321f", "#e0705f", "#a8820a", "#d6b447", "#8c5a3c"] };
const SHADES = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

const number = value => String(Number(value.toPrecision(4)));
const time = seconds => seconds < 120 ? number(seconds) + " s" : seconds < 7200
  ? Math.floor(seconds / 60) + " min " + Math.floor(seconds % 60) + " s" : Math.floor(seconds / 3600) + " h " + Math.floor(seconds % 3600 / 60) + " min";

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function drawing(name, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

const axis = (low, high, begin, end) => value => begin + (value - low) / ((high - low) || 1) * (end - begin);

function ticks(low, high, sizes = [1, 2, 5, 10]) {
  const rough = ((high - low) || 1) / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = sizes.map(size => size * power).find(size => size >= rough) || 10 * power;
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high * (1 + 1e-9); at++) found.push(at * step);
  return found;
}

// The picture of a chart, HIGH units without its axis of time, which is the same for all charts of a run.
function picture(chart, high) {
  const svg = drawing("svg", { viewBox: `0 0 ${WIDE} ${TOP + high + FOOT}` });
  const x = axis(0, chart.span, LEFT, WIDE - RIGHT);
  const [unit, word] = [[3600, " h"], [60, " min"]].find(([seconds]) => chart.span >= 2 * seconds) || [1, " s"];
  for (const tick of ticks(0, chart.span / unit)) {
    svg.append(drawing("path", { class: "grid", d: `M${x(tick * unit)} ${TOP}V${TOP + high}` }),
      drawing("text", { class: "middle", x: x(tick * unit), y: TOP + high + 15 }, number(tick) + word));
  }
  return [svg, x];
}

// The names of rows, as many as there is room for; those of failed ranks always, and marked.
function names(svg, chart, rows, lane) {
  const every = Math.max(1, Math.ceil(14 / lane));
  rows.forEach((name, at) => {
    const isCulprit = chart.culprits.includes(name.replace(/ \(.*/, ""));
    if (at % every && !isCulprit) return;
    svg.append(drawing("text", { class: "end" + (isCulprit ? " culprit" : ""), x: LEFT - 6, y: TOP + (at + 0.5) * lane + 4 },
      (isCulprit ? "▶ " : "") + name.slice(0, 24)));
  });
}

function legend(box, entries) {
  const made = element("div", "", { class: "legend" });
  for (const [name, color] of entries) {
    const key = drawing("svg", { viewBox: "0 0 1 1" });
    key.append(drawing("rect", { width: 1, height: 1, fill: color }));
    const entry = element("span");
    entry.append(key, name);
    made.append(entry);
  }
  box.append(made);
}

function lanes(box, chart) {
  const lane = Math.max(1, Math.min(LANE, MOST / chart.rows.length));
  const [svg, x] = picture(chart, lane * chart.rows.length);
  const gap = lane >= 3 ? lane * 0.1 : 0;
  names(svg, chart, chart.rows, lane);
  for (const [row, begin, end, kind, tip] of chart.spans) {
    const bar = drawing("rect", { class: "point", x: x(begin), y: TOP + row * lane + gap, fill: KINDS[kind],
      width: Math.max(x(end) - x(begin), 0.5), height: gap ? lane - 2 * gap : 1.5 * lane });
    bar.append(drawing("title", {}, tip));
    svg.append(bar);
  }
  legend(box, Object.entries(KINDS).filter(([kind]) => chart.spans.some(span => span[3] === kind)).map(([kind, color]) => [say(kind), color]));
  box.append(svg);
}

function lines(box, chart) {
  const high = 220, values = chart.lines.flatMap(line => line.y).filter(value => value !== null);
  let [low, top] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  if (low === top) [low, top] = [low - (Math.abs(low) || 1) / 2, top + (Math.abs(top) || 1) / 2];
  const [svg, x] = picture(chart, high), y = axis(low, top, TOP + high, TOP), used = { "": 0, A: 0, B: 0 };
  for (const tick of ticks(low, top))
    svg.append(drawing("path", { class: "grid", d: `M${LEFT} ${y(tick)}H${WIDE - RIGHT}` }),
      drawing("text", { class: "end", x: LEFT - 6, y: y(tick) + 4 }, number(tick)));
  const path = (line, numbers) => numbers.map((value, at) => value === null ? "" :
    (at && numbers[at - 1] !== null ? "L" : "M") + number(x(line.x[at])) + " " + number(y(value))).join("");
  const fails = line => chart.culprits.includes(line.name.replace(/, attempt .*/, ""));
  // The lines of failed ranks lie above the others.
  const entries = [...chart.lines].sort((first, other) => fails(first) - fails(other)).map(line => {
    const isCulprit = fails(line);
    const color = isCulprit ? BAD : COLORS[line.side][used[line.side]++ % 8];
    const kind = "line" + (isCulprit ? " culprit" : "");
    svg.append(drawing("path", { class: kind, stroke: color, "data-name": line.name, d: path(line, line.y) }));
    return [(isCulprit ? "▶ " : "") + line.name, color];
  });
  legend(box, entries);
  const said = element("p", "", { class: "reading" });
  svg.addEventListener("mousemove", event => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    const nearest = chart.lines.map(line => [line, line.x.reduce((best, value, place) =>
      Math.abs(x(value) - at) < Math.abs(x(line.x[best]) - at) ? place : best, 0)]);
    const shown = nearest.filter(([line, place]) => line.y[place] !== null).map(([line, place]) => line.name + " " + number(line.y[place]));
    said.textContent = time(nearest[0][0].x[nearest[0][1]]) + ": " + shown.join(", ");
  });
  box.append(svg, said);
}

function shade(share) {
  const at = Math.min(Math.max(share, 0), 1) * (SHADES.length - 1), near = Math.min(Math.floor(at), SHADES.length - 2);
  return SHADES[near].map((value, index) => value + (at - near) * (SHADES[near + 1][index] - value));
}

// What ranks and GPUs used over time, a tab for each quantity.
function maps(box, chart, chosen, onChoice) {
  const shown = chart.maps.find(map => map.title === chosen) || chart.maps.find(map => map.title === chart.first) || chart.maps[0];
  box.replaceChildren();
  const tabs = element("div", "", { class: "bar", role: "tablist" });
  for (const map of chart.maps) {
    const tab = element("button", say(map.title), { role: "tab", "aria-selected": map === shown });
    tab.addEventListener("click", () => (onChoice || (title => maps(box, chart, title)))(map.title));
    tabs.append(tab);
  }
  box.append(tabs);
  const values = new Float32Array(Uint8Array.from(atob(shown.values), letter => letter.charCodeAt(0)).buffer);
  const [wide, high] = [shown.at.length, shown.rows.length], known = values.filter(value => !Number.isNaN(value)).sort();
  // A few values far above the others would leave these in one colour.
  const [low, middle, top] = [0, 0.5, 0.99].map(share => known[Math.floor((known.length - 1) * share)]);
  const isLog = low > 0 && top > 8 * middle, scaled = isLog ? Math.log : value => value;
  const canvas = element("canvas");
  [canvas.width, canvas.height] = [wide, high];
  const image = new ImageData(wide, high);
  values.forEach((value, place) => {
    if (!Number.isNaN(value))
      image.data.set([...shade((scaled(value) - scaled(low)) / ((scaled(top) - scaled(low)) || 1)), 255], 4 * place);
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
  const lane = Math.max(1, Math.min(LANE, MOST / high)), [svg, x] = picture(chart, lane * high);
  const width = wide > 1 ? (shown.at[wide - 1] - shown.at[0]) / (wide - 1) : chart.span;
  const [begin, end] = [x(shown.at[0]), Math.min(x(shown.at[wide - 1] + width), WIDE - RIGHT)];
  svg.append(drawing("image", { class: "map", x: begin, y: TOP, width: end - begin, height: lane * high, preserveAspectRatio: "none",
    "data-size": wide + " x " + high, href: canvas.toDataURL() }));
  names(svg, chart, shown.rows, lane);
  const bar = element("div", "", { class: "colors" }), scale = drawing("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none" });
  for (let at = 0; at < 100; at++) scale.append(drawing("rect", { x: at, width: 1.1, height: 6, fill: `rgb(${shade(at / 99).join()})` }));
  bar.append(number(low) + " " + shown.unit, scale, isLog ? say("{} (logarithmic)", number(top) + " " + shown.unit) : number(top) + " " + shown.unit);
  const said = element("p", outliers(shown.rows, values, wide), { class: "reading" });
  const bounded = (share, count) => Math.max(0, Math.min(Math.floor(share * count), count - 1));
  svg.addEventListener("mousemove", event => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    const row = bounded((at.y - TOP) / (lane * high), high), column = bounded((at.x - begin) / (end - begin), wide);
    const value = values[row * wide + column];
    said.textContent = shown.rows[row] + ", " + time(shown.at[column]) + ": " +
      (Number.isNaN(value) ? say("not measured") : number(value) + " " + shown.unit);
  });
  box.append(bar, svg, said);
}

// The rows that are highest on average, if they stand out.
function outliers(rows, values, wide) {
  const means = rows.map((row, place) => {
    const known = values.slice(place * wide, (place + 1) * wide).filter(value => !Number.isNaN(value));
    return [row, known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : NaN];
  }).filter(([, mean]) => !Number.isNaN(mean)).sort((one, other) => other[1] - one[1]);
  if (means.length < 3) return "";
  const middle = means[means.length >> 1][1];
  const high = means.filter(([, mean]) => mean > 1.2 * middle).slice(0, 3);
  return high.length ? say("Highest on average: {}; median {}.", high.map(([row, mean]) => row + " " + number(mean)).join(", "), number(middle)) : "";
}
