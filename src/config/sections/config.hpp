// One immutable, typed recipe: what every part of Capstan is built from. Plain data; how text becomes a
// Config is in config/README.md. Optional fields marked `derived` in their section always hold a value after
// resolution.
#pragma once

#include <optional>
#include <string>

#include "config/sections/checkpoint.hpp"
#include "config/sections/comm_overlap.hpp"
#include "config/sections/dataset.hpp"
#include "config/sections/ddp.hpp"
#include "config/sections/dist.hpp"
#include "config/sections/logger.hpp"
#include "config/sections/mixed_precision.hpp"
#include "config/sections/model.hpp"
#include "config/sections/optimizer.hpp"
#include "config/sections/peft.hpp"
#include "config/sections/profiling.hpp"
#include "config/sections/resilience.hpp"
#include "config/sections/rng.hpp"
#include "config/sections/scheduler.hpp"
#include "config/sections/tokenizer.hpp"
#include "config/sections/train.hpp"
#include "config/sections/validation.hpp"

namespace capstan::config {

struct Config {
  // Name of the recipe, which also names the run directory.
  std::string name;
  // Description in one line.
  std::string description;

  ModelConfig model;
  OptimizerConfig optimizer;
  SchedulerConfig scheduler;
  DdpConfig ddp;
  MixedPrecisionConfig mixed_precision;
  DatasetConfig dataset;
  TokenizerConfig tokenizer;
  TrainConfig train;
  ValidationConfig validation;
  CheckpointConfig checkpoint;
  DistConfig dist;
  std::optional<PeftConfig> peft;
  CommOverlapConfig comm_overlap;
  LoggerConfig logger;
  ProfilingConfig profiling;
  RngConfig rng;
  ResilienceConfig resilience;
};

}  // namespace capstan::config
