// Every collective of the program: what for, over which axis, how much, how long.

const collectivesView = { id: "collectives", label: "Collectives", make: makeCollectives };

function makeCollectives(panel) {
  const rows = list(content.collectives);
  if (!rows.length) {
    panel.append(emptyNote("The program has no collectives: no rank needs anything of another one."));
    return {};
  }
  panel.classList.add("fills");
  const summary = h("span", { class: "muted", "aria-live": "polite" });
  const table = makeTable(collectiveColumns(), {
    rows, label: "Collectives", sort: [6, true],
    href: (row) => (row.item ? graphLink(row.item) : null),
    words: (row) => [row.why, row.kind, row.axis, row.phase, row.tensor, row.where, row.module, `axis:${row.axis}`].join(" "),
    counted: (shown) => (summary.textContent = `${plural(shown.length, "row")}: ${formatBytes(sumOf(shown, "bytes_sent"))} a rank, ${formatSeconds(sumOf(shown, "seconds"))} a step`),
  });
  const field = filterField("Filter by purpose, kind, module", (text) => table.filter(text));
  append(panel, [
    axisTotals(rows, (axis) => {
      field.value = field.value === `axis:${axis}` ? "" : `axis:${axis}`;
      table.filter(field.value);
    }),
    h("div", { class: "toolbar" }, field, summary),
    h("div", { class: "scroll grows" }, table.element),
  ]);
  return {};
}

function sumOf(rows, key) {
  return rows.reduce((sum, row) => sum + (row[key] || 0), 0);
}

function collectiveColumns() {
  return [
    { title: "What for", value: (row) => row.why, show: (row) => row.why || row.kind },
    { title: "Kind", value: (row) => row.kind, show: (row) => h("span", { class: "mono" }, row.kind) },
    { title: "Axis", value: (row) => row.axis, show: (row) => axisChip(row.axis) },
    { title: "Phase", value: (row) => row.phase, show: (row) => row.phase },
    { title: "Times", numeric: true, value: (row) => row.times, show: (row) => formatWhole(row.times) },
    { title: "Bytes", numeric: true, hint: "that one rank sends in a step", value: (row) => row.bytes_sent, show: (row) => formatBytes(row.bytes_sent) },
    { title: "Time", numeric: true, hint: "in a step, predicted", value: (row) => row.seconds, show: (row) => formatSeconds(row.seconds) },
    { title: "Tensor", value: (row) => row.tensor, show: (row) => h("span", { class: "mono" }, row.tensor || "") },
    { title: "Where", wide: true, value: (row) => row.module || row.where, show: (row) => [row.module && dotted(row.module), row.where && row.where !== row.module && h("div", { class: "where" }, row.where)] },
  ];
}

/** One tile an axis; a click filters the table. */
function axisTotals(rows, onPick) {
  const totals = new Map();
  for (const row of rows) {
    const total = totals.get(row.axis) || { bytes: 0, seconds: 0, count: 0 };
    totals.set(row.axis, { bytes: total.bytes + (row.bytes_sent || 0), seconds: total.seconds + (row.seconds || 0), count: total.count + 1 });
  }
  const all = sumOf(rows, "seconds") || 1;
  const order = [...totals].sort(([, left], [, right]) => right.seconds - left.seconds);
  return h("div", { class: "totals" }, order.map(([axis, total]) => h("button", { type: "button", class: "tile", onclick: () => onPick(axis), title: `Show those over ${axis} alone` },
    h("span", { class: "label" }, axisChip(axis), h("span", { class: "muted" }, plural(total.count, "row"))),
    h("span", { class: "big" }, formatSeconds(total.seconds)),
    h("span", { class: "thin" }, h("i", { style: `width:${(total.seconds / all) * 100}%;background:${axisColours.get(axis) || "var(--muted)"}` })),
    h("span", { class: "muted" }, `${formatBytes(total.bytes)} a rank`))));
}
