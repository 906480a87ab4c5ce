// The server's API. Addresses are relative to this page, so that it works below any path of a proxy.

import { keep, recall } from "./dom.js";

const KEY = "oarlock-key";
export const base = new URL(".", document.baseURI);

/** The error of a request. `status` 0: the server could not be reached. */
export class ApiError extends Error {
  constructor(message, status, requestId = "") {
    super(message);
    this.status = status;
    this.requestId = requestId;
  }
}

/** Return the API key, which is kept only in this tab. */
export const getKey = () => recall(KEY) ?? "";
export const setKey = (key) => keep(KEY, key);

/** Send a request. `root`: the address of another server; this server's key is not sent to it. */
async function request(path, { body, signal, key = getKey(), root = base } = {}) {
  const headers = body ? { "Content-Type": "application/json" } : {};
  if (key) headers.Authorization = `Bearer ${key}`;
  const options = { method: body ? "POST" : "GET", headers, signal, cache: "no-store" };
  if (body) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(new URL(path, root), options);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError("The server does not respond.", 0);
  }
  if (response.ok) return response;
  const problem = await response.json().catch(() => null); // a proxy's own error page is not JSON
  const message = problem?.error?.message ?? `The response was ${response.status} ${response.statusText}`.trim() + ".";
  throw new ApiError(message, response.status, response.headers.get("x-request-id") ?? "");
}

/** Return the JSON response to a POST request. Throws `ApiError`. */
export const post = (path, body, options) => get(path, { ...options, body });

/** Return the JSON at a path. Throws `ApiError`. */
export async function get(path, options) {
  const response = await request(path, options);
  try {
    return await response.json();
  } catch (error) {
    if (options?.signal?.aborted) throw error;
    throw new ApiError("The connection was lost.", 0);
  }
}

/** Return the body of `/health`, whatever its status is, or null if there is no response. */
export async function health() {
  try {
    const response = await fetch(new URL("health", base), { cache: "no-store" });
    return await response.json();
  } catch {
    return null;
  }
}

/** Yield the events of a streamed response. Throws `ApiError`, also if the stream ends before its `[DONE]`. */
export async function* stream(path, body, signal, options = {}) {
  const response = await request(path, { body, signal, ...options });
  const requestId = response.headers.get("x-request-id") ?? "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (signal.aborted) throw error;
      break;
    }
    if (piece.done) break;
    const lines = (rest + piece.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.message, event.error.status ?? 500, requestId);
      yield event;
    }
  }
  throw new ApiError("The connection was lost.", 0, requestId);
}
