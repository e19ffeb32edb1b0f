// One request: where it waited, ran and moved, and what else could have been chosen.
import { el, ms, number, svg, table } from "./dom.js";
import { get } from "./server.js";

const CANDIDATES = 16; // that are shown of a stage

export function request(section) {
  const form = section.querySelector("#find"), found = section.querySelector("#found");
  const wanted = form.elements.wanted;
  let newest = 0;

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const target = `#request/${encodeURIComponent(wanted.value.trim())}`;
    if (location.hash === target) explain(wanted.value.trim());
    else location.hash = target;
  });

  async function explain(id) {
    const mine = ++newest;
    wanted.value = id;
    if (!id) {
      found.replaceChildren(el("p.empty", {}, "Every answer in the chat links to here, and so do the latest decisions of the cluster."));
      return;
    }
    found.replaceChildren(el("p.empty", {}, "Looking …"));
    try {
      const content = await get(`explain/${encodeURIComponent(id)}`);
      if (mine === newest) found.replaceChildren(...content.sequences.map(sequence));
    } catch (error) {
      if (mine === newest) found.replaceChildren(el("div.card.bad", { role: "alert" }, error.message));
    }
  }

  return { enter: explain, leave: () => { newest += 1; } };
}

function sequence(told) {
  return el("div.card", {}, el("h2", {}, told.id), facts(told), picture(told), events(told), told.placements.map(placement));
}

