// Bars cut in parts, with a legend that says each part's name, value and share.

const STEP_COLOURS = { compute: "var(--compute)", communication: "var(--communication)", waiting: "var(--waiting)", optimizer: "var(--optimizer)" };
// The same kind of memory has the same colour everywhere.
const MEMORY_COLOURS = [[/gather|held/, "#cc79a7"], [/param/, "#0072b2"], [/grad/, "#56b4e9"], [/optim|state/, "#009e73"], [/activation|saved/, "#e69f00"]];
const STEP_ORDER = ["compute", "optimizer", "waiting", "communication"];

/** parts: {what, value, colour, hatched}. format: of values. whole: what the shares are of. */
function stackedBar(label, parts, format, whole) {
  const total = parts.reduce((sum, part) => sum + part.value, 0) || 1;
  const bar = h("div", { class: "bar", role: "img", "aria-label": `${label}: ${parts.map((part) => `${part.what} ${format(part.value)}`).join(", ")}` });
  parts.forEach((part) => {
    const share = (part.value / total) * 100;
    const name = `${part.what}: ${format(part.value)}`;
    bar.append(h("span", { class: part.hatched ? "hatched" : null, style: `width:${share}%;background-color:${part.colour}`, title: name }, share > 9 && !part.isCovered && h("b", {}, part.what)));
  });
  const legend = h("ul", { class: "legend" }, parts.map((part) => legendLine(part, format, whole || total)));
  return h("div", { class: "stacked" }, bar, legend);
}

function legendLine(part, format, whole) {
  return h(
    "li",
    {},
    h("i", { class: part.hatched ? "hatched" : null, style: `background-color:${part.colour}` }),
    h("span", {}, part.what),
    h("span", { class: "value" }, part.sign || "", format(part.value)),
    h("span", { class: "share muted" }, formatShare(part.value / whole)),
  );
}

/** Parts of the step. What is hidden is time of communication that runs behind computation: it is cut off the end. */
function stepBar() {
  const step = list(content.step).filter((part) => isNumber(part.seconds) && part.seconds !== 0);
  if (!step.length) return emptyNote("The report has no breakdown of the step.");
  const hidden = step.filter((part) => part.seconds < 0);
  const seen = step.filter((part) => part.seconds > 0);
  const counts = {};
  const parts = seen
    .map((part) => ({ ...part, place: STEP_ORDER.indexOf(part.kind), nth: (counts[part.kind] = (counts[part.kind] || 0) + 1) }))
    .sort((left, right) => left.place - right.place)
    .map((part) => ({ what: part.what, value: part.seconds, colour: shade(STEP_COLOURS[part.kind] || "var(--waiting)", part.nth - 1) }));
  const total = parts.reduce((sum, part) => sum + part.value, 0);
  const covered = -hidden.reduce((sum, part) => sum + part.seconds, 0);
  let end = 0;
  for (const part of parts) part.isCovered = (end += part.value) > total - covered * 0.999;
  const drawn = stackedBar("Parts of the step", parts, formatSeconds, headline.step_s);
  if (!hidden.length) return drawn;
  drawn.querySelector(".bar").append(
    h("span", { class: "cover hatched", style: `width:${Math.min(100, (covered / total) * 100)}%`, title: `${hidden[0].what}: ${formatSeconds(covered)}` }),
  );
  drawn.querySelector(".legend").append(...hidden.map((part) => legendLine({ what: part.what, value: -part.seconds, colour: "transparent", hatched: true, sign: "−" }, formatSeconds, headline.step_s)));
  return drawn;
}

/** A colour for each kind of memory, no two the same while there are enough. */
function memoryColours(names) {
  const colours = new Map();
  const free = (colour) => ![...colours.values()].includes(colour);
  for (const name of names) {
    const known = MEMORY_COLOURS.find(([pattern, colour]) => pattern.test(String(name).toLowerCase()) && free(colour));
    if (known) colours.set(name, known[1]);
  }
  const others = [...PALETTE].reverse().concat(PALETTE);
  for (const name of names) {
    if (!colours.has(name)) colours.set(name, others.find(free) || PALETTE[colours.size % PALETTE.length]);
  }
  return colours;
}

/** The nth of a family of one colour. */
function shade(colour, nth) {
  return nth ? `color-mix(in oklab, ${colour}, var(--surface) ${Math.min(66, nth * 22)}%)` : colour;
}

/** A filled bar against a limit. */
function limitBar(value, limit) {
  if (!isNumber(limit) || !isNumber(value)) return null;
  const share = value / limit;
  return h(
    "div",
    { class: `meter ${share > 1 ? "is-over" : ""}`, role: "meter", "aria-valuemin": 0, "aria-valuemax": limit, "aria-valuenow": value, "aria-label": "Memory of the fullest rank against the limit" },
    h("span", { style: `width:${Math.min(100, share * 100)}%` }),
  );
}
