// The page: its tabs, theme, key and status. Each view is a module of its own.

import { ApiError, get, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { Connection } from "./connection.js";
import { ConversationList } from "./conversation_list.js";
import { $, el, keep, recall } from "./dom.js";
import { ModelView } from "./model.js";
import { Settings } from "./settings.js";
import { StateView } from "./state.js";
import { Store } from "./store.js";

const VIEWS = ["chat", "state", "model"];
const THEMES = { "": ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };
const STARTERS = ["What does os.path.join do?", "Explain recursion with a short example.", "Write a haiku about rowing.", "What is a KV cache good for?"];

const settings = new Settings($("settings"), { close: () => showSettings(false), showCode });
const store = new Store((id) => changedElsewhere(id));
const chat = new Chat(settings, store, { askKey, unreachable: () => connection.check(), saved: (id) => (id ? list?.refresh() : list?.mark()) });
const list = new ConversationList(store, { open: (id) => openChat(id), opened: () => chat.tree.id });
const state = new StateView($("state"), askKey);
const model = new ModelView($("model"), askKey);
const connection = new Connection(learn);

/** Learn what this server serves. Runs again whenever it comes back: it may be another one. */
async function learn() {
  try {
    const capabilities = await get("v1/capabilities");
    settings.describe(capabilities.models, capabilities.endpoints["/v1/chat/completions"].parameters);
    chat.hasChat = capabilities.features.chat;
    chat.meter.limit = capabilities.limits.max_model_len;
    chat.question.placeholder = chat.hasChat ? "Write a message" : `This model ${capabilities.pooling ? "writes no texts" : "has no chat template: it serves /v1/completions only"}`;
    $("empty").querySelector("h1").textContent = capabilities.models[0];
    document.title = `${capabilities.models[0]} · Oarlock`;
    chat.controls();
    state.restart();
    model.load(capabilities);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401 && (await askKey())) await learn();
  }
}

// ------------------------------------------------------------------ conversations
async function openChat(id) {
  select("chat");
  if (isNarrow()) showList(false);
  await chat.open(id);
}

/** Another tab has changed what is kept; the one that is open here is shown anew unless an answer is being written. */
async function changedElsewhere(id) {
  list.refresh();
  if (id === chat.tree.id && !chat.running && !chat.list.querySelector(".editor")) await chat.open(id);
}
list.renamed = (id, title) => id === chat.tree.id && Object.assign(chat.tree.head, { title, isNamed: true });

const isNarrow = () => matchMedia("(max-width: 60rem)").matches;

function showList(isShown) {
  $("conversations").hidden = !isShown;
  $("list-button").setAttribute("aria-expanded", isShown);
}
showList(!isNarrow());
$("list-button").addEventListener("click", () => {
  showList($("conversations").hidden);
  if (!$("conversations").hidden) $("search").focus();
});
$("new-chat").addEventListener("click", () => openChat(null));

// ------------------------------------------------------------------ tabs
function select(name, takesFocus = false) {
  for (const view of VIEWS) {
    $(view).hidden = view !== name;
    $(`tab-${view}`).setAttribute("aria-selected", view === name);
    $(`tab-${view}`).tabIndex = view === name ? 0 : -1;
  }
  if (takesFocus) $(`tab-${name}`).focus();
  state.isShown = name === "state";
  state.restart();
  if (!location.hash.includes("?")) history.replaceState(null, "", name === "chat" ? location.pathname + location.search : `#/${name}`);
}

for (const view of VIEWS) {
  $(`tab-${view}`).addEventListener("click", () => select(view));
  $(`tab-${view}`).addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) select(VIEWS[(VIEWS.indexOf(view) + step + VIEWS.length) % VIEWS.length], true);
  });
}
const named = location.hash.slice(2).split("?")[0];
select(VIEWS.includes(named) ? named : "chat");

// ------------------------------------------------------------------ settings and theme
function showSettings(isShown) {
  $("settings").hidden = !isShown;
  $("settings-button").setAttribute("aria-expanded", isShown);
  if (isShown) $("set-system").focus({ preventScroll: true });
  else $("settings-button").focus();
}
$("settings-button").addEventListener("click", () => showSettings($("settings").hidden));

async function showCode() {
  const { show } = await import("./request_code.js");
  const draft = $("question").value.trim();
  const body = chat.body(chat.tree.end().id);
  if (draft) body.messages.push({ role: "user", content: draft });
  show({ model: settings.models[0], ...body });
}

/** Escape closes what is open, and then stops the answer. */
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (!$("settings").hidden && ($("settings").contains(document.activeElement) || isNarrow())) showSettings(false);
  else if (!$("conversations").hidden && isNarrow()) showList(false), $("list-button").focus();
  else chat.stop();
});

function applyTheme(theme) {
  document.documentElement.style.colorScheme = theme || "light dark";
  const [sign, word] = THEMES[theme];
  $("theme").textContent = sign;
  $("theme").title = `Theme: ${word}`;
  $("theme").setAttribute("aria-label", `Theme: ${word}`);
}
let theme = recall("oarlock-theme", "localStorage");
theme = theme in THEMES ? theme : "";
applyTheme(theme);
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  theme = names[(names.indexOf(theme) + 1) % names.length];
  keep("oarlock-theme", theme, "localStorage");
  applyTheme(theme);
  state.paint();
});

// ------------------------------------------------------------------ the key
let asking = null;

/** Ask for a key that the server accepts; false if the person would not give one. One dialog for all who ask. */
function askKey() {
  asking ??= new Promise((resolve) => {
    const [dialog, field, problem] = [$("key-dialog"), $("key"), $("key-error")];
    field.value = "";
    problem.textContent = "";
    const end = (isAccepted) => {
      asking = null;
      dialog.close();
      resolve(isAccepted);
      if (isAccepted) learn();
    };
    dialog.querySelector("form").onsubmit = async (event) => {
      event.preventDefault();
      try {
        await get("v1/models", { key: field.value.trim() });
      } catch (error) {
        if (!(error instanceof ApiError)) throw error;
        problem.textContent = error.status === 401 ? "The server does not accept this key." : error.message;
        field.select();
        return;
      }
      setKey(field.value.trim());
      end(true);
    };
    $("key-cancel").onclick = () => end(false);
    dialog.oncancel = (event) => {
      event.preventDefault();
      end(false);
    };
    dialog.showModal();
  });
  return asking;
}

for (const text of STARTERS) {
  const begin = () => chat.hasChat && !chat.running && chat.ask("", text);
  $("starters").append(el("li", {}, el("button", { onclick: begin }, text)));
}
if (matchMedia("(pointer: fine)").matches) $("question").focus();
