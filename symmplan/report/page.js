// What the page carries, and small helpers. Every name is set as text, never as HTML.
const first = JSON.parse(document.getElementById("plan").textContent);
const plans = [first, first.beside].filter(Boolean);
const $ = (id) => document.getElementById(id);
const el = (tag, text, parent) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
};
const grouped = new Intl.NumberFormat("en");
const number = (n) => grouped.format(n);
const clamp = (x, low, high) => Math.max(low, Math.min(high, x));

// ---- values for people ----------------------------------------------------------------------
const size = (n) => {
  if (n === null) return "unknown";
  let unit = 0;
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  while (n >= 1024 && unit < units.length - 1) { n /= 1024; unit++; }
  return `${Number.isInteger(n) ? n : n.toFixed(2)} ${units[unit]}`;
};
const count = (n, noun) => `${number(n)} ${noun}${n === 1 ? "" : "s"}`;
const range = (a, b) => `[${number(a)}, ${number(b)})`;
const dark = matchMedia("(prefers-color-scheme: dark)");
const looked = new Map();  // what was asked of the style, forgotten with the colour scheme
const once = (key, make) => { if (!looked.has(key)) looked.set(key, make()); return looked.get(key); };
const css = (name) => once(name, () => getComputedStyle(document.documentElement).getPropertyValue(name).trim());
const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
probe.canvas.width = probe.canvas.height = 1;
function pixel(colour) {  // as four bytes, in the order of this machine
  return once(`pixel ${colour}`, () => {
    probe.fillStyle = colour; probe.fillRect(0, 0, 1, 1);
    return new Uint32Array(probe.getImageData(0, 0, 1, 1).data.buffer)[0];
  });
}

// ---- colours: twelve hues in three lightnesses; beyond them the same ones, hatched -----------
const HUES = 12, LEVELS = 3, COLOURS = HUES * LEVELS;
const lightness = (k) => (dark.matches ? [0.62, 0.44, 0.8] : [0.74, 0.55, 0.88])[Math.floor(k / HUES) % LEVELS];
const asRgb = (colour) => {
  pixel(colour);
  const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
  return `rgb(${r} ${g} ${b})`;
};
const tone = (k) => once(`tone ${k}`, () =>
  asRgb(`oklch(${lightness(k)} ${Math.floor(k / HUES) % LEVELS === 2 ? 0.09 : 0.14} ${(k * 5 % HUES) * 30 + 15})`));
const ink = (k) => (k < 0 ? css("--text") : lightness(k) > 0.6 ? "#111" : "#fff");
const rim = (k) => once(`rim ${k}`, () => asRgb(`oklch(${dark.matches ? 0.85 : 0.4} 0.12 ${(k * 5 % HUES) * 30 + 15})`));

const kinds = [...new Set(plans.flatMap((plan) => plan.kinds))];  // an op has one colour in all plans

// ---- each plan's own -------------------------------------------------------------------------
for (const plan of plans) {
  plan.count = Math.max(1, plan.operations.length);
  // The time axis: the program's own clock where it has one, else positions in the program.
  const clock = plan.times.length > 1;
  plan.clock = clock;
  plan.time = clock ? (i) => plan.times[Math.min(i, plan.times.length - 1)] : (i) => i;
  plan.begin = plan.time(0);
  plan.end = clock ? plan.times[plan.times.length - 1] : plan.count;
  plan.opName = (b) => plan.kinds[b.op] || "(no op)";
  plan.at = (time) => {  // the operation that runs at a time
    if (!clock) return clamp(Math.floor(time), 0, plan.count - 1);
    let low = 0, high = plan.times.length - 2;
    while (low < high) { const mid = (low + high + 1) >> 1; if (plan.times[mid] <= time) low = mid; else high = mid - 1; }
    return low;
  };
  plan.describe = (i) => {
    const operation = plan.operations[i];
    if (!operation) return "nothing";
    return clock ? `time ${range(plan.time(i), plan.time(i + 1))}` : `operation ${number(i)} ${operation.name}`;
  };
  plan.stack = (i) => (plan.operations[i] ? plan.operations[i].stack : []).map((f) => plan.frames[f]);
  plan.buffers.forEach((b, i) => {
    b.on = true;
    b.title = b.label || b.name;
    b.plan = plan;
    b.x0 = b.persistent ? plan.begin : plan.time(b.s);
    b.x1 = b.persistent ? plan.end : plan.time(b.t);
    b.tint = kinds.length > 1 ? kinds.indexOf(plan.kinds[b.op]) : i % HUES;  // with one op, colours tell neighbours apart
  });
  plan.often = new Map();  // how many names have a part
  for (const b of plan.buffers) for (const part of new Set(b.title.split("."))) plan.often.set(part, (plan.often.get(part) || 0) + 1);
  plan.segments.forEach((segment, k) => { segment.buffers = plan.buffers.filter((b) => b.segment === k); });
  plan.partner = new Map();
  for (const [a, b] of plan.together) { plan.partner.set(a, [...(plan.partner.get(a) || []), b]); plan.partner.set(b, [...(plan.partner.get(b) || []), a]); }
  plan.after = new Map();
  for (const [a, b] of plan.edges) { if (!plan.after.has(a)) plan.after.set(a, []); plan.after.get(a).push(b); }
  plan.next = new Int32Array(plan.count).fill(-1);  // of the same stream
  const last = new Map();
  plan.operations.forEach((o, i) => { o.kind = kinds.indexOf(o.op); if (last.has(o.stream)) plan.next[last.get(o.stream)] = i; last.set(o.stream, i); });
}

