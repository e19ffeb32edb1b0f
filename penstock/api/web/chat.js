// A conversation: answers as they are written, what they took, and where they ran.
import { el, ms, number } from "./dom.js";
import { code, Markdown } from "./markdown.js";
import { events, post, Refused } from "./server.js";

export function chat(section) {
  const log = section.querySelector("#log"), form = section.querySelector("#ask");
  const field = (name) => form.elements[name];
  const text = field("text"), send = form.querySelector("#send"), stop = form.querySelector("#stop");
  const attach = form.querySelector("#attach"), strip = form.querySelector("#pictures");
  let turns = []; // {role, content, images, reasoning, calls, node}
  let images = []; // data: URLs, of the next message
  let known = []; // what there is to know of each model
  let running = null; // an AbortController

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running || !text.value.trim()) return;
    add({ role: "user", content: text.value.trim(), images });
    text.value = "";
    attached([]);
    grow();
    answer();
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  text.addEventListener("input", grow);
  text.addEventListener("paste", (event) => {
    const files = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
    if (attach.hidden || !files.length) return;
    event.preventDefault();
    read(files);
  });
  field("files").addEventListener("change", () => {
    read([...field("files").files]);
    field("files").value = "";
  });
  field("model").addEventListener("change", sees);
  stop.addEventListener("click", () => running?.abort());
  document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
  form.querySelector("#anew").addEventListener("click", () => {
    running?.abort();
    turns = [];
    attached([]);
    log.replaceChildren();
    text.focus();
  });

  /** Images are there to be sent where the model takes them. */
  function sees() {
    const card = known.find((each) => each.id === field("model").value);
    attach.hidden = !card?.input_modalities?.includes("image");
    if (attach.hidden) attached([]);
  }

  function attached(urls) {
    images = urls;
    const remove = (place) => attached(images.filter((_, i) => i !== place));
    const picture = (url, i) => el("button.quiet.small", { type: "button", title: "Remove", onclick: () => remove(i) }, el("img", { src: url, alt: "Remove this image" }));
    strip.replaceChildren(...urls.map(picture));
  }

  function read(files) {
    for (const file of files) {
      const reader = new FileReader();
      reader.addEventListener("load", () => attached([...images, reader.result]));
      reader.readAsDataURL(file);
    }
    text.focus();
  }

  function grow() {
    text.style.height = "auto";
    text.style.height = `${text.scrollHeight + 2}px`;
  }

  function add(turn) {
    turn.body = el("div.body");
    turn.foot = el("div.foot");
    turn.node = el(`article.turn.${turn.role}`, { "aria-label": turn.role === "user" ? "You" : "Model" }, turn.body, turn.foot);
    if (turn.role === "user") {
      turn.body.textContent = turn.content;
      turn.body.prepend(...turn.images.map((url) => el("img.seen", { src: url, alt: "Image" })));
      turn.foot.append(el("button.quiet.small", { type: "button", onclick: () => edit(turn) }, "Edit"));
    }
    turns.push(turn);
    log.append(turn.node);
    log.scrollTop = log.scrollHeight;
    return turn;
  }

  /** Forget a turn and what came after it. */
  function cut(turn) {
    running?.abort();
    for (const gone of turns.splice(turns.indexOf(turn))) gone.node.remove();
  }

  function edit(turn) {
    cut(turn);
    text.value = turn.content;
    attached(turn.images);
    grow();
    text.focus();
  }

  function body() {
    const wanted = { model: field("model").value || undefined, stream: true, stream_options: { include_usage: true } };
    for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
      if (field(name).value !== "") wanted[name] = Number(field(name).value);
    }
    const tools = field("tools").value.trim();
    if (tools) {
      try {
        wanted.tools = JSON.parse(tools);
      } catch (error) {
        throw new Refused(`tools: not JSON (${error.message})`, 400);
      }
    }
    const system = field("system").value.trim();
    const said = turns.slice(0, -1).filter((turn) => turn.role === "user" || turn.content || turn.calls.length);
    wanted.messages = [
      ...(system ? [{ role: "system", content: system }] : []),
      ...said.map((turn) => ({
        role: turn.role,
        content: turn.images?.length ? withImages(turn) : turn.content || null,
        ...(turn.calls?.length ? { tool_calls: turn.calls } : {}),
      })),
    ];
    return wanted;
  }

  async function answer() {
    const turn = add({ role: "assistant", content: "", reasoning: "", calls: [] });
    const shown = new Answer(turn, log);
    running = new AbortController();
    const mine = running;
    busy(true, turn);
    const began = performance.now();
    let first = null, last = null, usage = null, id = "", trouble = "";
    try {
      const response = await post("v1/chat/completions", body(), mine.signal);
      id = response.headers.get("x-request-id") ?? "";
      for await (const { data } of events(response)) {
        if (data === "[DONE]") break;
        const event = JSON.parse(data);
        if (event.error) throw new Refused(event.error.message, 500);
        usage = event.usage ?? usage;
        const delta = event.choices?.[0]?.delta;
        if (!delta || (!delta.content && !delta.reasoning_content && !delta.reasoning && !delta.tool_calls && !event.choices[0].finish_reason)) continue;
        last = performance.now();
        first ??= last;
        shown.take(delta, event.choices[0].finish_reason);
      }
    } catch (error) {
      trouble = error.name === "AbortError" ? "" : error.message;
    }
    shown.end();
    if (running === mine) busy(false, turn);
    turn.node.classList.remove("busy");
    foot(turn, { began, first, last, usage, id, trouble, stopped: mine.signal.aborted, why: shown.finished });
  }

  function foot(turn, { began, first, last, usage, id, trouble, stopped, why }) {
    const facts = [];
    if (first !== null) facts.push(`first token after ${ms(first - began)}`);
    const tokens = usage?.completion_tokens;
    if (tokens > 1 && last > first) facts.push(`${number(tokens)} tokens, ${number((1000 * (tokens - 1)) / (last - first), 1)} a second`);
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    if (usage) facts.push(`prompt of ${number(usage.prompt_tokens)}${cached ? `, ${number(cached)} cached` : ""}`);
    if (stopped) facts.push("stopped");
    else if (why === "length") facts.push("cut at the most tokens");
    turn.foot.replaceChildren(
      ...(trouble ? [el("span.trouble", { role: "alert" }, trouble)] : []),
      ...facts.map((fact) => el("span", {}, fact)),
      ...(id ? [el("a", { href: `#request/${encodeURIComponent(id)}` }, "where it ran")] : []),
      el("button.quiet.small", { type: "button", onclick: () => { cut(turn); answer(); } }, "Regenerate"),
    );
  }

  function busy(on, turn) {
    turn.node.classList.toggle("busy", on);
    send.hidden = on;
    stop.hidden = !on;
    if (!on) running = null;
    log.setAttribute("aria-busy", String(on));
  }

  return {
    enter: () => text.focus({ preventScroll: true }),
    leave: () => {},
    models: (cards) => {
      known = cards;
      field("model").replaceChildren(...cards.map((card) => el("option", { value: card.id }, card.id)));
      sees();
    },
  };
}

