#include "config/sections/rule_tools.hpp"

namespace capstan::config {

void register_sections(Schema& s) {
  s.root<Config>([](Section<Config>& root) {
    root.field("name", &Config::name)
        .doc("name of the recipe, and of the run directory if none is given")
        .effect(Effect::io);
    root.field("description", &Config::description).doc("one line about the recipe").effect(Effect::log);
  });
  s.section("model", &Config::model);
  s.section("mixed_precision", &Config::mixed_precision);
  s.section("dist", &Config::dist);
  s.section("ddp", &Config::ddp);
  s.section("comm_overlap", &Config::comm_overlap);
  s.section("train", &Config::train);
  s.section("optimizer", &Config::optimizer);
  s.section("scheduler", &Config::scheduler);
  s.section("dataset", &Config::dataset);
  s.section("tokenizer", &Config::tokenizer);
  s.section("validation", &Config::validation);
  s.section("checkpoint", &Config::checkpoint);
  s.section("peft", &Config::peft);
  s.section("rng", &Config::rng);
  s.section("resilience", &Config::resilience);
  s.section("logger", &Config::logger);
  s.section("profiling", &Config::profiling);
  s.ranks_path("dist.world_size");
  register_derivations(s);
  for (const auto rules : {world_rules, batch_rules, pipeline_rules, tensor_rules, precision_rules,
                           optimizer_rules, moe_rules, recompute_rules, run_rules})
    rules().add_to(s);
}

}  // namespace capstan::config
