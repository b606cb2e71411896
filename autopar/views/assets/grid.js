// The drawing of a tensor as a grid of pieces, with a strip for each axis that cuts it.
//
// Pieces are coloured by their number along one of these axes: equal colours are of the same ranks of it. The colours go
// from dark to light (viridis), which all eyes order alike, and are none of the axes' own.

const BOX_CELLS = 64; // drawn a dim; more are merged
const BOX_CELLS_COMPACT = 16;
const LANE = 16;
const VIRIDIS = ["#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"];

/** {element, update}: update() marks what the chosen rank holds. choose(coordinates): a click on a piece. by: the name
 * of the axis that gives the colours; one that cuts what is drawn, else the first that does.
 */
function drawBoxes(placement, compact, choose, by) {
  const [rowDim, columnDim] = drawnDims(placement);
  const most = compact ? BOX_CELLS_COMPACT : BOX_CELLS;
  const rows = sideOf(placement, rowDim, most);
  const columns = sideOf(placement, columnDim, most);
  const width = compact ? 340 : 720;
  const left = rowDim === null ? 30 : 52 + rows.axes.length * LANE;
  const top = 22 + columns.axes.length * LANE;
  const grid = { x: left, y: top, width: width - left - 8, height: rowDim === null ? 30 : compact ? 170 : 220 };
  const cutting = [...rows.axes, ...columns.axes];
  const coloured = cutting.find((axis) => axis.name === by) || cutting[0] || null;
  const ours = s("g", { class: "ours" });
  const cover = s("rect", { ...grid, class: "cover" });
  const drawing = s("svg", { viewBox: `0 0 ${width} ${top + grid.height + 20}`, class: "boxes-svg", role: "img", "aria-label": splitWords(placement) },
    s("text", { x: grid.x, y: 12 }, `dim ${columnDim}: ${formatWhole(placement.shape[columnDim])}`),
    rowDim !== null && [s("text", { x: 2, y: grid.y + 10 }, `dim ${rowDim}`), s("text", { x: 2, y: grid.y + 24 }, formatWhole(placement.shape[rowDim]))],
    lanesOf(columns, grid, true, coloured), lanesOf(rows, grid, false, coloured),
    bandsOf(columns, grid, true, coloured), bandsOf(rows, grid, false, coloured),
    s("path", { class: "grid-lines", d: gridLines(rows, columns, grid) }),
    s("rect", { ...grid, class: "outline" }), ours, cover);
  pointAtPieces(cover, rows, columns, choose);
  const update = () => ours.replaceChildren(...chosenBoxes(rows, columns, grid));
  return { element: h("figure", {}, drawing, pieceLegend(coloured), h("figcaption", { class: "muted" }, captionOf(placement, rows, columns))), update };
}

/** The two dims to draw, rows first: those that are cut, in their order; a tensor of one dim has no rows. */
function drawnDims(placement) {
  const dims = list(placement.shape).map((_, dim) => dim);
  const cut = dims.filter((dim) => axesOfDim(placement, dim).length);
  const chosen = [...cut, ...dims.filter((dim) => !cut.includes(dim))].slice(0, 2).sort((left, right) => left - right);
  return chosen.length === 1 ? [null, chosen[0]] : chosen;
}

function sideOf(placement, dim, most) {
  if (dim === null) return { dim, axes: [], cells: [{ start: 0, stop: 1, low: [], high: [], merged: 1 }] };
  const axes = axesOfDim(placement, dim);
  return { dim, axes, cells: cellsOfDim(placement.shape[dim], axes, most) };
}

function captionOf(placement, rows, columns) {
  const merged = Math.max(1, ...[...rows.cells, ...columns.cells].map((cell) => cell.merged));
  const others = list(placement.shape).map((_, dim) => dim).filter((dim) => dim !== rows.dim && dim !== columns.dim);
  const other = (dim) => {
    const cut = axesOfDim(placement, dim).map((axis) => axis.name);
    return `dim ${dim} (${formatWhole(placement.shape[dim])}${cut.length ? `, cut by ${cut.join(", ")}` : ""})`;
  };
  return [
    merged > 1 && `A box stands for up to ${formatWhole(merged)} pieces. `,
    others.length > 0 && `Not drawn: ${others.map(other).join("; ")}.`,
  ];
}

/** What the colours say, with one swatch for each number while they can be told apart. */
function pieceLegend(axis) {
  const frame = h("li", {}, h("i", { class: "ours-mark" }), "framed: what the chosen rank holds");
  if (!axis) return h("ul", { class: "legend piece-legend" }, frame);
  const numbers = axis.size <= 16 ? [...Array(axis.size).keys()] : [0, axis.size - 1];
  return h("ul", { class: "legend piece-legend" },
    h("li", {}, "Equal colour: the same piece along ", axisChip(axis.name)),
    h("li", { class: "swatches" }, numbers.map((number) => h("span", { style: `background:${pieceColour(number, axis)};color:${inkOn(pieceColour(number, axis))}` }, formatWhole(number)))),
    frame);
}

/** The colour of a piece by its number along `axis`. */
function pieceColour(number, axis) {
  const place = (number / Math.max(1, axis.size - 1)) * (VIRIDIS.length - 1);
  const low = Math.min(VIRIDIS.length - 2, Math.floor(place));
  const part = (at) => {
    const [from, to] = [VIRIDIS[low], VIRIDIS[low + 1]].map((colour) => parseInt(colour.slice(at, at + 2), 16));
    return Math.round(from + (to - from) * (place - low)).toString(16).padStart(2, "0");
  };
  return `#${part(1)}${part(3)}${part(5)}`;
}

