// Requests to the server that the page is from, with the key of this tab.
const KEY = "penstock.key";
let keyWanted = async () => false;

export function onKeyWanted(ask) {
  keyWanted = ask;
}

export function useKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** What the server says is wrong. `passing`: it may be over soon. */
export class Refused extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
    this.passing = status === 0 || status === 503;
  }
}

/** The response, when the server does what was asked; a missing or wrong key is asked for, once per request. */
export async function ask(path, options = {}) {
  for (let again = false; ; again = true) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers, credentials: "same-origin" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused("the server does not answer", 0);
    }
    if (response.ok) return response;
    const why = await reason(response);
    const newer = sessionStorage.getItem(KEY) !== key; // another request has asked for it meanwhile
    if (response.status === 401 && (newer || (!again && (await keyWanted(key ? "The key was not accepted." : ""))))) continue;
    throw new Refused(why, response.status);
  }
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

export async function get(path) {
  return (await ask(path)).json();
}

export function post(path, body, signal) {
  return ask(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
}

/** Server-sent events of a response: {event, data}. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      held += value;
      const parts = held.split(/\r?\n\r?\n/);
      held = parts.pop();
      for (const part of parts) {
        const found = { event: "message", data: "" };
        for (const line of part.split(/\r?\n/)) {
          if (line.startsWith("data:")) found.data += (found.data ? "\n" : "") + line.slice(5).trimStart();
          else if (line.startsWith("event:")) found.event = line.slice(6).trim();
        }
        if (found.data) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
