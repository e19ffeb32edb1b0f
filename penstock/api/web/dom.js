// Elements, made of data; text is never read as markup.
const SVG = "http://www.w3.org/2000/svg";

/** el("div.card", {title: "..."}, "text", child, ...); attributes that are null are left out. */
export function el(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  return fill(document.createElement(tag), classes, attributes, children);
}

export function svg(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  return fill(document.createElementNS(SVG, tag), classes, attributes, children);
}

function fill(node, classes, attributes, children) {
  if (classes.length) node.setAttribute("class", classes.join(" "));
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

/** A table: columns are {name, of(row), number?, cls?}; `of` gives text or a node. */
export function table(columns, rows, of_row = () => null) {
  const head = columns.map((c) => el(c.number ? "th.n" : "th", { scope: "col" }, c.name));
  const body = rows.map((row) =>
    el(of_row(row) ? `tr.${of_row(row)}` : "tr", {}, columns.map((c) => el(`td${c.number ? ".n" : ""}${c.cls ? `.${c.cls}` : ""}`, {}, c.of(row)))),
  );
  return el("div.scroll", { tabindex: "0", role: "group", "aria-label": "Table" },
    el("table.rows", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
}

/** A line of values over an area, from 0 to the greatest; null is a gap that is drawn as 0. */
export function spark(values, label, top = 0) {
  const width = 100, height = 30;
  const most = Math.max(top, ...values, 1e-9);
  const step = width / Math.max(values.length - 1, 1);
  const points = values.map((value, i) => `${(i * step).toFixed(1)},${(height - ((value ?? 0) / most) * (height - 2) - 1).toFixed(1)}`);
  return svg("svg.spark", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
    values.length > 1 ? svg("polygon", { points: `0,${height} ${points.join(" ")} ${width},${height}` }) : null,
    values.length > 1 ? svg("polyline", { points: points.join(" ") }) : null);
}

export function number(value, digits = 0) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
}

export function share(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(0)} %` : "–";
}

export function ms(value) {
  if (value === null || value === undefined) return "–";
  return value >= 10000 ? `${number(value / 1000, 1)} s` : `${number(value, value < 10 ? 1 : 0)} ms`;
}
