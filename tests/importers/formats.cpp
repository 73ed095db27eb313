// Single keys of each table but that of Megatron (megatron.cpp), the recognition of formats, and that no key
// is dropped silently.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/error.hpp"
#include "base/text.hpp"
#include "importers/import.hpp"
#include "importers/imported.hpp"
#include "importers/known_models.hpp"

using namespace capstan;
using namespace capstan::importers;

TEST_CASE("deepspeed: batch sizes give the world") {
  const Imported all = import_recipe(
      R"({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2})",
      "d.json", {});
  CHECK(value_of(all, "dist.world_size") == "8");
  CHECK(value_of(all, "train.global_batch_size") == "64");
  const Imported two = import_recipe(
      R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2})", "d.json", {});
  CHECK(value_of(two, "train.global_batch_size") == "8");
  const Imported wrong = import_recipe(
      R"({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2})",
      "d.json", {});
  CHECK(omitted_as(wrong, "gradient_accumulation_steps", OmissionReason::value));
  CHECK(value_of(all, "optimizer.clip_grad") == "0 (assumed)");
}

TEST_CASE(
    "the samples of one rank are multiplied by the data-parallel size of the base, or said to be assumed") {
  // A step of DeepSpeed and of Transformers takes micro-batch * accumulation samples on each data-parallel
  // rank, thus `accumulation` microbatches on each rank whatever the layout.
  const std::pair<const char*, std::string> files[] = {
      {"d.json", R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8,
                     "train_batch_size": "auto"})"},
      {"t.json", R"({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 8,
                     "learning_rate": 0.001, "max_steps": 9})"},
      {"a.yaml",
       "base_model: org/Llama-3.2-1B\nsequence_len: 64\nmicro_batch_size: 4\n"
       "gradient_accumulation_steps: 8\nmax_steps: 9\n"},
      {"r.yaml",
       "tokenizer:\n  _component_: torchtune.models.llama3.llama3_tokenizer\nbatch_size: 4\n"
       "gradient_accumulation_steps: 8\nepochs: 1\n"},
  };
  for (const auto& [name, text] : files) {
    CAPTURE(name);
    Options options;
    // 8 ranks, of which 2 are context-parallel.
    options.base = "llama3-8b";
    const Imported known = import_recipe(text, name, options);
    CHECK(value_of(known, "train.global_batch_size") == "128");
    CHECK(known.resolution.config.train.num_microbatches == 8);
    const auto is_batch = [](const AssumedValue& one) { return one.path == "train.global_batch_size"; };
    CHECK(std::none_of(known.assumed.begin(), known.assumed.end(), is_batch));
    const Imported open = import_recipe(text, name, {});
    CHECK(value_of(open, "train.global_batch_size") == "32");
    const auto assumed = std::find_if(open.assumed.begin(), open.assumed.end(), is_batch);
    REQUIRE(assumed != open.assumed.end());
    CHECK(assumed->value == "32");
    CHECK(assumed->reason.find("one data-parallel rank") != std::string::npos);
  }
  Options options;
  options.base = "llama3-8b";
  // The parallelism of the file itself counts: 8 ranks without context parallelism of 2 but of 4.
  CHECK(value_of(import_recipe(R"({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5,
                                   "sequence_parallel_size": 4})",
                               "d.json", options),
                 "train.global_batch_size") == "30");
  // 7 data-parallel ranks of 2 context-parallel ones each.
  const Imported all = import_recipe(
      R"({"train_batch_size": 84, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3})",
      "d.json", options);
  CHECK(value_of(all, "dist.world_size") == "14");
  CHECK(all.resolution.config.train.num_microbatches == 3);
  const Imported micro =
      import_recipe(R"({"train_batch_size": 60, "gradient_accumulation_steps": 3})", "d.json", options);
  CHECK(value_of(micro, "train.micro_batch_size") == "5");
}

TEST_CASE("deepspeed: gradients, main parameters and moments in bf16") {
  const auto import = [](const std::string& more) {
    return import_recipe(
        R"({"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true}, "optimizer": {"type": "AdamW"}, )" +
            more + "}",
        "d.json", {});
  };
  const Imported gradients = import(R"("data_types": {"grad_accum_dtype": "bf16"})");
  CHECK(value_of(gradients, "optimizer.main_grads_dtype") == "bf16");
  CHECK(value_of(gradients, "optimizer.use_precision_aware_optimizer") == "true");
  CHECK(gradients.resolution.config.optimizer.main_grads_dtype == config::Precision::bf16);
  CHECK(omitted_as(import(R"("data_types": {"grad_accum_dtype": "fp32"})"), "data_types.grad_accum_dtype",
                   OmissionReason::same));
  const Imported refused = import(R"("data_types": {"grad_accum_dtype": "fp16"})");
  CHECK(omitted_as(refused, "data_types.grad_accum_dtype", OmissionReason::unsupported));
  CHECK(value_of(refused, "optimizer.main_grads_dtype") == "unset");
  const Imported state = import_recipe(
      R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam"}, "bf16": {"enabled": true,
          "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true}})",
      "d.json", {});
  for (const char* field : {"main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"})
    CHECK(value_of(state, std::string("optimizer.") + field) == "bf16");
  const Imported lion = import_recipe(
      R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Lion"},
          "bf16": {"enabled": true, "bf16_optimizer_states": true}})",
      "d.json", {});
  CHECK(omitted_as(lion, "bf16.bf16_optimizer_states", OmissionReason::unsupported));
  CHECK(value_of(lion, "optimizer.exp_avg_dtype") == "unset");
}

TEST_CASE("torchtune: FP8 with a scale for a tensor is current scaling") {
  const auto tune = [](const std::string& more) {
    return import_recipe(
        "model: {_component_: torchtune.models.llama3.llama3_8b}\ndtype: bf16\n" + more +
            "\noptimizer: {_component_: torch.optim.AdamW, lr: 1e-4}\nmax_steps_per_epoch: 3\n",
        "t.yaml", {});
  };
  for (const char* name : {"", "fp8_recipe_name: tensorwise"}) {
    const Imported low = tune(std::string("enable_fp8_training: true\n") + name);
    CHECK(low.resolution.config.mixed_precision.fp8.has_value());
    CHECK(low.resolution.config.mixed_precision.fp8_recipe == config::Fp8Recipe::tensorwise);
  }
  const Imported rows = tune("enable_fp8_training: true\nfp8_recipe_name: rowwise");
  CHECK(omitted_as(rows, "fp8_recipe_name", OmissionReason::unsupported));
  CHECK_FALSE(rows.resolution.config.mixed_precision.fp8.has_value());
  CHECK_FALSE(tune("enable_fp8_training: false").resolution.config.mixed_precision.fp8.has_value());
}

