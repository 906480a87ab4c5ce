// Tokens of a response: their offsets in the text, their probabilities and their alternatives.

const decoder = new TextDecoder("utf-8", { ignoreBOM: true });

/** Return how many of these bytes make whole characters; the rest is an incomplete character. */
function wholeBytes(bytes) {
  for (let back = 1; back <= Math.min(3, bytes.length); back++) {
    const byte = bytes[bytes.length - back];
    if (byte >= 0xc0) return (byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2) > back ? bytes.length - back : bytes.length;
    if (byte < 0x80) break;
  }
  return bytes.length;
}

/** Return the text if the bytes are whole characters, else null. */
function wholeText(bytes) {
  if (bytes.length === 0 || wholeBytes(bytes) < bytes.length) return null;
  const text = decoder.decode(Uint8Array.from(bytes));
  return text.includes("\ufffd") ? null : text;
}

/**
 * Add an entry of `logprobs` to `answer.raw` and `answer.tokens`. A token that ends inside a character has no text of
 * its own; the token that completes the character has all of it. A response cannot be continued from inside a character
 * (`isWhole`).
 */
export function addToken(answer, entry) {
  const bytes = entry.bytes ?? [...new TextEncoder().encode(entry.token)];
  const pending = answer.pending ?? [];
  const all = [...pending, ...bytes];
  const whole = wholeBytes(all);
  const start = answer.raw.length;
  answer.raw += decoder.decode(Uint8Array.from(all.slice(0, whole)));
  answer.pending = all.slice(whole);
  const others = entry.top_logprobs.map((other) => ({
    text: wholeText(other.bytes ?? [...new TextEncoder().encode(other.token)]),
    name: other.token,
    p: Math.exp(other.logprob),
    isTaken: String(other.bytes) === String(bytes),
  }));
  if (!others.some((other) => other.isTaken)) {
    others.push({ text: wholeText(bytes), name: entry.token, p: Math.exp(entry.logprob), isTaken: true });
  }
  answer.tokens.push({ start, end: answer.raw.length, isWhole: pending.length === 0, others });
}

/** Return the text as parsed by the API: {reasoning, content, and their offsets in `raw`}. */
export function divide(raw, opensThinking) {
  const lead = raw.length - raw.trimStart().length;
  const tagged = raw.startsWith("<think>", lead);
  if (!tagged && !opensThinking) return { reasoning: "", content: raw, reasoningAt: 0, contentAt: 0 };
  const inside = tagged ? lead + 7 : 0;
  const end = raw.indexOf("</think>", inside);
  const inner = raw.slice(inside, end < 0 ? raw.length : end);
  const reasoningAt = inside + inner.length - inner.replace(/^\n+/, "").length;
  const reasoning = inner.replace(/^\n+|\n+$/g, "");
  if (end < 0) return { reasoning, content: "", reasoningAt, contentAt: raw.length };
  const rest = raw.slice(end + 8);
  const content = rest.replace(/^\n+/, "");
  return { reasoning, content, reasoningAt, contentAt: raw.length - content.length };
}

/** Return the offsets of a response's parsed text in its raw text, or null if it is not found there. */
export function align(answer) {
  if (!answer.tokens.length) return null;
  const offsets = divide(answer.raw, answer.opensThinking);
  const fits = answer.raw.startsWith(answer.content, offsets.contentAt) && answer.raw.startsWith(answer.reasoning, offsets.reasoningAt);
  return fits ? offsets : null;
}

/** Return the whole response as a prefix to continue: text as the model wrote it, and its tokens. */
export function wholePrefix(answer) {
  const offsets = align(answer);
  if (!offsets) {
    const tagged = answer.reasoning ? `<think>\n${answer.reasoning}${answer.content ? "\n</think>\n\n" : ""}` : "";
    return { raw: tagged + answer.content, tokens: [], opensThinking: false };
  }
  const end = answer.content ? offsets.contentAt + answer.content.length : offsets.reasoningAt + answer.reasoning.length;
  return { raw: answer.raw.slice(0, end), tokens: answer.tokens.filter((token) => token.end <= end), opensThinking: answer.opensThinking };
}

/** Return the response up to one token, which is replaced by another, as a prefix to continue. */
export function otherPrefix(answer, index, other) {
  const token = answer.tokens[index];
  const raw = answer.raw.slice(0, token.start) + other.text;
  const others = token.others.map((each) => ({ ...each, isTaken: each === other }));
  const tokens = [...answer.tokens.slice(0, index), { start: token.start, end: raw.length, isWhole: true, others, isChosen: true }];
  return { raw, tokens, opensThinking: answer.opensThinking };
}
