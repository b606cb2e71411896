// Layers of experts: tokens of an expert and of a rank, and what bringing them there takes.

const expertsView = { id: "experts", label: "Experts", make: makeExperts };

function makeExperts(panel) {
  const rows = list(content.experts);
  panel.classList.add("fills");
  const table = makeTable(expertColumns(rows.some((row) => isNumber(row.measured))), {
    rows, label: "Layers of experts", href: (row) => graphLink(row.item), words: (row) => [row.module, row.split, row.axis].join(" "),
  });
  append(panel, [
    h("p", { class: "muted" }, expertWords(rows)),
    h("div", { class: "scroll grows" }, table.element),
  ]);
  return {};
}

/** What the numbers stand for, and the exchanges of a step in one sentence. */
function expertWords(rows) {
  const first = "Numbers are of one rank and one call, as if every choice of experts were as likely.";
  const sending = rows.filter((row) => row.axis);
  if (!sending.length) return `${first} No tokens travel: ${rows.map((row) => row.split)[0] || "every rank has all of both"}.`;
  const ofStep = (of) => sending.reduce((sum, row) => sum + row.times * of(row), 0);
  const seconds = ofStep((row) => row.forward_s + row.backward_s);
  const hidden = ofStep(hiddenOfLayer);
  const most = Math.max(...sending.map((row) => row.busiest_rows / row.rows));
  return `${first} Seconds are of the busiest rank, which is taken to get ${threeDigits(most)} times the mean; autopar.expert_imbalance measures it. `
    + `All exchanges of a step take ${formatSeconds(seconds)}${isNumber(headline.bubble) ? ", on all stages" : ""}, ${hidden ? `${formatSeconds(hidden)} of it while something else computes` : "beside nothing that computes"}.`;
}

function expertColumns(isMeasured) {
  const times = (value) => `${threeDigits(value)} ×`;
  const count = (key) => ({ numeric: true, value: (row) => row[key], show: (row) => formatRows(row[key]) });
  return [
    { title: "Layer", wide: true, hint: "and what is split", value: (row) => row.module, show: (row) => [dotted(row.module), small(row.split || "nothing is split")] },
    { title: "Calls", numeric: true, hint: "in a step", value: (row) => row.times, show: (row) => formatWhole(row.times) },
    { title: "Experts", numeric: true, hint: "of the layer, how many each token chooses, and how many a rank has", value: (row) => row.experts, show: (row) => [`${row.experts}`, small(`${row.chosen} a token`), small(`${row.here} a rank`)] },
    { title: "Tokens", hint: "of a rank, before any go to their experts", ...count("tokens") },
    { title: "Per expert", hint: "tokens that choose it, on the average", ...count("expert_rows") },
    { title: "Per rank", hint: "choices of experts that a rank multiplies: on the average, and the busiest one", numeric: true, value: (row) => row.rows, show: (row) => [formatRows(row.rows), small(`${formatRows(row.busiest_rows)} the busiest`)] },
    ...(isMeasured ? [{ title: "Measured", hint: "by the loads that were handed in: tokens of the busiest rank, a mean rank's being 1; after compiled.place_experts, and with a guest a rank", numeric: true, value: (row) => row.measured || 0, show: (row) => (isNumber(row.measured) ? [times(row.measured), small(`${times(row.placed)} placed`), small(`${times(row.visited)} with guests`)] : MISSING) }] : []),
    { title: "A guest", hint: "what an expert of another rank takes at most where it visits (compiled.place_experts with replicas), while the layer runs, beside the plan's memory", numeric: true, value: (row) => row.guest_bytes || 0, show: (row) => (row.guest_bytes ? formatBytes(row.guest_bytes) : MISSING) },
    { title: "Round", hint: "tokens that a rank takes at once at most; where more come, all take several rounds", numeric: true, value: (row) => row.round_rows, show: (row) => (row.round_rows ? formatWhole(row.round_rows) : MISSING) },
    { title: "Exchange", hint: "forward, backward: seconds, and bytes that a rank sends", numeric: true, value: (row) => (row.axis ? row.forward_s + row.backward_s : 0), show: (row) => (row.axis ? [exchangeCost(row, "forward"), small(exchangeCost(row, "backward"))] : h("span", { class: "muted" }, MISSING)) },
    { title: "Hidden", hint: "of the exchange, forward, backward: the part that lies under other work of the layer", numeric: true, value: (row) => (row.axis ? hiddenOfLayer(row) : 0), show: (row) => (row.axis ? [hiddenShareOfLayer(row, "forward"), small(hiddenShareOfLayer(row, "backward"))] : h("span", { class: "muted" }, MISSING)) },
    { title: "Computing", hint: "forward, backward", numeric: true, value: (row) => row.forward_compute_s + row.backward_compute_s, show: (row) => [formatSeconds(row.forward_compute_s), small(formatSeconds(row.backward_compute_s))] },
  ];
}

/** A second line of a cell. */
const small = (text) => h("div", { class: "where" }, text);

function exchangeCost(row, phase) {
  return `${formatSeconds(row[`${phase}_s`])}, ${formatBytes(row[`${phase}_bytes`])}`;
}

const hiddenOfLayer = (row) => (row.forward_hidden_s || 0) + (row.backward_hidden_s || 0);

/** `62%` of a phase's exchange. */
function hiddenShareOfLayer(row, phase) {
  const seconds = row[`${phase}_s`];
  return seconds ? formatShare((row[`${phase}_hidden_s`] || 0) / seconds, 0) : MISSING;
}

function formatRows(value) {
  return isNumber(value) && value < 100 && !Number.isInteger(value) ? threeDigits(value) : formatWhole(Math.round(value));
}
