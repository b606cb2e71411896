// Every collective of the program: what for, over which axis, how much, how long, and how much of it is hidden.

const collectivesView = { id: "collectives", label: "Collectives", make: makeCollectives };

// {what to group by: [title, the key of a row]}
const COLLECTIVE_GROUPS = {
  none: ["Each", null],
  kind: ["By kind and axis", (row) => `${row.kind} over ${row.axis}`],
  module: ["By module", (row) => row.module || row.where || "elsewhere"],
};

/** A target is `by=kind`, `by=kind/all_gather over tp` (one group's rows), or text for the filter. */
function makeCollectives(panel) {
  const rows = list(content.collectives);
  if (!rows.length) {
    panel.append(emptyNote("The program has no collectives: no rank needs anything of another one."));
    return {};
  }
  panel.classList.add("fills");
  const state = { by: "none", only: null, shown: rows };
  const summary = h("span", { class: "muted", "aria-live": "polite" });
  const groups = makeTable(groupColumns(), {
    rows: [], label: "Collectives in groups", sort: [5, true], href: (row) => `#collectives/by=${state.by}/${encodeTarget(row.key)}`,
  });
  const table = makeTable(collectiveColumns(), {
    rows, label: "Collectives", sort: [6, true],
    href: (row) => (row.item ? graphLink(row.item) : null),
    words: (row) => [row.why, row.kind, row.axis, row.phase, row.tensor, row.where, row.module, `axis:${row.axis}`].join(" "),
    counted: (shown) => {
      summary.textContent = `${plural(shown.length, "row")}: ${formatBytes(sumOf(shown, "bytes_sent"))} a rank, ${formatSeconds(sumOf(shown, "seconds"))} a step`;
      state.shown = shown;
      if (state.by !== "none" && !state.only) groups.setRows(groupedRows(shown, COLLECTIVE_GROUPS[state.by][1]));
    },
  });
  const field = filterField("Filter by purpose, kind, module", (text) => table.filter(text));
  const grouping = segmented("Group", Object.entries(COLLECTIVE_GROUPS).map(([by, [title]]) => [by, title]), "none", (by) => goTo(by === "none" ? "#collectives" : `#collectives/by=${by}`));
  const only = h("span", { class: "chosen-group", hidden: true });
  const place = h("div", { class: "scroll grows" }, table.element);
  const setFilter = (text) => {
    field.value = text;
    table.filter(text);
  };
  append(panel, [
    axisTotals(rows, (axis) => setFilter(field.value === `axis:${axis}` ? "" : `axis:${axis}`)),
    h("div", { class: "toolbar" }, grouping.element, field, only, summary),
    h("p", { class: "muted collective-note" }, hiddenWords(rows)),
    place,
  ]);
  return {
    show(target) {
      const [, by, key] = /^by=(\w+)(?:\/(.*))?$/s.exec(target) || [];
      state.by = by in COLLECTIVE_GROUPS ? by : "none";
      state.only = key || null;
      grouping.pick(state.by, true);
      const keyOf = COLLECTIVE_GROUPS[state.by][1];
      if (target && !by) setFilter(target);
      table.setRows(state.only ? rows.filter((row) => keyOf && keyOf(row) === state.only) : rows);
      const areGroups = state.by !== "none" && !state.only;
      place.replaceChildren(areGroups ? groups.element : table.element);
      only.hidden = !state.only;
      only.replaceChildren(...(state.only ? [h("b", {}, state.only), h("a", { class: "small", href: `#collectives/by=${state.by}` }, "All groups")] : []));
    },
  };
}

function sumOf(rows, key) {
  return rows.reduce((sum, row) => sum + (row[key] || 0), 0);
}

/** Seconds of these that run beside the computation; null where that is not known of one of them. */
function hiddenSeconds(rows) {
  return rows.some((row) => !isNumber(row.hidden)) ? null : rows.reduce((sum, row) => sum + (row.seconds || 0) * row.hidden, 0);
}

function groupedRows(rows, keyOf) {
  const groups = new Map();
  for (const row of rows) groups.set(keyOf(row), [...(groups.get(keyOf(row)) || []), row]);
  return [...groups].map(([key, inside]) => {
    const hidden_s = hiddenSeconds(inside);
    const seconds = sumOf(inside, "seconds");
    const axes = [...new Set(inside.map((row) => row.axis))];
    return { key, axes, count: inside.length, times: sumOf(inside, "times"), bytes_sent: sumOf(inside, "bytes_sent"), seconds, hidden: hidden_s === null || !seconds ? null : hidden_s / seconds };
  });
}

