#include "config/core/resolve.hpp"

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/error.hpp"
#include "config/core/composer.hpp"
#include "config/core/convert.hpp"
#include "config/core/hash.hpp"
#include "config/core/interpolate.hpp"
#include "config/core/merge.hpp"
#include "config/core/own_part.hpp"
#include "config/tools/edit.hpp"
#include "config/tools/emit.hpp"

namespace capstan::config {

namespace {

constexpr size_t kMaxDiagnostics = 300;
constexpr size_t kSettled = static_cast<size_t>(-1);

class Resolver {
 public:
  Resolver(const Schema& schema, const Library& library, void* root, const Request& request,
           const std::string* text = nullptr)
      : schema_(schema),
        root_(root),
        request_(request),
        composed_(Composer(schema, library, request, text).run()) {
    now_ = request.now ? *request.now : static_cast<int64_t>(std::time(nullptr));
    out_.recipe_name = composed_.recipe_name;
    leaves_.resize(schema.fields().size());
    for (size_t i = 0; i < leaves_.size(); ++i) {
      leaves_[i].field = schema.fields()[i];
      index_.emplace(leaves_[i].field, i);
    }
    for (const Write& write : composed_.writes) leaves_[index_.at(write.field)].writes.push_back(&write);
    for (const FieldInfo* field : composed_.ambiguous) leaves_[index_.at(field)].failed = true;
  }

  Resolved run() {
    if (!composed_
             .malformed) {  // what a broken file would have said is unknown: anything more would be guesswork
      switch_sections();
      for (auto& leaf : leaves_) merge(leaf);
      choose_alternatives();
      add_ranks_and_name();
      const bool unknown = mark_unknown();
      choose_variants();
      for (size_t i = 0; i < leaves_.size(); ++i) evaluate(i);
      resolve_deferred();
      check_required();
      if (!unknown) check_alternatives();
      check_rules();
      // What is imposed on a recipe may leave some of it without effect, and means to.
      if (request_.imposed.empty() && !unknown) {
        check_effects();
        note_hidden_presets();
      }
      record();
      if (out_.ok()) record_own_part();
    }
    out_.malformed = composed_.malformed;
    out_.bad_words = composed_.bad_words;
    for (size_t i = 0; i < composed_.preset_of.size(); ++i)
      if (!composed_.preset_of[i].empty()) out_.presets[schema_.sections()[i].name] = composed_.preset_of[i];
    out_.sources = std::move(composed_.sources);
    out_.diagnostics.insert(out_.diagnostics.begin(), composed_.diagnostics.begin(),
                            composed_.diagnostics.end());
    sort_diagnostics(out_.diagnostics);
    if (out_.diagnostics.size() > kMaxDiagnostics) {
      const size_t more = out_.diagnostics.size() - kMaxDiagnostics;
      const Level level = out_.diagnostics.front().level;
      out_.diagnostics.resize(kMaxDiagnostics);
      Diagnostic rest;
      rest.level = level;
      rest.message = "and " + std::to_string(more) + " more";
      out_.diagnostics.push_back(std::move(rest));
    }
    return std::move(out_);
  }

 private:
  enum class State : uint8_t { waiting, active, deferred, done };

  struct Leaf {
    const FieldInfo* field = nullptr;
    std::vector<const Write*> writes;
    std::optional<Node> node;       // merged; nullopt: nothing was written
    const Write* winner = nullptr;  // the last write that counts
    State state = State::waiting;
    bool failed = false;      // wrong, and reported
    bool dropped = false;     // not a field of the variant in effect
    bool superseded = false;  // another field of a higher layer gives it (Field::instead_of)
    bool from_ranks = false, from_name = false, derived = false, environment = false;
  };

  Diagnostic& report(Level level, const char* code, std::string message, Place place = {}) {
    Diagnostic diagnostic;
    diagnostic.level = level;
    diagnostic.code = code;
    diagnostic.message = std::move(message);
    diagnostic.place = place;
    out_.diagnostics.push_back(std::move(diagnostic));
    return out_.diagnostics.back();
  }
  Leaf* leaf(const std::string& path) {
    const FieldInfo* field = schema_.find_spelling(path);
    return field ? &leaves_[index_.at(field)] : nullptr;
  }
  const Layer& layer(const Write& write) const { return composed_.layers[write.layer]; }
  bool is_explicit(const Write& write) const { return layer(write).rank != Layer::Rank::preset; }
  bool section_on(const FieldInfo& field) const {
    return schema_.sections()[field.section_index].at(root_) != nullptr;
  }

