#include "sections_bench.hpp"

#include <doctest/doctest.h>

#include <set>

#include "config/core/convert.hpp"
#include "config/core/override.hpp"
#include "config/core/tree.hpp"

namespace capstan::config::testing {

namespace {
const std::vector<std::string>& base() {
  static const std::vector<std::string> lines = {
      "model.num_layers=8",        "model.hidden_size=64",     "model.num_attention_heads=8",
      "model.num_query_groups=4",  "model.seq_length=128",     "model.vocab_size=1000",
      "model.ffn_hidden_size=256", "train.micro_batch_size=2", "train.train_iters=1000",
      "train.global_batch_size=8", "optimizer.lr=1e-3",        "dataset.kind=mock"};
  return lines;
}

void apply(Config& config, const std::string& line, std::set<std::string>& written) {
  const size_t equals = line.find('=');
  REQUIRE_MESSAGE(equals != std::string::npos, line);
  const std::string path = line.substr(0, equals);
  const FieldInfo* field = schema().find_spelling(path);
  REQUIRE_MESSAGE(field != nullptr, "no field " << path);
  std::vector<Source> sources(1);
  sources[0].kind = Source::Kind::cli;
  sources[0].text = line;
  sources[0].directory = "/";
  std::vector<Diagnostic> diagnostics;
  const auto node = parse_value(line.substr(equals + 1), SourceLocation{0, 1, 1, 1}, diagnostics);
  REQUIRE_MESSAGE(node.has_value(), line);
  ConvertContext context;
  context.sources = &sources;
  context.diagnostics = &diagnostics;
  const auto value = convert(*field, *node, field->path, context);
  REQUIRE_MESSAGE(value.has_value(), line << ": " << render(diagnostics, sources));
  schema().store(&config, *field, *value);
  written.insert(field->path);
}
}  // namespace

Config bench_config(const std::vector<std::string>& overrides) {
  Config config;
  std::set<std::string> written;
  for (const auto& line : base()) apply(config, line, written);
  for (const auto& line : overrides) apply(config, line, written);
  for (const auto& derivation : schema().derivations()) {
    const FieldInfo* field = schema().find_field(derivation.path);
    REQUIRE(field != nullptr);
    if (!written.count(field->path) || schema().load(&config, *field).is_null()) derivation.run(&config);
  }
  return config;
}

std::vector<Finding> findings(const std::string& name, const Config& config,
                              const std::vector<std::string>& given) {
  for (const auto& rule : schema().rules()) {
    if (rule.name != name) continue;
    RuleReport report;
    rule.check(&config, report);
    std::vector<Finding> result;
    for (const auto& violation : report.violations) {
      const auto gives = [&](const std::string& word) { return word.starts_with(violation.pointed + "="); };
      if (violation.only_if_given && std::ranges::none_of(given, gives)) continue;
      Finding finding{violation.message, violation.help_text, {}, {}, violation.warning};
      if (!violation.pointed.empty()) finding.paths.push_back(violation.pointed);
      for (const auto& operand : violation.operands) {
        finding.operands.push_back(operand.name + " = " + operand.value);
        if (operand.is_path) finding.paths.push_back(operand.name);
      }
      if (violation.operands.empty()) finding.operands = rule.reads;
      result.push_back(std::move(finding));
    }
    return result;
  }
  FAIL("no rule " << name);
  return {};
}

std::vector<std::string> all_errors(const Config& config) {
  std::vector<std::string> result;
  for (const auto& rule : schema().rules()) {
    RuleReport report;
    rule.check(&config, report);
    for (const auto& violation : report.violations)
      if (!violation.warning) result.push_back(rule.name + ": " + violation.message);
  }
  return result;
}

}  // namespace capstan::config::testing
