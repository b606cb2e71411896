// Memory over the step, stacked by category: what a rank holds, its limit, and its peak.

const memoryView = { id: "memory", label: "Memory", make: makeMemory };
const CHART = { left: 74, right: 14, top: 22, bottom: 26 };

function makeMemory(panel) {
  const curves = list(content.memory).filter((curve) => list(curve.times_s).length && curve.series);
  if (!curves.length) {
    panel.append(emptyNote("The report holds no memory over time: it is made with the plan's program, not from its numbers alone."));
    return {};
  }
  panel.classList.add("memory");
  const categories = [...new Set(curves.flatMap((curve) => Object.keys(curve.series)))];
  const state = { curve: curves[0], hidden: new Set(), at: null, categories, colours: memoryColours(categories) };
  const readout = h("div", { class: "readout", "aria-live": "polite" });
  const place = h("div", { class: "chart" });
  const label = () => `Memory of ${state.curve.name} over a step, peak ${formatBytes(peakOf(state).bytes)}. Arrow keys move along it.`;
  const { canvas, redraw } = makeCanvas(place, (context, width, height) => paintMemory(context, width, height, state), { tabindex: "0", role: "img" });
  const choice = h("select", { "aria-label": "Rank or stage", onchange: (event) => goTo(`#memory/${event.target.value}`) },
    curves.map((curve, index) => h("option", { value: index }, `${curve.name} (${formatBytes(curve.peak_bytes)})`)));
  const legend = h("ul", { class: "legend toggles" }, categories.map((category) => legendToggle(category, state, refresh)));
  const peaks = h("div", { class: "peaks" });

  function refresh() {
    canvas.setAttribute("aria-label", label());
    readout.replaceChildren(memoryTable(state));
    peaks.replaceChildren(peakBars(curves, state.curve));
    redraw();
  }

  canvas.addEventListener("pointermove", (event) => {
    const rect = canvas.getBoundingClientRect();
    const share = (event.clientX - rect.left - CHART.left) / (rect.width - CHART.left - CHART.right);
    state.at = share >= 0 && share <= 1 ? share * endOf(state.curve) : null;
    refresh();
  });
  canvas.addEventListener("pointerleave", () => { state.at = null; refresh(); });
  canvas.addEventListener("keydown", (event) => {
    const times = state.curve.times_s;
    const index = state.at === null ? peakOf(state).index : lastAtMost(times, state.at);
    const next = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: times.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    state.at = times[Math.min(times.length - 1, Math.max(0, next))];
    refresh();
  });
  append(panel, [
    h("div", { class: "toolbar" }, curves.length > 1 && h("label", {}, h("span", { class: "muted" }, "Rank"), choice), legend),
    h("div", { class: "memory-parts" }, h("div", { class: "card" }, place), h("div", { class: "card" }, readout)),
    curves.some((curve) => (curve.series.gathered || [0])[0] > 0) && h("p", { class: "muted" }, "Parameters that are gathered once and kept count from the beginning of the step to its end."),
    curves.length > 1 && section("Peaks of all ranks", peaks),
  ]);
  return {
    show(target) {
      state.curve = curves[parseInt(target, 10)] || curves.find((curve) => curve.name === target) || state.curve;
      state.at = null;
      choice.value = curves.indexOf(state.curve);
      refresh();
    },
  };
}

function legendToggle(category, state, refresh) {
  const button = h("button", {
    type: "button", "aria-pressed": "true", onclick: () => {
      if (!state.hidden.delete(category)) state.hidden.add(category);
      button.setAttribute("aria-pressed", String(!state.hidden.has(category)));
      refresh();
    },
  }, h("i", { style: `background-color:${memoryColour(category, state)}` }), category);
  return h("li", {}, button);
}

function memoryColour(category, state) {
  return state.colours.get(category);
}

function endOf(curve) {
  const step = (content.timeline && content.timeline.step_s) || headline.step_s || 0;
  return Math.max(curve.times_s[curve.times_s.length - 1], step) || 1;
}

function shownCategories(state) {
  return state.categories.filter((category) => !state.hidden.has(category) && list(state.curve.series[category]).length);
}

function totalAt(state, index) {
  return shownCategories(state).reduce((sum, category) => sum + (state.curve.series[category][index] || 0), 0);
}

function peakOf(state) {
  let best = { index: 0, bytes: -1 };
  state.curve.times_s.forEach((_, index) => {
    const bytes = totalAt(state, index);
    if (bytes > best.bytes) best = { index, bytes };
  });
  return best;
}

/** What is held at the chosen time, or at the peak. */
function memoryTable(state) {
  const peak = peakOf(state);
  const index = state.at === null ? peak.index : Math.max(0, lastAtMost(state.curve.times_s, state.at));
  const total = totalAt(state, index);
  const limit = headline.limit_bytes;
  const line = (colour, name, bytes) => h("tr", {}, h("th", { scope: "row" }, colour && h("i", { style: `background-color:${colour}` }), name), h("td", { class: "number" }, formatBytes(bytes)));
  return h("table", { class: "memory-table", "aria-label": "Memory by category" },
    h("caption", {}, state.at === null ? "At the peak, " : "At ", h("b", {}, tickText(state.at === null ? state.curve.times_s[index] : state.at, endOf(state.curve)))),
    h("tbody", {}, shownCategories(state).slice().reverse().map((category) => line(memoryColour(category, state), category, state.curve.series[category][index] || 0))),
    h("tfoot", {}, line(null, "Together", total), isNumber(limit) && line(null, total > limit ? "Over the limit" : "Left of the limit", Math.abs(limit - total))));
}

