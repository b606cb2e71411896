// The answer on one screen; what stands below it is detail.

const overviewView = { id: "overview", label: "Overview", make: makeOverview };

function makeOverview(panel) {
  panel.classList.add("overview");
  append(panel, [
    generationCard(),
    h("div", { class: "tiles" }, headlineTiles()),
    section(
      "A step",
      content.bound && h("p", { class: "bound" }, content.bound),
      stepBar(),
    ),
    h("div", { class: "columns answers" }, wordsCard(), questionsCard(), h("div", { class: "stacked" }, memoryCard(), meshCard())),
    h("div", { class: "columns two" }, operatorsCard(), regionsCard()),
    notesCard(),
    aboutCard(),
  ]);
  return {};
}

function headlineTiles() {
  const { step_s, mfu, tokens_per_s, samples_per_s, peak_bytes, limit_bytes, gap, communication_s, bubble } = headline;
  const rate = isNumber(tokens_per_s) ? ["Tokens a second", formatWhole(tokens_per_s)] : ["Samples a second", isNumber(samples_per_s) ? threeDigits(samples_per_s) : null];
  const over = isNumber(limit_bytes) && peak_bytes > limit_bytes;
  return [
    tile(content.training === false ? "A call" : "A step", formatSeconds(step_s), isNumber(gap) ? `within ${formatShare(gap, gap < 0.001 ? 2 : 1)} of the best` : "predicted", "main"),
    isNumber(mfu) && tile("FLOPs utilisation (MFU)", formatShare(mfu), "of the peak rate"),
    rate[1] && tile(rate[0], rate[1], isNumber(tokens_per_s) && isNumber(samples_per_s) ? `${threeDigits(samples_per_s)} samples a second` : "all ranks"),
    tile("Memory of the fullest rank", formatBytes(peak_bytes), isNumber(limit_bytes) ? `${over ? "over the limit: " : ""}${formatShare(peak_bytes / limit_bytes)} of ${formatBytes(limit_bytes)}` : "no limit was set", "wide", limitBar(peak_bytes, limit_bytes)),
    tile("Communication", formatSeconds(communication_s), isNumber(step_s) && step_s > 0 ? `${formatShare(communication_s / step_s)} of a step, in all` : "a step"),
    isNumber(bubble) && tile("Pipeline bubble", formatShare(bubble), "of a step waits"),
  ];
}

const PHASE_TITLES = { prefill: "The prompt (prefill)", decode: "A token (decode)" };

/** Of a report of generate(): what both phases come to, above what is of the phase that is shown. */
function generationCard() {
  const all = content.generation;
  if (!all) return null;
  const asked = all.generation || {};
  const table = makeTable(
    [
      { title: "Phase", value: (row) => row.phase, show: (row) => h("b", {}, PHASE_TITLES[row.phase] || row.phase) },
      { title: "Tokens a call", numeric: true, value: (row) => row.tokens, show: (row) => formatWhole(row.tokens) },
      { title: "A call", numeric: true, value: (row) => row.seconds, show: (row) => formatSeconds(row.seconds) },
      { title: "Tokens a second", numeric: true, value: (row) => row.tokens_per_s, show: (row) => (isNumber(row.tokens_per_s) ? formatWhole(row.tokens_per_s) : "") },
      { title: "Collectives", numeric: true, value: (row) => row.collectives, show: (row) => formatWhole(row.collectives) },
      { title: "Sent", numeric: true, hint: "bytes that a rank sends in a call", value: (row) => row.bytes_sent, show: (row) => formatBytes(row.bytes_sent) },
      { title: "Cache", numeric: true, hint: "of a rank", value: (row) => row.cache_bytes, show: (row) => formatBytes(row.cache_bytes) },
      { title: "Peak", numeric: true, hint: "of the fullest rank", value: (row) => row.peak_bytes, show: (row) => formatBytes(row.peak_bytes) },
    ],
    { rows: list(all.rows), label: "Phases of generate()" },
  );
  const chunks = asked.chunk ? ` in chunks of ${formatWhole(asked.chunk)}` : "";
  return section(
    `Generation: ${plural(asked.batch, "sequence")} of ${formatWhole(asked.prompt)} tokens${chunks}, ${formatWhole(asked.new_tokens)} new tokens each`,
    h("div", { class: "tiles" }, [
      tile("First token", formatSeconds(all.time_to_first_token_s), "after, predicted", "main"),
      tile("Each token", formatSeconds(all.time_per_token_s), "with the cache at its full length", "main"),
      tile("New tokens a second", formatWhole(all.tokens_per_s), `${formatWhole(all.tokens_per_s_per_device)} a device; ${formatSeconds(all.total_s)} in all`),
      tile("Cache of a rank", formatBytes(all.cache_bytes), asked.cache ? `keys and values in ${asked.cache}` : "keys and values, other states"),
    ]),
    h("div", { class: "scroll" }, table.element),
  );
}

function tile(label, value, detail, kind, bar) {
  return h("div", { class: `tile ${kind || ""}` }, h("span", { class: "label" }, label), h("span", { class: "big" }, value), bar, h("span", { class: "muted" }, detail));
}

