// The timeline of a step: all ranks, what each computes and sends, and where it waits.

const timelineView = { id: "timeline", label: "Timeline", make: makeTimeline };

function makeTimeline(panel) {
  const timeline = content.timeline;
  const ranks = timeline ? list(timeline.ranks) : [];
  if (!ranks.some((rank) => list(rank.tracks).some((track) => list(track.events).length))) {
    panel.append(emptyNote("The report holds no timeline: it is made where the plan has its program, and a step of it was simulated."));
    return {};
  }
  panel.classList.add("fills", "timeline");
  const total = timeline.step_s || Math.max(...ranks.flatMap((rank) => list(rank.tracks).flatMap((track) => list(track.events).map((event) => event[0] + event[1]))));
  const trackNames = [...new Set(ranks.flatMap((rank) => list(rank.tracks).map((track) => track.name)))];
  const hidden = new Set();
  const view = { from: 0, to: total, scroll: 0 };
  let layout = timelineRows(timeline, hidden);
  let plot = { left: GUTTER.wide, width: 1 };
  let chosen = null;
  const smallCache = {};
  const small = h("div", { class: "minimap" });
  const place = h("div", { class: "rows" });
  if (layout.height < 300) place.style.flex = `0 0 ${layout.height + RULER + 8}px`;
  const map = makeCanvas(small, (context, width, height) => paintMinimap(context, width, height, layout, view, total, smallCache), { "aria-hidden": "true" });
  const chart = makeCanvas(place, (context, width, height) => { plot = paintTimeline(context, width, height, timeline, layout, view, chosen); }, {
    tabindex: "0", role: "img", "aria-label": `Timeline of ${plural(ranks.length, "rank")} over ${formatSeconds(total)}. Arrow keys move, + and − zoom, 0 shows all; the numbers by rank stand below.`,
  });
  const redraw = () => { chart.redraw(); map.redraw(); };

  const moves = {
    set(from, to) {
      const span = Math.min(total, Math.max(total * 1e-6, to - from));
      view.from = Math.min(total - span, Math.max(0, from));
      view.to = view.from + span;
      redraw();
    },
    zoom(factor, seconds) {
      const middle = seconds === undefined ? (view.from + view.to) / 2 : seconds;
      moves.set(middle - (middle - view.from) / factor, middle + (view.to - middle) / factor);
    },
    pan(pixels) {
      const seconds = (pixels / plot.width) * (view.to - view.from);
      moves.set(view.from + seconds, view.to + seconds);
    },
    scroll(pixels) {
      const room = Math.max(0, layout.height + RULER - chart.canvas.clientHeight);
      view.scroll = Math.min(room, Math.max(0, view.scroll + pixels));
      redraw();
    },
    fit: () => moves.set(0, total),
    time: (x) => view.from + ((x - plot.left) / plot.width) * (view.to - view.from),
    find: (x, y) => findEvent(layout, view, moves, x, y, plot),
    choose(found) {
      chosen = found;
      redraw();
      if (found && found.event[4] && items[found.event[4]]) goTo(graphLink(found.event[4]));
    },
  };
  timelinePointer(chart.canvas, moves, timeline, () => plot);
  minimapPointer(map.canvas, moves, view, total, () => plot);
  const tracks = trackNames.map((name) => h("label", { class: "check" }, h("input", {
    type: "checkbox", checked: true, onchange: (event) => {
      if (event.target.checked) hidden.delete(name);
      else hidden.add(name);
      layout = timelineRows(timeline, hidden);
      moves.scroll(0);
    },
  }), name));
  append(panel, [
    h("div", { class: "toolbar" }, timelineLegend(timeline), trackNames.length > 1 && h("span", { class: "tracks" }, tracks),
      h("span", { class: "zoom-inline" },
        h("button", { type: "button", class: "icon", "aria-label": "Zoom in (+)", onclick: () => moves.zoom(1.5) }, "+"),
        h("button", { type: "button", class: "icon", "aria-label": "Zoom out (-)", onclick: () => moves.zoom(1 / 1.5) }, "−"),
        h("button", { type: "button", class: "icon", "aria-label": "The whole step (0)", onclick: moves.fit }, "⤢"))),
    small,
    place,
    timeline.note && h("p", { class: "muted timeline-note" }, timeline.note),
    h("details", { class: "numbers" }, h("summary", {}, "Numbers by rank"), h("div", { class: "scroll" }, rankNumbers(timeline, total))),
  ]);
  return { key: (event) => timelineKey(event.key, moves) };
}

function findEvent(layout, view, moves, x, y, plot) {
  if (x < plot.left) return null;
  const row = layout.rows.find((one) => y + view.scroll >= one.y && y + view.scroll <= one.y + one.height);
  if (!row) return null;
  const slack = ((view.to - view.from) / plot.width) * 2;
  const time = moves.time(x);
  let best = null;
  for (let index = lastAtMost(row.starts, time + slack); index >= 0 && row.ends[index] >= time - slack; index -= 1) {
    const [start, length] = row.events[index];
    if (start + length < time - slack) continue;
    best = row.events[index];
    if (start <= time && time <= start + length) break;
  }
  return best && { event: best, row };
}