// ---- what is shown: shared by all pictures, as parts of each plan's time ----------------------
const view = { s: 0, t: 1 };
const shown = { wanted: "", kind: "", differ: false, pinned: null };
const matches = (b) => b.on;
function filter() {
  for (const plan of plans) for (const b of plan.buffers) {
    if (shown.wanted && b.words === undefined) b.words = `${b.name}\n${b.label}\n${plan.opName(b)}\n${b.where}\n${b.type}`.toLowerCase();
    b.on = (!shown.kind || plan.opName(b) === shown.kind) && (!shown.wanted || b.words.includes(shown.wanted)) && (!shown.differ || b.differs !== "");
  }
}
const plain = () => !shown.kind && !shown.wanted && !shown.differ;

// ---- who shares bytes with a buffer, and why it may -------------------------------------------
const away = (b, other) => Math.max(other.s - b.t, b.s - other.t, 0);  // those next in time first
const sharers = (b) => b.plan.segments[b.segment].buffers
  .filter((o) => o !== b && o.a < b.b && b.a < o.b).sort((p, q) => away(b, p) - away(b, q) || p.s - q.s);
function why(b, other) {
  const plan = b.plan;
  if ((plan.partner.get(b.name) || []).includes(other.name)) return "updated in place: they must share their offset";
  const [one, two] = other.t <= b.s ? [other, b] : [b, other];
  if (one.t > two.s) return "one is kept for the whole program";
  if (plan.clock) return `${one.name} ends at ${number(one.x1)}, ${two.name} begins at ${number(two.x0)}`;
  const last = one.uses[one.uses.length - 1] ?? one.t - 1, next = two.uses[0] ?? two.s;
  const barrier = plan.barriers.find((x) => x.at > last && x.at <= next);
  const from = plan.operations[last], to = plan.operations[next];
  if (!from || !to) return "never live together";
  let how = from.stream === to.stream ? `comes later on stream ${plan.streams[from.stream]}` : `waits for it, over ${hops(plan, last, next)}`;
  if (barrier) how += `; the barrier of ${barrier.group} before ${barrier.before} holds peers back`;
  return `${from.name} is the last to use ${one.name}; ${to.name}, the first to use ${two.name}, ${how}`;
}
function hops(plan, from, to) {
  const before = new Map([[from, -1]]);
  for (let queue = [from], k = 0; k < queue.length && !before.has(to) && k < 200000; k++) {
    const i = queue[k];
    for (const j of [...(plan.after.get(i) || []), plan.next[i]])
      if (j >= 0 && j <= to && !before.has(j)) { before.set(j, i); queue.push(j); }
  }
  const names = [];
  for (let i = to; i >= 0 && before.has(i); i = before.get(i)) {
    const j = before.get(i);
    if (j >= 0 && plan.operations[j].stream !== plan.operations[i].stream) names.unshift(`${plan.operations[j].name} → ${plan.operations[i].name}`);
  }
  return names.slice(0, 3).join(", ") || "other streams";
}
