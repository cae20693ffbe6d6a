// Below each chart of lines within ROOT, show the values where the mouse is, by the points drawn there.
function readings(root) {
for (const svg of root.querySelectorAll("svg[data-scale]")) {
  const [left, right, begin, end, low, high, bottom, top] = svg.dataset.scale.split(" ").map(Number);
  const lines = [...svg.querySelectorAll("path[data-name]")].map(path => [path.dataset.name,
    [...path.getAttribute("d").matchAll(/[ML](\S+?) ([^ML]+)/g)].map(point => point.slice(1).map(Number))]);
  const show = value => Number(value.toPrecision(4));
  const said = svg.insertAdjacentElement("afterend", document.createElement("p"));
  said.className = "reading";
  svg.addEventListener("mousemove", event => {
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    let nearest = begin;
    for (const [, points] of lines) for (const [x] of points)
      if (Math.abs(x - at) < Math.abs(nearest - at)) nearest = x;
    const values = lines.map(([name, points]) => [name, points.find(point => point[0] == nearest)])
      .filter(([, point]) => point)
      .map(([name, point]) => name + ": " + show(low + (point[1] - bottom) / (top - bottom) * (high - low)));
    said.textContent = "at " + show(left + (nearest - begin) / (end - begin) * (right - left)) + ": " + values.join(", ");
  });
}
}
