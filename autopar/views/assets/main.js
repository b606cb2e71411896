// Tabs, routes, keys, theme: what holds the parts together.

const VIEWS = [
  overviewView, graphView, shardingView, memoryView, timelineView, collectivesView,
  ...(list(content.experts).length ? [expertsView] : []), // of mixtures alone
  programView, compareView,
];
const OLD_NAMES = { parameters: "sharding" };

const made = new Map(); // views by id, made when first shown
const tabButtons = new Map();
const panels = new Map();
let shownTab = "";

function currentTab() {
  return shownTab || "overview";
}

function buildTabs() {
  const bar = byId("ui-tabs");
  for (const view of VIEWS) {
    const tab = h("button", { type: "button", role: "tab", id: `ui-tab-${view.id}`, "aria-controls": `ui-panel-${view.id}`, "aria-selected": "false", tabindex: "-1", onclick: () => goTo(`#${view.id}`) }, view.label);
    const panel = h("div", { role: "tabpanel", class: `panel panel-${view.id}`, id: `ui-panel-${view.id}`, "aria-labelledby": tab.id, tabindex: "-1", hidden: true });
    bar.append(tab);
    byId("ui-panels").append(panel);
    tabButtons.set(view.id, tab);
    panels.set(view.id, panel);
  }
  bar.addEventListener("keydown", (event) => {
    const at = VIEWS.findIndex((view) => view.id === shownTab);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: VIEWS.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const view = VIEWS[(next + VIEWS.length) % VIEWS.length];
    goTo(`#${view.id}`);
    tabButtons.get(view.id).focus();
  });
}

/** Links to the phases of generate(); each opens on the tab that is shown. */
function buildPhases() {
  if (!phaseNames.length) return;
  const links = phaseNames.map((name) => h(
    "a",
    { href: `?phase=${encodeURIComponent(name)}`, "aria-current": name === shownPhase ? "page" : null, onclick: (event) => { event.currentTarget.hash = `#${currentTab()}`; } },
    PHASE_TITLES[name] || name,
  ));
  byId("ui-tabs").before(h("nav", { class: "phases", id: "ui-phases", "aria-label": "Phases of generate()" }, links));
}

/** Shows what the hash names: #graph/op:layer.linear_3 */
function route() {
  const hash = location.hash.slice(1);
  const slash = hash.indexOf("/");
  const name = slash < 0 ? hash : hash.slice(0, slash);
  const id = OLD_NAMES[name] || name;
  const view = VIEWS.find((one) => one.id === id) || VIEWS[0];
  const target = slash < 0 ? "" : decodeTarget(hash.slice(slash + 1));
  const isNew = shownTab !== view.id;
  shownTab = view.id;
  for (const [key, panel] of panels) {
    panel.hidden = key !== view.id;
    tabButtons.get(key).setAttribute("aria-selected", String(key === view.id));
    tabButtons.get(key).tabIndex = key === view.id ? 0 : -1;
  }
  if (isNew) {
    inspector.close();
    hideTip();
    const tab = tabButtons.get(view.id);
    const bar = byId("ui-tabs");
    bar.scrollLeft = tab.offsetLeft - bar.offsetLeft - (bar.clientWidth - tab.offsetWidth) / 2;
  }
  showView(view, target);
}

/** A part of the content that cannot be read takes its own tab with it, and no other. */
function showView(view, target) {
  const panel = panels.get(view.id);
  try {
    if (!made.has(view.id)) made.set(view.id, view.make(panel) || {});
    const part = made.get(view.id);
    if (part.show) part.show(target);
  } catch (error) {
    panel.prepend(emptyNote(`This part of the report cannot be shown (${error.message}).`));
    made.set(view.id, {});
    console.error(error);
  }
}

// --- theme --------------------------------------------------------------------------------------------------------

const darkQuery = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : darkQuery.matches;
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  document.documentElement.classList.toggle("is-dark", isDark());
  const button = byId("ui-theme");
  button.setAttribute("aria-pressed", String(isDark()));
  button.textContent = isDark() ? "☀" : "☾";
  button.title = isDark() ? "Light colours" : "Dark colours";
  document.dispatchEvent(new Event("theme"));
}

function rememberedTheme() {
  try {
    return localStorage.getItem("autopar-theme");
  } catch {
    return null; // some browsers keep nothing for files
  }
}

