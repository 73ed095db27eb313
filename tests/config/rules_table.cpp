// Each cross-field rule has a case that breaks it and one that keeps it.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <set>

#include "rules_cases.hpp"
#include "sections_bench.hpp"

using namespace capstan;
using namespace capstan::config;
using capstan::config::testing::all_errors;
using capstan::config::testing::bench_config;
using capstan::config::testing::findings;
using capstan::config::testing::layout_cases;
using capstan::config::testing::model_cases;
using capstan::config::testing::moe_cases;
using capstan::config::testing::Overrides;
using capstan::config::testing::RuleCase;

namespace {

std::vector<RuleCase> cases() {
  std::vector<RuleCase> all = layout_cases();
  all.insert(all.end(), model_cases().begin(), model_cases().end());
  all.insert(all.end(), moe_cases().begin(), moe_cases().end());
  return all;
}

std::string listed(const Overrides& overrides) {
  std::string text;
  for (const auto& one : overrides) text += one + "  ";
  return text;
}

}  // namespace

TEST_CASE("the bench's own recipe is legal") {
  const auto errors = all_errors(bench_config({}));
  CHECK_MESSAGE(errors.empty(), (errors.empty() ? "" : errors[0]));
}

TEST_CASE("every rule speaks when it is broken, with values and a way out") {
  for (const auto& test : cases()) {
    CAPTURE(test.rule);
    INFO(listed(test.breaks));
    const auto found = findings(test.rule, bench_config(test.breaks), test.breaks);
    REQUIRE_FALSE(found.empty());
    bool said = false;
    for (const auto& finding : found) {
      if (finding.message.find(test.says) != std::string::npos &&
          finding.help.find(test.helps) != std::string::npos)
        said = true;
      CHECK_FALSE(finding.help.empty());
      CHECK_FALSE(finding.operands.empty());
      CHECK(finding.message.back() != '.');
    }
    CHECK_MESSAGE(said, found[0].message << " | " << found[0].help);
  }
}

TEST_CASE("a rule's code has one level") {
  std::map<std::string, bool> warns;
  for (const auto& test : cases())
    for (const auto& finding : findings(test.rule, bench_config(test.breaks), test.breaks))
      CHECK_MESSAGE(warns.emplace(test.rule, finding.warning).first->second == finding.warning, test.rule);
}

TEST_CASE("a rule lists every field that its findings name as one that it reads") {
  for (const auto& test : cases()) {
    const auto rule = std::find_if(schema().rules().begin(), schema().rules().end(),
                                   [&](const Rule& one) { return one.name == test.rule; });
    for (const auto& finding : findings(test.rule, bench_config(test.breaks), test.breaks))
      for (const auto& path : finding.paths)
        CHECK_MESSAGE(std::count(rule->reads.begin(), rule->reads.end(), path) == 1,
                      rule->code << " " << path);
  }
}

TEST_CASE("every rule is silent when it is kept") {
  for (const auto& test : cases()) {
    CAPTURE(test.rule);
    INFO(listed(test.keeps));
    const Config config = bench_config(test.keeps);
    const auto errors = all_errors(config);
    CHECK_MESSAGE(errors.empty(), (errors.empty() ? "" : errors[0]));
    const auto found = findings(test.rule, config, test.keeps);
    CHECK_MESSAGE(found.empty(), (found.empty() ? "" : found[0].message));
  }
}

TEST_CASE("every registered rule is in the table, with a code of its own") {
  std::set<std::string> tested;
  for (const auto& test : cases()) tested.insert(test.rule);
  std::map<std::string, std::string> codes;
  for (const auto& rule : schema().rules()) {
    CHECK_MESSAGE(tested.count(rule.name) == 1, "no case for rule " << rule.name);
    CHECK_MESSAGE(codes.emplace(rule.code, rule.name).second, "code " << rule.code << " used twice");
    CHECK_FALSE(rule.doc.empty());
    CHECK_FALSE(rule.reads.empty());
    CHECK(rule.code.size() == 5);
    CHECK(rule.code[0] == 'R');
  }
  CHECK(tested.size() == schema().rules().size());
}

TEST_CASE("no rule stumbles over values that are missing or huge") {
  const std::vector<Overrides> hostile = {
      {"dist.world_size=16777216", "dist.tp=16777216", "dist.pp=16777216", "dist.cp=16777216"},
      {"dist.pp=16777216", "dist.vpp=1048576"},
      {"model.num_layers=1048576", "dist.pp=2", "dist.world_size=2",
       "dist.num_layers_in_first_pipeline_stage=1048576"},
      {"dist.world_size=7", "dist.tp=2", "train.global_batch_size=null"},
      {"train.train_iters=null", "train.global_batch_size=1073741824", "train.micro_batch_size=1073741824"},
      {"train.train_iters=4294967296", "train.global_batch_size=1073741824"},
      // A step of one sample for each of a million million samples.
      {"train.train_iters=null", "train.train_samples=1000000000000", "train.micro_batch_size=1",
       "train.rampup_batch_size=[1, 1, 1000000000000]", "train.global_batch_size=2"},
      {"train.train_iters=null", "train.train_samples=1152921504606846976", "train.micro_batch_size=1",
       "train.rampup_batch_size=[1, 1, 1152921504606846976]", "train.global_batch_size=1000001"},
      {"train.train_iters=null", "train.train_samples=9",
       "train.rampup_batch_size=[1, 1, 9223372036854775807]", "train.global_batch_size=1073741824"},
      {"dist.pp=2", "dist.world_size=2",
       "dist.pipeline_model_parallel_layout=\"((((((((((t*1048576)*1048576\""},
      {"dist.pp=2", "dist.world_size=2", "dist.pipeline_model_parallel_layout=\"(t*1048576)*1048576\""},
      {"dist.pp=2", "dist.world_size=2", "dist.pipeline_model_parallel_layout=\"\""},
      {"dist.cp_comm_type=[]", "dist.hierarchical_context_parallel_sizes=[0, -1, 9223372036854775807]"},
      {"dataset.kind=gpt", "dataset.data_path=[1]", "dataset.split=\",,\""},
      {"model.num_attention_heads=1048576", "model.num_query_groups=1048575"},
      {"model.num_moe_experts=1", "model.moe_router_num_groups=1048576",
       "model.moe_router_group_topk=1048576"},
  };
  for (const auto& overrides : hostile) {
    INFO(listed(overrides));
    const Config config = bench_config(overrides);
    CHECK_NOTHROW(all_errors(config));
  }
}
