// The page: its tabs, their addresses, key and status. Each view is a separate module.

import { addressOf, asked, clear, move, VIEWS } from "./address.js";
import { ApiError, get, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { Connection } from "./connection.js";
import { ConversationList } from "./conversation_list.js";
import { $, el, notice } from "./dom.js";
import { ModelView } from "./model.js";
import { Settings } from "./settings.js";
import { StateView } from "./state.js";
import { Store } from "./store.js";
import { setUpTheme } from "./theme.js";

let modelName = null; // null until it is known
let hasAdapters = false; // whether the server serves LoRA adapters
const settings = new Settings($("settings"), { close: () => showSettings(false), showCode });
const store = new Store((id) => changedElsewhere(id));
const chat = new Chat(settings, store, { askKey, unreachable: () => connection.check(), saved });
const list = new ConversationList(store, { open: openChat, opened: () => chat.tree.id });
const state = new StateView($("state"), askKey);
const model = new ModelView($("model"), askKey);
const connection = new Connection(learn);

/** Load the server's capabilities. Runs again whenever the server comes back, since it may be another one. */
async function learn() {
  try {
    const capabilities = await get("v1/capabilities");
    hasAdapters = Boolean(capabilities.adapters);
    const models = hasAdapters ? await listedModels() : capabilities.models; // a chosen adapter must stay chosen
    settings.describe(models, capabilities.endpoints["/v1/chat/completions"].parameters);
    chat.hasChat = capabilities.features.chat;
    chat.meter.limit = capabilities.limits.max_model_len;
    chat.question.placeholder = chat.hasChat ? "Write a message" : `This model ${capabilities.pooling ? "does not generate text" : "has no chat template: it serves /v1/completions only"}`;
    modelName = capabilities.models[0];
    introduce(capabilities.introduction);
    entitle();
    chat.controls();
    state.restart();
    model.load(capabilities);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401 && (await askKey())) await learn();
  }
}

/** Return the names of the model and of the LoRA adapters of this moment. */
async function listedModels() {
  return (await get("v1/models")).data.map(({ id }) => id);
}

/** Offer the LoRA adapters of this moment as models, too. */
async function offerAdapters() {
  if (!hasAdapters) return;
  try {
    settings.offer(await listedModels());
  } catch (error) {
    if (!(error instanceof ApiError)) throw error; // the last names stay
  }
}

/** Show the description of the model, and offer the questions that its owner has suggested. */
function introduce({ about, questions }) {
  $("empty").querySelector("h1").textContent = modelName;
  $("about").textContent = about ?? "";
  const begin = (text) => chat.hasChat && !chat.running && chat.ask("", text);
  $("starters").replaceChildren(...(chat.hasChat ? questions : []).map((text) => el("li", {}, el("button", { onclick: () => begin(text) }, text))));
}

// ------------------------------------------------------------------ conversations
/** Show a conversation, or a new one, under its address. `replaces`: replace the current entry of the history. */
function openChat(id, replaces = false) {
  move(addressOf("chat", id), replaces);
  if (isNarrow()) showList(false);
  if (!id) $("question").focus();
  return follow();
}

/** Update the list and the address after a conversation was saved (its id), or another one is shown (null). */
function saved(id) {
  if (id) list?.refresh();
  else list?.mark();
  const { view, isOpen } = asked();
  const { isEmpty } = chat.tree;
  if (view === "chat" && !chat.isOpening && !(isEmpty && isOpen)) move(addressOf("chat", isEmpty ? null : chat.tree.id), true);
}

/** Handle changes made in another tab. The open conversation is shown again unless a response is being written. */
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
function select(name) {
  for (const view of VIEWS) {
    $(view).hidden = view !== name;
    $(`tab-${view}`).setAttribute("aria-selected", view === name);
    $(`tab-${view}`).tabIndex = view === name ? 0 : -1;
  }
  state.isShown = name === "state";
  state.restart();
  entitle();
}

function entitle() {
  const name = VIEWS.find((view) => !$(view).hidden);
  document.title = [name === "chat" ? null : $(`tab-${name}`).textContent, modelName, "Oarlock"].filter(Boolean).join(" · ");
}

/** Show the view of the address. `isFirst`: the page has just been loaded. */
async function follow(isFirst = false) {
  const { view, id, question, isOpen } = asked();
  select(view);
  if (question !== null) {
    clear();
    await chat.open(null);
    chat.write(question); // not sent: the author of the link is not the person who opened it
  } else if (isFirst && isOpen) await chat.restore();
  else if (view === "chat" && !isOpen && (id ? id !== chat.tree.id : !chat.tree.isEmpty)) {
    const isFound = await chat.open(id);
    if (isFound === false) notice("This conversation is not stored in this browser. It was deleted, or it belongs to another browser.");
  } else if (view === "chat" && !isOpen) {
    chat.cancelOpening();
    saved(null);
  }
}

function choose(view, takesFocus = false) {
  move(addressOf(view, view === "chat" && !chat.tree.isEmpty ? chat.tree.id : null));
  follow();
  if (takesFocus) $(`tab-${view}`).focus();
}

for (const view of VIEWS) {
  $(`tab-${view}`).addEventListener("click", () => $(view).hidden && choose(view));
  $(`tab-${view}`).addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) choose(VIEWS[(VIEWS.indexOf(view) + step + VIEWS.length) % VIEWS.length], true);
  });
}
addEventListener("popstate", () => follow()); // Back, Forward, and a typed address
follow(true);

// ------------------------------------------------------------------ settings and theme
function showSettings(isShown) {
  $("settings").hidden = !isShown;
  $("settings-button").setAttribute("aria-expanded", isShown);
  if (!isShown) return $("settings-button").focus();
  $("set-system").focus({ preventScroll: true });
  offerAdapters();
}
$("settings-button").addEventListener("click", () => showSettings($("settings").hidden));

async function showCode() {
  const { show } = await import("./request_code.js");
  const draft = $("question").value.trim();
  const body = chat.body(chat.tree.end().id);
  if (draft) body.messages.push({ role: "user", content: draft });
  show({ model: settings.models[0], ...body });
}

/** Escape closes the open panel, or else stops the response. */
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (!$("settings").hidden && ($("settings").contains(document.activeElement) || isNarrow())) showSettings(false);
  else if (!$("conversations").hidden && isNarrow()) showList(false), $("list-button").focus();
  else chat.stop();
});

setUpTheme(() => state.paint());

/** Ctrl+/ shows the keyboard shortcuts, like the button. */
const showKeys = async () => (await import("./shortcuts.js")).show();
$("keys-button").addEventListener("click", showKeys);
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || !(event.ctrlKey || event.metaKey) || event.altKey || document.querySelector("dialog[open]")) return;
  event.preventDefault();
  showKeys();
});

// ------------------------------------------------------------------ the key
let asking = null;

/** Ask for a key that the server accepts. Resolves to false if none is given. All callers share one dialog. */
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

if (matchMedia("(pointer: fine)").matches) $("question").focus();