function timelineKey(key, moves) {
  const actions = {
    ArrowLeft: () => moves.pan(-80), ArrowRight: () => moves.pan(80), ArrowUp: () => moves.scroll(-60), ArrowDown: () => moves.scroll(60),
    PageUp: () => moves.scroll(-300), PageDown: () => moves.scroll(300), "+": () => moves.zoom(1.5), "=": () => moves.zoom(1.5), "-": () => moves.zoom(1 / 1.5), 0: moves.fit,
  };
  if (!actions[key]) return false;
  actions[key]();
  return true;
}

function timelinePointer(canvas, moves, timeline, plotOf) {
  const pointers = new Map();
  let moved = 0;
  let pinch = 0;
  const local = (event) => {
    const rect = canvas.getBoundingClientRect();
    return [event.clientX - rect.left, event.clientY - rect.top];
  };
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const [x] = local(event);
    if (x < plotOf().left) moves.scroll(event.deltaY);
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) moves.pan(event.deltaX || event.deltaY);
    else moves.zoom(Math.exp(-event.deltaY * (event.ctrlKey ? 0.01 : 0.002)), moves.time(x));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, local(event));
    canvas.setPointerCapture(event.pointerId);
    if (pointers.size === 1) moved = 0;
    pinch = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const now = local(event);
    const before = pointers.get(event.pointerId);
    if (!before) return showEventTip(moves.find(...now), timeline, event, canvas);
    moved += Math.abs(now[0] - before[0]) + Math.abs(now[1] - before[1]);
    pointers.set(event.pointerId, now);
    hideTip();
    if (pointers.size === 1) {
      moves.pan(before[0] - now[0]);
      moves.scroll(before[1] - now[1]);
    } else {
      const [[ax], [bx]] = [...pointers.values()];
      if (pinch) moves.zoom(Math.abs(ax - bx) / pinch, moves.time((ax + bx) / 2));
      pinch = Math.max(10, Math.abs(ax - bx));
    }
  });
  canvas.addEventListener("pointerup", (event) => {
    pointers.delete(event.pointerId);
    if (moved < 4) moves.choose(moves.find(...local(event)));
    if (moved < 4 && event.pointerType === "touch") showEventTip(moves.find(...local(event)), timeline, event, canvas);
  });
  canvas.addEventListener("pointercancel", (event) => pointers.delete(event.pointerId));
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("keydown", (event) => timelineKey(event.key, moves) && (event.preventDefault(), event.stopPropagation()));
}

function showEventTip(found, timeline, event, canvas) {
  canvas.style.cursor = found && found.event[4] ? "pointer" : "";
  if (!found) return hideTip();
  const [start, length, label, kind, item] = found.event;
  showTip([
    label || kind,
    `${(timeline.kinds && timeline.kinds[kind]) || kind}, ${found.row.name} of ${timeline.ranks[found.row.rank].name}`,
    `${formatSeconds(length)}, from ${formatSeconds(start)}`,
    item && items[item] ? "click: show it in the graph" : null,
  ].filter(Boolean), event.clientX, event.clientY);
}

function minimapPointer(canvas, moves, view, total, plotOf) {
  const centre = (event) => {
    if (!event.buttons) return;
    const { left } = canvas.getBoundingClientRect();
    const middle = ((event.clientX - left - plotOf().left) / plotOf().width) * total;
    const half = (view.to - view.from) / 2;
    moves.set(middle - half, middle + half);
  };
  canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); centre(event); });
  canvas.addEventListener("pointermove", centre);
}

function timelineLegend(timeline) {
  const used = new Set();
  for (const rank of timeline.ranks) for (const track of list(rank.tracks)) for (const event of list(track.events)) used.add(event[3]);
  return h("ul", { class: "legend" }, [...used].map((kind) => h("li", {},
    h("i", { class: String(kind).startsWith("backward") ? "underlined" : null, style: `background-color:${eventColour(kind)}` }), (timeline.kinds && timeline.kinds[kind]) || kind)));
}

/** How long each rank does what: the timeline in numbers. */
function rankNumbers(timeline, total) {
  const rows = list(timeline.ranks).map((rank) => {
    const busy = { forward: 0, backward: 0, optimizer: 0, other: 0 };
    for (const track of list(rank.tracks)) {
      for (const [, length, , kind] of list(track.events)) {
        const family = String(kind).startsWith("backward") ? "backward" : kind in busy ? kind : "other";
        busy[family] += length;
      }
    }
    return { name: rank.name, bubble: rank.bubble, ...busy };
  });
  const seconds = (title, key) => ({ title, numeric: true, value: (row) => row[key], show: (row) => formatSeconds(row[key]) });
  return makeTable(
    [
      { title: "Rank", value: (row) => row.name, show: (row) => row.name },
      { title: "Bubble", numeric: true, value: (row) => row.bubble, show: (row) => formatShare(row.bubble) },
      seconds("Forward", "forward"), seconds("Backward", "backward"), seconds("Optimizer", "optimizer"), seconds("Communication", "other"),
      { title: "Busy", numeric: true, hint: "forward, backward and optimizer, of the step", value: (row) => row.forward + row.backward + row.optimizer, show: (row) => formatShare((row.forward + row.backward + row.optimizer) / total) },
    ],
    { rows, label: "Time by rank" },
  ).element;
}
