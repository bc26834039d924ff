// The door: asks for a key, and says why it was not taken.

import { signIn } from "./api.js";
import { h, prose } from "./dom.js";

/** `enter(signIn)` goes in with what `signIn` stores, or throws. */
export function show(main, enter) {
  document.title = "Sign in · Tinsmith";
  const key = h("input", {
    type: "password", name: "key", required: true, autocomplete: "current-password", placeholder: "tml-…",
    pattern: "\\s*[!-~]+\\s*", title: "letters, digits, - and _", // no header can hold anything else
  });
  const stays = h("input", { type: "checkbox", name: "stay" });
  const button = h("button", { class: "primary" }, "Sign in");
  const trouble = h("p", { class: "trouble", role: "alert" });
  const submit = async (event) => {
    event.preventDefault();
    button.disabled = true;
    trouble.textContent = "";
    try {
      await enter(() => signIn(key.value.trim(), stays.checked));
    } catch (error) {
      trouble.replaceChildren(...prose(error.message));
      button.disabled = false;
      key.select();
    }
  };
  main.append(
    h("form", { class: "login", onsubmit: submit },
      h("h1", {}, "Sign in"),
      h("label", {}, "API key", key),
      h("label", { class: "check" }, stays, "Stay signed in on this device"),
      button,
      trouble,
      h("p", { class: "hint" },
        "The key that your scripts use as ", h("code", {}, "TINKER_API_KEY"), ". New ones are made by ",
        h("code", {}, "tinsmith keys create"), ", run where the server is."),
    ),
  );
  key.focus();
}
