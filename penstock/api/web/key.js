// The API key, when the server wants one: asked for in a dialog.
import { el } from "./dom.js";
import { onKeyWanted, useKey } from "./server.js";

const reason = el("p", { id: "key-why" });
const text = el("input", { id: "key-text", type: "password", autocomplete: "off", required: true });
const dialog = el("dialog", { id: "ask-key", "aria-labelledby": "key-title" },
  el("form", { method: "dialog" },
    el("h2", { id: "key-title" }, "This server wants an API key"), reason, el("label", {}, "API key ", text),
    el("div.line", {}, el("button", { value: "ok" }, "Use it"), el("button.quiet", { value: "cancel", formnovalidate: true }, "Cancel"))));
document.body.append(dialog);
let asking = null;

/** Resolves to whether there is a key now. */
export function askForKey(why) {
  asking ??= new Promise((resolve) => {
    reason.textContent = `${why} It is kept in this tab only.`.trim();
    text.value = "";
    dialog.returnValue = "cancel";
    dialog.addEventListener("close", () => {
      asking = null;
      const key = dialog.returnValue === "ok" ? text.value.trim() : "";
      if (key) useKey(key);
      resolve(Boolean(key));
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

onKeyWanted(askForKey);
