// LangChain in JavaScript: whole, streamed, structured output, and a tool's call with its result.
// Started in the directory that holds node_modules; prints the same lines as reporter.py.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { parseArgs } from "node:util";

const require = createRequire(`${process.cwd()}/`);
const { ChatOpenAI } = require("@langchain/openai");
const { HumanMessage, ToolMessage } = require("@langchain/core/messages");
const { tool } = require("@langchain/core/tools");
const { values: given } = parseArgs({
  options: {
    url: { type: "string" },
    model: { type: "string" },
    tokenizer: { type: "string" },
    "scripted-url": { type: "string" },
  },
});
const chat = (url) =>
  new ChatOpenAI({
    model: given.model,
    apiKey: "none",
    temperature: 0,
    maxTokens: 120,
    maxRetries: 0,
    configuration: { baseURL: `${url}/v1` },
  });
const demo = chat(given.url);
const scripted = chat(given["scripted-url"]);
const question = "What does os.path.join do?";

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

await exercise("invoke and stream alike, with usage", async () => {
  const whole = await demo.invoke(question);
  assert.ok(whole.content && whole.usage_metadata.output_tokens > 0);
  let text = "";
  for await (const chunk of await demo.stream(question)) text += chunk.content;
  assert.equal(text, whole.content);
});

await exercise("withStructuredOutput: an object by its schema", async () => {
  const schema = {
    title: "rating",
    type: "object",
    properties: { verdict: { enum: ["good", "bad"] }, stars: { enum: [1, 2, 3] } },
    required: ["verdict", "stars"],
    additionalProperties: false,
  };
  for (const method of ["jsonSchema", "functionCalling"]) {
    const rating = await demo.withStructuredOutput(schema, { method }).invoke(question);
    assert.ok(["good", "bad"].includes(rating.verdict) && [1, 2, 3].includes(rating.stars), method);
  }
});

await exercise("bindTools: a call runs, and its result is answered, whole and streamed alike", async () => {
  const commands = [];
  const run = ({ command }) => {
    commands.push(command);
    return "41\n42\n43";
  };
  const parameters = { type: "object", properties: { command: { type: "string" } }, required: ["command"] };
  const shell = tool(run, { name: "shell", description: "Run a command.", schema: parameters });
  const agent = scripted.bindTools([shell]);
  const messages = [new HumanMessage("Write.")];
  const called = await agent.invoke(messages);
  assert.equal(called.tool_calls.length, 1);
  let streamed;
  for await (const chunk of await agent.stream(messages)) streamed = streamed ? streamed.concat(chunk) : chunk;
  assert.deepEqual(streamed.tool_calls[0].args, called.tool_calls[0].args);
  const result = await shell.invoke(called.tool_calls[0]);
  assert.ok(result instanceof ToolMessage);
  assert.deepEqual(commands, ["seq 41 43 > shell.txt; cat shell.txt"]);
  const last = await agent.invoke([...messages, called, result]);
  assert.equal(last.content, "The numbers are in the file.");
});

await exercise("errors with the status", async () => {
  const other = new ChatOpenAI({
    model: "other",
    apiKey: "none",
    maxRetries: 0,
    configuration: { baseURL: `${given.url}/v1` },
  });
  await assert.rejects(other.invoke(question), (error) => error.status === 404);
});

console.log(`@@ ${JSON.stringify({ end: exercised })}`);
process.exitCode = failed ? 1 : 0;
