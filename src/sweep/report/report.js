// Draws a sweep's report from the JSON in the page.
(() => {
  const {data, finite, make, number, tick, duration, quantile, ticksBetween, color, tip, shortened, frame, clipped} = Charts;
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
  const order = [...trials].sort((a, b) => (b.rank ?? 2) - (a.rank ?? 2));  // the best are drawn last

  // ---- scales: from a value to 0 … 1
  const scaleOf = (key, k) => {
    const texts = trials.map((t) => t.values[k]);
    const numbers = texts.map((text) => (text === "" ? NaN : Number(text)));
    const numeric = texts.every((text, i) => text === "" || finite(numbers[i]));
    if (!numeric || texts.every((text) => text === "")) {
      const values = [...new Set(texts)];
      const position = new Map(values.map((value, i) => [value, (i + 0.5) / values.length]));
      return {numeric: false, at: (text) => position.get(text), ticks: values.map((v) => [position.get(v), v === "" ? "–" : v]), values};
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
    const t = Charts.dark() ? 1 - 0.85 * part : part;  // on a dark page the bright end is the strongest
    const at = Math.min(Math.max(t, 0), 1) * (stops.length - 1), i = Math.min(Math.floor(at), stops.length - 2);
    return "rgb(" + stops[i].map((c, k) => Math.round(c + (stops[i + 1][k] - c) * (at - i))).join(",") + ")";
  };
  const view = {color: -1, logY: false, full: false, others: true, brush: new Map(), lit: new Set(), over: null};
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

  // ---- a chart: find(x, y) gives the trial at the pointer; marked are that one and those that were clicked on
  const chart = (parent, height, label, draw, mark, find) =>
    Charts.chart(parent, height, label, {
      draw,
      mark: (c, self) => mark(c, self, trials.filter((t) => view.lit.has(t.index) || view.over === t.index)),
      hover: (x, y, event) => {
        const hit = x === null ? null : find(x, y);
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
    trial.label + (trial.seed === null ? "" : " · seed " + trial.seed) + "\n" + data.metric.name + " " + number(trial.metric) +
    " · " + trial.state + (trial.step === null ? "" : " at step " + trial.step) + (trial.reason ? "\n" + trial.reason : "") + "\n" + trial.id;
  // ---- curves over steps
  const curvesSection = document.getElementById("curves");
  const withCurve = order.filter((t) => t.x.length > 0);
  if (withCurve.length) {
    let area, to, x0, x1, y0, y1;
    const px = (x) => area.left + ((x - x0) / (x1 - x0)) * area.w;
    const py = (y) => area.top + (1 - (to(y) - y0) / (y1 - y0)) * area.h;
    const trace = (c, trial) => {
      c.beginPath();
      let pen = false, points = 0;
      trial.x.forEach((x, i) => {
        const y = trial.y[i];
        if (!finite(y) || (view.logY && y <= 0)) return void (pen = false);
        if (pen) c.lineTo(px(x), py(y));
        else c.moveTo(px(x), py(y));
        pen = true, ++points;
      });
      c.stroke();
      if (points === 1) {
        c.beginPath();
        c.arc(px(trial.x[0]), py(trial.y[0]), 2.5, 0, 7);
        c.fillStyle = c.strokeStyle, c.fill();
      }
    };
    chart(curvesSection, 380, "curves of " + data.metric.name + " over steps",
      (c, self) => {
        to = view.logY ? Math.log10 : (y) => y;
        const values = [];
        x0 = Infinity, x1 = -Infinity;
        for (const t of withCurve)
          t.x.forEach((x, i) => {
            if (!finite(t.y[i]) || (view.logY && t.y[i] <= 0)) return;
            x0 = Math.min(x0, x), x1 = Math.max(x1, x);
            values.push(to(t.y[i]));
          });
        if (!values.length) x0 = 0, x1 = 1;
        if (x0 === x1) x0 -= 1, x1 += 1;
        values.sort((a, b) => a - b);
        // The first steps and runs that diverge would press the rest into a line.
        y0 = values.length ? quantile(values, view.full || minimize ? 0 : 0.04) : 0;
        y1 = values.length ? quantile(values, view.full || !minimize ? 1 : 0.96) : 1;
        const margin = (y1 - y0) * 0.04 || Math.abs(y0) * 0.05 || 0.5;
        y0 -= margin, y1 += margin;
        const yTicks = view.logY ? ticksBetween(y0, y1, true).map((y) => [(Math.log10(y) - y0) / (y1 - y0), tick(y)])
                                 : ticksBetween(y0, y1, false).map((y) => [(y - y0) / (y1 - y0), tick(y)]);
        const xTicks = ticksBetween(x0, x1, false).map((x) => [(x - x0) / (x1 - x0), tick(x)]);
        area = frame(c, self, 56, 12, 8, 26, xTicks, yTicks.filter(([at]) => at >= 0 && at <= 1));
        clipped(c, area, () => {
          c.lineWidth = withCurve.length > 150 ? 0.8 : 1.3;
          for (const t of withCurve) {
            if (!shown(t)) continue;
            c.globalAlpha = t.finished ? (withCurve.length > 150 ? 0.65 : 0.9) : 0.6;
            c.setLineDash(t.finished ? [] : [4, 3]);
            c.strokeStyle = colorOf(t);
            trace(c, t);
          }
        });
      },
      (c, self, marked) => clipped(c, area, () => {
        c.lineWidth = 2.6;
        for (const t of marked) c.strokeStyle = color("mark"), trace(c, t);
      }),
      (x, y) => {
        let best = 14 * 14, hit = null, step = 0;
        for (const t of withCurve) {
          if (!shown(t)) continue;
          for (let i = 0; i < t.x.length; ++i) {
            const dx = px(t.x[i]) - x;
            if (dx > 14 || dx < -14 || !finite(t.y[i])) continue;
            const dy = py(t.y[i]) - y, d = dx * dx + dy * dy;
            if (d < best) best = d, hit = t, step = i;
          }
        }
        return hit && {trial: hit, text: data.metric.name + " " + number(hit.y[step]) + " at step " + hit.x[step] + "\n" + about(hit)};
      });
  } else {
    curvesSection.append(make("p", {class: "soft", text: "No step has been logged yet."}));
  }

  // ---- the metric against each axis
  const scatters = document.getElementById("scatters");
  const [m0, m1] = metricLimits;
  const metricTicks = ticksBetween(m0, m1, false).map((y) => [(y - m0) / (m1 - m0), tick(y)]);
  const metricAt = (trial) => Math.min(Math.max((trial.metric - m0) / (m1 - m0), 0), 1);
  const beyond = (trial) => trial.metric > m1 || trial.metric < m0;
  const plotted = order.filter((t) => finite(t.metric));
  keys.forEach((key, k) => {
    const cell = make("div");
    cell.append(make("h3", {text: key.path + (scales[k].log ? " (logarithmic)" : "")}));
    scatters.append(cell);
    // A little aside, the same each time, so that replicates do not hide each other.
    const few = scales[k].values.length <= 12;
    const aside = (t) => (few ? (((t.index * 2654435761) % 1000) / 1000 - 0.5) * Math.min(14, 160 / scales[k].values.length) : 0);
    const inset = scales[k].numeric ? 0.05 : 0;
    let area;
    const px = (t) => area.left + (inset + scales[k].at(t.values[k]) * (1 - 2 * inset)) * area.w + aside(t);
    const py = (t) => area.top + (1 - metricAt(t)) * area.h;
    const dot = (c, t, r) => {
      const x = px(t), y = py(t);
      if (!finite(x)) return;
      c.beginPath();
      if (beyond(t)) {
        const up = t.metric > m1 ? 1 : -1;
        c.moveTo(x - r, y + up * (r + 2)), c.lineTo(x + r, y + up * (r + 2)), c.lineTo(x, y + up), c.closePath();
      } else c.arc(x, y, r, 0, 7);
      if (t.finished) c.fill();
      else c.stroke();
    };
    chart(cell, 220, data.metric.name + " against " + key.path,
      (c, self) => {
        const ticks = scales[k].ticks.map(([at, text]) => [inset + at * (1 - 2 * inset), text]);
        const space = (self.width - 64) / Math.max(1, ticks.length) - 6;
        area = frame(c, self, 56, 8, 8, 24,
                     scales[k].numeric ? ticks : ticks.map(([at, text]) => [at, shortened(c, text, space)]), metricTicks);
        const many = plotted.length > 200;
        for (const t of plotted) {
          if (!shown(t)) continue;
          c.globalAlpha = many ? 0.55 : 0.8;
          c.fillStyle = c.strokeStyle = colorOf(t);
          dot(c, t, many ? 2.4 : 3.6);
        }
        if (!few) return;
        // The mean of each value's finished trials.
        c.globalAlpha = 1;
        c.strokeStyle = color("ink"), c.lineWidth = 2;
        for (const value of scales[k].values) {
          const group = finished.filter((t) => inBrush(t) && (scales[k].numeric ? Number(t.values[k]) === Number(value) : t.values[k] === value));
          if (group.length < 2) continue;
          const mean = group.reduce((sum, t) => sum + t.metric, 0) / group.length;
          if (mean > m1 || mean < m0) continue;
          const x = area.left + (inset + scales[k].at(value) * (1 - 2 * inset)) * area.w;
          const y = area.top + (1 - (mean - m0) / (m1 - m0)) * area.h;
          c.beginPath(), c.moveTo(x - 10, y), c.lineTo(x + 10, y), c.stroke();
        }
      },
      (c, self, marked) => {
        c.fillStyle = c.strokeStyle = color("mark");
        for (const t of marked) if (finite(t.metric)) dot(c, t, 5);
      },
      (x, y) => {
        let best = 12 * 12, hit = null;
        for (const t of plotted) {
          if (!shown(t)) continue;
          const dx = px(t) - x, dy = py(t) - y, d = dx * dx + dy * dy;
          if (d < best) best = d, hit = t;
        }
        return hit && {trial: hit, text: about(hit)};
      });
  });
  if (!keys.length) scatters.append(make("p", {class: "soft", text: "Nothing varies but the seed."}));

  // ---- parallel coordinates: the axes, and the metric with its good end on top
  function placeOn(axis, trial) {
    if (axis < keys.length) return scales[axis].at(trial.values[axis]);
    if (!finite(trial.metric)) return NaN;
    return minimize ? 1 - metricAt(trial) : metricAt(trial);
  }
  const parallel = document.getElementById("parallel");
  if (keys.length && plotted.length) {
    const names = [...keys.map((key) => key.name), data.metric.name];
    const ticks = [...scales.map((s) => s.ticks), metricTicks.map(([at, text]) => [minimize ? 1 - at : at, text])];
    let area;
    const px = (axis) => area.left + (axis / (names.length - 1)) * area.w;
    const py = (at) => area.top + (1 - at) * area.h;
    const trace = (c, t) => {
      c.beginPath();
      let pen = false;
      names.forEach((_, axis) => {
        const at = placeOn(axis, t);
        if (!finite(at)) return void (pen = false);
        if (pen) c.lineTo(px(axis), py(at));
        else c.moveTo(px(axis), py(at));
        pen = true;
      });
      c.stroke();
    };
    const self = chart(parallel, 340, "parallel coordinates",
      (c, self) => {
        c.clearRect(0, 0, self.width, self.height);
        area = {left: 70, top: 34, w: self.width - 140, h: self.height - 50};
        const space = area.w / (names.length - 1);
        for (const t of plotted) {
          if (!view.others && !t.finished) continue;
          const inside = inBrush(t);
          c.lineWidth = inside ? (plotted.length > 150 ? 0.8 : 1.3) : 0.6;
          c.globalAlpha = inside ? (t.finished ? (plotted.length > 150 ? 0.6 : 0.85) : 0.5) : 0.12;
          c.setLineDash(t.finished ? [] : [4, 3]);
          c.strokeStyle = inside ? colorOf(t) : color("faint");
          trace(c, t);
        }
        c.globalAlpha = 1;
        c.setLineDash([]);
        names.forEach((name, axis) => {
          const x = Math.round(px(axis)) + 0.5;
          c.strokeStyle = color("axis"), c.lineWidth = 1;
          c.beginPath(), c.moveTo(x, area.top), c.lineTo(x, area.top + area.h), c.stroke();
          c.textAlign = "center", c.textBaseline = "bottom";
          c.fillStyle = color("ink");
          c.font = "600 12px system-ui, sans-serif";
          c.fillText(shortened(c, name, axis === 0 || axis === names.length - 1 ? 136 : space - 8), x, area.top - 12);
          c.font = "11px system-ui, sans-serif";
          c.textBaseline = "middle";
          const last = axis === names.length - 1;
          c.textAlign = last ? "left" : "right";
          for (const [at, text] of ticks[axis]) {
            const y = py(at);
            const label = shortened(c, text, Math.min(axis === 0 ? 62 : 100, space - 14)), w = c.measureText(label).width;
            const tx = last ? x + 7 : x - 7;
            c.fillStyle = color("veil");
            c.fillRect(last ? tx - 2 : tx - w - 2, y - 7, w + 4, 14);
            c.fillStyle = color("soft");
            c.fillText(label, tx, y);
            c.beginPath(), c.moveTo(x - 3, y), c.lineTo(x + 3, y), c.stroke();
          }
          const brush = view.brush.get(axis);
          if (brush) {
            c.fillStyle = color("brush"), c.strokeStyle = color("accent");
            c.beginPath(), c.rect(x - 9, py(brush[1]), 18, py(brush[0]) - py(brush[1])), c.fill(), c.stroke();
          }
        });
      },
      (c, self, marked) => {
        c.strokeStyle = color("mark"), c.lineWidth = 2.6;
        for (const t of marked) trace(c, t);
      },
      (x, y) => {
        const axis = Math.min(Math.max(((x - area.left) / area.w) * (names.length - 1), 0), names.length - 1);
        const before = Math.min(Math.floor(axis), names.length - 2), part = axis - before;
        let best = 9, hit = null;
        for (const t of plotted) {
          if (!shown(t)) continue;
          const d = Math.abs(py(placeOn(before, t) * (1 - part) + placeOn(before + 1, t) * part) - y);
          if (d < best) best = d, hit = t;
        }
        return hit && {trial: hit, text: about(hit)};
      });
    let dragged = null;
    const positionOf = (event) => {
      const box = self.box.getBoundingClientRect();
      return {x: event.clientX - box.left, at: Math.min(Math.max(1 - (event.clientY - box.top - area.top) / area.h, 0), 1)};
    };
    self.box.addEventListener("pointerdown", (event) => {
      const {x, at} = positionOf(event);
      const axis = names.findIndex((_, i) => Math.abs(px(i) - x) < 14);
      if (axis < 0) return;
      dragged = {axis, from: at};
      self.box.setPointerCapture(event.pointerId);
      if (view.brush.delete(axis)) redraw();
    });
    self.box.addEventListener("pointermove", (event) => {
      const {x, at} = positionOf(event);
      self.box.style.cursor = names.some((_, i) => Math.abs(px(i) - x) < 14) ? "ns-resize" : "";
      if (!dragged || Math.abs(at - dragged.from) < 0.02) return;
      view.brush.set(dragged.axis, [Math.min(at, dragged.from), Math.max(at, dragged.from)]);
      redraw();
    });
    self.box.addEventListener("pointerup", () => (dragged = null));
  } else {
    document.getElementById("parallel-section").remove();
  }

  // ---- what the axes explain
  const importance = document.getElementById("importance");
  if (data.importance) {
    const bar = (name, fraction, rest) => {
      const line = make("div", {class: rest ? "bar rest" : "bar"}, make("span", {text: name}));
      line.append(make("div", {}, make("i", {style: "width:" + Math.max(0.4, fraction * 100).toFixed(1) + "%"})));
      line.append(make("em", {text: (fraction * 100).toFixed(1) + "%"}));
      return line;
    };
    for (const axis of data.importance.axes) importance.append(bar(axis.name, axis.importance, false));
    importance.append(bar("together, and seeds", data.importance.rest, true));
    importance.append(make("p", {class: "soft", text: "Share of the variance between " + data.importance.n + " finished trials that each axis explains by itself."}));
  } else {
    document.getElementById("importance-section").remove();
  }

  // ---- the head, the best configuration, the tables
  document.getElementById("title").textContent = data.name;
  document.getElementById("subtitle").textContent = data.subtitle;
  const facts = document.getElementById("facts");
  const fact = (value, text) => facts.append(make("div", {class: "fact"}, make("b", {text: value}), make("span", {text})));
  const best = data.best;
  const replicated = best && best.planned > 1;
  const over_seeds = best && best.trials.length > 1 ? ", mean ± standard deviation over " + best.trials.length + " seeds" : "";
  if (best) fact(best.text, "best " + data.metric.name + " (" + data.metric.at + over_seeds + ")");
  fact(String(trials.length), trials.length === 1 ? "trial" : "trials");
  for (const [state, count] of Object.entries(data.states)) fact(String(count), state);
  if (data.seconds > 0) fact(duration(data.seconds), "run time of all trials");

  if (best) {
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
      document.getElementById("recipe-summary").textContent = "its recipe with seed " + first.seed + "; other seeds differ in rng.seed alone";
    document.getElementById("recipe").textContent = best.recipe;
  } else {
    document.getElementById("best-section").remove();
  }
  const table = (parent, lines, numeric) => {
    if (!lines || lines.length < 2) return false;
    const head = make("tr"), body = make("tbody");
    lines[0].cells.forEach((text, i) => head.append(make("th", {text, class: numeric(i) ? "number" : ""})));
    for (const line of lines.slice(1)) {
      const row = make("tr", {"data-trials": line.trials.join(" ")});
      line.cells.forEach((text, i) => row.append(make("td", {text, class: numeric(i) ? "number" : lines[0].cells[i] === "reason" ? "reason" : ""})));
      row.addEventListener("click", () => {
        const on = line.trials.some((i) => view.lit.has(i));
        for (const i of line.trials) on ? view.lit.delete(i) : view.lit.add(i);
        redraw();
      });
      body.append(row);
    }
    parent.append(make("table", {}, make("thead", {}, head), body));
    return true;
  };
  const right = (lines) => (i) => {
    if (!lines || i >= lines[0].cells.length) return false;
    return lines.slice(1).every((line) => /^[-–]?$|^[-+0-9.]/.test(line.cells[i])) && !["trial", "best trial", "state", "reason"].includes(lines[0].cells[i]);
  };
  if (!table(document.getElementById("ranked"), data.ranked, right(data.ranked))) document.getElementById("ranked-section").remove();
  if (!table(document.getElementById("others"), data.others, right(data.others))) document.getElementById("others-section").remove();

  const listed = [data.ranked, data.others].reduce((sum, lines) => sum + (lines ? lines.length - 1 : 0), 0);
  if (listed < data.rows)
    document.querySelector("main").append(make("p", {class: "soft", text: data.rows - listed + " more configurations are in `capstan sweep table`."}));

  // ---- tools
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
  const box = (text, name, value) => tools.append(Charts.checkbox(text, value, (on) => (view[name] = on, redraw())));
  box("logarithmic", "logY", false);
  box("full range", "full", false);
  if (finished.length < trials.length) box("unfinished trials", "others", true);

  Charts.start(redraw);
})();