  // ---- sections that may be off, and variants ----------------------------------------------------------------------

  // A value that comes with Capstan: whoever chooses another kind over it did not write it and has nothing to take out.
  bool shipped(const Place& place) const {
    return place.known() &&
           composed_.sources[static_cast<size_t>(place.source)].kind == Source::Kind::embedded;
  }

  void switch_sections() {
    for (const auto& section : schema_.sections()) {
      if (!section.optional) continue;
      const auto& choices = composed_.choices[section.index];
      bool on = !choices.empty() && !choices.back().off;
      for (auto& write : composed_.writes) {
        if (write.dead || write.field->section_index != section.index || !is_explicit(write)) continue;
        if (on || choices.empty() || write.layer > choices.back().layer) {
          on = true;
          continue;
        }
        write.take_back(choices.back().layer);
        const std::string place = place_text(write.place, composed_.sources, false);
        if (write.layer == choices.back().layer) {
          report(Level::error, "C0109",
                 "`" + section.name + "` is switched off, and `" + write.field->path + "` is set",
                 write.place)
              .related(choices.back().place, "switched off here");
        } else if (!shipped(write.place)) {
          report(Level::note, "C0701",
                 "`" + write.field->path + "` from " + place + " is dropped: `" + section.name +
                     "` is switched off at " + place_text(choices.back().place, composed_.sources, false));
        }
      }
      if (on) section.ensure(root_);
    }
  }

  void choose_variants() {
    for (const auto& section : schema_.sections()) {
      if (section.variant_field.empty() || !section.at(root_)) continue;
      Leaf& chooser = leaves_[index_.at(section.find(section.variant_field))];
      evaluate(index_.at(chooser.field));
      if (chooser.failed) continue;
      const std::string variant = schema_.load(root_, *chooser.field).text;
      // The layer that decided: the explicit write, or the choice of the preset that holds it.
      const auto& choices = composed_.choices[section.index];
      size_t decided = 0;
      if (chooser.winner && is_explicit(*chooser.winner))
        decided = chooser.winner->layer + 1;
      else if (!choices.empty())
        decided = choices.back().layer + 1;
      for (const auto& field : section.fields) {
        if (field.variants.empty() ||
            std::find(field.variants.begin(), field.variants.end(), variant) != field.variants.end())
          continue;
        Leaf& leaf = leaves_[index_.at(&field)];
        leaf.dropped = true;
        leaf.node.reset();
        leaf.winner = nullptr;
        for (const Write* write : leaf.writes) {
          if (write->dead || !is_explicit(*write)) continue;
          if (write->layer + 1 < decided) {
            if (!request_.imposed.empty() || shipped(write->place)) continue;
            report(Level::note, "C0701",
                   "`" + field.path + "` from " + place_text(write->place, composed_.sources, false) +
                       " is dropped: `" + section.name + "` of kind `" + variant + "` has no such field");
          } else {
            std::string only;
            for (const auto& name : field.variants) only += (only.empty() ? "`" : ", `") + name + "`";
            auto& problem = report(
                Level::error, "C0110",
                "`" + field.path + "` is not a field of `" + section.name + "` of kind `" + variant + "`",
                write->place);
            problem.path = field.path;
            problem.help("it belongs to " + section.variant_field + " " + only);
          }
        }
      }
    }
  }

  // ---- merge -------------------------------------------------------------------------------------------------------

  void merge(Leaf& leaf) {
    for (const Write* write : leaf.writes) {
      if (write->dead) continue;
      if (write->field->section_index < schema_.sections().size() && !section_on(*write->field)) continue;
      if (!apply_write(leaf.node, *write, out_.diagnostics)) {
        leaf.failed = true;
        continue;
      }
      leaf.winner = write;
    }
  }

  static bool gives_value(const Leaf& leaf) {
    return leaf.winner && leaf.node && leaf.node->kind != Node::Kind::null;
  }
  std::pair<Layer::Rank, size_t> strength(const Leaf& leaf) const {
    return {layer(*leaf.winner).rank, leaf.winner->layer};
  }

  // Of two ways to give one value the one of the higher layer counts; the other is as if it were not written.
  void choose_alternatives() {
    for (auto& one : leaves_) {
      if (one.field->instead_of.empty()) continue;
      Leaf& other = *leaf(one.field->instead_of);
      if (!gives_value(one) || !gives_value(other) || strength(one) == strength(other)) continue;
      Leaf& weaker = strength(one) < strength(other) ? one : other;
      weaker.node.reset();
      weaker.winner = nullptr;
      weaker.superseded = true;
    }
  }

