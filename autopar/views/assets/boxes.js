// Sharding boxes: a tensor's drawing, the choice of a rank, and what that rank holds of it.

/** Shared by all boxes of the page: one looks at one rank. */
const chosenRank = { coordinates: coordinatesOfRank(0, meshAxes), colourBy: "" };

function shardBoxes(parameter, options = {}) {
  const placement = parameter.placement || {};
  const shape = list(placement.shape);
  const words = h("div", { class: "boxes-words", "aria-live": "polite" });
  const choose = (coordinates) => {
    Object.assign(chosenRank.coordinates, coordinates);
    selector.update();
    repaint();
  };
  const place = h("div", { class: "boxes-drawing" });
  const cutting = list(placement.axes).filter((axis) => isNumber(axis.dim) && axis.size > 1);
  let drawing = null;
  const draw = (by) => {
    if (!shape.length) return;
    chosenRank.colourBy = by;
    drawing = drawBoxes(placement, options.compact || innerWidth < 760, choose, by);
    drawing.update();
    place.replaceChildren(drawing.element);
  };
  const first = cutting.find((axis) => axis.name === chosenRank.colourBy) || cutting[0];
  const colours = cutting.length > 1 && segmented("Colours by axis", cutting.map((axis) => [axis.name, axis.name]), first.name, draw);
  draw(first && first.name);
  const repaint = () => {
    if (drawing) drawing.update();
    words.replaceChildren(...heldWords(parameter));
  };
  const selector = rankSelector(repaint);
  repaint();
  return h("section", { class: `part boxes ${options.compact ? "compact" : ""}` },
    h("h3", {}, options.compact ? "Who holds what" : "Which rank holds which part"),
    h("p", { class: "muted" }, splitWords(placement)),
    colours && h("div", { class: "colours-by" }, h("span", { class: "muted" }, "Colours by"), colours.element),
    drawing ? place : emptyNote("A single number: every rank has it."),
    meshAxes.length > 0 && selector.element,
    words,
  );
}

/** One sentence: which axis cuts which dim. */
function splitWords(placement) {
  const shape = list(placement.shape);
  const cut = list(placement.axes).filter((axis) => axis.dim !== null && axis.dim !== undefined && axis.size > 1);
  const whole = list(placement.axes).filter((axis) => (axis.dim === null || axis.dim === undefined) && axis.size > 1);
  const parts = cut.map((axis) => `${axis.name} cuts dim ${axis.dim} (${formatWhole(shape[axis.dim])}) in ${axis.size}${axis.outer > 1 ? `, in each of ${axis.outer} stripes${axis.zigzag ? ", every second one backwards" : ""}` : ""}`);
  if (whole.length) parts.push(`every rank of ${whole.map((axis) => axis.name).join(", ")} has the same`);
  return parts.length ? `${parts.join("; ")}.` : "Every rank has all of it.";
}

/** Number and slider for each mesh axis, and the rank's own number. */
function rankSelector(onChange) {
  const rows = meshAxes.map((axis) => {
    const set = (value) => {
      chosenRank.coordinates[axis.name] = Math.min(axis.size - 1, Math.max(0, Math.round(Number(value) || 0)));
      update();
      onChange();
    };
    const slider = h("input", { type: "range", min: 0, max: axis.size - 1, step: 1, "aria-label": `Coordinate on ${axis.name}`, oninput: (event) => set(event.target.value) });
    const number = h("input", { type: "number", min: 0, max: axis.size - 1, "aria-label": `Number on ${axis.name}`, onchange: (event) => set(event.target.value) });
    return { axis, slider, number };
  });
  const rank = h("input", {
    type: "number", min: 0, max: numRanks - 1, "aria-label": "Rank", onchange: (event) => {
      const value = Math.min(numRanks - 1, Math.max(0, Math.round(Number(event.target.value) || 0)));
      Object.assign(chosenRank.coordinates, coordinatesOfRank(value, meshAxes));
      update();
      onChange();
    },
  });
  function update() {
    rank.value = rankOfCoordinates(chosenRank.coordinates, meshAxes);
    for (const row of rows) row.slider.value = row.number.value = chosenRank.coordinates[row.axis.name];
  }
  update();
  const element = h("div", { class: "rank-selector" },
    h("label", { class: "rank" }, h("span", {}, "Rank"), rank, h("span", { class: "muted" }, `of ${formatWhole(numRanks)}`)),
    rows.map((row) => h("label", {}, axisChip(row.axis.name), row.number, row.axis.size > 1 && row.slider)));
  return { element, update };
}

// --- what the chosen rank holds -----------------------------------------------------------------------------------

/** Whether the rank at `coordinates` has a part of `parameter` at all. */
function stageHolds(parameter, coordinates) {
  const stages = list(parameter.stages);
  return !stages.length || !stageAxis || stages.includes(coordinates[stageAxis.name]);
}

/** How many tensors of a class the rank at `coordinates` has parts of. */
function tensorsHeld(parameter, coordinates) {
  if (!stageAxis || !parameter.held) return parameter.count || 1;
  return parameter.held[coordinates[stageAxis.name]] || 0;
}

function heldWords(parameter) {
  const rank = rankOfCoordinates(chosenRank.coordinates, meshAxes);
  if (!stageHolds(parameter, chosenRank.coordinates)) {
    return [h("p", {}, h("b", {}, `Rank ${rank} holds nothing of it: `), `it lies where ${stageAxis.name} is ${parameter.stages.join(", ")}.`)];
  }
  const held = heldBy(parameter.placement, chosenRank.coordinates);
  const elements = countElements(held);
  const bytes = elementBytes(parameter);
  const copies = meshAxes.filter((axis) => axis !== stageAxis && !list(parameter.placement.axes).some((one) => one.name === axis.name && one.dim !== null)).reduce((product, axis) => product * axis.size, 1);
  return [h("p", {},
    h("b", {}, `Rank ${rank} holds `), h("span", { class: "mono held" }, held.length ? rangesText(held) : "all of it"),
    `: ${plural(elements, "element")}${bytes ? `, ${formatBytes(elements * bytes)}` : ""}${tensorsHeld(parameter, chosenRank.coordinates) > 1 ? ` of each of ${formatWhole(tensorsHeld(parameter, chosenRank.coordinates))} tensors` : ""}.`,
    copies > 1 && h("span", { class: "muted" }, ` ${plural(copies, "rank")} have the same.`))];
}

/** [0:512, 0:64 + 128:192]; long lists are cut. */
function rangesText(held, most = 4) {
  const dims = held.map((intervals) => {
    if (!intervals.length) return "nothing";
    const shown = intervals.slice(0, most).map(([start, stop]) => `${start}:${stop}`).join(" + ");
    return intervals.length > most ? `${shown} + ${intervals.length - most} more` : shown;
  });
  return `[${dims.join(", ")}]`;
}
