// ---- pictures: canvases that are painted at most once a frame, no finer than pixels -----------
const LEFT = 96, RIGHT = 18, TOP = 6, AXIS = 38, STRIP = 46, HEIGHT = 380, LANE = 22, MAP = 34;
const CROWD = 5000;  // more buffers than this have no room for names
const FAINT = 70;  // of 255: how dark a pixel is of which next to nothing is covered
const MANY = 20;  // of those that share bytes, so many are told and outlined
const FONT = "11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace", CHAR = 6.7;
const pictures = [];
const scratch = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const columns = plans.map((plan, i) => {
  const column = el("section", undefined, $("pictures"));
  if (plans.length > 1) el("h2", `${i ? "Beside" : "Plan"} ${plan.fingerprint}`, column).className = "which";
  return column;
});
if (plans.length > 1) $("pictures").className = "two";

function picture(plan, title, note, height, column) {
  const head = el("h2", title, column);
  el("span", note, head);
  const frame = el("div", undefined, column);
  frame.className = "frame";
  const canvas = el("canvas", undefined, frame), over = el("canvas", undefined, frame);
  canvas.style.height = over.style.height = `${height}px`;
  over.className = "over";
  over.setAttribute("role", "img");
  over.setAttribute("aria-label", `${title}: ${note}`);
  const p = { title, plan, canvas, over, height, width: 0, drag: null, hover: null, head, stale: true };
  p.inner = () => Math.max(1, p.width - LEFT - RIGHT);
  p.span = () => [plan.begin + view.s * (plan.end - plan.begin), plan.begin + view.t * (plan.end - plan.begin)];
  p.x = (time) => { const [s, t] = p.span(); return LEFT + (time - s) / (t - s) * p.inner(); };
  p.at = (x) => { const [s, t] = p.span(); return s + (x - LEFT) / p.inner() * (t - s); };
  p.part = (x) => view.s + (x - LEFT) / p.inner() * (view.t - view.s);
  over.addEventListener("wheel", (e) => {
    e.preventDefault();
    const turn = Math.exp(clamp(e.deltaY || 0, -240, 240) * 0.0025);
    if (Math.abs(e.deltaX) > Math.abs(e.deltaY) && !e.shiftKey) pan(e.deltaX / p.inner() * (view.t - view.s));
    else if (e.shiftKey && p.zoomBytes) p.zoomBytes(Math.exp(clamp(e.deltaY || e.deltaX, -240, 240) * 0.0025), e.offsetY);
    else zoom(turn, clamp(p.part(e.offsetX), view.s, view.t));
    changed();
  }, { passive: false });
  over.addEventListener("pointerdown", (e) => {
    if (e.button) return;
    over.setPointerCapture(e.pointerId);
    p.drag = { x: e.offsetX, y: e.offsetY, lastX: e.offsetX, lastY: e.offsetY, box: e.shiftKey, moved: false };
  });
  over.addEventListener("pointermove", (e) => {
    const d = p.drag;
    if (!d) { point(p, e); return; }
    d.moved = d.moved || Math.hypot(e.offsetX - d.x, e.offsetY - d.y) > 4;
    if (d.box) { d.lastX = e.offsetX; d.lastY = e.offsetY; marked(); return; }
    if (!d.moved) return;
    hide();
    pan(-(e.offsetX - d.lastX) / p.inner() * (view.t - view.s));
    if (p.panBytes) p.panBytes(e.offsetY - d.lastY);
    d.lastX = e.offsetX; d.lastY = e.offsetY;
    changed();
  });
  over.addEventListener("pointerup", (e) => {
    const d = p.drag;
    p.drag = null;
    if (!d) return;
    if (d.box && d.moved) {
      const s = p.part(Math.min(d.x, d.lastX)), t = p.part(Math.max(d.x, d.lastX));
      if (p.boxBytes && Math.abs(d.lastY - d.y) > 12) p.boxBytes(Math.max(d.y, d.lastY), Math.min(d.y, d.lastY));
      if (t - s > 1e-9) [view.s, view.t] = [clamp(s, 0, 1), clamp(t, 0, 1)];
      changed();
    } else if (!d.moved) pin(p.find ? p.find(e.offsetX, e.offsetY) : null);
    marked();
  });
  over.addEventListener("pointercancel", () => { p.drag = null; });  // a finger that scrolls the page
  over.addEventListener("pointerleave", () => { if (!p.drag) { p.hover = null; hide(); marked(); } });
  over.addEventListener("dblclick", reset);
  pictures.push(p);
  return p;
}
// ---- a segment: bytes over time -------------------------------------------------------------
function segmentPicture(plan, segment, index, column) {
  const buffers = segment.buffers;
  const reached = segment.nbytes === segment.bound ? "lower bound reached" : `lower bound ${size(segment.bound)}`;
  const p = picture(plan, `Segment ${segment.name}`,
    `${size(segment.nbytes)} · ${reached} · ${count(buffers.length, "buffer")} · groups ${segment.groups}`, HEIGHT, column);
  // Plans beside each other are on one scale.
  const whole = Math.max(1, ...plans.map((x) => (x.segments[index] ? x.segments[index].nbytes : 0)));
  const bottom = HEIGHT - AXIS - STRIP;
  let low = 0, high = whole;
  const y = (byte) => bottom - (byte - low) / (high - low) * (bottom - TOP);
  const byte = (at) => low + (bottom - at) / (bottom - TOP) * (high - low);
  const bytes = (a, b) => { const n = clamp(b - a, Math.min(whole, 16), whole); low = clamp(a, 0, whole - n); high = low + n; };
  p.zoomBytes = (factor, at) => { const m = clamp(byte(at), low, high), n = (high - low) * factor; bytes(m - (m - low) / (high - low) * n, m - (m - low) / (high - low) * n + n); };
  p.panBytes = (dy) => { const by = dy / (bottom - TOP) * (high - low); bytes(low + by, high + by); };
  p.boxBytes = (from, to) => bytes(Math.max(0, byte(from)), Math.min(whole, byte(to)));
  p.whole = () => { [low, high] = [0, whole]; };
  p.fit = (found) => {  // bytes from the lowest to the highest of some buffers
    p.whole();
    let a = whole, b = 0;
    for (const one of found) if (one.segment === index) { a = Math.min(a, one.a); b = Math.max(b, one.b); }
    if (b > a) bytes(a - (b - a) / 10, b + (b - a) / 10);
  };

  // Sorted by colour, so that a colour is set once; numbers alone, so that fifty thousand are quick.
  const order = buffers.map((_, i) => i).sort((i, j) => buffers[i].tint - buffers[j].tint || i - j);
  const sorted = order.map((i) => buffers[i]);
  const X0 = Float64Array.from(sorted, (b) => b.x0), X1 = Float64Array.from(sorted, (b) => b.x1);
  const A = Float64Array.from(sorted, (b) => b.a), B = Float64Array.from(sorted, (b) => b.b);
  const live = new Float64Array(plan.count + 1);
  for (const b of buffers) { live[b.s] += b.b - b.a; live[Math.min(b.t, plan.count)] -= b.b - b.a; }
  const T = Float64Array.from({ length: plan.count + 1 }, (_, i) => plan.time(i));
  let most = 1, kept = null, density = new Float32Array(0);
  for (let i = 1; i <= plan.count; i++) live[i] += live[i - 1];
  let peak = 0;
  for (let i = 0; i < plan.count; i++) { most = Math.max(most, live[i]); if (live[i] > live[peak]) peak = i; }
  p.peak = { at: peak, live: live[peak] };

  // Rectangles of [s, t) x [lo, hi) in a box of w x h pixels at (left, top). Small ones are set in
  // an array of pixels: however many there are, they cost no more than the pixels that they cover.
  function rectangles(c, s, t, lo, hi, left, top, w, h, labels) {
    const kx = w / (t - s), ky = h / (hi - lo), base = top + h;
    const wide = Math.ceil(w), high = Math.ceil(h), all = plain(), tall = [], off = css("--off");
    let image = null, cells = null;
    if (c.svg) cells = new Uint8Array(wide * high);
    else {
      if (scratch.canvas.width !== wide || scratch.canvas.height !== high) { scratch.canvas.width = wide; scratch.canvas.height = high; }
      image = kept && kept.width === wide && kept.height === high ? kept : new ImageData(wide, high);
      if (labels) kept = image;
      cells = new Uint32Array(image.data.buffer).fill(0);
    }
    // How much of a pixel its small rectangles cover, for the shade: at full scale it is a density.
    const cover = image && (density.length === cells.length ? density.fill(0) : (density = new Float32Array(cells.length)));
    let painted = -2, value = 0, drawn = 0;
    for (let k = 0; k < sorted.length; k++) {
      if (X1[k] <= s || X0[k] >= t || B[k] <= lo || A[k] >= hi) continue;
      const xa = Math.max(0, (X0[k] - s) * kx), xb = Math.min(w, (X1[k] - s) * kx);
      const ya = Math.max(0, (A[k] - lo) * ky), yb = Math.min(h, (B[k] - lo) * ky);
      const rw = xb - xa, rh = yb - ya;
      const on = all || matches(sorted[k]), colour = on ? sorted[k].tint : -1;
      if (colour !== painted) { painted = colour; c.fillStyle = on ? tone(colour) : off; if (image) value = pixel(c.fillStyle); }
      const x0 = Math.min(wide - 1, Math.floor(xa)), y1 = Math.max(0, Math.min(high - 1, Math.floor(h - yb)));
      if (image && !(rw > 4 && rh > 4)) {
        const xe = Math.max(x0 + 1, Math.round(xb)), ye = Math.max(y1 + 1, Math.min(high, Math.round(h - ya)));
        const part = Math.min(1, rw) * Math.min(1, rh);
        for (let row = y1; row < ye; row++)
          for (let at = row * wide + x0, end = row * wide + Math.min(wide, xe); at < end; at++) { cells[at] = value; cover[at] += part; }
        drawn++;
        continue;
      }
      if (!image && rw < 1.5 && rh < 1.5) {
        if (cells[y1 * wide + x0]) continue;
        cells[y1 * wide + x0] = 1;
      }
      const x = left + xa, y0 = base - yb, bw = Math.max(1, rw), bh = Math.max(1, rh);
      drawn++;
      if (labels && bw > 4 && bh > 4) {
        c.fillStyle = on ? rim(sorted[k].tint) : css("--line"); c.fillRect(x, y0, bw, bh);
        c.fillStyle = on ? tone(sorted[k].tint) : off; c.fillRect(x + .75, y0 + .75, bw - 1.5, bh - 1.5);
        if (on && sorted[k].tint >= COLOURS) hatch(c, x, y0, bw, bh);
        painted = -2;
        if (on && bh > 12 && bw > 30) tall.push([sorted[k], x, y0, bw, bh]);
      } else c.fillRect(x, y0, bw, bh);
    }
    if (image) {
      for (let at = 0; at < cells.length; at++)
        if (cover[at] && cover[at] < 1) image.data[4 * at + 3] = FAINT + (255 - FAINT) * cover[at];
      scratch.putImageData(image, 0, 0);
      c.drawImage(scratch.canvas, left, top);
    }
    for (const [b, x, y0, bw, bh] of tall) label(c, b.title, x, y0, bw, bh, b.tint, plan.often);
    return drawn;
  }
  p.paint = (c) => {
    const [s, t] = p.span(), w = p.inner();
    c.fillStyle = css("--panel");
    c.fillRect(LEFT, TOP, w, bottom - TOP);
    c.textAlign = "right"; c.textBaseline = "middle";
    for (const tick of ticks(low, high, 6, 1024)) {
      line(c, css("--grid"), LEFT, y(tick), p.width - RIGHT, y(tick));
      c.fillStyle = css("--soft");
      c.fillText(size(Math.round(tick)), LEFT - 6, y(tick));
    }
    clip(c, LEFT, TOP, w, bottom - TOP, () => {
      p.drawn = rectangles(c, s, t, low, high, LEFT, TOP, w, bottom - TOP, true);
      if (p.drawn > CROWD) told(c, `${number(p.drawn)} buffers: the shade is how much of each pixel they cover; names appear when near`);
      c.setLineDash([4, 3]);
      let before = -9;
      for (const barrier of plan.barriers) {
        const x = Math.round(p.x(plan.time(barrier.at)));
        if (x > before + 1 || x < before) { line(c, css("--barrier"), x, TOP, x, bottom); before = x; }
      }
      c.setLineDash([]);
    });
    if (segment.bound < segment.nbytes && segment.bound > low && segment.bound <= high) {
      line(c, css("--bound"), LEFT, y(segment.bound), p.width - RIGHT, y(segment.bound));
      const under = y(segment.bound) < 18 ? y(segment.bound) + 16 : y(segment.bound);  // no room above
      c.fillStyle = css("--back"); c.fillRect(p.width - RIGHT - 84, under - 15, 84, 14);
      c.fillStyle = css("--bound"); c.textAlign = "right"; c.textBaseline = "bottom";
      c.fillText("lower bound", p.width - RIGHT - 4, under - 2);
    }
    strip(c, s, t, w);
    const top = p.x(plan.time(peak) + 0.5 * (plan.time(peak + 1) - plan.time(peak)));
    if (top >= LEFT && top <= p.width - RIGHT) {
      c.fillStyle = css("--bound"); c.textAlign = top > p.width - 60 ? "right" : "left"; c.textBaseline = "top";
      c.fillRect(top - 1, bottom + 2, 2, STRIP - 8); c.fillText("peak", top + (top > p.width - 60 ? -4 : 4), bottom + 1);
    }
    axis(p, c, HEIGHT - AXIS);
    sideways(c, "bytes of the segment", 9, (TOP + bottom) / 2);
  };
  function strip(c, s, t, w) {
    const base = HEIGHT - AXIS - 4, tall = STRIP - 12;
    c.fillStyle = css("--soft"); c.textAlign = "right"; c.textBaseline = "middle";
    c.fillText("live", LEFT - 6, base - tall / 2 - 6);
    c.fillText(`≤ ${size(most)}`, LEFT - 6, base - tall / 2 + 7);
    c.fillStyle = css("--live");
    const a = plan.at(s), b = Math.min(plan.count, plan.at(t) + 1), top = new Float64Array(Math.floor(w)), k = w / (t - s);
    for (let i = a; i < b; i++) {
      const from = Math.max(0, Math.floor((T[i] - s) * k)), to = Math.min(top.length, Math.max(from + 1, Math.ceil((T[i + 1] - s) * k)));
      for (let x = from; x < to; x++) if (live[i] > top[x]) top[x] = live[i];
    }
    for (let x = 0; x < top.length;) {
      let end = x + 1;
      while (end < top.length && top[end] === top[x]) end++;
      const h = top[x] / most * tall;
      if (h > 0) c.fillRect(LEFT + x, base - h, end - x, h);
      x = end;
    }
  }
  p.find = (x, at) => {
    if (x < LEFT || x > p.width - RIGHT || at < TOP || at > bottom) return null;
    const time = p.at(x), offset = byte(at), [s, t] = p.span();
    // Below one pixel, the nearest that is painted there.
    const dx = (t - s) / p.inner(), dy = (high - low) / (bottom - TOP);
    let near = null;
    for (let k = sorted.length - 1; k >= 0; k--) {
      if (time < X0[k] || offset >= B[k] + dy || time >= Math.max(X1[k], X0[k] + dx) || offset < A[k] - dy) continue;
      if (time < X1[k] && offset >= A[k] && offset < B[k]) return sorted[k];
      near = near || sorted[k];
    }
    return near;
  };
  p.hit = (x, at) => {
    if (x < LEFT || x > p.width - RIGHT || at < TOP || at > HEIGHT - AXIS) return null;
    if (at > bottom) { const i = plan.at(p.at(x)); return [`${size(live[i])} live`, plan.describe(i)]; }
    const b = p.find(x, at);
    return b && bufferLines(b);
  };
  p.box = (b) => (b.plan === plan && b.segment === index
    ? [p.x(b.x0), y(b.b), Math.max(2, p.x(b.x1) - p.x(b.x0)), Math.max(2, y(b.a) - y(b.b))] : null);
  p.area = () => [LEFT, TOP, p.inner(), bottom - TOP];
  p.show = (b) => { if (p.box(b) && (b.b > high || b.a < low)) { p.whole(); changed(); } };
  minimap(p, column, (c, w) => rectangles(c, plan.begin, plan.end, 0, whole, LEFT, 1, w, MAP - 2, false), () => [low / whole, high / whole]);
  const save = el("button", "SVG", p.head);
  save.type = "button"; save.className = "save"; save.title = "save what is shown as SVG";
  save.addEventListener("click", () => download(`${plan.fingerprint}-${segment.name}.svg`, toSvg(p)));
}
const bufferLines = (b) => [
  b.title, ...(b.label ? [b.name] : []), `${b.plan.opName(b)}${b.where ? `, ${b.where}` : ""}${b.type ? `, ${b.type}` : ""}`,
  `${size(b.b - b.a)} at bytes ${range(b.a, b.b)} of ${b.plan.segments[b.segment].name}`,
  b.persistent ? "kept for the whole program" : b.plan.clock ? `live ${range(b.x0, b.x1)}` :
    `live ${range(b.s, b.t)}: ${b.plan.describe(b.s)} to ${b.plan.describe(b.t - 1)}`,
  ...b.plan.stack(b.uses[0] ?? b.s).slice(-1)];