  // Both in one layer have to agree.
  void check_alternatives() {
    for (const auto& one : leaves_) {
      if (one.field->instead_of.empty()) continue;
      const Leaf& other = *leaf(one.field->instead_of);
      if (!gives_value(one) || !gives_value(other) || one.failed || other.failed) continue;
      const Value value = schema_.load(root_, *other.field), derived = derived_value(other);
      if (value == derived) continue;
      auto& problem =
          report(Level::error, "C0111",
                 "`" + one.field->path + "` and `" + other.field->path + "` are both given and disagree",
                 one.winner->place);
      problem.path = one.field->path;
      problem.related(other.winner->place, "`" + other.field->path + "` is " +
                                               yaml_inline(*other.field->type, value) + " here, and " +
                                               yaml_inline(*other.field->type, derived) + " by `" +
                                               one.field->name + "`");
      problem.help("give one of the two");
    }
  }

  void add_ranks_and_name() {
    if (request_.ranks && !schema_.ranks_path().empty()) {
      Leaf& ranks = *leaf(schema_.ranks_path());
      ranks.node = Node::scalar(std::to_string(*request_.ranks), {});
      ranks.from_ranks = true;
      ranks.winner = nullptr;
    }
    Leaf* name = leaf("name");
    if (name && name->field->section.empty() && !name->node && name->field->type->kind == Type::Kind::text) {
      name->node = Node::scalar(out_.recipe_name, {}, true);
      name->node->raw = true;
      name->from_name = true;
    }
  }

  // One message for one cause: fields that an unreadable preset or base might have set count as wrong and reported. What
  // is said explicitly is checked all the same.
  bool mark_unknown() {
    bool any = false;
    for (Leaf& leaf : leaves_) {
      const SectionInfo& section = schema_.sections()[leaf.field->section_index];
      if (!composed_.incomplete && !composed_.unknown_presets[section.index]) continue;
      any = true;
      const bool given = leaf.from_ranks || leaf.from_name ||
                         (leaf.winner && is_explicit(*leaf.winner) && leaf.winner->op == Write::Op::set &&
                          leaf.winner->rest.empty());
      if (!given) leaf.failed = true;
    }
    return any;
  }

  // ---- evaluation --------------------------------------------------------------------------------------------------

  // Settles a leaf, its inputs first. One that is derived from a leaf further up in `active_` goes on waiting: returns the
  // lowest such place, or kSettled.
  size_t evaluate(size_t at) {
    Leaf& leaf = leaves_[at];
    if (leaf.state != State::waiting) return kSettled;
    if (leaf.node && !hash_ready_ && mentions_hash(*leaf.node)) {
      if (leaf.field->effect == Effect::io || leaf.field->effect == Effect::log) {
        leaf.state = State::deferred;
      } else {
        leaf.state = State::done;
        leaf.failed = true;
        report(Level::error, "C0405",
               "`${hash}` cannot be part of `" + leaf.field->path + "`, which the hash is made of",
               leaf.node->place);
      }
      return kSettled;
    }
    leaf.state = State::active;
    active_.push_back(at);
    const size_t waits = compute(leaf);
    active_.pop_back();
    leaf.state = waits == kSettled ? State::done : State::waiting;
    return waits;
  }

  size_t compute(Leaf& leaf) {
    if (leaf.failed || leaf.dropped || !section_on(*leaf.field)) return kSettled;
    const bool given = leaf.node && (leaf.node->kind != Node::Kind::null || leaf.node->empty);
    const Derivation* derivation =
        leaf.field->formula.empty() ? nullptr : schema_.find_derivation(leaf.field->path);
    if (given || (leaf.node && !derivation) || (leaf.node && !leaf.field->type->optional)) {
      convert_leaf(leaf);
      return kSettled;
    }
    if (!derivation) return kSettled;
    const size_t own = active_.size() - 1;
    size_t waits = kSettled;
    std::vector<size_t> later;  // inputs that are derived from this leaf
    for (const auto& input : derivation->inputs) {
      const size_t at = index_.at(schema_.find_field(input));
      if (&leaves_[at] == &leaf) continue;
      if (leaves_[at].state == State::active) {
        const auto place = std::find(active_.begin(), active_.end(), at) - active_.begin();
        waits = std::min(waits, static_cast<size_t>(place));
        continue;
      }
      const size_t found = evaluate(at);
      if (leaves_[at].failed) {
        leaf.failed = true;
        return kSettled;
      }
      if (found == kSettled) continue;
      waits = std::min(waits, found);
      later.push_back(at);
    }
    if (waits < own) return waits;
    derive(leaf, *derivation);
    if (leaf.derived || later.empty()) return kSettled;
    // Of several leaves that follow from each other one is given, and it is none that this one saw: without this leaf
    // the others find it, and then this one follows from them.
    leaf.state = State::done;
    for (const size_t at : later) {
      evaluate(at);
      leaf.failed = leaf.failed || leaves_[at].failed;
    }
    if (!leaf.failed) derive(leaf, *derivation);
    return kSettled;
  }

