// The theme button: system, light or dark. The choice is stored in this browser, for all documents of the page.

import { $, keep, recall } from "./dom.js";

const NAME = "oarlock-theme";
const THEMES = { "": ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };

function apply(theme) {
  document.documentElement.style.colorScheme = theme || "light dark";
  const [sign, word] = THEMES[theme];
  $("theme").textContent = sign;
  $("theme").title = `Theme: ${word}`;
  $("theme").setAttribute("aria-label", `Theme: ${word}`);
}

/** Apply the stored theme, and change it with the button. `changed` is called after each change. */
export function setUpTheme(changed = () => {}) {
  const kept = recall(NAME, "localStorage");
  let theme = Object.hasOwn(THEMES, kept ?? "") ? (kept ?? "") : "";
  apply(theme);
  $("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    theme = names[(names.indexOf(theme) + 1) % names.length];
    keep(NAME, theme, "localStorage");
    apply(theme);
    changed();
  });
}
