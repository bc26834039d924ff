// The server itself: its models at work, what waits, and the keys.

import { ask, asksForKey } from "./api.js";
import { Chart, Group } from "./chart.js";
import { confirmed, empty, fill, h, keep, table } from "./dom.js";
import { clock, count, duration, moment, percent } from "./format.js";
import { attempt, tell } from "./notice.js";
import { poll } from "./polling.js";
import { Series, clockTicks } from "./series.js";

export const title = "Server";

const SECONDS = 2;
const KEPT = 900; // half an hour of overviews
const BY_THE_CLOCK = { formatX: clock, ticksX: clockTicks };
const SHARE = { formatY: percent, formatTick: percent, most: 1 };
const RATE = { most: 10 };
const FIGURES = [
  ["train_tokens_per_second", "training, tokens/s", RATE],
  ["sample_tokens_per_second", "sampling, tokens/s", RATE],
  ["batch_fill", "batch fill", SHARE],
  ["kv_used_share", "KV cache in use", SHARE],
];

const QUEUE = [["base model"], ["kind"], ["state"], ["requests", "number"], ["oldest", "number"]];
const KEYS = [["name"], ["note"], ["ends in"], ["made"], ["state"], ["", "actions"]];

const remembered = new Map(); // by model and figure; outlives the view, so that one may look elsewhere and come back

export function show(main, { signal }) {
  const about = h("p", { class: "hint" });
  const models = h("div", {});
  const jobs = h("tbody");
  const waiting = h("div", {}, table("Queue", QUEUE, jobs));
  const idle = empty("Nothing of yours waits.");
  main.append(
    h("div", { class: "head" }, h("h1", {}, "Server"), about),
    models,
    h("h2", {}, "Queue"), waiting, idle,
    h("h2", {}, "API keys"), asksForKey ? keys(signal) : noKeys(),
  );
  poll(async () => {
    const overview = await ask("dashboard/api/overview", { signal });
    about.textContent = `Tinsmith ${overview.version} · signed in as ${overview.owner}`;
    remember(overview);
    keep(models, overview.models, (model) => model.name, (model) => makeModel(model, signal), updateModel);
    keep(jobs, overview.queue, (job) => `${job.base_model} ${job.kind} ${job.state}`, makeJob, updateJob);
    waiting.hidden = overview.queue.length === 0;
    idle.hidden = !waiting.hidden;
  }, SECONDS, signal);
}

// --- models ----------------------------------------------------------------------------------------------------------

function remember({ now, models }) {
  for (const model of models) {
    for (const [figure] of FIGURES) {
      const series = past(model.name, figure);
      series.append([[now, now, model[figure]]]);
      series.keepLast(KEPT);
    }
  }
}

function past(model, figure) {
  const name = `${figure} ${model}`;
  if (!remembered.has(name)) remembered.set(name, new Series());
  return remembered.get(name);
}

function makeModel(model, signal) {
  const group = new Group();
  const charts = FIGURES.map(([figure, caption, options]) => {
    const chart = new Chart(caption, group, signal, { height: 110, ...BY_THE_CLOCK, least: 0, ...options });
    chart.lines = [{ label: model.name, place: 0, series: past(model.name, figure) }];
    return chart;
  });
  const section = h("section", { class: "model" },
    h("h2", {},
      model.name, " ", h("span", { class: "state", "data-cell": "state" }),
      " ", h("span", { class: "hint", "data-cell": "why" })),
    h("ul", { class: "workers hint" }),
    h("div", { class: "charts small" }, charts.map((chart) => chart.element)),
  );
  section.addEventListener("advance", () => charts.forEach((chart) => chart.draw()));
  return section;
}

function updateModel(section, model) {
  const [state, why] = health(model);
  fill(section, { state, why });
  section.querySelector(".state").dataset.state = state;
  // One worker is what the state above is about.
  const several = model.workers.length > 1 ? model.workers : [];
  keep(section.querySelector(".workers"), several, (worker) => worker.name, makeWorker, updateWorker);
  section.dispatchEvent(new Event("advance"));
}