  // A derivation that does not apply leaves its leaf unset: that is the default, not a derived value.
  void derive(Leaf& leaf, const Derivation& derivation) {
    derivation.run(root_);
    const Value value = schema_.load(root_, *leaf.field);
    const bool collection = value.kind == Value::Kind::list || value.kind == Value::Kind::map;
    leaf.derived = !value.is_null() && !(collection && value.items.empty());
  }

  void convert_leaf(Leaf& leaf) {
    ConvertContext context;
    context.sources = &composed_.sources;
    context.diagnostics = &out_.diagnostics;
    context.expand = [&](const Node& node) { return expand(node, leaf); };
    const size_t errors = count_errors();
    auto value = convert(*leaf.field, *leaf.node, leaf.field->path, context);
    if (!value) {
      leaf.failed = true;
      if (leaf.from_ranks && count_errors() > errors)
        out_.diagnostics.back().help("from " + request_.ranks_origin + " " + std::to_string(*request_.ranks));
      return;
    }
    schema_.store(root_, *leaf.field, *value);
  }
  size_t count_errors() const { return out_.diagnostics.size(); }

  std::optional<Node> expand(const Node& node, Leaf& leaf) {
    Interpolation context;
    context.diagnostics = &out_.diagnostics;
    context.section = leaf.field->section;
    context.path = leaf.field->path;
    context.recipe_name = out_.recipe_name;
    context.now = now_;
    context.used_environment = &leaf.environment;
    context.environment = [](const std::string& name) -> const char* { return std::getenv(name.c_str()); };
    context.leaf = [&](const std::string& path, Place place) { return other_leaf(path, place, leaf); };
    context.hash = [&](Place place) -> std::optional<std::string> {
      if (hash_ready_) return hash_;
      report(Level::error, "C0405", "`${hash}` cannot be used here", place);
      return std::nullopt;
    };
    return interpolate(node, context);
  }

