#include "config/compose.hpp"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/text.hpp"
#include "config/convert.hpp"

namespace capstan::config {

namespace fs = std::filesystem;

namespace {

constexpr size_t kMaxFiles = 100;           // files of one resolution, each counted as often as it is named
constexpr int64_t kMaxTotalNodes = 50'000;  // values in all of them

bool is_path(std::string_view text) {
  return text.find('/') != std::string_view::npos || text.ends_with(".yaml") || text.ends_with(".yml");
}

std::string shortened(std::string_view text) {
  std::string out;
  for (const char c : text.substr(0, 80)) out += c == '\n' ? ' ' : c;
  return out + (text.size() > 80 ? "..." : "");
}

class Composer {
 public:
  Composer(const Schema& schema, const Library& library, const Request& request)
      : schema_(schema), library_(library), request_(request) {
    out_.choices.resize(schema.sections().size());
    out_.preset_of.resize(schema.sections().size());
    for (const FieldInfo* field : schema.fields())
      for (const auto& alias : field->aliases)
        if (const size_t dot = alias.find('.'); dot != std::string::npos)
          alias_prefixes_.insert(alias.substr(0, dot));
  }

  Composition run() {
    std::error_code ignored;
    current_directory_ = fs::current_path(ignored).string();
    read_recipe();
    read_overrides();
    choose_presets();
    return std::move(out_);
  }

 private:
  // The directory that `extends` and `@file` inside a file may not leave; empty for embedded files: names only.
  struct Origin {
    std::string root;
    Layer::Rank rank = Layer::Rank::recipe;
  };

  Diagnostic& error(const char* code, std::string message, Place place, std::string label = {}) {
    Diagnostic diagnostic;
    diagnostic.code = code;
    diagnostic.message = std::move(message);
    diagnostic.place = place;
    diagnostic.label = std::move(label);
    out_.diagnostics.push_back(std::move(diagnostic));
    return out_.diagnostics.back();
  }

  // ---- files -------------------------------------------------------------------------------------------------------

  int add_source(Source::Kind kind, std::string name, std::string text, std::string directory) {
    out_.sources.push_back({kind, std::move(name), normalized(std::move(text)), std::move(directory)});
    return static_cast<int>(out_.sources.size()) - 1;
  }
  static std::string directory_of(const std::string& file) {
    std::error_code ignored;
    return fs::absolute(fs::path(file), ignored).lexically_normal().parent_path().string();
  }

  std::optional<Node> parse(int source) {
    auto tree = parse_yaml(source, out_.sources, out_.diagnostics);
    if (!tree) out_.malformed = true;
    if (tree && (total_nodes_ += tree->size()) > kMaxTotalNodes) {
      error("C0009", "more than " + std::to_string(kMaxTotalNodes) + " values in all files together",
            tree->place);
      out_.malformed = true;
      return std::nullopt;
    }
    return tree;
  }

  bool budget(Place place) {
    if (++files_ <= kMaxFiles) return true;
    if (files_ == kMaxFiles + 1)
      error("C0502", "more than " + std::to_string(kMaxFiles) + " files in one recipe", place);
    return false;
  }

  void read_recipe() {
    const std::string& name = request_.recipe;
    if (name.empty())
      fail(ErrorCode::usage, "no recipe is given",
           "`capstan recipe ls` lists the recipes that come with Capstan");
    int source = -1;
    Origin origin;
    std::string identity;
    if (name == "-") {
      std::string text(TreeLimits::kFileBytes + 1, '\0');
      std::cin.read(text.data(), static_cast<std::streamsize>(text.size()));
      text.resize(static_cast<size_t>(std::cin.gcount()));
      if (static_cast<int64_t>(text.size()) > TreeLimits::kFileBytes)
        fail(ErrorCode::format, "the recipe on standard input is larger than 4 MiB");
      source = add_source(Source::Kind::file, "<stdin>", std::move(text), current_directory_);
      origin.root = current_directory_;
      out_.recipe_name = "stdin";
    } else if (is_path(name)) {
      source =
          add_source(Source::Kind::file, name, read_file(name, TreeLimits::kFileBytes), directory_of(name));
      origin.root = out_.sources.back().directory;
      out_.recipe_name = fs::path(name).stem().string();
      identity = canonical(name);
    } else {
      const auto found = library_.recipe(name);
      if (!found) {
        std::vector<std::string> names;
        for (const auto& entry : library_.recipes()) names.push_back(entry.name);
        std::string help;
        for (const auto& near : near_matches(name, names))
          help += (help.empty() ? "did you mean `" : ", `") + near + "`";
        std::error_code ignored;
        if (fs::exists(name, ignored)) help = "to use the file of that name write `./" + name + "`";
        fail(ErrorCode::not_found, "there is no recipe named `" + shortened(name) + "`",
             help.empty() ? "`capstan recipe ls` lists them; a file is given by a path that contains `/` or "
                            "ends in .yaml"
                          : help + "?");
      }
      source = add_found(*found);
      if (!found->file.empty()) origin.root = out_.sources.back().directory;
      out_.recipe_name = name;
      identity = found->file.empty() ? found->name : canonical(found->file);
    }
    budget({});
    std::vector<std::pair<std::string, Place>> ring{{identity, {}}};
    if (auto tree = parse(source)) read_tree(*tree, source, origin, ring);
  }