/** Strips beside the grid: one an axis, with the coordinates of its ranks; coloured: the axis that gives the colours. */
function lanesOf(side, grid, isColumn, coloured) {
  const extent = isColumn ? grid.width : grid.height;
  const step = extent / Math.max(1, side.cells.length);
  return side.axes.map((axis, depth) => {
    const across = (isColumn ? grid.y : grid.x) - (side.axes.length - depth) * LANE;
    const runs = runsOf(side.cells, depth);
    const longest = Math.max(...runs.map(({ low, high }) => (low === high ? `${low}` : `${low}–${high}`).length), 1);
    // Where labels are too long for all, every second, third … has one.
    const stride = Math.ceil((isColumn ? longest * 7 + 3 : 12) / ((extent / Math.max(1, runs.length)) || 1));
    const parts = runs.map(({ begin, end, low, high }, index) => {
      const label = low === high ? `${low}` : `${low}–${high}`;
      const from = (isColumn ? grid.x : grid.y) + begin * step;
      const length = (end - begin) * step;
      const box = isColumn ? { x: from, y: across, width: length, height: LANE - 2 } : { x: across, y: from, width: LANE - 2, height: length };
      const fits = index % stride === 0 && (isColumn || label.length <= 2);
      return [
        s("rect", { ...box, class: "lane", style: axis === coloured && `fill:${pieceColour(low, axis)}` }, s("title", {}, `${axis.name} ${label}`)),
        fits && s("text", { x: box.x + box.width / 2, y: box.y + box.height / 2 + 3.5, class: "lane-label", style: axis === coloured && `fill:${inkOn(pieceColour(low, axis))}` }, label),
      ];
    });
    const name = isColumn ? { x: grid.x - 4, y: across + 11, "text-anchor": "end" } : { x: across + LANE / 2 - 1, y: grid.y + grid.height + 13, "text-anchor": "middle" };
    return [parts, s("text", { ...name, class: "axis-label" }, axis.name)];
  });
}

/** Neighbouring cells with the same coordinates on one axis. */
function runsOf(cells, depth) {
  const runs = [];
  cells.forEach((cell, index) => {
    const last = runs[runs.length - 1];
    if (last && last.low === cell.low[depth] && last.high === cell.high[depth]) last.end = index + 1;
    else runs.push({ begin: index, end: index + 1, low: cell.low[depth], high: cell.high[depth] });
  });
  return runs;
}

/** The colours of the pieces, over the whole grid. */
function bandsOf(side, grid, isColumn, coloured) {
  const step = (isColumn ? grid.width : grid.height) / Math.max(1, side.cells.length);
  return side.axes.map((axis, depth) => axis === coloured && runsOf(side.cells, depth).map(({ begin, end, low }) => {
    const along = { from: begin * step, length: (end - begin) * step };
    const box = isColumn ? { ...grid, x: grid.x + along.from, width: along.length } : { ...grid, y: grid.y + along.from, height: along.length };
    return s("rect", { ...box, fill: pieceColour(low, axis), "fill-opacity": 0.85 });
  }));
}

function gridLines(rows, columns, grid) {
  const width = grid.width / Math.max(1, columns.cells.length);
  const height = grid.height / Math.max(1, rows.cells.length);
  const down = width > 4 ? columns.cells.map((_, index) => `M${grid.x + index * width},${grid.y}v${grid.height}`) : [];
  const across = height > 3 ? rows.cells.map((_, index) => `M${grid.x},${grid.y + index * height}h${grid.width}`) : [];
  return [...down, ...across].join("");
}

function chosenBoxes(rows, columns, grid) {
  const width = grid.width / Math.max(1, columns.cells.length);
  const height = grid.height / Math.max(1, rows.cells.length);
  const boxes = [];
  rows.cells.forEach((row, i) => isChosen(row, rows.axes) && columns.cells.forEach((column, j) => isChosen(column, columns.axes)
    && boxes.push(
      s("rect", { x: grid.x + j * width, y: grid.y + i * height, width, height }),
      s("path", { d: `M${grid.x + j * width},${grid.y + i * height}h${width}v${height}h${-width}z` }))));
  return boxes;
}

function isChosen(cell, axes) {
  return axes.every((axis, depth) => {
    const coordinate = chosenRank.coordinates[axis.name] || 0;
    return cell.low[depth] <= coordinate && coordinate <= cell.high[depth];
  });
}

/** The piece under the pointer says whose it is; a click chooses a rank that holds it. */
function pointAtPieces(cover, rows, columns, choose) {
  const under = (event) => {
    const box = cover.getBoundingClientRect();
    const pick = (side, share) => side.cells[Math.min(side.cells.length - 1, Math.max(0, Math.floor(share * side.cells.length)))];
    return [[pick(rows, (event.clientY - box.top) / box.height), rows], [pick(columns, (event.clientX - box.left) / box.width), columns]];
  };
  cover.addEventListener("pointermove", (event) => {
    const lines = under(event).flatMap(([cell, side]) => (side.dim === null || !cell ? [] : cellWords(cell, side)));
    showTip(lines, event.clientX, event.clientY);
  });
  cover.addEventListener("pointerleave", hideTip);
  cover.addEventListener("click", (event) => {
    choose(Object.fromEntries(under(event).flatMap(([cell, side]) => (cell ? side.axes.map((axis, depth) => [axis.name, cell.low[depth]]) : []))));
  });
}

function cellWords(cell, side) {
  const range = (low, high) => (low === high ? `${low}` : `${low} to ${high}`);
  const who = side.axes.map((axis, depth) => `${axis.name} ${range(cell.low[depth], cell.high[depth])}`);
  return `dim ${side.dim}: ${formatWhole(cell.start)} to ${formatWhole(cell.stop)}${who.length ? `, ${who.join(", ")}` : ""}`;
}