TEST_CASE("deepspeed: auto is to be filled in, stages have names") {
  const Imported file = import_recipe(
      R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}, "train_batch_size": "auto"})",
      "d.json", {});
  CHECK(value_of(file, "ddp.data_parallel_sharding_strategy") == "optim_grads_params");
  CHECK(omitted_as(file, "train_batch_size", OmissionReason::to_fill_in));
  CHECK(omitted_as(file, "zero_optimization.offload_optimizer.device", OmissionReason::to_fill_in));
}

TEST_CASE("deepspeed: optimizer state on NVMe lies in files of the directory that it names") {
  const auto offload = [](const std::string& fields) {
    return import_recipe(
        R"({"aio": {"block_size": 1048576}, "zero_optimization": {"offload_optimizer": {)" + fields + "}}}",
        "d.json", {});
  };
  const Imported files = offload(R"("device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 4)");
  CHECK(value_of(files, "optimizer.optimizer_cpu_offload") == "true");
  CHECK(value_of(files, "optimizer.optimizer_offload_path") == "/local_nvme");
  CHECK(omitted_as(files, "zero_optimization.offload_optimizer.buffer_count", OmissionReason::no_effect));
  CHECK(omitted_as(files, "aio", OmissionReason::no_effect));
  for (const char* other :
       {R"("device": "cpu", "nvme_path": "/local_nvme")", R"("nvme_path": "/local_nvme")"}) {
    const Imported memory = offload(other);
    CHECK(omitted_as(memory, "zero_optimization.offload_optimizer.nvme_path", OmissionReason::no_effect));
    CHECK_FALSE(memory.resolution.config.optimizer.optimizer_offload_path);
  }
}

TEST_CASE("SGD is PyTorch's: the decay is added to the gradient, and momentum is 0 unless it is given") {
  const auto sgd = [](const Imported& imported, const char* momentum) {
    CHECK(value_of(imported, "optimizer.optimizer") == "sgd");
    CHECK(value_of(imported, "optimizer.decoupled_weight_decay") == "false (assumed)");
    CHECK(value_of(imported, "optimizer.sgd_momentum") == momentum);
    CHECK_MESSAGE(imported.resolution.ok(),
                  config::render(imported.resolution.diagnostics, imported.resolution.sources));
  };
  const auto deepspeed = [](const std::string& parameters) {
    return import_recipe(R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {)" +
                             parameters + "}}}",
                         "d.json", {});
  };
  sgd(deepspeed(R"("lr": 0.1, "weight_decay": 0.1)"), "0 (assumed)");
  sgd(deepspeed(R"("lr": 0.1, "momentum": 0.8)"), "0.8");
  const std::string tune = "optimizer:\n  _component_: torch.optim.SGD\n  lr: 1e-3\n  weight_decay: 0.1\n";
  const std::string model = "model:\n  _component_: torchtune.models.llama3_2.llama3_2_1b\n";
  CHECK(value_of(import_recipe(model + tune, "t.yaml", {}), "optimizer.sgd_momentum") == "0 (assumed)");
  CHECK(value_of(import_recipe(model + tune + "  momentum: 0.9\n", "t.yaml", {}), "optimizer.sgd_momentum") ==
        "0.9");
  CHECK(value_of(import_recipe(model + tune, "t.yaml", {}), "optimizer.decoupled_weight_decay") ==
        "false (assumed)");
  const Imported axolotl = import_recipe(
      "base_model: NousResearch/Llama-3.2-1B\nmicro_batch_size: 1\noptimizer: sgd\nlearning_rate: 1e-3\n",
      "a.yaml", {});
  CHECK(value_of(axolotl, "optimizer.decoupled_weight_decay") == "false (assumed)");
  CHECK(value_of(axolotl, "optimizer.sgd_momentum") == "0 (assumed)");
  const Imported megatron =
      import_recipe("torchrun pretrain_gpt.py --optimizer sgd --lr 0.1 --weight-decay 0.1\n", "m.sh", {});
  CHECK(value_of(megatron, "optimizer.decoupled_weight_decay") == "false (assumed)");
}