  static std::string canonical(const std::string& file) {
    std::error_code problem;
    const fs::path path = fs::weakly_canonical(file, problem);
    return problem ? file : path.string();
  }

  int add_found(const Library::Found& found) {
    if (found.file.empty())
      return add_source(Source::Kind::embedded, found.name, std::string(found.text), current_directory_);
    return add_source(Source::Kind::file, found.name, read_file(found.file, TreeLimits::kFileBytes),
                      directory_of(found.file));
  }

  // The file that a recipe names, when it stays inside the recipe's directory.
  std::optional<std::string> inside(const std::string& text, int source, const Origin& origin, Place place) {
    if (text.find('\0') != std::string::npos) {
      error("C0503", "a file name with a zero byte", place);
      return std::nullopt;
    }
    if (origin.root.empty()) {
      error("C0503", "a recipe that comes with Capstan cannot name the file `" + shortened(text) + "`",
            place);
      return std::nullopt;
    }
    const fs::path path = fs::path(out_.sources[static_cast<size_t>(source)].directory) / text;
    const fs::path target = canonical(path.string()), root = canonical(origin.root);
    const auto [root_end, ignored] = std::mismatch(root.begin(), root.end(), target.begin(), target.end());
    if (root_end != root.end()) {
      error("C0503", "`" + shortened(text) + "` is outside the directory of the recipe", place,
            "leads to " + target.string())
          .help("files that a recipe names lie in " + root.string() +
                " or below; from elsewhere give them with `-f`");
      return std::nullopt;
    }
    return path.lexically_normal().string();
  }

  // Reads a file named inside another one or on the command line; problems become diagnostics at `place`.
  std::optional<int> read_named(const std::string& file, const std::string& shown, Place place) {
    try {
      return add_source(Source::Kind::file, shown, read_file(file, TreeLimits::kFileBytes),
                        directory_of(file));
    } catch (const Error& problem) {
      error("C0001", problem.message(), place).help(problem.help());
      out_.malformed = true;
      return std::nullopt;
    }
  }

  void read_tree(const Node& tree, int source, const Origin& origin,
                 std::vector<std::pair<std::string, Place>>& ring) {
    if (const Node* extends = tree.find("extends")) {
      if (extends->kind == Node::Kind::scalar)
        extend(*extends, source, origin, ring);
      else if (extends->kind == Node::Kind::list)
        for (const auto& item : extends->items) extend(item, source, origin, ring);
      else
        error("C0501", "`extends` takes the name or path of a recipe, or a list of them", extends->place);
    }
    if (const Node* version = tree.find("schema"); version && version->text != "capstan/1")
      error("C0504", "`" + shortened(version->text) + "` is not a recipe format that this version reads",
            version->place)
          .help("write `schema: capstan/1`");
    out_.layers.push_back({origin.rank, {}});
    layer_ = out_.layers.size() - 1;
    origin_ = &origin;
    if (const Node* unset = tree.find("unset")) unset_list(*unset);
    collect(tree);
    find_duplicates();
    origin_ = nullptr;
  }

  void extend(const Node& item, int source, const Origin& origin,
              std::vector<std::pair<std::string, Place>>& ring) {
    if (item.kind != Node::Kind::scalar || item.text.empty()) {
      error("C0501", "`extends` takes the name or path of a recipe, or a list of them", item.place);
      return;
    }
    if (!budget(item.place)) return;
    std::string identity;
    std::optional<int> parent;
    Origin next = origin;
    if (is_path(item.text)) {
      const auto file = inside(item.text, source, origin, item.place);
      if (!file) return;
      identity = canonical(*file);
      if (cycle(identity, item, ring)) return;
      std::error_code ignored;
      const fs::path shown =
          fs::path(out_.sources[static_cast<size_t>(source)].name).parent_path() / item.text;
      parent = read_named(*file, shown.lexically_normal().string(), item.place);
    } else {
      const auto found = library_.recipe(item.text);
      if (!found) {
        std::vector<std::string> names;
        for (const auto& entry : library_.recipes()) names.push_back(entry.name);
        auto& problem = error("C0501", "there is no recipe named `" + shortened(item.text) + "`", item.place);
        for (const auto& near : near_matches(item.text, names)) problem.help("did you mean `" + near + "`?");
        std::error_code ignored;
        if (!origin.root.empty() && fs::exists(fs::path(origin.root) / (item.text + ".yaml"), ignored))
          problem.help("for the file write `" + item.text + ".yaml`");
        return;
      }
      identity = found->file.empty() ? found->name : canonical(found->file);
      if (cycle(identity, item, ring)) return;
      next.root = found->file.empty() ? "" : directory_of(found->file);
      if (found->file.empty())
        parent = add_found(*found);
      else
        parent = read_named(found->file, found->name, item.place);
    }
    if (!parent) return;
    ring.emplace_back(identity, item.place);
    if (auto tree = parse(*parent)) read_tree(*tree, *parent, next, ring);
    ring.pop_back();
  }

