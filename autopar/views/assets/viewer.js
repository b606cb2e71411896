// A picture that pans and zooms: drag or touch, wheel or pinch, buttons, keys. Works on the picture's viewBox, so that
// letters stay sharp.

const ZOOM_STEP = 1.3;
const READABLE_SCALE = 0.75;
const NARROW = 600; // pixels; in a narrower frame letters one can read would leave a corner of the picture

/** Shows SVG elements in `frame`. onPick(key, event): a click, or Enter, on something that has a key. */
function makeViewer(frame, onPick) {
  let picture = null;
  let size = { width: 1, height: 1 };
  let view = { x: 0, y: 0, scale: 1 }; // the centre, in the picture's units, and pixels a unit
  let box = { width: 1, height: 1 };
  const pointers = new Map();
  let moved = 0;
  let pinch = 0;

  function applyNow() {
    if (!picture) return;
    const width = box.width / view.scale;
    const height = box.height / view.scale;
    picture.setAttribute("viewBox", `${view.x - width / 2} ${view.y - height / 2} ${width} ${height}`);
  }
  const apply = oncePerFrame(applyNow);

  function measure() {
    const rect = frame.getBoundingClientRect();
    if (rect.width && rect.height) box = rect;
  }

  function set(next) {
    const least = Math.min(READABLE_SCALE, wholeScale()) / 2;
    view = {
      x: Math.min(size.width, Math.max(0, next.x)),
      y: Math.min(Math.max(size.height, box.height / next.scale / 2), Math.max(0, next.y)),
      scale: Math.min(12, Math.max(least, next.scale)),
    };
    apply();
  }

  function wholeScale() {
    return Math.min(box.width / size.width, box.height / size.height) * 0.96;
  }

  /** The whole picture; `readable`: at least its width or top, in letters that one can read. */
  function fit(readable) {
    measure();
    const whole = Math.min(1.6, wholeScale());
    if (!readable || whole >= READABLE_SCALE) return set({ x: size.width / 2, y: size.height / 2, scale: whole });
    const least = box.width < NARROW ? 0 : READABLE_SCALE;
    const scale = Math.min(1, Math.max(least, (box.width / size.width) * 0.96));
    const top = (box.height / 2 - 8) / scale;
    set({ x: size.width / 2, y: least ? Math.min(size.height / 2, top) : top, scale });
  }

  /** Zooms by `factor`, keeping what is under (clientX, clientY) where it is. */
  function zoom(factor, clientX, clientY) {
    const dx = clientX === undefined ? 0 : clientX - box.left - box.width / 2;
    const dy = clientY === undefined ? 0 : clientY - box.top - box.height / 2;
    const scale = view.scale * factor;
    set({ x: view.x + dx / view.scale - dx / scale, y: view.y + dy / view.scale - dy / scale, scale });
  }

  function pan(dx, dy) {
    set({ x: view.x - dx / view.scale, y: view.y - dy / view.scale, scale: view.scale });
  }

  /** Brings `element` to the middle, unless it is seen well already. */
  function reveal(element) {
    measure();
    applyNow(); // the frame may have another size than when it was last drawn
    const rect = element.getBoundingClientRect();
    const inside = rect.left > box.left + 20 && rect.right < box.right - 20 && rect.top > box.top + 20 && rect.bottom < box.bottom - 20;
    if (inside && view.scale >= READABLE_SCALE) return;
    const x = view.x + (rect.left + rect.width / 2 - box.left - box.width / 2) / view.scale;
    const y = view.y + (rect.top + rect.height / 2 - box.top - box.height / 2) / view.scale;
    set({ x, y, scale: Math.max(view.scale, Math.min(1, (box.width / rect.width) * view.scale * 0.8)) });
  }

  frame.addEventListener("wheel", (event) => {
    event.preventDefault();
    measure();
    const lines = event.deltaMode === 1 ? 16 : 1;
    zoom(Math.exp(-event.deltaY * lines * (event.ctrlKey ? 0.01 : 0.0015)), event.clientX, event.clientY);
  }, { passive: false });
  frame.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    measure();
    pointers.set(event.pointerId, [event.clientX, event.clientY]);
    if (pointers.size === 1) moved = 0;
    pinch = 0;
  });
  frame.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return;
    const dx = event.clientX - before[0];
    const dy = event.clientY - before[1];
    moved += Math.abs(dx) + Math.abs(dy);
    if (moved < 4) return;
    pointers.set(event.pointerId, [event.clientX, event.clientY]);
    if (!frame.hasPointerCapture(event.pointerId)) frame.setPointerCapture(event.pointerId);
    frame.classList.add("is-dragged");
    pan(dx / pointers.size, dy / pointers.size);
    if (pointers.size === 2) pinchTo([...pointers.values()]);
  });
  function pinchTo([[ax, ay], [bx, by]]) {
    const distance = Math.hypot(ax - bx, ay - by);
    if (pinch) zoom(distance / pinch, (ax + bx) / 2, (ay + by) / 2);
    pinch = distance;
  }
  for (const name of ["pointerup", "pointercancel"]) {
    frame.addEventListener(name, (event) => {
      pointers.delete(event.pointerId);
      pinch = 0;
      frame.classList.remove("is-dragged");
    });
  }
  frame.addEventListener("click", (event) => {
    if (moved >= 4) return;
    const group = event.target.closest("g[data-key]");
    if (group) onPick(group.dataset.key);
  });
  frame.addEventListener("keydown", (event) => {
    const group = event.target.closest("g[data-key]");
    if (group && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      onPick(group.dataset.key);
    } else if (viewerKey(event.key, { zoom, pan, fit })) {
      event.preventDefault();
    }
  });
  frame.addEventListener("focusin", (event) => {
    const group = event.target.closest("g[data-key]");
    if (group && group.matches(":focus-visible")) reveal(group);
    frame.scrollTo(0, 0);
  });
  new ResizeObserver(() => {
    measure();
    apply();
  }).observe(frame);

  return {
    zoom, fit, reveal, pan,
    show(next, natural) {
      picture = next;
      size = natural;
      frame.replaceChildren(picture);
      fit(true);
    },
  };
}

/** Whether `key` moves the picture; it does then. */
function viewerKey(key, viewer) {
  const moves = { ArrowLeft: [60, 0], ArrowRight: [-60, 0], ArrowUp: [0, 60], ArrowDown: [0, -60] };
  if (key in moves) viewer.pan(...moves[key]);
  else if (key === "+" || key === "=") viewer.zoom(ZOOM_STEP);
  else if (key === "-" || key === "_") viewer.zoom(1 / ZOOM_STEP);
  else if (key === "0") viewer.fit(false);
  else return false;
  return true;
}
