// Markdown to elements, while it is still being written: what is finished is not made again.
import { el } from "./dom.js";

/** Shows a text that grows in a node. */
export class Markdown {
  constructor(node) {
    this.node = node;
    this.made = []; // [source of a block, its node]
  }

  show(text) {
    const found = blocks(text);
    let same = 0;
    while (same < Math.min(found.length, this.made.length) && this.made[same][0] === found[same].source) same += 1;
    for (const [, node] of this.made.splice(same)) node.remove();
    for (const block of found.slice(same)) {
      const node = element(block);
      this.node.append(node);
      this.made.push([block.source, node]);
    }
  }
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const DIVIDER = /^\s*\|?(\s*:?-+:?\s*\|)+\s*(:?-+:?)?\s*\|?\s*$/;

/** The text's blocks, in order: {kind, source, lines, ...}; one that is not closed yet goes to the end. */
export function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  let at = 0;
  const take = (kind, end, more = {}) => {
    const inside = lines.slice(at, end);
    found.push({ kind, lines: inside, source: `${kind}\n${inside.join("\n")}`, ...more });
    at = end;
  };
  const until = (start, stop) => {
    let end = start;
    while (end < lines.length && !stop(lines[end], end)) end += 1;
    return end;
  };
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (!line.trim()) at += 1;
    else if (fence) {
      const closes = (other) => other.trim().startsWith(fence[1]) && !other.trim().slice(fence[1].length).replaceAll(fence[1][0], "").trim();
      const end = until(at + 1, closes);
      take("code", Math.min(end + 1, lines.length), { language: fence[2].trim(), body: lines.slice(at + 1, end).join("\n") });
    } else if (HEADING.test(line)) take("heading", at + 1);
    else if (RULE.test(line)) take("rule", at + 1);
    else if (/^ {0,3}>/.test(line)) take("quote", until(at, (other) => !/^ {0,3}>/.test(other)));
    else if (ITEM.test(line)) {
      const otherList = (other) => {
        const item = ITEM.exec(other);
        return item && item[1].length <= ITEM.exec(line)[1].length && /\d/.test(item[2]) !== /\d/.test(ITEM.exec(line)[2]);
      };
      take("list", until(at + 1, (other, i) => otherList(other) || (
        other.trim() ? !ITEM.test(other) && !/^\s{2,}/.test(other) && !lines[i - 1].trim() : !/^\s{2,}\S|^\s*([-*+]|\d{1,9}[.)])\s/.test(lines[i + 1] ?? ""))));
    } else if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "")) take("table", until(at + 2, (other) => !other.includes("|")));
    else take("text", until(at + 1, (other) => !other.trim() || FENCE.test(other) || HEADING.test(other) || /^ {0,3}>/.test(other) || ITEM.test(other)));
  }
  return found;
}

function element(block) {
  switch (block.kind) {
    case "code":
      return code(block.body, block.language);
    case "heading": {
      const [, marks, text] = HEADING.exec(block.lines[0]);
      return el(`h${Math.min(marks.length + 2, 6)}`, {}, inline(text));
    }
    case "rule":
      return el("hr");
    case "quote":
      return el("blockquote", {}, blocks(block.lines.map((line) => line.replace(/^ {0,3}> ?/, "")).join("\n")).map(element));
    case "list":
      return list(block.lines);
    case "table":
      return grid(block.lines);
    default:
      return el("p", {}, broken(block.lines));
  }
}

function broken(lines) {
  return lines.flatMap((line, i) => [...(i ? [el("br")] : []), ...inline(line.trim())]);
}

export function code(body, language = "") {
  const copy = el("button.quiet.small", { type: "button", onclick: () => {
    navigator.clipboard?.writeText(body).then(() => { copy.textContent = "Copied"; }, () => { copy.textContent = "Not allowed"; });
  } }, "Copy");
  return el("div.code-box", {}, el("pre", { tabindex: "0", "aria-label": language ? `Code: ${language}` : "Code" }, el("code", {}, body)), copy);
}

function list(lines) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) items.push([item[3]]);
    else items.at(-1).push(line);
  }
  const ordered = /\d/.test(mark);
  return el(ordered ? "ol" : "ul", ordered ? { start: parseInt(mark, 10) } : {}, items.map(([first, ...rest]) => {
    const least = Math.min(...rest.filter((line) => line.trim()).map((line) => /^\s*/.exec(line)[0].length), 99);
    const inner = blocks(rest.map((line) => line.slice(Math.min(least, /^\s*/.exec(line)[0].length))).join("\n"));
    const tail = inner.length && inner[0].kind === "text" && rest[0].trim() ? inner.shift().lines : [];
    return el("li", {}, broken([first, ...tail]), inner.map(element));
  }));
}

function grid(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const [head, , ...rows] = lines.map(cells);
  return el("div.scroll", { tabindex: "0", role: "group", "aria-label": "Table" }, el("table", {},
    el("thead", {}, el("tr", {}, head.map((cell) => el("th", { scope: "col" }, inline(cell))))),
    el("tbody", {}, rows.map((row) => el("tr", {}, head.map((_, i) => el("td", {}, inline(row[i] ?? ""))))))));
}

const MARKS = [
  [/^(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/, (m) => el("code", {}, m[2].replace(/^ (.+) $/, "$1"))],
  [/^\*\*(?=\S)([\s\S]*?\S)\*\*/, (m) => el("strong", {}, inline(m[1]))],
  [/^__(?=\S)([\s\S]*?\S)__(?!\w)/, (m) => el("strong", {}, inline(m[1]))],
  [/^~~(?=\S)([\s\S]*?\S)~~/, (m) => el("del", {}, inline(m[1]))],
  [/^\*(?=[^\s*])([\s\S]*?[^\s*])\*(?!\*)/, (m) => el("em", {}, inline(m[1]))],
  [/^_(?=[^\s_])([\s\S]*?[^\s_])_(?!\w)/, (m) => el("em", {}, inline(m[1]))],
  [/^\[([^\]\n]+)\]\(((?:https?:\/\/|mailto:)[^\s)]+)(?:\s+"[^"]*")?\)/, (m) => link(m[2], inline(m[1]))],
  [/^https?:\/\/[^\s<>()"'`]*[^\s<>()"'`.,;:!?]/, (m) => link(m[0], [m[0]])],
  [/^\\([\\`*_{}[\]()#+\-.!|~>])/, (m) => m[1]],
];

function link(to, shown) {
  return el("a", { href: to, target: "_blank", rel: "noopener noreferrer" }, shown);
}

/** A line's text and elements. */
export function inline(text) {
  const found = [];
  let plain = "", at = 0;
  while (at < text.length) {
    const start = text.slice(at).search(/[`*_~[\\]|https?:\/\//);
    if (start < 0) break;
    plain += text.slice(at, at + start);
    at += start;
    const rest = text.slice(at);
    const inWord = /\w/.test(text[at - 1] ?? "") && rest[0] === "_"; // snake_case
    const hit = inWord ? null : MARKS.map(([mark, make]) => [mark.exec(rest), make]).find(([match]) => match);
    if (!hit) {
      plain += text[at];
      at += 1;
      continue;
    }
    if (plain) found.push(plain);
    plain = "";
    found.push(hit[1](hit[0]));
    at += hit[0][0].length;
  }
  plain += text.slice(at);
  if (plain) found.push(plain);
  return found;
}
