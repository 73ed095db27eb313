// Draws a sweep's report from the JSON in the page.
(() => {
  const {data, finite, make, number, tick, duration, quantile, ticksBetween, color, tip, shortened, frame,
         clipped} = Charts;
  const trials = data.trials, keys = data.keys;
  const minimize = data.metric.goal === "min";

  // ---- trials: values as numbers where they are, ranks of the finished ones
  trials.forEach((trial, i) => {
    trial.index = i;
    trial.finished = trial.state === "done" && finite(trial.metric);
    trial.x = trial.s.map(Number);
    trial.y = trial.v.map((value) => (value === null ? NaN : value));
  });
  const finished = trials.filter((t) => t.finished);
  const ranking = [...finished].sort((a, b) => (minimize ? a.metric - b.metric : b.metric - a.metric));
  ranking.forEach((trial, i) => (trial.rank = ranking.length > 1 ? i / (ranking.length - 1) : 0));
  // The best trials are drawn last, on top of the others.
  const order = [...trials].sort((a, b) => (b.rank ?? 2) - (a.rank ?? 2));

  // ---- scales: from a value to 0 … 1
  const scaleOf = (key, k) => {
    const texts = trials.map((t) => t.values[k]);
    const numbers = texts.map((text) => (text === "" ? NaN : Number(text)));
    const numeric = texts.every((text, i) => text === "" || finite(numbers[i]));
    if (!numeric || texts.every((text) => text === "")) {
      const values = [...new Set(texts)];
      const position = new Map(values.map((value, i) => [value, (i + 0.5) / values.length]));
      const ticks = values.map((value) => [position.get(value), value === "" ? "–" : value]);
      return {numeric: false, at: (text) => position.get(text), ticks, values};
    }
    const known = [...new Set(numbers.filter(finite))].sort((a, b) => a - b);
    const log = key.log && known[0] > 0;
    const to = log ? Math.log10 : (x) => x;
    const low = to(known[0]), span = to(known[known.length - 1]) - low || 1;
    const single = known.length === 1;
    const at = (text) => (text === "" ? NaN : single ? 0.5 : (to(Number(text)) - low) / span);
    let ticks = known.map((x) => [at(x), number(x)]);
    if (known.length > 10)
      ticks = ticksBetween(low, low + span, log).map((x) => [(to(x) - low) / span, tick(x)]);
    return {numeric: true, log, at, ticks, values: known.map(String), domain: [low, span]};
  };
  const scales = keys.map(scaleOf);

  // Limits that a few runs which went astray do not stretch: the far side ends three quartile distances out.
  const limits = (values) => {
    const sorted = values.filter(finite).sort((a, b) => a - b);
    if (!sorted.length) return [0, 1];
    let low = sorted[0], high = sorted[sorted.length - 1];
    const q1 = quantile(sorted, 0.25), q3 = quantile(sorted, 0.75), reach = 3 * (q3 - q1);
    if (sorted.length >= 8 && reach > 0) {
      if (minimize) high = Math.min(high, q3 + reach);
      else low = Math.max(low, q1 - reach);
    }
    const margin = high > low ? 0.04 * (high - low) : Math.abs(low) * 0.05 || 0.5;
    return [low - margin, high + margin];
  };
  const metricLimits = limits((finished.length ? finished : trials).map((t) => t.metric));

  // ---- colors: the strongest for the best, or along an axis
  const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [223, 214, 60]];
  const ramp = (part) => {
    // On a dark page the bright end of the scale is the strongest.
    const t = Charts.dark() ? 1 - 0.85 * part : part;
    const at = Math.min(Math.max(t, 0), 1) * (stops.length - 1);
    const i = Math.min(Math.floor(at), stops.length - 2);
    return "rgb(" + stops[i].map((c, k) => Math.round(c + (stops[i + 1][k] - c) * (at - i))).join(",") + ")";
  };
  const view = {color: -1, logY: false, full: false, others: true,
                brush: new Map(), lit: new Set(), over: null};
  const colorOf = (trial) => {
    if (!trial.finished) return color("faint");
    if (view.color < 0) return ramp(trial.rank);
    const at = scales[view.color].at(trial.values[view.color]);
    return finite(at) ? ramp(at) : color("faint");
  };
  const inBrush = (trial) => {
    for (const [axis, [from, to]] of view.brush) {
      const at = placeOn(axis, trial);
      if (!(at >= from && at <= to)) return false;
    }
    return true;
  };
  const shown = (trial) => (view.others || trial.finished) && inBrush(trial);

  // ---- the metric from 0 to 1, and where a trial is on an axis of the parallel coordinates
  const [m0, m1] = metricLimits;
  const metricTicks = ticksBetween(m0, m1, false).map((y) => [(y - m0) / (m1 - m0), tick(y)]);
  const metricAt = (trial) => Math.min(Math.max((trial.metric - m0) / (m1 - m0), 0), 1);
  const beyond = (trial) => trial.metric > m1 || trial.metric < m0;
  const plotted = order.filter((t) => finite(t.metric));
  // The last axis is the metric, with its good end on top.
  function placeOn(axis, trial) {
    if (axis < keys.length) return scales[axis].at(trial.values[axis]);
    if (!finite(trial.metric)) return NaN;
    return minimize ? 1 - metricAt(trial) : metricAt(trial);
  }

  // ---- a chart: an object that draws, marks trials, and finds the trial at the pointer;
  // marked are that one and those that were clicked on
  const lit = (trial) => view.lit.has(trial.index) || view.over === trial.index;
  const chart = (parent, height, label, one) =>
    Charts.chart(parent, height, label, {
      draw: (c, self) => one.draw(c, self),
      mark: (c, self) => one.mark(c, self, trials.filter(lit)),
      hover: (x, y, event) => {
        const hit = x === null ? null : one.find(x, y);
        over(hit ? hit.trial.index : null, hit ? hit.text : "", event);
      },
    });
  const over = (index, text, event) => {
    tip(index === null ? "" : text, event);
    if (index === view.over) return;
    view.over = index;
    Charts.mark();
  };
  const scale = make("span", {class: "scale"});
  const redraw = () => {
    Charts.redraw();
    scale.style.background = "linear-gradient(90deg," + [0, 0.25, 0.5, 0.75, 1].map(ramp).join(",") + ")";
    for (const row of document.querySelectorAll("tr[data-trials]"))
      row.classList.toggle("lit", row.dataset.trials.split(" ").some((i) => view.lit.has(Number(i))));
  };
  const about = (trial) =>
    trial.label + (trial.seed === null ? "" : " · seed " + trial.seed) + "\n" +
    data.metric.name + " " + number(trial.metric) + " · " + trial.state +
    (trial.step === null ? "" : " at step " + trial.step) + (trial.reason ? "\n" + trial.reason : "") +
    "\n" + trial.id;

  // ---- curves over steps
  class CurveChart {
    constructor(parent, curves) {
      this.curves = curves;
      chart(parent, 380, "curves of " + data.metric.name + " over steps", this);
    }
    to(y) { return view.logY ? Math.log10(y) : y; }
    usable(y) { return finite(y) && !(view.logY && y <= 0); }
    px(x) { return this.area.left + ((x - this.x0) / (this.x1 - this.x0)) * this.area.w; }
    py(y) { return this.area.top + (1 - (this.to(y) - this.y0) / (this.y1 - this.y0)) * this.area.h; }
    limits() {
      const values = [];
      let x0 = Infinity, x1 = -Infinity;
      for (const t of this.curves)
        t.x.forEach((x, i) => {
          if (!this.usable(t.y[i])) return;
          x0 = Math.min(x0, x), x1 = Math.max(x1, x);
          values.push(this.to(t.y[i]));
        });
      if (!values.length) x0 = 0, x1 = 1;
      if (x0 === x1) x0 -= 1, x1 += 1;
      values.sort((a, b) => a - b);
      // The first steps and runs that diverge would press the rest into a line.
      let y0 = values.length ? quantile(values, view.full || minimize ? 0 : 0.04) : 0;
      let y1 = values.length ? quantile(values, view.full || !minimize ? 1 : 0.96) : 1;
      const margin = (y1 - y0) * 0.04 || Math.abs(y0) * 0.05 || 0.5;
      y0 -= margin, y1 += margin;
      Object.assign(this, {x0, x1, y0, y1});
    }
    axes(c, self) {
      const {x0, x1, y0, y1} = this;
      const xTicks = ticksBetween(x0, x1, false).map((x) => [(x - x0) / (x1 - x0), tick(x)]);
      const yTicks = ticksBetween(y0, y1, view.logY).map((y) => [(this.to(y) - y0) / (y1 - y0), tick(y)]);
      this.area = frame(c, self, 56, 12, 8, 26, xTicks, yTicks.filter(([at]) => at >= 0 && at <= 1));
    }
    trace(c, trial) {
      c.beginPath();
      let pen = false, points = 0;
      trial.x.forEach((x, i) => {
        const y = trial.y[i];
        if (!this.usable(y)) return void (pen = false);
        if (pen) c.lineTo(this.px(x), this.py(y));
        else c.moveTo(this.px(x), this.py(y));
        pen = true, ++points;
      });
      c.stroke();
      if (points === 1) {
        c.beginPath();
        c.arc(this.px(trial.x[0]), this.py(trial.y[0]), 2.5, 0, 7);
        c.fillStyle = c.strokeStyle, c.fill();
      }
    }
    draw(c, self) {
      this.limits();
      this.axes(c, self);
      const many = this.curves.length > 150;
      clipped(c, this.area, () => {
        c.lineWidth = many ? 0.8 : 1.3;
        for (const t of this.curves) {
          if (!shown(t)) continue;
          c.globalAlpha = t.finished ? (many ? 0.65 : 0.9) : 0.6;
          c.setLineDash(t.finished ? [] : [4, 3]);
          c.strokeStyle = colorOf(t);
          this.trace(c, t);
        }
      });
    }
    mark(c, self, marked) {
      clipped(c, this.area, () => {
        c.lineWidth = 2.6;
        for (const t of marked) c.strokeStyle = color("mark"), this.trace(c, t);
      });
    }
    find(x, y) {
      let best = 14 * 14, hit = null, step = 0;
      for (const t of this.curves) {
        if (!shown(t)) continue;
        for (let i = 0; i < t.x.length; ++i) {
          const dx = this.px(t.x[i]) - x;
          if (dx > 14 || dx < -14 || !finite(t.y[i])) continue;
          const dy = this.py(t.y[i]) - y, d = dx * dx + dy * dy;
          if (d < best) best = d, hit = t, step = i;
        }
      }
      if (!hit) return null;
      const at = data.metric.name + " " + number(hit.y[step]) + " at step " + hit.x[step];
      return {trial: hit, text: at + "\n" + about(hit)};
    }
  }
  const showCurves = () => {
    const section = document.getElementById("curves");
    const curves = order.filter((t) => t.x.length > 0);
    if (curves.length) new CurveChart(section, curves);
    else section.append(make("p", {class: "soft", text: "No step has been logged yet."}));
  };

  // ---- the metric against an axis
  class ScatterChart {
    constructor(parent, key, k) {
      this.k = k;
      this.scale = scales[k];
      this.few = this.scale.values.length <= 12;
      this.inset = this.scale.numeric ? 0.05 : 0;
      chart(parent, 220, data.metric.name + " against " + key.path, this);
    }
    // A little aside, the same each time, so that replicates do not hide each other.
    aside(t) {
      if (!this.few) return 0;
      return (((t.index * 2654435761) % 1000) / 1000 - 0.5) * Math.min(14, 160 / this.scale.values.length);
    }
    inner(at) { return this.inset + at * (1 - 2 * this.inset); }
    px(t) {
      const at = this.scale.at(t.values[this.k]);
      return this.area.left + this.inner(at) * this.area.w + this.aside(t);
    }
    py(t) { return this.area.top + (1 - metricAt(t)) * this.area.h; }
    dot(c, t, r) {
      const x = this.px(t), y = this.py(t);
      if (!finite(x)) return;
      c.beginPath();
      if (beyond(t)) {
        const up = t.metric > m1 ? 1 : -1, base = y + up * (r + 2);
        c.moveTo(x - r, base), c.lineTo(x + r, base), c.lineTo(x, y + up), c.closePath();
      } else c.arc(x, y, r, 0, 7);
      if (t.finished) c.fill();
      else c.stroke();
    }
    axes(c, self) {
      let ticks = this.scale.ticks.map(([at, text]) => [this.inner(at), text]);
      const space = (self.width - 64) / Math.max(1, ticks.length) - 6;
      if (!this.scale.numeric) ticks = ticks.map(([at, text]) => [at, shortened(c, text, space)]);
      this.area = frame(c, self, 56, 8, 8, 24, ticks, metricTicks);
    }
    // The mean of each value's finished trials.
    means(c) {
      const same = this.scale.numeric ? (a, b) => Number(a) === Number(b) : (a, b) => a === b;
      c.globalAlpha = 1;
      c.strokeStyle = color("ink"), c.lineWidth = 2;
      for (const value of this.scale.values) {
        const group = finished.filter((t) => inBrush(t) && same(t.values[this.k], value));
        if (group.length < 2) continue;
        const mean = group.reduce((sum, t) => sum + t.metric, 0) / group.length;
        if (mean > m1 || mean < m0) continue;
        const x = this.area.left + this.inner(this.scale.at(value)) * this.area.w;
        const y = this.area.top + (1 - (mean - m0) / (m1 - m0)) * this.area.h;
        c.beginPath(), c.moveTo(x - 10, y), c.lineTo(x + 10, y), c.stroke();
      }
    }
    draw(c, self) {
      this.axes(c, self);
      const many = plotted.length > 200;
      for (const t of plotted) {
        if (!shown(t)) continue;
        c.globalAlpha = many ? 0.55 : 0.8;
        c.fillStyle = c.strokeStyle = colorOf(t);
        this.dot(c, t, many ? 2.4 : 3.6);
      }
      if (this.few) this.means(c);
    }
    mark(c, self, marked) {
      c.fillStyle = c.strokeStyle = color("mark");
      for (const t of marked) if (finite(t.metric)) this.dot(c, t, 5);
    }
    find(x, y) {
      let best = 12 * 12, hit = null;
      for (const t of plotted) {
        if (!shown(t)) continue;
        const dx = this.px(t) - x, dy = this.py(t) - y, d = dx * dx + dy * dy;
        if (d < best) best = d, hit = t;
      }
      return hit && {trial: hit, text: about(hit)};
    }
  }
  const showScatters = () => {
    const scatters = document.getElementById("scatters");
    keys.forEach((key, k) => {
      const cell = make("div");
      cell.append(make("h3", {text: key.path + (scales[k].log ? " (logarithmic)" : "")}));
      scatters.append(cell);
      new ScatterChart(cell, key, k);
    });
    if (!keys.length) scatters.append(make("p", {class: "soft", text: "Nothing varies but the seed."}));
  };

  // ---- parallel coordinates
  class ParallelChart {
    constructor(parent) {
      this.names = [...keys.map((key) => key.name), data.metric.name];
      this.last = this.names.length - 1;
      this.ticks = [...scales.map((s) => s.ticks),
                    metricTicks.map(([at, text]) => [minimize ? 1 - at : at, text])];
      this.self = chart(parent, 340, "parallel coordinates", this);
      this.brushes();
    }
    px(axis) { return this.area.left + (axis / this.last) * this.area.w; }
    py(at) { return this.area.top + (1 - at) * this.area.h; }
    trace(c, t) {
      c.beginPath();
      let pen = false;
      this.names.forEach((_, axis) => {
        const at = placeOn(axis, t);
        if (!finite(at)) return void (pen = false);
        if (pen) c.lineTo(this.px(axis), this.py(at));
        else c.moveTo(this.px(axis), this.py(at));
        pen = true;
      });
      c.stroke();
    }
    lines(c) {
      const many = plotted.length > 150;
      for (const t of plotted) {
        if (!view.others && !t.finished) continue;
        const inside = inBrush(t);
        c.lineWidth = inside ? (many ? 0.8 : 1.3) : 0.6;
        c.globalAlpha = inside ? (t.finished ? (many ? 0.6 : 0.85) : 0.5) : 0.12;
        c.setLineDash(t.finished ? [] : [4, 3]);
        c.strokeStyle = inside ? colorOf(t) : color("faint");
        this.trace(c, t);
      }
      c.globalAlpha = 1;
      c.setLineDash([]);
    }
    axis(c, axis, space) {
      const x = Math.round(this.px(axis)) + 0.5, end = axis === 0 || axis === this.last;
      c.strokeStyle = color("axis"), c.lineWidth = 1;
      c.beginPath(), c.moveTo(x, this.area.top), c.lineTo(x, this.area.top + this.area.h), c.stroke();
      c.textAlign = "center", c.textBaseline = "bottom";
      c.fillStyle = color("ink");
      c.font = "600 12px system-ui, sans-serif";
      c.fillText(shortened(c, this.names[axis], end ? 136 : space - 8), x, this.area.top - 12);
      this.axisTicks(c, axis, x, Math.min(axis === 0 ? 62 : 100, space - 14));
      const brush = view.brush.get(axis);
      if (!brush) return;
      c.fillStyle = color("brush"), c.strokeStyle = color("accent");
      const top = this.py(brush[1]), bottom = this.py(brush[0]);
      c.beginPath(), c.rect(x - 9, top, 18, bottom - top), c.fill(), c.stroke();
    }
    axisTicks(c, axis, x, width) {
      const right = axis === this.last;
      c.font = "11px system-ui, sans-serif";
      c.textBaseline = "middle";
      c.textAlign = right ? "left" : "right";
      for (const [at, text] of this.ticks[axis]) {
        const y = this.py(at), tx = right ? x + 7 : x - 7;
        const label = shortened(c, text, width), w = c.measureText(label).width;
        c.fillStyle = color("veil");
        c.fillRect(right ? tx - 2 : tx - w - 2, y - 7, w + 4, 14);
        c.fillStyle = color("soft");
        c.fillText(label, tx, y);
        c.beginPath(), c.moveTo(x - 3, y), c.lineTo(x + 3, y), c.stroke();
      }
    }
    draw(c, self) {
      c.clearRect(0, 0, self.width, self.height);
      this.area = {left: 70, top: 34, w: self.width - 140, h: self.height - 50};
      this.lines(c);
      this.names.forEach((_, axis) => this.axis(c, axis, this.area.w / this.last));
    }
    mark(c, self, marked) {
      c.strokeStyle = color("mark"), c.lineWidth = 2.6;
      for (const t of marked) this.trace(c, t);
    }
    find(x, y) {
      const axis = Math.min(Math.max(((x - this.area.left) / this.area.w) * this.last, 0), this.last);
      const before = Math.min(Math.floor(axis), this.last - 1), part = axis - before;
      let best = 9, hit = null;
      for (const t of plotted) {
        if (!shown(t)) continue;
        const at = placeOn(before, t) * (1 - part) + placeOn(before + 1, t) * part;
        const d = Math.abs(this.py(at) - y);
        if (d < best) best = d, hit = t;
      }
      return hit && {trial: hit, text: about(hit)};
    }
    // Dragging along an axis selects a range of it.
    brushes() {
      const box = this.self.box;
      let dragged = null;
      const axisAt = (x) => this.names.findIndex((_, i) => Math.abs(this.px(i) - x) < 14);
      const positionOf = (event) => {
        const {left, top} = box.getBoundingClientRect();
        const at = 1 - (event.clientY - top - this.area.top) / this.area.h;
        return {x: event.clientX - left, at: Math.min(Math.max(at, 0), 1)};
      };
      box.addEventListener("pointerdown", (event) => {
        const {x, at} = positionOf(event);
        const axis = axisAt(x);
        if (axis < 0) return;
        dragged = {axis, from: at};
        box.setPointerCapture(event.pointerId);
        if (view.brush.delete(axis)) redraw();
      });
      box.addEventListener("pointermove", (event) => {
        const {x, at} = positionOf(event);
        box.style.cursor = axisAt(x) >= 0 ? "ns-resize" : "";
        if (!dragged || Math.abs(at - dragged.from) < 0.02) return;
        view.brush.set(dragged.axis, [Math.min(at, dragged.from), Math.max(at, dragged.from)]);
        redraw();
      });
      box.addEventListener("pointerup", () => (dragged = null));
    }
  }
  const showParallel = () => {
    if (keys.length && plotted.length) new ParallelChart(document.getElementById("parallel"));
    else document.getElementById("parallel-section").remove();
  };

  // ---- what the axes explain
  const showImportance = () => {
    if (!data.importance) return document.getElementById("importance-section").remove();
    const importance = document.getElementById("importance");
    const bar = (name, fraction, rest) => {
      const line = make("div", {class: rest ? "bar rest" : "bar"}, make("span", {text: name}));
      const style = "width:" + Math.max(0.4, fraction * 100).toFixed(1) + "%";
      line.append(make("div", {}, make("i", {style})));
      line.append(make("em", {text: (fraction * 100).toFixed(1) + "%"}));
      return line;
    };
    for (const axis of data.importance.axes) importance.append(bar(axis.name, axis.importance, false));
    importance.append(bar("together, and seeds", data.importance.rest, true));
    const text = "Share of the variance between " + data.importance.n +
                 " finished trials that each axis explains by itself.";
    importance.append(make("p", {class: "soft", text}));
  };

  // ---- the head, the best configuration
  const best = data.best;
  const replicated = best && best.planned > 1;
  const showHead = () => {
    document.getElementById("title").textContent = data.name;
    document.getElementById("subtitle").textContent = data.subtitle;
    const facts = document.getElementById("facts");
    const fact = (value, text) =>
      facts.append(make("div", {class: "fact"}, make("b", {text: value}), make("span", {text})));
    if (best) {
      const seeds = best.trials.length;
      const over_seeds = seeds > 1 ? ", mean ± standard deviation over " + seeds + " seeds" : "";
      fact(best.text, "best " + data.metric.name + " (" + data.metric.at + over_seeds + ")");
    }
    fact(String(trials.length), trials.length === 1 ? "trial" : "trials");
    for (const [state, count] of Object.entries(data.states)) fact(String(count), state);
    if (data.seconds > 0) fact(duration(data.seconds), "run time of all trials");
  };
  const showBest = () => {
    if (!best) return document.getElementById("best-section").remove();
    const list = document.getElementById("best-facts");
    const row = (name, value) => list.append(make("dt", {text: name}), make("dd", {text: value}));
    const first = trials[best.trials[0]];
    if (replicated) row("configuration", best.configuration);
    else row("trial", first.id);
    keys.forEach((key, k) => row(key.path, first.values[k] || "–"));
    if (best.seeds.length) row(best.seeds.length === 1 ? "seed" : "seeds", best.seeds.join(", "));
    row(data.metric.name, best.text);
    if (replicated) row("n", best.trials.length + " of " + best.planned + " trials finished");
    row("train it again", best.command);
    if (replicated && first.seed !== null)
      document.getElementById("recipe-summary").textContent =
        "its recipe with seed " + first.seed + "; other seeds differ in rng.seed alone";
    document.getElementById("recipe").textContent = best.recipe;
  };

  // ---- the tables: a click on a row marks its trials
  const words = ["trial", "best trial", "state", "reason"];
  const numericColumn = (lines, i) =>
    lines.slice(1).every((line) => /^[-–]?$|^[-+0-9.]/.test(line.cells[i])) &&
    !words.includes(lines[0].cells[i]);
  const rowOf = (line, classes) => {
    const row = make("tr", {"data-trials": line.trials.join(" ")});
    line.cells.forEach((text, i) => row.append(make("td", {text, class: classes[i]})));
    row.addEventListener("click", () => {
      const on = line.trials.some((i) => view.lit.has(i));
      for (const i of line.trials) on ? view.lit.delete(i) : view.lit.add(i);
      redraw();
    });
    return row;
  };
  const showTable = (name, lines) => {
    if (!lines || lines.length < 2) return document.getElementById(name + "-section").remove();
    const names = lines[0].cells;
    const numeric = names.map((_, i) => numericColumn(lines, i));
    const classes = names.map((text, i) => (numeric[i] ? "number" : text === "reason" ? "reason" : ""));
    const head = make("tr"), body = make("tbody");
    names.forEach((text, i) => head.append(make("th", {text, class: numeric[i] ? "number" : ""})));
    for (const line of lines.slice(1)) body.append(rowOf(line, classes));
    document.getElementById(name).append(make("table", {}, make("thead", {}, head), body));
  };
  const showTables = () => {
    showTable("ranked", data.ranked);
    showTable("others", data.others);
    const rows = (lines) => (lines ? lines.length - 1 : 0);
    const more = data.rows - rows(data.ranked) - rows(data.others);
    if (more > 0) {
      const text = more + " more configurations are in `capstan sweep table`.";
      document.querySelector("main").append(make("p", {class: "soft", text}));
    }
  };

  // ---- tools
  const showTools = () => {
    const tools = document.getElementById("tools");
    const choose = make("select", {id: "color"});
    choose.append(make("option", {value: "-1", text: data.metric.name}));
    keys.forEach((key, k) => choose.append(make("option", {value: String(k), text: key.name})));
    const ends = [make("span"), make("span")];
    const name_ends = () => {
      const s = view.color < 0 ? null : scales[view.color];
      ends[0].textContent = s ? (s.values[0] ?? "") : "best";
      ends[1].textContent = s ? (s.values[s.values.length - 1] ?? "") : "worst";
    };
    choose.addEventListener("change", () => (view.color = Number(choose.value), name_ends(), redraw()));
    name_ends();
    tools.append(make("label", {}, "color", choose, ends[0], scale, ends[1]));
    const box = (text, name, value) =>
      tools.append(Charts.checkbox(text, value, (on) => (view[name] = on, redraw())));
    box("logarithmic", "logY", false);
    box("full range", "full", false);
    if (finished.length < trials.length) box("unfinished trials", "others", true);
  };

  showCurves();
  showScatters();
  showParallel();
  showImportance();
  showHead();
  showBest();
  showTables();
  showTools();
  Charts.start(redraw);
})();