TEST_CASE("deepspeed: Muon has its own rate, and the betas of Adam beside it") {
  const auto with = [](const std::string& type, const std::string& params) {
    return import_recipe(R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": ")" + type +
                             R"(", "params": {)" + params + "}}}",
                         "d.json", {});
  };
  const Imported plain =
      with("Muon", R"("lr": 0.02, "momentum": 0.9, "betas": [0.8, 0.9], "weight_decay": 0.1)");
  CHECK(value_of(plain, "optimizer.optimizer") == "muon");
  CHECK(value_of(plain, "optimizer.lr") == "0.02");
  CHECK(value_of(plain, "optimizer.muon_momentum") == "0.9");
  CHECK(value_of(plain, "optimizer.sgd_momentum") == "unset");
  CHECK(value_of(plain, "optimizer.adam_beta1") == "0.8");
  CHECK(value_of(plain, "optimizer.adam_beta2") == "0.9");
  CHECK(value_of(plain, "optimizer.weight_decay") == "0.1");
  CHECK(value_of(plain, "optimizer.muon_coefficient_type") == "simple (assumed)");
  CHECK(value_of(plain, "optimizer.muon_use_nesterov") == "true (assumed)");
  CHECK(value_of(plain, "optimizer.muon_scale_mode") == "shape_scaling (assumed)");
  CHECK_MESSAGE(plain.resolution.ok(),
                config::render(plain.resolution.diagnostics, plain.resolution.sources));

  const std::string lr = "optimizer.params.lr", adam_lr = "optimizer.params.adam_lr",
                    muon_lr = "optimizer.params.muon_lr";
  const Imported own = with("Muon", R"("lr": 3e-4, "muon_lr": 0.02)");
  CHECK(value_of(own, "optimizer.lr") == "0.02");
  REQUIRE(omitted_as(own, lr, OmissionReason::unsupported));
  CHECK(omitted(own, lr)->reason.starts_with(
      "the learning rate of the parameters that Adam updates beside Muon"));
  const Imported two = with("Muon", R"("muon_lr": 0.02, "adam_lr": 3e-4)");
  CHECK(value_of(two, "optimizer.lr") == "0.02");
  CHECK(omitted_as(two, adam_lr, OmissionReason::unsupported));
  const Imported three = with("Muon", R"("lr": 1e-3, "muon_lr": 0.02, "adam_lr": 3e-4)");
  CHECK(value_of(three, "optimizer.lr") == "0.02");
  CHECK(omitted_as(three, lr, OmissionReason::replaced));
  CHECK(omitted_as(three, adam_lr, OmissionReason::unsupported));
  const Imported same = with("Muon", R"("lr": 0.02, "muon_lr": 0.02, "adam_lr": 0.02)");
  CHECK(value_of(same, "optimizer.lr") == "0.02");
  CHECK(omitted(same, lr) == nullptr);
  CHECK(omitted_as(same, adam_lr, OmissionReason::same));
  // WarmupLR sets the rate of all parameters: none of the optimizer's has an effect.
  const std::string warmup = R"(}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01)";
  for (const char* rates : {R"("lr": 0.02)", R"("lr": 1e-3, "muon_lr": 0.02)",
                            R"("muon_lr": 0.02, "adam_lr": 1e-3)", R"("lr": 0.02, "adam_lr": 1e-3)"}) {
    const Imported scheduled = with("Muon", rates + warmup);
    CAPTURE(rates);
    CHECK(value_of(scheduled, "optimizer.lr") == "0.01");
    for (const std::string& key : {lr, muon_lr, adam_lr})
      if (const auto* one = omitted(scheduled, key)) {
        CHECK((one->why == OmissionReason::replaced || one->why == OmissionReason::no_effect));
        CHECK(one->reason.find("beside Muon") == std::string::npos);
      }
    if (std::string_view(rates).find("adam_lr") != std::string_view::npos)
      CHECK(omitted_as(scheduled, adam_lr, OmissionReason::no_effect));
  }
  const Imported adam = with("AdamW", R"("lr": 1e-3, "muon_lr": 0.02)");
  CHECK(value_of(adam, "optimizer.lr") == "0.001");
  CHECK(omitted_as(adam, muon_lr, OmissionReason::no_effect));
  const Imported odd = with("Muon", R"("lr": 1e-3, "betas": 0.9)");
  REQUIRE(omitted_as(odd, "optimizer.params.betas", OmissionReason::value));
  CHECK(omitted(odd, "optimizer.params.betas")->reason == "two numbers for Adam, Lion or Muon are expected");
}

TEST_CASE("bridge: torch.uint8 is fp8, for moments only") {
  const auto with = [](const std::string& optimizer) {
    return import_recipe(
        "model: {_target_: a.LlamaModelProvider, num_layers: 2}\noptimizer: {_target_: "
        "b.OptimizerConfig, use_precision_aware_optimizer: true, " +
            optimizer + "}\n",
        "run_config.yaml", {});
  };
  const Imported moments = with("exp_avg_dtype: torch.uint8, exp_avg_sq_dtype: {_target_: torch.half}");
  CHECK(value_of(moments, "optimizer.exp_avg_dtype") == "fp8");
  CHECK(value_of(moments, "optimizer.exp_avg_sq_dtype") == "fp16");
  const Imported gradients = with("main_grads_dtype: torch.uint8");
  CHECK(value_of(gradients, "optimizer.main_grads_dtype") == "unset");
  REQUIRE(omitted_as(gradients, "optimizer.main_grads_dtype", OmissionReason::value));
  CHECK(omitted(gradients, "optimizer.main_grads_dtype")->reason ==
        "counterparts are known for: torch.float32, torch.float, torch.bfloat16, torch.float16, torch.half");
}

TEST_CASE("bridge: the layers of each pipeline stage, as text or as lists") {
  const auto with = [](const std::string& layout) {
    return import_recipe(
        "model: {_target_: a.GPTModelProvider, num_layers: 3, mtp_num_layers: 1, "
        "pipeline_model_parallel_size: 2, pipeline_model_parallel_layout: " +
            layout + "}\n",
        "run_config.yaml", {});
  };
  const std::string path = "dist.pipeline_model_parallel_layout",
                    theirs = "model.pipeline_model_parallel_layout";
  CHECK(value_of(with("[[embedding, decoder], [decoder, decoder], [mtp], [loss]]"), path) == "Et|tt|m|L");
  CHECK(value_of(with("[[embedding, decoder, decoder, decoder, mtp], [], [], [loss]]"), path) == "Etttm|||L");
  CHECK(value_of(with("'Et|tt|m|L'"), path) == "Et|tt|m|L");
  const Imported other = with("[[embedding, encoder, decoder], [decoder, decoder, mtp, loss]]");
  REQUIRE(omitted_as(other, theirs, OmissionReason::value));
  CHECK(omitted(other, theirs)->reason == "layers are embedding, decoder, mtp and loss, not encoder");
}

TEST_CASE("megatron: a layout with multi-token prediction in a stage of its own") {
  const Imported file = import_recipe(
      "python pretrain_gpt.py --num-layers 61 --pipeline-model-parallel-size 16 --mtp-num-layers 1 "
      "--pipeline-model-parallel-layout 'Et*3|(tt|)*29m|L'\n",
      "pretrain.sh", {});
  CHECK(value_of(file, "dist.pipeline_model_parallel_layout") == "Et*3|(tt|)*29m|L");
  CHECK(value_of(file, "model.mtp_num_layers") == "1");
}

