
"use strict";
// Draws the plan that the page carries. Every name is set as text, never as HTML.
(() => {
const plan = JSON.parse(document.getElementById("plan").textContent);
const span = Math.max(1, plan.operations.length);
const $ = (id) => document.getElementById(id);
const el = (tag, text, parent) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
};

// ---- values for people ----------------------------------------------------------------------
const size = (n) => {
  if (n === null) return "unknown";
  let unit = 0;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit++; }
  return `${Number.isInteger(n) ? n : n.toFixed(2)} ${units[unit]}`;
};
const range = (a, b) => `[${a.toLocaleString("en")}, ${b.toLocaleString("en")})`;
const opName = (b) => plan.kinds[b.op] || "(no op)";

// Ten hues that can be told apart on light and dark; beyond them, turn by the golden angle.
const HUES = [212, 28, 145, 345, 265, 48, 185, 310, 95, 5];
const hue = (k) => k < HUES.length ? HUES[k] : Math.round((k * 137.508) % 360);
const dark = matchMedia("(prefers-color-scheme: dark)");
const fill = (k, alpha) =>
  `hsl(${hue(k)} ${dark.matches ? 55 : 65}% ${dark.matches ? 48 : 62}% / ${alpha})`;
// With one op only, colours tell neighbours apart instead.
plan.buffers.forEach((b, i) => { b.tint = plan.kinds.length > 1 ? b.op : i % HUES.length; });
const edge = (k) => `hsl(${hue(k)} 60% ${dark.matches ? 68 : 36}%)`;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// ---- what is shown --------------------------------------------------------------------------
const view = { s: 0, t: span };          // positions, shared by all pictures
let wanted = "";                          // the filter
let kind = -1;                            // the op chosen in the legend
const matches = (b) => (kind < 0 || b.op === kind) && (!wanted ||
  `${b.name}\n${opName(b)}\n${b.where}\n${b.type}`.toLowerCase().includes(wanted));

const LEFT = 84, RIGHT = 26, TOP = 8, AXIS = 26, STRIP = 46, HEIGHT = 360, LANE = 22;
const pictures = [];

function picture(title, note, height) {
  const head = el("h2", title, $("pictures"));
  el("span", note, head);
  const canvas = el("canvas", undefined, $("pictures"));
  canvas.style.height = `${height}px`;
  const p = { canvas, height, width: 0, context: canvas.getContext("2d"), drag: null };
  pictures.push(p);
  p.x = (at) => LEFT + (at - view.s) / (view.t - view.s) * (p.width - LEFT - RIGHT);
  p.at = (x) => view.s + (x - LEFT) / (p.width - LEFT - RIGHT) * (view.t - view.s);
  canvas.addEventListener("mousedown", (e) => { p.drag = [e.offsetX, e.offsetY, e.offsetX, e.offsetY]; });
  canvas.addEventListener("mousemove", (e) => {
    if (p.drag) { p.drag[2] = e.offsetX; p.drag[3] = e.offsetY; hide(); draw(p); return; }
    const lines = p.hit(e.offsetX, e.offsetY);
    if (lines) show(lines, e); else hide();
  });
  canvas.addEventListener("mouseleave", () => { if (p.drag) { p.drag = null; draw(p); } hide(); });
  canvas.addEventListener("mouseup", () => {
    const d = p.drag;
    p.drag = null;
    if (!d) return;
    if (Math.abs(d[2] - d[0]) > 5) {
      const s = Math.max(0, p.at(Math.min(d[0], d[2]))), t = Math.min(span, p.at(Math.max(d[0], d[2])));
      if (t - s > 0.05) {
        if (p.zoom && Math.abs(d[3] - d[1]) > 12) p.zoom(Math.max(d[1], d[3]), Math.min(d[1], d[3]));
        [view.s, view.t] = [s, t];
      }
    }
    drawAll();
  });
  canvas.addEventListener("dblclick", reset);
  return p;
}

