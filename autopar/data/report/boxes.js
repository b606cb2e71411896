// Sharding boxes: a tensor as a grid of pieces, the ranks that hold them, and what one chosen rank holds.

const BOX_CELLS = 64; // drawn a dim; more are merged
const BOX_CELLS_COMPACT = 16;

/** Shared by all boxes of the page: one looks at one rank. */
const chosenRank = { coordinates: coordinatesOfRank(0, meshAxes) };

function shardBoxes(parameter, options = {}) {
  const placement = parameter.placement || {};
  const shape = list(placement.shape);
  const place = h("section", { class: `part boxes ${options.compact ? "compact" : ""}` });
  const drawing = h("div", { class: "boxes-drawing" });
  const words = h("div", { class: "boxes-words", "aria-live": "polite" });
  const repaint = () => {
    drawing.replaceChildren(drawBoxes(parameter, options, choose));
    words.replaceChildren(...heldWords(parameter));
  };
  const selector = rankSelector(repaint);
  const choose = (coordinates) => {
    Object.assign(chosenRank.coordinates, coordinates);
    selector.update();
    repaint();
  };
  append(place, [
    h("h3", {}, options.compact ? "Who holds what" : "Which rank holds which part"),
    h("p", { class: "muted" }, splitWords(placement)),
    shape.length ? drawing : emptyNote("A single number: every rank has it."),
    meshAxes.length > 0 && selector.element,
    words,
  ]);
  if (shape.length) repaint();
  return place;
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

// --- the drawing --------------------------------------------------------------------------------------------------

/** The two dims to draw: those that are cut first, in their order. */
function drawnDims(placement) {
  const shape = list(placement.shape);
  const dims = shape.map((_, dim) => dim);
  const cut = dims.filter((dim) => axesOfDim(placement, dim).length);
  const chosen = [...cut, ...dims.filter((dim) => !cut.includes(dim))].slice(0, 2).sort((left, right) => left - right);
  return chosen.length === 1 ? [null, chosen[0]] : chosen;
}

function drawBoxes(parameter, options, choose) {
  const placement = parameter.placement;
  const compact = options.compact || innerWidth < 760;
  const [rowDim, columnDim] = drawnDims(placement);
  const most = compact ? BOX_CELLS_COMPACT : BOX_CELLS;
  const side = (dim) => {
    if (dim === null) return { dim, axes: [], cells: [{ start: 0, stop: 1, low: [], high: [], merged: 1 }] };
    const axes = axesOfDim(placement, dim);
    return { dim, axes, cells: cellsOfDim(placement.shape[dim], axes, most) };
  };
  const rows = side(rowDim);
  const columns = side(columnDim);
  const lane = 16;
  const margin = { left: rowDim === null ? 8 : 46 + rows.axes.length * lane, top: 22 + columns.axes.length * lane };
  const width = compact ? 340 : 720;
  const height = margin.top + (rowDim === null ? 48 : compact ? 190 : 270);
  const grid = { x: margin.left, y: margin.top, width: width - margin.left - 8, height: height - margin.top - 20 };
  const drawing = s("svg", { viewBox: `0 0 ${width} ${height}`, class: "boxes-svg", role: "img", "aria-label": splitWords(placement) });
  drawing.append(
    s("text", { x: grid.x, y: 12, class: "dim-label" }, `dim ${columnDim}: ${formatWhole(placement.shape[columnDim])}`),
    rowDim === null ? "" : s("text", { x: 4, y: grid.y + 10, class: "dim-label" }, `dim ${rowDim}`),
    rowDim === null ? "" : s("text", { x: 4, y: grid.y + 24, class: "dim-label" }, formatWhole(placement.shape[rowDim])),
  );
  drawLanes(drawing, columns, grid, lane, true);
  drawLanes(drawing, rows, grid, lane, false);
  drawCells(drawing, rows, columns, grid, choose);
  const merged = Math.max(...[...rows.cells, ...columns.cells].map((cell) => cell.merged), 1);
  const others = list(placement.shape).map((_, dim) => dim).filter((dim) => dim !== rowDim && dim !== columnDim);
  return h("figure", {}, drawing, h("figcaption", { class: "muted" },
    "Solid blue: what the chosen rank holds. ",
    merged > 1 && `One box stands for up to ${merged} pieces. `,
    others.length > 0 && `Not drawn: ${others.map((dim) => `dim ${dim} (${formatWhole(placement.shape[dim])}${axesOfDim(placement, dim).length ? `, cut by ${axesOfDim(placement, dim).map((axis) => axis.name).join(", ")}` : ""})`).join("; ")}.`));
}

/** Strips beside the grid: one an axis, with the coordinates of its ranks. */
function drawLanes(drawing, side, grid, lane, isColumn) {
  const extent = isColumn ? grid.width : grid.height;
  const step = extent / Math.max(1, side.cells.length);
  side.axes.forEach((axis, depth) => {
    const across = (isColumn ? grid.y : grid.x) - (side.axes.length - depth) * lane;
    for (let begin = 0; begin < side.cells.length;) {
      let end = begin + 1;
      const same = (cell) => cell.low[depth] === side.cells[begin].low[depth] && cell.high[depth] === side.cells[begin].high[depth];
      while (end < side.cells.length && same(side.cells[end])) end += 1;
      const { low, high } = side.cells[begin];
      const label = low[depth] === high[depth] ? `${low[depth]}` : `${low[depth]}–${high[depth]}`;
      const from = (isColumn ? grid.x : grid.y) + begin * step;
      const length = (end - begin) * step;
      const box = isColumn ? { x: from, y: across, width: length, height: lane - 2 } : { x: across, y: from, width: lane - 2, height: length };
      drawing.append(s("rect", { ...box, class: "lane", fill: axisColours.get(axis.name) || "#888", "fill-opacity": 0.35 + 0.55 * (low[depth] / Math.max(1, axis.size - 1)) }, s("title", {}, `${axis.name} ${label}`)));
      if (length > label.length * 7 + 4 && (isColumn || length > 12)) {
        drawing.append(s("text", { x: box.x + box.width / 2, y: box.y + box.height / 2 + 3.5, class: "lane-label" }, label));
      }
      begin = end;
    }
    drawing.append(isColumn
      ? s("text", { x: grid.x - 4, y: across + 11, class: "axis-label", "text-anchor": "end" }, axis.name)
      : s("text", { x: across + lane / 2 - 1, y: grid.y + grid.height + 13, class: "axis-label", "text-anchor": "middle" }, axis.name));
  });
}

function drawCells(drawing, rows, columns, grid, choose) {
  const width = grid.width / Math.max(1, columns.cells.length);
  const height = grid.height / Math.max(1, rows.cells.length);
  const gap = Math.min(width, height) > 6 ? 1 : 0;
  rows.cells.forEach((row, i) => columns.cells.forEach((column, j) => {
    const ours = isChosen(row, rows.axes) && isChosen(column, columns.axes);
    const cell = s("rect", {
      x: grid.x + j * width, y: grid.y + i * height, width: Math.max(0.5, width - gap), height: Math.max(0.5, height - gap),
      class: ours ? "cell is-ours" : "cell", style: ours ? null : `fill:${mixedColour(row, rows, column, columns)}`, onclick: () => choose({ ...firstOf(row, rows.axes), ...firstOf(column, columns.axes) }),
    }, s("title", {}, cellTitle(row, rows) + cellTitle(column, columns)));
    drawing.append(cell);
  }));
}

/** The colours of the axes that cut a cell's row and column, lighter for lower coordinates. */
function mixedColour(row, rows, column, columns) {
  const tints = [[row, rows], [column, columns]].flatMap(([cell, side]) => side.axes.map((axis, depth) =>
    `color-mix(in oklab, ${axisColours.get(axis.name) || "#888"} ${10 + Math.round(28 * (cell.low[depth] / Math.max(1, axis.size - 1)))}%, var(--surface))`));
  if (!tints.length) return "var(--raised)";
  return tints.reduce((mixed, tint) => `color-mix(in oklab, ${mixed}, ${tint})`);
}

function isChosen(cell, axes) {
  return axes.every((axis, depth) => cell.low[depth] <= chosenRank.coordinates[axis.name] && chosenRank.coordinates[axis.name] <= cell.high[depth]);
}

function firstOf(cell, axes) {
  return Object.fromEntries(axes.map((axis, depth) => [axis.name, cell.low[depth]]));
}

function cellTitle(cell, side) {
  if (side.dim === null) return "";
  const who = side.axes.map((axis, depth) => `${axis.name} ${cell.low[depth] === cell.high[depth] ? cell.low[depth] : `${cell.low[depth]}–${cell.high[depth]}`}`);
  return `dim ${side.dim}: ${cell.start} to ${cell.stop}${who.length ? ` (${who.join(", ")})` : ""}\n`;
}

// --- what the chosen rank holds -----------------------------------------------------------------------------------

/** Whether the rank at `coordinates` has a part of `parameter` at all. */
function stageHolds(parameter, coordinates) {
  const stages = list(parameter.stages);
  return !stages.length || !stageAxis || stages.includes(coordinates[stageAxis.name]);
}

/** How many tensors of a class one rank has parts of; those of several stages are taken as dealt out evenly. */
function tensorsHeld(parameter) {
  const stages = stageAxis ? list(parameter.stages).length : 0;
  return (parameter.count || 1) / Math.max(1, Math.min(stages, parameter.count || 1));
}

function tensorsText(parameter) {
  const count = tensorsHeld(parameter);
  return Number.isInteger(count) ? formatWhole(count) : `about ${formatWhole(count)}`;
}

function heldWords(parameter) {
  const rank = rankOfCoordinates(chosenRank.coordinates, meshAxes);
  if (!stageHolds(parameter, chosenRank.coordinates)) {
    return [h("p", {}, h("b", {}, `Rank ${rank} holds nothing of it: `), `it lies on stage ${parameter.stages.join(", ")}.`)];
  }
  const held = heldBy(parameter.placement, chosenRank.coordinates);
  const elements = countElements(held);
  const bytes = elementBytes(parameter);
  const copies = meshAxes.filter((axis) => axis !== stageAxis && !list(parameter.placement.axes).some((one) => one.name === axis.name && one.dim !== null)).reduce((product, axis) => product * axis.size, 1);
  return [h("p", {},
    h("b", {}, `Rank ${rank} holds `), h("span", { class: "mono held" }, rangesText(held)),
    `: ${plural(elements, "element")}${bytes ? `, ${formatBytes(elements * bytes)}` : ""}${tensorsHeld(parameter) > 1 ? ` of each of ${tensorsText(parameter)} tensors` : ""}.`,
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
