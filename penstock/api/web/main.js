// The page's frame: which view is shown, light or dark, and what the server is called.
import { chat } from "./chat.js";
import { cluster } from "./cluster.js";
import { get, onKeyWanted, useKey } from "./server.js";
import { request } from "./request.js";

const $ = (id) => document.getElementById(id);
const views = { chat: chat($("chat")), cluster: cluster($("cluster")), request: request($("request")) };

function show() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const chosen = name in views ? name : "chat";
  for (const [each, view] of Object.entries(views)) {
    $(each).hidden = each !== chosen;
    if (each !== chosen) view.leave();
  }
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${chosen}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `penstock: ${chosen}`;
  views[chosen].enter(decodeURIComponent(rest.join("/")));
}

// --- light and dark

const dark = matchMedia("(prefers-color-scheme: dark)");
const kept = localStorage.getItem("penstock.theme");
if (kept) document.documentElement.dataset.theme = kept;
$("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
  document.documentElement.dataset.theme = now === "dark" ? "light" : "dark";
  localStorage.setItem("penstock.theme", document.documentElement.dataset.theme);
});

// --- the API key, when the server wants one

let asking = null;
function askForKey(why) {
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
onKeyWanted((why) => {
  $("key").hidden = false;
  return askForKey(why);
});
$("key").addEventListener("click", async () => (await askForKey("")) && hello());

// --- who is there

async function hello() {
  const link = $("link");
  try {
    const models = await get("v1/models");
    const { version } = await get("version");
    link.textContent = `${models.data[0].id}, penstock ${version}`;
    link.classList.remove("bad");
    views.chat.models(models.data);
  } catch (error) {
    link.textContent = error.message;
    link.classList.add("bad");
    if (error.passing) setTimeout(hello, 2000);
  }
}

addEventListener("hashchange", show);
show();
hello();
