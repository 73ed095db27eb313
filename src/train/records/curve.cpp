#include "train/records/curve.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/text.hpp"

namespace capstan::records {

std::vector<Point> thinned(const std::vector<Point>& points, size_t most) {
  if (points.size() <= most) return points;
  std::vector<Point> kept;
  const size_t intervals = std::max<size_t>(1, most / 2);
  for (size_t i = 0; i < intervals; ++i) {
    const auto begin = points.begin() + static_cast<std::ptrdiff_t>(i * points.size() / intervals);
    const auto end = points.begin() + static_cast<std::ptrdiff_t>((i + 1) * points.size() / intervals);
    auto [low, high] =
        std::minmax_element(begin, end, [](const Point& a, const Point& b) { return a.y < b.y; });
    if (low > high) std::swap(low, high);
    if (i == 0 && low != points.begin()) kept.push_back(points.front());
    kept.push_back(*low);
    if (high != low) kept.push_back(*high);
    if (i + 1 == intervals && high != points.end() - 1) kept.push_back(points.back());
  }
  return kept;
}

std::string curve_json(const std::vector<Point>& points, size_t most) {
  std::vector<Point> finite;
  for (const Point& point : points)
    if (std::isfinite(point.y)) finite.push_back(point);
  std::string xs, ys;
  for (const Point& point : thinned(finite, most)) {
    if (!xs.empty()) xs += ',', ys += ',';
    xs += std::to_string(static_cast<int64_t>(point.x));
    ys += significant(point.y, 6);
  }
  return "\"s\":[" + xs + "],\"v\":[" + ys + "]";
}

std::string html_escaped(std::string_view text) {
  std::string out;
  for (const char c : text)
    if (c == '<')
      out += "&lt;";
    else if (c == '&')
      out += "&amp;";
    else if (c == '"')
      out += "&quot;";
    else
      out += c;
  return out;
}

}  // namespace capstan::records
