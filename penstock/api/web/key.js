// The API key, when the server wants one: asked for in the page's dialog.
import { onKeyWanted, useKey } from "./server.js";

const $ = (id) => document.getElementById(id);
let asking = null;

/** Resolves to whether there is a key now. */
export function askForKey(why) {
  asking ??= new Promise((resolve) => {
    $("key-why").textContent = `${why} It is kept in this tab only.`.trim();
    $("key-text").value = "";
    const dialog = $("ask-key");
    dialog.returnValue = "cancel";
    dialog.addEventListener("close", () => {
      asking = null;
      const key = dialog.returnValue === "ok" ? $("key-text").value.trim() : "";
      if (key) useKey(key);
      resolve(Boolean(key));
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

onKeyWanted(askForKey);
