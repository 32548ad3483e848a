// ---- what the pointer is at, and what is pinned ------------------------------------------------
function point(p, e) {
  const found = p.find ? p.find(e.offsetX, e.offsetY) : null;
  if (found !== p.hover) { p.hover = found; marked(); }
  const lines = p.hit(e.offsetX, e.offsetY);
  if (lines) show(lines, e); else hide();
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

function pin(b) {
  shown.pinned = b;
  shown.sharers = b ? sharers(b) : [];
  const box = $("pin");
  box.replaceChildren();
  box.hidden = !b;
  pictures.forEach((p) => {
    if (!b || !p.show) return;
    p.show(b);
    const lies = p.box(b);  // the panel is on the other side
    if (lies) box.className = p.over.getBoundingClientRect().left + lies[0] + lies[2] / 2 > innerWidth / 2 ? "left" : "";
  });
  if (b) {
    hide();
    const close = el("button", "×", box);
    close.type = "button"; close.setAttribute("aria-label", "unpin"); close.addEventListener("click", () => pin(null));
    const [name, ...rest] = bufferLines(b);
    el("b", name, box);
    rest.slice(0, 3).forEach((text) => el("div", text, box));
    const first = b.uses[0] ?? b.s, last = b.uses[b.uses.length - 1] ?? b.t - 1;
    const ends = first === last ? [["used by", first]] : [["first used by", first], ["last used by", last]];
    for (const [what, i] of b.plan.clock ? [] : ends) {
      el("h3", `${what} ${b.plan.operations[i] ? b.plan.operations[i].name : "nothing"}`, box);
      const stack = b.plan.stack(i);
      if (stack.length) el("pre", [...stack].reverse().join("\n"), box);
    }
    const held = b.plan.barriers.filter((x) => x.buffers.includes(b.name));
    for (const x of held) el("div", `protected by the barrier of ${x.group} before ${x.before}`, box);
    el("h3", shown.sharers.length ? `shares bytes with ${number(shown.sharers.length)}` : "shares bytes with no other buffer", box);
    const list = el("ul", undefined, box);
    for (const other of shown.sharers.slice(0, MANY)) {
      const item = el("li", undefined, list), link = el("button", other.title, item);
      link.type = "button"; link.addEventListener("click", () => { reveal(other); pin(other); });
      el("div", `${range(Math.max(b.a, other.a), Math.min(b.b, other.b))}: ${why(b, other)}`, item);
    }
    if (shown.sharers.length > MANY) el("div", `and ${number(shown.sharers.length - MANY)} more`, box);
  }
  marked();
}
function reveal(b) {  // move there, if it is not shown
  const s = b.plan.part(b.x0), t = b.plan.part(b.x1), width = view.t - view.s;
  if (s >= view.s && t <= view.t) return;
  const wide = clamp(Math.max(width, (t - s) * 1.5), 0, 1);
  view.s = clamp((s + t - wide) / 2, 0, 1 - wide);
  view.t = view.s + wide;
  changed();
}

// ---- keys --------------------------------------------------------------------------------------
const KEYS = [
  ["← →", "move in time"], ["↑ ↓", "move in bytes"], ["+ −", "zoom in time"], ["shift + −", "zoom in bytes"],
  ["0", "whole picture"], ["n p", "pin the next buffer, the one before"], ["z", "zoom to what is pinned"], ["k", "go to the peak"], ["/", "filter"], ["Esc", "unpin"], ["?", "these keys"],
];
addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey) return;
  if (e.target.matches("input")) { if (e.key === "Escape") e.target.blur(); return; }
  const width = view.t - view.s, bytes = (act) => pictures.forEach((p) => { if (p.panBytes) act(p); });
  const acts = {
    ArrowLeft: () => pan(-width / 8), ArrowRight: () => pan(width / 8),
    ArrowUp: () => bytes((p) => p.panBytes(30)), ArrowDown: () => bytes((p) => p.panBytes(-30)),
    "+": () => (e.shiftKey && e.code !== "Equal" ? bytes((p) => p.zoomBytes(0.7, HEIGHT / 2)) : zoom(0.7, (view.s + view.t) / 2)),
    "=": () => zoom(0.7, (view.s + view.t) / 2), "-": () => zoom(1 / 0.7, (view.s + view.t) / 2),
    _: () => bytes((p) => p.zoomBytes(1 / 0.7, HEIGHT / 2)), "*": () => bytes((p) => p.zoomBytes(0.7, HEIGHT / 2)),
    0: reset, Home: reset, n: () => step(1), p: () => step(-1),
    z: () => {
      const b = shown.pinned;
      if (!b) return;
      const room = Math.max(1e-6, b.plan.part(b.x1) - b.plan.part(b.x0));
      view.s = clamp(b.plan.part(b.x0) - room, 0, 1); view.t = clamp(b.plan.part(b.x1) + room, 0, 1);
    },
    k: toPeak, "/": () => $("filter").focus(), Escape: () => (($("keys").hidden = true), pin(null)), "?": () => { $("keys").hidden = !$("keys").hidden; },
  };
  if (!acts[e.key]) return;
  e.preventDefault();
  acts[e.key]();
  if ("npEscape/?".includes(e.key)) marked(); else changed();
});
function step(by) {
  const plan = shown.pinned ? shown.pinned.plan : first, some = plan.buffers.filter(matches);
  if (!some.length) return;
  const at = some.indexOf(shown.pinned), b = some[at < 0 ? 0 : (at + by + some.length) % some.length];
  reveal(b); pin(b);
}
KEYS.forEach(([key, what]) => { const row = el("div", undefined, $("keys")); el("kbd", key, row); row.append(` ${what}`); });

