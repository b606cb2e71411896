// Which part of a tensor a rank holds. Nothing here knows of the page: tests run it under node against torch.
//
// A split cuts the local dim that earlier splits left: seen as (outer, rest), the rest goes in `size` contiguous pieces.
// Intervals are [start, stop) in the tensor's own indices, ascending.

/** What is left of a dim of `length`: splits are {size, outer, zigzag, coordinate}, in mesh order. */
function localIntervals(length, splits) {
  let held = length > 0 ? [[0, length]] : [];
  for (const split of splits) held = cutIntervals(held, split);
  return joinIntervals(held);
}

function cutIntervals(intervals, split) {
  const total = countIntervals(intervals);
  const outer = Math.max(1, split.outer || 1);
  const kept = [];
  for (let number = 0; number < outer; number += 1) {
    const begin = Math.floor((number * total) / outer);
    const end = Math.floor(((number + 1) * total) / outer);
    // Pieces of the same length, as torch.chunk makes them: the last ones are shorter, or empty.
    const piece = Math.ceil((end - begin) / split.size);
    const place = split.zigzag && number % 2 ? split.size - 1 - split.coordinate : split.coordinate;
    kept.push([Math.min(begin + place * piece, end), Math.min(begin + (place + 1) * piece, end)]);
  }
  return pickIntervals(intervals, kept);
}

/** The parts of `intervals` at the local positions `kept`; both ascend. */
function pickIntervals(intervals, kept) {
  const picked = [];
  let index = 0;
  let before = 0; // elements in the intervals in front of `index`
  for (const [from, to] of kept) {
    let at = from;
    while (at < to) {
      while (at >= before + intervals[index][1] - intervals[index][0]) {
        before += intervals[index][1] - intervals[index][0];
        index += 1;
      }
      const [start, stop] = intervals[index];
      const take = Math.min(to - at, stop - start - (at - before));
      picked.push([start + at - before, start + at - before + take]);
      at += take;
    }
  }
  return picked;
}

function joinIntervals(intervals) {
  const joined = [];
  for (const [start, stop] of intervals) {
    const last = joined[joined.length - 1];
    if (last && last[1] === start) last[1] = stop;
    else joined.push([start, stop]);
  }
  return joined;
}

function countIntervals(intervals) {
  return intervals.reduce((sum, [start, stop]) => sum + stop - start, 0);
}

/** The axes of a placement that cut `dim`, in mesh order. */
function axesOfDim(placement, dim) {
  return (placement.axes || []).filter((axis) => axis.dim === dim && axis.size > 1);
}

/** For each dim the intervals that the rank at `coordinates` ({axis name: number}) holds. */
function heldBy(placement, coordinates) {
  return (placement.shape || []).map((length, dim) =>
    localIntervals(
      length,
      axesOfDim(placement, dim).map((axis) => ({ ...axis, coordinate: coordinates[axis.name] || 0 })),
    ),
  );
}

function countElements(held) {
  return held.reduce((product, intervals) => product * countIntervals(intervals), 1);
}

/** All pieces of one dim, ascending: {start, stop, at: one coordinate per axis of `axes`}. */
function piecesOfDim(length, axes) {
  const pieces = [];
  const at = axes.map(() => 0);
  const visit = (depth, held) => {
    if (depth === axes.length) {
      for (const [start, stop] of joinIntervals(held)) pieces.push({ start, stop, at: [...at] });
      return;
    }
    for (let coordinate = 0; coordinate < axes[depth].size; coordinate += 1) {
      at[depth] = coordinate;
      visit(depth + 1, cutIntervals(held, { ...axes[depth], coordinate }));
    }
  };
  visit(0, length > 0 ? [[0, length]] : []);
  return pieces.sort((left, right) => left.start - right.start);
}

/** At most `most` cells: neighbouring pieces drawn as one. {start, stop, low, high: coordinates, merged: how many}. */
function cellsOfDim(length, axes, most) {
  const pieces = piecesOfDim(length, axes);
  const step = Math.max(1, Math.ceil(pieces.length / most));
  const cells = [];
  for (let index = 0; index < pieces.length; index += step) {
    const group = pieces.slice(index, index + step);
    cells.push({
      start: group[0].start,
      stop: group[group.length - 1].stop,
      low: axes.map((_, axis) => Math.min(...group.map((piece) => piece.at[axis]))),
      high: axes.map((_, axis) => Math.max(...group.map((piece) => piece.at[axis]))),
      merged: group.length,
    });
  }
  return cells;
}

/** Ranks are numbered in mesh order, the last axis fastest. */
function coordinatesOfRank(rank, axes) {
  const coordinates = {};
  for (let index = axes.length - 1; index >= 0; index -= 1) {
    coordinates[axes[index].name] = rank % axes[index].size;
    rank = Math.floor(rank / axes[index].size);
  }
  return coordinates;
}

function rankOfCoordinates(coordinates, axes) {
  return axes.reduce((rank, axis) => rank * axis.size + (coordinates[axis.name] || 0), 0);
}

const DTYPE_BYTES = { f64: 8, f32: 4, tf32: 4, f16: 2, bf16: 2, f8: 1, i64: 8, i32: 4, i16: 2, i8: 1, u8: 1, bool: 1, c64: 8 };

/** Bytes of one element of `f32`, `float32`, `torch.bfloat16` …; null for what is not known. */
function bytesOfDtype(name) {
  const short = String(name || "")
    .replace("torch.", "")
    .replace("bfloat", "bf")
    .replace("float", "f")
    .replace("uint", "u")
    .replace("int", "i")
    .replace("complex", "c");
  if (short in DTYPE_BYTES) return DTYPE_BYTES[short];
  return short.startsWith("f8") ? 1 : null;
}

if (typeof module !== "undefined") {
  module.exports = { localIntervals, heldBy, countElements, piecesOfDim, cellsOfDim, coordinatesOfRank, rankOfCoordinates, bytesOfDtype };
}
