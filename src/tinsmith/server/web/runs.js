// All training runs, newest first, and the choice of some to compare.

import { ask } from "./api.js";
import { empty, fill, h, keep, table } from "./dom.js";
import { count, duration, number, runName } from "./format.js";
import { pageLinks } from "./parts.js";
import { poll } from "./polling.js";

export const title = "Runs";

const PAGE = 50;
const SECONDS = 3;
const LIVELY_SECONDS = 60;
const COLUMNS = [
  ["", "tick"], ["run"], ["session"], ["steps", "number"], ["loss", "number"], ["base model"], ["rank", "number"],
  ["age", "number"], ["last request", "number"], ["state"],
];

const chosen = new Set(); // outlives the view, so that one may look at a run and come back

export function show(main, { query, signal }) {
  const offset = Number(query.get("offset")) || 0;
  const body = h("tbody");
  const listing = h("div", {}, table("Training runs", COLUMNS, body));
  const openChosen = () => { location.hash = runsHash([...chosen]); };
  const compare = h("button", { class: "primary", type: "button", onclick: openChosen });
  const choose = (runId, isChosen) => {
    if (isChosen) chosen.add(runId);
    else chosen.delete(runId);
    tellChosen(compare);
  };
  const none = empty("No training run yet. The first ", h("code", {}, "create_lora_training_client"), " makes one.");
  const pages = h("p", { class: "pages" });
  main.append(h("div", { class: "head" }, h("h1", {}, "Runs"), compare), listing, none, pages);
  tellChosen(compare);
  none.hidden = true;
  poll(async () => {
    const { total, runs } = await ask("dashboard/api/runs", { query: { limit: PAGE, offset }, signal });
    keep(body, runs, (run) => run.run_id, (run) => makeRow(run, choose), updateRow);
    [listing.hidden, none.hidden] = [total === 0, total > 0];
    pages.replaceChildren(...pageLinks("runs", total, offset, PAGE));
  }, SECONDS, signal);
}

export function runsHash(runIds) {
  return `#/run/${encodeURIComponent(runIds.join(","))}`;
}

function tellChosen(button) {
  button.disabled = chosen.size === 0;
  button.textContent = chosen.size > 1 ? `Compare ${chosen.size} runs` : "Compare";
}

function makeRow(run, choose) {
  const tick = h("input", { type: "checkbox", "aria-label": `Compare ${run.run_id}` });
  tick.addEventListener("change", () => choose(run.run_id, tick.checked));
  tick.checked = chosen.has(run.run_id);
  const cell = (name, kind) => h("td", { "data-cell": name, class: kind });
  return h("tr", {},
    h("td", { class: "tick" }, tick),
    h("td", {}, h("a", { href: runsHash([run.run_id]), title: run.run_id, class: "id" }, runName(run.run_id))),
    cell("session", "clip"), cell("steps", "number"), cell("loss", "number"), cell("base", "clip"),
    cell("rank", "number"), cell("age", "number"), cell("request", "number"), cell("state", "state"),
  );
}

function updateRow(row, run) {
  const now = Date.now() / 1000;
  const isActive = run.is_at_work || (run.is_open && now - run.last_request < LIVELY_SECONDS);
  fill(row, {
    session: run.session_name ?? "",
    base: run.base_model,
    rank: count(run.rank),
    steps: count(run.steps),
    loss: number(run.last.loss),
    age: duration(now - run.created),
    request: duration(now - run.last_request),
    state: run.corrupted !== null ? "corrupted" : run.is_removed ? "removed" : isActive ? "active" : "idle",
  });
  const state = row.querySelector(".state");
  state.dataset.state = state.textContent;
  state.title = run.corrupted ?? "";
  row.querySelector("[data-cell=session]").title = run.session_name ?? "";
}