namespace {
Imported axolotl(const std::string& more, const std::string& base = "org/Llama-3.2-1B") {
  return import_recipe("base_model: " + base +
                           "\nsequence_len: 128\nmicro_batch_size: 1\nlearning_rate: 1e-4\nmax_steps: 9\n" +
                           more,
                       "a.yaml", {});
}

Imported axolotl_sample(const std::string& entry, const std::string& more = "") {
  return axolotl("datasets:\n  - {path: ./x.jsonl, " + entry + "}\n" + more);
}
}  // namespace

TEST_CASE("axolotl: modules of Transformers have adapters of their own, fused ones those of the layer") {
  const auto targets = [](const Imported& file) { return value_of(file, "peft.target_modules"); };
  const std::string lora = "adapter: lora\nlora_r: 8\nlora_alpha: 16\n";
  const Imported some = axolotl(lora + "lora_target_modules: [v_proj, q_proj, lm_head]\n");
  CHECK(value_of(some, "peft.scheme") == "canonical_lora");
  CHECK(targets(some) == "[linear_q, linear_v]");
  CHECK(omitted_as(some, "lora_target_modules", OmissionReason::unsupported));
  CHECK(value_of(some, "peft.lora_A_init") == "kaiming (assumed)");
  CHECK(some.resolution.ok());
  const std::string all =
      "[linear_q, linear_k, linear_v, linear_proj, linear_fc1_gate, linear_fc1_up, linear_fc2]";
  CHECK(targets(axolotl(lora + "lora_target_linear: true\n")) == all);
  CHECK(targets(axolotl(lora)) == all + " (assumed)");
  const Imported dora = axolotl(lora + "peft_use_dora: true\nlora_target_modules: all-linear\n");
  CHECK(value_of(dora, "peft.scheme") == "canonical_dora");
  CHECK(targets(dora) == all);
  const Imported fused = axolotl(lora + "lora_target_modules: [c_attn, c_proj]\n", "openai-community/gpt2");
  CHECK(value_of(fused, "peft.scheme") == "lora");
  CHECK(targets(fused) == "[linear_qkv, linear_proj, linear_fc2]");
  CHECK(fused.resolution.ok());
  CHECK(targets(axolotl(lora + "lora_target_linear: true\n", "openai-community/gpt2")) ==
        "[linear_qkv, linear_proj, linear_fc1, linear_fc2]");
  const Imported layers = axolotl(lora + "lora_target_modules: [q_proj]\npeft_layers_to_transform: [0, 3]\n");
  CHECK(targets(layers) == "['*.layers.0.*.linear_q', '*.layers.3.*.linear_q']");
  CHECK(layers.resolution.ok());
  const Imported ours =
      axolotl(lora + "lora_model_dir: ./mine\npeft_use_rslora: true\nloraplus_lr_ratio: 4\n");
  CHECK(value_of(ours, "peft.adapter") == "./mine");
  CHECK(value_of(ours, "peft.use_rslora") == "true");
  CHECK(value_of(ours, "peft.lora_plus_ratio") == "4");
}

TEST_CASE("axolotl: weights in 4 bits stay so, those in 8 are not there") {
  const std::string lora = "lora_r: 8\nlora_alpha: 16\n";
  CHECK(value_of(axolotl("adapter: qlora\n" + lora), "peft.base_quantization") == "nf4");
  CHECK(value_of(axolotl("adapter: lora\nload_in_4bit: true\n" + lora), "peft.base_quantization") == "nf4");
  const Imported eight = axolotl("adapter: lora\nload_in_8bit: true\n" + lora);
  CHECK(value_of(eight, "peft.base_quantization") == "unset");
  CHECK(omitted_as(eight, "load_in_8bit", OmissionReason::unsupported));
  CHECK(omitted_as(axolotl("load_in_4bit: true\n"), "load_in_4bit", OmissionReason::no_effect));
}

TEST_CASE("axolotl: the base is a directory, or expected in one") {
  const Imported hub = axolotl("", "org/Llama-3.2-1B-Instruct");
  CHECK(value_of(hub, "model (preset)") == "llama3.2-1b");
  CHECK(value_of(hub, "checkpoint.pretrained_checkpoint") == "hf:models/Llama-3.2-1B-Instruct");
  CHECK(value_of(hub, "tokenizer.tokenizer_model") == "${checkpoint.pretrained_checkpoint} (assumed)");
  CHECK(hub.resolution.ok());
  CHECK(hub.resolution.config.tokenizer.tokenizer_model->resolved ==
        hub.resolution.config.checkpoint.pretrained_checkpoint->resolved);
  const Imported here = axolotl("", "./models/llama-3.2-1b");
  CHECK(value_of(here, "checkpoint.pretrained_checkpoint") == "hf:./models/llama-3.2-1b");
  CHECK(value_of(here, "model (preset)") == "llama3.2-1b");
  CHECK(value_of(axolotl("", "./models/mine"), "model (preset)") == "hf:./models/mine");
  CHECK(omitted_as(axolotl("", "someone/else"), "base_model", OmissionReason::to_fill_in));
}

