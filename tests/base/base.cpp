#include <doctest/doctest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <set>

#include "base/checked.hpp"
#include "base/cursor.hpp"
#include "base/file.hpp"
#include "base/json.hpp"
#include "base/missing.hpp"
#include "base/philox.hpp"
#include "base/text.hpp"
#include "base/utf8.hpp"
#include "base/wording.hpp"
#include "support/errors.hpp"
#include "support/temporary_directory.hpp"

using namespace capstan;

TEST_CASE("JSON errors name file, line, column and key; what is no UTF-8 is replaced in the output") {
  CHECK(test::error_of([] {
          parse_json("{\"a\": 1,\n \"é\": }", "f.json");
        }).starts_with("format: f.json:2:7: bad JSON"));
  CHECK(test::error_of([] { parse_json(R"({"a": 1, "a": 2})", "f.json"); }) ==
        "format: f.json: duplicate key \"a\"");
  CHECK(test::error_of([] { parse_json("[[[]]]", "f.json", 2); }) ==
        "format: f.json: JSON nested deeper than 2");
  const Json json = parse_json(R"({"a": {"b": -1}})", "f.json");
  CHECK(test::error_of([&] { JsonView(json, "f.json").at("a").at("b").count(); }) ==
        "format: f.json: `.a.b` is not an integer in [0, 2^63) but -1");
  CHECK(test::error_of([&] { JsonView(json, "f.json").at("c"); }) == "format: f.json: `.` lacks `c`");
  CHECK(dump_json(OrderedJson{{"b", "\xff"}, {"a", std::numeric_limits<double>::infinity()}}) ==
        "{\"b\":\"\uFFFD\",\"a\":null}");
}

TEST_CASE("JSON: a value of another type is refused with its place, what was expected and what is there") {
  const Json json =
      parse_json(R"({"list": [1, "two", true], "real": 0.5, "wide": 18446744073709551615})", "f.json");
  const JsonView view(json, "f.json");
  const auto items = view.at("list").items();
  REQUIRE(items.size() == 3);
  CHECK(items[0].integer(1, 10) == 1);
  CHECK(items[1].string() == "two");
  CHECK(items[2].boolean());
  CHECK(view.at("real").number() == 0.5);
  const auto error = [](const auto& read) { return test::error_of([&] { read(); }); };
  CHECK(error([&] { items[0].integer(2, 10); }) ==
        "format: f.json: `.list[0]` is not an integer from 2 to 10 but 1");
  CHECK(error([&] { items[1].number(); }) == "format: f.json: `.list[1]` is not a finite number but \"two\"");
  CHECK(error([&] { items[0].boolean(); }) == "format: f.json: `.list[0]` is not true or false but 1");
  CHECK(error([&] { view.at("real").items(); }) == "format: f.json: `.real` is not an array but 0.5");
  for (const int64_t least : {INT64_MIN, int64_t{0}})
    CHECK(error([&] { view.at("wide").integer(least, INT64_MAX); }).find("but 18446744073709551615") !=
          std::string::npos);
  CHECK(json_excerpt(std::string(100, 'x')) == "\"" + std::string(59, 'x') + "…");
}

TEST_CASE("JSON: what is wrong with a text is found without making a value of it") {
  CHECK_FALSE(find_json_problem(R"({"a": [1, 2.5, "x", null, true, {}]})"));
  const auto problem = find_json_problem("{\"a\":\n 1, é}");
  REQUIRE(problem);
  CHECK(problem->offset == 10);
  CHECK(problem->reason.starts_with("syntax error"));
  CHECK(line_and_column("{\"a\":\n 1, é}", 12) == "2:6");  // é is one character
  CHECK(line_and_column("ab", 99) == "1:3");
}

