// The values that a chat template computes with: Python's, as far as templates use them. Texts, lists and
// maps never change once they are made and hold data only, so that values form trees: nothing refers to
// itself.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace capstan::text::chat {

class Value;
struct Macro;
struct Frame;
using List = std::vector<Value>;

// A dict: keys keep the order of their first insertion, and a repeated key replaces the value, as in Python.
class Map {
 public:
  using Items = std::vector<std::pair<std::string, Value>>;
  void set(std::string_view key, Value value);
  const Value* find(std::string_view key) const;
  const Items& items() const { return items_; }
  size_t size() const;

 private:
  // Number of keys from which on lookups use a hash index.
  static constexpr size_t kIndexed = 16;
  Items items_;
  std::unordered_map<std::string, size_t> index_;
};

struct Undefined {
  // The name that was looked up, for messages.
  std::shared_ptr<const std::string> name;
};
struct None {};
struct ListNode {
  List items;
  bool tuple = false;
  // Nesting of values.
  int depth = 1;
  // Approximate size of its text in bytes; shared parts count each time.
  int64_t weight = 0;
};
struct MapNode {
  Map map;
  int depth = 1;
  int64_t weight = 0;
};
// The attributes of a namespace() object, which is the only mutable value.
struct NamespaceNode {
  Map attributes;
};
// The variable `loop` inside a for statement.
struct LoopNode {
  std::shared_ptr<const ListNode> items;
  int64_t index = 0;
};
// A macro, a global function, or a method of a value.
struct CallableNode;

class Value {
 public:
  using Text = std::shared_ptr<const std::string>;
  static constexpr int kMaxDepth = 128;
  static constexpr int64_t kMaxWeight = int64_t{1} << 30;

  // Constructs an undefined value.
  Value() = default;
  Value(None) : data_(None{}) {}
  Value(bool value) : data_(value) {}
  Value(int64_t value) : data_(value) {}
  Value(double value) : data_(value) {}
  Value(std::string text) : data_(std::make_shared<const std::string>(std::move(text))) {}
  Value(const char* text) : Value(std::string(text)) {}
  Value(std::shared_ptr<NamespaceNode> node) : data_(std::move(node)) {}
  Value(std::shared_ptr<const LoopNode> node) : data_(std::move(node)) {}
  Value(std::shared_ptr<const CallableNode> node) : data_(std::move(node)) {}
  static Value undefined(std::string name);
  // Returns nullopt if the value exceeds kMaxDepth or kMaxWeight, or contains something other than data (a
  // namespace, a macro or a method).
  static std::optional<Value> list(List items, bool tuple = false);
  static std::optional<Value> map(Map map);

  template <class T>
  const T* as() const {
    return std::get_if<T>(&data_);
  }
  bool is_undefined() const { return as<Undefined>() != nullptr; }
  bool is_none() const { return as<None>() != nullptr; }
  const std::string* text() const {
    const auto* node = as<Text>();
    return node ? node->get() : nullptr;
  }
  const ListNode* list_node() const {
    const auto* node = as<std::shared_ptr<const ListNode>>();
    return node ? node->get() : nullptr;
  }
  const List* list() const {
    const ListNode* node = list_node();
    return node ? &node->items : nullptr;
  }
  const Map* map() const {
    const auto* node = as<std::shared_ptr<const MapNode>>();
    return node ? &(*node)->map : nullptr;
  }
  NamespaceNode* name_space() const {
    const auto* node = as<std::shared_ptr<NamespaceNode>>();
    return node ? node->get() : nullptr;
  }
  const LoopNode* loop() const {
    const auto* node = as<std::shared_ptr<const LoopNode>>();
    return node ? node->get() : nullptr;
  }
  const CallableNode* callable() const {
    const auto* node = as<std::shared_ptr<const CallableNode>>();
    return node ? node->get() : nullptr;
  }
  bool is_number() const { return as<bool>() || as<int64_t>() || as<double>(); }
  // The value as an integer; True and False count as 1 and 0.
  std::optional<int64_t> integer() const;
  std::optional<double> number() const;

  bool truthy() const;
  bool is_data() const { return !name_space() && !loop() && !callable(); }
  int depth() const;
  // The cost of printing or comparing it.
  int64_t weight() const;
  // Python's name of the type: "str", "dict".
  const char* type_name() const;

 private:
  std::variant<Undefined, None, bool, int64_t, double, Text, std::shared_ptr<const ListNode>,
               std::shared_ptr<const MapNode>, std::shared_ptr<NamespaceNode>,
               std::shared_ptr<const LoopNode>, std::shared_ptr<const CallableNode>>
      data_;
};

struct CallableNode {
  const Macro* macro = nullptr;
  // The frame in which the macro was defined. It lives as long as the macro can be called.
  Frame* frame = nullptr;
  // The object of a method; undefined for a global function.
  Value self;
  std::string name;
};

inline size_t Map::size() const {
  return items_.size();
}

// Python's ==.
bool equal(const Value& a, const Value& b);
// Python's <; nullopt where Python has no order between them.
std::optional<bool> less(const Value& a, const Value& b);

// The output of `{{ value }}`: str(), and repr() inside of lists and maps. Undefined prints nothing.
void print(const Value& value, std::string& out);
void print_repr(const Value& value, std::string& out);
// Python's repr of a float.
std::string number_text(double value);

struct JsonStyle {
  // Indentation of one nesting level; nullopt prints everything in one line.
  std::optional<std::string> indent;
  std::string item_separator = ", ", key_separator = ": ";
  bool ascii = false, sort_keys = false;
};
// Appends the value as json.dumps() prints it at a nesting level. Returns false if it has no JSON form.
bool print_json(const Value& value, const JsonStyle& style, std::string& out, size_t level = 0);

// Length in bytes of the character at `offset` if Python counts it as white space, else 0.
size_t blank_at(std::string_view text, size_t offset);
std::string_view strip_front(std::string_view text);
std::string_view strip_back(std::string_view text);

}  // namespace capstan::text::chat
