"use strict";
// Shared by Capstan's pages: elements, numbers, ticks, and charts on canvases with a tip at the pointer.
// Texts enter the page as text only (textContent), never as markup.
const Charts = (() => {
  const finite = Number.isFinite;
  const data = JSON.parse(document.getElementById("data").textContent);

  // ---- elements
  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes))
      if (name === "text") element.textContent = value;
      else element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  // A check box with its text; change(on) is called when it is switched.
  const checkbox = (text, on, change) => {
    const input = make("input", {type: "checkbox"});
    input.checked = on;
    input.addEventListener("change", () => change(input.checked));
    return make("label", {}, input, text);
  };

  // ---- numbers
  const number = (x) => {
    if (!finite(x)) return "–";
    const size = Math.abs(x);
    if (size !== 0 && (size >= 1e5 || size < 1e-3))
      return x.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
    return String(Number(x.toPrecision(5)));
  };
  // At a tick: 25000 is "25k".
  const tick = (x) => {
    const size = Math.abs(x);
    for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (size >= unit && size >= 1e4) return Number((x / unit).toPrecision(4)) + letter;
    return number(x);
  };
  const duration = (s) => {
    if (s < 60) return s.toFixed(s < 10 ? 1 : 0) + " s";
    if (s < 3600) return Math.floor(s / 60) + " min " + Math.round(s % 60) + " s";
    return Math.floor(s / 3600) + " h " + Math.round((s % 3600) / 60) + " min";
  };
  const quantile = (sorted, q) => {
    const last = sorted.length - 1;
    return sorted[Math.min(last, Math.max(0, Math.round(q * last)))];
  };
  // Round values between two, about so many; with `log` the two are logarithms.
  const ticksBetween = (low, high, log, count = 5) => {
    if (log) {
      const all = [];
      const dense = high - low < 2.5;
      for (let e = Math.floor(low); e <= Math.ceil(high); ++e)
        for (const m of dense ? [1, 2, 5] : [1]) all.push(Number((m * 10 ** e).toPrecision(12)));
      const inside = all.filter((x) => Math.log10(x) >= low - 1e-9 && Math.log10(x) <= high + 1e-9);
      const every = Math.ceil(inside.length / 9);
      if (inside.length > 2) return inside.filter((_, i) => i % every === 0);
      return ticksBetween(10 ** low, 10 ** high, false).filter((x) => x > 0);
    }
    const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw)), part = raw / power;
    const step = power * (part < 1.5 ? 1 : part < 3.5 ? 2 : part < 7.5 ? 5 : 10);
    const result = [];
    const first = Math.ceil(low / step - 1e-9) * step;
    for (let i = 0; i < 20 && first + i * step <= high + step * 1e-9; ++i)
      result.push(Number((first + i * step).toPrecision(12)));
    return [...new Set(result)];
  };

  // ---- colors: those of the style sheet, as they are now
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  let known = new Map();
  const color = (name) => {
    if (!known.has(name))
      known.set(name, getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim());
    return known.get(name);
  };
  const dark = () => scheme.matches;
  // Distinct colors, also for the color-blind as far as ten allow. Further ones are the same hues, lighter or
  // darker in each round: a generated hue would fall on one of the palette's.
  const light_palette = ["#2563c9", "#d9480f", "#0b8a5f", "#b02a8f", "#a67c00",
                         "#0f8fb3", "#c92a4b", "#6b7a12", "#7048c6", "#6b6f76"];
  const dark_palette = ["#6ea8ff", "#ff9a5c", "#4fd6a0", "#f08ad6", "#e6c34a",
                        "#5fd3f0", "#ff8097", "#b9cc54", "#b79bff", "#b4bac4"];
  const distinct = (i) => {
    const palette = dark() ? dark_palette : light_palette;
    if (i < palette.length) return palette[i];
    const round = (Math.floor(i / palette.length) - 1) % 4, target = round % 2 === 0 ? 0 : 255;
    const part = round < 2 ? 0.4 : 0.6, base = parseInt(palette[i % palette.length].slice(1), 16);
    const mixed = [16, 8, 0].map((shift) => Math.round(((base >> shift) & 255) * (1 - part) + target * part));
    return "rgb(" + mixed.join(" ") + ")";
  };

  // ---- the tip at the pointer
  const box = document.getElementById("tip");
  const tip = (content, event) => {
    box.style.display = content ? "block" : "none";
    if (!content) return;
    box.replaceChildren(content);
    const right = event.clientX > innerWidth / 2;
    box.style.left = right ? "" : event.clientX + 14 + "px";
    box.style.right = right ? innerWidth - event.clientX + 14 + "px" : "";
    box.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 8)) + "px";
  };

  // ---- a chart: two canvases, one for everything (draw) and one for what the pointer is on (mark).
  // hover(x, y, event, chart) gets the position of the pointer, and nulls when the pointer leaves the chart.
  const charts = [];
  const chart = (parent, height, label, {draw, mark, hover}) => {
    const attributes = {class: "chart", style: "height:" + height + "px", role: "img", "aria-label": label};
    const container = make("div", attributes);
    const layers = [make("canvas"), make("canvas")];
    container.append(...layers);
    parent.append(container);
    const self = {box: container, width: 0, height};
    const context = (canvas) => {
      const ratio = window.devicePixelRatio || 1;
      self.width = container.clientWidth;
      canvas.width = Math.round(self.width * ratio);
      canvas.height = Math.round(height * ratio);
      const c = canvas.getContext("2d");
      c.scale(ratio, ratio);
      c.font = "11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
      c.lineJoin = "round";
      return c;
    };
    self.draw = () => draw(context(layers[0]), self);
    self.mark = () => mark(context(layers[1]), self);
    container.addEventListener("pointermove", (event) => {
      if (event.buttons && event.pointerType === "mouse") return;
      const at = container.getBoundingClientRect();
      hover(event.clientX - at.left, event.clientY - at.top, event, self);
    });
    container.addEventListener("pointerleave", (event) => hover(null, null, event, self));
    charts.push(self);
    return self;
  };
  const shortened = (context, text, width) => {
    if (context.measureText(text).width <= width) return text;
    while (text.length > 1 && context.measureText(text + "…").width > width) text = text.slice(0, -1);
    return text + "…";
  };
  // Grid lines and the numbers at them; returns where the inside is. `left` grows with the numbers.
  const frame = (c, self, left, right, top, bottom, xTicks, yTicks) => {
    for (const [, text] of yTicks) left = Math.max(left, c.measureText(text).width + 10);
    const w = self.width - left - right, h = self.height - top - bottom;
    c.clearRect(0, 0, self.width, self.height);
    c.strokeStyle = color("grid");
    c.fillStyle = color("soft");
    c.lineWidth = 1;
    c.textBaseline = "middle";
    c.textAlign = "right";
    for (const [at, text] of yTicks) {
      const y = Math.round(top + (1 - at) * h) + 0.5;
      c.beginPath(), c.moveTo(left, y), c.lineTo(left + w, y), c.stroke();
      c.fillText(text, left - 6, y);
    }
    c.textBaseline = "top";
    c.textAlign = "center";
    let free = -1e9;
    for (const [at, text] of xTicks) {
      const x = Math.round(left + at * w) + 0.5, half = c.measureText(text).width / 2;
      c.beginPath(), c.moveTo(x, top), c.lineTo(x, top + h), c.stroke();
      // The label would overlap its neighbor.
      if (x - half < free) continue;
      c.fillText(text, Math.min(x, self.width - half - 1), top + h + 6);
      free = x + half + 8;
    }
    return {left, top, w, h};
  };
  // Paints within the inside of a frame only.
  const clipped = (c, area, paint) => {
    c.save();
    c.beginPath(), c.rect(area.left, area.top, area.w, area.h), c.clip();
    paint();
    c.restore();
  };

  const mark = () => charts.forEach((c) => c.mark());
  const redraw = () => charts.forEach((c) => (c.draw(), c.mark()));
  // Draws now, and again whenever the window or its colors change.
  const start = (draw = redraw) => {
    draw();
    let waiting = 0;
    addEventListener("resize", () => {
      cancelAnimationFrame(waiting);
      waiting = requestAnimationFrame(draw);
    });
    scheme.addEventListener("change", () => (known = new Map(), draw()));
    // For benchmarks: milliseconds from the start of the load until the first complete picture is painted.
    requestAnimationFrame(() => requestAnimationFrame(() => {
      document.documentElement.dataset.drawnMs = performance.now().toFixed(0);
    }));
  };
  return {data, finite, make, checkbox, number, tick, duration, quantile, ticksBetween, color, dark, distinct,
          tip, chart, shortened, frame, clipped, mark, redraw, start};
})();
