// The deployment, live: what `penstock top` shows, and how it was in the last minutes.
import { el, ms, number, share, spark, svg, table } from "./dom.js";
import { ask, events } from "./server.js";

const KEPT = 300; // looks, of a second each
const EVENTS = 30; // that are shown
const SHOWN = 64; // instances of a role, those with the most to do
const PLACES = ["device", "host", "disk", "remote", "peer"]; // colours stay with their place
const COLOURS = { ready: "--good", suspect: "--warn", draining: "--warn", sleeping: "--warn", absent: "--bad" };

export function cluster(section) {
  const looks = []; // the newest last
  const changes = []; // of instances' states that were seen here, the newest first
  let watching = null; // an AbortController
  let trouble = "";
  let served = []; // names, one of each model
  let chosen = ""; // one of them; "" for the only one

  async function watch() {
    watching?.abort();
    const mine = (watching = new AbortController());
    while (!mine.signal.aborted) {
      try {
        const response = await ask(`overview/stream${chosen && `?model=${encodeURIComponent(chosen)}`}`, { signal: mine.signal });
        for await (const { event, data } of events(response)) {
          if (mine.signal.aborted) return;
          const told = JSON.parse(data);
          trouble = event === "trouble" ? told.message : "";
          if (!trouble) {
            if (looks.length) changes.unshift(...changed(looks.at(-1), told));
            changes.length = Math.min(changes.length, EVENTS);
            looks.push(told);
            if (looks.length > KEPT) looks.shift();
          }
          draw();
        }
      } catch (error) {
        if (error.name === "AbortError") return;
        trouble = error.status === 400 && !served.length ? "" : error.message; // it will be known whose cluster this is
        draw();
        if (error.status === 401 || error.status === 403) return;
      }
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }

  const parts = {};
  function place(name, what, node) {
    if (!parts[name]) section.append((parts[name] = el(what)));
    parts[name].replaceChildren(...[node].flat().filter(Boolean));
  }

  function draw() {
    place("trouble", "div", trouble ? el("div.card.bad", { role: "alert" }, trouble) : null);
    const newest = looks.at(-1);
    if (!newest) return;
    const reading = document.activeElement?.closest?.(".scroll") && section.contains(document.activeElement);
    if (reading || getSelection()?.toString()) return; // somebody reads, copies or scrolls there
    place("tiles", "div.tiles", tiles(looks));
    place("pools", "div", pools(looks));
    place("more", "div.columns", [prefixes(newest), latency(newest), scaling(newest.master)]);
    place("events", "div.columns", [happened(newest, changes), decisions(newest.master)]);
  }

  // a browser has six connections to a server: tabs that nobody sees leave theirs to others
  let shown = false;
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) watching?.abort();
    else if (shown) watch();
  });

  /** Another model is looked at from now on. */
  function choose(name) {
    const wanted = served.length > 1 ? (served.includes(name) ? name : served[0]) : "";
    if (wanted === chosen) return;
    chosen = wanted;
    looks.length = changes.length = 0;
    trouble = "";
    for (const part of Object.values(parts)) part.replaceChildren();
    const options = served.map((each) => el("option", { value: each, selected: each === chosen }, each));
    place("model", "div.of-model", el("label", {}, "Model ", el("select", { onchange: (event) => { location.hash = `#cluster/${encodeURIComponent(event.target.value)}`; } }, options)));
    section.prepend(parts.model);
  }

  return {
    models: (names) => {
      served = names;
      choose(decodeURIComponent(location.hash.match(/^#cluster\/(.*)/)?.[1] ?? chosen));
      if (shown) watch();
    },
    enter: (name) => {
      shown = true;
      choose(name || chosen);
      if (!looks.length && !trouble) place("trouble", "div", el("p.empty", {}, "Looking …"));
      watch();
    },
    leave: () => {
      shown = false;
      watching?.abort();
    },
  };
}

// --- numbers

const sum = (rows, name) => rows.reduce((total, row) => total + row[name], 0);

function speeds(looks) {
  return looks.slice(1).map((look, i) => {
    const before = looks[i], seconds = (Date.parse(look.at) - Date.parse(before.at)) / 1000;
    const made = look.frontend.generated_tokens - before.frontend.generated_tokens;
    return seconds > 0 && made >= 0 ? made / seconds : 0; // less than before: it was started anew
  });
}

function tiles(looks) {
  const { master, frontend } = looks.at(-1);
  const of = (value) => looks.map(({ master }) => value(master));
  const used = (m) => sum(m.instances, "used_blocks"), blocks = (m) => sum(m.instances, "num_blocks");
  const ready = (m) => m.instances.filter((row) => row.state === "ready").length;
  const speed = speeds(looks);
  const kept = master.completions ? share(master.attained, master.completions) : "–";
  const classes = Object.entries(frontend.attainment).filter(([, of]) => of.requests);
  return [
    tile("Requests a second", number(master.arrivals / master.window, 1), `of ${number(master.prompt_tokens)} tokens; ${number(master.window)} s`, of((m) => m.arrivals / m.window)),
    tile("Tokens a second", number(speed.at(-1) ?? 0), "of this frontend", speed),
    tile("Running", number(sum(master.instances, "running")), `${number(sum(master.instances, "waiting"))} wait at instances`, of((m) => sum(m.instances, "running"))),
    tile("Queue", number(master.waiting), `${number(master.offline_waiting)} offline${master.unplaceable ? `, ${number(master.unplaceable)} fit nowhere` : ""}`, of((m) => m.waiting + m.offline_waiting)),
    tile("KV cache", share(used(master), blocks(master)), `of ${number(blocks(master))} blocks`, of((m) => (blocks(m) ? used(m) / blocks(m) : 0)), 1),
    tile("Within targets", kept, classes.map(([name, each]) => `${name} ${share(each.kept, each.requests)}`).join(", "), of((m) => (m.completions ? m.attained / m.completions : 0)), 1),
    tile("Instances", `${number(ready(master))} of ${number(master.instances.length)}`, "are ready", of(ready), master.instances.length),
  ];
}

function tile(name, value, more, values, top) {
  return el("div.card", {}, el("div.tile-name", {}, name), el("div.tile-value", {}, value), el("div.tile-more", {}, more),
    spark(values, `${name}, the last ${values.length} seconds`, top));
}

// --- instances

function pools(looks) {
  const newest = looks.at(-1).master.instances;
  const roles = [...new Set(newest.map((row) => row.role))];
  return roles.map((role) => {
    const rows = newest.filter((row) => row.role === role);
    const shown = rows.length > SHOWN ? [...rows].sort((a, b) => b.waiting - a.waiting || b.running - a.running).slice(0, SHOWN) : rows;
    const histories = historyOf(looks, new Set(shown.map((row) => row.name)));
    const columns = [
      { name: "instance", cls: "name", of: (row) => row.name },
      { name: "state", of: (row) => el(`span.state.${row.state}`, { title: row.slow || null }, row.slow ? `${row.state}, slow` : row.state) },
      { name: `last ${Math.ceil(looks.length / 60)} min`, of: (row) => strip(row.name, histories.get(row.name), looks.length) },
      ...(role === "encode" ? [] : answers),
      ...(role === "encode" || rows.some((row) => row.encodes || row.image_tokens) ? sights(looks) : []),
      { name: "device", of: (row) => row.device || "–" },
    ];
    const title = role === "any" ? "Prefill and decode" : role[0].toUpperCase() + role.slice(1);
    return el("div.card", {}, el("h2", {}, `${title}: ${number(rows.length)}${rows.length > shown.length ? `, the busiest ${SHOWN}` : ""}`), table(columns, shown));
  });
}

const answers = [
  ...["running", "waiting"].map((name) => ({ name, number: true, of: (row) => number(row[name]) })),
  { name: "unread tokens", number: true, of: (row) => number(row.pending_tokens) },
  { name: "KV", of: (row) => meter(row.used_blocks, row.num_blocks) },
  { name: "TTFT", number: true, of: (row) => ms(row.ttft_ms) },
  { name: "TPOT", number: true, of: (row) => ms(row.tpot_ms) },
  { name: "step", number: true, of: (row) => ms(row.interval_ms) },
];

/** What an instance does with images; how many a second is of the last ten looks. */
function sights(looks) {
  const newest = looks.at(-1), before = looks.at(-11) ?? looks[0];
  const seconds = (Date.parse(newest.at) - Date.parse(before.at)) / 1000;
  const then = new Map(before.master.instances.map((row) => [row.name, row.encodes]));
  const rate = (row) => (seconds > 0 ? Math.max(0, row.encodes - (then.get(row.name) ?? row.encodes)) / seconds : 0);
  return [
    { name: "images", number: true, of: (row) => number(row.encodes) },
    { name: "a second", number: true, of: (row) => number(rate(row), 1) },
    { name: "tokens to look at", number: true, of: (row) => number(row.image_tokens) },
    { name: "1,000 tokens", number: true, of: (row) => ms(row.encode_ms === null ? null : 1000 * row.encode_ms) },
  ];
}

function historyOf(looks, names) {
  const found = new Map([...names].map((name) => [name, []]));
  looks.forEach(({ master }, i) => {
    for (const row of master.instances) found.get(row.name)?.push([i, row]);
  });
  return found;
}

/** States by colour, load by height; a change of role is a line. */
function strip(name, history, length) {
  const width = 220, height = 18, step = width / KEPT, offset = KEPT - length;
  const most = Math.max(4, ...history.map(([, row]) => row.running + row.waiting));
  const marks = [];
  let run = null;
  const close = () => run && marks.push(svg("rect", { x: (run.from * step).toFixed(1), width: ((run.to - run.from) * step).toFixed(1), y: height - run.height, height: run.height, fill: `var(${run.colour})` }));
  let role = history[0]?.[1].role;
  for (const [i, row] of history) {
    const colour = COLOURS[row.state] ?? "--faint";
    const tall = row.state === "ready" ? 3 + Math.round((15 * (row.running + row.waiting)) / most) : height;
    if (run && run.colour === colour && run.height === tall && run.to === i + offset) run.to += 1;
    else {
      close();
      run = { from: i + offset, to: i + offset + 1, colour, height: tall };
    }
    if (row.role !== role) marks.push(svg("rect", { x: ((i + offset) * step).toFixed(1), width: 2, y: 0, height, fill: "var(--d)" }));
    role = row.role;
  }
  close();
  return svg("svg.strip", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${name}: states and load` }, marks);
}

function meter(part, whole) {
  const bar = el("i");
  bar.style.width = `${whole ? (100 * part) / whole : 0}%`;
  return el("span", {}, el("span.meter", { "aria-hidden": "true" }, bar), share(part, whole));
}

// --- the rest

function prefixes({ master, frontend }) {
  const { prompt_tokens: asked, found_tokens: found } = frontend.prefixes;
  const places = Object.entries(found).filter(([, tokens]) => tokens);
  const colour = (name) => (PLACES.includes(name) ? `c${PLACES.indexOf(name)}` : "cx");
  const bar = el("div.split", { role: "img", "aria-label": `${share(sum(places.map(([, t]) => ({ t })), "t"), asked)} of prompt tokens were cached` },
    places.map(([name, tokens]) => {
      const piece = el(`i.${colour(name)}`);
      piece.style.width = `${(100 * tokens) / Math.max(asked, 1)}%`;
      return piece;
    }));
  const ideal = master.prefixes?.prompt_tokens
    ? `A cache without end would have had ${master.prefixes.complete ? "" : "at least "}${share(master.prefixes.ideal_tokens, master.prefixes.prompt_tokens)}.`
    : "";
  return el("div.card", {}, el("h2", {}, "Cached prompts, by tier"), bar,
    el("div.keys", {}, places.map(([name, tokens]) => el("span", {}, el(`span.swatch.${colour(name)}`), `${name} ${share(tokens, asked)}`)), el("span", {}, `of ${number(asked)} prompt tokens`)),
    ideal ? el("p.tile-more", {}, ideal) : null);
}

function latency({ frontend }) {
  const rows = Object.entries(frontend.latency).filter(([, of]) => of.requests);
  const of = (kind, q) => ({ name: `${kind.toUpperCase()} ${q}`, number: true, of: ([, row]) => ms(row[`${kind}_ms`]?.[q]) });
  return el("div.card", {}, el("h2", {}, "Latency, of this frontend"),
    rows.length
      ? table([{ name: "class", cls: "name", of: ([name]) => name }, of("ttft", "p50"), of("ttft", "p95"), of("tpot", "p50"), of("tpot", "p95"), { name: "requests", number: true, of: ([, row]) => number(row.requests) }], rows)
      : el("p.empty", {}, "No request has ended yet."));
}

function scaling(master) {
  if (!master.stages.length) return null;
  const columns = [
    { name: "stage", cls: "name", of: (row) => row.role },
    { name: "serve", number: true, of: (row) => number(row.serving) },
    { name: "start", number: true, of: (row) => number(row.starting) },
    { name: "wished", number: true, of: (row) => (row.more > 0 ? `+${row.more}` : String(row.more)) },
    { name: "why", cls: "why", of: (row) => `${row.reason}; ${row.outcome}` },
  ];
  return el("div.card", {}, el("h2", {}, `Scaling: ${number(master.fleet.instance_seconds)} instance-seconds so far`), table(columns, master.stages));
}

const clock = (at) => new Date(at).toLocaleTimeString([], { hour12: false });

/** Instances that came, went, or changed their state or role from one look to the next. */
function changed(before, after) {
  const known = new Map(before.master.instances.map((row) => [row.name, row]));
  const found = [];
  for (const row of after.master.instances) {
    const was = known.get(row.name);
    known.delete(row.name);
    if (!was) found.push({ what: `${row.name} is here`, why: row.state });
    else if (was.state !== row.state) found.push({ what: row.name, why: `${was.state} → ${row.state}` });
  }
  for (const name of known.keys()) found.push({ what: `${name} is gone`, why: "" });
  return found.map((each) => ({ at: after.at, ...each }));
}

function happened({ master, frontend }, changes) {
  const rows = [
    ...changes,
    ...master.moves.map((row) => ({ at: row.at, what: `${row.what} ${row.instance}${row.role ? ` to ${row.role}` : ""}`, why: row.reason })),
    ...master.relocations.map((row) => ({ at: row.at, what: row.request_id ? link(row.request_id) : "a request", why: `${row.source} → ${row.target}: ${row.reason}` })),
  ].sort((a, b) => b.at.localeCompare(a.at)).slice(0, EVENTS);
  const troubles = Object.entries(frontend.troubles).map(([name, why]) => el("p.bad", {}, `${name}: ${why}`));
  const columns = [{ name: "time", of: (row) => clock(row.at) }, { name: "what", of: (row) => row.what }, { name: "why", cls: "why", of: (row) => row.why }];
  return el("div.card", {}, el("h2", {}, "What happened"), troubles, rows.length ? table(columns, rows) : el("p.empty", {}, "Nothing was started, stopped or moved."));
}

function link(id) {
  return el("a", { href: `#request/${encodeURIComponent(id)}`, title: id }, id);
}

function decisions(master) {
  const columns = [
    { name: "time", of: (row) => clock(row.at) },
    { name: "request", cls: "id", of: (row) => (row.request_id ? link(row.request_id) : "–") },
    { name: "instance", cls: "name", of: (row) => (row.decode ? `${row.prefill} → ${row.decode}` : row.prefill) },
    { name: "waited", number: true, of: (row) => ms(row.waited_ms) },
    { name: "why", cls: "why", of: (row) => `${row.policy}: ${row.reason}` },
  ];
  return el("div.card", {}, el("h2", {}, "Latest decisions"), master.decisions.length ? table(columns, master.decisions) : el("p.empty", {}, "None yet."));
}
