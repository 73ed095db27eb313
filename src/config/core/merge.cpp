#include "config/core/merge.hpp"

#include <algorithm>
#include <span>
#include <unordered_map>

#include "base/text.hpp"
#include "base/wording.hpp"
#include "config/core/convert.hpp"
#include "config/core/emit.hpp"

namespace capstan::config {

Node node_from_value(const Type& of_field, const Value& value) {
  const Type& type = of_field.type_for(value);
  Node node;
  switch (value.kind) {
    case Value::Kind::null:
      node.text = "null";
      break;
    case Value::Kind::list:
      node.kind = Node::Kind::list;
      for (const auto& item : value.items) node.items.push_back(node_from_value(*type.element, item));
      break;
    case Value::Kind::map:
      node.kind = Node::Kind::map;
      for (size_t i = 0; i < value.items.size(); ++i) {
        const FieldInfo* field = type.record ? type.record->find(value.keys[i]) : nullptr;
        node.add(value.keys[i], {}, node_from_value(field ? *field->type : *type.element, value.items[i]));
      }
      break;
    default: {
      const bool path = type.kind == Type::Kind::path && !value.resolved.empty();
      node =
          Node::scalar(path ? value.resolved : scalar_text(type, value), {}, type.kind == Type::Kind::text);
      node.raw = true;
      if (type.kind == Type::Kind::secret && node.text.starts_with("env:"))
        node.text = "${env:" + node.text.substr(4) + "}";
    }
  }
  return node;
}

namespace {

class Editor {
 public:
  Editor(const Write& write, std::vector<Diagnostic>& diagnostics)
      : write_(write), diagnostics_(diagnostics) {}

  bool edit(Node& target, const Type& type, std::span<const Segment> rest, const std::string& path) {
    if (rest.empty()) return write_.op == Write::Op::append ? append(target, type, path) : set(target, type);
    const Segment& segment = rest[0];
    switch (type.kind) {
      case Type::Kind::list:
        return item(target, type, rest, path);
      case Type::Kind::map:
      case Type::Kind::record: {
        if (segment.kind == Segment::Kind::id)
          return error("C0108", "`" + path + "` is a mapping: its keys are joined with a dot");
        const std::string key = segment.name.empty() ? std::to_string(segment.index) : segment.name;
        const Type* element = type.element;
        if (type.kind == Type::Kind::record) {
          const FieldInfo* field = type.record->find(key);
          if (!field) {
            std::vector<std::string> names;
            for (const auto& candidate : type.record->fields) names.push_back(candidate.name);
            std::string help;
            for (const auto& near : near_matches(key, names, 1))
              help = "a field with a similar name exists: `" + near + "`";
            return error("C0102", "unknown key `" + path + "." + key + "`", help);
          }
          element = field->type;
        }
        if (target.kind == Node::Kind::null) target = empty(Node::Kind::map);
        if (target.kind != Node::Kind::map)
          return error("C0108", "`" + path + "` holds no mapping to reach into");
        const auto found = std::find(target.keys.begin(), target.keys.end(), key);
        const auto at = static_cast<size_t>(found - target.keys.begin());
        if (rest.size() == 1 && write_.op == Write::Op::remove) {
          if (found == target.keys.end()) return missing(path, key, target.keys);
          target.keys.erase(found);
          target.key_locations.erase(target.key_locations.begin() + static_cast<std::ptrdiff_t>(at));
          target.items.erase(target.items.begin() + static_cast<std::ptrdiff_t>(at));
          return true;
        }
        if (found == target.keys.end()) {
          if (write_.op == Write::Op::remove) return missing(path, key, target.keys);
          target.add(key, write_.location, Node());
          return edit(target.items.back(), *element, rest.subspan(1), path + "." + key);
        }
        return edit(target.items[at], *element, rest.subspan(1), path + "." + key);
      }
      default:
        return error("C0108", "`" + path + "` is a single value without items or keys");
    }
  }

 private:
  bool error(const char* code, std::string message, std::string help = {}) {
    Diagnostic diagnostic;
    diagnostic.code = code;
    diagnostic.message = std::move(message);
    diagnostic.location = write_.location;
    diagnostic.path = write_.field->path;
    diagnostic.help(std::move(help));
    diagnostics_.push_back(std::move(diagnostic));
    return false;
  }
  bool missing(const std::string& path, const std::string& key, const std::vector<std::string>& keys) {
    std::string help;
    for (const auto& near : near_matches(key, keys, 1))
      help = "a key with a similar name exists: `" + near + "`";
    return error("C0108", "`" + path + "` has no key `" + key + "`", help);
  }
  static Node empty(Node::Kind kind) {
    Node node;
    node.kind = kind;
    return node;
  }