// ---- the whole segment, small: what is shown is marked, and can be moved -----------------------
function minimap(p, column, paint, bytes) {
  const canvas = el("canvas", undefined, column);
  canvas.className = "map"; canvas.style.height = `${MAP}px`;
  canvas.setAttribute("aria-label", "overview: drag to move what is shown");
  let kept = null;
  p.map = () => {
    const c = prepare(canvas, MAP);
    if (p.stale || !kept || kept.width !== canvas.width) {  // painted anew only when its look changes
      kept = document.createElement("canvas");
      kept.width = canvas.width; kept.height = canvas.height;
      const k = kept.getContext("2d");
      k.setTransform(devicePixelRatio || 1, 0, 0, devicePixelRatio || 1, 0, 0);
      k.fillStyle = css("--panel"); k.fillRect(LEFT, 0, p.inner(), MAP);
      paint(k, p.inner());
      p.stale = false;
    }
    c.setTransform(1, 0, 0, 1, 0, 0); c.drawImage(kept, 0, 0);
    c.setTransform(devicePixelRatio || 1, 0, 0, devicePixelRatio || 1, 0, 0);
    const [a, b] = bytes(), x = LEFT + view.s * p.inner(), w = Math.max(3, (view.t - view.s) * p.inner());
    const y0 = 1 + (1 - b) * (MAP - 2), h = Math.max(3, (b - a) * (MAP - 2));
    c.fillStyle = css("--veil");
    c.fillRect(LEFT, 0, x - LEFT, MAP); c.fillRect(x + w, 0, LEFT + p.inner() - x - w, MAP);
    c.strokeStyle = css("--text"); c.lineWidth = 1.5; c.strokeRect(x + .5, y0, w - 1, h - 1);
  };
  const move = (e) => {
    const width = view.t - view.s;
    view.s = clamp((e.offsetX - LEFT) / p.inner() - width / 2, 0, 1 - width);
    view.t = view.s + width;
    changed();
  };
  canvas.addEventListener("pointerdown", (e) => { canvas.setPointerCapture(e.pointerId); move(e); });
  canvas.addEventListener("pointermove", (e) => { if (e.buttons) move(e); });
}