function wordsCard() {
  const words = list(content.words);
  return section("The plan in words", words.length ? h("ul", { class: "words" }, words.map((text) => h("li", {}, text))) : emptyNote("The report says nothing more of the plan."));
}

function memoryCard() {
  const parts = list(content.memory_parts).filter((part) => part.bytes > 0);
  if (!parts.length) return section("Memory", emptyNote("The report has no parts of the memory."));
  const colours = memoryColours(parts.map((part) => part.what));
  const drawn = stackedBar(
    "Memory of the fullest rank at its peak",
    parts.map((part) => ({ what: part.what, value: part.bytes, colour: colours.get(part.what) })),
    formatBytes,
  );
  return section("Memory at the peak", drawn, list(content.memory).length > 0 && h("p", { class: "after" }, h("a", { href: "#memory" }, "Over the step")));
}

function meshCard() {
  if (!meshAxes.length) return section("The mesh", emptyNote("One device: nothing is split."));
  const most = Math.max(...meshAxes.map((axis) => axis.seconds || 0)) || 1;
  return section(
    `The mesh: ${plural(numRanks, "device")}`,
    h("ul", { class: "axes" }, meshAxes.map((axis) => h(
      "li",
      {},
      h("div", { class: "axis-name" }, axisChip(axis.name), h("b", {}, `× ${axis.size}`), h("span", { class: "muted" }, axis.link)),
      h("div", { class: "axis-traffic" },
        h("span", { class: "thin" }, h("i", { style: `width:${((axis.seconds || 0) / most) * 100}%;background:${axisColours.get(axis.name)}` })),
        h("span", { class: "muted" }, `${formatBytes(axis.bytes)} and ${formatSeconds(axis.seconds)} a step`)),
    ))),
  );
}

function questionsCard() {
  const questions = list(content.questions);
  if (!questions.length) return section("Questions", emptyNote("No other plan was made to compare with."));
  return section("Questions", h("dl", { class: "questions" }, questions.map((one) => [
    h("dt", {}, one.question),
    h("dd", {}, one.answer, one.link && [" ", h("a", { href: normalHash(one.link) }, "See more")]),
  ])));
}

function operatorsCard() {
  const operators = list(content.operators);
  if (!operators.length) return null;
  const table = makeTable(
    [
      { title: "Computation", value: (row) => row.op_class, show: (row) => row.op_class },
      { title: "Phase", value: (row) => row.phase, show: (row) => row.phase },
      { title: "Times", numeric: true, value: (row) => row.times, show: (row) => formatWhole(row.times) },
      { title: "FLOPs", numeric: true, value: (row) => row.flops, show: (row) => formatFlops(row.flops) },
      { title: "Moved", numeric: true, hint: "bytes read and written", value: (row) => row.moved_bytes, show: (row) => formatBytes(row.moved_bytes) },
      { title: "Time", numeric: true, value: (row) => row.seconds, show: (row) => formatSeconds(row.seconds) },
      { title: "Memory-bound", numeric: true, hint: "the part of the time that waits for memory", value: (row) => row.memory_bound_s, show: (row) => formatSeconds(row.memory_bound_s) },
    ],
    { rows: operators, label: "Computation by class", sort: [5, true] },
  );
  return section("Where computation goes", h("div", { class: "scroll" }, table.element));
}

function regionsCard() {
  const regions = list(content.regions);
  if (!regions.length) return null;
  const table = makeTable(
    [
      { title: "Region", value: (row) => row.name, show: (row) => h("b", {}, row.name) },
      { title: "Module", value: (row) => row.module, show: (row) => dotted(row.module) },
      { title: "Calls", numeric: true, value: (row) => row.calls, show: (row) => formatWhole(row.calls) },
      { title: "Operators", numeric: true, hint: "forward + backward", value: (row) => row.forward + row.backward, show: (row) => `${formatWhole(row.forward)} + ${formatWhole(row.backward)}` },
      { title: "Saved", numeric: true, hint: "kept for the backward, a call", value: (row) => row.saved_bytes, show: (row) => formatBytes(row.saved_bytes) },
      { title: "Stage", value: (row) => row.stage, show: (row) => row.stage || "" },
    ],
    { rows: regions, label: "Regions of the program" },
  );
  return section("Regions", h("div", { class: "scroll" }, table.element));
}

function notesCard() {
  const notes = list(content.notes);
  return notes.length ? section("Notes", h("ul", { class: "words" }, notes.map((text) => h("li", {}, text)))) : null;
}

function aboutCard() {
  const model = content.model || {};
  const mesh = content.mesh || {};
  return section(
    "What this is about",
    factList([
      ["Model", [model.name, isNumber(model.parameters) && `, ${formatCount(model.parameters)} parameters`]],
      ["Strategy", content.strategy],
      ["Precision", content.precision],
      ["Hardware", mesh.hardware && `${plural(mesh.devices || numRanks, "device")} of ${mesh.hardware}`],
      ["Microbatches", isNumber(content.microbatches) ? formatWhole(content.microbatches) : null],
      ...list(content.batch).map((one) => [`Input ${one.name}`, h("span", { class: "mono" }, one.type)]),
      ["Made by", content.autopar && `autopar ${content.autopar}`],
    ]),
    model.command && commandLine(model.command),
  );
}