function toggleTheme() {
  const theme = isDark() ? "light" : "dark";
  setTheme(theme);
  try {
    localStorage.setItem("autopar-theme", theme);
  } catch {
    // nothing is kept: the next visit follows the system
  }
}

// --- keys ---------------------------------------------------------------------------------------------------------

const WORDS = [
  ["f32[4096/tp, 4096/dp]", "a tensor's whole sizes; the axis behind a stroke splits that dim into equal pieces"],
  ["4096/8:dp", "split in 8 stripes, each of them cut over dp; 4096/8~cp: every second stripe is dealt backwards"],
  ["+tp", "every rank of tp holds a term; their sum is still due"],
  ["stored, held, used", "how a parameter lies between steps, during a whole step, and while a block computes with it"],
  ["gather, reduce", "collectives that bring parameters together before their use, and sum up gradients after it"],
  ["hidden, exposed", "time of a collective in which its rank computes, and in which it does not"],
  ["redistribute", "activations change how they are split"],
  ["region, call", "blocks that do the same are one region, called once for each; prologue and epilogue lie around them"],
  ["bucket", "parameters that travel in one message"],
  ["node, network", "links inside a node, and between nodes"],
  ["selective", "the backward computes all again but products (matrix multiplications) and attention; full: whole blocks"],
  ["bubble", "the share of the step that a rank of a pipeline waits"],
  ["gap", "by how much the solver's placement may be worse than the best one that the strategy allows, proven"],
];

const KEYS = [
  ["/", "search operators, modules, parameters, collectives, tabs; rank 3, stage 2"],
  [`1 … ${VIEWS.length}`, "go to a tab; in the row of tabs, ← and →"],
  ["+ − 0", "zoom in, zoom out, show all: pictures and timeline"],
  ["← ↑ → ↓", "move the picture or the timeline; along the memory curve"],
  ["Tab, Enter", "go through a picture, open what has the focus"],
  ["n, p, Enter", "next and previous line of the program that is in the graph; go there"],
  ["i", "go to the inspector"],
  ["Esc", "close the inspector"],
  ["d", "dark or light colours"],
  ["?", "these keys, and what words mean"],
];

function buildHelp() {
  const dialog = byId("ui-dialog");
  append(dialog, [
    h("h2", { id: "ui-dialog-title" }, "Keys"),
    h("dl", { class: "keys" }, KEYS.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])),
    h("p", { class: "muted" }, "Pictures and the timeline: drag to move, wheel or two fingers to zoom, Shift and wheel to move the timeline."),
    h("h2", {}, "Words"),
    h("dl", { class: "words-meant" }, WORDS.map(([word, what]) => [h("dt", {}, word), h("dd", {}, what)])),
    h("form", { method: "dialog" }, h("button", { class: "small" }, "Close")),
  ]);
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  byId("ui-help").addEventListener("click", () => dialog.showModal());
}

function onKey(event, search) {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || byId("ui-dialog").open) return;
  if (event.key === "Escape" && inspector.isOpen) return goTo(`#${currentTab()}`);
  if (event.target.closest("input, select, textarea")) return;
  const part = made.get(shownTab);
  if (event.key === "/") search.focus();
  else if (event.key === "?") byId("ui-dialog").showModal();
  else if (event.key === "d") toggleTheme();
  else if (event.key === "i") inspector.focus();
  else if (/^[1-9]$/.test(event.key) && VIEWS[Number(event.key) - 1]) goTo(`#${VIEWS[Number(event.key) - 1].id}`);
  else if (!(part && part.key && /^[-+=_0]$/.test(event.key) && part.key(event))) return;
  event.preventDefault();
}

// --- start --------------------------------------------------------------------------------------------------------

function start() {
  const mesh = content.mesh || {};
  byId("ui-subtitle").textContent = [content.precision, content.strategy, mesh.hardware, content.training === false ? "inference" : null].filter(Boolean).join(" · ");
  buildPhases();
  buildTabs();
  buildHelp();
  const search = makeSearch(byId("ui-search"));
  setTheme(rememberedTheme());
  byId("ui-theme").addEventListener("click", toggleTheme);
  darkQuery.addEventListener("change", () => setTheme());
  document.addEventListener("keydown", (event) => onKey(event, search));
  byId("ui-skip").addEventListener("click", (event) => {
    event.preventDefault();
    panels.get(currentTab()).focus();
  });
  window.addEventListener("hashchange", route);
  route();
}

start();