  bool cycle(const std::string& identity, const Node& item,
             const std::vector<std::pair<std::string, Place>>& ring) {
    const auto first =
        std::find_if(ring.begin(), ring.end(), [&](const auto& link) { return link.first == identity; });
    if (first == ring.end()) return false;
    auto& problem = error("C0501", "`extends` goes round in a circle", item.place,
                          "leads back to a recipe that extends this one");
    for (auto link = first + 1; link != ring.end(); ++link) problem.related(link->second, "by way of this");
    return true;
  }

  // ---- mappings ----------------------------------------------------------------------------------------------------

  static bool take_plus(std::string& key) {
    if (key.size() < 2 || key.back() != '+') return false;
    key.pop_back();
    return true;
  }

  void collect(const Node& tree) {
    for (size_t i = 0; i < tree.items.size(); ++i) {
      std::string key = tree.keys[i];
      if (key == "extends" || key == "schema" || key == "unset") continue;
      const auto op = take_plus(key) ? Write::Op::append : Write::Op::set;
      const Place place = tree.key_places[i];
      if (key.find('.') != std::string::npos || key.find('[') != std::string::npos) {
        if (const auto path = parse_path(key, place, out_.diagnostics))
          write(*path, tree.items[i], op, place);
        continue;
      }
      ParsedPath path;
      path.segments.push_back({Segment::Kind::name, key, {}, 0});
      path.place = place;
      write(path, tree.items[i], op, place);
    }
  }

  void unset_list(const Node& unset) {
    const auto one = [&](const Node& item) {
      if (item.kind != Node::Kind::scalar) {
        error("C0501", "`unset` takes paths such as `optimizer.lr`", item.place);
        return;
      }
      if (const auto path = parse_path(item.text, item.place, out_.diagnostics)) reset(*path, nullptr);
    };
    if (unset.kind == Node::Kind::list)
      for (const auto& item : unset.items) one(item);
    else
      one(unset);
  }

  void unknown(const std::string& section, const std::string& key, Place place) {
    // Near matches are for people; a file of a thousand unknown keys is not theirs.
    out_.diagnostics.push_back(unknown_key(schema_, section, key, place, ++unknown_ <= 50));
  }

  struct Target {
    const SectionInfo* section = nullptr;  // a whole section
    const FieldInfo* field = nullptr;      // or a leaf, and what is below it
    std::vector<Segment> rest;
    std::string spelling;
    bool prefix = false;  // the first part of absolute aliases: `parallel` of `parallel.tp`
  };

  std::optional<Target> find(const ParsedPath& path) {
    Target target;
    const auto& segments = path.segments;
    if (segments[0].kind != Segment::Kind::name) {
      error("C0101", "a path starts with the name of a section", path.place);
      return std::nullopt;
    }
    const std::string& first = segments[0].name;
    size_t used = 1;
    const SectionInfo* section = schema_.find_section(first);
    if (segments.size() == 1 && section) {
      target.section = section;
      target.spelling = first;
      return target;
    }
    std::string spelling = first;
    Schema::Spelling spelled{};
    const FieldInfo* field = nullptr;
    if (segments.size() > 1 && segments[1].kind == Segment::Kind::name) {
      spelling = first + "." + segments[1].name;
      used = 2;
      field = schema_.find_spelling(spelling, &spelled);
    }
    if (!field && !section) {
      field = schema_.find_spelling(first, &spelled);
      if (field) spelling = first, used = 1;
    }
    if (!field && !section && segments.size() == 1 && alias_prefix(first)) {
      target.prefix = true;
      target.spelling = first;
      return target;
    }
    if (!field) {
      Place place = path.place;
      std::string key = first;
      if (section || alias_prefix(first)) {
        key = segments.size() > 1 ? segments[1].name : first;
        if (path.segments.size() > 1 && path.place.length > static_cast<int>(first.size())) {
          place.column += static_cast<int>(first.size()) + 1;
          place.length = std::max(1, place.length - static_cast<int>(first.size()) - 1);
        }
        unknown(first, key, place);
      } else {
        if (segments.size() > 1 && segments[1].kind == Segment::Kind::name)
          unknown(first, segments[1].name, place);
        else
          unknown("", first, place);
      }
      return std::nullopt;
    }
    target.field = field;
    target.spelling = spelling;
    target.rest.assign(segments.begin() + static_cast<std::ptrdiff_t>(used), segments.end());
    if (spelled == Schema::Spelling::old_name) {
      auto& lint = error("C0602", "`" + spelling + "` is now called `" + field->path + "`", path.place);
      lint.level = Level::warning;
      lint.name = "deprecated_key";
    } else if (!field->deprecated.empty()) {
      auto& lint = error("C0602", "`" + field->path + "` is deprecated: " + field->deprecated, path.place);
      lint.level = Level::warning;
      lint.name = "deprecated_key";
    }
    return target;
  }