function reset() {
  [view.s, view.t] = [0, span];
  for (const p of pictures) if (p.unzoom) p.unzoom();
  drawAll();
}

// ---- a segment: bytes over time -------------------------------------------------------------
function segmentPicture(segment, index) {
  const buffers = plan.buffers.filter((b) => b.segment === index);
  const reached = segment.nbytes === segment.bound ? "lower bound reached" : `lower bound ${size(segment.bound)}`;
  const p = picture(`Segment ${segment.name}`,
    `${size(segment.nbytes)} · ${reached} · ${buffers.length.toLocaleString("en")} buffers · groups ${segment.groups}`, HEIGHT);
  const bottom = HEIGHT - AXIS - STRIP, whole = Math.max(1, segment.nbytes);
  let low = 0, high = whole;
  const y = (byte) => bottom - (byte - low) / (high - low) * (bottom - TOP);
  const byte = (at) => low + (bottom - at) / (bottom - TOP) * (high - low);
  p.zoom = (from, to) => {
    const a = Math.max(0, byte(from)), b = Math.min(whole, byte(to));
    if (b - a >= 1) [low, high] = [a, b];
  };
  p.unzoom = () => { [low, high] = [0, whole]; };

  // Live bytes at each position, by summing the differences.
  const live = new Float64Array(span + 1);
  for (const b of buffers) { live[b.s] += b.b - b.a; live[b.t] -= b.b - b.a; }
  let most = 1;
  for (let i = 1; i <= span; i++) live[i] += live[i - 1];
  for (let i = 0; i < span; i++) most = Math.max(most, live[i]);

  p.paint = (c) => {
    c.fillStyle = css("--panel");
    c.fillRect(LEFT, TOP, p.width - LEFT - RIGHT, bottom - TOP);
    c.textAlign = "right"; c.textBaseline = "middle";
    for (const tick of ticks(low, high, 6, 1024)) {
      line(c, css("--grid"), LEFT, y(tick), p.width - RIGHT, y(tick));
      c.fillStyle = css("--soft");
      c.fillText(size(Math.round(tick)), LEFT - 8, y(tick));
    }
    clip(c, LEFT, TOP, p.width - LEFT - RIGHT, bottom - TOP, () => {
      const plain = kind < 0 && !wanted;
      c.textAlign = "left";
      for (const b of buffers) {
        if (b.t <= view.s || b.s >= view.t || b.b <= low || b.a >= high) continue;
        const x0 = p.x(b.s), y0 = y(b.b), w = Math.max(1, p.x(b.t) - x0), h = Math.max(1, y(b.a) - y0);
        const on = plain || matches(b);
        c.fillStyle = fill(b.tint, on ? 0.9 : 0.12);
        c.fillRect(x0, y0, w, h);
        if (w > 3 && h > 3) { c.strokeStyle = on ? edge(b.tint) : css("--line"); c.strokeRect(x0 + .5, y0 + .5, w - 1, h - 1); }
        if (on && h > 13 && w > 34) label(c, b.name, x0, y0, w, h);
      }
      for (const barrier of plan.barriers) {
        const x = p.x(barrier.at);
        c.setLineDash([4, 3]); line(c, css("--barrier"), x, TOP, x, bottom); c.setLineDash([]);
      }
    });
    if (segment.bound < segment.nbytes && segment.bound > low && segment.bound <= high) {
      line(c, css("--bound"), LEFT, y(segment.bound), p.width - RIGHT, y(segment.bound));
      c.fillStyle = css("--bound"); c.textAlign = "right"; c.textBaseline = "bottom";
      c.fillText("lower bound", p.width - RIGHT - 4, y(segment.bound) - 2);
    }
    strip(c);
    axis(p, c, HEIGHT - AXIS);
  };
  function strip(c) {
    const base = HEIGHT - AXIS - 4, tall = STRIP - 12;
    c.fillStyle = css("--soft"); c.textAlign = "right";
    c.fillText("live bytes", LEFT - 8, base - tall / 2);
    clip(c, LEFT, base - tall, p.width - LEFT - RIGHT, tall, () => {
      c.fillStyle = css("--live");
      c.beginPath(); c.moveTo(LEFT, base);
      for (let i = Math.floor(view.s); i < Math.min(span, Math.ceil(view.t)); i++) {
        const top = base - live[i] / most * tall;
        c.lineTo(p.x(i), top); c.lineTo(p.x(i + 1), top);
      }
      c.lineTo(p.width - RIGHT, base); c.fill();
    });
  }
  p.hit = (x, at) => {
    if (x < LEFT || x > p.width - RIGHT || at < TOP || at > HEIGHT - AXIS) return null;
    const time = p.at(x), offset = byte(at);
    if (at > bottom) {
      const i = Math.min(span - 1, Math.max(0, Math.floor(time)));
      return [`${size(live[i])} live`, describe(i)];
    }
    // The last one drawn lies on top; below one pixel, take the nearest that would be drawn there.
    const dx = (view.t - view.s) / (p.width - LEFT - RIGHT), dy = (high - low) / (bottom - TOP);
    for (let i = buffers.length - 1; i >= 0; i--) {
      const b = buffers[i];
      if (time >= b.s && time < Math.max(b.t, b.s + dx) && offset >= Math.min(b.a, b.b - dy) && offset < b.b)
        return bufferLines(b);
    }
    return null;
  };
}
const bufferLines = (b) => [
  b.name, `${opName(b)}${b.where ? `, ${b.where}` : ""}${b.type ? `, ${b.type}` : ""}`,
  `${size(b.b - b.a)} at bytes ${range(b.a, b.b)} of ${plan.segments[b.segment].name}`,
  b.persistent ? "bound for the whole program" :
    `live ${range(b.s, b.t)}: ${describe(b.s)} to ${describe(b.t - 1)}`];