TEST_CASE("axolotl: samples, templates and loss tokens") {
  const Imported alpaca = axolotl_sample("type: alpaca");
  CHECK(value_of(alpaca, "dataset.train_files") == "[./x.jsonl]");
  CHECK(value_of(alpaca, "dataset.format") == "alpaca");
  CHECK(value_of(alpaca, "tokenizer.chat_template") == "alpaca (assumed)");
  CHECK(value_of(alpaca, "dataset.packing") == "false (assumed)");
  CHECK(value_of(alpaca, "dataset.too_long") == "drop (assumed)");
  CHECK(value_of(alpaca, "dataset.split") == "1,0,0 (assumed)");
  CHECK(value_of(alpaca, "dataset.loss_mode") == "unset");
  CHECK(alpaca.resolution.ok());
  CHECK(value_of(axolotl_sample("type: completion"), "dataset.format") == "text");
  CHECK(value_of(axolotl_sample("type: chat_template"), "dataset.format") == "messages");
  CHECK(value_of(axolotl_sample("type: chat_template, field_messages: conversations"), "dataset.format") ==
        "sharegpt");
  CHECK(omitted_as(axolotl_sample("type: input_output"), "datasets.type", OmissionReason::unsupported));
  CHECK(omitted_as(axolotl_sample("type: {field: a}"), "datasets.type", OmissionReason::to_fill_in));
  CHECK(omitted_as(axolotl_sample("type: alpaca, odd: 1"), "datasets.odd", OmissionReason::unknown));
  CHECK(omitted_as(axolotl_sample("type: alpaca, ds_type: parquet"), "datasets.ds_type",
                   OmissionReason::value));
  CHECK(omitted_as(axolotl_sample("type: chat_template, roles_to_train: [user]"), "datasets.roles_to_train",
                   OmissionReason::value));
  const auto chat = [](const std::string& more) { return axolotl_sample("type: chat_template", more); };
  CHECK(value_of(chat("chat_template: llama3\n"), "tokenizer.chat_template") == "llama3");
  CHECK(omitted_as(chat("chat_template: qwen_25\n"), "chat_template", OmissionReason::to_fill_in));
  CHECK(omitted_as(chat("chat_template: tokenizer_default\n"), "chat_template", OmissionReason::same));
  CHECK(omitted_as(chat("chat_template: jinja\nchat_template_jinja: \"{{ messages }}\"\n"),
                   "chat_template_jinja", OmissionReason::to_fill_in));
  CHECK(value_of(chat("chat_template_jinja: ./t.jinja\n"), "tokenizer.chat_template") == "./t.jinja");
  CHECK(value_of(chat("sample_packing: true\n"), "dataset.packing") == "true");
  CHECK(value_of(chat("train_on_inputs: true\n"), "dataset.loss_mode") == "all");
  CHECK(value_of(chat("excess_length_strategy: truncate\n"), "dataset.too_long") == "truncate");
  CHECK(omitted_as(chat("excess_length_strategy: raise\n"), "excess_length_strategy", OmissionReason::value));
  CHECK(value_of(chat("val_set_size: 0.05\n"), "dataset.split") == "19,1,0");
  CHECK(value_of(chat("val_set_size: 0.3\n"), "dataset.split") == "7,3,0");
  const Imported counted = chat("val_set_size: 200\neval_steps: 5\n");
  CHECK(omitted_as(counted, "val_set_size", OmissionReason::to_fill_in));
  CHECK(omitted_as(counted, "eval_steps", OmissionReason::no_effect));
  CHECK(counted.resolution.ok());
  const Imported elsewhere =
      axolotl("datasets:\n  - {path: ../../etc/some set, type: alpaca}\n  - {path: a/b$c, type: alpaca}\n");
  CHECK(value_of(elsewhere, "dataset.train_files") == "[../../etc/some set, data/b-c.jsonl]");
}

TEST_CASE("torchtune: builders say adapters, their base and samples") {
  const auto tune = [](const std::string& builder, const std::string& more) {
    return import_recipe(
        "model: {_component_: torchtune.models." + builder + ", lora_attn_modules: [q_proj]}\n" + more +
            "\noptimizer: {_component_: torch.optim.AdamW, lr: 1e-4}\nmax_steps_per_epoch: 3\n",
        "t.yaml", {});
  };
  const auto component = [&](const std::string& text) {
    return tune("llama3.lora_llama3_8b", "dataset: {_component_: torchtune.datasets." + text + "}");
  };
  const Imported quantized = tune("llama3.qlora_llama3_8b", "");
  CHECK(value_of(quantized, "peft.scheme") == "canonical_lora");
  CHECK(value_of(quantized, "peft.base_quantization") == "nf4");
  CHECK(value_of(quantized, "peft.target_modules") == "[linear_q]");
  CHECK(value_of(quantized, "peft.dim") == "8 (assumed)");
  CHECK(value_of(quantized, "checkpoint.pretrained_checkpoint") == "hf:models/llama3-8b");
  CHECK(value_of(tune("llama3.qdora_llama3_8b", ""), "peft.scheme") == "canonical_dora");
  CHECK(value_of(tune("llama3.llama3_8b", ""), "peft.scheme") == "unset");
  CHECK(value_of(tune("llama3.llama3_8b",
                      "checkpointer: {_component_: torchtune.training.FullModelMetaCheckpointer, "
                      "checkpoint_dir: /m/Llama/original/}"),
                 "checkpoint.pretrained_checkpoint") == "hf:/m/Llama");
  CHECK(value_of(component("text_completion_dataset, source: text.jsonl"), "dataset.format") == "text");
  CHECK(value_of(component("chat_dataset, source: a.jsonl, conversation_style: openai"), "dataset.format") ==
        "messages");
  CHECK(value_of(component("alpaca_dataset"), "dataset.loss_mode") == "all (assumed)");
  CHECK(value_of(component("slimorca_dataset"), "dataset.loss_mode") == "assistant (assumed)");
  CHECK(value_of(component("slimorca_dataset, masking_strategy: train_on_last"), "dataset.loss_mode") ==
        "last_turn");
  CHECK(omitted_as(component("preference_dataset, source: x"), "dataset._component_",
                   OmissionReason::unsupported));
  CHECK(omitted_as(component("chat_dataset, source: x, new_system_prompt: Hi"), "dataset.new_system_prompt",
                   OmissionReason::to_fill_in));
  const Imported two = tune("llama3.lora_llama3_8b",
                            "dataset:\n  - {_component_: torchtune.datasets.alpaca_dataset}\n"
                            "  - {_component_: torchtune.datasets.slimorca_dataset}\n");
  CHECK(value_of(two, "dataset.train_files") == "[data/alpaca.jsonl, data/SlimOrca-Dedup.jsonl]");
  CHECK(value_of(two, "dataset.format") == "unset");
  CHECK(two.resolution.ok());
}

TEST_CASE("TrainingArguments of fine-tuning count where the base is a recipe of that kind") {
  const std::string text =
      R"({"per_device_train_batch_size": 2, "learning_rate": 1e-4, "max_length": 512, "packing": false,
          "assistant_only_loss": true, "eos_token": "</s>"})";
  Options sft;
  sft.base = "llama3-8b-lora";
  const Imported tuned = import_recipe(text, "a.json", sft);
  CHECK(value_of(tuned, "dataset.packing") == "false");
  CHECK(value_of(tuned, "model.seq_length") == "512");
  CHECK(value_of(tuned, "tokenizer.eod_token") == "</s>");
  CHECK_MESSAGE(tuned.resolution.ok(),
                config::render(tuned.resolution.diagnostics, tuned.resolution.sources));
  const Imported plain = import_recipe(text, "a.json", {});
  CHECK(value_of(plain, "dataset.packing") == "unset");
  CHECK(omitted_as(plain, "packing", OmissionReason::no_effect));
  CHECK_MESSAGE(plain.resolution.ok(),
                config::render(plain.resolution.diagnostics, plain.resolution.sources));
}