  // `${a.b}`: the value of a leaf, or of something inside one (`${a.list[0]}`, `${a.map.key}`).
  std::optional<Node> other_leaf(const std::string& text, Place place, Leaf& asking) {
    const auto parsed = parse_path(text, place, out_.diagnostics);
    if (!parsed) return std::nullopt;
    std::string path;
    size_t used = 0;
    const FieldInfo* field = nullptr;
    for (size_t i = 0; i < parsed->segments.size() && i < 2 && !field; ++i) {
      path += (i ? "." : "") + parsed->segments[i].name;
      field = schema_.find_spelling(path);
      used = i + 1;
    }
    if (!field) {
      const size_t dot = text.find('.');
      Diagnostic problem = unknown_key(schema_, dot == std::string::npos ? "" : text.substr(0, dot),
                                       dot == std::string::npos ? text : text.substr(dot + 1), place);
      problem.code = "C0402";
      problem.message = schema_.find_section(text) ? "`${" + text + "}` names a whole section"
                                                   : "`${" + text + "}` names no field";
      problem.label.clear();
      problem.suggestions.clear();
      if (schema_.find_section(text)) problem.helps = {"name one of its fields"};
      out_.diagnostics.push_back(std::move(problem));
      return std::nullopt;
    }
    const size_t at = index_.at(field);
    Leaf& source = leaves_[at];
    if (source.state == State::active) {
      auto& problem = report(Level::error, "C0403", "`" + field->path + "` is defined by itself", place);
      auto first = std::find(active_.begin(), active_.end(), at);
      for (; first != active_.end(); ++first) {
        const Leaf& link = leaves_[*first];
        const auto next = first + 1 == active_.end() ? at : *(first + 1);
        if (link.node && link.node->place.known() &&
            !(link.node->place.line == place.line && link.node->place.source == place.source))
          problem.related(link.node->place,
                          "`" + link.field->path + "` needs `" + leaves_[next].field->path + "`");
      }
      return std::nullopt;
    }
    if (evaluate(at) != kSettled) {
      report(Level::error, "C0403",
             "`" + field->path + "` is derived from `" + asking.field->path + "`, which is given by it",
             place);
      return std::nullopt;
    }
    if (source.state == State::deferred) {
      report(Level::error, "C0405", "`" + field->path + "` holds `${hash}` and cannot be used here", place);
      return std::nullopt;
    }
    if (source.failed) return std::nullopt;
    asking.environment = asking.environment || source.environment;
    Node node = node_from_value(*field->type, schema_.load(root_, *field));
    node.place = place;
    for (; used < parsed->segments.size(); ++used) {
      const Segment& segment = parsed->segments[used];
      const Node* inner = nullptr;
      if (node.kind == Node::Kind::list && segment.kind == Segment::Kind::index) {
        const auto size = static_cast<long long>(node.items.size());
        const long long item = segment.index < 0 ? size + segment.index : segment.index;
        if (item >= 0 && item < size) inner = &node.items[static_cast<size_t>(item)];
      } else if (node.kind == Node::Kind::map && segment.kind != Segment::Kind::id) {
        inner = node.find(segment.name);
      }
      if (!inner) {
        report(Level::error, "C0402",
               "`${" + text + "}` names nothing: `" + field->path + "` has no such item", place);
        return std::nullopt;
      }
      Node copy = *inner;
      node = std::move(copy);
    }
    return node;
  }

  void resolve_deferred() {
    bool any = false;
    for (const auto& leaf : leaves_) any = any || leaf.state == State::deferred;
    if (!any) return;
    hash_ = config_hash(schema_, root_, HashScope::math);
    hash_ready_ = true;
    for (size_t i = 0; i < leaves_.size(); ++i) {
      if (leaves_[i].state != State::deferred) continue;
      leaves_[i].state = State::waiting;
      evaluate(i);
    }
  }

  // ---- checks ------------------------------------------------------------------------------------------------------

  void check_required() {
    for (auto& leaf : leaves_) {
      if (!leaf.field->required || leaf.failed || leaf.dropped || !section_on(*leaf.field)) continue;
      const Value value = schema_.load(root_, *leaf.field);
      const bool missing = leaf.field->type->optional ? value.is_null() : !leaf.node && !leaf.derived;
      if (!missing) continue;
      leaf.failed = true;
      auto& problem = report(Level::error, "C0210", "`" + leaf.field->path + "` is missing",
                             leaf.winner ? leaf.winner->place : Place{});
      problem.path = leaf.field->path;
      problem.help(leaf.field->doc + ": " + type_text(*leaf.field->type, *leaf.field));
    }
  }

  std::string origin_text(const Leaf& leaf) const { return make_origin(leaf).text; }

  Origin make_origin(const Leaf& leaf) const {
    Origin origin;
    if (leaf.from_ranks) {
      origin.kind = Origin::Kind::ranks;
      origin.text = request_.ranks_origin;
    } else if (leaf.from_name) {
      origin.kind = Origin::Kind::derived;
      origin.text = "derived: recipe name";
    } else if (leaf.derived) {
      origin.kind = Origin::Kind::derived;
      origin.text = "derived: " + leaf.field->formula;
    } else if (leaf.winner) {
      origin = write_origin(*leaf.winner);
      if (leaf.node && leaf.node->kind == Node::Kind::scalar) origin.written = leaf.node->text;
    } else {
      origin.text = "default";
    }
    origin.environment = leaf.environment;
    return origin;
  }

  Origin write_origin(const Write& write) const {
    Origin origin;
    origin.place = write.place;
    if (write.value.kind == Node::Kind::scalar) origin.written = write.value.text;
    const Layer& from = layer(write);
    if (from.rank == Layer::Rank::preset) {
      origin.kind = Origin::Kind::preset;
      origin.text = "preset " + from.preset;
    } else {
      const bool cli = write.place.known() &&
                       composed_.sources[static_cast<size_t>(write.place.source)].kind == Source::Kind::cli;
      origin.kind = cli ? Origin::Kind::cli : Origin::Kind::file;
      origin.text = from.rank == Layer::Rank::imposed ? request_.imposed_by
                                                      : place_text(write.place, composed_.sources, false);
    }
    return origin;
  }

