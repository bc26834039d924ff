// One prompt, two models, side by side as their tokens come.

import { ask, stream } from "./api.js";
import { h } from "./dom.js";
import { counted, runName } from "./format.js";
import { attempt } from "./notice.js";

export const title = "Playground";

const KINDS = { base: "Base models", training_run: "Runs, as they are now", checkpoint: "Checkpoints" };

export function show(main, { signal }) {
  const chat = h("input", { type: "radio", name: "kind", value: "chat", checked: true });
  const plain = h("input", { type: "radio", name: "kind", value: "plain" });
  const prompt = h("textarea", { rows: "5", required: true, "aria-label": "Prompt", placeholder: "Prompt" });
  const temperature = h("input", { type: "number", min: "0", max: "2", step: "0.1", value: "1", class: "short" });
  const tokens = h("input", { type: "number", min: "1", max: "32768", step: "1", value: "256", class: "short" });
  const go = h("button", { class: "primary" }, "Run");
  const stop = h("button", { type: "button", disabled: true }, "Stop");
  const sides = [new Side("A"), new Side("B")];
  let running = null;

  const submit = async (event) => {
    event.preventDefault();
    if (running) return;
    running = new AbortController();
    [go.disabled, stop.disabled] = [true, false];
    const common = { temperature: Number(temperature.value), max_tokens: Number(tokens.value), stream: true };
    const asked = chat.checked
      ? { path: "v1/chat/completions", body: { ...common, messages: [{ role: "user", content: prompt.value }] } }
      : { path: "v1/completions", body: { ...common, prompt: prompt.value } };
    await Promise.all(sides.map((side) => side.run(asked, AbortSignal.any([signal, running.signal]))));
    running = null;
    [go.disabled, stop.disabled] = [false, true];
  };
  stop.addEventListener("click", () => running?.abort());
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
  });

  main.append(
    h("div", { class: "head" }, h("h1", {}, "Playground")),
    h("form", { class: "ask", onsubmit: submit },
      prompt,
      h("div", { class: "tools" },
        h("fieldset", {}, h("legend", { class: "unseen" }, "How the prompt is sent"),
          h("label", { class: "check" }, chat, "Chat"), h("label", { class: "check" }, plain, "Plain text")),
        h("label", { class: "check" }, "Temperature", temperature),
        h("label", { class: "check" }, "Max tokens", tokens),
        stop, go,
      ),
      h("div", { class: "sides" }, sides.map((side) => side.element)),
    ),
  );
  attempt(async () => {
    const { data } = await ask("v1/models", { signal });
    sides.forEach((side, place) => side.offer(data, place));
  });
}

/** One model and what it says. */
class Side {
  constructor(name) {
    this.choice = h("select", { "aria-label": `Model ${name}` });
    this.output = h("pre", { class: "output", "aria-live": "polite", "aria-label": `Answer of model ${name}` });
    this.status = h("p", { class: "hint" }, "\u00a0");
    this.element = h("section", { "aria-label": `Model ${name}` }, this.choice, this.output, this.status);
  }

  /** The base model on one side, and what was made last on the other. */
  offer(models, place) {
    for (const [kind, label] of Object.entries(KINDS)) {
      const ids = models.filter((model) => model.kind === kind).map(({ id }) => id);
      const options = ids.map((id) => h("option", { value: id }, shownName(id)));
      if (options.length) this.choice.append(h("optgroup", { label }, options));
    }
    const made = models.filter((model) => model.kind !== "base").sort((a, b) => b.created - a.created);
    this.choice.value = (place === 1 && made[0] ? made[0] : models[0]).id;
  }

  async run({ path, body }, signal) {
    const started = performance.now();
    let [pieces, first, reason, tokens] = [0, null, null, null];
    this.output.textContent = "";
    this.output.setAttribute("aria-busy", "true"); // read aloud as a whole
    this.output.classList.remove("trouble");
    const tellStatus = () => {
      const seconds = (performance.now() - (first ?? started)) / 1000;
      const amount = tokens ?? pieces;
      const parts = [counted(amount, "token")];
      if (first !== null) parts.push(`first after ${Math.round(first - started)} ms`);
      if (amount > 1) parts.push(`${(amount / seconds).toFixed(0)} tokens/s`);
      if (reason) parts.push(reason);
      this.status.textContent = parts.join(" · ");
    };
    this.status.textContent = "waiting";
    try {
      const asked = { ...body, model: this.choice.value, stream_options: { include_usage: true } };
      for await (const event of stream(path, asked, signal)) {
        if (event.error) throw new Error(event.error.message);
        const choice = event.choices?.[0];
        const text = choice?.delta?.content ?? choice?.text ?? "";
        if (text) {
          first ??= performance.now();
          pieces += 1;
          this.output.append(text);
        }
        reason = choice?.finish_reason ?? reason;
        tokens = event.usage?.completion_tokens ?? tokens;
        tellStatus();
      }
    } catch (error) {
      if (signal.aborted) reason = "stopped";
      else this.#fail(error);
      tellStatus();
    }
    this.output.setAttribute("aria-busy", "false");
  }

  #fail(error) {
    this.output.classList.add("trouble");
    this.output.append(h("span", {}, error.message));
  }
}

/** `tinker://run/weights/name`, `tinker://run/sampler_weights/name`, a run, or a base model as it is. */
function shownName(id) {
  if (!id.startsWith("tinker://")) return runName(id);
  const [run, kind, name] = id.slice("tinker://".length).split("/");
  return `${name} of ${runName(run)}${kind === "weights" ? "" : " (sampler)"}`;
}
