// Two plans side by side: only what differs, each difference with its sign.

const compareView = { id: "compare", label: "Compare", make: makeCompare };

// Of these more is better; of seconds and bytes less is; of the rest neither is said.
const MORE_IS_BETTER = /hidden|mfu|utili[sz]ation|throughput|tokens|samples|flop\/s|per second|a second/i;
const LESS_IS_BETTER = /bubble|share of communication/i;
const NEITHER = /limit|gap/i;

function makeCompare(panel) {
  const comparisons = list(content.comparisons);
  if (!comparisons.length) {
    panel.append(emptyNote("The report holds no other plan to compare with."));
    return {};
  }
  panel.classList.add("compare");
  const place = h("div", { class: "stack" });
  const options = comparisons.map((one, index) => [String(index), one.title]);
  const few = comparisons.length <= 4;
  const choose = (value) => goTo(`#compare/${value}`);
  const choice = few
    ? segmented("Comparison", options, "0", choose)
    : { element: h("select", { "aria-label": "Comparison", onchange: (event) => choose(event.target.value) }, options.map(([value, text]) => h("option", { value }, text))) };
  append(panel, [h("div", { class: "toolbar" }, choice.element), place]);
  return {
    show(target) {
      const index = comparisons[parseInt(target, 10)] ? parseInt(target, 10) : 0;
      if (few) choice.pick(String(index), true);
      else choice.element.value = String(index);
      place.replaceChildren(...comparisonParts(comparisons[index]));
    },
  };
}

function comparisonParts(one) {
  return [
    section(one.title, one.summary && h("p", { class: "bound" }, one.summary),
      h("p", { class: "muted" }, "Differences are from ", h("b", {}, one.left), " to ", h("b", {}, one.right), ": ",
        h("span", { class: "delta is-better" }, "better"), ", ", h("span", { class: "delta is-worse" }, "worse"), ".")),
    differencesCard("Numbers", list(one.numbers), numberColumns(one), "No number differs."),
    differencesCard("Settings", list(one.settings), settingColumns(one), "The settings are the same."),
    differencesCard("Parameters", list(one.parameters), [
      { title: "Parameter", wide: true, value: (row) => row.name, show: (row) => dotted(row.name) },
      { title: "Tensors", numeric: true, value: (row) => row.count, show: (row) => formatWhole(row.count) },
      ...sides(one, (row, side) => h("span", { class: "mono" }, row[side] || MISSING), (row, side) => row[side]),
    ], "All parameters lie the same.", (row) => (parameterByName.has(row.name) ? parameterLink(row.name) : null)),
    differencesCard("Collectives", list(one.collectives), collectiveDifferences(one), "The collectives are the same."),
  ];
}

function differencesCard(title, rows, columns, none, href) {
  if (!rows.length) return section(title, h("p", { class: "muted" }, none));
  return section(title, h("div", { class: "scroll" }, makeTable(columns, { rows, label: title, href }).element));
}

function sides(one, show, value, numeric = false) {
  return [["left", one.left], ["right", one.right]].map(([side, name]) => ({ title: name || side, numeric, value: (row) => value(row, side), show: (row) => show(row, side) }));
}

function numberColumns(one) {
  return [
    { title: "", value: (row) => row.what, show: (row) => row.what },
    ...sides(one, (row, side) => formatUnit(row[side], row.unit), (row, side) => row[side], true),
    { title: "Difference", numeric: true, value: (row) => row.right - row.left, show: (row) => numberDelta(row) },
    { title: "Relative", numeric: true, value: (row) => row.right / row.left - 1, show: (row) => (isNumber(row.left) && isNumber(row.right) && row.left ? formatDelta(row.right / row.left - 1, formatShare) : MISSING) },
  ];
}

function numberDelta(row) {
  if (!isNumber(row.left) || !isNumber(row.right)) return MISSING;
  const more = NEITHER.test(row.what) ? null : MORE_IS_BETTER.test(row.what) || row.unit === "FLOP/s" ? true : row.unit === "s" || row.unit === "B" || LESS_IS_BETTER.test(row.what) ? false : null;
  // A difference of shares is in points: 41.2% to 43.6% is 2.4 points, and 5.8% more.
  return delta(row.right - row.left, (value) => (row.unit === "%" ? `${(value * 100).toFixed(1)} points` : formatUnit(value, row.unit)), more);
}

function settingColumns(one) {
  return [{ title: "", value: (row) => row.what, show: (row) => row.what }, ...sides(one, (row, side) => row[side] || MISSING, (row, side) => row[side])];
}

function collectiveDifferences(one) {
  return [
    { title: "Collective", wide: true, value: (row) => row.what, show: (row) => row.what },
    ...sides(one, (row, side) => [formatBytes(row[`${side}_bytes`]), h("div", { class: "muted" }, formatSeconds(row[`${side}_s`]))], (row, side) => row[`${side}_bytes`], true),
    { title: "Bytes", numeric: true, value: (row) => row.right_bytes - row.left_bytes, show: (row) => delta(row.right_bytes - row.left_bytes, formatBytes) },
    { title: "Time", numeric: true, value: (row) => row.right_s - row.left_s, show: (row) => delta(row.right_s - row.left_s, formatSeconds) },
  ];
}
