// The field tables of all sections: one describe() for each struct, defined in the section's .cpp.
#pragma once

#include "config/core/config.hpp"
#include "config/core/field.hpp"

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

void register_derivations(Schema& schema);  // derivations.cpp

// The cross-field rules, one file for each topic.
void register_world_rules(Schema& schema);
void register_batch_rules(Schema& schema);
void register_pipeline_rules(Schema& schema);
void register_tensor_rules(Schema& schema);
void register_precision_rules(Schema& schema);
void register_optimizer_rules(Schema& schema);
void register_moe_rules(Schema& schema);
void register_recompute_rules(Schema& schema);
void register_run_rules(Schema& schema);

}  // namespace capstan::config
