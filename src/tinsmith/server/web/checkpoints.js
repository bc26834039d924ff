// Checkpoints: what there is, and what can be done with it.

import { ask } from "./api.js";
import { confirmed, empty, fill, h, keep, table } from "./dom.js";
import { bytes, duration, moment, runName } from "./format.js";
import { attempt, tell } from "./notice.js";
import { ofRun, pageLinks } from "./parts.js";
import { poll } from "./polling.js";

export const title = "Checkpoints";

const PAGE = 100;
const SECONDS = 5;
const FILES = "/api/v1/files/";
const COLUMNS = [
  ["name"], ["run"], ["kind"], ["size", "number"], ["saved"], ["expires", "number"], ["public"], ["", "actions"],
];

export function show(main, { query, signal }) {
  const runId = query.get("run");
  const offset = Number(query.get("offset")) || 0;
  const body = h("tbody");
  const listing = h("div", {}, table("Checkpoints", COLUMNS, body));
  const pages = h("p", { class: "pages" });
  const saves = [h("code", {}, "save_state"), " and ", h("code", {}, "save_weights_for_sampler")];
  const none = empty("No checkpoints. ", ...saves, " make them.");
  none.hidden = true;
  main.append(h("div", { class: "head" }, h("h1", {}, title), ofRun("checkpoints", runId)), listing, none, pages);
  const refresh = async () => {
    const { checkpoints, cursor } = await ask(...source(runId, offset, signal));
    const make = (checkpoint) => makeRow(checkpoint, refresh);
    keep(body, checkpoints, (checkpoint) => checkpoint.tinker_path, make, updateRow);
    [listing.hidden, none.hidden] = [checkpoints.length === 0, checkpoints.length > 0];
    pages.replaceChildren(...pageLinks("checkpoints", cursor?.total_count ?? 0, offset, PAGE));
  };
  poll(refresh, SECONDS, signal);
}

function source(runId, offset, signal) {
  if (runId) return [`api/v1/training_runs/${encodeURIComponent(runId)}/checkpoints`, { signal }];
  return ["api/v1/checkpoints", { query: { limit: PAGE, offset }, signal }];
}

/** Where the API keeps a checkpoint, from its path `tinker://run/kind/name`. */
function address(checkpoint) {
  const [run, kind, name] = checkpoint.tinker_path.slice("tinker://".length).split("/").map(encodeURIComponent);
  return `api/v1/training_runs/${run}/checkpoints/${kind}/${name}`;
}

function parts(checkpoint) {
  const [run, kind, name] = checkpoint.tinker_path.slice("tinker://".length).split("/");
  return { run, kind, name };
}

function makeRow(checkpoint, refresh) {
  const { run, name } = parts(checkpoint);
  const notes = Object.entries(checkpoint.user_metadata ?? {}).map(([key, value]) => `${key}: ${value}`);
  const act = (work) => () => attempt(async () => { await work(); await refresh(); });
  const publish = h("button", { type: "button", "data-cell": "publish" });
  const setPublic = () => ask(`${address(checkpoint)}/publish`, { method: publish.dataset.method });
  publish.addEventListener("click", act(setPublic));
  const cell = (name, kind) => h("td", { "data-cell": name, class: kind });
  return h("tr", {},
    h("td", { class: "clip", title: [checkpoint.tinker_path, ...notes].join("\n") },
      h("span", { class: "id" }, name), notes.length ? h("small", {}, notes.join(" · ")) : null),
    h("td", {}, h("a", { href: `#/run/${encodeURIComponent(run)}`, class: "id", title: run }, runName(run))),
    cell("kind"), cell("size", "number"), cell("saved"), cell("expires", "number"), cell("public"),
    h("td", { class: "actions" },
      h("button", { type: "button", onclick: () => attempt(() => copy(checkpoint.tinker_path)) }, "Copy path"),
      h("button", { type: "button", onclick: () => attempt(() => download(checkpoint)) }, "Download"),
      publish,
      h("button", { type: "button", class: "danger", onclick: act(() => remove(checkpoint)) }, "Delete"),
    ),
  );
}

function updateRow(row, checkpoint) {
  const expires = checkpoint.expires_at ? Date.parse(checkpoint.expires_at) / 1000 - Date.now() / 1000 : null;
  fill(row, {
    kind: checkpoint.checkpoint_type,
    size: bytes(checkpoint.size_bytes),
    saved: moment(Date.parse(checkpoint.time) / 1000),
    expires: expires === null ? "never" : `in ${duration(expires)}`,
    public: checkpoint.public ? "public" : "private",
    publish: checkpoint.public ? "Unpublish" : "Publish",
  });
  row.querySelector("[data-cell=publish]").dataset.method = checkpoint.public ? "DELETE" : "POST";
}

async function copy(path) {
  await navigator.clipboard.writeText(path);
  tell(`Copied ${path}`, false);
}

/** By a signed address, so that the key is in no address; taken from this origin, however the server calls itself. */
async function download(checkpoint) {
  const { url } = await ask(`${address(checkpoint)}/archive`);
  const { run, kind, name } = parts(checkpoint);
  const href = new URL(url.slice(url.indexOf(FILES) + 1), document.baseURI);
  h("a", { href, download: `${runName(run)}-${kind}-${name}.tar`.replaceAll(":", "-") }).click();
}

async function remove(checkpoint) {
  const size = bytes(checkpoint.size_bytes);
  const text = `${checkpoint.tinker_path} and its files (${size}) will be gone. This cannot be undone.`;
  if (await confirmed("Delete this checkpoint?", text, "Delete")) await ask(address(checkpoint), { method: "DELETE" });
}