  bool alias_prefix(const std::string& name) const { return alias_prefixes_.count(name) > 0; }

  void write(const ParsedPath& path, const Node& value, Write::Op op, Place place) {
    const auto target = find(path);
    if (!target) return;
    if (target->section) return write_section(*target->section, value, op, place);
    if (target->prefix) {
      if (value.kind != Node::Kind::map) {
        unknown("", target->spelling, place);
        return;
      }
      return write_members(target->spelling, value);
    }
    add_write(*target, value, op, place);
  }

  void add_write(const Target& target, const Node& value, Write::Op op, Place place) {
    Write write;
    write.op = op;
    write.field = target.field;
    write.rest = target.rest;
    write.value = value;
    write.place = place;
    write.spelling = target.spelling;
    write.layer = layer_;
    out_.writes.push_back(std::move(write));
  }

  void write_members(const std::string& section, const Node& map) {
    for (size_t i = 0; i < map.items.size(); ++i) {
      std::string key = map.keys[i];
      const auto op = take_plus(key) ? Write::Op::append : Write::Op::set;
      ParsedPath path;
      path.place = map.key_places[i];
      path.segments.push_back({Segment::Kind::name, section, {}, 0});
      path.segments.push_back({Segment::Kind::name, key, {}, 0});
      if (key.find('.') != std::string::npos && !schema_.find_spelling(section + "." + key)) {
        error("C0102", "unknown key `" + section + "." + shortened(key) + "`", map.key_places[i])
            .help("dotted keys stand at the top of a recipe only: `" + section + "." + shortened(key) +
                  ": …`");
        continue;
      }
      // The place is the key's, without the section in front.
      const auto known = schema_.find_spelling(section + "." + key);
      if (!known) {
        unknown(section, key, map.key_places[i]);
        continue;
      }
      write(path, map.items[i], op, map.key_places[i]);
    }
  }

  void write_section(const SectionInfo& section, const Node& value, Write::Op op, Place place) {
    if (op == Write::Op::append && value.kind != Node::Kind::map) {
      error("C0103", "`+=` adds to lists and open mappings, and `" + section.name + "` is a section", place)
          .help("write `" + section.name + "=…`");
      return;
    }
    Choice choice;
    choice.layer = layer_;
    choice.place = value.place;
    const std::string name = section.name;
    switch (value.kind) {
      case Node::Kind::null:
        if (value.empty) {
          error("C0203", "the section `" + name + "` has no value", place)
              .help("leave the line out, or write its fields below it, indented");
          return;
        }
        if (!section.optional) {
          error("C0205", "the section `" + name + "` cannot be switched off", value.place);
          return;
        }
        choice.off = true;
        break;
      case Node::Kind::list:
        error("C0206", "`" + name + "` is a section: it takes a mapping or the name of a preset, not a list",
              value.place);
        return;
      case Node::Kind::map: {
        Node members = value;
        for (size_t i = 0; i < members.keys.size(); ++i) {
          if (members.keys[i] != "preset" || section.find("preset")) continue;
          const Node preset = members.items[i];
          members.keys.erase(members.keys.begin() + static_cast<std::ptrdiff_t>(i));
          members.key_places.erase(members.key_places.begin() + static_cast<std::ptrdiff_t>(i));
          members.items.erase(members.items.begin() + static_cast<std::ptrdiff_t>(i));
          if (preset.kind == Node::Kind::scalar && !preset.text.empty() && preset.text[0] != '@')
            write_section(section, preset, Write::Op::set, place);
          else
            error("C0505", "`preset` takes the name of a preset of `" + name + "`", preset.place);
          break;
        }
        // A mapping in an optional section switches it on, even an empty one.
        if (section.optional && members.items.empty() && value.items.empty())
          out_.choices[section.index].push_back(choice);
        write_members(name, members);
        return;
      }
      case Node::Kind::scalar:
        if (value.text.starts_with("@")) return include(section, value.text.substr(1), value.place);
        if (section.optional && value.text == "none" && !library_.preset(name, "none")) {
          choice.off = true;
          break;
        }
        if (!preset_exists(section, value)) return;
        choice.preset = value.text;
        break;
    }
    out_.choices[section.index].push_back(std::move(choice));
  }

