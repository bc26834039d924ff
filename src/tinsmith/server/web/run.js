// The curves of one run, or of several in the same charts.

import { ask } from "./api.js";
import { Chart, Group, colour } from "./chart.js";
import { empty, h } from "./dom.js";
import { counted, duration, runName } from "./format.js";
import { poll } from "./polling.js";
import { Series } from "./series.js";

export const title = "Run";
export const shelf = "runs";

const SECONDS = 2;
const MOST_POINTS = 2000;
const FIRST = ["loss", "learning_rate", "grad_norm", "tokens_per_second"];
const CLIENT = "client/";

const settings = { smoothing: 0, isLog: false }; // outlive the view: whoever likes them likes them for every run

export function show(main, { parameter, signal }) {
  const runIds = parameter.split(",").filter(Boolean);
  const group = Object.assign(new Group(), settings);
  const facts = h("ul", { class: "facts" }, runIds.map(() => h("li")));
  const charts = h("div", { class: "charts" });
  const heading = runIds.length === 1 ? runName(runIds[0]) : `${runIds.length} runs`;
  main.append(
    h("div", { class: "head" }, h("h1", { title: runIds.join("\n") }, heading), tools(group)),
    facts,
    charts,
  );
  const curves = new Curves(runIds, charts, group, signal);
  const factsOf = (runId, place) => tellFacts(facts, runId, place, runIds.length, signal);
  poll(() => Promise.all([curves.update(), ...runIds.map(factsOf)]), SECONDS, signal);
}

function tools(group) {
  const set = (changes) => group.set(Object.assign(settings, changes));
  const smoothing = h("input", {
    type: "range", min: "0", max: "0.99", step: "0.01", value: group.smoothing, "aria-label": "Smoothing",
  });
  const weight = h("output", {}, group.smoothing.toFixed(2));
  smoothing.addEventListener("input", () => {
    weight.textContent = Number(smoothing.value).toFixed(2);
    set({ smoothing: Number(smoothing.value) });
  });
  const log = h("input", { type: "checkbox", checked: group.isLog, onchange: () => set({ isLog: log.checked }) });
  const reset = h("button", { type: "button", disabled: true, onclick: () => group.set({ zoom: null }) }, "Reset zoom");
  group.addEventListener("change", () => { reset.disabled = group.zoom === null; });
  return h("div", { class: "tools" },
    h("label", { class: "check" }, "Smoothing", smoothing, weight),
    h("label", { class: "check" }, log, "Log scale"),
    reset,
  );
}

async function tellFacts(list, runId, place, of, signal) {
  const id = encodeURIComponent(runId);
  const run = await ask(`dashboard/api/runs/${id}`, { signal });
  const swatch = h("i", { class: "swatch" });
  swatch.style.background = colour(place).css;
  const quiet = Date.now() / 1000 - run.last_request;
  const said = [run.base_model, `rank ${run.rank}`, counted(run.steps, "step"), `last request ${duration(quiet)} ago`];
  const link = h("a", { href: `#/run/${id}`, class: "id", title: runId }, runName(runId));
  const item = h("li", {},
    ...(of > 1 ? [swatch, link] : [h("span", { class: "id" }, runId)]),
    run.session_name ? h("span", { class: "name" }, run.session_name) : null,
    h("span", {}, said.join(" · ")),
    h("a", { href: `#/samples?run=${id}` }, "samples"),
    h("a", { href: `#/checkpoints?run=${id}` }, "checkpoints"),
    run.corrupted === null ? null : h("strong", { class: "trouble" }, `corrupted: ${run.corrupted}`),
  );
  const old = list.children[place];
  if (!old.isEqualNode(item) && !old.contains(document.activeElement)) old.replaceWith(item);
}

/** One chart for each series that any of the runs has; only those on the screen are asked for. */
class Curves {
  #charts = new Map();

  constructor(runIds, place, group, signal) {
    this.runIds = runIds;
    this.place = place;
    this.group = group;
    this.signal = signal;
    this.observer = new IntersectionObserver((entries) => this.#seen(entries), { rootMargin: "200px" });
    signal.addEventListener("abort", () => this.observer.disconnect());
  }

  async update() {
    const lists = await Promise.all(this.runIds.map((runId) => this.#ask(runId, "series")));
    const names = lists.map((list) => new Set(list.names));
    ordered(names).forEach((name, place) => this.#charts.has(name) || this.#add(name, place));
    if (this.#charts.size === 0) this.place.replaceChildren(empty("No values yet. Curves begin with the first step."));
    const seen = [...this.#charts.values()].filter((chart) => chart.isSeen);
    await Promise.all(seen.map((chart) => this.#advance(chart, names)));
  }

  #add(name, place) {
    if (this.#charts.size === 0) this.place.replaceChildren();
    const chart = new Chart(name, this.group, this.signal);
    chart.isSeen = false;
    const lineOf = (runId, line) => ({ label: runName(runId), runId, place: line, series: new Series(), after: null });
    chart.lines = this.runIds.map(lineOf);
    this.#charts.set(name, chart);
    this.place.insertBefore(chart.element, this.place.children[place] ?? null);
    this.observer.observe(chart.element);
  }

  #seen(entries) {
    for (const { target, isIntersecting } of entries) {
      const chart = [...this.#charts.values()].find(({ element }) => element === target);
      chart.isSeen = isIntersecting;
      if (isIntersecting && chart.lines.every((line) => line.after === null)) {
        this.#advance(chart).catch(() => {}); // the next poll tries again, and tells
      }
    }
  }

  async #advance(chart, names = null) {
    const lines = chart.lines.filter((line, i) => names === null || names[i].has(chart.title));
    await Promise.all(lines.map((line) => this.#extend(chart, line)));
  }

  async #extend(chart, line) {
    if (line.isAsking) return; // the same points must not come twice
    line.isAsking = true;
    try {
      const query = { name: chart.title, after: line.after, max: MOST_POINTS };
      const { points, cursor } = await this.#ask(line.runId, "points", query);
      line.after = cursor;
      line.series.append(points);
      if (points.length) chart.draw();
    } finally {
      line.isAsking = false;
    }
  }

  #ask(runId, what, query = {}) {
    return ask(`dashboard/api/runs/${encodeURIComponent(runId)}/${what}`, { query, signal: this.signal });
  }
}

/** What everybody looks at first, then the server's other series, then those of the script. */
function ordered(sets) {
  const names = [...new Set(sets.flatMap((set) => [...set]))];
  const rank = (name) => (FIRST.includes(name) ? FIRST.indexOf(name) : name.startsWith(CLIENT) ? 101 : 100);
  return names.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
}