TEST_CASE("lengths in epochs stay epochs, with the other trainer's default where the file is silent") {
  const auto arguments = [](const std::string& more, const std::string& base = {}) {
    Options options{.format = Format::training_arguments};
    options.base = base;
    Imported file = import_recipe(R"({"per_device_train_batch_size": 2, "learning_rate": 1e-4)" + more + "}",
                                  "a.json", options);
    CHECK_MESSAGE(file.resolution.ok(), config::render(file.resolution.diagnostics, file.resolution.sources));
    return file;
  };
  for (const std::string base : {"", "llama3-8b-lora"}) {  // recipes whose length is a number of steps
    CAPTURE(base);
    const Imported silent = arguments("", base);
    CHECK(value_of(silent, "train.epochs") == "3 (assumed)");
    CHECK(value_of(silent, "train.train_iters") == "null (assumed)");
    CHECK(silent.resolution.config.train.epochs == 3);
    CHECK(!silent.resolution.config.train.train_iters);
    const Imported half = arguments(R"(, "num_train_epochs": 0.5, "max_steps": -1)", base);
    CHECK(value_of(half, "train.epochs") == "0.5");
    CHECK(omitted_as(half, "max_steps", OmissionReason::off));
    const Imported steps = arguments(R"(, "num_train_epochs": 2, "max_steps": 7)", base);
    CHECK(value_of(steps, "train.epochs") == "unset");
    CHECK(value_of(steps, "train.train_iters") == "7");
    CHECK(omitted_as(steps, "num_train_epochs", OmissionReason::no_effect));
    CHECK(std::any_of(steps.omitted.begin(), steps.omitted.end(), [](const auto& omitted) {
      return omitted.reason == "max_steps sets the length, whatever the number of epochs";
    }));
  }
  const auto sampled = [](const std::string& more, const std::string& data) {
    return import_recipe(
        "base_model: org/Llama-3.2-1B\nsequence_len: 128\nmicro_batch_size: 1\nlearning_rate: 1e-4\n" + data +
            more,
        "a.yaml", {.format = Format::axolotl});
  };
  const std::string alpaca = "datasets:\n  - {path: ./x.jsonl, type: alpaca}\n";
  const Imported silent = sampled("", alpaca);
  CHECK(value_of(silent, "train.epochs") == "1 (assumed)");
  CHECK(silent.resolution.config.train.epochs == 1);
  CHECK(value_of(sampled("num_epochs: 4\n", alpaca), "train.epochs") == "4");
  CHECK(value_of(sampled("num_epochs: 4\nmax_steps: 9\n", alpaca), "train.train_iters") == "9");
  // Without data the number of epochs has no meaning.
  const Imported bare = sampled("num_epochs: 2\n", "");
  CHECK(value_of(bare, "train.train_iters") == "1000 (assumed)");
  CHECK(omitted_as(bare, "num_epochs", OmissionReason::to_fill_in));
}

TEST_CASE("bridge: fine-tuning data and adapters bring their base") {
  const Imported file = import_recipe(
      "model: {_target_: a.LlamaModelProvider, num_layers: 2}\npeft: {_target_: b.DoRA, lora_A_init_method: "
      "kaiming}\n"
      "dataset: {_target_: c.GPTSFTDatasetConfig, dataset_root: /d, dataloader_type: single}\n",
      "run_config.yaml", {});
  CHECK(value_of(file, "peft.scheme") == "dora");
  CHECK(value_of(file, "peft.lora_A_init") == "kaiming");
  CHECK(value_of(file, "checkpoint.pretrained_checkpoint") == "hf:models/base (assumed)");
  CHECK(value_of(file, "dataset.train_files") == "[/d/training.jsonl]");
  CHECK(value_of(file, "dataset.packing") == "false (assumed)");
  CHECK(value_of(file, "dataset.kind") == "unset");
  CHECK(value_of(file, "tokenizer (preset)") == "huggingface (assumed)");
}

TEST_CASE("every preset that a name elsewhere stands for is there") {
  for (const char* name : {"google/gemma-2-2b-it", "mistralai/Mistral-7B-v0.1",
                           "microsoft/Phi-3.5-mini-instruct", "Qwen/Qwen2.5-32B-Instruct", "Qwen/Qwen3-14B",
                           "allenai/OLMo-2-1124-7B", "HuggingFaceTB/SmolLM2-135M-Instruct"}) {
    CAPTURE(name);
    const auto preset = preset_of_model(name);
    REQUIRE(preset);
    CHECK(vocabulary_of_preset(*preset) > 0);
  }
}

TEST_CASE("chat models of Qwen 2.5 have fewer positions than the base models of their presets") {
  const auto positions = [](const std::string& text) {
    return value_of(import_recipe(text, "file", {}), "model.max_position_embeddings");
  };
  const std::string axolotl = "sequence_len: 10\nbase_model: Qwen/Qwen2.5-";
  CHECK(positions(axolotl + "7B-Instruct") == "32768");
  CHECK(positions(axolotl + "14B-Instruct") == "32768");
  CHECK(positions(axolotl + "1.5B-Instruct") == "32768");
  CHECK(positions(axolotl + "1.5B") == "unset");
  CHECK(positions(axolotl + "7B") == "unset");
  CHECK(positions(axolotl + "3B-Instruct") == "unset");  // the preset's
  const std::string torchtune = "model: {_component_: torchtune.models.qwen2_5.lora_qwen2_5_";
  CHECK(positions(torchtune + "7b_instruct}") == "32768");
  CHECK(positions(torchtune + "7b_base}") == "unset");
}

