// Brackets, bars, accents and roots as long as their content. Browsers stretch them only with a mathematics font, which
// phones and many desktops lack. Then each sign that is too short is scaled, and a root is drawn as a sign and a line.

const ENOUGH = 0.9; // of the wanted length
const MATHML = "http://www.w3.org/1998/Math/MathML";
const observer = new ResizeObserver((entries) => fit(entries.map((entry) => entry.target)));
let hasFont = null;

/** Stretch the signs of a formula, now and whenever its size changes, since it may be hidden at first. */
export const stretch = (math) => observer.observe(math);

function make(tag, ...children) {
  const made = document.createElementNS(MATHML, tag);
  made.append(...children);
  return made;
}

/** Return whether the browser stretches a bar, for which it needs a font with a table for mathematics. */
function stretchesBars() {
  const [bar, high] = [make("mo", "|"), make("mspace")];
  high.setAttribute("height", "5em");
  const probe = make("math", make("mrow", bar, high, make("mo", "|")));
  probe.classList.add("hidden");
  document.body.append(probe);
  const found = bar.getBoundingClientRect().height > ENOUGH * high.getBoundingClientRect().height;
  probe.remove();
  return found;
}

function fit(formulas) {
  const shown = formulas.filter((math) => math.isConnected && math.getBoundingClientRect().width);
  if (!shown.length) return;
  hasFont ??= stretchesBars();
  if (hasFont) return;
  const signs = [];
  for (const math of shown) {
    for (const root of math.querySelectorAll("msqrt")) root.replaceWith(asRow(root));
    for (const sign of math.querySelectorAll("mo")) {
      sign.style.transform = "";
      signs.push(sign);
    }
  }
  // All signs are measured before the first is changed, so that the page is laid out once.
  const changes = signs.map((sign) => [sign, high(sign) ?? wide(sign)]).filter(([, transform]) => transform);
  for (const [sign, transform] of changes) sign.style.transform = transform;
}

/** Return a root as √ before a row with a line above it. */
function asRow(root) {
  const sign = make("mo", "√");
  sign.setAttribute("fence", "true");
  const under = make("mrow", ...root.childNodes);
  under.classList.add("under-root");
  const made = make("mrow", sign, under);
  made.classList.add("root");
  return made;
}

/** Return the transform that makes a bracket or bar as high as its row, or null if none is needed or possible. */
function high(sign) {
  if (sign.getAttribute("fence") !== "true" || sign.getAttribute("stretchy") === "false") return null;
  const own = sign.getBoundingClientRect();
  if (!own.height) return null;
  const size = parseFloat(sign.getAttribute("minsize")) * parseFloat(getComputedStyle(sign).fontSize); // of \big and similar commands
  const others = [...sign.parentElement.children].filter((each) => each.getAttribute("fence") !== "true").map((each) => each.getBoundingClientRect()).filter((box) => box.height);
  if (!size && !others.length) return null;
  const middle = own.top + own.height / 2;
  const top = size ? middle - size / 2 : Math.min(...others.map((box) => box.top));
  const bottom = size ? middle + size / 2 : Math.max(...others.map((box) => box.bottom));
  if (own.height >= ENOUGH * (bottom - top)) return null;
  return `translateY(${((top + bottom) / 2 - middle).toFixed(2)}px) scaleY(${((bottom - top) / own.height).toFixed(3)})`;
}

/**
 * Return the transform that makes an accent, brace or arrow as wide as its base, or null if none is needed or possible.
 */
function wide(sign) {
  if (sign.getAttribute("stretchy") !== "true" || !/^m(over|under|underover)$/.test(sign.parentElement.localName)) return null;
  const [own, base] = [sign.getBoundingClientRect(), sign.parentElement.firstElementChild.getBoundingClientRect()];
  if (!own.width || own.width >= ENOUGH * base.width) return null;
  const shift = base.left + base.width / 2 - (own.left + own.width / 2);
  return `translateX(${shift.toFixed(2)}px) scaleX(${(base.width / own.width).toFixed(3)})`;
}