  bool preset_exists(const SectionInfo& section, const Node& value) {
    if (is_path(value.text)) return true;
    if (library_.preset(section.name, value.text)) return true;
    std::vector<std::string> names;
    for (const auto& entry : library_.presets(section.name)) names.push_back(entry.name);
    const size_t colon = value.text.find(':');
    if (colon != std::string::npos &&
        schema_.find_spelling(section.name + "." + value.text.substr(0, colon))) {
      error("C0002", "missing space after `:`", value.place)
          .help("write `" + value.text.substr(0, colon) + ": " + value.text.substr(colon + 1) + "`");
      return false;
    }
    auto& problem = error(
        "C0505", "`" + section.name + "` has no preset named `" + shortened(value.text) + "`", value.place);
    const auto near = near_matches(value.text, names);
    for (const auto& name : near) problem.help("a preset with a similar name exists: `" + name + "`");
    if (near.empty() && !names.empty()) {
      std::string all;
      for (size_t i = 0; i < names.size() && i < 6; ++i) all += (i ? ", " : "") + names[i];
      problem.help("its presets are " + all + (names.size() > 6 ? " and others" : ""));
    } else if (names.empty()) {
      problem.help("it has none; write its fields as a mapping");
    }
    return false;
  }

  void include(const SectionInfo& section, const std::string& file, Place place) {
    if (!budget(place)) return;
    std::string path = file;
    std::string shown = file;
    if (origin_) {
      const auto allowed = inside(file, place.source, *origin_, place);
      if (!allowed) return;
      path = *allowed;
      shown = (fs::path(out_.sources[static_cast<size_t>(place.source)].name).parent_path() / file)
                  .lexically_normal()
                  .string();
    }
    const auto source = read_named(path, shown, place);
    if (!source) return;
    if (++include_depth_ > 16) {
      error("C0502", "files include each other more than 16 levels deep", place);
    } else if (auto tree = parse(*source)) {
      write_section(section, *tree, Write::Op::set, place);
    }
    --include_depth_;
  }

  // In one file a leaf is given once, whatever it is called.
  void find_duplicates() {
    std::map<std::pair<const FieldInfo*, std::string>, const Write*> seen;
    for (const Write& later : out_.writes) {
      if (later.layer != layer_ || later.dead) continue;
      const auto [place, fresh] =
          seen.emplace(std::pair(later.field, ParsedPath{later.rest, {}}.text()), &later);
      if (fresh) continue;
      const Write& first = *place->second;
      if (first.spelling == later.spelling)
        error("C0104", "`" + later.field->path + "` is given twice in one file", later.place,
              "given again here")
            .related(first.place, "first given here");
      else
        error("C0104",
              "`" + first.spelling + "` and `" + later.spelling +
                  "` are the same leaf, given twice in one file",
              later.place, "given again here")
            .related(first.place, "first given here")
            .help("keep one of them; the canonical name is `" + later.field->path + "`");
    }
  }

  static bool same(const std::vector<Segment>& a, const std::vector<Segment>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Segment& x, const Segment& y) {
      return x.kind == y.kind && x.name == y.name && x.text == y.text && x.index == y.index;
    });
  }

  // ---- command line ------------------------------------------------------------------------------------------------

  void read_overrides() {
    if (request_.overrides.empty()) return;
    std::string text;
    for (const auto& given : request_.overrides) {
      for (const char c : given.text) text += c == '\n' || c == '\r' ? ' ' : c;
      text += '\n';
    }
    Source cli{Source::Kind::cli, "<cli>", std::move(text), current_directory_};
    out_.sources.push_back(std::move(cli));
    const int source = static_cast<int>(out_.sources.size()) - 1;
    std::vector<ParsedOverride> parsed;
    for (size_t i = 0; i < request_.overrides.size(); ++i) {
      const std::string* next = i + 1 < request_.overrides.size() ? &request_.overrides[i + 1].text : nullptr;
      // `lr = 1` arrives as three words; one message is enough.
      const bool skip = i > 0 && request_.overrides[i].text == "=" &&
                        request_.overrides[i - 1].text.find('=') == std::string::npos;
      if (skip) {
        if (next && next->find('=') == std::string::npos) ++i;
        continue;
      }
      if (auto one =
              parse_override(request_.overrides[i], next, source, static_cast<int>(i) + 1, out_.diagnostics))
        parsed.push_back(std::move(*one));
    }
    for (const auto& one : parsed)
      if (one.op == ParsedOverride::Op::include) include_override(one);
    out_.layers.push_back({Layer::Rank::cli, {}});
    layer_ = out_.layers.size() - 1;
    for (const auto& one : parsed)
      if (one.op != ParsedOverride::Op::include) apply(one);
  }