TEST_CASE("formats are recognized, or the known ones are listed") {
  const auto format_of = [](const char* text) { return import_recipe(text, "file", {}).format; };
  CHECK(format_of("pretrain_gpt.py --num-layers 2") == Format::megatron);
  CHECK(format_of("{\"zero_optimization\": {\"stage\": 1}}") == Format::deepspeed);
  CHECK(format_of("model: {_target_: a.b.GPTModelProvider}") == Format::bridge);
  CHECK(format_of("model: {_component_: torchtune.models.llama3.llama3_8b}") == Format::torchtune);
  CHECK(format_of("base_model: x/y\nsequence_len: 10") == Format::axolotl);
  CHECK(format_of("{\"per_device_train_batch_size\": 4}") == Format::training_arguments);
  // A comment does not make a document a command.
  CHECK(format_of("# was: pretrain_gpt.py --num-layers 2\nbase_model: x/y\nsequence_len: 10") ==
        Format::axolotl);
  try {
    import_recipe("a: 1\nb: 2\n", "file", {});
    FAIL("recognized");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::format);
    for (const FormatInfo& info : known_formats()) CHECK(error.help().find(info.name) != std::string::npos);
  }
  try {
    import_recipe("model: {num_layers: 2}\noptimizer: {lr: 1}\n", "mine.yaml", {});
    FAIL("recognized");
  } catch (const Error& error) {
    CHECK(error.help().find("capstan check") != std::string::npos);
  }
  Options forced;
  forced.format = Format::deepspeed;
  CHECK(import_recipe("{\"a\": 1}", "file", forced).omitted.size() >= 1);
}

TEST_CASE("malformed files are errors of the format") {
  for (const char* text :
       {"{\"zero_optimization\": ", "a: [1", "", " \n", "\xff\xfe", "- 1\n- 2\n", "pretrain_gpt.py 'x"}) {
    CAPTURE(text);
    try {
      import_recipe(text, "file.sh", {});
      FAIL("accepted");
    } catch (const Error& error) {
      CHECK(error.code() == ErrorCode::format);
      CHECK(error.message().starts_with("`file.sh`"));
    }
  }
  CHECK_THROWS_WITH_AS(import_recipe(std::string("pretrain_gpt.py\0 --num-layers 2", 32), "file.sh", {}),
                       "`file.sh` is not text: a NUL at byte 15", Error);
}

TEST_CASE("commands of megabytes are answered soon") {
  std::string options = "pretrain_gpt.py";
  for (int i = 0; i < 9000; ++i) options += " --unknown-" + std::to_string(i);
  const std::string padded = options + std::string(3'000'000, ' ');
  CHECK(import_recipe(padded, "file.sh", {}).omitted.size() >= 9000);
  std::string repeated = "pretrain_gpt.py";
  while (repeated.size() < 4'000'000) repeated += " --num-layers 3";
  CHECK_THROWS_WITH_AS(import_recipe(repeated, "file.sh", {}),
                       "`file.sh`: a command of more than 10000 words", Error);
}

TEST_CASE("models by their names elsewhere") {
  CHECK(preset_of_model("meta-llama/Llama-3.1-8B-Instruct") == "llama3.1-8b");
  CHECK(preset_of_model("NousResearch/Meta-Llama-3-8B") == "llama3-8b");
  CHECK(preset_of_model("meta-llama/Llama-2-7b-chat-hf") == "llama2-7b");
  CHECK_FALSE(preset_of_model("someone/else"));
  CHECK(preset_of_builder("torchtune.models.llama3_1.qlora_llama3_1_8b") == "llama3.1-8b");
  CHECK(preset_of_builder("torchtune.models.qwen2_5.lora_qwen2_5_7b_base") == "qwen2.5-7b");
  CHECK(preset_of_builder("torchtune.models.qwen3.qwen3_4b_instruct") == "qwen3-4b");
  CHECK_FALSE(preset_of_builder("os.system"));
  CHECK(vocabulary_of_preset("llama3.1-8b") == 128256);
}

TEST_CASE("a class of a file is a name to look up, never something to load") {
  const Imported file = import_recipe(
      "_target_: os.system\nmodel:\n  _target_: subprocess.Popen\n  args: [rm]\n"
      "  activation_func: {_target_: builtins.exec}\n",
      "run_config.yaml", {});
  CHECK(omitted_as(file, "_target_", OmissionReason::value));
  CHECK(omitted_as(file, "model._target_", OmissionReason::value));
  CHECK(omitted_as(file, "model.activation_func", OmissionReason::value));
}

TEST_CASE("keys and values of a file cannot insert lines into the recipe") {
  const Imported file = import_recipe(
      "base_model: \"evil/gpt2\\ntrain: {train_iters: 7}\"\nsequence_len: 128\n\"a\\n  b\\x7f\": \"c\\nd\"\n"
      "output_dir: \"x\\n- y\"\n",
      "odd\n name: x.yaml", {});
  for (const auto line : split(file.recipe, '\n')) {
    CAPTURE(std::string(line));
    CHECK_FALSE(line.starts_with("train: {"));
    CHECK_FALSE(line.starts_with(" name:"));
    CHECK_FALSE(line.starts_with("- y"));
  }
  CHECK_FALSE(file.resolution.malformed);
}