  std::string operand_note(const std::string& path) {
    const Leaf& operand = *leaf(path);
    const std::string value = yaml_inline(*operand.field->type, schema_.load(root_, *operand.field));
    return "`" + path + "` = " + value + " (" + origin_text(operand) + ")";
  }

  void check_rules() {
    const bool any_failed =
        std::any_of(leaves_.begin(), leaves_.end(), [](const Leaf& one) { return one.failed; });
    for (const Rule& rule : schema_.rules()) {
      const bool skip =
          any_failed && std::any_of(rule.reads.begin(), rule.reads.end(),
                                    [&](const std::string& path) { return leaf(path)->failed; });
      if (skip) continue;
      RuleReport found;
      rule.check(root_, found);
      for (const auto& violation : found.violations) {
        std::vector<Violation::Operand> operands;
        if (!violation.pointed.empty()) operands.push_back({violation.pointed, {}, true});
        for (const auto& operand : violation.operands)
          if (!operand.is_path || operand.name != violation.pointed) operands.push_back(operand);
        const bool named_paths =
            std::any_of(violation.operands.begin(), violation.operands.end(),
                        [](const Violation::Operand& operand) { return operand.is_path; });
        if (!named_paths)
          for (const auto& path : rule.reads)
            if (path != violation.pointed) operands.push_back({path, {}, true});
        auto& problem =
            report(violation.lint ? Level::warning : Level::error, rule.code.c_str(), violation.message);
        problem.name = rule.name;
        problem.path = violation.pointed;
        // Point at what the user can change: the operand named by the rule, else the one set with the highest rank.
        const Leaf* best = nullptr;
        for (const auto& operand : operands) {
          const Leaf* candidate = operand.is_path ? leaf(operand.name) : nullptr;
          if (!candidate) continue;
          if (candidate->winner && is_explicit(*candidate->winner)) {
            const bool named = operand.name == violation.pointed;
            if (!best || (!named && best->winner->layer < candidate->winner->layer &&
                          best->field->path != violation.pointed))
              best = candidate;
          }
        }
        if (!violation.pointed.empty() && leaf(violation.pointed)->from_ranks) best = nullptr;
        if (best) {
          problem.place = best->node && best->node->place.known() ? best->node->place : best->winner->place;
          if (problem.path.empty()) problem.path = best->field->path;
        }
        for (const auto& operand : operands)
          problem.note(operand.is_path && leaf(operand.name) ? operand_note(operand.name)
                                                             : "`" + operand.name + "` = " + operand.value);
        problem.help(violation.help_text);
      }
    }
  }

  // A recipe that comes with Capstan is extended, or changed by overrides, without taking back what no longer has an effect there.
  bool of_shipped_base(const Write& write) const {
    const auto embedded = [](const Source& source) { return source.kind == Source::Kind::embedded; };
    return write.place.known() && embedded(composed_.sources[static_cast<size_t>(write.place.source)]) &&
           (layer(write).base || !std::all_of(composed_.sources.begin(), composed_.sources.end(), embedded));
  }

  // Explicit values that nothing reads under this configuration.
  void check_effects() {
    for (auto& leaf : leaves_) {
      if (leaf.failed || leaf.dropped || !leaf.winner || !is_explicit(*leaf.winner) ||
          !section_on(*leaf.field) || of_shipped_base(*leaf.winner))
        continue;
      const SectionInfo& section = schema_.sections()[leaf.field->section_index];
      const Condition* unmet = nullptr;
      for (const auto* conditions : {&section.used_when, &leaf.field->used_when})
        for (const auto& condition : *conditions)
          if (!unmet && !condition.holds(root_)) unmet = &condition;
      if (!unmet) continue;
      const Value value = schema_.load(root_, *leaf.field);
      if (value == leaf.field->default_value || value == derived_value(leaf)) continue;
      const bool error = leaf.field->effect == Effect::math;
      auto& problem = report(error ? Level::error : Level::warning, error ? "C0604" : "C0606",
                             "`" + leaf.field->path + "` has no effect here", leaf.winner->place);
      problem.name = error ? "no_effect" : "unused_value";
      problem.path = leaf.field->path;
      problem.label = "read only when " + unmet->text;
      problem.help("take it out, or see that " + unmet->text);
    }
  }