function facts({ demand, outcome, refused, frontend }) {
  const rows = [];
  const add = (name, value) => value !== null && rows.push(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  if (demand) {
    add("prompt", `${number(demand.prompt_tokens)} tokens`);
    add("at most", demand.max_tokens ? `${number(demand.max_tokens)} more` : null);
    add("targets", [["TTFT", demand.ttft_ms], ["TPOT", demand.tpot_ms]].filter(([, v]) => v !== null).map(([n, v]) => `${n} ${ms(v)}`).join(", ") || "none");
    add("class", demand.offline ? "offline" : `online, priority ${demand.priority}`);
  }
  add("through", frontend || null);
  if (outcome) {
    const guess = outcome.predicted_ttft_ms;
    add("TTFT", `${ms(outcome.ttft_ms)}${guess === null ? "" : ` (predicted ${ms(guess)})`}`);
    add("TPOT", ms(outcome.tpot_ms));
    add("tokens", number(outcome.tokens));
    if (outcome.images) add("images", images(outcome));
    add("recovered", outcome.recoveries.length ? `${outcome.recoveries.length} times` : null);
  }
  add("refused", refused ? el("span.bad", {}, refused) : null);
  return el("dl.facts", {}, rows);
}

function images({ images: seen, image_fallbacks: fallbacks }) {
  const kinds = [["cached", "in the prefix cache"], ["found", "seen before"], ["brought", "brought"], ["looked", "looked at"]];
  const parts = kinds.filter(([key]) => seen[key]).map(([key, name]) => `${number(seen[key])} ${name}`);
  const waits = `waited ${ms(seen.waited_ms)}${seen.encode_ms ? `, encoding ${ms(seen.encode_ms)}` : ""}`;
  return [parts.join(", "), waits, ...fallbacks].join("; ");
}

// --- the time line: a lane for the queue, and one for each instance

function picture(told) {
  const first = told.placements[0];
  if (!first) return el("p.empty", {}, "It has no place yet.");
  const at = (time) => Date.parse(time);
  const arrived = at(first.at) - first.waited_ms;
  const firstToken = told.outcome ? arrived + told.outcome.ttft_ms : null;
  const end = told.ended_at ? at(told.ended_at) : Math.max(...told.placements.map((p) => at(p.at)), ...told.relocated.map((r) => at(r.at))) + 1;
  const spans = []; // {lane, from, to, cls, what}
  told.placements.forEach((place, i) => {
    const until = told.placements[i + 1] ? at(told.placements[i + 1].at) : end;
    const placed = at(place.at);
    const asked = i ? placed : arrived;
    spans.push({ lane: "queue", from: asked, to: placed, cls: "cx", what: "waits for a place" });
    const begins = firstToken !== null && firstToken > placed && firstToken < until ? firstToken : i ? placed : until;
    if (begins > placed) spans.push({ lane: place.prefill, from: placed, to: begins, cls: "c0", what: "waits there, and computes its prompt" });
    let lane = place.decode ?? place.prefill, from = begins;
    for (const move of told.relocated.filter((r) => at(r.at) >= placed && at(r.at) < until)) {
      const when = Math.max(at(move.at), from);
      if (when > from) spans.push({ lane, from, to: when, cls: "c1", what: "decodes" });
      [lane, from] = [move.to, when];
    }
    if (until > from) spans.push({ lane, from, to: until, cls: "c1", what: "decodes" });
  });
  const lanes = [...new Set(spans.map((span) => span.lane))];
  const left = 120, width = 960, row = 26, height = lanes.length * row + 24, scale = (width - left - 10) / Math.max(end - arrived, 1);
  const x = (time) => left + (time - arrived) * scale;
  const ticks = [0, 0.25, 0.5, 0.75, 1].map((part) => arrived + part * (end - arrived));
  return el("div.scroll", { tabindex: "0", role: "group", "aria-label": "Time line" },
    svg("svg.lanes", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": spans.map((s) => `${s.lane}: ${s.what} ${ms(s.to - s.from)}`).join("; ") },
      ticks.map((t) => [svg("line", { x1: x(t), x2: x(t), y1: 0, y2: height - 18 }), svg("text.axis", { x: x(t), y: height - 4, "text-anchor": t === ticks[0] ? "start" : t === ticks.at(-1) ? "end" : "middle" }, ms(t - arrived))]),
      lanes.map((lane, i) => svg("text", { x: 0, y: i * row + 17 }, lane)),
      spans.map((span) => svg(`rect.${span.cls}`, { x: x(span.from), y: lanes.indexOf(span.lane) * row + 4, width: Math.max((span.to - span.from) * scale, 1.5), height: row - 8, rx: 3 }, svg("title", {}, `${span.what}: ${ms(span.to - span.from)}`))),
      firstToken === null ? null : svg("line", { x1: x(firstToken), x2: x(firstToken), y1: 0, y2: height - 18, "stroke-dasharray": "3 3" })),
    el("div.keys", {}, [["cx", "queue"], ["c0", "to the first token"], ["c1", "decodes"]].map(([cls, name]) => el("span", {}, el(`span.swatch.${cls}`), name))));
}

function events(told) {
  const rows = [
    ...told.held.map((row) => ({ at: row.at, what: "the policy let it wait" })),
    ...told.relocated.map((row) => ({ at: row.at, what: `${row.from} → ${row.to}: ${row.reason}` })),
    ...told.moves.map((row) => ({ at: row.at, what: `${row.what} ${row.instance}${row.role ? ` to ${row.role}` : ""}: ${row.reason}` })),
  ].sort((a, b) => a.at.localeCompare(b.at));
  return rows.length ? table([{ name: "time", of: (row) => new Date(row.at).toLocaleTimeString([], { hour12: false }) }, { name: "what", cls: "why", of: (row) => row.what }], rows) : null;
}

// --- decisions

function placement(place) {
  const where = place.decode ? `${place.prefill}, then ${place.decode}` : place.prefill;
  return el("div", {}, el("h3", {}, `To ${where}`),
    el("p", {}, `${place.policy}: ${place.reason}. Decided after ${ms(place.waited_ms)}, with ${number(place.waiting)} others in the queue; TTFT predicted: ${ms(place.predicted_ttft_ms)}.`),
    place.images.length ? el("p", {}, `Images by ${place.media_route}: ${place.images.map((way) => `${way.at} ${way.how === "looks" ? "is to look" : "has looked"} at ${number(way.images)}`).join("; ")}.`) : null,
    Object.entries(place.stages).map(([stage, rows]) => candidates(stage, rows)));
}

function candidates(stage, rows) {
  const shown = rows.slice(0, CANDIDATES);
  const most = Math.max(...shown.map((row) => row.ms), 1e-9);
  const bar = (row) => {
    const fill = el("i");
    fill.style.width = `${(100 * row.ms) / most}%`;
    return el("span", {}, el("span.meter", { "aria-hidden": "true" }, fill), ms(row.ms));
  };
  const columns = [
    { name: stage === "prefill" ? "candidate" : "candidate to decode", cls: "name", of: (row) => `${row.chosen ? "✓ " : ""}${row.instance}` },
    { name: stage === "prefill" ? "first token" : "step", of: bar },
    { name: "cost", number: true, of: (row) => number(row.cost, 2) },
    { name: "requests", number: true, of: (row) => number(row.requests) },
    { name: "unread tokens", number: true, of: (row) => number(row.pending_tokens) },
    { name: "KV tokens", number: true, of: (row) => number(row.held_tokens) },
    { name: "cached", number: true, of: (row) => number(row.cached_tokens) },
    { name: "to load", number: true, of: (row) => number(row.loaded_tokens) },
  ];
  return [table(columns, shown, (row) => (row.chosen ? "chosen" : "")), rows.length > shown.length ? el("p.empty", {}, `${rows.length - shown.length} more`) : null].filter(Boolean);
}
