// A map of the load of each expert: a row for each layer, a column for each expert, at a step of a run.
const ExpertMap = (() => {
  const {finite, make, number, color, tip, frame} = Charts;

  const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const mixed = (from, to, part) => {
    const a = channels(color(from)), b = channels(color(to));
    return "rgb(" + a.map((x, i) => Math.round(x + (b[i] - x) * part)).join(",") + ")";
  };
  // Balanced experts have the color of the grid; idle ones tend to one color, busy ones to another, as the
  // logarithm of their load.
  const shade = (load, top) => {
    if (!finite(load)) return color("card");
    if (load <= 1) return mixed("grid", "accent", 1 - load);
    return mixed("grid", "mark", Math.min(1, Math.log(load) / Math.log(top)));
  };

  // runs: those that have loads.
  class HeatMap {
    constructor(parent, runs) {
      Object.assign(this, {runs, run: runs[0], at: 0, pointed: null});
      const section = make("section", {class: "wide"});
      const tools = make("div", {class: "tools"});
      const title = "Load of each expert (1: balanced)";
      section.append(make("div", {class: "head"}, make("h2", {text: title}), tools));
      parent.append(section);
      if (runs.length > 1) tools.append(this.chooser());
      this.slider = make("input", {type: "range", min: "0", step: "1", "aria-label": "step"});
      this.slider.addEventListener("input", () => this.show(this.run, Number(this.slider.value)));
      this.step = make("span");
      this.scale = make("span", {class: "scale"});
      this.most = make("span");
      tools.append(make("label", {}, this.slider, this.step), make("span", {}, "0 ", this.scale, this.most));
      const layers = Math.max(...runs.map((run) => run.experts.layers.length));
      const height = Math.min(460, Math.max(130, 34 + 18 * layers));
      this.chart = Charts.chart(section, height, title, {
        draw: (c, self) => this.draw(c, self),
        mark: (c, self) => this.mark(c, self),
        hover: (x, y, event) => {
          this.pointed = x === null ? null : this.cell(x, y);
          tip(this.pointed ? this.describe() : "", event);
          this.chart.mark();
        },
      });
      this.choose(this.run);
    }
    chooser() {
      const list = make("select", {"aria-label": "run"});
      this.runs.forEach((run, i) => list.append(make("option", {value: i, text: run.name})));
      list.addEventListener("change", () => (this.choose(this.runs[list.value]), this.redraw()));
      return list;
    }
    // A run, at its last step; the scale ends with its greatest load, at 2 at least.
    choose(run) {
      const last = run.experts.steps.length - 1;
      this.top = 2;
      for (const loads of run.experts.loads)
        for (const load of loads) this.top = Math.max(this.top, load ?? 0);
      this.slider.max = last;
      this.slider.value = last;
      this.slider.style.display = last > 0 ? "" : "none";
      this.most.textContent = " " + number(this.top);
      Object.assign(this, {run, at: last});
      this.step.textContent = "step " + run.experts.steps[last];
    }
    show(run, at) {
      Object.assign(this, {run, at});
      this.step.textContent = "step " + run.experts.steps[at];
      this.redraw();
    }
    redraw() { this.chart.draw(), this.chart.mark(); }

    load(layer, expert) {
      const {loads, experts} = this.run.experts;
      return loads[this.at][layer * experts + expert] ?? NaN;
    }
    // Left and top end of a cell, in pixels of the canvas.
    x(expert) { return Math.round(this.area.left + (expert / this.run.experts.experts) * this.area.w); }
    y(layer) { return Math.round(this.area.top + (layer / this.run.experts.layers.length) * this.area.h); }
    draw(c, self) {
      const {layers, experts} = this.run.experts;
      const every = Math.ceil(layers.length / ((self.height - 34) / 14)), space = (self.width - 60) / experts;
      // The labels of experts have room.
      let across = 1;
      while (across * space < 30 && across < experts) across *= 2;
      const rows = layers.map((layer, i) => [1 - (i + 0.5) / layers.length, String(layer)])
                       .filter((_, i) => i % every === 0);
      const columns = [];
      for (let e = 0; e < experts; e += across) columns.push([(e + 0.5) / experts, String(e)]);
      this.area = frame(c, self, 44, 12, 6, 26, columns, rows);
      c.fillStyle = color("soft"), c.textAlign = "right", c.textBaseline = "top";
      c.fillText("expert", this.area.left - 6, this.area.top + this.area.h + 6);
      for (let layer = 0; layer < layers.length; ++layer)
        for (let expert = 0; expert < experts; ++expert) {
          const x = this.x(expert), y = this.y(layer), gap = space > 6 ? 1 : 0;
          const width = this.x(expert + 1) - x - gap, height = this.y(layer + 1) - y - gap;
          c.fillStyle = shade(this.load(layer, expert), this.top);
          c.fillRect(x, y, Math.max(1, width), Math.max(1, height));
        }
      const stops = [0, 0.5, 1, 1 + (this.top - 1) / 4, this.top];
      const shades = stops.map((load, i) => shade(load, this.top) + " " + 25 * i + "%");
      this.scale.style.background = "linear-gradient(90deg," + shades.join(",") + ")";
    }
    mark(c, self) {
      c.clearRect(0, 0, self.width, self.height);
      if (!this.pointed) return;
      const {layer, expert} = this.pointed;
      c.strokeStyle = color("ink"), c.lineWidth = 2;
      c.strokeRect(this.x(expert), this.y(layer), Math.max(2, this.x(expert + 1) - this.x(expert)),
                   Math.max(2, this.y(layer + 1) - this.y(layer)));
    }
    cell(x, y) {
      const {layers, experts} = this.run.experts;
      const layer = Math.floor(((y - this.area.top) / this.area.h) * layers.length);
      const expert = Math.floor(((x - this.area.left) / this.area.w) * experts);
      const inside = layer >= 0 && layer < layers.length && expert >= 0 && expert < experts;
      return inside ? {layer, expert} : null;
    }
    describe() {
      const {layers, experts} = this.run.experts, {layer, expert} = this.pointed;
      const load = this.load(layer, expert);
      return "layer " + layers[layer] + ", expert " + expert + "\n" + number(load) + " × an equal load, " +
             number(Number(((100 * load) / experts).toPrecision(3))) + " % of the choices";
    }
  }

  // Adds the map where a run has experts.
  const add = (parent, runs) => {
    const with_experts = runs.filter((run) => run.experts);
    if (with_experts.length) new HeatMap(parent, with_experts);
  };
  return {add};
})();