TEST_CASE("philox4x32-10 equals the known answers of Random123") {
  const auto zero = philox4x32({0, 0}, 0, 0);
  CHECK(zero == std::array<uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  const auto ones = philox4x32({0xffffffff, 0xffffffff}, UINT64_MAX, UINT64_MAX);
  CHECK(ones == std::array<uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  const auto pi = philox4x32({0xa4093822, 0x299f31d0}, 0x85a308d3243f6a88, 0x0370734413198a2e);
  CHECK(pi == std::array<uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("normal variates have mean 0, variance 1 and no neighbors in common") {
  const auto key = philox_key(1234, purpose::test, 0);
  double sum = 0, squares = 0, product = 0, last = 0;
  const int n = 100000;
  for (int i = 0; i < n; ++i) {
    const double x = normal_at(key, static_cast<uint64_t>(i));
    sum += x, squares += x * x, product += x * last, last = x;
  }
  CHECK(std::abs(sum / n) < 0.02);
  CHECK(std::abs(squares / n - 1) < 0.02);
  CHECK(std::abs(product / n) < 0.02);
}

TEST_CASE("keys of different seed, purpose or index differ") {
  std::set<std::pair<uint32_t, uint32_t>> keys;
  for (uint64_t seed = 0; seed < 10; ++seed)
    for (uint32_t use = 0; use < 10; ++use)
      for (uint64_t index = 0; index < 10; ++index) {
        const auto key = philox_key(seed, use, index);
        keys.insert({key.k0, key.k1});
      }
  CHECK(keys.size() == 1000);
}

TEST_CASE("numbers are read completely or not at all") {
  CHECK(parse_int("42") == 42);
  CHECK(parse_int("+5") == 5);
  CHECK(!parse_int("4 2"));
  CHECK(!parse_int(""));
  CHECK(!parse_int("99999999999999999999"));
  CHECK(parse_double("1e-4") == 1e-4);
  CHECK(!parse_double("1,5"));
  CHECK(to_text(0.1) == "0.1");
  CHECK(to_text(1e-300 * 1e-300) == "0");
}

TEST_CASE("near matches find the typo and the missing suffix, and nothing far") {
  const std::vector<std::string> names{"learning_rate", "lr", "lr_warmup_iters", "hidden_size", "num_layers"};
  CHECK(near_matches("hiden_size", names) == std::vector<std::string>{"hidden_size"});
  CHECK(near_matches("lr_warmup_iter", names).at(0) == "lr_warmup_iters");
  CHECK(near_matches("lr_warmup", names).at(0) == "lr_warmup_iters");
  CHECK(near_matches("banana", names).empty());
  // At the edge: a third of the longer name's letters may differ, and no more.
  const std::vector<std::string> letters{"abcdef", "abdcef", "ABCxyf", "abcxyz", "abcdefghi", "abcdefghij"};
  CHECK(near_matches("abcdef", letters, 9) ==
        std::vector<std::string>{"abcdef", "abdcef", "ABCxyf", "abcdefghi", "abcdefghij"});
  CHECK(near_matches("fedcba", letters, 9).empty());
  CHECK(near_matches("x", std::vector<std::string>{"y", "yz", "xyz"}) == std::vector<std::string>{"y"});
}

TEST_CASE("lists in messages end where they would become long") {
  const std::vector<std::string> parts = {"a", "b", "c"};
  CHECK(join_some(parts, ", ", 4) == "a, b, c");
  CHECK(join_some(parts, ", ", 3) == "a, b, c");
  CHECK(join_some(parts, ", ", 2) == "a, b, …");
  CHECK(join_some({}, ", ", 2).empty());
}

TEST_CASE("humane units") {
  CHECK(human_bytes(1536) == "1.50 KiB");
  CHECK(human_count(124.4e6) == "124.4M");
  CHECK(human_flop(104.7e9) == "104.7 GFLOP");
  CHECK(human_duration(192) == "3m 12s");
  CHECK(with_separators(4194304) == "4 194 304");
  CHECK(with_separators(-4194) == "-4 194");
  CHECK(in_quotes("a\"b\n\x01") == "\"a\\\"b\\n\\u0001\"");
}

TEST_CASE("a noun follows its count: one has no s, and zero and negative counts do") {
  CHECK(counted(1, "rank") == "1 rank");
  CHECK(counted(0, "rank") == "0 ranks");
  CHECK(counted(11, "rank") == "11 ranks");
  CHECK(counted(-1, "rank") == "-1 ranks");
  CHECK(plural(1, "sample") == "sample");
  CHECK(plural(2, "sample") == "samples");
  CHECK(counted(1, "micro-batch") == "1 micro-batch");
  CHECK(counted(4, "micro-batch") == "4 micro-batches");
}

TEST_CASE("a text quoted for a shell comes back from one unchanged") {
  for (const std::string word : {"plain", "/a/b-c_d.e:f,g@h%i+j=k", "", " ", "it's", "''", "a\nb", "$HOME",
                                 "*", "`id`", "\\", "\"", "~", "ü", "a;b", "#"}) {
    CAPTURE(word);
    std::unique_ptr<FILE, int (*)(FILE*)> shell(
        ::popen(("printf %s " + shell_quoted(word) + "; printf .").c_str(), "r"), ::pclose);
    REQUIRE(shell);
    std::string out(64, 0);
    out.resize(std::fread(out.data(), 1, out.size(), shell.get()));
    CHECK(out == word + ".");
  }
  CHECK(shell_quoted("a/b.yaml") == "a/b.yaml");
  CHECK(shell_quoted("two words") == "'two words'");
}

TEST_CASE("a bar in a cell of a Markdown table is escaped") {
  CHECK(markdown_cell("a|b||c") == "a\\|b\\|\\|c");
  CHECK(markdown_cell("plain") == "plain");
}

TEST_CASE("control characters of a text are escaped for a terminal") {
  CHECK(escape_controls("a\x1b[31m\r\x7f\xc2\x9b b\n\tc") == "a\\x1b[31m\\x0d\\x7f\\x9b b\n\tc");
  CHECK(escape_controls("\u202eabc\u2069 \u00e9\U0001f600") == "\\u202eabc\\u2069 \u00e9\U0001f600");
  CHECK(escape_controls("") == "");
  CHECK(escape_name("a\nerror: b") == "a\\nerror: b");
  CHECK(not_found_text("file", "x\nerror: y") == "not found: file = x\\nerror: y");
}

TEST_CASE("invalid UTF-8 is found at its offset") {
  CHECK(!first_invalid_utf8("plain, ünïcode, 日本, 🎉"));
  CHECK(first_invalid_utf8("ab\xff") == 2);
  CHECK(first_invalid_utf8("\xc0\xaf") == 0);           // overlong
  CHECK(first_invalid_utf8("x\xed\xa0\x80") == 1);      // surrogate
  CHECK(first_invalid_utf8("x\xf4\x90\x80\x80") == 1);  // above U+10FFFF
  CHECK(first_invalid_utf8("x\xe6\x97") == 1);          // truncated
  CHECK(count_code_points("日本🎉") == 3);
}

TEST_CASE("checked arithmetic and the cursor refuse what does not fit") {
  CHECK_THROWS_AS(checked_mul(INT64_MAX, 2), Error);
  CHECK_THROWS_AS(checked_add(INT64_MAX, 1), Error);
  CHECK_THROWS_AS(checked_cast<int32_t>(int64_t{1} << 40), Error);
  CHECK_THROWS_AS(checked_cast<uint32_t>(int64_t{-1}), Error);
  const std::array<std::byte, 6> bytes{};
  ByteCursor cursor(bytes, "f.idx");
  CHECK(cursor.read<uint32_t>("count") == 0);
  try {
    cursor.read<uint64_t>("size");
    FAIL("expected an error");
  } catch (const Error& error) {
    CHECK(error.message() == "f.idx: offset 4: size needs 8 bytes, but only 2 are left");
  }
}

TEST_CASE("files: durable write, refusal of directories and of what is too large") {
  const auto directory =
      std::filesystem::temp_directory_path() / ("capstan-base-" + std::to_string(::getpid()));
  std::filesystem::create_directories(directory);
  write_file_durably(directory / "a.txt", "hello");
  CHECK(read_file(directory / "a.txt") == "hello");
  CHECK_THROWS_AS(read_file(directory / "a.txt", 4), Error);
  CHECK_THROWS_AS(read_file(directory), Error);
  CHECK_THROWS_AS(MappedFile{directory}, Error);
  CHECK(MappedFile(directory / "a.txt").bytes().size() == 5);
  std::filesystem::create_directory(directory / "new");
  rename_new(directory / "new", directory / "done");
  std::filesystem::create_directory(directory / "new");
  CHECK_THROWS_AS(rename_new(directory / "new", directory / "done"), Error);
  std::filesystem::remove_all(directory);
}

TEST_CASE("a missing file is named with near names, written as the name was") {
  const test::TemporaryDirectory directory;
  namespace fs = std::filesystem;
  fs::create_directories(directory.path() / "data/more");
  for (const char* name : {"corpus_text_document.bin", "corpus_text_document.idx", "corpus.txt", "other.bin"})
    write_file_durably(directory.path() / "data" / name, "x");
  const std::string root = directory.path().string();
  const auto prefix = [&](const std::string& name) {
    return near_paths(name, directory.path() / name, MissingKind::dataset_prefix);
  };
  using Names = std::vector<std::string>;
  CHECK(prefix("data/corpus") == Names{"data/corpus_text_document"});
  CHECK(prefix("data/corpus.txt") == Names{"data/corpus_text_document"});
  CHECK(prefix("data/corpus_text_document.bin") == Names{"data/corpus_text_document"});
  CHECK(prefix("data/other").empty());  // without its .idx
  CHECK(prefix("data/corpsu") == Names{"data/corpus_text_document"});
  fs::create_directories(directory.path() / "short");
  for (const char* name : {"one_text_document.bin", "one_text_document.idx"})
    write_file_durably(directory.path() / "short" / name, "x");
  CHECK(prefix("short/onee") == Names{"short/one_text_document"});
  CHECK(prefix("short/oen_text_document") == Names{"short/one_text_document"});
  CHECK(prefix("short/nothing").empty());
  for (const char* name : {"a_text_document.bin", "a_text_document.idx"})
    write_file_durably(directory.path() / "data/more" / name, "x");
  CHECK(prefix("data/more/a") ==
        Names{"data/more/a_text_document"});  // a name too short to be near by its letters
  CHECK(near_paths("data/corpus.text", directory.path() / "data/corpus.text")[0] == "data/corpus.txt");
  CHECK(near_paths(root + "/dat/corpus.txt") == Names{root + "/data/corpus.txt"});
  CHECK(near_paths(root + "/dat/nothing") == Names{root + "/data"});
  CHECK(near_paths(root + "/quite/else").empty());

  // Component by component; a path that is complete hides directories that are near.
  for (const char* name : {"recipes/team/im.yaml", "recipes/team/own.yaml", "dara/notes"}) {
    fs::create_directories((directory.path() / name).parent_path());
    write_file_durably(directory.path() / name, "x");
  }
  const auto file = [&](const std::string& name) { return near_paths(name, directory.path() / name); };
  CHECK(file("dat/corpus.txt") == Names{"data/corpus.txt"});
  CHECK(file("recipe/taem/im.yml") == Names{"recipes/team/im.yaml"});
  CHECK(file("recipe/team/nothing") == Names{"recipes/team"});
  CHECK(prefix("dat/corpus") == Names{"data/corpus_text_document"});
  CHECK(prefix("dat/corpus_text_document") == Names{"data/corpus_text_document"});
  CHECK(prefix("dat/more/a") == Names{"data/more/a_text_document"});
  // No directory is near: the only other one that has the rest of the path.
  CHECK(file("recipes/zz/im.yaml") == Names{"recipes/team/im.yaml"});
  CHECK(file("zz/team/im.yaml") == Names{"recipes/team/im.yaml"});
  CHECK(file("zz/recipes/team/im.yaml") == Names{"recipes/team/im.yaml"});
  CHECK(file("zz/im.yaml").empty());
  fs::create_directories(directory.path() / "recipes/other");
  write_file_durably(directory.path() / "recipes/other/im.yaml", "x");
  CHECK(file("recipes/zz/im.yaml").empty());  // two have it
  // Many near directories on every level end soon.
  for (const char* name : {"loop1", "loop2", "loop3"})
    fs::create_directory_symlink(".", directory.path() / name);
  std::string loops;
  for (int i = 0; i < 20; ++i) loops += "loop/";
  CHECK(file(loops + "nothing-like-it").size() <= 3);

  CHECK(near_paths_help({"a", "b", "c"}) == "did you mean `a`, `b` or `c`?");

  CHECK(test::error_of([&] { read_file(root + "/data/corpus.txd"); }) ==
        "not_found: not found: file = " + root + "/data/corpus.txd\n  help: did you mean `" + root +
            "/data/corpus.txt`?");
  CHECK(not_found_text("dataset.data_path", "data/a") == "not found: dataset.data_path = data/a");
}

TEST_CASE("a name of the Hub comes with the command that downloads it") {
  const test::TemporaryDirectory directory;
  const std::string root = directory.path().string();
  for (const std::string& name : {std::string("an-org/Model-1.5"), root + "/an-org/Model-1.5"})
    CHECK(test::holds(download_help(name), "hf download an-org/Model-1.5 --local-dir Model-1.5"));
  CHECK(test::holds(download_help("an-org/chats", HubKind::dataset),
                    "hf download an-org/chats --repo-type dataset --local-dir data/chats"));
  CHECK(download_help("./an-org/Model").find("hf download an-org/Model ") != std::string::npos);
  CHECK(test::holds(download_help("an-org/Model@v1.2"),
                    "hf download an-org/Model --revision v1.2 --local-dir Model, then hf:Model"));
  for (const char* address : {"https://huggingface.co/an-org/Model", "https://hf.co/an-org/Model/tree/main",
                              "/home/me/https:/huggingface.co/an-org/Model/"})
    CHECK_MESSAGE(test::holds(download_help(address), "hf download an-org/Model --local-dir Model, then"),
                  address);
  CHECK(test::holds(download_help("https://huggingface.co/datasets/an-org/chats", HubKind::dataset),
                    "hf download an-org/chats --repo-type dataset"));
  for (const char* name : {"https://huggingface.co/an-org", "an-org/Model@", "runs/a"})
    CHECK_MESSAGE(download_help(name).empty(), name);
  for (const std::string& name : {std::string("model"), std::string("a/b/c"), root + "/model",
                                  std::string("../a/b"), root + "/x/y/z", std::string("a b/c")})
    CHECK_MESSAGE(download_help(name).empty(), name);
}

TEST_CASE("files that a failed download leaves are named as such") {
  const auto of = [](std::string_view content) {
    return test::error_of([&] { refuse_placeholder(content, "m.safetensors"); });
  };
  CHECK(test::holds(of("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"),
                    "a Git LFS pointer"));
  CHECK(test::holds(of("\n <!DOCTYPE html><html>"), "an HTML page"));
  CHECK(test::holds(of("<HTML lang=en>"), "an HTML page"));
  CHECK(of("").empty());
  CHECK(of("{\"version\": 1}").empty());
  // A text may be HTML.
  CHECK(test::error_of([] { refuse_lfs_pointer("<!doctype html>", "a.txt"); }).empty());
  HtmlPages pages;
  pages.look("text with <html>", "a.txt");
  CHECK(pages.warning().empty());
  pages.look(" <!DOCTYPE html><html>", "b.html.gz");
  CHECK(pages.note() == "`b.html.gz` is an HTML page; its markup is part of the text");
  CHECK(pages.warning().empty());
  pages.look("<html>", "c.txt");
  CHECK(test::holds(pages.warning(), "`c.txt` is an HTML page: perhaps a failed download"));
  pages.look("\xEF\xBB\xBF<html>", "html");
  CHECK(test::holds(pages.warning(), "`c.txt` and 1 other file are HTML pages: perhaps failed downloads"));
  pages.look("<html>", "d.HTM");
  pages.look("<html>", "e.html.zst");
  CHECK(pages.note() == "`b.html.gz` and 2 other files are HTML pages; their markup is part of the text");
}

TEST_CASE("paths that are no stored files are named as such, by path and where they are read") {
  namespace fs = std::filesystem;
  const test::TemporaryDirectory directory;
  const fs::path pipe = directory.path() / "pipe", file = directory.path() / "file";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  std::ofstream(file) << "x";
  const std::pair<fs::path, std::string> expected[] = {{pipe, "a named pipe"},
                                                       {"/dev/zero", "a device"},
                                                       {directory.path(), "a directory"},
                                                       {"/proc/self/status", "generated by the kernel"},
                                                       {"/proc", "generated by the kernel"}};
  for (const auto& [path, kind] : expected) {
    CHECK(special_file_kind(path) == kind);
    const std::string message = "format: `" + path.string() + "` is " + kind + ", not a file";
    CHECK(test::holds(test::error_of([&] { static_cast<void>(read_file(path)); }), message));
    CHECK(test::holds(test::error_of([&] { const MappedFile map(path); }), message));
  }
  CHECK(special_file_kind(file).empty());
  CHECK(special_file_kind(directory.path() / "none").empty());
  CHECK(read_file(file) == "x");
}
