// Painting of the timeline: only what is in view, and at most one event a pixel of a row.

const EVENT_COLOURS = {
  forward: "#56b4e9", backward: "#e69f00", backward_input: "#e69f00", backward_weight: "#f0e442", gather: "#009e73",
  reduce: "#cc79a7", collective: "#0072b2", send: "#d55e00", optimizer: "#8a8f98", repeated: "#c3ccd6",
};
const GUTTER = { wide: 178, narrow: 100 };
const RULER = 24;
const RANK_GAP = 12;

function eventColour(kind) {
  return EVENT_COLOURS[kind] || "#8a8f98";
}

/** Rows from top to bottom: {rank, name, y, height, starts, ends, events, isFirst}. Events are sorted by their start. */
function timelineRows(timeline, hiddenTracks) {
  const rows = [];
  const roomier = list(timeline.ranks).length === 1 ? 2.4 : list(timeline.ranks).length <= 4 ? 1.4 : 1;
  let y = 4;
  list(timeline.ranks).forEach((rank, index) => {
    const tracks = list(rank.tracks).filter((track) => !hiddenTracks.has(track.name));
    tracks.forEach((track, place) => {
      const height = (place === 0 ? 20 : 13) * roomier;
      const events = list(track.events).slice().sort((left, right) => left[0] - right[0]);
      let last = -Infinity;
      const ends = events.map((event) => (last = Math.max(last, event[0] + event[1])));
      rows.push({ rank: index, name: track.name, y, height, events, starts: events.map((event) => event[0]), ends, isFirst: place === 0 });
      y += height + 2;
    });
    y += RANK_GAP;
  });
  return { rows, height: y };
}

/** view: {from, to} seconds, {scroll} pixels. */
function paintTimeline(context, width, height, timeline, layout, view, chosen) {
  const gutter = width < 600 ? GUTTER.narrow : GUTTER.wide;
  const plot = { left: gutter, width: width - gutter - 6 };
  const at = (seconds) => plot.left + ((seconds - view.from) / (view.to - view.from)) * plot.width;
  context.save();
  context.beginPath();
  context.rect(plot.left, 0, plot.width, height - RULER);
  context.clip();
  paintBands(context, width, layout, view, timeline);
  for (const row of layout.rows) {
    const y = row.y - view.scroll;
    if (y + row.height < 0 || y > height - RULER) continue;
    paintRow(context, row, y, at, view, plot, chosen);
  }
  paintArrows(context, timeline, layout, view, at, height);
  context.restore();
  paintGutter(context, timeline, layout, view, gutter, height);
  context.fillStyle = pageColour("--surface");
  context.fillRect(0, height - RULER, width, RULER);
  paintTimeAxis(context, view.from, view.to, at, height - RULER, plot.width);
  return plot;
}

function paintBands(context, width, layout, view) {
  context.fillStyle = pageColour("--ground");
  for (const row of layout.rows) context.fillRect(0, row.y - view.scroll, width, row.height);
}

function paintRow(context, row, y, at, view, plot, chosen) {
  const first = lastAtMost(row.ends, view.from) + 1;
  let filled = -1;
  for (let index = first; index < row.events.length && row.starts[index] < view.to; index += 1) {
    const event = row.events[index];
    const left = Math.max(plot.left, at(event[0]));
    const right = Math.min(plot.left + plot.width, at(event[0] + event[1]));
    // What ends inside a pixel that is drawn already would not be seen.
    if (right <= filled) continue;
    const width = Math.max(1, right - left);
    const colour = eventColour(event[3]);
    context.fillStyle = colour;
    context.fillRect(left, y, width > 3 ? width - 0.75 : width, row.height);
    filled = Math.max(Math.ceil(right), left + 1);
    if (width > 3 && String(event[3]).startsWith("backward")) {
      context.fillStyle = "rgba(0, 0, 0, 0.45)"; // the mark of a backward, for eyes that do not tell the colours apart
      context.fillRect(left, y + row.height - 3, width - 0.75, 3);
    }
    if (width > 34) paintLabel(context, event[2], left, y, width, row.height, colour);
    if (chosen && chosen.event === event) {
      context.strokeStyle = pageColour("--text");
      context.lineWidth = 2;
      context.strokeRect(left + 1, y + 1, width - 2, row.height - 2);
      context.lineWidth = 1;
    }
  }
}

function paintLabel(context, label, left, y, width, height, colour) {
  const room = Math.floor((width - 8) / 5.6);
  const text = String(label || "");
  context.fillStyle = inkOn(colour);
  context.textAlign = "left";
  context.fillText(text.length > room ? `${text.slice(0, Math.max(1, room - 1))}…` : text, left + 4, y + height / 2 - (height > 16 ? 1 : 0));
}

