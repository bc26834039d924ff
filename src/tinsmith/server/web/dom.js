// Elements. Whatever comes from a server becomes text here, never markup.

/** An element with properties (`on...` are listeners, other names attributes) and children (elements or texts). */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (typeof value === "boolean") element.toggleAttribute(name, value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

/** The parts of a text in which what stands between backticks is code. */
export function prose(text) {
  return text.split("`").map((part, place) => (place % 2 ? h("code", {}, part) : part));
}

/** A table that scrolls sideways by itself when it is too wide. `columns` are [title, class] pairs. */
export function table(label, columns, body = h("tbody")) {
  const heads = columns.map(([title, kind]) => h("th", { scope: "col", class: kind }, title));
  const whole = h("table", { "aria-label": label }, h("thead", {}, h("tr", {}, heads)), body);
  return h("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" }, whole);
}

export function empty(...text) {
  return h("p", { class: "empty" }, ...text);
}

/**
 * Make the children of `parent` those of `items`, in their order. An element whose key was there before stays, so that
 * focus, selection and what is folded out survive; `make(item)` gives a new one and `update(element, item)` brings it
 * up to date.
 */
export function keep(parent, items, keyOf, make, update = () => {}) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let element = old.get(key);
    if (element === undefined) {
      element = make(item);
      element.dataset.key = key;
    }
    old.delete(key);
    update(element, item);
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
  }
  for (const gone of old.values()) gone.remove();
}

/** Put `texts` into the cells of a row that carry the names of its keys in `data-cell`, where they have changed. */
export function fill(row, texts) {
  for (const [name, text] of Object.entries(texts)) {
    const cell = row.querySelector(`[data-cell="${name}"]`);
    if (cell.textContent !== text) cell.textContent = text;
  }
}

/** Ask before something that cannot be undone. */
export function confirmed(title, text, action) {
  const dialog = document.getElementById("confirm");
  dialog.querySelector("h2").textContent = title;
  dialog.querySelector("p").textContent = text;
  dialog.querySelector("button.danger").textContent = action;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}
