// Samples as they are produced.

import { ask } from "./api.js";
import { empty, h, keep } from "./dom.js";
import { clock, count, counted, number, runName } from "./format.js";
import { ofRun } from "./parts.js";
import { poll } from "./polling.js";

export const title = "Samples";

const SECONDS = 2;
const MOST = 50;
const LONG = 600;

export function show(main, { query, signal }) {
  const runId = query.get("run");
  const list = h("ol", { class: "samples", "aria-label": "Samples, newest first" });
  const none = empty("No samples yet. They appear here while they are being produced, and go when their results do.");
  none.hidden = true;
  main.append(h("div", { class: "head" }, h("h1", {}, title), ofRun("samples", runId)), list, none);
  poll(async () => {
    const { samples } = await ask("dashboard/api/samples", { query: { run_id: runId, limit: MOST }, signal });
    keep(list, samples, (sample) => sample.request_id, make);
    none.hidden = samples.length > 0;
  }, SECONDS, signal);
}

function make(sample) {
  const from = sample.run_id ? runName(sample.run_id) : (sample.model_path ?? sample.base_model);
  return h("li", {},
    h("p", { class: "about" },
      h("time", { datetime: new Date(1000 * sample.time).toISOString() }, clock(sample.time)),
      h("span", { class: "id", title: sample.model_path ?? sample.run_id ?? sample.base_model }, from),
      h("span", { class: "reward" }, sample.reward === null ? "" : `reward ${number(sample.reward)}`),
    ),
    text("prompt", sample.prompt),
    sample.completions.map((completion) => h("div", { class: "completion" },
      text("completion", completion.text),
      h("p", { class: "hint" }, `${counted(completion.tokens, "token")} · ${completion.stop_reason}`),
    )),
  );
}

function text(kind, content) {
  if (content.length <= LONG) return h("pre", { class: kind }, content);
  const begin = `${content.slice(0, LONG / 2)} … `;
  const summary = h("summary", {}, begin, h("span", { class: "hint" }, `${count(content.length)} characters`));
  return h("details", { class: kind }, summary, h("pre", {}, content));
}