function paintMemory(context, width, height, state) {
  const { curve } = state;
  const end = endOf(curve);
  const limit = headline.limit_bytes;
  const peak = peakOf(state);
  // A limit far above what is held would press the curve flat: it is then only named.
  const showsLimit = isNumber(limit) && limit < peak.bytes * 3;
  const top = Math.max(peak.bytes, showsLimit ? limit : 0, 1) * 1.08;
  const plot = { width: width - CHART.left - CHART.right, height: height - CHART.top - CHART.bottom };
  const x = (seconds) => CHART.left + (seconds / end) * plot.width;
  const y = (bytes) => CHART.top + plot.height - (bytes / top) * plot.height;
  paintByteGrid(context, top, y, width, plot);
  paintAreas(context, state, x, y, end);
  paintTimeAxis(context, 0, end, x, CHART.top + plot.height, plot.width);
  if (isNumber(limit)) paintLimit(context, limit, showsLimit, y, width);
  paintPeak(context, peak, curve, x, y, width);
  if (state.at === null) return;
  context.strokeStyle = pageColour("--text");
  context.beginPath();
  context.moveTo(x(state.at), CHART.top);
  context.lineTo(x(state.at), CHART.top + plot.height);
  context.stroke();
}

function paintByteGrid(context, top, y, width, plot) {
  context.strokeStyle = pageColour("--line");
  context.fillStyle = pageColour("--muted");
  context.textAlign = "right";
  for (const tick of niceTicks(0, top, plot.height / 56, 2)) {
    const at = Math.round(y(tick)) + 0.5;
    context.beginPath();
    context.moveTo(CHART.left, at);
    context.lineTo(width - CHART.right, at);
    context.stroke();
    context.fillText(tick ? formatBytes(tick) : "0", CHART.left - 8, at);
  }
}

function paintAreas(context, state, x, y, end) {
  const { times_s, series } = state.curve;
  const below = new Float64Array(times_s.length);
  for (const category of shownCategories(state)) {
    const path = new Path2D();
    times_s.forEach((time, index) => {
      const value = y(below[index] + (series[category][index] || 0));
      if (index === 0) path.moveTo(x(time), value);
      else path.lineTo(x(time), value);
      path.lineTo(x(index + 1 < times_s.length ? times_s[index + 1] : end), value);
    });
    for (let index = times_s.length - 1; index >= 0; index -= 1) {
      path.lineTo(x(index + 1 < times_s.length ? times_s[index + 1] : end), y(below[index]));
      path.lineTo(x(times_s[index]), y(below[index]));
    }
    path.closePath();
    context.fillStyle = memoryColour(category, state);
    context.fill(path);
    const label = y(below[0]) - y(below[0] + (series[category][0] || 0)) > 18;
    if (label) {
      context.fillStyle = inkOn(memoryColour(category, state));
      context.textAlign = "left";
      context.fillText(category, x(0) + 8, (y(below[0]) + y(below[0] + series[category][0])) / 2);
    }
    times_s.forEach((_, index) => (below[index] += series[category][index] || 0));
  }
}

function paintLimit(context, limit, isDrawn, y, width) {
  context.fillStyle = pageColour("--bad");
  context.strokeStyle = pageColour("--bad");
  context.textAlign = "right";
  if (!isDrawn) return context.fillText(`limit ${formatBytes(limit)}, above the chart`, width - CHART.right, CHART.top - 10);
  context.setLineDash([6, 4]);
  context.beginPath();
  context.moveTo(CHART.left, Math.round(y(limit)) + 0.5);
  context.lineTo(width - CHART.right, Math.round(y(limit)) + 0.5);
  context.stroke();
  context.setLineDash([]);
  context.fillText(`limit ${formatBytes(limit)}`, width - CHART.right, y(limit) - 9);
}

function paintPeak(context, peak, curve, x, y, width) {
  const at = { x: x(curve.times_s[peak.index]), y: y(peak.bytes) };
  const text = `peak ${formatBytes(peak.bytes)} at ${formatSeconds(curve.times_s[peak.index])}`;
  context.fillStyle = pageColour("--text");
  context.beginPath();
  context.arc(at.x, at.y, 3.5, 0, 7);
  context.fill();
  context.textAlign = at.x > width / 2 ? "right" : "left";
  context.fillText(text, at.x + (at.x > width / 2 ? -8 : 8), at.y - 9);
}

/** One bar a curve; each is a link to it. */
function peakBars(curves, chosen) {
  const most = Math.max(...curves.map((curve) => curve.peak_bytes || 0), isNumber(headline.limit_bytes) ? headline.limit_bytes : 0) || 1;
  return h("ul", {}, curves.slice(0, 256).map((curve, index) => h("li", { "aria-current": curve === chosen ? "true" : null },
    h("a", { href: `#memory/${index}` },
      h("span", {}, curve.name),
      h("span", { class: "thin" }, h("i", { style: `width:${(curve.peak_bytes / most) * 100}%` })),
      h("span", { class: "number" }, formatBytes(curve.peak_bytes))))));
}
