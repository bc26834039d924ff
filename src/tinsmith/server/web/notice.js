// The quiet bar below the head: what went wrong last, and what happens next.

import { prose } from "./dom.js";

const bar = document.getElementById("notice");

export function tell(text, isTrouble = true) {
  if (bar.textContent !== text.replaceAll("`", "")) bar.replaceChildren(...prose(text));
  bar.classList.toggle("trouble", isTrouble);
  bar.hidden = false;
}

export function hush() {
  bar.hidden = true;
  bar.textContent = "";
}

/** Run what a button starts; an error is told instead of thrown. Gives back whether it was done. */
export async function attempt(work) {
  try {
    await work();
    return true;
  } catch (error) {
    if (error.name !== "AbortError" && error.status !== 401) tell(error.message);
    return false;
  }
}
