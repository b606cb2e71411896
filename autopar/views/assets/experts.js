// Layers of experts: tokens of an expert and of a rank, and what bringing them there takes.

const expertsView = { id: "experts", label: "Experts", make: makeExperts };

function makeExperts(panel) {
  const rows = list(content.experts);
  panel.classList.add("fills");
  const table = makeTable(expertColumns(), {
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
  const seconds = sending.reduce((sum, row) => sum + row.calls * (row.forward_s + row.backward_s), 0) * (rows[0].times / rows[0].calls);
  const most = Math.max(...sending.map((row) => row.busiest_rows / row.rows));
  return `${first} Seconds are of the busiest rank, which is taken to get ${threeDigits(most)} times the mean; autopar.expert_imbalance measures it. `
    + `All exchanges of a step take ${formatSeconds(seconds)}${isNumber(headline.bubble) ? ", on all stages" : ""}, beside nothing that computes.`;
}

function expertColumns() {
  const count = (key) => ({ numeric: true, value: (row) => row[key], show: (row) => formatRows(row[key]) });
  const cost = (phase) => ({ numeric: true, value: (row) => row[`${phase}_s`], show: (row) => exchangeCost(row, phase) });
  return [
    { title: "Layer", wide: true, value: (row) => row.module, show: (row) => dotted(row.module) },
    { title: "Calls", numeric: true, hint: "in a step", value: (row) => row.times, show: (row) => formatWhole(row.times) },
    { title: "Experts", numeric: true, hint: "of the layer, and how many each token chooses", value: (row) => row.experts, show: (row) => [`${row.experts}`, h("div", { class: "where" }, `${row.chosen} a token`)] },
    { title: "Split", value: (row) => row.split, show: (row) => row.split || "nothing" },
    { title: "On a rank", hint: "experts that a rank has", ...count("here") },
    { title: "Tokens", hint: "of a rank, before any go to their experts", ...count("tokens") },
    { title: "An expert gets", hint: "tokens that choose it, on the average", ...count("expert_rows") },
    { title: "A rank gets", hint: "choices of experts that a rank multiplies: on the average, and the busiest one", numeric: true, value: (row) => row.rows, show: (row) => [formatRows(row.rows), h("div", { class: "where" }, `${formatRows(row.busiest_rows)} the busiest`)] },
    { title: "A round", hint: "tokens that a rank takes at once at most; where more come, all take several rounds", numeric: true, value: (row) => row.round_rows, show: (row) => (row.round_rows ? formatWhole(row.round_rows) : MISSING) },
    { title: "Exchange forward", hint: "seconds, and bytes that a rank sends", ...cost("forward") },
    { title: "Exchange backward", hint: "seconds, and bytes that a rank sends", ...cost("backward") },
    { title: "Computing", hint: "forward, backward", numeric: true, value: (row) => row.forward_compute_s + row.backward_compute_s, show: (row) => [formatSeconds(row.forward_compute_s), h("div", { class: "where" }, formatSeconds(row.backward_compute_s))] },
  ];
}

function exchangeCost(row, phase) {
  if (!row.axis || !row[`${phase}_bytes`]) return h("span", { class: "muted" }, MISSING);
  return [formatSeconds(row[`${phase}_s`]), h("div", { class: "where" }, `${formatBytes(row[`${phase}_bytes`])} over ${row.axis}`)];
}

function formatRows(value) {
  return isNumber(value) && value < 100 && !Number.isInteger(value) ? threeDigits(value) : formatWhole(Math.round(value));
}
