// The page's address: #/chat, #/chat/ID of a conversation, #/state, #/model. It is in the browser's history, so Back
// and Forward work, and it stays in the browser: the part after the # is never sent.

export const VIEWS = ["chat", "state", "model"];

/**
 * Return the view in the address: {view, id of a conversation or null, question to be written or null}. `isOpen`: the
 * address names no conversation, so the current one stays.
 */
export function asked() {
  const [path, query] = location.hash.slice(1).split("?");
  const [, name, id] = path.split("/");
  const view = VIEWS.includes(name) ? name : "chat";
  const question = new URLSearchParams(query ?? "").get("q");
  return { view, id: (view === "chat" && id) || null, question, isOpen: name !== "chat" };
}

/** Return the part of an address that shows this view or this conversation. */
export const addressOf = (view, id = null) => `#/${view}${id ? `/${id}` : ""}`;

/** Go to another address, as a new entry of the history or in place of the current one. */
export function move(address, replaces = false) {
  if (address === location.hash) return;
  if (replaces) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
}

/** Remove the part of the address that selects the view. */
export const clear = () => history.replaceState(null, "", location.pathname + location.search);
