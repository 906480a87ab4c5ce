// Anthropic's JavaScript client: whole, streamed, tools, structured output, errors, a stream that is left early.
// Started in the directory that holds node_modules; prints the same lines as reporter.py.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { parseArgs } from "node:util";

const require = createRequire(`${process.cwd()}/`);
const { Anthropic } = require("@anthropic-ai/sdk");
const { values: given } = parseArgs({
  options: { url: { type: "string" }, model: { type: "string" }, tokenizer: { type: "string" } },
});
const client = new Anthropic({ baseURL: given.url, apiKey: "none", maxRetries: 0 });
const { model } = given;
const messages = [{ role: "user", content: "What does os.path.join do?" }];
const asked = { model, max_tokens: 120, temperature: 0, messages };
const schema = {
  type: "object",
  properties: { verdict: { enum: ["good", "bad"] }, stars: { enum: [1, 2, 3] } },
  required: ["verdict", "stars"],
  additionalProperties: false,
};
const tools = [{ name: "rate", description: "Rates it.", input_schema: schema }];

let exercised = 0;
let failed = 0;

async function exercise(what, action) {
  let problem = null;
  try {
    await action();
  } catch (error) {
    console.error(error);
    problem = String(error).replace(/\s+/g, " ").slice(0, 300);
    failed += 1;
  }
  exercised += 1;
  console.log(`@@ ${JSON.stringify({ exercised: what, problem })}`);
}

const textOf = (message) => message.content.map((block) => block.text ?? "").join("");

await exercise("messages, whole and through the stream helper", async () => {
  const whole = await client.messages.create(asked);
  assert.equal(whole.stop_reason, "end_turn");
  const stream = client.messages.stream(asked);
  let text = "";
  stream.on("text", (delta) => (text += delta));
  const final = await stream.finalMessage();
  assert.equal(text, textOf(whole));
  assert.equal(textOf(final), textOf(whole));
  assert.equal(final.usage.output_tokens, whole.usage.output_tokens);
});

await exercise("tools, forced, whole and streamed alike, and a result handed back", async () => {
  const forced = { ...asked, tools, tool_choice: { type: "any" } };
  const whole = await client.messages.create(forced);
  const [call] = whole.content;
  assert.equal(call.type, "tool_use");
  assert.ok(schema.properties.verdict.enum.includes(call.input.verdict));
  const final = await client.messages.stream(forced).finalMessage();
  assert.deepEqual(final.content[0].input, call.input);
  const result = { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "noted" }] };
  const history = [...messages, { role: "assistant", content: whole.content }, result];
  const last = await client.messages.create({ ...asked, tools, tool_choice: { type: "none" }, messages: history });
  assert.ok(["end_turn", "max_tokens"].includes(last.stop_reason));
});

await exercise("countTokens is the usage", async () => {
  const counted = await client.messages.countTokens({ model, messages });
  const { usage } = await client.messages.create(asked);
  assert.equal(counted.input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
});

await exercise("a stream that is left early", async () => {
  const stream = client.messages.stream({ ...asked, max_tokens: 1000 });
  for await (const event of stream) {
    if (event.type === "content_block_delta") break;
  }
  stream.abort();
  assert.equal((await client.messages.create(asked)).stop_reason, "end_turn");
});

await exercise("errors as the client's own classes", async () => {
  await assert.rejects(client.messages.create({ ...asked, model: "other" }), Anthropic.NotFoundError);
  await assert.rejects(client.messages.create({ ...asked, max_tokens: 0 }), Anthropic.BadRequestError);
});

console.log(`@@ ${JSON.stringify({ end: exercised })}`);
process.exitCode = failed ? 1 : 0;