  void include_override(const ParsedOverride& one) {
    if (!budget(one.place)) return;
    if (one.path.segments.empty()) {
      const auto source = read_named(one.file, one.file, one.place);
      if (!source) return;
      const Origin origin{directory_of(one.file), Layer::Rank::file};
      std::vector<std::pair<std::string, Place>> ring{{canonical(one.file), one.place}};
      if (auto tree = parse(*source)) read_tree(*tree, *source, origin, ring);
      return;
    }
    const auto target = find(one.path);
    if (!target) return;
    const auto source = read_named(one.file, one.file, one.value_place);
    if (!source) return;
    auto tree = parse(*source);
    if (!tree) return;
    const Origin origin{directory_of(one.file), Layer::Rank::file};
    out_.layers.push_back({Layer::Rank::file, {}});
    layer_ = out_.layers.size() - 1;
    origin_ = &origin;
    if (target->section)
      write_section(*target->section, *tree, Write::Op::set, one.place);
    else if (target->field)
      add_write(*target, *tree, Write::Op::set, one.place);
    find_duplicates();
    origin_ = nullptr;
  }

  void apply(const ParsedOverride& one) {
    using Op = ParsedOverride::Op;
    if (one.op == Op::unset) return reset(one.path, one.value ? &*one.value : nullptr);
    const auto target = find(one.path);
    if (!target) return;
    Node value = *one.value;
    if (target->section) {
      if (value.empty) {
        error("C0203", "the section `" + target->section->name + "` has no value", one.place)
            .help("write the name of a preset, a mapping {…}, or `~" + target->section->name +
                  "` to reset it");
        return;
      }
      return write_section(*target->section, value, one.op == Op::append ? Write::Op::append : Write::Op::set,
                           one.place);
    }
    if (target->prefix) {
      unknown("", target->spelling, one.path.place);
      return;
    }
    const Type& type = *target->field->type;
    if (value.empty && target->rest.empty() && one.op != Op::append &&
        (type.kind == Type::Kind::text || type.kind == Type::Kind::path)) {
      value = Node::scalar("", one.value_place, true);  // `key=` is the empty text
    }
    if (one.op == Op::add) {
      for (const auto& write : out_.writes) {
        if (write.dead || write.field != target->field || !same(write.rest, target->rest)) continue;
        error("C0106", "`" + target->field->path + "` already has an explicit value", one.place,
              "`+` only adds")
            .related(write.place, "set here")
            .help("to replace it write `" + one.path.text() + "=…`");
        return;
      }
    }
    if (one.op == Op::append && type.kind != Type::Kind::list && type.kind != Type::Kind::map &&
        target->rest.empty()) {
      error("C0103",
            "`+=` adds to lists and open mappings, and `" + target->field->path + "` takes " +
                type_text(type, *target->field),
            one.place)
          .help("write `" + one.path.text() + "=…`");
      return;
    }
    add_write(*target, value, one.op == Op::append ? Write::Op::append : Write::Op::set, one.place);
    replace_earlier();
  }

  // On the command line a later override of the same spelling wins, and the earlier one was for nothing. Two spellings of
  // one leaf have the same rank: they must agree.
  void replace_earlier() {
    const Write& last = out_.writes.back();
    if (last.op != Write::Op::set || last.value.kind == Node::Kind::map) return;
    for (size_t i = 0; i + 1 < out_.writes.size(); ++i) {
      const Write& earlier = out_.writes[i];
      if (earlier.dead || earlier.layer != last.layer || earlier.op != Write::Op::set ||
          earlier.field != last.field || !same(earlier.rest, last.rest))
        continue;
      if (earlier.spelling != last.spelling) {
        if (equal(*last.field, earlier.value, last.value)) continue;
        error("C0105",
              "`" + earlier.spelling + "` and `" + last.spelling +
                  "` are the same leaf and are given different values",
              last.place)
            .related(earlier.place, "given here, with the same rank")
            .help("keep one of them; the canonical name is `" + last.field->path + "`");
        continue;
      }
      auto& lint = error("C0603", "this override is replaced by a later one", earlier.place);
      lint.level = Level::warning;
      lint.name = "unused_override";
      lint.path = last.field->path;
      lint.related(last.place, "this one counts");
      out_.writes[i].dead = true;
    }
  }

