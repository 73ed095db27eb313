// Draws the curves of runs from the JSON in the page.
(() => {
  const {data, finite, make, checkbox, number, tick, ticksBetween, color, distinct, tip, frame,
         clipped} = Charts;
  const runs = data.runs;
  const view = {smoothing: 0, validation: true, over: null};
  runs.forEach((run, i) => (run.index = i, run.shown = true));

  // ---- the head and the table, which is the legend too
  document.getElementById("title").textContent = data.title;
  document.getElementById("subtitle").textContent = data.subtitle;
  const columns = [["", false], ["run", false], ["recipe", false], ["state", false], ["step", true],
                   ["loss", true], ["validation loss", true], ["test loss", true], ["tokens/s", true],
                   ["started", false]];
  const textsOf = (run) => [
    run.name, run.recipe, run.state, run.step === null ? "–" : String(run.step), number(run.loss ?? NaN),
    number(run.validation ?? NaN), number(run.test ?? NaN), tick(Number((run.speed ?? NaN).toPrecision(3))),
    run.started.replace("T", " ").replace("Z", "")];
  const rowOf = (run) => {
    const row = make("tr", {"data-run": run.index});
    run.swatch = make("span", {class: "swatch"});
    row.append(make("td", {}, run.swatch));
    textsOf(run).forEach((text, i) => {
      row.append(make("td", {text, class: columns[i + 1][1] ? "number" : ""}));
    });
    row.addEventListener("click", () => {
      run.shown = !run.shown;
      row.classList.toggle("off", !run.shown);
      redraw();
    });
    row.addEventListener("pointerenter", () => (view.over = run.index, Charts.mark()));
    row.addEventListener("pointerleave", () => (view.over = null, Charts.mark()));
    return row;
  };
  const head = make("tr"), body = make("tbody");
  for (const [text, numeric] of columns) head.append(make("th", {text, class: numeric ? "number" : ""}));
  for (const run of runs) body.append(rowOf(run));
  document.getElementById("runs").append(make("table", {}, make("thead", {}, head), body));
  const hint = runs.length > 1 ? "Click on a row to hide or show its curves." : "";
  document.getElementById("hint").textContent = hint;

  // ---- smoothing: an exponential mean, corrected for its start
  const smoothed = (values, weight) => {
    let sum = 0, total = 0;
    return values.map((y) => {
      sum = weight * sum + (1 - weight) * y;
      total = weight * total + (1 - weight);
      return sum / total;
    });
  };
  const smooth_all = () => {
    for (const run of runs)
      for (const curve of Object.values(run.curves))
        curve.y = curve.smooth && view.smoothing > 0 ? smoothed(curve.v, view.smoothing) : curve.v;
  };
  // A curve of a part of the chart's quantity, such as a layer, has the name "KEY PART".
  const belongs = (name, key) => name === key || name.startsWith(key + " ");
  for (const run of runs)
    for (const [name, curve] of Object.entries(run.curves))
      curve.smooth = data.charts.some((one) => belongs(name, one.key) && one.smooth);

  // ---- tools
  const tools = document.getElementById("tools");
  const slider = make("input", {type: "range", min: "0", max: "0.99", step: "0.01", value: "0"});
  const shown_smoothing = make("span", {text: "0"});
  slider.addEventListener("input", () => {
    view.smoothing = Number(slider.value);
    shown_smoothing.textContent = slider.value;
    redraw();
  });
  tools.append(make("label", {}, "smoothing", slider, shown_smoothing));
  if (runs.some((run) => run.curves.validation))
    tools.append(checkbox("validation (dashed)", true, (on) => (view.validation = on, redraw())));

  // ---- one chart
  const curves_of = (key) => {
    const list = [];
    for (const run of runs) {
      if (!run.shown) continue;
      for (const [name, curve] of Object.entries(run.curves))
        if (belongs(name, key)) list.push({run, curve, dashed: false, part: name.slice(key.length + 1)});
      if (key === "loss" && view.validation && run.curves.validation)
        list.push({run, curve: run.curves.validation, dashed: true, part: ""});
    }
    return list;
  };
  // The tooltip: the step at the pointer, and each curve's value there.
  const describe = (what) => {
    const list = make("div", {}, make("b", {text: "step " + what.x}));
    const nearest = [...what.points].sort((a, b) => a.away - b.away).slice(0, 12);
    for (const p of what.points.filter((p) => nearest.includes(p))) {
      const swatch = make("span", {class: "swatch"});
      swatch.style.background = distinct(p.run.index);
      const text = (runs.length > 1 ? p.run.name + " " : "") + (p.dashed ? "validation " : "") +
                   (p.part && p.part + " ") +
                   number(p.raw) + (p.smooth ? " (smoothed " + number(p.y) + ")" : "") +
                   (p.step === what.x ? "" : " at step " + p.step);
      list.append(make("div", {}, swatch, text));
    }
    const more = what.points.length - nearest.length;
    if (more > 0) list.append(make("div", {text: "and " + more + " more"}));
    return list;
  };

  class CurveChart {
    // definition: {key, title, log, wide}; steps on the x axis
    constructor(definition) {
      this.key = definition.key;
      this.log = definition.log;
      this.pointed = null;
      const section = make("section", {class: definition.wide ? "wide" : ""});
      const switches = make("div", {class: "tools"});
      section.append(make("div", {class: "head"}, make("h2", {text: definition.title}), switches));
      document.getElementById("charts").append(section);
      switches.append(checkbox("logarithmic", this.log, (on) => (this.log = on, redraw())));
      Charts.chart(section, definition.wide ? 360 : 230, definition.title + " over steps", {
        draw: (c, self) => this.draw(c, self),
        mark: (c, self) => this.mark(c, self),
        hover: (x, y, event) => {
          this.pointed = x === null ? null : this.point(x, y);
          view.over = this.pointed ? this.pointed.nearest : null;
          tip(this.pointed && describe(this.pointed), event);
          Charts.mark();
        },
      });
    }

    // ---- scales: from values to pixels
    to(y) { return this.log ? Math.log10(y) : y; }
    usable(y) { return finite(y) && (!this.log || y > 0); }
    px(x) { return this.area.left + ((x - this.x0) / (this.x1 - this.x0)) * this.area.w; }
    py(y) { return this.area.top + (1 - (this.to(y) - this.y0) / (this.y1 - this.y0)) * this.area.h; }
    limits() {
      let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
      for (const {curve} of curves_of(this.key))
        curve.v.forEach((y, i) => {
          if (!this.usable(y)) return;
          x0 = Math.min(x0, curve.s[i]), x1 = Math.max(x1, curve.s[i]);
          y0 = Math.min(y0, this.to(y)), y1 = Math.max(y1, this.to(y));
        });
      if (x0 > x1) x0 = 0, x1 = 1, y0 = 0, y1 = 1;
      if (x0 === x1) x0 -= 1, x1 += 1;
      if (x0 < 0.1 * x1) x0 = 0;
      const margin = y1 > y0 ? 0.05 * (y1 - y0) : Math.abs(y0) * 0.1 || 0.5;
      if (!this.log && y0 >= 0 && y0 - margin < 0) y0 = 0;
      else y0 -= margin;
      y1 += margin;
      Object.assign(this, {x0, x1, y0, y1});
    }

    // ---- drawing
    dot(c, x, y, radius) {
      c.beginPath(), c.arc(this.px(x), this.py(y), radius, 0, 7);
      c.fillStyle = c.strokeStyle, c.fill();
    }
    trace(c, curve, values) {
      c.beginPath();
      let pen = false, points = 0, last = null;
      values.forEach((y, i) => {
        if (!this.usable(y)) return void (pen = false);
        if (pen) c.lineTo(this.px(curve.s[i]), this.py(y));
        else c.moveTo(this.px(curve.s[i]), this.py(y));
        pen = true, ++points, last = i;
      });
      c.stroke();
      if (points === 1) this.dot(c, curve.s[last], values[last], 3);
    }
    axes(c, self) {
      const {x0, x1, y0, y1} = this;
      const steps = ticksBetween(x0, x1, false, Math.max(3, self.width / 130))
                        .filter((x) => x === Math.round(x) || x1 - x0 < 2);
      const xTicks = steps.map((x) => [(x - x0) / (x1 - x0), tick(x)]);
      const yTicks = ticksBetween(y0, y1, this.log).map((y) => [(this.to(y) - y0) / (y1 - y0), tick(y)]);
      this.area = frame(c, self, 44, 12, 8, 26, xTicks, yTicks.filter(([at]) => at >= 0 && at <= 1));
      c.fillStyle = color("soft"), c.textAlign = "right", c.textBaseline = "top";
      c.fillText("step", this.area.left - 14, this.area.top + this.area.h + 6);
    }
    draw(c, self) {
      this.limits();
      this.axes(c, self);
      clipped(c, this.area, () => {
        for (const {run, curve, dashed} of curves_of(this.key)) {
          c.strokeStyle = distinct(run.index);
          c.setLineDash(dashed ? [6, 4] : []);
          if (curve.y !== curve.v) {
            c.globalAlpha = 0.25, c.lineWidth = 1;
            this.trace(c, curve, curve.v);
          }
          c.globalAlpha = 1, c.lineWidth = dashed ? 1.8 : 1.5;
          this.trace(c, curve, curve.y);
          if (dashed && curve.s.length <= 40)
            curve.s.forEach((x, i) => this.usable(curve.y[i]) && this.dot(c, x, curve.y[i], 2.5));
        }
        c.setLineDash([]);
      });
    }
    // The run under the pointer in bold, and its values.
    mark(c, self) {
      c.clearRect(0, 0, self.width, self.height);
      if (!this.area) return;
      clipped(c, this.area, () => {
        for (const {run, curve, dashed} of curves_of(this.key)) {
          if (view.over !== run.index) continue;
          c.strokeStyle = distinct(run.index), c.lineWidth = 3;
          c.setLineDash(dashed ? [6, 4] : []);
          this.trace(c, curve, curve.y);
        }
        c.setLineDash([]);
      });
      if (!this.pointed) return;
      c.strokeStyle = color("axis"), c.lineWidth = 1;
      const x = Math.round(this.px(this.pointed.x)) + 0.5;
      c.beginPath(), c.moveTo(x, this.area.top), c.lineTo(x, this.area.top + this.area.h), c.stroke();
      for (const {run, step, y} of this.pointed.points) {
        c.strokeStyle = distinct(run.index);
        this.dot(c, step, y, 4);
      }
    }

    // The step at the pointer, and each curve's value there.
    point(x, y) {
      const curves = curves_of(this.key);
      let step = null, far = Infinity;
      for (const {curve} of curves)
        for (const s of curve.s)
          if (Math.abs(this.px(s) - x) < far) far = Math.abs(this.px(s) - x), step = s;
      if (step === null) return null;
      const points = [];
      let nearest = null, best = 16;
      for (const {run, curve, dashed, part} of curves) {
        let at = -1, gap = Infinity;
        curve.s.forEach((s, i) => {
          if (this.usable(curve.y[i]) && Math.abs(s - step) < gap) gap = Math.abs(s - step), at = i;
        });
        if (at < 0 || gap * (this.area.w / (this.x1 - this.x0)) > 8) continue;
        const away = Math.abs(this.py(curve.y[at]) - y);
        points.push({run, dashed, part, step: curve.s[at], y: curve.y[at], raw: curve.v[at], away,
                     smooth: curve.y !== curve.v});
        if (away < best) best = away, nearest = run.index;
      }
      return {x: step, points, nearest};
    }
  }
  const drawn = data.charts.filter((chart) => runs.some(
      (run) => Object.keys(run.curves).some((name) => belongs(name, chart.key))));
  for (const chart of drawn) new CurveChart(chart);
  ExpertMap.add(document.getElementById("charts"), runs);
  if (!drawn.length) {
    const text = "No step has been logged yet.";
    document.getElementById("charts").append(make("p", {class: "soft", text}));
    document.getElementById("tools-section").remove();
  }

  const redraw = () => {
    smooth_all();
    for (const run of runs) run.swatch.style.background = distinct(run.index);
    Charts.redraw();
  };
  Charts.start(redraw);
})();
