// The reader of each source format, for import.cpp.
#pragma once

#include <map>
#include <span>
#include <string>
#include <string_view>

#include "importers/rule.hpp"

namespace capstan::importers {

void read_megatron(Draft& draft, const config::Source& script,
                   const std::map<std::string, std::string>& variables);
void read_deepspeed(Draft& draft, const config::Node& root);
void read_bridge(Draft& draft, const config::Node& root);
void read_torchtune(Draft& draft, const config::Node& root);
// Reads the dataset of a torchtune configuration (torchtune_data.cpp).
void read_torchtune_data(Reader& reader);
void read_axolotl(Draft& draft, const config::Node& root);
// Reads the datasets of an Axolotl configuration (axolotl_data.cpp).
void read_axolotl_data(Reader& reader);
void read_training_arguments(Draft& draft, const config::Node& root);

// The tables of the formats whose keys the reference lists (key_reference.cpp).
std::span<const Rule> megatron_rules();
std::span<const Rule> axolotl_rules();
std::span<const Rule> torchtune_rules();

// The launch command of a Megatron script.
struct MegatronLaunch {
  // The script that is started, such as "pretrain_gpt.py".
  std::string program;
  // Whether torchrun, torch.distributed.launch or mpirun starts the program.
  bool launched = false;
};
// Settings that follow from several options (megatron_finish.cpp).
void finish_megatron(Reader& reader, const MegatronLaunch& launch);

}  // namespace capstan::importers