function groupColumns() {
  return [
    { title: "Group", wide: true, value: (row) => row.key, show: (row) => dotted(row.key) },
    { title: "Axis", value: (row) => row.axes.join(), show: (row) => h("span", { class: "axis-legend" }, row.axes.map(axisChip)) },
    { title: "Collectives", numeric: true, hint: "of the program; a repeated block has each once", value: (row) => row.count, show: (row) => formatWhole(row.count) },
    ...timesAndBytes(),
    ...shareColumns(),
  ];
}

function collectiveColumns() {
  return [
    { title: "What for", value: (row) => row.why, show: (row) => row.why || row.kind },
    { title: "Kind", value: (row) => row.kind, show: (row) => h("span", { class: "mono" }, row.kind) },
    { title: "Axis", value: (row) => row.axis, show: (row) => axisChip(row.axis) },
    { title: "Phase", value: (row) => row.phase, show: (row) => row.phase },
    ...timesAndBytes(),
    ...shareColumns(),
    { title: "Where", wide: true, value: (row) => row.module || row.where, show: collectivePlace },
  ];
}

function collectivePlace(row) {
  const more = [row.where !== row.module && row.where, row.tensor && row.tensor !== row.module && `moves ${row.tensor}`].filter(Boolean);
  return [row.module && dotted(row.module), more.length > 0 && h("div", { class: "where" }, more.join("; "))];
}

function timesAndBytes() {
  return [
    { title: "Times", numeric: true, value: (row) => row.times, show: (row) => formatWhole(row.times) },
    { title: "Bytes", numeric: true, hint: "that one rank sends in a step", value: (row) => row.bytes_sent, show: (row) => formatBytes(row.bytes_sent) },
    { title: "Time", numeric: true, hint: "in a step, predicted", value: (row) => row.seconds, show: (row) => formatSeconds(row.seconds) },
  ];
}

function shareColumns() {
  const share = (row) => (headline.step_s ? row.seconds / headline.step_s : null);
  return [
    { title: "Of the step", numeric: true, hint: "its time over the step's, hidden or not", value: share, show: (row) => formatShare(share(row)) },
    { title: "Hidden", numeric: true, hint: "the share of its time in which its rank computes; the rest is exposed", value: (row) => row.hidden, show: hiddenBar },
  ];
}

function hiddenBar(row) {
  if (!isNumber(row.hidden)) return h("span", { class: "muted" }, MISSING);
  const exposed = row.seconds * (1 - row.hidden);
  return h("span", { class: "hidden-share", title: `${formatSeconds(row.seconds - exposed)} beside the computation, ${formatSeconds(exposed)} exposed` },
    h("span", { class: "thin" }, h("i", { style: `width:${row.hidden * 100}%` })), formatShare(row.hidden, 0));
}

/** How the hidden shares are known, and why their sum is not what the step saves. */
function hiddenWords(rows) {
  const beside = hiddenSeconds(rows.filter((row) => isNumber(row.hidden)));
  if (!rows.some((row) => isNumber(row.hidden))) return "How much of each is hidden is not known: the report has no timeline.";
  const first = `${formatSeconds(beside)} run beside the computation (Hidden), ${formatSeconds(sumOf(rows, "seconds") - beside)} do not.`;
  if (isNumber(headline.bubble)) return `${first} Of the busiest rank of the pipeline; what is exposed there may fall into its bubble.`;
  const saved = -list(content.step).filter((part) => part.kind === "hidden").reduce((sum, part) => sum + part.seconds, 0);
  if (saved <= 0) return first;
  const slower = beside > saved * 1.005 ? `They slow the computation by ${formatSeconds(beside - saved)}, so that a step gets ${formatSeconds(saved)} shorter by them` : `A step gets ${formatSeconds(saved)} shorter by them`;
  return `${first} ${slower}: communication adds ${formatSeconds(sumOf(rows, "seconds") - saved)} to it.`;
}

/** One tile an axis; a click filters the table. */
function axisTotals(rows, onPick) {
  const totals = new Map();
  for (const row of rows) totals.set(row.axis, [...(totals.get(row.axis) || []), row]);
  const all = sumOf(rows, "seconds") || 1;
  const order = [...totals].sort(([, left], [, right]) => sumOf(right, "seconds") - sumOf(left, "seconds"));
  return h("div", { class: "totals" }, order.map(([axis, own]) => h("button", { type: "button", class: "tile", onclick: () => onPick(axis), title: `Show those over ${axis} alone` },
    h("span", { class: "label" }, axisChip(axis), h("span", { class: "muted" }, plural(own.length, "row"))),
    h("span", { class: "big" }, formatSeconds(sumOf(own, "seconds"))),
    h("span", { class: "thin" }, h("i", { style: `width:${(sumOf(own, "seconds") / all) * 100}%;background:${axisColours.get(axis) || "var(--muted)"}` })),
    h("span", { class: "muted" }, `${formatBytes(sumOf(own, "bytes_sent"))} a rank`))));
}
