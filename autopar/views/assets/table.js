// A table that sorts, filters, and shows its rows a page at a time.

const PAGE_ROWS = 200;

/**
 * columns: {title, value(row): what to sort by, show(row): text or node, numeric, hint, wide}.
 * On a phone each row is a card: its first cell over the others, which say their column's title (small.css).
 * options: rows, label, href(row): where a click goes, words(row): what a filter looks in, sort: [column, descending],
 * empty: what to say without rows.
 */
function makeTable(columns, options) {
  const body = h("tbody", { role: "rowgroup" });
  const more = h("button", { type: "button", class: "small more", onclick: () => paint(shown + PAGE_ROWS) });
  const heads = columns.map((column, index) => headCell(column, () => sortBy(index)));
  // Roles are said, as a table of cards is none for browsers.
  const table = h("table", { role: "table", "aria-label": options.label }, h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads)), body);
  const element = h("div", { class: "table" }, table, more);
  let [sorted, descending] = options.sort || [null, false];
  let rows = list(options.rows);
  let words = [];
  let visible = [];
  let shown = PAGE_ROWS;

  function sortBy(index) {
    descending = sorted === index ? !descending : Boolean(columns[index].numeric);
    sorted = index;
    arrange();
  }

  function arrange() {
    visible = rows.filter((row) => matches(options.words ? options.words(row) : "", words));
    if (sorted !== null) visible = sortRows(visible, columns[sorted].value, descending);
    heads.forEach((head, index) => {
      if (index === sorted) head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    paint(PAGE_ROWS);
  }

  function paint(count) {
    shown = count;
    body.replaceChildren(...visible.slice(0, shown).map((row) => bodyRow(row, columns, options)));
    if (!visible.length) body.append(emptyRow(columns.length, words.length ? "Nothing matches the filter." : options.empty));
    more.hidden = visible.length <= shown;
    more.textContent = `Show ${Math.min(PAGE_ROWS, visible.length - shown)} more of ${formatWhole(visible.length)}`;
    if (options.counted) options.counted(visible);
  }

  arrange();
  return {
    element,
    filter(text) {
      words = text.toLowerCase().split(/\s+/).filter(Boolean);
      arrange();
    },
    setRows(next) {
      rows = next;
      arrange();
    },
    /** Marks the rows that `is` says, and shows the first one. */
    mark(is) {
      const at = visible.findIndex(is);
      if (at >= shown) paint(Math.ceil((at + 1) / PAGE_ROWS) * PAGE_ROWS);
      [...body.rows].forEach((line, index) => line.classList.toggle("is-marked", Boolean(visible[index] && is(visible[index]))));
      if (at >= 0) body.rows[at].scrollIntoView({ block: "nearest" });
    },
  };
}

function headCell(column, onSort) {
  const button = h("button", { type: "button", onclick: onSort, title: column.hint || null }, column.title);
  return h("th", { scope: "col", role: "columnheader", class: cellClass(column) }, button);
}

function bodyRow(row, columns, options) {
  const href = options.href ? options.href(row) : null;
  const cells = columns.map((column, index) => {
    const inside = column.show(row);
    const linked = href && index === 0 ? h("a", { href }, inside) : inside;
    return h("td", { role: "cell", class: cellClass(column), "data-title": index ? column.title : null }, linked);
  });
  const line = h("tr", { role: "row", class: href ? "is-link" : null }, cells);
  if (href) line.addEventListener("click", (event) => event.target.closest("a, button") || goTo(href));
  return line;
}

function cellClass(column) {
  return [column.numeric && "number", column.wide && "wide"].filter(Boolean).join(" ") || null;
}

function emptyRow(width, text) {
  return h("tr", {}, h("td", { colspan: width, class: "empty" }, text || "Nothing to show."));
}

function sortRows(rows, value, descending) {
  const sign = descending ? -1 : 1;
  const keyed = rows.map((row, index) => [value(row), index, row]);
  keyed.sort(([left, i], [right, j]) => {
    if (left === right) return i - j;
    if (left === null || left === undefined) return 1;
    if (right === null || right === undefined) return -1;
    return (left < right ? -1 : 1) * sign;
  });
  return keyed.map(([, , row]) => row);
}

function matches(text, words) {
  if (!words.length) return true;
  const low = text.toLowerCase();
  return words.every((word) => low.includes(word));
}

/** A text field that filters `table` while one types. */
function filterField(label, onInput) {
  return h("input", {
    type: "search", class: "filter", placeholder: label, "aria-label": label, spellcheck: "false", autocomplete: "off",
    oninput: (event) => onInput(event.target.value),
  });
}
