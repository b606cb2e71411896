// The search of the header: a field and a list of what was found (ARIA's combobox with a listbox).

const SEARCH_RESULTS = 30;

function makeSearch(place) {
  const results = h("ul", { role: "listbox", id: "ui-results", "aria-label": "Found", hidden: true });
  const field = h("input", {
    type: "search", id: "ui-search-field", role: "combobox", placeholder: "Search operators, parameters, rank 3 …",
    "aria-label": "Search operators, modules, parameters, collectives, ranks, stages, tabs", "aria-expanded": "false", "aria-controls": "ui-results",
    "aria-autocomplete": "list", autocomplete: "off", spellcheck: "false",
  });
  let found = [];
  let active = -1;

  function update() {
    const answer = findEntries(field.value, SEARCH_RESULTS);
    found = answer.found;
    results.replaceChildren(...found.map((one, index) => resultLine(one, index, pick)));
    const left = answer.total - found.length;
    if (left > 0) results.append(h("li", { class: "left", role: "presentation" }, `and ${formatWhole(left)} more: type more of the name`));
    if (field.value.trim() && !found.length) results.append(h("li", { class: "left", role: "presentation" }, "Nothing has this name."));
    open(Boolean(field.value.trim()));
    activate(found.length ? 0 : -1);
  }

  function open(is) {
    results.hidden = !is;
    field.setAttribute("aria-expanded", String(is));
  }

  function activate(index) {
    active = index;
    [...results.querySelectorAll("[role=option]")].forEach((line, at) => {
      line.setAttribute("aria-selected", String(at === index));
      if (at === index) line.scrollIntoView({ block: "nearest" });
    });
    if (index >= 0) field.setAttribute("aria-activedescendant", `ui-result-${index}`);
    else field.removeAttribute("aria-activedescendant");
  }

  function pick(index) {
    if (!found[index]) return;
    open(false);
    field.blur();
    inspector.focusNext();
    goTo(found[index].href);
  }

  field.addEventListener("input", update);
  field.addEventListener("focus", () => field.value.trim() && update());
  field.addEventListener("blur", () => setTimeout(() => open(false), 150));
  field.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (found.length) activate((active + (event.key === "ArrowDown" ? 1 : found.length - 1)) % found.length);
    } else if (event.key === "Enter") {
      pick(active);
    } else if (event.key === "Escape") {
      event.stopPropagation();
      open(false);
      field.blur();
    }
  });
  place.append(field, h("kbd", { "aria-hidden": "true" }, "/"), results);
  return { focus: () => { field.focus(); field.select(); } };
}

function resultLine(one, index, pick) {
  return h(
    "li",
    { role: "option", id: `ui-result-${index}`, "aria-selected": "false", onpointerdown: (event) => { event.preventDefault(); pick(index); } },
    h("span", { class: "kind" }, one.kind),
    h("span", { class: "mono name" }, one.text),
    one.detail && h("span", { class: "detail" }, one.detail),
  );
}
