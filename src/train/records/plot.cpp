#include "train/records/plot.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <vector>

#include "base/error.hpp"
#include "base/text.hpp"
#include "train/records/curve.hpp"
#include "train/records/metrics.hpp"
#include "train/records/run_list.hpp"

namespace capstan::records {

namespace {

struct Curve {
  std::string run;
  size_t color = 0;
  bool dashed = false;  // validation
  std::vector<Point> points;
};
struct Chart {
  const char* title;
  const char* number;  // name in the rows of logged steps
  bool logarithmic;
  std::vector<Curve> curves;
};

constexpr std::array kColors{"#3366cc", "#dc3912", "#109618", "#ff9900", "#990099",
                             "#0099c6", "#dd4477", "#66aa00", "#b82e2e", "#316395"};
constexpr size_t kMostPoints = 1500;  // of a curve
constexpr double kWidth = 720, kHeight = 260, kLeft = 64, kRight = 12, kTop = 10, kBottom = 32;

std::string number(double value) {
  std::array<char, 32> text;
  const double size = std::abs(value);
  std::snprintf(text.data(), text.size(), size != 0 && (size >= 1e5 || size < 1e-3) ? "%.3g" : "%.5g", value);
  return text.data();
}
std::string coordinate(double value) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.1f", value);
  return text.data();
}

// Round numbers between low and high, about five.
std::vector<double> ticks(double low, double high) {
  const double raw = (high - low) / 5, power = std::pow(10, std::floor(std::log10(raw))), part = raw / power;
  const double step = power * (part < 1.5 ? 1 : part < 3.5 ? 2 : part < 7.5 ? 5 : 10);
  std::vector<double> result;
  // Counted, not added up: between neighbouring numbers a step may be too small to move one.
  const double first = std::ceil(low / step) * step;
  for (int i = 0; i < 20 && std::isfinite(step); ++i) {
    const double t = first + i * step;
    if (!(t <= high + step * 1e-9)) break;
    if (i > 0 && t <= result.back()) break;
    result.push_back(std::abs(t) < step * 1e-9 ? 0 : t);
  }
  return result;
}

std::string svg(const Chart& chart) {
  const auto shown = [&](double y) { return chart.logarithmic ? std::log10(y) : y; };
  double x0 = INFINITY, x1 = -INFINITY, y0 = INFINITY, y1 = -INFINITY;
  for (const Curve& curve : chart.curves)
    for (const Point& p : curve.points) {
      x0 = std::min(x0, p.x), x1 = std::max(x1, p.x);
      y0 = std::min(y0, shown(p.y)), y1 = std::max(y1, shown(p.y));
    }
  if (!(x1 >= x0)) return {};
  if (x1 == x0) x0 -= 1, x1 += 1;
  const double margin = y1 == y0 ? std::max(1e-6, std::abs(y0) * 0.1) : 0.05 * (y1 - y0);
  y0 -= margin, y1 += margin;
  const auto px = [&](double x) { return kLeft + (x - x0) / (x1 - x0) * (kWidth - kLeft - kRight); };
  const auto py = [&](double y) { return kTop + (y1 - y) / (y1 - y0) * (kHeight - kTop - kBottom); };

  std::string out = "<section><h2>" + std::string(chart.title) + "</h2>\n<svg viewBox=\"0 0 " +
                    coordinate(kWidth) + " " + coordinate(kHeight) + "\">\n";
  for (const double t : ticks(y0, y1))
    out += "<line class=\"g\" x1=\"" + coordinate(kLeft) + "\" x2=\"" + coordinate(kWidth - kRight) +
           "\" y1=\"" + coordinate(py(t)) + "\" y2=\"" + coordinate(py(t)) + "\"/><text x=\"" +
           coordinate(kLeft - 6) + "\" y=\"" + coordinate(py(t) + 4) + "\" class=\"y\">" +
           number(chart.logarithmic ? std::pow(10, t) : t) + "</text>\n";
  for (const double t : ticks(x0, x1))
    out += "<line class=\"g\" y1=\"" + coordinate(kTop) + "\" y2=\"" + coordinate(kHeight - kBottom) +
           "\" x1=\"" + coordinate(px(t)) + "\" x2=\"" + coordinate(px(t)) + "\"/><text x=\"" +
           coordinate(px(t)) + "\" y=\"" + coordinate(kHeight - kBottom + 16) + "\" class=\"x\">" +
           number(t) + "</text>\n";
  for (const Curve& curve : chart.curves) {
    if (curve.points.empty()) continue;
    const std::string color = kColors[curve.color % kColors.size()];
    const Point& last = curve.points.back();
    if (curve.points.size() == 1)
      out += "<circle r=\"3\" fill=\"" + color + "\" cx=\"" + coordinate(px(last.x)) + "\" cy=\"" +
             coordinate(py(shown(last.y))) + "\">";
    else
      out += "<polyline stroke=\"" + color + "\"" + (curve.dashed ? " stroke-dasharray=\"5 3\"" : "") +
             " points=\"";
    if (curve.points.size() > 1) {
      for (const Point& p : thinned(curve.points, kMostPoints))
        out += coordinate(px(p.x)) + "," + coordinate(py(shown(p.y))) + " ";
      out += "\">";
    }
    out += "<title>" + html_escaped(curve.run) + (curve.dashed ? ", validation" : "") + ": " +
           number(last.y) + " at step " + number(last.x) + "</title>" +
           (curve.points.size() == 1 ? "</circle>\n" : "</polyline>\n");
  }
  return out + "</svg></section>\n";
}

}  // namespace

