// Numbers as people read them: three digits and a unit, the same texts as autopar's tables.

const MISSING = "–";

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function threeDigits(value) {
  const size = Math.abs(value);
  if (size >= 99.95) return value.toFixed(0);
  return size >= 9.995 ? value.toFixed(1) : value.toFixed(2);
}

function formatSeconds(value) {
  if (!isNumber(value)) return MISSING;
  if (value === 0) return "0 s";
  for (const [scale, unit] of [[1, "s"], [1e3, "ms"], [1e6, "µs"]]) {
    if (Math.abs(value) * scale >= 0.9995) return `${threeDigits(value * scale)} ${unit}`;
  }
  return `${threeDigits(value * 1e9)} ns`;
}

function formatBytes(value) {
  if (!isNumber(value)) return MISSING;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < 5) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? value.toFixed(0) : threeDigits(value)} ${units[unit]}`;
}

function formatCount(value) {
  if (!isNumber(value)) return MISSING;
  for (const [scale, unit] of [[1e12, "trillion"], [1e9, "billion"], [1e6, "million"]]) {
    if (Math.abs(value) >= scale) return `${threeDigits(value / scale)} ${unit}`;
  }
  return formatWhole(value);
}

/** 12,345 */
function formatWhole(value) {
  if (!isNumber(value)) return MISSING;
  return Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, ",");
}

function formatFlops(value) {
  return formatScaled(value, "FLOP");
}

function formatScaled(value, unit) {
  if (!isNumber(value)) return MISSING;
  for (const [scale, prefix] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= scale) return `${threeDigits(value / scale)} ${prefix}${unit}`;
  }
  return `${value.toFixed(0)} ${unit}`;
}

/** A fraction as 12.3%. */
function formatShare(value, digits = 1) {
  return isNumber(value) ? `${(value * 100).toFixed(digits)}%` : MISSING;
}

/** A value with the unit of a comparison's row. */
function formatUnit(value, unit) {
  if (!isNumber(value)) return MISSING;
  if (unit === "s") return formatSeconds(value);
  if (unit === "B") return formatBytes(value);
  if (unit === "%") return formatShare(value);
  if (unit === "FLOP/s") return formatScaled(value, "FLOP/s");
  return Number.isInteger(value) || Math.abs(value) >= 1000 ? formatWhole(value) : threeDigits(value);
}

/** With its sign always: +1.20 ms, −3.4%. */
function formatDelta(value, format) {
  if (!isNumber(value)) return MISSING;
  if (value === 0) return "±0";
  return `${value > 0 ? "+" : "−"}${format(Math.abs(value))}`;
}

function plural(count, one, many) {
  return `${formatWhole(count)} ${count === 1 ? one : many || `${one}s`}`;
}
