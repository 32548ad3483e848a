// ---- two plans: which buffers moved, are new, are gone, have another size ----------------------
const second = plans[1];
const changes = [];
const signed = (n) => (n > 0 ? `+${size(n)}` : n < 0 ? `−${size(-n)}` : "0 B");
for (const plan of plans) {
  plan.named = new Map(plan.buffers.map((b) => [b.name, b.title]));
  plan.part = (time) => (time - plan.begin) / (plan.end - plan.begin);
}
function change(b, differs, before, after) {
  b.differs = differs;
  b.before = before; b.after = after;
  b.more = (after ? after.b - after.a : 0) - (before ? before.b - before.a : 0);
  if (differs) changes.push(b);
}
if (second) {
  const others = new Map(second.buffers.map((b) => [b.name, b]));
  for (const b of first.buffers) {
    const other = others.get(b.name);
    others.delete(b.name);
    if (!other) { change(b, "gone", b, null); continue; }
    const moved = b.a !== other.a || first.segments[b.segment].name !== second.segments[other.segment].name;
    const resized = b.b - b.a !== other.b - other.a;
    change(b, [moved ? "moved" : "", resized ? "resized" : ""].filter(Boolean).join(", "), b, other);
    other.differs = b.differs;
  }
  for (const b of others.values()) change(b, "new", null, b);
}
function said() {
  const peak = (plan) => plan.segments.reduce((n, s) => n + s.nbytes, 0);
  const how = (word) => changes.filter((b) => b.differs.includes(word)).length;
  const parts = ["moved", "resized", "new", "gone"].map((word) => `${number(how(word))} ${word}`);
  return `${parts.join(", ")}; the peak changes by ${signed(peak(second) - peak(first))} (${size(peak(first))} → ${size(peak(second))})`;
}

// ---- where to look: nearer, elsewhere, at the peak, and at what a filter found ------------------
function zoom(factor, at) {
  const width = clamp((view.t - view.s) * factor, 1e-7, 1), left = (at - view.s) / (view.t - view.s);
  view.s = clamp(at - left * width, 0, 1 - width);
  view.t = view.s + width;
}
function pan(by) {
  const width = view.t - view.s;
  view.s = clamp(view.s + by, 0, 1 - width);
  view.t = view.s + width;
}
function reset() {
  [view.s, view.t] = [0, 1];
  for (const p of pictures) if (p.whole) p.whole();
  changed();
}
function toPeak() {  // of the segment that is largest there
  const of = pictures.filter((p) => p.peak && p.plan === first).sort((p, q) => q.peak.live - p.peak.live)[0];
  if (!of) return;
  const at = first.part(first.time(of.peak.at)), end = first.part(first.time(of.peak.at + 1));
  const wide = clamp(Math.max(16 * (end - at), 1 / 16), 0, 1);
  view.s = clamp((at + end - wide) / 2, 0, 1 - wide);
  view.t = view.s + wide;
  changed();
}
function toFound() {
  const found = plans.flatMap((plan) => plan.buffers.filter(matches));
  if (!shown.wanted || !found.length) { reset(); return; }
  let s = 1, t = 0;
  for (const b of found) { s = Math.min(s, b.plan.part(b.x0)); t = Math.max(t, b.plan.part(b.x1)); }
  const room = Math.max(1e-6, (t - s) / 10);
  view.s = clamp(s - room, 0, 1); view.t = clamp(t + room, 0, 1);
  for (const p of pictures) if (p.fit) p.fit(found.filter((b) => b.plan === p.plan));
  changed();
}