  // `~path`: a leaf or section goes back to its soft value, an item or key is removed.
  void reset(const ParsedPath& path, const Node* expected) {
    const auto target = find(path);
    if (!target) return;
    if (target->field && !target->rest.empty()) {
      Write write;
      write.op = Write::Op::remove;
      write.field = target->field;
      write.rest = target->rest;
      write.place = path.place;
      write.spelling = target->spelling;
      write.layer = layer_;
      if (expected) {
        error("C0107", "`~path=value` compares leaves, not items", path.place)
            .help("write `~" + path.text() + "`");
        return;
      }
      out_.writes.push_back(std::move(write));
      return;
    }
    bool any = false;
    const Write* current = nullptr;
    for (auto& write : out_.writes) {
      const bool hit = target->field ? write.field == target->field
                                     : target->section && write.field->section == target->section->name;
      if (write.dead || !hit) continue;
      any = true;
      current = &write;
    }
    if (expected) {
      if (!target->field) {
        error("C0107", "`~section=value` is not an override", path.place)
            .help("write `~" + path.text() + "`");
        return;
      }
      if (!current || !equal(*target->field, current->value, *expected)) {
        auto& problem = error(
            "C0107",
            "`" + target->field->path + "` is not `" + shortened(expected->text) + "`, so it is not reset",
            path.place);
        if (current)
          problem.related(current->place, "set here");
        else
          problem.note("nothing sets it explicitly");
        return;
      }
    }
    if (!any) {
      auto& lint = error(
          "C0603", "nothing sets `" + path.text() + "` explicitly, so there is nothing to reset", path.place);
      lint.level = Level::warning;
      lint.name = "unused_override";
      return;
    }
    for (auto& write : out_.writes)
      if (target->field ? write.field == target->field : write.field->section == target->section->name)
        write.dead = true;
  }

  bool equal(const FieldInfo& field, const Node& a, const Node& b) const {
    std::vector<Diagnostic> ignored;
    ConvertContext context{&out_.sources, &ignored, {}};
    const auto x = convert(field, a, field.path, context), y = convert(field, b, field.path, context);
    return x && y ? *x == *y : a.text == b.text && a.kind == b.kind;
  }

  // ---- presets -----------------------------------------------------------------------------------------------------

  void choose_presets() {
    std::vector<Write> explicit_writes = std::move(out_.writes);
    out_.writes.clear();
    std::vector<Write> own;
    for (const auto& section : schema_.sections()) {
      const auto& choices = out_.choices[section.index];
      if (choices.empty() || choices.back().off || choices.back().preset.empty()) continue;
      const Choice choice = choices.back();
      out_.preset_of[section.index] = choice.preset;
      out_.layers.push_back({Layer::Rank::preset, section.name + "/" + choice.preset});
      layer_ = out_.layers.size() - 1;
      std::set<std::string> seen;
      read_preset(section, choice.preset, choice.place, seen);
    }
    // A section's own preset is stronger than what another section's preset says about it.
    std::vector<Write> soft = std::move(out_.writes);
    out_.writes.clear();
    const auto is_own = [&](const Write& write) {
      return out_.layers[write.layer].preset.starts_with(write.field->section + "/");
    };
    for (auto& write : soft)
      if (!is_own(write)) {
        for (const auto& other : out_.writes)
          if (other.field == write.field && other.layer != write.layer && same(other.rest, write.rest) &&
              !equal(*write.field, other.value, write.value) && !own_later(soft, write, is_own)) {
            error("C0506", "two presets set `" + write.field->path + "` differently", write.place,
                  "preset " + out_.layers[write.layer].preset)
                .related(other.place, "preset " + out_.layers[other.layer].preset)
                .help("set it explicitly in the recipe");
          }
        out_.writes.push_back(write);
      }
    for (auto& write : soft)
      if (is_own(write)) out_.writes.push_back(std::move(write));
    for (auto& write : explicit_writes) out_.writes.push_back(std::move(write));
  }

  template <class F>
  static bool own_later(const std::vector<Write>& soft, const Write& write, const F& is_own) {
    return std::any_of(soft.begin(), soft.end(),
                       [&](const Write& other) { return other.field == write.field && is_own(other); });
  }

  void read_preset(const SectionInfo& section, const std::string& name, Place place,
                   std::set<std::string>& seen) {
    if (!budget(place)) return;
    std::optional<int> source;
    const bool cli =
        place.known() && out_.sources[static_cast<size_t>(place.source)].kind == Source::Kind::cli;
    if (is_path(name)) {
      std::string file = name;
      if (!cli && place.known()) {
        const Source& from = out_.sources[static_cast<size_t>(place.source)];
        const Origin origin{from.kind == Source::Kind::embedded ? "" : from.directory, Layer::Rank::preset};
        const auto allowed = inside(name, place.source, origin, place);
        if (!allowed) return;
        file = *allowed;
      }
      source = read_named(file, file, place);
    } else {
      const auto found = library_.preset(section.name, name);
      if (!found) {
        error("C0505", "`" + section.name + "` has no preset named `" + shortened(name) + "`", place);
        return;
      }
      if (found->file.empty())
        source = add_found(*found);
      else
        source = read_named(found->file, found->name, place);
    }
    if (!source) return;
    if (!seen.insert(name).second) {
      error("C0501", "the preset `" + section.name + "/" + name + "` extends itself", place);
      return;
    }
    const auto tree = parse(*source);
    if (!tree) return;
    if (const Node* extends = tree->find("extends")) {
      if (extends->kind == Node::Kind::scalar)
        read_preset(section, extends->text, extends->place, seen);
      else
        error("C0501", "`extends` of a preset takes the name of one preset", extends->place);
    }
    for (size_t i = 0; i < tree->items.size(); ++i) {
      std::string key = tree->keys[i];
      if (key == "extends" || key == "schema") continue;
      const auto op = take_plus(key) ? Write::Op::append : Write::Op::set;
      ParsedPath path;
      path.place = tree->key_places[i];
      if (key.find('.') == std::string::npos)
        path.segments.push_back({Segment::Kind::name, section.name, {}, 0});
      for (const auto part : split(key, '.'))
        path.segments.push_back({Segment::Kind::name, std::string(part), {}, 0});
      const auto target = find(path);
      if (!target) continue;
      if (!target->field) {
        error("C0505", "a preset sets fields, not sections", tree->key_places[i]);
        continue;
      }
      if (target->field->no_preset) {
        error("C0505", "a preset may not set `" + target->field->path + "`", tree->key_places[i]);
        continue;
      }
      add_write(*target, tree->items[i], op, tree->key_places[i]);
    }
  }

