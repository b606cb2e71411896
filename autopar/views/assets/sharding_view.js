// Parameters: the classes, where each one's pieces lie, and all that one rank holds.

const shardingView = { id: "sharding", label: "Sharding", make: makeSharding };

function makeSharding(panel) {
  if (!parameters.length) {
    panel.append(emptyNote("The report lists no parameters."));
    return {};
  }
  panel.classList.add("sharding");
  const boxes = h("div", { class: "card", id: "ui-boxes" });
  const summary = h("span", { class: "muted" });
  const classes = makeTable(classColumns(), {
    rows: parameters, label: "Classes of parameters", href: (row) => parameterLink(row.name), sort: [5, true],
    words: (row) => [row.name, row.stored, row.region, ...list(row.members)].join(" "),
    counted: (rows) => (summary.textContent = `${plural(rows.length, "class", "classes")}, ${formatBytes(rows.reduce((sum, row) => sum + (row.bytes_a_rank || 0), 0))} a rank`),
  });
  const holdings = makeHoldings();
  const mode = segmented("What to list", [["classes", "All parameters"], ["rank", "What one rank holds"]], "classes", (value) => goTo(value === "rank" ? "#sharding/rank" : "#sharding"));
  const filter = filterField("Filter by name, sharding", (text) => {
    classes.filter(text);
    holdings.table.filter(text);
  });
  append(panel, [
    h("div", { class: "toolbar" }, mode.element, filter, summary),
    boxes,
    h("div", { class: "scroll", id: "ui-classes" }, classes.element),
    holdings.element,
  ]);

  return {
    show(target) {
      const byRank = target === "rank" || target.startsWith("rank=");
      if (target.startsWith("rank=")) Object.assign(chosenRank.coordinates, coordinatesOfRank(Math.min(numRanks - 1, Math.max(0, parseInt(target.slice(5), 10) || 0)), meshAxes));
      mode.pick(byRank ? "rank" : "classes", true);
      panel.querySelector("#ui-classes").hidden = byRank;
      holdings.element.hidden = !byRank;
      const parameter = parameterByName.get(target) || parameters.find((one) => list(one.members).includes(target));
      boxes.hidden = byRank || !parameter;
      summary.hidden = byRank;
      if (byRank) holdings.refresh();
      if (byRank || !parameter) return inspector.close();
      boxes.replaceChildren(h("h2", {}, dotted(parameter.name)), parameter.placement ? shardBoxes(parameter) : emptyNote("The report does not say how it lies."));
      inspectParameter(parameter);
      classes.mark((row) => row === parameter);
      panel.scrollTop = 0;
    },
  };
}

function classColumns() {
  const mono = (text) => h("span", { class: "mono" }, text || "");
  return [
    { title: "Parameter", wide: true, value: (row) => row.name, show: (row) => dotted(row.name) },
    { title: "Tensors", numeric: true, value: (row) => row.count, show: (row) => formatWhole(row.count) },
    { title: "Stored", hint: "between steps", value: (row) => row.stored, show: (row) => mono(row.stored) },
    { title: "Used", hint: "by its operators, after gathers", value: (row) => row.used, show: (row) => mono(row.used) },
    { title: "Elements", numeric: true, value: (row) => row.elements, show: (row) => formatCount(row.elements) },
    { title: "A rank", numeric: true, hint: "bytes that the fullest rank stores", value: (row) => row.bytes_a_rank, show: (row) => formatBytes(row.bytes_a_rank) },
    { title: "Region", value: (row) => row.region || "", show: (row) => row.region || "" },
  ];
}

/** Table of what the chosen rank holds of every class. */
function makeHoldings() {
  const total = h("p", { class: "total", "aria-live": "polite" });
  const table = makeTable(
    [
      { title: "Parameter", wide: true, value: (row) => row.parameter.name, show: (row) => dotted(row.parameter.name) },
      { title: "Tensors", numeric: true, hint: "of the class that lie on this rank", value: (row) => row.tensors, show: (row) => formatWhole(row.tensors) },
      { title: "Range of each", value: (row) => row.text, show: (row) => h("span", { class: "mono" }, row.text) },
      { title: "Shape", value: (row) => row.local, show: (row) => h("span", { class: "mono" }, row.local) },
      { title: "Bytes of each", numeric: true, value: (row) => row.bytes, show: (row) => formatBytes(row.bytes) },
      { title: "In all", numeric: true, value: (row) => row.bytes * row.tensors, show: (row) => formatBytes(row.bytes * row.tensors) },
    ],
    { rows: [], label: "What one rank holds", href: (row) => parameterLink(row.parameter.name), words: (row) => `${row.parameter.name} ${row.text}`, sort: [5, true], empty: "This rank holds no parameters." },
  );
  const refresh = () => {
    const rows = holdingsOf(chosenRank.coordinates);
    table.setRows(rows);
    const sum = rows.reduce((bytes, row) => bytes + row.bytes * row.tensors, 0);
    total.replaceChildren(h("b", {}, `Rank ${rankOfCoordinates(chosenRank.coordinates, meshAxes)}`), ` stores ${formatBytes(sum)} of parameters, and what belongs to them: `, h("a", { href: "#memory" }, "optimizer states, gradients, activations over the step"), ".");
    selector.update();
  };
  const selector = rankSelector(refresh);
  return { element: h("div", { class: "stack", hidden: true }, h("div", { class: "card" }, selector.element, total), h("div", { class: "scroll" }, table.element)), table, refresh };
}

function holdingsOf(coordinates) {
  return parameters
    .filter((parameter) => parameter.placement && stageHolds(parameter, coordinates))
    .map((parameter) => {
      const held = heldBy(parameter.placement, coordinates);
      return { parameter, tensors: tensorsHeld(parameter, coordinates), text: rangesText(held, 3), local: `[${held.map(countIntervals).join(", ")}]`, bytes: countElements(held) * elementBytes(parameter) };
    });
}
