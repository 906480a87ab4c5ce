// Elements far from the visible part of the chat are emptied, and filled again before one scrolls to them: however long a
// conversation is, the page holds about as much of it as can be seen.

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

/** Whether somebody uses this element just now: it has the focus, or a part of it is selected. */
export function isInUse(element) {
  const selection = getSelection();
  return element.contains(document.activeElement) || (!selection.isCollapsed && selection.containsNode(element, true));
}
