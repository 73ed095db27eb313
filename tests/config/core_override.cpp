// The override grammar: every form, every target type, every special-cased mistake.
#include <doctest/doctest.h>

#include "config/core/override.hpp"
#include "core_support.hpp"

using namespace capstan;
using namespace capstan::config;
using namespace capstan::config::testing;

namespace {

std::optional<ParsedOverride> parse(const Override& given, std::string* problem = nullptr) {
  std::vector<Diagnostic> diagnostics;
  auto parsed = parse_override(given, nullptr, 0, 1, diagnostics);
  if (problem) *problem = diagnostics.empty() ? "" : diagnostics[0].message;
  return parsed;
}
std::optional<ParsedOverride> parse(const std::string& token) {
  return parse(Override::token(token));
}

}  // namespace

TEST_CASE("operators and paths") {
  using Op = ParsedOverride::Op;
  CHECK(parse("a.b=c")->op == Op::set);
  CHECK(parse("+a.b=c")->op == Op::add);
  CHECK(parse("++a.b=c")->op == Op::force);
  CHECK(parse("~a.b")->op == Op::unset);
  CHECK_FALSE(parse("~a.b")->value);
  CHECK(parse("~a.b=c")->value->text == "c");
  CHECK(parse("a.b+=c")->op == Op::append);
  CHECK(parse("@f.yaml")->file == "f.yaml");
  CHECK(parse("a=@f.yaml")->file == "f.yaml");
  CHECK(parse(Override{Override::Kind::set, "a.b=c"})->op == Op::set);
  CHECK(parse(Override{Override::Kind::append, "a.b=c"})->op == Op::append);
  CHECK(parse(Override{Override::Kind::unset, "a.b"})->op == Op::unset);
  CHECK(parse(Override::file("x y.yaml"))->file == "x y.yaml");
  CHECK(parse("a.b=c=d")->value->text == "c=d");  // the first `=` splits
  CHECK(parse("a=-1e-5")->value->text == "-1e-5");
  CHECK(parse("a.b+=-1")->value->text == "-1");
  CHECK(parse("a[name=x=y].w=2")->path.segments[1].text == "x=y");
  const auto path = parse("a.b[0][-1][name=code].\"c.d\".e-f=1")->path;
  CHECK(path.text() == "a.b[0][-1][name=code].\"c.d\".e-f");
  CHECK(path.segments[3].index == -1);
  CHECK(path.segments[4].kind == Segment::Kind::id);
  CHECK(path.segments[5].name == "c.d");
  CHECK(parse("a.0.b=1")->path.segments[1].kind == Segment::Kind::index);
  CHECK(parse("a=1")->location.line == 1);
  CHECK(parse("a.b=cde")->value_location.column == 5);
  CHECK(parse("a.b=cde")->value_location.length == 3);
}

TEST_CASE("every kind of override as one word") {
  using Kind = Override::Kind;
  CHECK(token_text(Override::token("++a.b=c")) == "++a.b=c");
  CHECK(token_text({Kind::set, "a.b=c"}) == "a.b=c");
  CHECK(token_text({Kind::append, "a.b=c"}) == "a.b+=c");
  CHECK(token_text({Kind::append, "a.b+=c"}) == "a.b+=c");
  CHECK(token_text({Kind::append, "a[name=x].b=c=d"}) == "a[name=x].b+=c=d");
  CHECK(token_text({Kind::unset, "a.b"}) == "~a.b");
  CHECK(token_text(Override::file("x y.yaml")) == "@x y.yaml");
}

