// What the page shows, read once, and the indexes that several tabs need.

const whole = JSON.parse(byId("ui-content").textContent) || {};

/** A report of generate() has a content for each phase; the address says which one is shown: ?phase=decode#memory */
const phaseNames = Object.keys(whole.phases || {});
const shownPhase = (() => {
  const asked = new URLSearchParams(location.search).get("phase");
  return phaseNames.includes(asked) ? asked : phaseNames[0] || "";
})();
const content = shownPhase ? whole.phases[shownPhase] : whole;

const items = content.items || {};
const parameters = list(content.parameters);
const meshAxes = list(content.mesh && content.mesh.axes);
const numRanks = meshAxes.reduce((product, axis) => product * axis.size, 1);
const parameterByName = new Map(parameters.map((parameter) => [parameter.name, parameter]));
const headline = content.headline || {};

// Okabe and Ito's colours, which colour-blind people tell apart, in the order in which the pictures use them.
const PALETTE = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442", "#8a8f98"];

const axisColours = new Map(
  meshAxes.map((axis, index) => {
    const given = parseInt(axis.colour, 10);
    return [axis.name, PALETTE[(Number.isNaN(given) ? index : given) % PALETTE.length]];
  }),
);

/** The mesh axis of the pipeline: the one that no placement names; null without a pipeline. */
const stageAxis = (() => {
  if (!parameters.some((parameter) => list(parameter.stages).length)) return null;
  const placed = new Set(parameters.flatMap((parameter) => list(parameter.placement && parameter.placement.axes).map((axis) => axis.name)));
  return meshAxes.find((axis) => !placed.has(axis.name)) || null;
})();

function axisChip(name) {
  const colour = axisColours.get(name);
  return h("span", { class: "axis-chip" }, h("i", { style: `background:${colour || "var(--muted)"}` }), name);
}

/** A module's or tensor's name that wraps after its dots. */
function dotted(name) {
  const parts = String(name || "").split(".");
  return h("span", { class: "mono" }, parts.map((part, index) => (index ? [h("wbr"), `.${part}`] : part)));
}

function elementBytes(parameter) {
  return bytesOfDtype(String(parameter.stored || "").split("[")[0]) || bytesOfDtype(parameter.dtype) || 0;
}

// --- where things are ---------------------------------------------------------------------------------------------

function graphLink(key) {
  return `#graph/${encodeTarget(key)}`;
}

function parameterLink(name) {
  return `#sharding/${encodeTarget(name)}`;
}

function lineLink(line) {
  return `#program/${line}`;
}

/** Readable in the address bar: only what would break the hash is escaped. */
function encodeTarget(text) {
  const whole = String(text).replace(/\p{Surrogate}/gu, "\ufffd"); // half a character has no code in an address
  return whole.replace(/[%#\s"<>`]|[^\0-\x7f]/gu, (character) => encodeURIComponent(character));
}

function decodeTarget(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Hashes of other writers: with or without #, older names of a tab. */
function normalHash(link) {
  return `#${String(link).replace(/^#/, "")}`;
}

function goTo(hash) {
  const next = normalHash(hash);
  if (location.hash === next) route();
  else location.hash = next;
}

// --- search -------------------------------------------------------------------------------------------------------

/** What search looks through: {text, low, kind, detail, href}, made at the first search. */
const searchEntries = (() => {
  let entries = null;
  return () => {
    if (!entries) entries = [...tabEntries(), ...collectiveEntries(), ...itemEntries(), ...parameterEntries()];
    return entries;
  };
})();

function tabEntries() {
  return VIEWS.map((view) => entry(view.label, "tab", "a part of this report", [], `#${view.id}`));
}

/** One entry for each kind of collective over each axis. */
function collectiveEntries() {
  const groups = groupedRows(list(content.collectives), COLLECTIVE_GROUPS.kind[1]);
  return groups.map((group) => entry(group.key, "collectives", `${formatWhole(group.count)}, ${formatSeconds(group.seconds)} a step`, [], `#collectives/by=kind/${encodeTarget(group.key)}`));
}

function itemEntries() {
  return Object.entries(items)
    .filter(([, item]) => item && !(item.kind === "parameter" && parameterByName.has(item.parameter)))
    .map(([key, item]) => {
      // A stage is called by its number alone, a rank of the pipeline by its own.
      const name = item.kind === "stage" ? item.title || key : item.name || key;
      return entry(name, item.kind, item.kind === "stage" ? "" : item.title, [item.module, item.source], graphLink(key));
    });
}

/** `rank 13`: what that rank holds; every rank has an entry, made when it is asked for. */
function rankEntries(low) {
  const [, digits] = /^ranks?\s+(\d+)$/.exec(low) || [];
  const rank = Number(digits);
  if (digits === undefined || rank >= numRanks) return [];
  const at = coordinatesOfRank(rank, meshAxes);
  const where = meshAxes.map((axis) => `${axis.name} ${at[axis.name]}`).join(", ");
  return [entry(`rank ${rank}`, "rank", `what it holds: ${where || "everything"}`, [], `#sharding/rank=${rank}`)];
}

function parameterEntries() {
  return parameters.map((parameter) => {
    const href = parameter.item && items[parameter.item] ? graphLink(parameter.item) : parameterLink(parameter.name);
    return { ...entry(parameter.name, "parameter", parameter.stored, [], href), members: list(parameter.members) };
  });
}

function entry(text, kind, detail, more, href) {
  const words = [text, kind, detail, ...more].filter(Boolean).join(" ");
  return { text: String(text), low: String(text).toLowerCase(), words: words.toLowerCase(), kind: kind || "", detail: detail || more.find(Boolean) || "", href };
}

/** The best `most` entries for `query`, and how many there are in all. Names count for more than what is said of them. */
function findEntries(query, most) {
  const low = query.trim().toLowerCase();
  const words = low.split(/\s+/).filter(Boolean);
  if (!words.length) return { found: [], total: 0 };
  const scored = rankEntries(low).map((one) => [-1, one]);
  for (const one of searchEntries()) {
    const hit = words.every((word) => one.words.includes(word)) ? one : memberEntry(one, words);
    if (hit) scored.push([scoreEntry(hit, low, words), hit]);
  }
  scored.sort(([left, a], [right, b]) => left - right || a.text.length - b.text.length || (a.text < b.text ? -1 : 1));
  return { found: scored.slice(0, most).map(([, one]) => one), total: scored.length };
}

/** A class found by the name of one of its tensors: model.layers.17.mlp.up_proj.weight. */
function memberEntry(one, words) {
  const member = list(one.members).find((name) => matches(name, words));
  return member && entry(member, one.kind, `in ${one.text}`, [], one.href);
}

function scoreEntry(one, low, words) {
  if (one.low === low) return 0;
  if (one.low.startsWith(low)) return 1;
  if (one.low.endsWith(low)) return 2;
  if (one.low.includes(low)) return 3;
  return words.every((word) => one.low.includes(word)) ? 4 : 5;
}
