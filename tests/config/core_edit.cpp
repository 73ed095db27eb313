// The text of a recipe, changed where the parser points.
#include <doctest/doctest.h>

#include "config/tools/edit.hpp"
#include "core_support.hpp"

using namespace capstan::config;
using namespace capstan::config::testing;

namespace {

std::string fixed(const std::string& text) {
  const Workspace w;
  Request request;
  request.recipe = w.path("r.yaml");
  const auto resolve = [&](const std::string& content) {
    Root root;
    return resolve_text_into(test_schema(), test_library(), &root, request, content);
  };
  const FixResult once = fix_recipe(test_schema(), text, resolve);
  CHECK(fix_recipe(test_schema(), once.text, resolve).text == once.text);
  return once.text;
}

}  // namespace

TEST_CASE("fix writes the new name of a renamed key, wherever the key stands") {
  CHECK(fixed("train:\n  max_steps: 5  # short\n") == "train:\n  iters: 5  # short\n");
  CHECK(fixed("train: {note: x, max_steps: 5}\n") == "train: {note: x, iters: 5}\n");
  CHECK(fixed("train.max_steps: 5\n") == "train.iters: 5\n");
  // Never a second time.
  CHECK(fixed("train: {iters: 4, max_steps: 5}\n") == "train: {iters: 4, max_steps: 5}\n");
}

TEST_CASE("fix: names of other tools, near names and spellings, items of lists among them") {
  CHECK(fixed("train: {per_device_train_batch_size: 2}\n") == "train: {micro_batch: 2}\n");
  CHECK(fixed("dataset: {sources: [{name: x, wieght: 1}]}\n") ==
        "dataset: {sources: [{name: x, weight: 1}]}\n");
  CHECK(fixed("model: {norm: RMSNORM, hidden_size: 0x40}\n") == "model: {norm: RMSNorm, hidden_size: 64}\n");
  CHECK(fixed("optimiser: {lr: 1}\n") == "optimizer: {lr: 1}\n");
  // Text in other alphabets before the place; a comment that looks like the key.
  CHECK(fixed("train: {title: \"größe\", max_steps: 5}  # max_steps\n") ==
        "train: {title: \"größe\", iters: 5}  # max_steps\n");
}

TEST_CASE("an entry is removed, with or without its comments") {
  const std::string text =
      "# about the file\n"
      "model:\n"
      "  hidden_size: 8  # wide\n"
      "  norm: 'a # b'\n"
      "train:\n"
      "  tags:\n"
      "    - a\n"
      "    # between\n"
      "    - b\n"
      "  note: >\n"
      "    # text\n"
      "    more\n"
      "optimizer: {lr: 1, beta: [1, 2], min_lr: 0}\n";
  const auto without = [](const std::string& of, const std::string& section, const std::string& key,
                          CommentsOfEntry comments) {
    const std::vector<capstan::config::Source> sources{{capstan::config::Source::Kind::file, "", of, ""}};
    std::vector<Diagnostic> problems;
    const auto tree = parse_yaml(0, sources, problems);
    REQUIRE(tree);
    for (const Entry& entry : entries_of(*tree))
      if (entry.section == section && entry.key == key) return apply_edits(of, removal(of, entry, comments));
    return std::string("no such entry");
  };
  const auto replaced = [&](const std::string& part, const std::string& by) {
    std::string out = text;
    return out.replace(out.find(part), part.size(), by);
  };
  const auto stays = [&](const std::string& section, const std::string& key) {
    return without(text, section, key, CommentsOfEntry::stay);
  };
  CHECK(stays("model", "hidden_size") == replaced("  hidden_size: 8  # wide\n", "  # wide\n"));
  CHECK(stays("model", "norm") == replaced("  norm: 'a # b'\n", ""));
  CHECK(stays("train", "tags") == replaced("  tags:\n    - a\n    # between\n    - b\n", "    # between\n"));
  CHECK(stays("train", "note") == replaced("  note: >\n    # text\n    more\n", ""));
  CHECK(stays("optimizer", "lr") == replaced("lr: 1, ", ""));
  CHECK(stays("optimizer", "beta") == replaced("beta: [1, 2], ", ""));
  CHECK(stays("optimizer", "min_lr") == replaced(", min_lr: 0", ""));

  const auto goes = [&](const std::string& section, const std::string& key) {
    return without(text, section, key, CommentsOfEntry::go);
  };
  CHECK(goes("model", "hidden_size") == replaced("  hidden_size: 8  # wide\n", ""));
  CHECK(goes("train", "tags") == replaced("  tags:\n    - a\n    # between\n    - b\n", ""));
  const std::string commented =
      "# about the file\nmodel: {norm: x}\n\n# why\n# and how\ntrain:  # steps\n"
      "  # few\n  iters: 3  # three\n# last\noptimizer:\n  # another\n\n  # the peak\n  lr: 1\n  beta: 2\n";
  CHECK(without(commented, "train", "iters", CommentsOfEntry::go) ==
        "# about the file\nmodel: {norm: x}\n\n# last\noptimizer:\n  # another\n\n  # the peak\n  lr: 1\n"
        "  beta: 2\n");
  CHECK(without(commented, "", "model", CommentsOfEntry::go).starts_with("# about the file\n\n# why\n"));
  CHECK(without(commented, "optimizer", "lr", CommentsOfEntry::go)
            .ends_with("# last\noptimizer:\n  # another\n\n  beta: 2\n"));

  // Braces over several lines.
  const std::string braces =
      "# about the file\ntrain: {\n  # of the base\n  # and more\n  iters: 3,   # two\n  max: 1,  # keep\n"
      "  # last\n  note: 'x'  # end\n}\nmodel: {a: 1,  # first\n  # of both\n  b: 2, c: 3}\n";
  const auto from_braces = [&](const std::string& section, const std::string& key, CommentsOfEntry comments) {
    return without(braces, section, key, comments);
  };
  const auto shortened = [&](const std::string& part, const std::string& by) {
    std::string out = braces;
    return out.replace(out.find(part), part.size(), by);
  };
  CHECK(from_braces("train", "iters", CommentsOfEntry::go) ==
        shortened("  # of the base\n  # and more\n  iters: 3,   # two\n", ""));
  CHECK(from_braces("train", "max", CommentsOfEntry::go) == shortened("  max: 1,  # keep\n", ""));
  CHECK(from_braces("train", "note", CommentsOfEntry::go) ==
        shortened("max: 1,  # keep\n  # last\n  note: 'x'  # end\n", "max: 1  # keep\n"));
  CHECK(from_braces("train", "iters", CommentsOfEntry::stay) == shortened("iters: 3,   # two", "# two"));
  CHECK(from_braces("model", "b", CommentsOfEntry::go) == shortened("b: 2, ", ""));
  CHECK(from_braces("model", "c", CommentsOfEntry::go) == shortened(", c: 3", ""));
}
