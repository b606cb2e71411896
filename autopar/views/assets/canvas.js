// Drawing on canvases: sharp on any screen, in the page's own colours.

const FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";

/** Colours of the page by custom property, read again after the theme changes. */
const pageColour = (() => {
  let read = {};
  const probe = document.body.appendChild(h("span", { class: "probe", hidden: true }));
  document.addEventListener("theme", () => (read = {}));
  return (name) => {
    if (!(name in read)) {
      probe.style.color = `var(${name})`;
      read[name] = getComputedStyle(probe).color;
    }
    return read[name];
  };
})();

/** A canvas that fills `place` and calls paint(context, width, height) when its size or the theme changes. */
function makeCanvas(place, paint, attributes) {
  const canvas = h("canvas", attributes);
  const context = canvas.getContext("2d");
  let width = 0;
  let height = 0;
  const redraw = oncePerFrame(() => {
    if (!width || !height) return;
    const ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = FONT;
    context.textBaseline = "middle";
    paint(context, width, height);
  });
  new ResizeObserver(([change]) => {
    width = change.contentRect.width;
    height = change.contentRect.height;
    redraw();
  }).observe(canvas);
  document.addEventListener("theme", redraw);
  place.append(canvas);
  return { canvas, redraw };
}

/** Round numbers between low and high, about `count`; `base` 2 for bytes. */
function niceTicks(low, high, count, base = 10) {
  const span = high - low;
  if (!(span > 0)) return [];
  const rough = span / Math.max(1, count);
  const unit = base === 2 ? 1024 ** Math.floor(Math.log(Math.max(1, rough)) / Math.log(1024)) : 1;
  const power = 10 ** Math.floor(Math.log10(rough / unit));
  const step = [1, 2, 5, 10].map((factor) => factor * power * unit).find((size) => size >= rough);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-6; tick += step) ticks.push(Math.abs(tick) < step * 1e-6 ? 0 : tick);
  return ticks;
}

/** The time axis under a chart. at(seconds) is the x of a time. */
function paintTimeAxis(context, from, to, at, y, width) {
  context.fillStyle = pageColour("--muted");
  context.strokeStyle = pageColour("--line");
  context.textAlign = "center";
  for (const tick of niceTicks(from, to, Math.max(2, width / 110))) {
    const x = Math.round(at(tick)) + 0.5;
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x, y + 5);
    context.stroke();
    context.fillText(tickText(tick, to - from), x, y + 14);
  }
}

/** A time with as many digits as ticks over `span` need. */
function tickText(seconds, span) {
  const [scale, unit] = [[1, "s"], [1e3, "ms"], [1e6, "µs"], [1e9, "ns"]].find(([one]) => span * one >= 1) || [1e9, "ns"];
  const digits = Math.max(0, Math.min(3, 2 - Math.floor(Math.log10(span * scale))));
  const text = (seconds * scale).toFixed(digits);
  return `${text.includes(".") ? text.replace(/\.?0+$/, "") : text} ${unit}`;
}

/** The last index whose value is at most `value`, −1 before the first; `of` ascends. */
function lastAtMost(of, value) {
  let low = 0;
  let high = of.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (of[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** Black or white, whichever reads better on a colour of #rrggbb. */
function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  return red * 0.299 + green * 0.587 + blue * 0.114 > 140 ? "#111418" : "#ffffff";
}
