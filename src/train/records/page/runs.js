// Draws the curves of runs from the JSON in the page.
(() => {
  const {data, finite, make, checkbox, number, tick, ticksBetween, color, distinct, tip, frame, clipped} = Charts;
  const runs = data.runs;
  const view = {smoothing: 0, validation: true, over: null};
  runs.forEach((run, i) => (run.index = i, run.shown = true));

  // ---- the head and the table, which is the legend too
  document.getElementById("title").textContent = data.title;
  document.getElementById("subtitle").textContent = data.subtitle;
  const columns = [["", false], ["run", false], ["recipe", false], ["state", false], ["step", true], ["loss", true],
                   ["validation loss", true], ["test loss", true], ["tokens/s", true], ["started", false]];
  const head = make("tr"), body = make("tbody");
  for (const [text, numeric] of columns) head.append(make("th", {text, class: numeric ? "number" : ""}));
  for (const run of runs) {
    const row = make("tr", {"data-run": run.index});
    run.swatch = make("span", {class: "swatch"});
    const texts = [run.name, run.recipe, run.state, run.step === null ? "–" : String(run.step), number(run.loss ?? NaN),
                   number(run.validation ?? NaN), number(run.test ?? NaN), tick(Number((run.speed ?? NaN).toPrecision(3))), run.started.replace("T", " ").replace("Z", "")];
    row.append(make("td", {}, run.swatch));
    texts.forEach((text, i) => row.append(make("td", {text, class: columns[i + 1][1] ? "number" : ""})));
    row.addEventListener("click", () => (run.shown = !run.shown, row.classList.toggle("off", !run.shown), redraw()));
    row.addEventListener("pointerenter", () => (view.over = run.index, Charts.mark()));
    row.addEventListener("pointerleave", () => (view.over = null, Charts.mark()));
    body.append(row);
  }
  document.getElementById("runs").append(make("table", {}, make("thead", {}, head), body));
  document.getElementById("hint").textContent = runs.length > 1 ? "Click on a row to hide or show its curves." : "";

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
  for (const run of runs)
    for (const [key, curve] of Object.entries(run.curves))
      curve.smooth = data.charts.some((one) => one.key === key && one.smooth);

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
      if (run.curves[key]) list.push({run, curve: run.curves[key], dashed: false});
      if (key === "loss" && view.validation && run.curves.validation)
        list.push({run, curve: run.curves.validation, dashed: true});
    }
    return list;
  };
  const place = document.getElementById("charts");
  const add = (one) => {
    if (!runs.some((run) => run.curves[one.key])) return;
    const section = make("section", {class: one.wide ? "wide" : ""});
    const switches = make("div", {class: "tools"});
    section.append(make("div", {class: "head"}, make("h2", {text: one.title}), switches));
    place.append(section);
    let log = one.log, area, x0, x1, y0, y1, pointed = null;
    const to = (y) => (log ? Math.log10(y) : y);
    const usable = (y) => finite(y) && (!log || y > 0);
    const px = (x) => area.left + ((x - x0) / (x1 - x0)) * area.w;
    const py = (y) => area.top + (1 - (to(y) - y0) / (y1 - y0)) * area.h;
    switches.append(checkbox("logarithmic", log, (on) => (log = on, redraw())));
    const trace = (c, curve, values) => {
      c.beginPath();
      let pen = false, points = 0, last = null;
      values.forEach((y, i) => {
        if (!usable(y)) return void (pen = false);
        if (pen) c.lineTo(px(curve.s[i]), py(y));
        else c.moveTo(px(curve.s[i]), py(y));
        pen = true, ++points, last = i;
      });
      c.stroke();
      if (points === 1) dot(c, curve.s[last], values[last], 3);
    };
    const dot = (c, x, y, radius) => {
      c.beginPath(), c.arc(px(x), py(y), radius, 0, 7);
      c.fillStyle = c.strokeStyle, c.fill();
    };
    const limits = () => {
      x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
      for (const {curve} of curves_of(one.key))
        curve.v.forEach((y, i) => {
          if (!usable(y)) return;
          x0 = Math.min(x0, curve.s[i]), x1 = Math.max(x1, curve.s[i]);
          y0 = Math.min(y0, to(y)), y1 = Math.max(y1, to(y));
        });
      if (x0 > x1) x0 = 0, x1 = 1, y0 = 0, y1 = 1;
      if (x0 === x1) x0 -= 1, x1 += 1;
      if (x0 < 0.1 * x1) x0 = 0;
      const margin = y1 > y0 ? 0.05 * (y1 - y0) : Math.abs(y0) * 0.1 || 0.5;
      if (!log && y0 >= 0 && y0 - margin < 0) y0 = 0;
      else y0 -= margin;
      y1 += margin;
    };
    Charts.chart(section, one.wide ? 360 : 230, one.title + " over steps", {
      draw: (c, self) => {
        limits();
        const steps = ticksBetween(x0, x1, false, Math.max(3, self.width / 130)).filter((x) => x === Math.round(x) || x1 - x0 < 2);
        area = frame(c, self, 44, 12, 8, 26, steps.map((x) => [(x - x0) / (x1 - x0), tick(x)]),
                     ticksBetween(y0, y1, log).map((y) => [(to(y) - y0) / (y1 - y0), tick(y)]).filter(([at]) => at >= 0 && at <= 1));
        c.fillStyle = color("soft"), c.textAlign = "right", c.textBaseline = "top";
        c.fillText("step", area.left - 14, area.top + area.h + 6);
        clipped(c, area, () => {
          for (const {run, curve, dashed} of curves_of(one.key)) {
            c.strokeStyle = distinct(run.index);
            c.setLineDash(dashed ? [6, 4] : []);
            if (curve.y !== curve.v) {
              c.globalAlpha = 0.25, c.lineWidth = 1;
              trace(c, curve, curve.v);
            }
            c.globalAlpha = 1, c.lineWidth = dashed ? 1.8 : 1.5;
            trace(c, curve, curve.y);
            if (dashed && curve.s.length <= 40) curve.s.forEach((x, i) => usable(curve.y[i]) && dot(c, x, curve.y[i], 2.5));
          }
          c.setLineDash([]);
        });
      },
      mark: (c, self) => {
        c.clearRect(0, 0, self.width, self.height);
        if (!area) return;
        clipped(c, area, () => {
          for (const {run, curve, dashed} of curves_of(one.key)) {
            if (view.over !== run.index) continue;
            c.strokeStyle = distinct(run.index), c.lineWidth = 3;
            c.setLineDash(dashed ? [6, 4] : []);
            trace(c, curve, curve.y);
          }
          c.setLineDash([]);
        });
        if (!pointed) return;
        c.strokeStyle = color("axis"), c.lineWidth = 1;
        const x = Math.round(px(pointed.x)) + 0.5;
        c.beginPath(), c.moveTo(x, area.top), c.lineTo(x, area.top + area.h), c.stroke();
        for (const {run, step, y} of pointed.points) c.strokeStyle = distinct(run.index), dot(c, step, y, 4);
      },
      hover: (x, y, event) => {
        pointed = x === null ? null : point(x, y);
        view.over = pointed ? pointed.nearest : null;
        tip(pointed && describe(pointed), event);
        Charts.mark();
      },
    });
    // The step at the pointer, and each curve's value there.
    const point = (x, y) => {
      const curves = curves_of(one.key);
      let step = null, far = Infinity;
      for (const {curve} of curves)
        for (const s of curve.s)
          if (Math.abs(px(s) - x) < far) far = Math.abs(px(s) - x), step = s;
      if (step === null) return null;
      const points = [];
      let nearest = null, best = 16;
      for (const {run, curve, dashed} of curves) {
        let at = -1, gap = Infinity;
        curve.s.forEach((s, i) => {
          if (usable(curve.y[i]) && Math.abs(s - step) < gap) gap = Math.abs(s - step), at = i;
        });
        if (at < 0 || gap * (area.w / (x1 - x0)) > 8) continue;
        const away = Math.abs(py(curve.y[at]) - y);
        points.push({run, dashed, step: curve.s[at], y: curve.y[at], raw: curve.v[at], away, smooth: curve.y !== curve.v});
        if (away < best) best = away, nearest = run.index;
      }
      return {x: step, points, nearest};
    };
    const describe = (what) => {
      const list = make("div", {}, make("b", {text: "step " + what.x}));
      const nearest = [...what.points].sort((a, b) => a.away - b.away).slice(0, 12);
      for (const p of what.points.filter((p) => nearest.includes(p))) {
        const swatch = make("span", {class: "swatch"});
        swatch.style.background = distinct(p.run.index);
        const text = (runs.length > 1 ? p.run.name + " " : "") + (p.dashed ? "validation " : "") + number(p.raw) +
                     (p.smooth ? " (smoothed " + number(p.y) + ")" : "") + (p.step === what.x ? "" : " at step " + p.step);
        list.append(make("div", {}, swatch, text));
      }
      if (nearest.length < what.points.length) list.append(make("div", {text: "and " + (what.points.length - nearest.length) + " more"}));
      return list;
    };
  };
  for (const one of data.charts) add(one);
  if (!place.children.length) {
    place.append(make("p", {class: "soft", text: "No step has been logged yet."}));
    document.getElementById("tools-section").remove();
  }

  const redraw = () => {
    smooth_all();
    for (const run of runs) run.swatch.style.background = distinct(run.index);
    Charts.redraw();
  };
  Charts.start(redraw);
})();