  // Whether one of these inputs was itself derived, by whatever way, from `path`.
  bool derived_from(const std::vector<std::string>& inputs, const std::string& path,
                    std::set<std::string>& seen) {
    for (const auto& input : inputs) {
      if (input == path) return true;
      const Derivation* derivation = leaf(input)->derived ? schema_.find_derivation(input) : nullptr;
      if (derivation && seen.insert(input).second && derived_from(derivation->inputs, path, seen))
        return true;
    }
    return false;
  }

  // What the leaf would be without its explicit value. Where two leaves are derived from each other, the given one is
  // the source, and nothing else would give it.
  Value derived_value(const Leaf& leaf) {
    const Derivation* derivation =
        leaf.field->formula.empty() ? nullptr : schema_.find_derivation(leaf.field->path);
    std::set<std::string> seen;
    if (!derivation || derived_from(derivation->inputs, leaf.field->path, seen))
      return leaf.field->default_value;
    const Value kept = schema_.load(root_, *leaf.field);
    schema_.store(root_, *leaf.field, leaf.field->default_value);
    derivation->run(root_);
    Value derived = schema_.load(root_, *leaf.field);
    schema_.store(root_, *leaf.field, kept);
    return derived;
  }

  // What the leaf would be without the recipe's own writes to it; nullopt: nothing that can be said.
  std::optional<Value> base_value(const Leaf& leaf) {
    std::optional<Node> node;
    std::vector<Diagnostic> ignored;
    for (const Write* write : leaf.writes)
      if (in_base(composed_, *write)) apply_write(node, *write, ignored);
    const bool null = node && node->kind == Node::Kind::null && !node->empty;
    if (!node || (null && !leaf.field->formula.empty())) return derived_value(leaf);
    const size_t reported = out_.diagnostics.size();
    Leaf asking = leaf;
    ConvertContext context{&composed_.sources, &ignored, {}};
    context.expand = [&](const Node& text) { return expand(text, asking); };
    auto value = convert(*leaf.field, *node, leaf.field->path, context);
    out_.diagnostics.resize(reported);
    return value;
  }

  // A value beside or after a preset is there to differ from it. One that was there before may have been forgotten.
  bool chosen_after(const Write& preset, const Write& write) const {
    const std::string name = layer(preset).preset.substr(0, layer(preset).preset.find('/'));
    const Choice& choice = composed_.choices[schema_.find_section(name)->index].back();
    const bool one_line = choice.layer == write.layer && layer(write).rank == Layer::Rank::cli;
    return choice.layer > write.layer || (one_line && choice.place.line > write.place.line);
  }

  void note_hidden_presets() {
    for (const auto& leaf : leaves_) {
      if (leaf.failed || leaf.dropped || !leaf.winner || !is_explicit(*leaf.winner)) continue;
      const Write* preset = nullptr;
      for (const Write* write : leaf.writes)
        if (!is_explicit(*write) && !write->dead && write->rest.empty()) preset = write;
      if (!preset || leaf.field->type->kind == Type::Kind::map || leaf.winner->op == Write::Op::append ||
          !leaf.winner->rest.empty() || !chosen_after(*preset, *leaf.winner))
        continue;
      std::vector<Diagnostic> ignored;
      ConvertContext context{&composed_.sources, &ignored, {}};
      const auto soft = convert(*leaf.field, preset->value, leaf.field->path, context);
      const Value kept = schema_.load(root_, *leaf.field);
      if (!soft || *soft == kept) continue;
      auto& note = report(Level::note, "C0702",
                          "preset " + layer(*preset).preset + " would set `" + leaf.field->path + ": " +
                              yaml_inline(*leaf.field->type, *soft) + "`; kept `" +
                              yaml_inline(*leaf.field->type, kept) + "` from " + origin_text(leaf));
      note.path = leaf.field->path;
    }
  }

  void record() {
    for (const auto& leaf : leaves_) {
      if (leaf.failed) out_.failed.push_back(leaf.field->path);
      if (section_on(*leaf.field)) out_.origins[leaf.field->path] = make_origin(leaf);
      for (const Write* write : leaf.writes) {
        HistoryEntry entry{leaf.field->path, write_origin(*write), HistoryEntry::Fate::effective};
        if (leaf.dropped)
          entry.fate = HistoryEntry::Fate::dropped;
        else if (leaf.superseded)
          entry.fate = HistoryEntry::Fate::replaced;
        else if (write->dead)
          entry.fate = HistoryEntry::Fate::reset;
        else if (write != leaf.winner && leaf.winner && leaf.winner->op == Write::Op::set &&
                 leaf.winner->rest.empty())
          entry.fate = HistoryEntry::Fate::replaced;
        out_.history.push_back(std::move(entry));
      }
    }
  }

