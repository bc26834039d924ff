// What several lists have in common.

import { h } from "./dom.js";
import { count, runName } from "./format.js";

/** Where one is in a list that is too long for one page, and the ways to its neighbours. */
export function pageLinks(view, total, offset, size) {
  if (total <= size) return [];
  const link = (text, to) => (to < 0 || to >= total ? null : h("a", { href: `#/${view}?offset=${to}` }, text));
  const shown = `${count(offset + 1)}–${count(Math.min(total, offset + size))} of ${count(total)}`;
  return [link("newer", offset - size), h("span", {}, shown), link("older", offset + size)].filter(Boolean);
}

/** Says that a list is about one run alone, and leads back to all. */
export function ofRun(view, runId) {
  if (!runId) return null;
  const name = h("a", { href: `#/run/${encodeURIComponent(runId)}`, class: "id", title: runId }, runName(runId));
  return h("p", { class: "hint" }, "of ", name, " · ", h("a", { href: `#/${view}` }, "all"));
}