// ---- tables: a page of rows at a time, so that fifty thousand stay quick -----------------------
const PAGE = 200;
const tables = [];
function addTable(title, note, rows, columns, filtered) {
  columns = columns.filter((column) => rows.some((row) => column.text(row)));
  const head = el("h2", title, $("tables"));
  const told = el("span", note, head);
  if (!rows.length) return;
  const table = el("table", undefined, Object.assign(el("div", undefined, $("tables")), { className: "scroll" }));
  const top = el("tr", undefined, el("thead", undefined, table));
  const body = el("tbody", undefined, table);
  const more = el("button", "", $("tables"));
  more.type = "button"; more.className = "more";
  let shownRows = PAGE, by = -1, sign = 1;
  const refill = () => {
    let some = filtered && !plain() ? rows.filter(matches) : rows;
    if (by >= 0) {
      const key = columns[by].key;
      some = [...some].sort((p, q) => { const a = key(p), b = key(q); return (a < b ? -1 : a > b ? 1 : 0) * sign; });
    }
    body.replaceChildren();
    for (const row of some.slice(0, shownRows)) {
      const tr = el("tr", undefined, body);
      if (filtered) tr.addEventListener("click", () => { reveal(row); pin(row); });
      for (const column of columns) {
        const td = el("td", undefined, tr);
        if (column.number) td.className = "n";
        if (column.wrap) td.className = "w"; else td.title = column.text(row);
        if (column.colour) el("i", undefined, td).style.background = tone(row.tint);
        td.append(column.text(row));
      }
    }
    more.hidden = some.length <= shownRows;
    more.textContent = `show more (${number(some.length - shownRows)})`;
    if (filtered) told.textContent = some.length === rows.length ? note : `${number(some.length)} of ${note}`;
  };
  columns.forEach((column, i) => {
    const th = el("th", column.name, top);
    if (column.number) th.className = "n";
    th.addEventListener("click", () => { sign = by === i ? -sign : 1; by = i; refill(); });
  });
  more.addEventListener("click", () => { shownRows += 5 * PAGE; refill(); });
  tables.push(refill);
  refill();
}
const text = (name, key, extra) => ({ name, key, text: key, ...extra });
const amount = (name, key, shownAs) => ({ name, key, text: shownAs, number: true });