function paintGutter(context, timeline, layout, view, gutter, height) {
  context.fillStyle = pageColour("--surface");
  context.fillRect(0, 0, gutter - 4, height);
  for (const row of layout.rows) {
    const y = row.y - view.scroll + row.height / 2;
    if (y < -30 || y > height - RULER) continue;
    const rank = timeline.ranks[row.rank];
    if (row.isFirst) {
      context.fillStyle = pageColour("--text");
      context.textAlign = "left";
      context.font = `600 ${FONT}`;
      context.fillText(clipped(rank.name, gutter === GUTTER.wide ? 12 : 14), 4, y);
      context.font = FONT;
      if (isNumber(rank.bubble)) {
        context.fillStyle = pageColour("--muted");
        context.fillText(gutter === GUTTER.wide ? `bubble ${formatShare(rank.bubble)}` : formatShare(rank.bubble), 4, y + 15);
      }
    }
    // Narrow: the first track's name only where the rank's own leaves room, under it in a roomy row.
    const below = gutter === GUTTER.narrow && row.isFirst;
    if (!below || row.height >= 28) {
      context.fillStyle = pageColour("--muted");
      context.textAlign = "right";
      context.font = "10px system-ui, sans-serif";
      context.fillText(clipped(row.name === "communication" ? "messages" : row.name, 13), gutter - 8, y + (below ? 13 : 0));
      context.font = FONT;
    }
  }
}

function clipped(text, most) {
  const whole = String(text || "");
  return whole.length > most ? `${whole.slice(0, most - 1)}…` : whole;
}

/** Sends between ranks; left out where there would be too many to tell apart. */
function paintArrows(context, timeline, layout, view, at, height) {
  const seen = list(timeline.arrows).filter(([, from, , to]) => to >= view.from && from <= view.to);
  if (!seen.length || seen.length > 300) return;
  const middle = new Map(layout.rows.filter((row) => row.isFirst).map((row) => [row.rank, row.y + row.height / 2]));
  context.strokeStyle = context.fillStyle = pageColour("--text");
  context.globalAlpha = 0.4;
  for (const [fromRank, from, toRank, to] of seen) {
    if (!middle.has(fromRank) || !middle.has(toRank)) continue;
    const start = { x: at(from), y: middle.get(fromRank) - view.scroll };
    const stop = { x: at(to), y: middle.get(toRank) - view.scroll };
    if ((start.y < 0 && stop.y < 0) || (start.y > height && stop.y > height)) continue;
    context.beginPath();
    context.moveTo(start.x, start.y);
    context.lineTo(stop.x, stop.y);
    context.stroke();
    const angle = Math.atan2(stop.y - start.y, stop.x - start.x);
    context.beginPath();
    context.moveTo(stop.x, stop.y);
    context.lineTo(stop.x - 6 * Math.cos(angle - 0.4), stop.y - 6 * Math.sin(angle - 0.4));
    context.lineTo(stop.x - 6 * Math.cos(angle + 0.4), stop.y - 6 * Math.sin(angle + 0.4));
    context.fill();
  }
  context.globalAlpha = 1;
}

/** The whole step in small: compute of all ranks, and the window that the timeline shows. cache: of the drawn events. */
function paintMinimap(context, width, height, layout, view, total, cache) {
  const gutter = width < 600 ? GUTTER.narrow : GUTTER.wide;
  const plot = { left: gutter, width: width - gutter - 6 };
  if (cache.layout !== layout || cache.width !== width || cache.height !== height) {
    const ratio = window.devicePixelRatio || 1;
    cache.picture = h("canvas", { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    const inside = cache.picture.getContext("2d");
    inside.setTransform(ratio, 0, 0, ratio, 0, 0);
    paintSmallRows(inside, height, layout, plot, total);
    Object.assign(cache, { layout, width, height });
  }
  context.drawImage(cache.picture, 0, 0, width, height);
  const left = plot.left + (view.from / total) * plot.width;
  const right = plot.left + (view.to / total) * plot.width;
  context.fillStyle = pageColour("--veil");
  context.fillRect(plot.left, 0, left - plot.left, height);
  context.fillRect(right, 0, plot.left + plot.width - right, height);
  context.strokeStyle = pageColour("--accent");
  context.strokeRect(left + 0.5, 0.5, Math.max(2, right - left - 1), height - 1);
}

function paintSmallRows(context, height, layout, plot, total) {
  const rows = layout.rows.filter((row) => row.isFirst);
  const line = Math.max(1, (height - 4) / Math.max(1, rows.length));
  rows.forEach((row, index) => {
    let filled = -1;
    for (const event of row.events) {
      const left = plot.left + (event[0] / total) * plot.width;
      const right = left + (event[1] / total) * plot.width;
      if (right <= filled) continue;
      context.fillStyle = eventColour(event[3]);
      context.fillRect(left, 2 + index * line, Math.max(0.7, right - left), Math.max(0.8, line - 0.5));
      filled = right;
    }
  });
}
