// Making elements. Texts become text nodes, never markup: names of a model may hold anything.

/** h("a", {href, class, onclick}, "text", node, [more]). Null and false children are left out. */
function h(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
function s(tag, attributes, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") element.style.cssText = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function append(element, children) {
  for (const child of children) {
    if (Array.isArray(child)) append(element, child);
    else if (child !== null && child !== undefined && child !== false) element.append(child);
  }
}

function byId(id) {
  return document.getElementById(id);
}

function list(value) {
  return Array.isArray(value) ? value : [];
}

function section(title, ...children) {
  return h("section", { class: "card" }, title && h("h2", {}, title), ...children);
}

function emptyNote(text) {
  return h("p", { class: "empty" }, text);
}

/** Label and text in two columns; rows without a text are left out. */
function factList(facts) {
  const rows = facts.filter(([, text]) => text !== null && text !== undefined && text !== false && text !== "");
  return h("dl", { class: "facts" }, rows.map(([label, text]) => [h("dt", {}, label), h("dd", {}, text)]));
}

/** A list of which the first `most` are shown, and the others by a button that says how many. */
function longList(nodes, most = 20) {
  const place = h("ul", { class: "names" }, nodes.slice(0, most));
  if (nodes.length <= most) return place;
  const more = h("button", {
    type: "button", class: "small", onclick: () => {
      place.append(...nodes.slice(most));
      const next = nodes[most].querySelector("a");
      if (next) next.focus({ preventScroll: true });
      more.remove();
    },
  }, `Show all ${formatWhole(nodes.length)}`);
  return [h("p", { class: "muted" }, `The first ${formatWhole(most)} of ${formatWhole(nodes.length)}:`), place, more];
}

/** A command that can be copied. */
function commandLine(text) {
  const copy = h("button", { type: "button", class: "small", onclick: () => copyText(text, copy) }, "Copy");
  return h("div", { class: "command" }, h("code", {}, text), copy);
}

function copyText(text, button) {
  const done = (word) => {
    button.textContent = word;
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  if (!navigator.clipboard) return done("Select it");
  navigator.clipboard.writeText(text).then(() => done("Copied"), () => done("Select it"));
}

/** One of several ways to show something: buttons, of which one is pressed. */
function segmented(label, options, chosen, onChoose) {
  const buttons = options.map(([value, text]) =>
    h("button", { type: "button", "aria-pressed": String(value === chosen), onclick: () => pick(value) }, text),
  );
  const pick = (value, silent) => {
    options.forEach(([option], index) => buttons[index].setAttribute("aria-pressed", String(option === value)));
    if (!silent) onChoose(value);
  };
  return { element: h("div", { class: "segmented", role: "group", "aria-label": label }, buttons), pick };
}

/** Calls `work` once a frame, however often it is asked. */
function oncePerFrame(work) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      work();
    });
  };
}

/** A small box beside the pointer. rows: strings, the first one bold. */
function showTip(rows, x, y) {
  const tip = byId("ui-tip");
  tip.replaceChildren(...rows.map((row, index) => h(index ? "div" : "strong", {}, row)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width > innerWidth ? Math.max(4, x - width - 14) : x + 14;
  const top = y + 14 + height > innerHeight ? Math.max(4, y - height - 14) : y + 14;
  tip.style.transform = `translate(${left}px, ${top}px)`;
}

function hideTip() {
  byId("ui-tip").hidden = true;
}