const describe = (i) => {
  const operation = plan.operations[i];
  return operation ? `operation ${i.toLocaleString("en")} ${operation.name}` : "nothing";
};

// ---- streams: who runs when -----------------------------------------------------------------
function streamPicture() {
  if (!plan.operations.length) return;
  const height = TOP + plan.streams.length * LANE + AXIS;
  const p = picture("Streams", "operations by topological position; a step to the right is not a duration", height);
  p.paint = (c) => {
    plan.streams.forEach((name, i) => {
      c.fillStyle = css("--panel"); c.fillRect(LEFT, TOP + i * LANE + 2, p.width - LEFT - RIGHT, LANE - 4);
      c.fillStyle = css("--soft"); c.textAlign = "right"; c.textBaseline = "middle";
      c.fillText(shorten(c, name, LEFT - 12), LEFT - 8, TOP + (i + .5) * LANE);
    });
    clip(c, LEFT, 0, p.width - LEFT - RIGHT, height, () => {
      for (let i = Math.floor(view.s); i < Math.min(span, Math.ceil(view.t)); i++) {
        const operation = plan.operations[i], k = plan.kinds.indexOf(operation.op);
        const x = p.x(i), w = Math.max(1, p.x(i + 1) - x - (p.x(i + 1) - x > 4 ? 1 : 0));
        c.fillStyle = k >= 0 && operation.op ? fill(k, 0.9) : css("--live");
        c.fillRect(x, TOP + operation.stream * LANE + 3, w, LANE - 6);
        if (w > 40) { c.textAlign = "left"; label(c, operation.name, x, TOP + operation.stream * LANE + 3, w, LANE - 6); }
      }
    });
    axis(p, c, height - AXIS);
  };
  p.hit = (x, at) => {
    const i = Math.floor(p.at(x)), operation = plan.operations[i];
    if (!operation || x < LEFT || at > height - AXIS) return null;
    return [operation.name, operation.op || "(no op)", `operation ${i.toLocaleString("en")} on stream ${plan.streams[operation.stream]}`,
      ...(operation.group ? [`group ${operation.group}`] : [])];
  };
}