function withImages({ content, images }) {
  return [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: content }];
}

/** One answer on the page: text as Markdown, reasoning and tool calls folded; drawn once a frame. */
class Answer {
  constructor(turn, log) {
    this.turn = turn;
    this.log = log;
    this.text = null;
    this.frame = 0;
    this.finished = "";
  }

  take(delta, finished) {
    const turn = this.turn;
    turn.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
    turn.content += delta.content ?? "";
    for (const call of delta.tool_calls ?? []) {
      const known = (turn.calls[call.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      known.id ||= call.id ?? "";
      known.function.name += call.function?.name ?? "";
      known.function.arguments += call.function?.arguments ?? "";
    }
    this.finished = finished ?? this.finished;
    this.frame ||= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = 0;
    const { turn, log } = this;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    if (turn.reasoning) {
      this.thoughts ??= this.fold("Reasoning", turn.body);
      this.thoughts.textContent = turn.reasoning;
    }
    if (turn.content) {
      this.text ??= new Markdown(turn.body.appendChild(el("div")));
      this.text.show(turn.content);
    }
    turn.calls.forEach((call, i) => {
      this.calls ??= [];
      this.calls[i] ??= turn.body.appendChild(el("details.fold", {}, el("summary"), el("div")));
      const [summary, inside] = this.calls[i].children;
      summary.textContent = `Tool call: ${call.function.name}`;
      inside.replaceChildren(code(call.function.arguments, "arguments"));
    });
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  fold(title, body) {
    const inside = el("pre");
    body.prepend(el("details.fold", {}, el("summary", {}, title), inside));
    return inside;
  }

  end() {
    cancelAnimationFrame(this.frame);
    this.turn.calls = this.turn.calls.filter(Boolean);
    this.draw();
  }
}
