// ---- SVG: the same painting, on a context that writes it down ----------------------------------
function toSvg(p) {
  const out = [], xml = (s) => String(s).replace(/[&<>"]/g, (c) => `&#${c.charCodeAt(0)};`).replace(/[^\t\n\r\x20-\ud7ff\ue000-\ufffd]/gu, "?");
  const n = (x) => +x.toFixed(2);
  let state = { dash: "", move: "", clips: 0 }, path = "", box = null;
  const saved = [];
  const c = {
    svg: true, fillStyle: "", strokeStyle: "", lineWidth: 1, textAlign: "left", textBaseline: "middle", font: FONT,
    fillRect: (x, y, w, h) => out.push(`<rect x="${n(x)}" y="${n(y)}" width="${n(w)}" height="${n(h)}" fill="${c.fillStyle}"/>`),
    fillText: (text, x, y) => {
      const anchor = { left: "start", center: "middle", right: "end" }[c.textAlign];
      const base = { top: "hanging", middle: "central", bottom: "auto" }[c.textBaseline];
      out.push(`<text x="${n(x)}" y="${n(y)}" fill="${c.fillStyle}" text-anchor="${anchor}" dominant-baseline="${base}"${state.move}>${xml(text)}</text>`);
    },
    beginPath: () => { path = ""; box = null; },
    moveTo: (x, y) => { path += `M${n(x)} ${n(y)}`; }, lineTo: (x, y) => { path += `L${n(x)} ${n(y)}`; },
    rect: (x, y, w, h) => { box = [x, y, w, h].map(n); },
    stroke: () => out.push(`<path d="${path}" stroke="${c.strokeStyle}" stroke-width="${c.lineWidth}" fill="none"${state.dash}/>`),
    setLineDash: (d) => { state.dash = d.length ? ` stroke-dasharray="${d.join(" ")}"` : ""; },
    save: () => { saved.push({ ...state }); },
    restore: () => { const before = saved.pop(); out.push("</svg>".repeat(state.clips - before.clips)); state = before; },
    clip: () => { out.push(`<svg x="${box[0]}" y="${box[1]}" width="${box[2]}" height="${box[3]}" viewBox="${box.join(" ")}">`); state.clips++; },
    translate: (x, y) => { state.move = ` transform="translate(${x} ${n(y)})`; }, rotate: (r) => { state.move += ` rotate(${n(r * 180 / Math.PI)})"`; },
  };
  p.paint(c);
  let at = LEFT, below = p.height;  // which colour is which op's, where the page has buttons
  const present = new Set(p.plan.buffers.map((b) => kinds.indexOf(p.plan.kinds[b.op])));
  for (const k of kinds.length > 1 ? [...present].sort((a, b) => a - b) : []) {
    const name = kinds[k] || "(no op)", wide = 24 + name.length * CHAR;
    if (at === LEFT) below += 18; else if (at + wide > p.width) { at = LEFT; below += 18; }
    [c.fillStyle, c.textAlign, c.textBaseline] = [tone(k), "left", "middle"];
    c.fillRect(at, below - 14, 9, 9);
    if (k >= COLOURS) hatch(c, at, below - 14, 9, 9);
    c.fillStyle = css("--text"); c.fillText(name, at + 14, below - 9);
    at += wide;
  }
  const space = "http" + "://www.w3.org/2000/svg";  // a name, not an address: nothing is loaded
  return `<svg xmlns="${space}" width="${p.width}" height="${below + 6}" font-family="monospace" font-size="11">` +
    `<title>${xml(p.over.getAttribute("aria-label"))}</title><rect width="100%" height="100%" fill="${css("--back")}"/>${out.join("")}</svg>\n`;
}
function download(name, text) {
  const a = el("a");
  a["href"] = URL.createObjectURL(new Blob([text], { type: "image/svg+xml" }));
  a.download = name;
  a.click();
  setTimeout(() => URL.revokeObjectURL(a["href"]), 1000);
}
