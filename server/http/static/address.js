// The address of what is shown: #/chat, #/chat/ID of a conversation, #/state, #/model. It is in the browser's history, so
// Back and Forward work, and it stays in the browser: what follows the # is never sent.

export const VIEWS = ["chat", "state", "model"];

/**
 * What the address asks for: {view, id of a conversation or null, question to be written or null}. `isOpen`: it says
 * nothing about the conversation, so the one that is shown stays.
 */
export function asked() {
  const [path, query] = location.hash.slice(1).split("?");
  const [, name, id] = path.split("/");
  const view = VIEWS.includes(name) ? name : "chat";
  const question = new URLSearchParams(query ?? "").get("q");
  return { view, id: (view === "chat" && id) || null, question, isOpen: name !== "chat" };
}

/** The part of an address that shows this view, or this conversation. */
export const addressOf = (view, id = null) => `#/${view}${id ? `/${id}` : ""}`;

/** Another address, as a new entry of the history or in place of the present one. */
export function move(address, replaces = false) {
  if (address === location.hash) return;
  if (replaces) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
}

/** The address without a part for the view. */
export const clear = () => history.replaceState(null, "", location.pathname + location.search);
