// The page as a whole: who is signed in, which view is shown, and in what colours.

import { ask, asksForKey, forget, hasKey } from "./api.js";
import { hush, tell } from "./notice.js";
import * as checkpoints from "./checkpoints.js";
import * as login from "./login.js";
import * as playground from "./playground.js";
import * as run from "./run.js";
import * as runs from "./runs.js";
import * as samples from "./samples.js";
import * as server from "./server.js";

const VIEWS = { runs, run, samples, checkpoints, playground, server };
const main = document.getElementById("main");
const nav = document.querySelector("nav");
const signOut = document.getElementById("sign-out");

let shown = new AbortController();

/** `#/name/parameter?query`, each part percent-encoded. */
function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, parameter = ""] = path.split("/");
  const view = Object.hasOwn(VIEWS, name) ? name : "runs";
  return { name: view, parameter: decoded(parameter), query: new URLSearchParams(query) };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // typed by hand, and wrong: the server will say that there is no such thing
  }
}

function show() {
  shown.abort();
  shown = new AbortController();
  main.replaceChildren();
  hush();
  const isIn = hasKey();
  nav.hidden = !isIn;
  signOut.hidden = !isIn || !asksForKey;
  return isIn ? open(place()) : login.show(main, enter);
}

function open({ name, parameter, query }) {
  const view = VIEWS[name];
  for (const link of nav.children) {
    const leadsHere = link.hash === `#/${view.shelf ?? name}`;
    if (leadsHere) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view.title} · Tinsmith`;
  view.show(main, { parameter, query, signal: shown.signal });
}

/** With a key that may be wrong: nothing is shown before the server has taken it. */
async function enter(signInWithIt) {
  signInWithIt();
  try {
    await ask("dashboard/api/overview");
  } catch (error) {
    forget();
    throw error;
  }
  show();
}

const THEMES = ["auto", "light", "dark"];
const themeButton = document.getElementById("theme");

function paint(theme) {
  document.documentElement.dataset.theme = theme;
  themeButton.textContent = `Theme: ${theme}`;
  dispatchEvent(new Event("repaint"));
}

themeButton.addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  localStorage.setItem("tinsmith.theme", next);
  paint(next);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("repaint")));

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the part of the address behind # is the view's
  main.focus();
});
signOut.addEventListener("click", () => { forget(); show(); });
addEventListener("hashchange", () => {
  show();
  scrollTo(0, 0);
  main.focus({ preventScroll: true });
});
addEventListener("kept-out", ({ detail }) => {
  if (!asksForKey) return location.reload(); // it did not a moment ago: somebody has made the first key
  if (!hasKey() || nav.hidden) return; // who is about to sign in is told there
  forget();
  show();
  tell(detail.message);
});

paint(document.documentElement.dataset.theme);
show();
