// The field tables of all sections: one describe() for each struct, defined in the section's .cpp.
#pragma once

#include "config/core/field.hpp"
#include "config/sections/config.hpp"

namespace capstan::config {

void describe(Section<ModelConfig>& s);
void describe(Section<OptimizerConfig>& s);
void describe(Section<SchedulerConfig>& s);
void describe(Section<DdpConfig>& s);
void describe(Section<MixedPrecisionConfig>& s);
void describe(Section<DatasetConfig>& s);
void describe(Section<TokenizerConfig>& s);
void describe(Section<TrainConfig>& s);
void describe(Section<ValidationConfig>& s);
void describe(Section<CheckpointConfig>& s);
void describe(Section<DistConfig>& s);
void describe(Section<PeftConfig>& s);
void describe(Section<CommOverlapConfig>& s);
void describe(Section<LoggerConfig>& s);
void describe(Section<ProfilingConfig>& s);
void describe(Section<RngConfig>& s);
void describe(Section<ResilienceConfig>& s);

void register_derivations(Schema& schema);

// The cross-field rules, one file for each topic.
class RuleList;
RuleList& world_rules();
RuleList& batch_rules();
RuleList& pipeline_rules();
RuleList& tensor_rules();
RuleList& precision_rules();
RuleList& optimizer_rules();
RuleList& moe_rules();
RuleList& recompute_rules();
RuleList& run_rules();

}  // namespace capstan::config
