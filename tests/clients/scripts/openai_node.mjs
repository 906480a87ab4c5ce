// The official JavaScript client: whole, streamed, tools, structured output, errors, retries left off.
// Started in the directory that holds node_modules; prints the same lines as reporter.py.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { parseArgs } from "node:util";

const require = createRequire(`${process.cwd()}/`);
const { OpenAI } = require("openai");
const { values: given } = parseArgs({
  options: { url: { type: "string" }, model: { type: "string" }, tokenizer: { type: "string" } },
});
const client = new OpenAI({ baseURL: `${given.url}/v1`, apiKey: "none", maxRetries: 0 });
const { model } = given;
const messages = [{ role: "user", content: "What does os.path.join do?" }];
const parameters = {
  type: "object",
  properties: { verdict: { enum: ["good", "bad"] }, stars: { enum: [1, 2, 3] } },
  required: ["verdict", "stars"],
  additionalProperties: false,
};

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

await exercise("completions, whole and streamed alike", async () => {
  const asked = { model, prompt: "import ", max_tokens: 16, temperature: 0 };
  const whole = await client.completions.create(asked);
  let text = "";
  let usage = null;
  const options = { include_usage: true };
  for await (const chunk of await client.completions.create({ ...asked, stream: true, stream_options: options })) {
    text += chunk.choices[0]?.text ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].text);
  assert.deepEqual(usage.total_tokens, whole.usage.total_tokens);
});

await exercise("chat, whole and through the stream helper", async () => {
  const asked = { model, messages, max_completion_tokens: 200, temperature: 0 };
  const whole = await client.chat.completions.create(asked);
  const stream = client.chat.completions.stream(asked);
  let text = "";
  stream.on("content", (delta) => (text += delta));
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
  assert.equal(text, whole.choices[0].message.content);
});

await exercise("tools, required, whole and streamed alike", async () => {
  const tools = [{ type: "function", function: { name: "review", parameters } }];
  const asked = { model, messages, tools, tool_choice: "required", max_completion_tokens: 120, temperature: 0 };
  asked.parallel_tool_calls = false;
  const whole = await client.chat.completions.create(asked);
  const call = whole.choices[0].message.tool_calls[0].function;
  assert.ok(["good", "bad"].includes(JSON.parse(call.arguments).verdict));
  const final = await client.chat.completions.stream(asked).finalChatCompletion();
  assert.equal(final.choices[0].message.tool_calls[0].function.arguments, call.arguments);
});

await exercise("parse: response_format json_schema", async () => {
  const response_format = { type: "json_schema", json_schema: { name: "review", schema: parameters, strict: true } };
  const answer = await client.chat.completions.parse({ model, messages, response_format, max_completion_tokens: 60 });
  assert.ok([1, 2, 3].includes(JSON.parse(answer.choices[0].message.content).stars));
});

await exercise("responses, whole and streamed alike, and a call with its result", async () => {
  const asked = { model, input: messages, max_output_tokens: 60, temperature: 0 };
  const whole = await client.responses.create(asked);
  const final = await client.responses.stream(asked).finalResponse();
  assert.equal(final.output_text, whole.output_text);
  const tools = [{ type: "function", name: "review", parameters, strict: true }];
  const turn = await client.responses.create({ ...asked, tools, tool_choice: "required", parallel_tool_calls: false });
  const call = turn.output.find((item) => item.type === "function_call");
  assert.ok(["good", "bad"].includes(JSON.parse(call.arguments).verdict));
  const input = [{ type: "function_call_output", call_id: call.call_id, output: "noted" }];
  const next = await client.responses.create({ ...asked, input, tools, previous_response_id: turn.id });
  assert.equal(next.previous_response_id, turn.id);
  assert.ok(next.usage.input_tokens > turn.usage.input_tokens);
});

await exercise("models.list and models.retrieve", async () => {
  const ids = [];
  for await (const entry of client.models.list()) ids.push(entry.id);
  assert.ok(ids.includes(model));
  assert.equal((await client.models.retrieve(model)).id, model);
});

await exercise("errors as the client's own classes, with param and code", async () => {
  await assert.rejects(client.completions.create({ model, prompt: "x", temperature: 3 }), (error) => {
    return error instanceof OpenAI.BadRequestError && error.param === "temperature" && error.requestID !== null;
  });
  await assert.rejects(client.chat.completions.create({ model: "other", messages }), (error) => {
    return error instanceof OpenAI.NotFoundError && error.code === "model_not_found";
  });
});

await exercise("a stream that is left early", async () => {
  const stream = await client.completions.create({ model, prompt: "import ", max_tokens: 1500, stream: true });
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    break;
  }
});

console.log(`@@ ${JSON.stringify({ end: exercised })}`);
process.exitCode = failed ? 1 : 0;