// ---- drawing helpers ------------------------------------------------------------------------
function ticks(from, to, wish, base) {
  // Round steps: 1, 2, 5 times a power of ten, or powers of two for bytes.
  let step = base === 1024 ? 1 : Math.pow(10, Math.floor(Math.log10((to - from) / wish)));
  if (base === 1024) while ((to - from) / step > wish) step *= 2;
  else for (const f of [1, 2, 5, 10]) if ((to - from) / (step * f) <= wish) { step *= f; break; }
  step = Math.max(1, step);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return found;
}
function axis(p, c, top) {
  c.textAlign = "center"; c.textBaseline = "top"; c.fillStyle = css("--soft");
  for (const tick of ticks(view.s, view.t, Math.max(2, p.width / 110), 10)) {
    line(c, css("--line"), p.x(tick), top, p.x(tick), top + 4);
    c.fillText(tick.toLocaleString("en"), p.x(tick), top + 7);
  }
}
function line(c, colour, x0, y0, x1, y1) {
  c.strokeStyle = colour; c.beginPath(); c.moveTo(x0, y0); c.lineTo(x1, y1); c.stroke();
}
function clip(c, x, y, w, h, work) {
  c.save(); c.beginPath(); c.rect(x, y, w, h); c.clip(); work(); c.restore();
}
function label(c, text, x, y, w, h) {
  c.fillStyle = dark.matches ? "#fff" : "#111"; c.textBaseline = "middle";
  const left = Math.max(x, LEFT) + 5;
  c.fillText(shorten(c, text, x + w - left - 3), left, y + h / 2 + .5);
}
function shorten(c, text, room) {
  if (c.measureText(text).width <= room) return text;
  let n = Math.min(text.length, Math.floor(room / 5));
  while (n > 0 && c.measureText(text.slice(0, n) + "…").width > room) n--;
  return n > 0 ? text.slice(0, n) + "…" : "";
}
function draw(p) {
  const ratio = devicePixelRatio || 1, c = p.context;
  p.width = p.canvas.clientWidth;
  p.canvas.width = Math.round(p.width * ratio);
  p.canvas.height = Math.round(p.height * ratio);
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.font = "11px system-ui, sans-serif";
  c.lineWidth = 1;
  p.paint(c);
  if (p.drag) {
    const [x0, y0, x1, y1] = p.drag;
    c.strokeStyle = css("--text"); c.setLineDash([3, 3]);
    c.strokeRect(x0, p.zoom ? y0 : 1, x1 - x0, p.zoom ? y1 - y0 : p.height - 2);
    c.setLineDash([]);
  }
}
let queued = false;
function drawAll() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => { queued = false; pictures.forEach(draw); });
}
function show(lines, e) {
  const tip = $("tip");
  tip.replaceChildren();
  lines.forEach((text, i) => el(i ? "div" : "b", text, tip));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = e.clientX + 14 + box.width > innerWidth ? e.clientX - 14 - box.width : e.clientX + 14;
  const y = e.clientY + 14 + box.height > innerHeight ? e.clientY - 14 - box.height : e.clientY + 14;
  tip.style.left = `${Math.max(4, x)}px`;
  tip.style.top = `${Math.max(4, y)}px`;
}
function hide() { $("tip").hidden = true; }

