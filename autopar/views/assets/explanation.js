// An answer of `plan.explain`: why, the next best shardings, what cannot be had, and the collectives due to the choice.

function explanationOf(explanation) {
  const chosen = explanation.chosen || {};
  return h("section", { class: "part explanation" },
    h("h3", {}, "Why it lies so"),
    list(explanation.why).length ? h("ul", { class: "words" }, explanation.why.map((text) => h("li", {}, text))) : h("p", { class: "muted" }, "Nothing forces it: it is part of the fastest placement found."),
    factList([
      ...Object.entries(chosen.layouts || {}).map(([label, text]) => [label, h("span", { class: "mono" }, text)]),
      ...list(explanation.facts),
      ["Recomputes", chosen.rematerialize && chosen.rematerialize !== "none" ? chosen.rematerialize : null],
      ["A step", formatSeconds(chosen.step_time_s)],
    ]),
    axesPart(list(explanation.axes)),
    alternativesPart(explanation, chosen),
    excludedPart(list(explanation.excluded)),
    dueCollectives(explanation),
  );
}

/** A sentence for each other thing that an axis could do. */
function axesPart(axes) {
  if (!axes.length) return null;
  return [
    h("h3", {}, "And otherwise, axis by axis"),
    axes.map((one) => h("section", { class: "axis-answer", "aria-label": `Axis ${one.axis}` },
      h("div", {}, axisChip(one.axis), " ", h("span", { class: "muted" }, one.now)),
      h("ul", { class: "words" }, list(one.sentences).map(axisSentence)))),
  ];
}

/** Over dp instead of tp: what that would cost. What is asked stands out. */
function axisSentence(text) {
  const end = text.indexOf(": ");
  return h("li", {}, end < 0 ? text : [h("b", {}, text.slice(0, end)), text.slice(end)]);
}

function alternativesPart(explanation, chosen) {
  const rows = list(explanation.alternatives);
  const left = [
    explanation.more > 0 && `${plural(explanation.more, "other")} ${explanation.more === 1 ? "was" : "were"} solved, worse than these.`,
    list(explanation.unsolved).length > 0 && `No time was left to solve ${explanation.unsolved.join(", ")}.`,
  ].filter(Boolean);
  if (!rows.length) return [h("h3", {}, "Runners-up"), h("p", { class: "muted" }, left.join(" ") || "There is no other sharding.")];
  return [
    h("h3", {}, "Runners-up"),
    h("p", { class: "muted" }, "The whole placement solved again with each; differences are to the chosen plan."),
    h("table", { class: "alternatives", "aria-label": "Runners-up" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Stored"), h("th", { scope: "col", class: "number" }, "Step"), h("th", { scope: "col", class: "number" }, "Memory"))),
      h("tbody", {}, rows.map((row) => alternativeRows(row, chosen)))),
    left.length > 0 && h("p", { class: "muted" }, left.join(" ")),
  ];
}

function alternativeRows(row, chosen) {
  const layouts = row.layouts || {};
  const relative = chosen.step_time_s ? row.step_delta_s / chosen.step_time_s : null;
  const more = [
    ...Object.entries(layouts).filter(([label]) => label !== "stored").map(([label, text]) => [label, h("span", { class: "mono" }, text)]),
    ["Communication", delta(row.communication_delta_s, formatSeconds)],
    ["A step", formatSeconds(row.step_time_s)],
    ["Peak", formatBytes(row.peak_bytes)],
    ["Recomputes", row.rematerialize && row.rematerialize !== "none" ? row.rematerialize : null],
  ];
  return [
    h("tr", {},
      h("td", {}, h("span", { class: "mono" }, layouts.stored || "?"), alternativeNotes(row, chosen)),
      h("td", { class: "number" }, delta(row.step_delta_s, formatSeconds), isNumber(relative) && h("div", { class: "muted" }, formatDelta(relative, formatShare))),
      h("td", { class: "number" }, delta(row.peak_delta_bytes, formatBytes))),
    h("tr", { class: "detail" }, h("td", { colspan: 3 },
      h("details", {}, h("summary", {}, "more"), factList(more), row.pin && [h("p", { class: "muted" }, "Ask for it in the call of plan:"), commandLine(row.pin)]))),
  ];
}

/** What is special of an alternative; that it recomputes otherwise is a change of its own. */
function alternativeNotes(row, chosen) {
  const notes = String(row.note || "").split("; ").filter((note) => note && !note.startsWith("recomputes "));
  return [
    notes.length > 0 && h("div", { class: "muted" }, notes.join("; ")),
    row.rematerialize && row.rematerialize !== chosen.rematerialize && h("div", {}, h("span", { class: "badge" }, `and recomputes ${row.rematerialize}`)),
  ];
}

/** A difference with sign, arrow and colour; less is better unless `moreIsBetter`; null: neither. */
function delta(value, format, moreIsBetter = false) {
  if (!isNumber(value)) return h("span", { class: "muted" }, MISSING);
  if (value === 0) return h("span", { class: "muted" }, "±0");
  const kind = moreIsBetter === null ? "" : value > 0 === moreIsBetter ? "is-better" : "is-worse";
  return h("span", { class: `delta ${kind}` }, formatDelta(value, format), h("span", { "aria-hidden": "true", class: "arrow" }, value > 0 ? "▲" : "▼"));
}

function excludedPart(excluded) {
  if (!excluded.length) return null;
  return [
    h("h3", {}, "What cannot be had"),
    h("ul", { class: "excluded" }, excluded.slice(0, 60).map((one) => h("li", {},
      h("span", { class: "mono" }, one.sharding),
      h("span", { class: "muted" }, ` ${one.kind}: `), one.reason,
      isNumber(one.bytes_over) && h("span", { class: "muted" }, ` (${formatBytes(one.bytes_over)} over the limit)`)))),
    excluded.length > 60 && h("p", { class: "muted" }, `and ${plural(excluded.length - 60, "more", "more")}`),
  ];
}

function dueCollectives(explanation) {
  const rows = list(explanation.collectives);
  if (!rows.length) return null;
  const shares = list(explanation.shares);
  const share = (index) => (isNumber(shares[index]) ? shares[index] : 1);
  const total = rows.reduce((sum, row, index) => sum + row.seconds * share(index), 0);
  return [
    h("h3", {}, "Collectives due to it"),
    h("p", { class: "muted" }, `${formatSeconds(total)} a step; of a bucket that several share, this one's part by bytes.`),
    h("ul", { class: "due" }, rows.map((row, index) => h("li", {},
      h("div", {}, h("b", {}, row.kind), " ", axisChip(row.axis), " ", h("span", { class: "muted" }, `${row.phase}${row.times > 1 ? ` × ${row.times}` : ""}: ${row.why}`)),
      h("div", { class: "muted" }, `${formatBytes(row.bytes_sent * share(index))}, ${formatSeconds(row.seconds * share(index))}${share(index) < 1 ? ` (${formatShare(share(index))} of a bucket)` : ""}`),
      row.where && h("div", { class: "where" }, row.where)))),
  ];
}