TEST_CASE("floors of the learning rate go to the field that means them") {
  const auto arguments = [](const std::string& rest) {
    return import_recipe(R"({"output_dir": "x", "per_device_train_batch_size": 1, "learning_rate": 1e-4, )"
                         R"("max_steps": 10, "warmup_ratio": 0.1, )" +
                             rest + "}",
                         "a.json", {.format = Format::training_arguments});
  };
  const Imported fixed =
      arguments(R"("lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-5})");
  CHECK(value_of(fixed, "scheduler.lr_decay_style") == "cosine");
  CHECK(value_of(fixed, "optimizer.min_lr") == "1.0e-05");
  CHECK(fixed.resolution.config.optimizer.min_lr == 1e-5);
  const Imported rate =
      arguments(R"("lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1})");
  CHECK(value_of(rate, "optimizer.min_lr_ratio") == "0.1");
  CHECK(value_of(rate, "optimizer.min_lr") == "unset");
  CHECK(rate.resolution.config.optimizer.min_lr == 1e-5);
  const Imported plain = arguments(R"("lr_scheduler_type": "cosine")");
  CHECK(value_of(plain, "optimizer.min_lr") == "0 (assumed)");
  CHECK(plain.resolution.config.optimizer.min_lr == 0);
  const Imported wsd = arguments(
      R"("lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 3, )"
      R"("min_lr_ratio": 0.2, "decay_type": "1-sqrt", "flavor": 1})");
  CHECK(value_of(wsd, "scheduler.lr_wsd_decay_iters") == "3");
  CHECK(value_of(wsd, "scheduler.lr_wsd_decay_style") == "minus_sqrt");
  CHECK(value_of(wsd, "optimizer.min_lr_ratio") == "0.2");
  CHECK(omitted_as(wsd, "lr_scheduler_kwargs.flavor", OmissionReason::to_fill_in));
  // Transformers decays by a cosine unless told otherwise.
  const Imported cosine = arguments(
      R"("lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 3})");
  CHECK(value_of(cosine, "scheduler.lr_wsd_decay_style") == "cosine (assumed)");
  CHECK(cosine.resolution.config.scheduler.lr_wsd_decay_style == config::WsdDecayStyle::cosine);
  const Imported axolotl_wsd = import_recipe(
      "base_model: gpt2\nsequence_len: 128\nmax_steps: 10\nlr_scheduler: warmup_stable_decay\n"
      "lr_scheduler_kwargs: {num_decay_steps: 3}\n",
      "x.yaml", {.format = Format::axolotl});
  CHECK(value_of(axolotl_wsd, "scheduler.lr_wsd_decay_style") == "cosine (assumed)");
  const Imported other = arguments(R"("lr_scheduler_type": "cosine_with_restarts")");
  CHECK(omitted_as(other, "lr_scheduler_type", OmissionReason::unsupported));

  const Imported deepspeed = import_recipe(
      R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},)"
      R"( "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_num_steps": 5,)"
      R"( "cos_min_ratio": 0.01}}})",
      "ds.json", {});
  CHECK(value_of(deepspeed, "optimizer.min_lr_ratio") == "0.01");
  CHECK(deepspeed.resolution.config.optimizer.min_lr == 1e-5);

  const Imported megatron = command("--min-lr 1e-4 --lr-decay-style cosine");
  CHECK(value_of(megatron, "optimizer.min_lr") == "0.0001");
  CHECK(value_of(megatron, "scheduler.lr_decay_style") == "cosine");
}

TEST_CASE("an inverse square root without a warm-up is another schedule in Transformers") {
  const auto arguments = [](const std::string& rest) {
    return import_recipe(R"({"output_dir": "x", "per_device_train_batch_size": 1, "learning_rate": 1e-4, )"
                         R"("max_steps": 1000, "lr_scheduler_type": "inverse_sqrt")" +
                             rest + "}",
                         "a.json", {.format = Format::training_arguments});
  };
  for (const char* without : {"", R"(, "warmup_steps": 0)", R"(, "warmup_ratio": 0.0)"}) {
    CAPTURE(without);
    const Imported file = arguments(without);
    CHECK(omitted_as(file, "lr_scheduler_type", OmissionReason::unsupported));
    CHECK(file.resolution.config.scheduler.lr_decay_style != config::LrDecayStyle::inverse_square_root);
  }
  for (const char* with : {R"(, "warmup_steps": 100)", R"(, "warmup_ratio": 0.1)"}) {
    CAPTURE(with);
    const Imported file = arguments(with);
    CHECK(value_of(file, "scheduler.lr_decay_style") == "inverse-square-root");
    CHECK(file.resolution.ok());
  }
  CHECK(omitted_as(arguments(R"(, "warmup_steps": 100, "lr_scheduler_kwargs": {"timescale": 50})"),
                   "lr_scheduler_type", OmissionReason::unsupported));
  const Imported axolotl =
      import_recipe("base_model: gpt2\nsequence_len: 128\nmax_steps: 10\nlr_scheduler: inverse_sqrt\n",
                    "x.yaml", {.format = Format::axolotl});
  CHECK(omitted_as(axolotl, "lr_scheduler", OmissionReason::unsupported));
}

TEST_CASE("the weight decay beside one that grows is listed as without effect") {
  for (const char* decay : {"0.01", "0.1"}) {
    CAPTURE(decay);
    const Imported file = command(std::string("--weight-decay ") + decay +
                                  " --weight-decay-incr-style linear --start-weight-decay 0 "
                                  "--end-weight-decay 0.2");
    CHECK(value_of(file, "optimizer.weight_decay") == "unset");
    CHECK(value_of(file, "scheduler.end_weight_decay") == "0.2");
    for (const config::Diagnostic& one : file.resolution.diagnostics)
      CHECK_MESSAGE(one.name != "schedule_values_are_read", one.message);
  }
}

TEST_CASE("a length in steps resets the epochs of the base recipe") {
  const auto directory = std::filesystem::temp_directory_path() / "capstan-import-base";
  std::filesystem::create_directories(directory);
  std::ofstream(directory / "passes.yaml")
      << "extends: llama3.2-1b-sft\ntrain: {train_iters: null, epochs: 2}\n";
  ::setenv("CAPSTAN_RECIPE_PATH", directory.c_str(), 1);
  const auto imported = [](const std::string& text) {
    Options options;
    options.base = "passes";
    return import_recipe(text, "args.json", options);
  };
  const Imported steps = imported("{\"per_device_train_batch_size\": 1, \"max_steps\": 10}");
  const Imported epochs = imported("{\"per_device_train_batch_size\": 1, \"num_train_epochs\": 1}");
  ::unsetenv("CAPSTAN_RECIPE_PATH");
  std::filesystem::remove_all(directory);
  CHECK(value_of(steps, "train.epochs") == "null (assumed)");
  CHECK(steps.resolution.ok());
  CHECK(steps.resolution.config.train.train_iters == 10);
  CHECK_FALSE(steps.resolution.config.train.epochs);
  CHECK(value_of(epochs, "train.epochs") == "1");
  CHECK(epochs.resolution.ok());
}
