// Another report's content beside this one's: the same rows as autopar's own comparisons, from what both reports say.

/** The content of a report's file. Throws an Error that says what is wrong with it. */
async function readReport(file) {
  const text = await file.text();
  // A parsed document runs no scripts and loads nothing.
  const place = new DOMParser().parseFromString(text, "text/html").getElementById("ui-content");
  let other = null;
  try {
    other = JSON.parse(place ? place.textContent : text);
  } catch {
    throw new Error(`${file.name} is not a report of autopar.`);
  }
  if (other && other.phases) other = other.phases[shownPhase] || Object.values(other.phases)[0]; // generate()'s phases
  if (other && other.sha256 && other.plan) throw new Error(`${file.name} is a saved plan: it has no report's numbers. Run autopar report ${file.name} and choose the page that it writes.`);
  if (!other || !other.headline || !Array.isArray(other.parameters)) throw new Error(`${file.name} is not a report of autopar.`);
  if (other.format !== content.format) throw new Error(`${file.name} was written by another version of autopar (format ${other.format}, this one is ${content.format}).`);
  return other;
}

/** A comparison, as `comparisonParts` shows them. */
function compareContents(own, right, name) {
  const left = { ...own, headline: own.headline || {}, parameters: list(own.parameters) };
  const numbers = numbersOf(left, right);
  const changed = parameterChanges(left, right);
  const [before, after] = [left.headline.step_s, right.headline.step_s];
  const faster = before && after !== before ? `predicted ${formatShare(Math.abs(after / before - 1))} ${after < before ? "faster" : "slower"}, ${formatSeconds(after)} a step instead of ${formatSeconds(before)}` : `predicted as fast (${formatSeconds(after)} a step)`;
  return {
    title: name, left: "this report", right: name, numbers, parameters: changed.rows, collectives: collectiveChanges(left, right),
    settings: settingsOf(left, right),
    summary: [`${name} against this report: ${faster}`, changed.rows.length ? `${plural(changed.rows.length, "kind of parameters lies", "kinds of parameters lie")} differently` : "what parameters both have lie alike",
      changed.alone > 0 && `${plural(changed.alone, "tensor")} only one of them has`].filter(Boolean).join("; "),
  };
}

function numbersOf(left, right) {
  const both = (what, unit, get) => ({ what, unit, left: numberOr(get(left)), right: numberOr(get(right)) });
  const names = (get) => [...new Set([left, right].flatMap(get))];
  const part = (one, kind, key, name) => (list(one[kind]).find((row) => row[key] === name) || {});
  return [
    both("step", "s", (one) => one.headline.step_s),
    ...names((one) => list(one.step).map((row) => row.what)).map((what) => both(what, "s", (one) => Math.abs(part(one, "step", "what", what).seconds || 0))),
    both("MFU", "%", (one) => one.headline.mfu),
    both("tokens a second", "", (one) => one.headline.tokens_per_s),
    both("bubble", "%", (one) => one.headline.bubble),
    both("peak memory", "B", (one) => one.headline.peak_bytes),
    ...names((one) => list(one.memory_parts).map((row) => row.what)).map((what) => both(`${what}, at the peak`, "B", (one) => part(one, "memory_parts", "what", what).bytes || 0)),
    both("memory limit", "B", (one) => one.headline.limit_bytes),
    both("bytes a rank sends", "B", (one) => sumOf(list(one.collectives), "bytes_sent")),
    ...names((one) => axesOf(one).map((axis) => axis.name)).map((name) => both(`bytes over ${name}`, "B", (one) => (axesOf(one).find((axis) => axis.name === name) || {}).bytes)),
    both("devices", "", (one) => one.mesh && one.mesh.devices),
    both("optimality gap", "%", (one) => one.headline.gap),
  ].filter((row) => row.left !== null || row.right !== null);
}

function numberOr(value) {
  return isNumber(value) ? value : null;
}

function axesOf(one) {
  return list(one.mesh && one.mesh.axes);
}

function settingsOf(left, right) {
  const both = (what, get) => ({ what, left: String(get(left) ?? "none"), right: String(get(right) ?? "none") });
  return [
    both("model", (one) => one.model && one.model.name),
    both("mesh", (one) => axesOf(one).map((axis) => `${axis.name}=${axis.size}`).join(" × ")),
    both("hardware", (one) => one.mesh && one.mesh.hardware),
    both("strategy", (one) => one.strategy),
    both("precision", (one) => one.precision),
    both("microbatches", (one) => one.microbatches),
    both("training", (one) => (one.training === false ? "no" : "yes")),
    both("batch", (one) => list(one.batch).map((row) => row.type).join(", ")),
    both("written by autopar", (one) => one.autopar),
  ].filter((row) => row.left !== row.right);
}

/** Classes of this report's parameters whose tensors lie otherwise in the other one, and how many only one has. */
function parameterChanges(left, right) {
  const tensors = (row) => list(row.members).filter((name) => !list(row.aliases).includes(name));
  const stored = new Map(right.parameters.flatMap((row) => tensors(row).map((name) => [name, row.stored])));
  const rows = [];
  let known = 0;
  let alone = 0;
  for (const row of left.parameters) {
    const changed = new Map();
    for (const name of tensors(row)) {
      if (!stored.has(name)) alone += 1;
      else if (stored.get(name) !== row.stored) changed.set(stored.get(name), (changed.get(stored.get(name)) || 0) + 1);
      known += stored.has(name);
    }
    for (const [text, count] of changed) rows.push({ name: row.name, count, left: row.stored, right: text });
  }
  return { rows, alone: alone + stored.size - known };
}

function collectiveChanges(left, right) {
  const found = new Map();
  [left, right].forEach((one, side) => {
    for (const row of list(one.collectives)) {
      const what = `${row.why}, ${row.kind} ${row.axis}, ${row.phase}`;
      if (!found.has(what)) found.set(what, { what, left_bytes: 0, right_bytes: 0, left_s: 0, right_s: 0 });
      const sums = found.get(what);
      sums[side ? "right_bytes" : "left_bytes"] += row.bytes_sent || 0;
      sums[side ? "right_s" : "left_s"] += row.seconds || 0;
    }
  });
  return [...found.values()].sort((a, b) => Math.max(b.left_s, b.right_s) - Math.max(a.left_s, a.right_s));
}
