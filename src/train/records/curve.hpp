// Curves for pages, reduced to the points that a chart can show.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace capstan::records {

struct Point {
  double x = 0, y = 0;
};
// Reduces a curve to about `most` points: the lowest and the highest point of each of `most / 2` intervals,
// in order, and both ends.
std::vector<Point> thinned(const std::vector<Point>& points, size_t most);

// "s":[x…],"v":[y…] of the points that are finite, thinned, with six digits: a part of a JSON object.
std::string curve_json(const std::vector<Point>& points, size_t most);

// Text for the inside of an element, or of an attribute in double quotes.
std::string html_escaped(std::string_view text);

}  // namespace capstan::records
