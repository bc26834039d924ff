// Asking again and again, as long as somebody looks and the server answers.

import { Refused, Unreachable } from "./api.js";
import { hush, tell } from "./notice.js";

const LONGEST = 30;

/** Do `work` every `seconds` while the tab is visible, until `signal`; less and less often while it fails. */
export async function poll(work, seconds, signal) {
  let failures = 0;
  while (!signal.aborted) {
    await visible(signal);
    try {
      await work();
      if (failures > 0) hush();
      failures = 0;
    } catch (error) {
      if (signal.aborted || error.status === 401) return;
      if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
      if (error.status === 404) return tell(error.message); // it will not come by itself
      const pause = Math.min(LONGEST, Math.max(seconds * 2 ** failures, error.retryAfter ?? 0));
      failures += 1;
      tell(`${error.message} Trying again in ${Math.round(pause)} s.`);
      await wait(pause, signal);
      continue;
    }
    await wait(seconds, signal);
  }
}

function wait(seconds, signal) {
  return new Promise((resolve) => {
    const end = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", end);
      resolve();
    };
    const timer = setTimeout(end, 1000 * seconds);
    signal.addEventListener("abort", end);
  });
}

function visible(signal) {
  if (document.visibilityState === "visible") return Promise.resolve();
  return new Promise((resolve) => {
    const look = () => document.visibilityState === "visible" && resolve();
    document.addEventListener("visibilitychange", look, { signal });
    signal.addEventListener("abort", resolve, { once: true });
  });
}