TEST_CASE("values") {
  std::vector<Diagnostic> problems;
  const auto value = [&](const char* text) { return *parse_value(text, {0, 1, 1, 1}, problems); };
  CHECK(value("abc").text == "abc");
  CHECK(value("a b, c:d").text == "a b, c:d");
  CHECK(value("'it''s'").text == "it's");
  CHECK(value("\"a\\\"b\\n\"").text == "a\"b\n");
  CHECK(value("\"5\"").quoted);
  CHECK(value("null").kind == Node::Kind::null);
  CHECK(value("~").kind == Node::Kind::null);
  CHECK(value("").empty);
  CHECK(value("[a, 'b, c', [1], {k: v}]").items.size() == 4);
  CHECK(value("[]").items.empty());
  CHECK(value("[a,]").items.size() == 1);
  CHECK(value("{a: 1, \"b c\": [2]}").find("b c")->items[0].text == "2");
  CHECK(value("{}").items.empty());
  CHECK(value("[${a.b}, ${env:X,1}]").items[1].text == "${env:X,1}");
  CHECK(value("[*.linear_qkv]").items[0].text == "*.linear_qkv");
  CHECK(value("[a, bcd]").items[1].location.column == 5);
  CHECK(problems.empty());
  for (const char* wrong : {"[a", "{a: 1", "[a]]", "[a] b", "{a}", "{a: 1 b: 2}", "[,]", "'a", "'a' b",
                            "{: 1}", "{a: 1, a: 2}", "[a;b"}) {
    CAPTURE(std::string(wrong));
    problems.clear();
    const bool good = parse_value(wrong, {0, 1, 1, 1}, problems).has_value();
    CHECK_FALSE(good);
    CHECK(problems.size() == 1);
  }
  problems.clear();
  CHECK_FALSE(parse_value(std::string(100'000, '['), {0, 1, 1, 1}, problems));
}

TEST_CASE("mistakes with a message of their own") {
  struct Row {
    std::vector<std::string> words;
    const char *message, *help;
  };
  const Workspace w;
  const std::string file = w.write("extra.yaml", "train: {iters: 5}\n");
  const Row rows[] = {
      {{"train.iters=1,2"},
       "`1,2` is not one value for `train.iters`",
       "for a trial of each value: `capstan sweep plan RECIPE train.iters=1,2`"},
      {{"--model.num_heads", "4"}, "`--model.num_heads` is not a flag", "write `model.num_heads=4`"},
      {{"--model.num_heads=4"}, "`--model.num_heads=4` is not a flag", "write `model.num_heads=4`"},
      {{"optimizer.lr", "=", "1"}, "blank around `=`", "without blanks"},
      {{"optimizer.lr", "=1"}, "blank around `=`", "without blanks"},
      {{"optimizer.lr =1"}, "blank around `=`", "without blanks"},
      {{"train.title=“x”"}, "typographic quotes", "straight quotes"},
      {{"“train.title”=x"}, "typographic quotes", "straight quotes"},
      {{file}, "is not an override: `=` is missing", "write `@"},
      {{"train.iters"}, "is not an override: `=` is missing", "write `train.iters=value`"},
      {{""}, "an empty override", ""},
      {{"=x"}, "blank around `=`", ""},
      {{"@"}, "the file name is missing", ""},
      {{"train..iters=1"}, "is not allowed in a path", ""},
      {{"train.=1"}, "the path ends with `.`", ""},
      {{"train.skip[0=1"}, "is missing", ""},
      {{"train.skip[x]=1"}, "is not an index", "[0]"},
      {{"train.skip[99999999999999999999]=1"}, "is not an index", ""},
      {{"tr ain.iters=1"}, "is not allowed in a path", ""},
      {{"train.tags=[a"}, "`]` is missing", ""},
      {{"[0]=1"}, "is not allowed in a path", ""},
      {{"train.title=\xFF"}, "invalid UTF-8", ""},
  };
  for (const auto& row : rows) {
    CAPTURE(row.words[0]);
    const auto out = w.text("name: x\n", row.words);
    CHECK_FALSE(out.ok());
    CHECK(out.says(row.message));
    CHECK(out.says(row.help));
  }
  // Three words of one mistake are one message.
  CHECK(w.text("name: x\n", {"optimizer.lr", "=", "1"}).diagnostics.size() == 1);
}

TEST_CASE("the meaning of an operator for each type of target") {
  const Workspace w;
  const auto run = [&](const std::vector<std::string>& overrides) {
    return w.text(
        "train: {tags: [a, b], env: {A: 1}, skip: 3}\ndataset: {sources: [{name: code}, {name: web, weight: "
        "3}]}\npeft: lora\n",
        overrides);
  };
  // a field
  CHECK(run({"optimizer.lr=0.5"}).config.optimizer.lr == 0.5);
  CHECK(run({"optimizer.lr=[1]"}).codes() == "C0206");
  CHECK(run({"optimizer.lr={a: 1}"}).codes() == "C0206");
  CHECK(run({"optimizer.lr+=1"}).says("write `optimizer.lr=…`"));
  CHECK(run({"optimizer.lr=0.5", "~optimizer.lr"}).config.optimizer.lr == 1e-3);
  CHECK(run({"optimizer.lr.x=1"}).says("single value without items or keys"));
  // a list
  CHECK(run({"train.tags=[x]"}).config.train.tags == std::vector<std::string>{"x"});
  CHECK(run({"train.tags+=x"}).config.train.tags == std::vector<std::string>{"a", "b", "x"});
  CHECK(run({"train.tags+=[x, y]"}).config.train.tags.size() == 4);
  CHECK(run({"train.tags+="}).codes() == "C0203");
  CHECK(run({"train.tags=x"}).codes() == "C0206");
  CHECK(run({"train.tags={a: 1}"}).codes() == "C0206");
  CHECK(run({"train.skip=5"}).config.train.skip == std::vector<int64_t>{5});
  CHECK(run({"train.skip+=5"}).config.train.skip == std::vector<int64_t>{3, 5});
  CHECK(run({"~train.tags"}).config.train.tags == std::vector<std::string>{"a"});
  CHECK(run({"train.modules+=x"}).config.train.modules == std::vector<std::string>{"x"});
  // an item
  CHECK(run({"train.tags[0]=x"}).config.train.tags == std::vector<std::string>{"x", "b"});
  CHECK(run({"train.tags[-1]=x"}).config.train.tags == std::vector<std::string>{"a", "x"});
  CHECK(run({"train.tags.1=x"}).config.train.tags == std::vector<std::string>{"a", "x"});
  CHECK(run({"~train.tags[0]"}).config.train.tags == std::vector<std::string>{"b"});
  CHECK(run({"~train.tags[0]", "train.tags[0]=z"}).config.train.tags == std::vector<std::string>{"z"});
  CHECK(run({"train.tags[2]=x"}).says("out of range: the list has 2 items"));
  CHECK(run({"train.tags.x=1"}).says("is a list: its items are reached by number"));
  CHECK(run({"dataset.sources[name=web].weight=2"}).config.dataset.sources[1].weight == 2);
  CHECK(run({"dataset.sources[1].weight=2"}).config.dataset.sources[1].weight == 2);
  CHECK(run({"dataset.sources.1.weight=2"}).config.dataset.sources[1].weight == 2);
  CHECK(run({"dataset.sources[0]={name: new, weight: 9}"}).config.dataset.sources[0].name == "new");
  CHECK(run({"~dataset.sources[name=code]"}).config.dataset.sources.size() == 1);
  CHECK(run({"dataset.sources[name=wbe].weight=2"}).says("an item with a similar name exists: `web`"));
  CHECK(run({"dataset.sources[0].wieght=2"}).says("similar name exists: `weight`"));
  CHECK(run({"dataset.sources+={name: c}"}).config.dataset.sources.size() == 3);
  // a section
  CHECK(run({"model=base"}).config.model.hidden_size == 256);
  CHECK(run({"model={hidden_size: 8, num_heads: 2}"}).config.model.hidden_size == 8);
  CHECK(run({"model=[a]"}).says("takes a mapping or the name of a preset, not a list"));
  CHECK(run({"model=bse"}).says("a preset with a similar name exists: `base`"));
  CHECK(run({"model+=base"}).says("is a section"));
  CHECK(run({"model="}).codes() == "C0203");
  CHECK(run({"model=null"}).codes() == "C0205");
  CHECK(run({"model.hidden_size=8", "model.num_heads=8", "~model"}).config.model.hidden_size == 64);
  // an open map
  CHECK(run({"train.env={B: 2}"}).config.train.env.size() == 2);
  CHECK(run({"train.env+={B: 2}"}).config.train.env.size() == 2);
  CHECK(run({"train.env.B=2"}).config.train.env.back() == std::pair<std::string, std::string>("B", "2"));
  CHECK(run({"++train.env.B=2"}).config.train.env.back() == std::pair<std::string, std::string>("B", "2"));
  CHECK(run({"~train.env.A"}).config.train.env.empty());
  CHECK(run({"~train.env.Z"}).codes() == "C0108");
  CHECK(run({"train.env=x"}).codes() == "C0206");
  CHECK(run({"train.env=[x]"}).codes() == "C0206");
  CHECK(run({"train.env+=x"}).codes() == "C0206");
  CHECK(run({"dataset.blend.\"a/b.c\"=2"}).config.dataset.blend[0].first == "a/b.c");
  // an optional section
  CHECK_FALSE(run({"peft=null"}).config.peft);
  CHECK_FALSE(run({"peft=none"}).config.peft);
  CHECK(run({"peft.dim=3"}).config.peft->dim == 3);
  CHECK(run({"peft={dim: 3}"}).config.peft->dim == 3);
  CHECK(run({"peft.dim=3", "~peft"}).config.peft->dim == 16);
}

TEST_CASE("add, force, and conditional unset") {
  const Workspace w;
  const std::string recipe = "optimizer: {lr: 0.5}\n";
  CHECK(w.text(recipe, {"+optimizer.lr=1"}).codes() == "C0106");
  CHECK(w.text(recipe, {"+optimizer.lr=1"}).says("already has an explicit value"));
  CHECK(w.text(recipe, {"+optimizer.beta=0.5"}).config.optimizer.beta == 0.5);
  CHECK(w.text(recipe, {"++optimizer.lr=1"}).config.optimizer.lr == 1);
  CHECK(w.text(recipe, {"++optimizer.nope=1"}).codes() == "C0102");
  CHECK(w.text(recipe, {"~optimizer.lr=0.5"}).config.optimizer.lr == 1e-3);
  CHECK(w.text(recipe, {"~optimizer.lr=5e-1"}).ok());
  CHECK(w.text(recipe, {"~optimizer.lr=1"}).codes() == "C0107");
  CHECK(w.text(recipe, {"~optimizer.beta=1"}).codes() == "C0107");
}

TEST_CASE("long forms and files keep their order and rank") {
  const Workspace w;
  w.write("a.yaml", "optimizer: {lr: 0.1}\ntrain: {tags: [f]}\n");
  w.write("b.yaml", "optimizer: {lr: 0.2}\n");
  w.write("opt.yaml", "lr: 0.3\nbeta: 0.1\n");
  Request request;
  request.recipe = w.write("r.yaml", "optimizer: {lr: 0.9}\n");
  request.overrides = {{Override::Kind::set, "optimizer.beta=0.25"},
                       Override::file(w.path("a.yaml")),
                       Override::file(w.path("b.yaml")),
                       {Override::Kind::append, "train.tags=g"}};
  auto out = w.resolve(request);
  REQUIRE(out.ok());
  CHECK(out.config.optimizer.lr == 0.2);
  CHECK(out.config.optimizer.beta == 0.25);
  CHECK(out.config.train.tags == std::vector<std::string>{"f", "g"});
  // Command-line words win over files wherever they stand.
  request.overrides = {Override::token("optimizer.lr=0.7"), Override::file(w.path("a.yaml"))};
  CHECK(w.resolve(request).config.optimizer.lr == 0.7);
  CHECK(w.text("name: x\n", {"optimizer=@" + w.path("opt.yaml")}).config.optimizer.lr == 0.3);
  CHECK(w.text("name: x\n", {"@" + w.path("b.yaml")}).config.optimizer.lr == 0.2);
  CHECK(w.text("name: x\n", {"@" + w.path("nope.yaml")}).codes() == "C0001");
  request.overrides = {{Override::Kind::unset, "optimizer.lr"}};
  CHECK(w.resolve(request).config.optimizer.lr == 1e-3);
}
