// Requests to the server this page came from, with the key of whoever is signed in.

const PLACE = "tinsmith.key";
const ANY = "tml-dashboard"; // what a server that takes any key is shown

/** The server answered, but not with what was asked for. */
export class Refused extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

/** No answer came. */
export class Unreachable extends Error {}

let key = sessionStorage.getItem(PLACE) ?? localStorage.getItem(PLACE) ?? null;

export const asksForKey = document.documentElement.dataset.key !== "any";
export const hasKey = () => key !== null || !asksForKey;

export function signIn(given, stays) {
  forget();
  key = given;
  (stays ? localStorage : sessionStorage).setItem(PLACE, given);
}

export function forget() {
  key = null;
  sessionStorage.removeItem(PLACE);
  localStorage.removeItem(PLACE);
}

/** What the server says in JSON, or null if it says nothing. `query` leaves out what is null. */
export async function ask(path, { method = "GET", query = {}, body, signal } = {}) {
  const response = await send(path, { method, query, body, signal });
  return response.status === 204 ? null : await whole(response.json(), signal);
}

/** The content of each server-sent event of an answer, parsed, until it says [DONE]. */
export async function* stream(path, body, signal) {
  const response = await send(path, { method: "POST", body, signal, headers: { accept: "text/event-stream" } });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await whole(reader.read(), signal);
    rest += done ? "\n\n" : value;
    const events = rest.split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = dataOf(event);
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
    if (done) return;
  }
}

function dataOf(event) {
  const lines = event.split("\n").filter((line) => line.startsWith("data:"));
  return lines.map((line) => line.slice(5).trimStart()).join("\n");
}

async function send(path, { method, query = {}, body, signal, headers = {} }) {
  const url = new URL(path, document.baseURI);
  for (const [name, value] of Object.entries(query)) if (value !== null) url.searchParams.set(name, value);
  const shown = key ?? ANY;
  const sent = { "x-api-key": shown, authorization: `Bearer ${shown}`, ...headers };
  if (body !== undefined) sent["content-type"] = "application/json";
  const options = { method, headers: sent, body: body === undefined ? undefined : JSON.stringify(body), signal };
  const response = await whole(fetch(url, { ...options, cache: "no-store", credentials: "omit" }), signal);
  if (!response.ok) throw await refusal(response);
  return response;
}

/** A connection that breaks is one kind of error, whenever it does. */
async function whole(promise, signal) {
  try {
    return await promise;
  } catch (error) {
    if (signal?.aborted || error.name === "AbortError") throw error;
    throw new Unreachable("The server is not reachable.", { cause: error });
  }
}

async function refusal(response) {
  const said = await response.json().catch(() => ({}));
  const text = said.detail ?? said.error?.message ?? `The server answered with status ${response.status}.`;
  const error = new Refused(response.status, String(text), Number(response.headers.get("retry-after")) || null);
  if (response.status === 401) dispatchEvent(new CustomEvent("kept-out", { detail: error }));
  return error;
}
