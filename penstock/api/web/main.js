// The page's frame: which view is shown, light or dark, and what the server is called.
import { chat } from "./chat.js";
import { cluster } from "./cluster.js";
import { askForKey } from "./key.js";
import { get, onKeyWanted } from "./server.js";
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

// --- the API key

onKeyWanted((why) => {
  $("key").hidden = false; // to try another one
  return askForKey(why);
});
$("key").addEventListener("click", async () => (await askForKey("")) && hello());

// --- who is there

async function hello() {
  const link = $("link");
  try {
    const models = await get("v1/models");
    const { version } = await get("version");
    const served = [...new Set(models.data.map((card) => card.root))];
    link.textContent = `${served.join(", ")}, penstock ${version}`;
    link.classList.remove("bad");
    views.chat.models(models.data);
    views.cluster.models(served);
  } catch (error) {
    link.textContent = error.message;
    link.classList.add("bad");
    if (error.passing) setTimeout(hello, 2000);
  }
}

addEventListener("hashchange", show);
show();
hello();