// ---- streams: who runs when -----------------------------------------------------------------
function streamPicture(plan, column) {
  if (!plan.operations.length || plan.clock) return;
  const height = TOP + plan.streams.length * LANE + AXIS;
  const p = picture(plan, "Streams", "order, not durations", height, column);
  p.paint = (c) => {
    const [s, t] = p.span(), w = p.inner();
    plan.streams.forEach((name, i) => {
      c.fillStyle = css("--panel"); c.fillRect(LEFT, TOP + i * LANE + 2, w, LANE - 4);
      c.fillStyle = css("--soft"); c.textAlign = "right"; c.textBaseline = "middle";
      c.fillText(shorten(name, LEFT - 12), LEFT - 6, TOP + (i + .5) * LANE);
    });
    clip(c, LEFT, 0, w, height, () => {
      const last = new Map();  // of each stream, the pixel that was painted last
      for (let i = plan.at(s); i <= plan.at(t); i++) {
        const operation = plan.operations[i], k = operation.op ? operation.kind : -1, x = p.x(i), wide = p.x(i + 1) - x;
        if (wide < 1 && last.get(operation.stream) === Math.floor(x)) continue;
        last.set(operation.stream, Math.floor(x));
        c.fillStyle = k >= 0 ? tone(k) : css("--live");
        c.fillRect(x, TOP + operation.stream * LANE + 3, Math.max(1, wide - (wide > 4 ? 1 : 0)), LANE - 6);
        if (wide > 40) label(c, operation.name, x, TOP + operation.stream * LANE + 3, wide, LANE - 6, k);
      }
    });
    axis(p, c, height - AXIS);
  };
  p.hit = (x, at) => {
    const i = Math.floor(p.at(x)), operation = plan.operations[i];
    if (!operation || x < LEFT || at > height - AXIS) return null;
    return [operation.name, operation.op || "(no op)", `operation ${number(i)} on stream ${plan.streams[operation.stream]}`,
      ...(operation.group ? [`group ${operation.group}`] : []), ...plan.stack(i).slice(-3)];
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
  const [s, t] = p.span();
  c.textAlign = "center"; c.textBaseline = "top"; c.fillStyle = css("--soft");
  const put = (text, x, y) => { const half = text.length * CHAR / 2; c.fillText(text, clamp(x, half, p.width - half), y); };
  for (const tick of ticks(s, t, Math.max(1, p.inner() / Math.max(80, number(Math.ceil(t)).length * CHAR + 24)), 10)) {
    line(c, css("--line"), p.x(tick), top, p.x(tick), top + 4);
    put(number(tick), p.x(tick), top + 6);
  }
  put(p.plan.clock ? "time of the problem" : "operations, in one order of the program", LEFT + p.inner() / 2, top + 22);
}
function told(c, text) {  // over a picture, at its top
  c.fillStyle = css("--back"); c.fillRect(LEFT, TOP, text.length * CHAR + 12, 18);
  c.fillStyle = css("--text"); c.textAlign = "left"; c.textBaseline = "middle"; c.fillText(text, LEFT + 6, TOP + 9);
}
function sideways(c, text, x, y) {
  c.save(); c.translate(x, y); c.rotate(-Math.PI / 2);
  c.textAlign = "center"; c.textBaseline = "middle"; c.fillStyle = css("--soft"); c.fillText(text, 0, 0);
  c.restore();
}
function line(c, colour, x0, y0, x1, y1) {
  c.strokeStyle = colour; c.beginPath(); c.moveTo(x0, y0); c.lineTo(x1, y1); c.stroke();
}
function clip(c, x, y, w, h, work) {
  c.save(); c.beginPath(); c.rect(x, y, w, h); c.clip(); work(); c.restore();
}
function hatch(c, x, y, w, h) {
  clip(c, x, y, w, h, () => { for (let i = x - h; i < x + w; i += 7) line(c, css("--hatch"), i, y + h, i + h, y); });
}
function label(c, text, x, y, w, h, tint, often) {
  const left = Math.max(x, LEFT) + 4, room = x + w - left - 3;
  c.fillStyle = ink(tint); c.textBaseline = "middle"; c.textAlign = "left";
  c.fillText(shorten(text, room, often), left, y + h / 2 + .5, Math.max(1, room));  // some letters are wider than CHAR
}
// The parts go first that most names have; of what is left, the end tells names apart, and is kept.
function shorten(text, room, often) {
  const n = Math.floor(room / CHAR);
  if (text.length <= n) return text;
  if (n < 3) return "";
  if (often) {
    let parts = text.split(".");
    while (parts.length > 1 && parts.join(".").length > n) {
      let most = 0;
      parts.forEach((part, i) => { if ((often.get(part) || 0) > (often.get(parts[most]) || 0)) most = i; });
      parts.splice(most, 1);
    }
    text = parts.join(".");
    if (text.length <= n) return text;
  }
  const head = n > 12 ? Math.floor(n / 4) : 0;
  return `${text.slice(0, head)}…${text.slice(text.length - (n - head - 1))}`;
}
function prepare(canvas, height) {
  const ratio = devicePixelRatio || 1, c = canvas.getContext("2d"), width = canvas.clientWidth;
  const w = Math.round(width * ratio), h = Math.round(height * ratio);
  if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.clearRect(0, 0, width, height);
  c.font = FONT; c.lineWidth = 1;
  return c;
}
function draw(p) {
  p.width = p.canvas.clientWidth;
  if (!p.width) return;  // in a frame that is not shown
  p.paint(prepare(p.canvas, p.height));
  if (p.map) p.map();
  overlay(p);
}
function overlay(p) {  // what follows the pointer, so that the picture need not be painted again
  const c = prepare(p.over, p.height);
  const outline = (b, colour, wide) => {
    const box = p.box && b && p.box(b);
    if (!box) return;
    clip(c, ...p.area(), () => { c.strokeStyle = colour; c.lineWidth = wide; c.strokeRect(...box); });
  };
  if (shown.pinned) {
    if (p.box && p.box(shown.pinned)) for (const b of shown.sharers.slice(0, MANY)) outline(b, css("--bound"), 1.5);
    outline(shown.pinned, css("--text"), 2.5);
  }
  outline(p.hover, css("--text"), 1.5);
  const d = p.drag;
  if (d && d.box) {
    c.strokeStyle = css("--text"); c.lineWidth = 1; c.setLineDash([3, 3]);
    c.strokeRect(d.x, p.boxBytes ? d.y : 1, d.lastX - d.x, p.boxBytes ? d.lastY - d.y : p.height - 2);
    c.setLineDash([]);
  }
}
let queued = false, painting = false;
const frames = { count: 0, last: 0, worst: 0 };  // milliseconds that painting took
function changed(all) {
  if (all) for (const p of pictures) p.stale = true;
  painting = true;
  marked();
}
function marked() {  // at least what follows the pointer has changed
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => {
    queued = false;
    const begin = performance.now();
    pictures.forEach(painting ? draw : overlay);
    painting = false;
    frames.last = performance.now() - begin;
    frames.worst = Math.max(frames.worst, frames.last);
    frames.count++;
    document.body.dataset.frames = JSON.stringify({ ...frames, ...view });
  });
}
