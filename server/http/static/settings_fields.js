// The settings fields: their names, and the conversion of typed text to a field of a request or to an error.

const json = (text) => {
  try {
    return { value: JSON.parse(text) };
  } catch (error) {
    return { why: `Not JSON: ${error.message}` };
  }
};
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

function number(text, known = {}) {
  const value = Number(text.replace(",", "."));
  const { minimum = -Infinity, maximum = Infinity, type } = known;
  if (!Number.isFinite(value)) return { why: "Not a number." };
  if (value < minimum) return { why: `At least ${minimum}.` };
  if (value > maximum) return { why: `At most ${maximum}.` };
  if (type === "integer" && !Number.isInteger(value)) return { why: "An integer." };
  return { value };
}

/** Return a list of tools. A single definition, or a function without its wrapper, is accepted too. */
function tools(text) {
  const { value, why } = json(text);
  if (why) return { why };
  const list = (Array.isArray(value) ? value : [value]).map((tool) => (isObject(tool) && !tool.function && tool.name ? { type: "function", function: tool } : tool));
  const wrong = list.findIndex((tool) => typeof tool?.function?.name !== "string");
  return wrong < 0 ? { value: list } : { why: `Tool ${wrong + 1} has no name: {"type": "function", "function": {"name": …, "parameters": {…}}}.` };
}

function schema(text) {
  const { value, why } = json(text);
  if (why) return { why };
  if (!isObject(value)) return { why: 'A schema is an object, such as {"type": "object", "properties": {…}}.' };
  const inner = value.json_schema ?? value; // a whole response_format is accepted too
  return { value: { type: "json_schema", json_schema: inner.schema ? { name: "answer", ...inner } : { name: "answer", schema: value } } };
}

function more(text) {
  const { value, why } = json(text);
  if (why) return { why };
  return isObject(value) ? { value } : { why: 'An object, such as {"reasoning_effort": "low"}.' };
}

const FIELD = (name, label, hint, read = number, rows = 0) => ({ name, label, hint, read, rows, isNumber: read === number });

export const FIELDS = [
  FIELD("system", "System prompt", "You are …", (text) => ({ value: text }), 4),
  FIELD("temperature", "Temperature", "0 always takes the most likely word"),
  FIELD("top_p", "Top p", "keep the likeliest words that hold this much probability"),
  FIELD("top_k", "Top k", "keep this many words"),
  FIELD("min_p", "Min p", "keep words with at least this fraction of the highest probability"),
  FIELD("top_n_sigma", "Top n sigma", "keep words whose logit is within this many standard deviations of the largest"),
  FIELD("max_completion_tokens", "Longest answer", "tokens, including reasoning"),
  FIELD("seed", "Seed", "equal seeds give equal answers"),
  FIELD("presence_penalty", "Presence penalty", ""),
  FIELD("frequency_penalty", "Frequency penalty", ""),
  FIELD("repetition_penalty", "Repetition penalty", ""),
  FIELD("stop", "Stop strings", "one on each line", (text) => ({ value: text.split("\n").filter(Boolean) }), 2),
  FIELD("response_format", "JSON schema of the answer", '{"type": "object", "properties": {…}}', schema, 3),
  FIELD("tools", "Tools", '{"name": "f", "parameters": {…}}', tools, 3),
  FIELD("more", "More parameters", '{"reasoning_effort": "low"}', more, 2),
];

/** Return the content of a field: {value}, {why} it is wrong, or null if it is empty. */
export const read = (field, text, known) => ((text ?? "").trim() === "" ? null : field.read(text, known[field.name]));

/** Return the fields of a request for all texts. The server chooses the values of empty or wrong fields. */
export function requestFields(texts, known) {
  const found = {};
  for (const field of FIELDS) {
    const { value } = read(field, texts[field.name], known) ?? {};
    if (value === undefined || field.name === "system") continue;
    if (field.name === "more") Object.assign(found, value);
    else found[field.name] = value;
  }
  if (texts.alternatives !== false) Object.assign(found, { logprobs: true, top_logprobs: 5 });
  return found;
}
