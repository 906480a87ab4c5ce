// Vercel's AI SDK: text, objects by schema, errors; and tools that run, with a model whose answers are scripted.
// Started in the directory that holds node_modules; prints the same lines as reporter.py.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { parseArgs } from "node:util";

const require = createRequire(`${process.cwd()}/`);
const { APICallError, generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { values: given } = parseArgs({
  options: {
    url: { type: "string" },
    model: { type: "string" },
    tokenizer: { type: "string" },
    "scripted-url": { type: "string" },
  },
});
const provider = (url) =>
  createOpenAICompatible({
    name: "oarlock",
    baseURL: `${url}/v1`,
    apiKey: "none",
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
const model = provider(given.url)(given.model);
const scripted = provider(given["scripted-url"])(given.model);
const asked = { model, prompt: "What does os.path.join do?", temperature: 0, maxOutputTokens: 120, maxRetries: 0 };

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

await exercise("generateText and streamText alike, with usage", async () => {
  const whole = await generateText(asked);
  assert.ok(whole.text && whole.usage.outputTokens > 0);
  const stream = streamText(asked);
  let text = "";
  for await (const part of stream.textStream) text += part;
  assert.equal(text, whole.text);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
});

await exercise("generateObject: an object by its schema", async () => {
  const schema = jsonSchema({
    type: "object",
    properties: { verdict: { enum: ["good", "bad"] }, stars: { enum: [1, 2, 3] } },
    required: ["verdict", "stars"],
    additionalProperties: false,
  });
  const { object } = await generateObject({ ...asked, schema });
  assert.ok(["good", "bad"].includes(object.verdict) && [1, 2, 3].includes(object.stars));
});

const commands = [];
const shell = tool({
  description: "Run a command.",
  inputSchema: jsonSchema({ type: "object", properties: { command: { type: "string" } }, required: ["command"] }),
  execute: async ({ command }) => {
    commands.push(command);
    return "41\n42\n43";
  },
});
const steps = { model: scripted, prompt: "Write.", tools: { shell }, stopWhen: stepCountIs(3), maxRetries: 0 };

await exercise("tools: a call runs, and its result is answered", async () => {
  const done = await generateText(steps);
  assert.deepEqual(commands.splice(0), ["seq 41 43 > shell.txt; cat shell.txt"]);
  assert.deepEqual([done.steps.length, done.text, done.finishReason], [2, "The numbers are in the file.", "stop"]);
});

await exercise("tools: the same as a stream", async () => {
  const stream = streamText(steps);
  const seen = [];
  for await (const part of stream.fullStream) seen.push(part.type);
  assert.equal(commands.splice(0).length, 1);
  assert.ok(seen.includes("tool-call") && seen.includes("tool-result") && !seen.includes("error"), seen.join());
  assert.equal(await stream.text, "The numbers are in the file.");
});

await exercise("errors as the client's own class", async () => {
  const refused = generateText({ ...asked, model: provider(given.url)("other") });
  await assert.rejects(refused, (error) => APICallError.isInstance(error) && error.statusCode === 404);
});

console.log(`@@ ${JSON.stringify({ end: exercised })}`);
process.exitCode = failed ? 1 : 0;
