// Elements of the document. Text of the gateway becomes text nodes and attribute values only, never markup.

const byId = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

/** Sets what differs: `text`, `class`, `on` (event handlers) and attributes; false and null take an attribute away. */
function set(element, values) {
  for (const [name, value] of Object.entries(values)) {
    if (name === "text") {
      if (element.textContent !== value) element.textContent = value;
    } else if (name === "on") {
      for (const [event, handler] of Object.entries(value)) element["on" + event] = handler;
    } else if (value === false || value === null || value === undefined) {
      element.removeAttribute(name);
    } else if (element.getAttribute(name) !== String(value)) {
      element.setAttribute(name, value);
    }
  }
  return element;
}

function make(tag, values = {}, children = []) {
  const element = set(document.createElement(tag), values);
  element.append(...children);
  return element;
}

/** Makes the children of `parent` those of `items`, by key, and keeps elements that stay: focus and clicks survive. */
function keep(parent, items, keyOf, create, update) {
  const present = new Map();
  for (const child of [...parent.children]) {
    if (child.dataset.key === undefined) child.remove();
    else present.set(child.dataset.key, child);
  }
  let after = null;
  for (const item of items) {
    const key = keyOf(item);
    let child = present.get(key);
    if (child) present.delete(key);
    else {
      child = create(item);
      child.dataset.key = key;
    }
    const place = after ? after.nextSibling : parent.firstChild;
    if (child !== place) parent.insertBefore(child, place);
    update(child, item);
    after = child;
  }
  for (const child of present.values()) child.remove();
}

/** Fills a table. A column: { title, class, text(row) } or { title, class, create(row), update(element, row) }. */
function fillTable(table, columns, rows, keyOf) {
  if (!table.tHead) {
    const cells = columns.map((column) => make("th", { scope: "col", class: column.class || null }, [column.title]));
    table.append(make("thead", {}, [make("tr", {}, cells)]), make("tbody"));
  }
  const create = (row) => make("tr", {}, columns.map((column) => {
    const cell = make("td", { class: column.class || null });
    if (column.create) cell.append(column.create(row));
    return cell;
  }));
  const update = (line, row) => columns.forEach((column, at) => {
    const cell = line.cells[at];
    if (column.create) column.update(cell.firstChild, row);
    else set(cell, { text: column.text(row), class: [column.class, column.bad && column.bad(row) && "bad"].filter(Boolean).join(" ") || null });
  });
  keep(table.tBodies[0], rows, keyOf, create, update);
  table.hidden = rows.length === 0;
}

/** A line of the last values; gaps where one is unknown. */
function spark() {
  const svg = document.createElementNS(SVG, "svg");
  set(svg, { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(set(document.createElementNS(SVG, "path"), { class: "area" }), document.createElementNS(SVG, "path"));
  return svg;
}

function drawSpark(svg, values) {
  const known = values.filter((value) => value !== null);
  const top = Math.max(...known, 1e-9);
  const step = 100 / (HISTORY - 1);
  const points = values.map((value, at) => value === null ? null
    : [(100 - (values.length - 1 - at) * step).toFixed(1), (22.5 - 21 * value / top).toFixed(1)]);
  let line = "";
  let drawing = false;
  for (const point of points) {
    if (point) line += (drawing ? "L" : "M") + point.join(" ");
    drawing = point !== null;
  }
  const [area, stroke] = svg.children;
  const first = points.find((point) => point), last = points[points.length - 1];
  const whole = first && last && known.length > 1 && points.slice(points.indexOf(first)).every((point) => point);
  set(stroke, { d: line || null });
  set(area, { d: whole ? `${line}L${last[0]} 24L${first[0]} 24Z` : null });
}