function makeWorker(worker) {
  return h("li", {}, h("b", {}, worker.name), " ", h("span", { "data-cell": "about" }));
}

function updateWorker(row, worker) {
  const state = worker.problem ?? worker.held_up ?? (worker.is_ready ? "ready" : "loading");
  const place = worker.where ? ` on ${worker.where}` : "";
  const queue = worker.samples === null ? "" : `, ${count(worker.samples)} samples to draw`;
  fill(row, { about: `${state}${place}${queue}` });
}

function health(model) {
  if (model.problem) return ["failed", model.problem];
  if (model.replay) return ["replaying", `${count(model.replay.replayed)} of ${count(model.replay.total)} operations`];
  if (!model.is_ready) return ["loading", ""];
  return model.held_up ? ["held up", model.held_up] : ["ready", ""];
}

// --- queue -----------------------------------------------------------------------------------------------------------

function makeJob(job) {
  return h("tr", {},
    h("td", {}, job.base_model), h("td", {}, job.kind), h("td", {}, job.state),
    h("td", { class: "number", "data-cell": "count" }), h("td", { class: "number", "data-cell": "oldest" }));
}

function updateJob(row, job) {
  fill(row, { count: count(job.count), oldest: duration(job.oldest_seconds) });
}

// --- keys ------------------------------------------------------------------------------------------------------------

function noKeys() {
  const command = h("code", {}, "tinsmith keys create NAME");
  const text = "This server works without keys: all that is on it is everybody's. To change that, run ";
  return empty(text, command, " where the server is.");
}

function keys(signal) {
  const body = h("tbody");
  const made = h("div", { class: "made", role: "status" });
  const name = h("input", {
    name: "name", required: true, maxlength: "100", placeholder: "such as laptop", autocomplete: "off",
    "aria-label": "Name of the new key",
  });
  const refresh = async () => {
    const { keys } = await ask("dashboard/api/keys", { signal });
    keep(body, keys, (key) => key.key_id, (key) => makeKey(key, refresh), updateKey);
  };
  const create = async (event) => {
    event.preventDefault();
    await attempt(async () => {
      const { key, plain } = await ask("dashboard/api/keys", { method: "POST", body: { name: name.value } });
      made.replaceChildren(...shownOnce(key, plain));
      name.value = "";
      await refresh();
    });
  };
  attempt(refresh);
  return h("div", {},
    table("API keys", KEYS, body),
    h("form", { class: "tools", onsubmit: create }, name, h("button", {}, "Create key")),
    made,
  );
}

function shownOnce(key, plain) {
  const copy = async () => {
    await navigator.clipboard.writeText(plain);
    tell("The key was copied.", false);
  };
  return [
    h("p", {}, `The key ${key.name}, shown this once:`),
    h("p", { class: "tools" },
      h("code", {}, plain), h("button", { type: "button", onclick: () => attempt(copy) }, "Copy")),
  ];
}

function makeKey(key, refresh) {
  const revoke = async () => {
    const text = key.is_current
      ? `${key.name} is the key that you are signed in with: you and every script that uses it will be kept out.`
      : `Every script that uses ${key.name} will be kept out at once.`;
    if (!(await confirmed("Revoke this key?", `${text} This cannot be undone.`, "Revoke"))) return;
    await ask(`dashboard/api/keys/${key.key_id}`, { method: "DELETE" });
    await refresh();
  };
  return h("tr", {},
    h("td", {}, key.name), h("td", {}, key.note), h("td", { class: "id" }, key.hint),
    h("td", {}, moment(key.created)), h("td", { "data-cell": "state" }),
    h("td", { class: "actions" },
      h("button", { type: "button", class: "danger", onclick: () => attempt(revoke) }, "Revoke")),
  );
}

function updateKey(row, key) {
  const state = key.revoked === null ? (key.is_current ? "in use here" : "good") : `revoked ${moment(key.revoked)}`;
  fill(row, { state });
  row.querySelector("button").hidden = key.revoked !== null;
}