std::string plot_html(std::span<const std::filesystem::path> runs) {
  std::array<Chart, 5> charts{{{"Loss (dashed: validation)", "loss", false, {}},
                               {"Gradient norm", "grad_norm", true, {}},
                               {"Tokens per second", "tokens_per_second", false, {}},
                               {"Memory, MiB", "memory_bytes", false, {}},
                               {"Learning rate", "learning_rate", false, {}}}};
  std::string legend;
  for (size_t r = 0; r < runs.size(); ++r) {
    const RunSummary run = summarise(runs[r]);
    const std::string name = run.path.string();
    for (Chart& chart : charts) chart.curves.push_back({name, r, false, {}});
    Curve validation{name, r, true, {}};
    std::error_code missing;
    if (std::filesystem::exists(runs[r] / "metrics.jsonl", missing))
      read_metrics(runs[r] / "metrics.jsonl", [&](const ReadRow& row) {
        if (!row.step) return;
        const auto x = static_cast<double>(*row.step);
        const auto usable = [](double y, bool logarithmic) {
          return std::isfinite(y) && (!logarithmic || y > 0);
        };
        if (row.event == "validation" && usable(row.number("loss"), false))
          validation.points.push_back({x, row.number("loss")});
        if (!row.event.empty()) return;
        for (Chart& chart : charts) {
          const double scale = chart.number == std::string_view("memory_bytes") ? 1.0 / (1 << 20) : 1.0;
          if (const double y = row.number(chart.number) * scale; usable(y, chart.logarithmic))
            chart.curves.back().points.push_back({x, y});
        }
      });
    charts[0].curves.push_back(std::move(validation));
    legend += "<tr><td style=\"color:" + std::string(kColors[r % kColors.size()]) + "\">&#9632;</td><td>" +
              html_escaped(name) + "</td><td>" + html_escaped(run.recipe) + "</td><td>" +
              std::string(name_of(run.state)) + "</td><td>" + (run.step ? std::to_string(*run.step) : "-") +
              "</td><td>" + (run.last_loss ? number(*run.last_loss) : "-") + "</td><td>" +
              html_escaped(run.started) + "</td></tr>\n";
  }
  std::string body;
  for (const Chart& chart : charts) body += svg(chart);
  if (body.empty()) body = "<p>No step has been logged yet.</p>\n";
  return "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>Capstan "
         "runs</title>\n<style>\n"
         "body{font:14px sans-serif;margin:24px;color:#222}h2{font-size:15px;margin:4px 0}\n"
         "main{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:18px}\n"
         "svg{width:100%;border:1px solid #ddd}polyline{fill:none;stroke-width:1.6}.g{stroke:#eee}\n"
         "text{font-size:11px;fill:#555}.y{text-anchor:end}.x{text-anchor:middle}\n"
         "table{border-collapse:collapse;margin-bottom:18px}td,th{padding:3px 10px;text-align:left}\n"
         "</style></head><body>\n<table><tr><th></th><th>Run</th><th>Recipe</th><th>State</th><th>Step</th>"
         "<th>Loss</th><th>Started</th></tr>\n" +
         legend + "</table>\n<main>\n" + body + "</main></body></html>\n";
}

}  // namespace capstan::records
