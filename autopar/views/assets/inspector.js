// The panel at the side: all that is known of one operator, collective, parameter or region. On a phone a sheet.

const inspector = (() => {
  const place = byId("ui-inspector");
  let takesFocus = false;
  const close = () => {
    place.hidden = true;
    place.replaceChildren();
  };
  return {
    close,
    get isOpen() {
      return !place.hidden;
    },
    open(kind, title, ...parts) {
      const leave = () => goTo(`#${currentTab()}`);
      place.replaceChildren(
        h("div", { class: "inspector-head" },
          h("div", {}, kind && h("span", { class: "kind" }, kind), h("h2", { tabindex: "-1" }, dotted(title))),
          h("button", { type: "button", class: "icon", "aria-label": "Close the inspector", onclick: leave }, "×")),
        h("div", { class: "inspector-body" }, parts),
      );
      place.hidden = false;
      place.scrollTop = 0;
      if (takesFocus) this.focus();
      takesFocus = false;
    },
    /** The next answer gets the focus: who searched wants to read on there. */
    focusNext() {
      takesFocus = true;
    },
    focus() {
      const head = place.querySelector("h2");
      if (head) head.focus({ preventScroll: true });
    },
  };
})();

/** Opens the inspector on the item of `key`; closes it where there is no key. */
function inspectItem(key) {
  if (!key) return inspector.close();
  const item = items[key];
  if (!item) return inspector.open("", key, emptyNote("The report knows nothing of this name. Search for another one."));
  const parameter = parameterByName.get(item.parameter);
  const said = new Set(list(item.facts).map(([label]) => label));
  inspector.open(
    item.kind,
    item.name || key,
    item.title && item.title !== item.name && h("p", { class: "lead" }, item.title),
    factList([
      ["Module", !said.has("Module") && item.module && dotted(item.module)],
      ["Region", item.region],
      ["Source", item.source && h("span", { class: "mono" }, item.source)],
      ["Phase", item.phase],
      ...list(item.facts),
      ["Parameter", item.parameter && h("a", { href: parameterLink(item.parameter) }, dotted(item.parameter))],
      ["Program", isNumber(item.line) && h("a", { href: lineLink(item.line) }, `line ${item.line}`)],
    ]),
    parameter && parameter.placement && shardBoxes(parameter, { compact: true }),
    explanationPart(item.explain || item.parameter),
    memberPart(list(item.members)),
  );
}

/** Opens the inspector on a class of parameters; all but its boxes, which its tab shows larger. */
function inspectParameter(parameter) {
  const key = parameter.item;
  const item = items[key] || {};
  inspector.open(
    parameter.count > 1 ? `parameter × ${parameter.count}` : "parameter",
    parameter.name,
    factList([
      ["Shape", h("span", { class: "mono" }, `${parameter.dtype || ""}[${list(parameter.shape).join(", ")}]`)],
      ["Stored", h("span", { class: "mono" }, parameter.stored)],
      ["Used", parameter.used && h("span", { class: "mono" }, parameter.used)],
      ["Gradient", parameter.gradient && h("span", { class: "mono" }, parameter.gradient)],
      ["A rank stores", formatBytes(parameter.bytes_a_rank)],
      ["Elements", formatWhole(parameter.elements)],
      ["Region", parameter.region],
      [stageAxis ? `On ${stageAxis.name}` : "Stages", list(parameter.stages).length ? parameter.stages.join(", ") : null],
      ["Graph", key && items[key] && h("a", { href: graphLink(key) }, "where it is used")],
      ["Program", isNumber(item.line) && h("a", { href: lineLink(item.line) }, `line ${item.line}`)],
    ]),
    explanationPart(parameter.name),
    namesPart(list(parameter.members)),
  );
}

function explanationPart(name) {
  if (!name) return null;
  const explanation = (content.explanations || {})[name];
  if (explanation) return explanationOf(explanation);
  return h("section", { class: "part" },
    h("h3", {}, "Why, and what else there was"),
    h("p", { class: "muted" }, "The report does not hold this answer. Ask for it:"),
    commandLine(`autopar explain plan.json ${/[\s*?$'"]/.test(name) ? `'${name}'` : name}`));
}

function memberPart(keys) {
  const known = keys.filter((key) => items[key]);
  if (!known.length) return null;
  return h("section", { class: "part" }, h("h3", {}, `Inside: ${formatWhole(known.length)}`),
    longList(known.map((key) =>
      h("li", {}, h("a", { href: graphLink(key), class: "mono" }, items[key].name || key), " ", h("span", { class: "muted" }, items[key].title)))));
}

function namesPart(names) {
  if (names.length < 2) return null;
  return h("details", { class: "part" }, h("summary", {}, `${formatWhole(names.length)} tensors`),
    longList(names.map((name) => h("li", {}, dotted(name))), 40));
}
