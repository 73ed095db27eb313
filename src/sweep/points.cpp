#include "sweep/points.hpp"

#include <algorithm>
#include <set>

#include "base/error.hpp"
#include "base/philox.hpp"
#include "base/text.hpp"
#include "config/core/field.hpp"
#include "sweep/sobol.hpp"
#include "sweep/values.hpp"

namespace capstan::sweep {

namespace {

// Purpose of the random numbers, distinct from those of base/philox.hpp.
constexpr uint32_t kPurpose = 8;

class Space {
 public:
  explicit Space(const Definition& definition) : d_(definition) {
    for (const Axis& axis : d_.axes) {
      sizes_.push_back(static_cast<int64_t>(axis.values.size()));
      const config::FieldInfo* field = config::schema().find_field(axis.path);
      integer_.push_back(field && field->type->kind == config::Type::Kind::integer);
    }
    if (!d_.link.empty()) sizes_.push_back(static_cast<int64_t>(d_.link.size()));
  }
  size_t dimensions() const { return sizes_.size(); }
  // 0: any value.
  int64_t size(size_t dimension) const { return sizes_[dimension]; }

  // coordinates: of the axes that take any value, each in [0, 1).
  Values at(const std::vector<int64_t>& indices, const std::vector<double>& coordinates = {}) const {
    Values values;
    for (size_t i = 0; i < d_.axes.size(); ++i) {
      const Axis& axis = d_.axes[i];
      values.emplace_back(axis.path, axis.continuous()
                                         ? point_text(at_fraction(axis, coordinates[i]), integer_[i])
                                         : axis.values[static_cast<size_t>(indices[i])]);
    }
    if (d_.link.empty()) return values;
    const Values& linked = d_.link[static_cast<size_t>(indices.back())];
    values.insert(values.end(), linked.begin(), linked.end());
    return values;
  }
  Values at(const std::vector<double>& coordinates) const {
    std::vector<int64_t> indices;
    for (size_t i = 0; i < sizes_.size(); ++i)
      indices.push_back(
          std::min(static_cast<int64_t>(coordinates[i] * static_cast<double>(sizes_[i])), sizes_[i] - 1));
    return at(indices, coordinates);
  }
  // Adds the point, or counts it where `exclude` names it.
  void add(Points& out, Values point) const {
    if (std::any_of(d_.exclude.begin(), d_.exclude.end(), [&](const auto& row) { return holds(row, point); }))
      ++out.excluded;
    else
      out.points.push_back(std::move(point));
  }

 private:
  const Definition& d_;
  std::vector<int64_t> sizes_;
  std::vector<bool> integer_;
};

Points grid(const Definition& d, const Space& space) {
  Points out;
  double product = 1;
  for (size_t i = 0; i < space.dimensions(); ++i) product *= static_cast<double>(space.size(i));
  if (product > static_cast<double>(kMaxPoints))
    fail(ErrorCode::config,
         "the grid has " + human_count(product) + " points, and a sweep has at most " +
             with_separators(kMaxPoints),
         "draw from it: `method: random` and `trials: N`");
  std::vector<int64_t> indices(space.dimensions());
  for (auto left = static_cast<int64_t>(product); left > 0; --left) {
    space.add(out, space.at(indices));
    // The last one runs fastest.
    for (size_t i = indices.size(); i-- > 0;) {
      if (++indices[i] < space.size(i)) break;
      indices[i] = 0;
    }
  }
  const auto all = static_cast<int64_t>(out.points.size());
  out.exhausted = d.trials && *d.trials > all;
  if (!d.trials || *d.trials >= all) return out;
  // A random part of the grid, in its order: those whose random number is smallest.
  std::vector<std::pair<uint64_t, int64_t>> drawn;
  for (int64_t i = 0; i < all; ++i)
    drawn.emplace_back(
        PhiloxSequence(philox_key(static_cast<uint64_t>(d.seed), kPurpose, static_cast<uint64_t>(i)))
            .next64(),
        i);
  std::sort(drawn.begin(), drawn.end());
  drawn.resize(static_cast<size_t>(*d.trials));
  std::sort(drawn.begin(), drawn.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  std::vector<Values> kept;
  kept.reserve(drawn.size());
  for (const auto& [ignored, at] : drawn) kept.push_back(std::move(out.points[static_cast<size_t>(at)]));
  out.points = std::move(kept);
  out.grid = all;
  return out;
}

Points side_by_side(const Definition& d, const Space& space) {
  Points out;
  const size_t rows = space.dimensions() ? static_cast<size_t>(space.size(0)) : 1;
  for (size_t row = 0; row < rows; ++row)
    space.add(out, space.at(std::vector<int64_t>(space.dimensions(), static_cast<int64_t>(row))));
  if (d.trials && static_cast<size_t>(*d.trials) < out.points.size())
    out.points.resize(static_cast<size_t>(*d.trials));
  return out;
}

Points drawn(const Definition& d, const Space& space) {
  Points out;
  const size_t dimensions = space.dimensions();
  if (dimensions == 0)
    fail(ErrorCode::config,
         "method " + std::string(config::enum_name(d.method)) + " has no axis to draw from");
  if (d.method == Method::sobol && dimensions > Sobol::kMaxDimensions)
    fail(ErrorCode::config,
         "the Sobol sequence has " + std::to_string(Sobol::kMaxDimensions) + " dimensions here, and " +
             std::to_string(dimensions) + " vary",
         "`method: random` takes any number");
  Sobol sobol(static_cast<int>(std::min<size_t>(dimensions, Sobol::kMaxDimensions)));
  std::set<Values> seen;
  const int64_t wanted = *d.trials, most = 100 * wanted + 1000;
  int64_t draw = 0;
  for (; static_cast<int64_t>(out.points.size()) < wanted && draw < most; ++draw) {
    std::vector<double> coordinates;
    if (d.method == Method::sobol) {
      coordinates = sobol.next();
    } else {
      PhiloxSequence random(philox_key(static_cast<uint64_t>(d.seed), kPurpose, static_cast<uint64_t>(draw)));
      for (size_t i = 0; i < dimensions; ++i) coordinates.push_back(random.uniform());
    }
    Values point = space.at(coordinates);
    if (seen.insert(point).second) space.add(out, std::move(point));
  }
  out.exhausted = static_cast<int64_t>(out.points.size()) < wanted;
  return out;
}

}  // namespace

Points points_of(const Definition& definition) {
  const Space space(definition);
  Points points = definition.method == Method::grid   ? grid(definition, space)
                  : definition.method == Method::list ? side_by_side(definition, space)
                                                      : drawn(definition, space);
  const size_t seeds = std::max<size_t>(1, definition.seeds.size());
  if (points.points.size() * seeds > static_cast<size_t>(kMaxPoints))
    fail(ErrorCode::config, std::to_string(points.points.size()) + " points with " + std::to_string(seeds) +
                                " seeds are more than " + with_separators(kMaxPoints) + " trials");
  return points;
}

}  // namespace capstan::sweep
