// The generated program, with links to the graph from the lines that have an item there.

const programView = { id: "program", label: "Program", make: makeProgram };

function makeProgram(panel) {
  const program = content.program || {};
  if (!program.html) {
    panel.append(emptyNote("The report does not hold the program's text."));
    return {};
  }
  const code = h("pre", { class: "code", tabindex: "0", "aria-label": "Generated program" });
  code.innerHTML = program.html; // made by the report's generator
  // Each line is a block: line breaks between them would be shown twice.
  for (const node of [...code.childNodes]) if (node.nodeType === Node.TEXT_NODE && !node.textContent.trim()) node.remove();
  const keysOfLine = linkLines(code, program.anchors || {});
  append(panel, [
    h("div", { class: "toolbar" },
      h("span", {}, `${formatWhole(code.querySelectorAll(".line").length)} lines`),
      program.edited && h("span", { class: "badge" }, "edited by hand"),
      h("span", { class: "muted" }, "Every rank runs this file. Click a marked line to see it in the graph; Ctrl+F searches.")),
    h("div", { class: "card code-card" }, code),
  ]);
  const follow = (line) => {
    const keys = line && keysOfLine.get(line.id);
    if (keys) goTo(graphLink(keys[0]));
  };
  code.addEventListener("click", (event) => {
    if (!String(getSelection())) follow(event.target.closest(".line.is-linked"));
  });
  code.addEventListener("keydown", (event) => programKey(event, code, follow));
  return {
    show(target) {
      const line = target && code.querySelector(`#${CSS.escape(target.startsWith("L") ? target : `L${target}`)}`);
      code.querySelectorAll(".is-marked").forEach((one) => one.classList.remove("is-marked"));
      if (!line) return;
      line.classList.add("is-marked");
      line.scrollIntoView({ block: "center" });
    },
  };
}

/** Marks the lines that have items; {id of the line: keys}. */
function linkLines(code, anchors) {
  const keysOfLine = new Map();
  for (const [key, number] of Object.entries(anchors)) {
    if (!items[key]) continue;
    const id = `L${number}`;
    keysOfLine.set(id, [...(keysOfLine.get(id) || []), key]);
  }
  for (const line of code.querySelectorAll(".line")) {
    line.dataset.number = line.id.slice(1); // drawn by the style, so that it is neither searched nor copied
    const keys = keysOfLine.get(line.id);
    if (!keys) continue;
    line.classList.add("is-linked");
    line.title = keys.map((key) => items[key].title || items[key].name || key).join("\n");
  }
  return keysOfLine;
}

/** n and p go to the next and the previous marked line, Enter follows it. */
function programKey(event, code, follow) {
  const linked = [...code.querySelectorAll(".line.is-linked")];
  const at = linked.findIndex((line) => line.classList.contains("is-marked"));
  if (event.key === "Enter") return follow(linked[at]);
  const next = { n: at + 1, p: at - 1 }[event.key];
  if (next === undefined || !linked[next]) return;
  event.preventDefault();
  code.querySelectorAll(".is-marked").forEach((line) => line.classList.remove("is-marked"));
  linked[next].classList.add("is-marked");
  linked[next].scrollIntoView({ block: "nearest" });
}