// ---- tables: a page of rows at a time, so that ten thousand stay quick ----------------------
const PAGE = 200;
const tables = [];
function addTable(title, note, rows, columns, filtered) {
  const head = el("h2", title, $("tables"));
  const told = el("span", note, head);
  if (!rows.length) return;
  const box = el("div", undefined, $("tables"));
  box.className = "scroll";
  const table = el("table", undefined, box);
  const top = el("tr", undefined, el("thead", undefined, table));
  const body = el("tbody", undefined, table);
  const more = el("button", "", $("tables"));
  more.type = "button"; more.className = "more";
  let shown = PAGE, by = -1, sign = 1;
  const refill = () => {
    let some = filtered ? rows.filter(matches) : rows;
    if (by >= 0) {
      const key = columns[by].key;
      some = [...some].sort((p, q) => { const a = key(p), b = key(q); return (a < b ? -1 : a > b ? 1 : 0) * sign; });
    }
    body.replaceChildren();
    for (const row of some.slice(0, shown)) {
      const tr = el("tr", undefined, body);
      for (const column of columns) {
        const td = el("td", undefined, tr);
        if (column.number) td.className = "n";
        if (column.wrap) td.className = "w"; else td.title = column.text(row);
        if (column.colour) el("i", undefined, td).style.background = fill(row.tint, 0.9);
        td.append(column.text(row));
      }
    }
    more.hidden = some.length <= shown;
    more.textContent = `show more (${(some.length - shown).toLocaleString("en")})`;
    if (filtered) told.textContent = some.length === rows.length ? note : `${some.length.toLocaleString("en")} of ${note}`;
  };
  columns.forEach((column, i) => {
    const th = el("th", column.name, top);
    if (column.number) th.className = "n";
    th.addEventListener("click", () => { sign = by === i ? -sign : 1; by = i; refill(); });
  });
  more.addEventListener("click", () => { shown += 5 * PAGE; refill(); });
  tables.push(refill);
  refill();
}
const text = (name, key, extra) => ({ name, key, text: key, ...extra });
const number = (name, key, shownAs) => ({ name, key, text: shownAs, number: true });

// ---- put it together ------------------------------------------------------------------------
$("tools").hidden = false;
plan.segments.forEach(segmentPicture);
streamPicture();
if (plan.kinds.length > 1) plan.kinds.forEach((name, k) => {
  const button = el("button", undefined, $("legend"));
  button.type = "button";
  el("i", undefined, button).style.background = fill(k, 0.9);
  button.append(name || "(no op)");
  button.setAttribute("aria-pressed", "false");
  button.addEventListener("click", () => {
    kind = kind === k ? -1 : k;
    [...$("legend").children].forEach((b, i) => b.setAttribute("aria-pressed", String(i === kind)));
    drawAll(); tables.forEach((refill) => refill());
  });
});
addTable("Placements", `${plan.buffers.length.toLocaleString("en")} buffers`, plan.buffers, [
  text("buffer", (b) => b.name, { colour: true }), text("op", opName), text("where", (b) => b.where),
  text("type", (b) => b.type), text("segment", (b) => plan.segments[b.segment].name),
  number("size", (b) => b.b - b.a, (b) => size(b.b - b.a)),
  number("bytes", (b) => b.a, (b) => range(b.a, b.b)),
  number("live", (b) => b.s, (b) => b.persistent ? "always" : range(b.s, b.t)),
], true);
addTable("Barriers", plan.barriers.length ? `${plan.barriers.length} to run besides the program` : "none needed",
  plan.barriers, [
    number("position", (b) => b.at, (b) => b.at.toLocaleString("en")), text("before", (b) => b.before),
    text("group", (b) => b.group), text("protects", (b) => b.buffers, { wrap: true }),
  ], false);
addTable("Left out", plan.unplanned.length ? `${plan.unplanned.length} declared tensors` : "nothing: every declared tensor is placed",
  plan.unplanned, [
    text("tensor", (u) => u.name), text("op", (u) => u.op), text("where", (u) => u.where),
    number("size", (u) => u.nbytes === null ? -1 : u.nbytes, (u) => size(u.nbytes)),
    text("reason", (u) => u.reason, { wrap: true }),
  ], false);
$("summary").open = false;
$("filter").addEventListener("input", (e) => {
  wanted = e.target.value.toLowerCase();
  drawAll(); tables.forEach((refill) => refill());
});
$("reset").addEventListener("click", reset);
addEventListener("resize", drawAll);
dark.addEventListener("change", () => { drawAll(); tables.forEach((refill) => refill()); });
drawAll();
})();
