"use strict";
// The page of `capstan plan --html`. Bars and points are SVG; texts enter as text only.
(() => {
  const {data, make, number, duration, distinct, tip} = Charts;
  const {plan, search, links, run} = data;
  const find = (id) => document.getElementById(id);

  // ---- units
  const bytes = (x) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let i = 0;
    while (x >= 1024 && i + 1 < units.length) x /= 1024, ++i;
    return x.toPrecision(3) + " " + units[i];
  };
  const seconds = (x) => {
    if (x >= 1) return x.toFixed(2) + " s";
    return x >= 1e-3 ? (1e3 * x).toFixed(1) + " ms" : (1e6 * x).toFixed(0) + " us";
  };
  const percent = (x) => (100 * x).toFixed(1) + "%";
  // Words as a line for a shell: as shell_line() in base/wording.hpp.
  const shellLine = (words) =>
    words.map((w) => (/^[\w\-+=.\/:,@%]+$/.test(w) ? w : "'" + w.replaceAll("'", "'\\''") + "'")).join(" ");
  const words = (name) => name.replaceAll("_", " ");

  // ---- SVG
  const svg = (tag, attributes = {}, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  const text = (x, y, content, attributes = {}) =>
    svg("text", {x, y, fill: "var(--soft)", "font-size": 11, ...attributes}, content);
  const hint = (element, content) => {
    element.addEventListener("pointermove", (event) => tip(make("span", {text: content}), event));
    element.addEventListener("pointerleave", (event) => tip(null, event));
    element.append(svg("title", {}, content));
  };

  // ---- tables
  const table = (id, head, rows, numeric) => {
    const body = make("tbody");
    const kind = (i) => (numeric.includes(i) ? "number" : head[i] === "overrides" ? "reason" : "");
    for (const row of rows) {
      const line = make("tr");
      row.forEach((cell, i) => line.append(make("td", {class: kind(i), text: cell})));
      body.append(line);
    }
    const top = make("tr");
    head.forEach((cell, i) => top.append(make("th", {class: kind(i), text: cell})));
    find(id).replaceChildren(make("table", {}, make("thead", {}, top), body));
  };

  const showHead = () => {
    find("title").textContent = data.title;
    find("subtitle").textContent = data.subtitle;
    const fact = (value, name) =>
      find("facts").append(
        make("div", {class: "fact"}, make("b", {text: value}), make("span", {text: name})));
    fact(plan.fits ? "fits" : "does not fit",
         bytes(plan.memory_bytes.total) + " of " + bytes(plan.usable_memory_bytes) + ", " +
           (plan.memory_exact ? "exact" : "by formula"));
    const [low, high] = plan.step_seconds_range;
    fact(seconds(plan.step_seconds), "a step (" + seconds(low) + " to " + seconds(high) + ")");
    fact(number(Math.round(plan.tokens_per_second)), "tokens/s");
    fact(plan.tflops_per_gpu.toFixed(0), "model TFLOP/s a GPU (causal attention)");
    fact(percent(plan.mfu), "MFU");
    if (!run) return;
    // A run whose failures come before its saves has no time.
    const days = run.seconds === null ? "no end" : (run.seconds / 86400).toFixed(1) + " days";
    fact(days, "of " + run.tokens.toExponential(2) + " tokens");
    fact(percent(run.goodput),
         "goodput, saving every " + duration(run.save_interval_steps * plan.step_seconds));
    if (run.energy_mwh !== null) fact(number(Number(run.energy_mwh.toPrecision(3))) + " MWh", "energy");
    if (run.cost !== null) fact(number(Number(run.cost.toPrecision(3))), "cost");
  };

  const showNotes = () => {
    for (const line of [...plan.limits, ...plan.warnings]) find("notes").append(make("p", {text: line}));
  };

  // ---- memory: a bar for each pipeline rank, with a line at the usable memory
  const showMemory = () => {
    const skip = ["total"];
    const all = plan.stages.map((stage) => stage.memory_bytes);
    const kinds = Object.keys(all[0]).filter((k) => !skip.includes(k) && all.some((m) => m[k] > 0));
    const row = all.length > 24 ? 14 : 22, left = 60, width = 1000, height = row * all.length + 24;
    const most = 1.05 * Math.max(plan.usable_memory_bytes, ...all.map((m) => m.total));
    const x = (value) => left + ((width - left - 90) * value) / most;
    const picture = svg("svg", {viewBox: "0 0 " + width + " " + height, width: "100%", role: "img",
                                style: "min-width:640px", "aria-label": "memory by pipeline rank"});
    all.forEach((memory, rank) => {
      const y = rank * row;
      picture.append(text(0, y + row - 8, "rank " + rank));
      let at = 0;
      kinds.forEach((kind, i) => {
        if (!(memory[kind] > 0)) return;
        const bar = svg("rect", {x: x(at), y: y + 1, width: Math.max(0.5, x(at + memory[kind]) - x(at)),
                                 height: row - 4, fill: distinct(i)});
        hint(bar, "rank " + rank + ", " + words(kind) + ": " + bytes(memory[kind]));
        picture.append(bar);
        at += memory[kind];
      });
      picture.append(text(x(at) + 5, y + row - 8, bytes(memory.total)));
    });
    const limit = x(plan.usable_memory_bytes);
    const usable = bytes(plan.usable_memory_bytes) + " usable";
    picture.append(svg("line", {x1: limit, x2: limit, y1: 0, y2: height - 18, stroke: "var(--mark)",
                                "stroke-width": 2}),
                   text(limit, height - 4, usable, {"text-anchor": "middle"}));
    find("memory").replaceChildren(picture);
    const legend = kinds.map((kind, i) =>
      make("span", {}, make("i", {class: "swatch", style: "background:" + distinct(i)}),
           " " + words(kind) + "  "));
    find("memory-legend").replaceChildren(...legend);
  };

  const showTimeline = () => {
    const picture = find("timeline-picture");
    find("timeline").append(...picture.childNodes);
    picture.remove();
  };

  const showParts = () => {
    const parts = Object.entries(plan.parts).filter(([, part]) => part.seconds > 5e-7);
    for (const [name, part] of parts) {
      const fraction = part.seconds / plan.step_seconds;
      const label = make("span", {text: words(name) + ", " + seconds(part.seconds)});
      const bar = make("i", {style: "width:" + (100 * fraction).toFixed(2) + "%"});
      find("parts").append(make("div", {class: "bar"}, label, bar, make("em", {text: percent(fraction)})));
    }
  };

  const showLinks = () => {
    if (!links.length) return find("links-section").remove();
    const cell = (value, unit) => (value > 0 ? unit(value) : "");
    table("links", ["part", "fast domain", "network", "seconds", "hidden"],
          links.map((l) => [words(l.part), cell(l.fast_bytes, bytes), cell(l.network_bytes, bytes),
                            cell(l.seconds, seconds), cell(l.hidden_seconds, seconds)]), [1, 2, 3, 4]);
  };

  const showChanges = () => {
    find("changes-title").textContent =
      plan.fits ? "Changes that make it faster" : "Changes after which it fits";
    if (!plan.changes.length) return find("changes-section").remove();
    const price = (c) => {
      const more = c.step_seconds - plan.step_seconds;
      const part = ((100 * more) / plan.step_seconds).toFixed(0);
      return (more < 0 ? "-" : "+") + seconds(Math.abs(more)) + " (" + part + "%)";
    };
    table("changes", ["change", "step", "price", "memory", "overrides"],
          plan.changes.map((c) => [c.name, seconds(c.step_seconds), price(c), bytes(c.memory_bytes),
                                   shellLine(c.overrides)]), [1, 2, 3]);
  };

  // ---- the Pareto front: time to the right, memory upwards
  const showFront = () => {
    const layouts = search ? search.layouts : [];
    if (!layouts.length) return find("front-section").remove();
    find("front-hint").textContent =
      search.tried + " layouts tried, " + search.fitting + " fit by formula; filled: on the Pareto front";
    const width = 1000, height = 300, left = 70, bottom = 34;
    const here = [plan.step_seconds, plan.memory_bytes.total];
    const points = [...layouts.map((l) => [l.step_seconds, l.memory_bytes.total]), here];
    const times = points.map((p) => Math.log10(p[0]));
    const low = Math.min(...times) - 0.03, high = Math.max(...times) + 0.03;
    const most = 1.08 * Math.max(...points.map((p) => p[1]));
    const x = (time) => left + ((width - left - 20) * (Math.log10(time) - low)) / (high - low);
    const y = (memory) => (height - bottom) * (1 - memory / most) + 4;
    const picture = svg("svg", {viewBox: "0 0 " + width + " " + height, width: "100%", role: "img",
                                style: "min-width:640px", "aria-label": "layouts by memory and time"});
    for (let i = 0; i <= 4; ++i) {
      const value = (most * i) / 4;
      const across = {x1: left, x2: width - 20, y1: y(value), y2: y(value), stroke: "var(--grid)"};
      picture.append(svg("line", across), text(left - 6, y(value) + 4, bytes(value), {"text-anchor": "end"}));
    }
    for (const time of Charts.ticksBetween(low, high, true))
      picture.append(text(x(time), height - 14, seconds(time), {"text-anchor": "middle"}));
    const front = layouts.filter((l) => l.pareto_front);
    const path = front.map((l) => x(l.step_seconds) + "," + y(l.memory_bytes.total)).join(" ");
    const line = {points: path, fill: "none", stroke: "var(--accent)", "stroke-dasharray": "4 3"};
    picture.append(svg("polyline", line));
    layouts.forEach((l, i) => {
      const at = {cx: x(l.step_seconds), cy: y(l.memory_bytes.total), r: 6, stroke: "var(--accent)",
                  fill: l.pareto_front ? "var(--accent)" : "var(--card)", "stroke-width": 1.5};
      const point = svg("circle", at);
      hint(point, i + 1 + ": " + seconds(l.step_seconds) + ", " + bytes(l.memory_bytes.total) + "\n" +
                  shellLine(l.overrides));
      picture.append(point, text(at.cx + 9, at.cy + 4, l.is_recipe ? i + 1 + ", the recipe" : i + 1));
    });
    const mark = svg("rect", {x: x(here[0]) - 5, y: y(here[1]) - 5, width: 10, height: 10,
                              fill: "var(--mark)"});
    hint(mark, "the recipe as it is: " + seconds(here[0]) + ", " + bytes(here[1]));
    picture.append(mark);
    // A recipe that fits is one of the layouts.
    if (!layouts.some((l) => l.is_recipe)) picture.append(text(x(here[0]) + 9, y(here[1]) + 4, "the recipe"));
    find("front").replaceChildren(picture);
    const differs = (l) =>
      Object.entries(l.seconds_more_than_first).filter(([, s]) => Math.abs(s) > 1e-6).slice(0, 3)
        .map(([name, s]) => words(name) + (s < 0 ? " -" : " +") + seconds(Math.abs(s))).join(", ");
    table("layouts", ["", "step", "memory", "MFU", "front", "differs from the first by", "overrides"],
          layouts.map((l, i) => [String(i + 1), seconds(l.step_seconds), bytes(l.memory_bytes.total),
                                 percent(l.mfu), l.pareto_front ? "*" : "", i ? differs(l) : "",
                                 shellLine(l.overrides) || "the recipe as it is"]), [1, 2, 3]);
  };

  showHead();
  showNotes();
  showTimeline();
  showParts();
  showLinks();
  showChanges();
  // Colors follow the scheme.
  Charts.start(() => (showMemory(), showFront()));
})();