  const Schema& schema_;
  const Library& library_;
  const Request& request_;
  Composition out_;
  std::string current_directory_;
  std::set<std::string> alias_prefixes_;  // `parallel` of `parallel.tp`
  const Origin* origin_ = nullptr;        // of the file being read; null on the command line
  size_t layer_ = 0;
  size_t files_ = 0;
  int64_t total_nodes_ = 0;
  int include_depth_ = 0;
  int unknown_ = 0;
};

}  // namespace

Composition compose(const Schema& schema, const Library& library, const Request& request) {
  return Composer(schema, library, request).run();
}

Diagnostic unknown_key(const Schema& schema, const std::string& section, const std::string& key, Place place,
                       bool suggest) {
  Diagnostic diagnostic;
  diagnostic.code = "C0102";
  diagnostic.place = place;
  const SectionInfo* known = section.empty() ? nullptr : schema.find_section(section);
  diagnostic.message = "unknown key `" + (section.empty() ? "" : section + ".") + shortened(key) + "`";
  diagnostic.label = known             ? "not a field of `" + section + "`"
                     : section.empty() ? "not a section"
                                       : "`" + section + "` is not a section";

  if (!suggest) return diagnostic;
  size_t offered = 0;
  const auto offer = [&](std::string text, const std::string& replacement) {
    if (offered++ < 3) diagnostic.help(std::move(text));
    if (offered == 1 && !replacement.empty()) diagnostic.replace(place, replacement);
  };
  // The same name in another section, or the name that another tool gives it.
  for (const FieldInfo* field : schema.fields())
    if (field->name == key && field->section != section)
      offer("a field with that name exists: `" + field->path + "`", "");
  for (const FieldInfo* field : schema.fields()) {
    if (field->name == key) continue;
    if (std::find(field->known_as.begin(), field->known_as.end(), key) != field->known_as.end())
      offer("it is called `" + field->path + "` here", field->section == section ? field->name : "");
    else if (field->section != section &&
             std::find(field->aliases.begin(), field->aliases.end(), key) != field->aliases.end())
      offer("a field with that name exists: `" + field->path + "`", "");
  }
  if (offered == 0 && known) {
    std::vector<std::string> names;
    for (const auto& field : known->fields) {
      names.push_back(field.name);
      for (const auto& alias : field.aliases)
        if (alias.find('.') == std::string::npos) names.push_back(alias);
    }
    std::set<const FieldInfo*> seen;
    for (const auto& near : near_matches(key, names, 6)) {
      const FieldInfo* field = schema.find_spelling(section + "." + near);
      if (!seen.insert(field).second) continue;
      const std::string is =
          field->path == section + "." + near ? "" : " (an alias of `" + field->path + "`)";
      offer("a field with a similar name exists: `" + section + "." + near + "`" + is, near);
    }
  }
  if (offered == 0 && !known) {
    std::vector<std::string> names;
    for (const auto& candidate : schema.sections())
      if (!candidate.name.empty()) names.push_back(candidate.name);
    for (const auto& field : schema.sections())
      if (field.name.empty())
        for (const auto& top : field.fields) names.push_back(top.name);
    for (const auto& near : near_matches(section.empty() ? key : section, names))
      offer("a section with a similar name exists: `" + near + "`", section.empty() ? near : "");
  }
  if (offered == 0) {
    std::vector<std::string> names;
    std::vector<const FieldInfo*> fields;
    for (const FieldInfo* field : schema.fields()) names.push_back(field->name);
    for (const auto& near : near_matches(key, names))
      for (const FieldInfo* field : schema.fields())
        if (field->name == near) {
          offer("a field with a similar name exists: `" + field->path + "`", "");
          break;
        }
  }
  if (offered == 0)
    diagnostic.help(known ? "`capstan explain " + section + "` lists the fields of the section"
                          : "`capstan explain` lists the sections");
  return diagnostic;
}

}  // namespace capstan::config
