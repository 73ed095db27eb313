#include "importers/shell_blocks.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/text.hpp"

namespace capstan::importers {

namespace {

// Limit of the nesting of blocks such as `if` and `{`.
constexpr size_t kMaxBlockDepth = 1000;

}  // namespace

void ShellBlocks::mark(Words& value, const Words& before, size_t branch) {
  const auto marked = static_cast<uint16_t>(std::min<size_t>(branch, UINT16_MAX));
  size_t kept = 0;
  if (value.size() == 1 && before.size() == 1 && value[0].text.starts_with(before[0].text) &&
      std::equal(before[0].offsets.begin(), before[0].offsets.end(), value[0].offsets.begin()))
    kept = before[0].text.size();
  for (ShellWord& word : value) {
    for (size_t i = kept; i < word.marks.size(); ++i)
      if (word.marks[i] == 0) word.marks[i] = marked;
  }
}

bool ShellBlocks::is_blank(const Words& value) {
  return std::all_of(value.begin(), value.end(),
                     [](const ShellWord& word) { return trim(word.text).empty(); });
}

void ShellBlocks::change(const std::string& name, std::optional<Words> value, size_t begin) {
  keep_from_subshell(name);
  const auto found = variables_.find(name);
  const bool known = found != variables_.end();
  const size_t branch = undecided();
  // A branch that unsets a variable which the script has never set leaves nothing to mark.
  if (!value && !known && branch) return;
  if (branch) {
    out_.branches[branch - 1].assigns = true;
    if (value && known) note_alternatives(name, found->second, *value);
    if (value) mark(*value, known ? found->second : Words{}, branch);
    Words before;
    if (known)
      before = std::move(found->second);
    else if (!unset_.contains(name))
      before = as_written(name, begin);
    mark(before, {}, branch);
    if (list_.runs == Truth::unknown) {
      change_in_list(name, value, std::move(before));
    } else if (Block* block = undecided_block()) {
      block->replaced.emplace(name, std::move(before));
    }
  }
  if (value) {
    variables_[name] = std::move(*value);
  } else {
    variables_.erase(name);
    unset_.insert(name);
  }
}

void ShellBlocks::note_alternatives(const std::string& name, const Words& current, const Words& value) {
  constexpr size_t kMaxAlternatives = 8, kMaxBytes = 1000;
  const Block* block = list_.runs == Truth::unknown ? nullptr : undecided_block();
  // A second assignment in the same branch replaces the first one in any case.
  const auto replaced = block ? block->replaced.find(name) : std::map<std::string, Words>::const_iterator();
  const Words& before = block && replaced != block->replaced.end() ? replaced->second : current;
  if (is_blank(before) || is_blank(value) || value[0].offsets.empty() || before[0].offsets.empty()) return;
  const uint32_t first = value[0].offsets[0], other = before[0].offsets[0];
  if (first == other) return;
  std::vector<ShellAlternative> list;
  if (const auto known = out_.alternatives.find(other); known != out_.alternatives.end())
    list = known->second;
  ShellAlternative added{other, {}};
  for (const ShellWord& word : before) added.text += (added.text.empty() ? "" : " ") + word.text;
  if (list.size() < kMaxAlternatives && added.text.size() <= kMaxBytes) list.push_back(std::move(added));
  out_.alternatives[first] = std::move(list);
}

void ShellBlocks::change_in_list(const std::string& name, std::optional<Words>& value, Words before) {
  const bool empties = !value || is_blank(*value);
  if (empties && !list_.all && list_.emptied.contains(name)) return;
  if (empties && list_.all)
    list_.emptied.insert(name);
  else
    list_.emptied.erase(name);
  if (!value || (empties && !is_blank(before))) value = std::move(before);
}

Words ShellBlocks::as_written(const std::string& name, size_t begin) {
  Builder b;
  for (const char c : "$" + name) put(b, c, begin);
  finish(b);
  return std::move(b.finished);
}

void ShellBlocks::forget(const std::string& name) {
  keep_from_subshell(name);
  variables_.erase(name);
  unset_.erase(name);
  for (Block& block : blocks_) block.replaced.erase(name);
}

ShellBlocks::Block& ShellBlocks::open_block(Block::Kind kind, size_t begin) {
  if (blocks_.size() == kMaxBlockDepth)
    fail(ErrorCode::format, "more than " + std::to_string(kMaxBlockDepth) + " nested blocks");
  Block& block = blocks_.emplace_back();
  block.kind = kind;
  block.begin = begin;
  block.condition_begin = at_;
  block.list = std::exchange(list_, {});
  block.function = std::exchange(defining_, {});
  if (!block.function.empty()) block.runs = Truth::no;
  return block;
}

void ShellBlocks::close_block(size_t end) {
  end_branch(blocks_.back());
  const Block block = std::move(blocks_.back());
  blocks_.pop_back();
  const bool group = block.kind == Block::Kind::group || block.kind == Block::Kind::subshell;
  closed_ = {block.function.empty() ? group ? block.value : Truth::unknown : Truth::yes, block.begin};
  list_ = block.list;
  if (!block.function.empty() && !skipping()) functions_[block.function] = {block.condition_begin, end};
  for (const auto& [name, before] : block.outside) restore(name, before);
  if (!block.exhaustive) return;
  for (const auto& [name, branches] : block.emptied)
    if (branches == block.branches) change(name, Words{}, block.begin);
}

void ShellBlocks::end_branch(Block& block) {
  for (auto& [name, before] : std::exchange(block.replaced, {})) {
    const auto found = variables_.find(name);
    const bool known = found != variables_.end();
    if (known && !is_blank(found->second)) continue;
    ++block.emptied[name];
    if (!known || !is_blank(before)) variables_[name] = std::move(before);
  }
}

bool ShellBlocks::skipping() const {
  return list_.runs == Truth::no || std::any_of(blocks_.begin(), blocks_.end(), [](const Block& block) {
           return block.list.runs == Truth::no || (!block.condition && block.runs == Truth::no);
         });
}

size_t ShellBlocks::undecided() const {
  for (const Block& block : blocks_) {
    if (block.list.runs == Truth::unknown) return block.list.branch;
    if (!block.condition && block.runs == Truth::unknown) return block.undecided;
  }
  return list_.runs == Truth::unknown ? list_.branch : 0;
}

ShellBlocks::Block* ShellBlocks::undecided_block() {
  for (size_t i = blocks_.size(); i-- > 0;) {
    Block& block = blocks_[i];
    if (block.list.runs == Truth::unknown || (!block.condition && block.runs == Truth::unknown))
      return &block;
  }
  return nullptr;
}

std::string ShellBlocks::written_since(size_t begin) const {
  std::string text;
  for (const char c : text_.substr(begin, std::min<size_t>(at_ - begin, 200)))
    if (const bool gap = is_space_or_tab(c) || c == '\n' || c == ';';
        !gap || (!text.empty() && text.back() != ' '))
      text += gap ? ' ' : c;
  for (const std::string_view end : {"then", "do"})
    if (text.ends_with(" " + std::string(end))) text.resize(text.size() - end.size());
  while (text.ends_with(' ') || text.ends_with('&') || text.ends_with('|')) text.pop_back();
  return text;
}

size_t ShellBlocks::report_branch(size_t begin, std::string text, const std::vector<std::string>& variables) {
  // The branch is inside another one that is reported or skipped.
  if (skipping() || undecided()) return undecided();
  ShellBranch branch{static_cast<uint32_t>(begin), std::move(text), variables, {}, false};
  for (const std::string& name : variables)
    if (const auto found = defaults_.find(name); found != defaults_.end()) branch.defaults.insert(*found);
  out_.branches.push_back(std::move(branch));
  return out_.branches.size();
}

void ShellBlocks::note_variables(const ShellCommand& command, std::vector<std::string>& variables) const {
  for (const ShellWord& word : command) {
    add_names(variables, word.defaulted);
    for (size_t i = 0; i < word.marks.size(); ++i)
      if (const size_t mark = word.marks[i]; mark > 0 && (i == 0 || word.marks[i - 1] != mark))
        add_names(variables, out_.branches[mark - 1].variables);
    for (const std::string_view begin : {"the script does not set `", "it is an argument"}) {
      if (!word.unknown_reason.starts_with(begin)) continue;
      std::string name;
      if (begin.ends_with('`'))
        name = word.unknown_reason.substr(begin.size(), word.unknown_reason.size() - begin.size() - 1);
      else if (const size_t dollar = word.text.find('$'); dollar + 1 < word.text.size())
        name = word.text.substr(dollar + 1, 1);
      if (!name.empty()) add_names(variables, {name});
    }
  }
}

void ShellBlocks::begin_branch(Block& block, Truth holds) {
  end_branch(block);
  const Truth runs = both(holds, negated(block.before));
  block.condition = false;
  // report_branch() must consider only the enclosing branches.
  block.runs = Truth::yes;
  if (runs == Truth::unknown && !block.undecided)
    block.undecided = report_branch(
        block.begin, block.text.empty() ? "if " + written_since(block.condition_begin) : block.text,
        block.variables);
  block.runs = runs;
  block.before = either(block.before, runs);
  if (runs != Truth::no) ++block.branches;
  block.exhaustive = block.exhaustive || holds == Truth::yes;
}

void ShellBlocks::keep(const std::string& name, std::map<std::string, SavedVariable>& outside) const {
  if (outside.contains(name)) return;
  const auto found = variables_.find(name);
  outside[name] = {found == variables_.end() ? std::nullopt : std::optional(found->second),
                   unset_.contains(name)};
}

void ShellBlocks::keep_from_subshell(const std::string& name) {
  for (size_t i = blocks_.size(); i-- > 0;)
    if (blocks_[i].kind == Block::Kind::subshell) return keep(name, blocks_[i].outside);
}

void ShellBlocks::restore(const std::string& name, SavedVariable before) {
  if (before.value)
    variables_[name] = std::move(*before.value);
  else
    variables_.erase(name);
  if (before.unset)
    unset_.insert(name);
  else
    unset_.erase(name);
}

}  // namespace capstan::importers