// ---- put it together ------------------------------------------------------------------------
$("tools").hidden = !plans.some((plan) => plan.count && plan.buffers.length);
plans.forEach((plan, i) => {
  plan.segments.forEach((segment, k) => segmentPicture(plan, segment, k, columns[i]));
  streamPicture(plan, columns[i]);
});
if (kinds.length > 1) kinds.forEach((kind, k) => {
  const name = kind || "(no op)", button = el("button", undefined, $("legend"));
  button.type = "button"; button.dataset.kind = name;
  const mark = el("i", undefined, button);
  mark.dataset.tint = k;
  button.append(name);
  button.setAttribute("aria-pressed", "false");
  button.addEventListener("click", () => {
    shown.kind = shown.kind === name ? "" : name;
    for (const b of $("legend").children) b.setAttribute("aria-pressed", String(b.dataset.kind === shown.kind));
    refresh();
  });
});
const recolour = () => { for (const mark of document.querySelectorAll("#legend i")) { mark.style.background = tone(+mark.dataset.tint); mark.className = +mark.dataset.tint >= COLOURS ? "hatched" : ""; } };
if (second) {
  addTable("Differences", said(), changes, [
    text("buffer", (b) => b.title, { colour: true }), text("what", (b) => b.differs),
    amount("bytes", (b) => b.before ? b.before.a : -1, (b) => b.before ? range(b.before.a, b.before.b) : "none"),
    amount("beside", (b) => b.after ? b.after.a : -1, (b) => b.after ? range(b.after.a, b.after.b) : "none"),
    amount("bytes more", (b) => b.more, (b) => signed(b.more)),
  ], true);
}
plans.forEach((plan, i) => {
  const of = i ? ` beside (${plan.fingerprint})` : "";
  const saving = plan.advice || [], total = Math.max(0, ...saving.map((a) => a.saves));
  const change = [
    amount("saves", (a) => a.saves, (a) => (a.saves ? size(a.saves) : "peak")), text("change", (a) => a.text, { wrap: true }),
    text("buffers", (a) => a.buffers.map((n) => plan.named.get(n) || n).join(", "), { wrap: true }),
  ];
  addTable(`What would save bytes${of}`, saving.length ? `up to ${size(total)} of ${size(plan.segments.reduce((n, s) => n + s.nbytes, 0))}` :
    plan.advice ? "no change was found" : "not computed for so many buffers; plan.advice() computes it", [...saving, ...plan.peaks], change, false);
  if (plan.trades.length) addTable(`What speed and bytes can be traded for${of}`, "each gives something up", plan.trades, change.slice(0, 2), false);
  addTable(`Placements${of}`, count(plan.buffers.length, "buffer"), plan.buffers, [
    text("buffer", (b) => b.title, { colour: true }), ...(plan.buffers.some((b) => b.label) ? [text("name", (b) => b.name)] : []), ...(kinds.some(Boolean) ? [text("op", plan.opName)] : []), text("where", (b) => b.where),
    text("type", (b) => b.type),
    ...(plan.segments.length > 1 ? [text("segment", (b) => plan.segments[b.segment].name)] : []),
    amount("size", (b) => b.b - b.a, (b) => size(b.b - b.a)),
    amount("bytes", (b) => b.a, (b) => range(b.a, b.b)),
    amount("live", (b) => b.x0, (b) => b.persistent ? "always" : range(b.x0, b.x1)),
    text("line", (b) => plan.stack(b.uses[0] ?? b.s).slice(-1)[0] || ""),
  ], true);
  addTable(`Barriers${of}`, plan.barriers.length ? `${number(plan.barriers.length)} to run besides the program` : "none needed",
    plan.barriers, [
      amount("position", (b) => b.at, (b) => number(b.at)), text("before", (b) => b.before),
      text("group", (b) => b.group), text("protects", (b) => b.buffers.join(", "), { wrap: true }),
    ], false);
  const missed = plan.unplanned.filter((u) => u.needed), free = plan.unplanned.filter((u) => !u.needed);
  const left = [
    text("tensor", (u) => u.name), text("op", (u) => u.op), text("where", (u) => u.where),
    amount("size", (u) => u.nbytes === null ? -1 : u.nbytes, (u) => size(u.nbytes)),
    text("reason", (u) => u.reason, { wrap: true }),
  ];
  addTable(`Left out${of}`, missed.length ? `${number(missed.length)} declared tensors that symmetric memory would have served` :
    "nothing: every tensor that needs symmetric memory has a place", missed, left, false);
  if (free.length) addTable(`Need not be symmetric${of}`, `${number(free.length)} declared tensors that may lie anywhere: nothing is lost`, free, left, false);
});
$("summary").open = false;
function refresh() { looked.clear(); filter(); recolour(); changed(true); tables.forEach((refill) => refill()); }
$("filter").addEventListener("input", (e) => { shown.wanted = e.target.value.toLowerCase(); refresh(); toFound(); });
$("peak").addEventListener("click", toPeak);
$("differ").hidden = !second;
$("differ").addEventListener("click", (e) => {
  shown.differ = !shown.differ;
  e.target.setAttribute("aria-pressed", String(shown.differ));
  refresh();
});
$("reset").addEventListener("click", reset);
addEventListener("resize", () => changed(true));
dark.addEventListener("change", refresh);
recolour();
changed(true);