  void record_own_part() {
    OwnPart& own = out_.own;
    own.extends = composed_.extends;
    own.directory = composed_.sources.front().directory;
    own.sections = own_choices(schema_, root_, composed_);
    for (const auto& leaf : leaves_) record_own_field(leaf);
  }

  void record_own_field(const Leaf& leaf) {
    if (leaf.failed || leaf.dropped || !section_on(*leaf.field)) return;
    const bool given = leaf.from_ranks || (leaf.winner && is_explicit(*leaf.winner));
    bool own = leaf.from_ranks, base = false;  // whether either has a say
    for (const Write* write : leaf.writes) {
      if (!is_explicit(*write)) continue;
      if (in_base(composed_, *write)) base = true;
      if (write->dead ? in_base(composed_, *write) : !layer(*write).base) own = true;
    }
    if (!own || !(given || base)) return;
    const Value value = schema_.load(root_, *leaf.field);
    const auto before = base_value(leaf);
    // Without this line the value would follow from a field of the base that takes its place.
    const bool takes_back = given && std::any_of(leaves_.begin(), leaves_.end(), [&](const Leaf& other) {
                              return other.superseded && other.field->instead_of == leaf.field->path;
                            });
    if (before && *before == value && !takes_back) return;
    // A mapping merges with the one below it: keys that went have to be taken back first.
    bool fewer = false;
    if (before && before->kind == Value::Kind::map && leaf.field->type->kind == Type::Kind::map)
      for (const auto& key : before->keys)
        fewer |= std::find(value.keys.begin(), value.keys.end(), key) == value.keys.end();
    if (!given || fewer) out_.own.unset.push_back(leaf.field->path);
    if (given) out_.own.fields[leaf.field->path] = own_text(leaf);
  }

  std::string own_text(const Leaf& leaf) const {
    if (leaf.from_ranks || !leaf.winner) return {};
    if (leaf.derived) return "null";
    if (leaf.winner->op != Write::Op::set || !leaf.winner->rest.empty() || !leaf.node ||
        leaf.node->kind != Node::Kind::scalar || leaf.node->raw ||
        leaf.node->text.find("${") == std::string::npos || leaf.field->type->kind == Type::Kind::secret)
      return {};
    const Place& place = leaf.node->place;
    const bool here =
        place.known() && composed_.sources[static_cast<size_t>(place.source)].directory == out_.own.directory;
    return here || leaf.field->type->kind != Type::Kind::path ? leaf.node->text : std::string();
  }

  const Schema& schema_;
  void* root_;
  const Request& request_;
  Composition composed_;
  Resolved out_;
  std::vector<Leaf> leaves_;
  std::unordered_map<const FieldInfo*, size_t> index_;
  std::vector<size_t> active_;
  int64_t now_ = 0;
  std::string hash_;
  bool hash_ready_ = false;
};

}  // namespace

const Origin& Resolved::origin(const std::string& path) const {
  static const Origin kDefault{Origin::Kind::default_value, "default", {}, {}, false};
  const auto found = origins.find(path);
  return found == origins.end() ? kDefault : found->second;
}

void Resolved::require_ok() const {
  if (ok()) return;
  std::vector<Diagnostic> errors;
  for (const auto& diagnostic : diagnostics)
    if (diagnostic.level == Level::error) errors.push_back(diagnostic);
  fail(malformed ? ErrorCode::format : ErrorCode::config, render(errors, sources));
}

Resolved resolve_into(const Schema& schema, const Library& library, void* root, const Request& request) {
  return Resolver(schema, library, root, request).run();
}

Resolved resolve_text_into(const Schema& schema, const Library& library, void* root, const Request& request,
                           const std::string& text) {
  return Resolver(schema, library, root, request, &text).run();
}

const Schema& schema() {
  static const Schema* built = [] {
    auto* result = new Schema;  // lives as long as the program
    register_sections(*result);
    result->finish();
    return result;
  }();
  return *built;
}

Resolution resolve(const Request& request) {
  Resolution resolution;
  static_cast<Resolved&>(resolution) =
      resolve_into(schema(), Library::standard(), &resolution.config, request);
  return resolution;
}

}  // namespace capstan::config