  bool set(Node& target, const Type& type) {
    if (type.kind == Type::Kind::map && target.kind == Node::Kind::map &&
        write_.value.kind == Node::Kind::map)
      return merge(target);
    target = write_.value;
    return true;
  }

  bool merge(Node& target) {
    std::unordered_map<std::string, size_t> index;
    for (size_t i = 0; i < target.keys.size(); ++i) index.emplace(target.keys[i], i);
    for (size_t i = 0; i < write_.value.items.size(); ++i) {
      const auto [location, fresh] = index.emplace(write_.value.keys[i], target.keys.size());
      if (fresh)
        target.add(write_.value.keys[i], write_.value.key_locations[i], write_.value.items[i]);
      else
        target.items[location->second] = write_.value.items[i];
    }
    return true;
  }

  bool append(Node& target, const Type& type, const std::string& path) {
    if (type.kind == Type::Kind::map) {
      if (write_.value.kind != Node::Kind::map)
        return error("C0206", "`" + path + "` is a mapping: add to it with {key: value}");
      if (target.kind == Node::Kind::null) target = empty(Node::Kind::map);
      return merge(target);
    }
    if (type.kind != Type::Kind::list)
      return error("C0103", "`+=` adds to lists and open mappings, and `" + path + "` is a single value",
                   "write `=`");
    if (write_.value.empty) return error("C0203", "nothing to append to `" + path + "`");
    if (target.kind == Node::Kind::null) target = empty(Node::Kind::list);
    // One item given without brackets.
    if (target.kind == Node::Kind::scalar) {
      Node list = empty(Node::Kind::list);
      list.location = target.location;
      list.items.push_back(std::move(target));
      target = std::move(list);
    }
    if (target.kind != Node::Kind::list) return error("C0206", "`" + path + "` holds no list to append to");
    if (write_.value.kind == Node::Kind::list)
      target.items.insert(target.items.end(), write_.value.items.begin(), write_.value.items.end());
    else
      target.items.push_back(write_.value);
    if (!target.location.known()) target.location = write_.location;
    return true;
  }

  bool item(Node& target, const Type& type, std::span<const Segment> rest, const std::string& path) {
    const Segment& segment = rest[0];
    const auto size = target.kind == Node::Kind::list ? static_cast<long long>(target.items.size()) : 0;
    if (target.kind == Node::Kind::scalar)
      return error("C0206", "`" + path + "` holds no list to reach into");
    long long at = -1;
    std::string name;
    if (segment.kind == Segment::Kind::index) {
      name = path + "[" + std::to_string(segment.index) + "]";
      at = segment.index < 0 ? size + segment.index : segment.index;
      if (at < 0 || at >= size)
        return error("C0108", "`" + name + "` is out of range: the list has " + counted(size, "item"),
                     "to append an item write `" + path + "+=…`");
    } else if (segment.kind == Segment::Kind::id) {
      name = path + "[" + segment.name + "=" + segment.text + "]";
      std::vector<std::string> ids;
      for (long long i = 0; i < size; ++i) {
        const Node* id = target.items[static_cast<size_t>(i)].find(segment.name);
        if (!id) continue;
        ids.push_back(id->text);
        if (id->text == segment.text) at = i;
      }
      if (at < 0) {
        std::string help;
        for (const auto& near : near_matches(segment.text, ids, 1))
          help = "an item with a similar name exists: `" + near + "`";
        return error("C0108", "`" + path + "` has no item with " + segment.name + " `" + segment.text + "`",
                     help);
      }
    } else {
      return error("C0108",
                   "`" + path + "` is a list: its items are reached by number, as in `" + path + "[0]`");
    }
    if (rest.size() == 1 && write_.op == Write::Op::remove) {
      target.items.erase(target.items.begin() + at);
      return true;
    }
    return edit(target.items[static_cast<size_t>(at)], *type.element, rest.subspan(1), name);
  }

  const Write& write_;
  std::vector<Diagnostic>& diagnostics_;
};

}  // namespace

bool apply_write(std::optional<Node>& node, const Write& write, std::vector<Diagnostic>& diagnostics) {
  const Type& type = *write.field->type;
  const bool merges = type.kind == Type::Kind::map && write.value.kind == Node::Kind::map;
  if (!node && (merges || write.op != Write::Op::set || !write.rest.empty())) {
    node = node_from_value(type, write.field->default_value);
    if (node->kind == Node::Kind::null) node->empty = false;
  }
  if (!node) node.emplace();
  return Editor(write, diagnostics).edit(*node, type, write.rest, write.field->path);
}

}  // namespace capstan::config
