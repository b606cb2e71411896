// Two plans side by side: only what differs, each difference with its sign.

const compareView = { id: "compare", label: "Compare", make: makeCompare };

// Of these more is better; of seconds and bytes less is; of the rest neither is said.
const MORE_IS_BETTER = /hidden|mfu|utili[sz]ation|throughput|tokens|samples|flop\/s|per second|a second/i;
const LESS_IS_BETTER = /bubble|share of communication/i;
const NEITHER = /limit|gap/i;

function makeCompare(panel) {
  const comparisons = [...list(content.comparisons)];
  panel.classList.add("compare");
  const place = h("div", { class: "stack" });
  const choices = h("span", {});
  const said = h("p", { class: "muted", role: "status" });
  const choose = (value) => goTo(`#compare/${value}`);
  let choice = null;
  const refresh = () => {
    choice = comparisons.length ? comparisonChoice(comparisons, choose) : null;
    choices.hidden = !choice;
    choices.replaceChildren(...(choice ? [choice.element] : []));
  };
  const chooser = fileChooser((other, name) => {
    comparisons.push(compareContents(content, other, name));
    refresh();
    choose(comparisons.length - 1);
  }, said);
  refresh();
  append(panel, [h("div", { class: "toolbar" }, choices, chooser), said, place]);
  return {
    show(target) {
      if (!choice) return place.replaceChildren(noComparison());
      const index = comparisons[parseInt(target, 10)] ? parseInt(target, 10) : 0;
      choice.pick(index);
      place.replaceChildren(...comparisonParts(comparisons[index]));
    },
  };
}

function noComparison() {
  return section("No other plan to compare with",
    h("p", {}, "Choose another report that autopar wrote: it is read here and goes nowhere. Or write the page with the comparison in it:"),
    commandLine("autopar diff plan.json other.json --report plan.html"));
}

/** {element, pick}: buttons, or a list where they are many. */
function comparisonChoice(comparisons, choose) {
  const options = comparisons.map((one, index) => [String(index), one.title]);
  if (comparisons.length <= 4) {
    const buttons = segmented("Comparison", options, "0", choose);
    return { element: buttons.element, pick: (index) => buttons.pick(String(index), true) };
  }
  const element = h("select", { "aria-label": "Comparison", onchange: (event) => choose(event.target.value) }, options.map(([value, text]) => h("option", { value }, text)));
  return { element, pick: (index) => (element.value = String(index)) };
}

/** A button that reads another report from disk; onRead(its content, its name). said: where problems are told. */
function fileChooser(onRead, said) {
  const field = h("input", {
    type: "file", accept: ".html,.htm,.json", hidden: true, "aria-label": "Another report", onchange: async () => {
      const file = field.files[0];
      if (!file) return;
      said.textContent = "";
      try {
        onRead(await readReport(file), file.name.replace(/\.(html?|json)$/i, ""));
      } catch (error) {
        said.textContent = error.message;
      }
      field.value = "";
    },
  });
  return h("span", {}, field, h("button", { type: "button", class: "small", onclick: () => field.click() }, "Compare with another report …"));
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
