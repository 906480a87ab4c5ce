// Elements far from the visible part of the chat are emptied, and filled again before they are scrolled into view.
// However long a conversation is, the page holds only about the visible part.

import { $ } from "./dom.js";

const MARGIN = "1500px 0px";
const handlers = new WeakMap();
let observer = null;

/** Call `onNear(isNear, height)` when `element` comes near the visible part of the chat, and when it leaves it. */
export function watch(element, onNear) {
  observer ??= new IntersectionObserver(
    (entries) => entries.forEach((entry) => handlers.get(entry.target)?.(entry.isIntersecting, entry.boundingClientRect.height)),
    { root: $("scroll"), rootMargin: MARGIN },
  );
  handlers.set(element, onNear);
  observer.observe(element);
}

export function unwatch(element) {
  handlers.delete(element);
  observer?.unobserve(element);
}

/** Return whether the user is using this element: it has the focus, or a part of it is selected. */
export function isInUse(element) {
  const selection = getSelection();
  return element.contains(document.activeElement) || (!selection.isCollapsed && selection.containsNode(element, true));
}
