// The pictures of the program, and what one clicks in them.

const graphView = { id: "graph", label: "Graph", make: makeGraph };

function makeGraph(panel) {
  const pictures = list(content.pictures).filter((picture) => picture && picture.svg);
  panel.classList.add("fills");
  if (!pictures.length) {
    panel.append(emptyNote("The report holds no picture: Graphviz was not found where it was made. Search finds operators and parameters all the same."));
    return { show: (target) => inspectItem(target) };
  }
  const frame = h("div", { class: "frame", tabindex: "0", role: "group", "aria-label": "Picture: drag to move, wheel or + and − to zoom, 0 for all of it" });
  const viewer = makeViewer(frame, (key) => goTo(graphLink(key)));
  const drawn = new Map(); // by id, so that a picture keeps its elements
  let current = null;
  let marked = [];

  const choice = pictureChoice(pictures, (id) => goTo(`#graph/picture=${encodeTarget(id)}`));
  const button = (text, label, act) => h("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick: act }, text);
  append(panel, [
    h("div", { class: "toolbar" }, h("label", {}, h("span", { class: "muted" }, "Picture"), choice), h("span", { class: "axis-legend" }, meshAxes.map((axis) => axisChip(axis.name)))),
    // In front of the picture for the keyboard, which goes through all that is drawn.
    h("div", { class: "stage" }, pictureLegend(), h("div", { class: "zoom" },
      button("+", "Zoom in (+)", () => viewer.zoom(ZOOM_STEP)),
      button("−", "Zoom out (-)", () => viewer.zoom(1 / ZOOM_STEP)),
      button("⤢", "All of it (0)", () => viewer.fit(false))), frame),
  ]);

  function showPicture(id) {
    if (current && current.id === id) return;
    const picture = pictures.find((one) => one.id === id);
    if (!picture) return;
    if (!drawn.has(id)) drawn.set(id, readPicture(picture));
    current = { id, ...drawn.get(id) };
    choice.value = id;
    frame.setAttribute("aria-label", `${picture.title}: drag to move, wheel or + and − to zoom, 0 for all of it`);
    viewer.show(current.element, current.size);
  }

  function mark(key) {
    marked.forEach((element) => element.classList.remove("is-selected"));
    const element = current && current.byKey.get(key);
    marked = element ? [element] : [];
    if (!element) return;
    element.classList.add("is-selected");
    requestAnimationFrame(() => viewer.reveal(element)); // after the inspector has taken its room
  }

  return {
    show(target) {
      if (target.startsWith("picture=")) {
        showPicture(target.slice("picture=".length));
        mark("");
        return inspector.close();
      }
      if (target) {
        const item = items[target] || {};
        const home = pictures.find((picture) => picture.id === item.picture) || pictures.find((picture) => picture.svg.includes(`id="${escapedId(target)}"`));
        const here = current && current.byKey.has(target);
        if (home && !here) showPicture(home.id);
      }
      if (!current) showPicture(pictures[0].id);
      inspectItem(target);
      mark(target);
    },
    key: (event) => viewerKey(event.key, viewer),
  };
}

/** A key as it stands in an SVG's text. */
function escapedId(key) {
  return key.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/"/g, "&quot;");
}

function pictureChoice(pictures, onChoose) {
  const groups = new Map();
  for (const picture of pictures) groups.set(picture.group || "", [...(groups.get(picture.group || "") || []), picture]);
  const options = [...groups].map(([group, inside]) => {
    const lines = inside.map((picture) => h("option", { value: picture.id }, picture.title || picture.id));
    return group && groups.size > 1 ? h("optgroup", { label: group }, lines) : lines;
  });
  return h("select", { "aria-label": "Picture", onchange: (event) => onChoose(event.target.value) }, options);
}

let legendIsOpen = innerWidth >= 760 && innerHeight >= 600;

/** What the pictures' colours and marks mean; over the picture, closed where there is little room. */
function pictureLegend() {
  const tint = (axis) => `color-mix(in srgb, ${axisColours.get(axis.name)} 27%, white)`; // as the pictures mix it
  const stripes = meshAxes.slice(0, 2).map(tint);
  const swatch = (style) => h("i", { style });
  return h("details", { class: "picture-legend", open: legendIsOpen, ontoggle: (event) => { legendIsOpen = event.target.open; } },
    h("summary", {}, "Legend"),
    h("ul", {},
      meshAxes.map((axis) => h("li", {}, swatch(`background:${tint(axis)};border-color:${axisColours.get(axis.name)}`), h("span", {}, h("b", {}, axis.name), ` splits it, or each of ${plural(axis.size, "rank")} holds a term`))),
      stripes.length > 1 && h("li", {}, swatch(`background:linear-gradient(90deg, ${stripes[0]} 50%, ${stripes[1]} 50%)`), "striped: several axes split it"),
      h("li", {}, swatch("background:#fff"), "plain: every rank does the same"),
      h("li", {}, swatch("background:#fff;border:2px solid #3b4149"), "bold: has parameters; round: from outside, or goes there"),
      h("li", {}, h("i", { class: "edge", style: `background:${meshAxes.length ? axisColours.get(meshAxes[0].name) : "#8a8f98"}` }), "a collective over the axis of that colour: bytes that a rank sends · seconds, of one call"),
      h("li", {}, h("span", { class: "mono" }, "6 ×"), "so many collectives, with their sums"),
      h("li", {}, h("span", { class: "mono" }, "64/dp"), "dp splits this dim; sizes are whole"),
      h("li", {}, h("span", { class: "mono" }, "64/8:dp"), "split in eight stripes, each over dp"),
      h("li", {}, h("span", { class: "mono" }, "+tp"), "a sum over tp is still due"),
      h("li", {}, h("span", { class: "mono" }, "× 32"), "drawn once, called 32 times a microbatch")));
}

/** Parses one picture; each part that is an item gets its key, and can be reached with the keyboard. */
function readPicture(picture) {
  const element = document.importNode(new DOMParser().parseFromString(picture.svg, "image/svg+xml").documentElement, true);
  if (element.nodeName !== "svg") return { element: emptyNote("This picture cannot be read."), size: { width: 1, height: 1 }, byKey: new Map() };
  const [, , width, height] = (element.getAttribute("viewBox") || "0 0 600 400").split(/[\s,]+/).map(Number);
  element.removeAttribute("width");
  element.removeAttribute("height");
  const paper = element.querySelector("g.graph > polygon, g.graph > g:not([class]) > a > polygon");
  if (paper) paper.remove(); // the page has its own ground, light or dark
  const byKey = new Map();
  for (const group of element.querySelectorAll("g[id]")) {
    const key = group.id;
    group.removeAttribute("id"); // ids of pictures are not those of the page
    const item = items[key];
    setTitle(group, item);
    if (!item) continue;
    byKey.set(key, group);
    group.dataset.key = key;
    if (group.classList.contains("edge")) continue;
    for (const [name, value] of [["tabindex", "0"], ["role", "button"], ["aria-label", `${item.kind || ""} ${item.name || key}`]]) group.setAttribute(name, value);
  }
  return { element, size: { width: width || 600, height: height || 400 }, byKey };
}

/** What the browser shows beside the pointer: Graphviz's tooltip, else what the item says; not Graphviz's own names. */
function setTitle(group, item) {
  const link = group.querySelector(":scope > g > a");
  const tip = (link && link.getAttributeNS("http://www.w3.org/1999/xlink", "title")) || (item && (item.title || item.name));
  const title = group.querySelector(":scope > title") || group.appendChild(document.createElementNS("http://www.w3.org/2000/svg", "title"));
  if (tip) title.textContent = tip;
  else title.remove();
}
