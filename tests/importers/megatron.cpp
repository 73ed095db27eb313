// Command lines and launch scripts of Megatron-LM: single options, and branches that are not decided.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>

#include "importers/import.hpp"
#include "importers/imported.hpp"

using namespace capstan;
using namespace capstan::importers;

TEST_CASE("megatron: retired spellings") {
  CHECK(value_of(command("--model-parallel-size 2"), "dist.tensor_model_parallel_size") == "2");
  CHECK(value_of(command("--model-parallel-size 2"), "dist.world_size") == "2 (assumed)");
  CHECK(value_of(command("--checkpoint-activations"), "model.recompute_granularity") == "full");
  CHECK(value_of(command("--activations-checkpoint-method block --activations-checkpoint-num-layers 2"),
                 "model.recompute_method") == "block");
  CHECK(value_of(command("--fp16 --loss-scale 0"), "mixed_precision (preset)") == "fp16_mixed");
  CHECK(value_of(command("--fp16 --loss-scale 0"), "mixed_precision.loss_scale") == "null");
  CHECK(value_of(command("--fp16 --loss-scale 4096"), "mixed_precision.loss_scale") == "4096");
  CHECK(value_of(command("--warmup 0.1"), "scheduler.lr_warmup_fraction") == "0.1");
  CHECK(omitted_as(command("--dataset-impl mmap"), "--dataset-impl", OmissionReason::no_effect));
  CHECK(omitted_as(command("--DDP-impl local"), "--DDP-impl", OmissionReason::no_effect));
  CHECK(
      omitted_as(command("--distributed-backend nccl"), "--distributed-backend", OmissionReason::no_effect));
}

TEST_CASE("megatron: defaults that are not ours are written") {
  CHECK(value_of(command(""), "model.activation_func") == "gelu_tanh (assumed)");
  CHECK(value_of(command("--no-bias-gelu-fusion"), "model.activation_func") == "gelu");
  CHECK(value_of(command("--disable-bias-linear"), "model.activation_func") == "gelu");
  CHECK(value_of(command("--swiglu"), "model.activation_func") == "silu");
  CHECK(value_of(command("--quick-geglu"), "model.activation_func") == "quick_gelu");
  CHECK(value_of(command("--quick-geglu"), "model.gated_linear_unit") == "true");
  CHECK(value_of(command("--quick-geglu --glu-linear-offset 0.5"), "model.glu_linear_offset") == "0.5");
  CHECK(value_of(command("--softmax-type learnable"), "model.softmax_type") == "learnable");
  CHECK(value_of(command(""), "mixed_precision (preset)") == "fp32 (assumed)");
  CHECK(value_of(command("--bf16"), "mixed_precision (preset)") == "bf16_mixed");
  CHECK(value_of(command("--fp16 --accumulate-allreduce-grads-in-fp32"),
                 "mixed_precision.grad_reduce_in_fp32") == "true");
  CHECK(value_of(command(""), "model.vocab_size") == "100");  // NullTokenizer adds the end of document
  CHECK(value_of(command("--seed 5"), "dataset.random_seed") == "5");
  CHECK(value_of(command("--window-size 4095,0"), "model.window_size") == "4096");
  CHECK(value_of(command("--group-query-attention --num-query-groups 2"), "model.num_query_groups") == "2");
  CHECK(omitted_as(command("--num-query-groups 2"), "--num-query-groups", OmissionReason::no_effect));
  CHECK(omitted_as(command("--sequence-parallel"), "--sequence-parallel", OmissionReason::no_effect));
}

TEST_CASE("megatron and bridge: every way to ask for CUDA graphs gives those of a layer") {
  const char* const field = "model.cuda_graph_impl";
  for (const char* option : {"--cuda-graph-impl local", "--cuda-graph-impl transformer_engine",
                             "--cuda-graph-impl full_iteration", "--enable-cuda-graph"})
    CHECK(value_of(command(option), field) == "local");
  CHECK(value_of(command("--cuda-graph-impl none"), field) == "'none'");
  CHECK(value_of(command("--cuda-graph-impl local --cuda-graph-warmup-steps 5"),
                 "model.cuda_graph_warmup_steps") == "5");
  CHECK(omitted_as(command("--cuda-graph-impl local --cuda-graph-scope attn"), "--cuda-graph-scope",
                   OmissionReason::no_effect));
  const Imported imported = import_recipe(
      "model: {_target_: a.GPTModelProvider, num_layers: 3, cuda_graph_impl: transformer_engine, "
      "cuda_graph_modules: [attn]}\n",
      "run_config.yaml", {});
  CHECK(value_of(imported, field) == "local");
  CHECK(omitted_as(imported, "model.cuda_graph_modules", OmissionReason::no_effect));
}

TEST_CASE("megatron: the launcher gives the world") {
  CHECK(value_of(command("", "torchrun --nproc_per_node=8 --nnodes 4 pretrain_gpt.py"), "dist.world_size") ==
        "32");
  CHECK(value_of(command("", "mpirun -np 16 python pretrain_gpt.py"), "dist.world_size") == "16");
  const Imported open = command("--tensor-model-parallel-size 4",
                                "torchrun --nproc-per-node $GPUS --nnodes 2 tools/pretrain_gpt.py");
  CHECK(value_of(open, "dist.world_size") == "4 (assumed)");
  CHECK(omitted_as(open, "--nproc-per-node", OmissionReason::to_fill_in));
}

TEST_CASE("megatron and bridge: the coefficient of global_aux_loss is for one data-parallel rank") {
  const std::string path = "model.moe_aux_loss_coeff";
  const auto assumed = [&](const Imported& imported) {
    return std::ranges::count(imported.assumed, path, &AssumedValue::path) == 1;
  };
  const std::string experts = "--num-experts 8 --moe-aux-loss-coeff 1e-2 --moe-router-load-balancing-type ",
                    launcher = "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py";
  // 16 ranks, of which 2 hold a replica.
  const std::string two = " --tensor-model-parallel-size 2 --sequence-parallel";
  const Imported divided = command(experts + "global_aux_loss" + two, launcher);
  CHECK(value_of(divided, path) == "0.00125");
  CHECK_FALSE(assumed(divided));
  const Imported local = command(experts + "aux_loss" + two, launcher);
  CHECK(value_of(local, path) == "0.01");
  CHECK_FALSE(assumed(local));
  const Imported open = command(experts + "global_aux_loss" + two, "torchrun pretrain_gpt.py");
  CHECK(value_of(open, path) == "0.01");
  CHECK(assumed(open));
  CHECK(omitted_as(command("--num-experts 8 --moe-aux-loss-coeff much"), "--moe-aux-loss-coeff",
                   OmissionReason::value));

  const Imported several = command(
      "--num-experts 8 --moe-router-load-balancing-type aux_loss seq_aux_loss "
      "--moe-aux-loss-coeff 1e-2 1e-3");
  CHECK(value_of(several, "model.moe_router_load_balancing_type") == "[aux_loss, seq_aux_loss]");
  CHECK(value_of(several, path) == "[0.01, 0.001]");
  const Imported global = command(
      "--num-experts 8 --moe-router-load-balancing-type seq_aux_loss global_aux_loss "
      "--moe-aux-loss-coeff 1e-2 1e-2" +
          two,
      launcher);
  CHECK(value_of(global, path) == "[0.01, 0.00125]");
  CHECK(omitted_as(command("--num-experts 8 --moe-router-load-balancing-type aux_loss seq_aux_loss "
                           "--moe-aux-loss-coeff 1e-2"),
                   "--moe-aux-loss-coeff", OmissionReason::value));
  const Imported fused = command(
      "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te "
      "--decrease-batch-size-if-needed");
  CHECK(omitted_as(fused, "--cross-entropy-loss-fusion", OmissionReason::no_effect));
  CHECK(value_of(fused, "train.decrease_batch_size_if_needed") == "true");

  const auto bridge = [](const std::string& type, const std::string& overlap,
                         const std::string& coefficient = "0.01") {
    return import_recipe(
        "model: {_target_: a.GPTModelProvider, num_layers: 2, num_moe_experts: 8, "
        "moe_aux_loss_coeff: " +
            coefficient + ", moe_router_load_balancing_type: " + type +
            "}\ncomm_overlap: {_target_: b.CommOverlapConfig, data_parallel_size: " + overlap + "}\n",
        "run_config.yaml", {});
  };
  CHECK(value_of(bridge("global_aux_loss", "8"), path) == "0.00125");
  CHECK_FALSE(assumed(bridge("global_aux_loss", "8")));
  CHECK(value_of(bridge("global_aux_loss", "null"), path) == "0.01");
  CHECK(assumed(bridge("global_aux_loss", "null")));
  CHECK(value_of(bridge("seq_aux_loss", "8"), path) == "0.01");
  CHECK_FALSE(assumed(bridge("seq_aux_loss", "null")));
  const Imported list = bridge("[global_aux_loss, aux_loss]", "8", "[0.01, 0.001]");
  CHECK(value_of(list, "model.moe_router_load_balancing_type") == "[global_aux_loss, aux_loss]");
  CHECK(value_of(list, path) == "[0.00125, 0.001]");
  CHECK(omitted_as(bridge("[aux_loss, seq_aux_loss]", "8"), path, OmissionReason::value));
  CHECK(value_of(bridge("[seq_aux_loss]", "8"), "model.moe_router_load_balancing_type") == "seq_aux_loss");
  // The loss is always computed in fused chunks.
  for (const bool fusion : {true, false}) {
    const Imported imported = import_recipe(
        std::string("model: {_target_: a.GPTModelProvider, num_layers: 2, cross_entropy_loss_fusion: ") +
            (fusion ? "true" : "false") + "}\ntrain: {decrease_batch_size_if_needed: true}\n",
        "run_config.yaml", {});
    CHECK(omitted_as(imported, "model.cross_entropy_loss_fusion",
                     fusion ? OmissionReason::no_effect : OmissionReason::off));
    CHECK(value_of(imported, "train.decrease_batch_size_if_needed") == "true");
  }
}

TEST_CASE("megatron and bridge: latent attention scales RoPE by YaRN") {
  const std::string latent = "--multi-latent-attention --position-embedding-type rope ",
                    scaling = "model.rope_scaling", factor = "model.rope_scaling_factor";
  const Imported yarn = command(latent + "--rotary-scaling-factor 40 --mscale 0.7 --mscale-all-dim 0.8");
  CHECK(value_of(yarn, scaling) == "true");
  CHECK(value_of(yarn, scaling + "_type") == "yarn");
  CHECK(value_of(yarn, factor) == "40");
  CHECK(value_of(yarn, "model.rope_scaling_original_max_position_embeddings") == "4096 (assumed)");
  CHECK(value_of(yarn, "model.rope_scaling_mscale") == "0.7");
  CHECK(value_of(yarn, "model.rope_scaling_mscale_all_dim") == "0.8");
  CHECK(value_of(yarn, "model.kv_lora_rank") == "32 (assumed)");
  // Megatron's mscale is 1 and its mscale_all_dim 0 by default.
  CHECK(value_of(command(latent + "--rotary-scaling-factor 4 --mscale-all-dim 0.8"),
                 "model.rope_scaling_mscale") == "1 (assumed)");
  const std::string attention = "model.rope_scaling_attention_factor";
  CHECK(value_of(command(latent + "--rotary-scaling-factor 4 --mscale 1.0"), attention) == "unset");
  CHECK(value_of(command(latent + "--rotary-scaling-factor 4 --mscale 0"), attention) == "1");
  CHECK(value_of(command(latent), scaling) == "unset");  // the factor's default is 1
  CHECK(omitted_as(command(latent + "--rotary-scaling-factor 1"), "--rotary-scaling-factor",
                   OmissionReason::off));
  const Imported plain = command(latent + "--rope-type rope --rotary-scaling-factor 40 --mscale-all-dim 1");
  CHECK(value_of(plain, scaling) == "unset");
  CHECK(omitted_as(plain, "--rotary-scaling-factor", OmissionReason::no_effect));
  CHECK(omitted_as(plain, "--mscale-all-dim", OmissionReason::to_fill_in));
  CHECK(omitted_as(command("--mscale 1.0"), "--mscale", OmissionReason::no_effect));

  const auto bridge = [](const std::string& fields) {
    return import_recipe("model: {_target_: a.GPTModelProvider, num_layers: 2, " + fields + "}\n",
                         "run_config.yaml", {});
  };
  const Imported file = bridge(
      "multi_latent_attention: true, position_embedding_type: rope, rope_type: yarn, beta_fast: 16, "
      "original_max_position_embeddings: 512, beta_slow: 1");
  CHECK(value_of(file, factor) == "40 (assumed)");
  CHECK(value_of(file, "model.rope_scaling_original_max_position_embeddings") == "512");
  CHECK(value_of(file, "model.rope_scaling_beta_fast") == "16");
  CHECK(omitted_as(file, "model.beta_slow", OmissionReason::same));
  CHECK(omitted_as(bridge("beta_fast: 16"), "model.beta_fast", OmissionReason::no_effect));
}

TEST_CASE("megatron: a router in fp64 is taken with a warning, because GPUs refuse it") {
  const Imported file = command("--num-experts 8 --moe-router-dtype fp64");
  CHECK(value_of(file, "model.moe_router_dtype") == "fp64");
  CHECK(std::ranges::count(file.resolution.diagnostics, "R0722", &config::Diagnostic::code) == 1);
}

TEST_CASE("megatron: a list of layers with experts is taken where two fields say the same") {
  const auto layers = [](const std::string& list) {
    return command("--num-layers 6 --num-experts 8 --moe-layer-freq '" + list + "'");
  };
  for (const std::string same :
       {"([0]*2+[1]*4)", "[0,0]+[1]*2*2", "[0, 0, 1, 1, 1, 1]", "(([0]+[0]) + [1]*4)"}) {
    CAPTURE(same);
    const Imported file = layers(same);
    CHECK(value_of(file, "model.moe_first_dense_layers") == "2");
    CHECK_FALSE(omitted(file, "--moe-layer-freq"));
  }
  CHECK(value_of(layers("2"), "model.moe_layer_freq") == "2");
  CHECK(value_of(layers("[1,0]*3"), "model.moe_layer_freq") == "2");
  CHECK(omitted_as(layers("[1]*6"), "--moe-layer-freq", OmissionReason::off));
  CHECK(value_of(layers("[0,1]*3"), "model.moe_layer_freq") == "[0, 1, 0, 1, 0, 1]");
  for (const std::string bad :
       {"[0]*2+", "[2]*6", "([0]*2", "[1]*99999999999999999999", "[f(x) for x in y]"}) {
    CAPTURE(bad);
    CHECK(omitted_as(layers(bad), "--moe-layer-freq", OmissionReason::to_fill_in));
  }
}

TEST_CASE("megatron: nothing is dropped silently") {
  const Imported odd =
      command("--hidden-dropot 0.1 --lr 2e-3 stray --micro-batch-size many --wandb-project x");
  REQUIRE(omitted(odd, "--hidden-dropot"));
  CHECK(omitted(odd, "--hidden-dropot")->why == OmissionReason::unknown);
  CHECK(omitted_as(odd, "--lr", OmissionReason::replaced));
  CHECK(value_of(odd, "optimizer.lr") == "0.002");
  CHECK(omitted_as(odd, "--micro-batch-size", OmissionReason::replaced));
  CHECK(omitted_as(odd, "--wandb-project", OmissionReason::external));
  const Imported slip = command("--num-layrs 3");
  REQUIRE(omitted(slip, "--num-layrs"));
  CHECK(omitted(slip, "--num-layrs")->near.front() == "--num-layers");
  const Imported near = command("--tensor-model-paralel-size 2");
  REQUIRE(omitted(near, "--tensor-model-paralel-size"));
  CHECK(omitted(near, "--tensor-model-paralel-size")->near.size() >= 1);
  const Imported interval = command("--log-intervall 10");
  const std::vector<std::string>& names = omitted(interval, "--log-intervall")->near;
  CHECK(names.front() == "--log-interval");
  CHECK(std::count(names.begin(), names.end(), "--log-interval") == 1);
}

TEST_CASE("megatron: the numbers of --split are read as by re.findall") {
  const auto split_of = [](const std::string& script) {
    return value_of(import_recipe(script, "run.sh", {}), "dataset.split");
  };
  const std::string line = "python pretrain_gpt.py --num-layers 2 --data-path a/b ";
  CHECK(split_of("ARGS=(\"--split '99,1,0'\" --seed 3)\n" + line + "${ARGS[@]}\n") == "99,1,0");
  CHECK(split_of(line + "--split 949,50,1") == "949,50,1");
  CHECK(split_of(line + "--split '98, 1.5, .5'") == "98,1.5,.5");
  CHECK(split_of(line + "--split \"[90/10]\"") == "90,10,0");
  CHECK(split_of(line + "--split none") == "'none'");
}

TEST_CASE("megatron: a bare list of options, and one inside quotes") {
  const Imported bare = import_recipe("--num-layers 4 --hidden-size 8 \\\n --lr 1e-3", "options.txt", {});
  CHECK(value_of(bare, "model.num_layers") == "4");
  CHECK_FALSE(bare.resolution.ok());  // the rest is to be filled in
  const Imported inside =
      import_recipe("srun bash -c 'python pretrain_gpt.py --num-layers 6 --lr 2e-3'", "job.sh", {});
  CHECK(value_of(inside, "model.num_layers") == "6");
}

TEST_CASE("megatron: Muon and moments in fp8") {
  CHECK(value_of(command("--optimizer muon"), "optimizer.optimizer") == "muon");
  CHECK(value_of(command("--optimizer muon --muon-nesterov"), "optimizer.muon_use_nesterov") == "true");
  CHECK(value_of(command("--optimizer muon"), "optimizer.muon_use_nesterov") == "unset");
  const Imported joined = command("--optimizer muon --muon-no-split-qkv --muon-momentum 0.9");
  CHECK(value_of(joined, "optimizer.muon_split_qkv") == "false");
  CHECK(value_of(joined, "optimizer.muon_momentum") == "0.9");
  CHECK(joined.resolution.ok());
  CHECK_FALSE(joined.resolution.config.optimizer.muon_split_qkv);
  const Imported moments =
      command("--bf16 --use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype bf16");
  CHECK(value_of(moments, "optimizer.exp_avg_dtype") == "fp8");
  CHECK(value_of(moments, "optimizer.exp_avg_sq_dtype") == "bf16");
  CHECK_MESSAGE(moments.resolution.ok(),
                config::render(moments.resolution.diagnostics, moments.resolution.sources));
}

TEST_CASE("megatron and deepspeed: optimizer state in host memory") {
  const Imported file = command(
      "--bf16 --use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.5 "
      "--overlap-cpu-optimizer-d2h-h2d --use-torch-optimizer-for-cpu-offload --no-pin-cpu-grads");
  CHECK(value_of(file, "optimizer.optimizer_cpu_offload") == "true");
  CHECK(value_of(file, "optimizer.optimizer_offload_fraction") == "0.5");
  for (const char* option : {"--use-precision-aware-optimizer", "--overlap-cpu-optimizer-d2h-h2d",
                             "--use-torch-optimizer-for-cpu-offload", "--no-pin-cpu-grads"})
    CHECK_MESSAGE(omitted_as(file, option, OmissionReason::no_effect), option);
  CHECK(file.resolution.ok());
  CHECK(config::missing_features(config::schema(), &file.resolution.config).empty());

  Options options;
  options.base = "quickstart";
  const Imported other = import_recipe(
      R"({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.25}}})",
      "d.json", options);
  CHECK(value_of(other, "optimizer.optimizer_cpu_offload") == "true");
  CHECK(value_of(other, "optimizer.optimizer_offload_fraction") == "0.25");
  CHECK(other.resolution.ok());
  CHECK(config::missing_features(config::schema(), &other.resolution.config).empty());
}

TEST_CASE("megatron: positions that are drawn out, SentencePiece, fine-tuning") {
  const Imported far = command("--position-embedding-type rope --rotary-seq-len-interpolation-factor 4");
  CHECK(value_of(far, "model.rope_scaling") == "true");
  CHECK(value_of(far, "model.rope_scaling_type") == "linear");
  CHECK(value_of(far, "model.rope_scaling_factor") == "4");
  CHECK(far.resolution.ok());
  CHECK(value_of(command("--rotary-seq-len-interpolation-factor 1"), "model.rope_scaling") == "unset");
  const Imported pieces = command("--tokenizer-type Llama2Tokenizer --tokenizer-model a/tokenizer.model");
  CHECK(value_of(pieces, "tokenizer.tokenizer_type") == "sentencepiece");
  CHECK(value_of(pieces, "tokenizer.tokenizer_model") == "a/tokenizer.model");
  CHECK(omitted_as(command("--sft"), "--sft", OmissionReason::to_fill_in));
  CHECK(
      omitted_as(command("--pretrained-checkpoint x"), "--pretrained-checkpoint", OmissionReason::external));
}

TEST_CASE("megatron: misspelled options are listed with the options that are near") {
  const auto near = [](const std::string& option, const std::string& meant) {
    const Imported result = command(option + " 1");
    const OmittedKey* found = omitted(result, option);
    CAPTURE(option);
    REQUIRE(found);
    CHECK(found->why == OmissionReason::unknown);
    CHECK(std::find(found->near.begin(), found->near.end(), meant) != found->near.end());
  };
  near("--num-layer", "--num-layers");
  near("--lr-decay-stile", "--lr-decay-style");
  near("--mim-lr", "--min-lr");
  // Rules for families of options (`--log-*`) do not swallow them.
  near("--log-intervall", "--log-interval");
  near("--log-params-nrom", "--log-params-norm");
  CHECK(omitted_as(command("--log-throughput"), "--log-throughput", OmissionReason::no_effect));
}

namespace {

const std::string kSized =
    "#!/bin/bash\n"
    "case $SIZE in\n"
    "  small|s) LAYERS=2 ;;\n"
    "  large) LAYERS=4\n    HEADS=8;;\n"
    "  *) echo unknown; exit 1 ;;\n"
    "esac\n"
    "ARGS=\"--seq-length 32 --micro-batch-size 1 --mock-data --tokenizer-type NullTokenizer --vocab-size "
    "99\"\n"
    "if [ \"${BF16:-1}\" = 1 ]; then ARGS+=\" --bf16\"; else ARGS+=\" --fp16\"; fi\n"
    "[ -n \"$2\" ] && ARGS=\"$ARGS --lr $2\"\n"
    "python pretrain_gpt.py --num-layers $LAYERS --hidden-size 64 --num-attention-heads ${HEADS:-4} \\\n"
    "  --train-iters 10 --lr 1e-3 $ARGS\n";

}  // namespace

TEST_CASE("megatron: a branch that depends on a variable is asked about, not taken") {
  const Imported asked = import_recipe(kSized, "run.sh", {});
  CHECK(value_of(asked, "model.num_layers") == "unset");
  REQUIRE(omitted_as(asked, "--num-layers", OmissionReason::to_fill_in));
  CHECK(omitted(asked, "--num-layers")->reason == "depends on `case $SIZE in`, which is not decided");
  REQUIRE(omitted_as(asked, "case $SIZE in", OmissionReason::to_fill_in));
  CHECK(omitted(asked, "case $SIZE in")->reason ==
        "not decided: the script does not set `$SIZE`; choose with {variable}SIZE=VALUE");
  CHECK(omitted(asked, "case $SIZE in")->location.line == 2);
  // A default of the script decides no branch.
  REQUIRE(omitted_as(asked, "if [ \"${BF16:-1}\" = 1 ]", OmissionReason::to_fill_in));
  CHECK(
      omitted(asked, "if [ \"${BF16:-1}\" = 1 ]")->reason ==
      "not decided: the script does not set `$BF16`; choose with {variable}BF16=VALUE (the script's default: "
      "`1`)");
  // Values that do not depend on them are taken.
  CHECK(value_of(asked, "optimizer.lr") == "0.001");
  CHECK(omitted_as(asked, "if [ -n \"$2\" ]", OmissionReason::to_fill_in));

  const Imported small =
      import_recipe(kSized, "run.sh", {.variables = {{"SIZE", "s"}, {"2", ""}, {"BF16", "1"}}});
  CHECK(value_of(small, "model.num_layers") == "2");
  CHECK(value_of(small, "model.num_attention_heads") == "4");
  CHECK(value_of(small, "mixed_precision (preset)") == "bf16_mixed");
  CHECK(omitted(small, "case $SIZE in") == nullptr);
  const Imported large =
      import_recipe(kSized, "run.sh", {.variables = {{"SIZE", "large"}, {"BF16", "0"}, {"2", "5e-4"}}});
  CHECK(value_of(large, "model.num_layers") == "4");
  CHECK(value_of(large, "model.num_attention_heads") == "8");
  CHECK(value_of(large, "mixed_precision (preset)") == "fp16_mixed");
  CHECK(value_of(large, "optimizer.lr") == "0.0005");
}

TEST_CASE(
    "megatron: variables set by lists of commands or functions are asked about, sourced files are named") {
  const std::string line =
      "python pretrain_gpt.py --num-layers ${L:-2} --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
      "--micro-batch-size 1 --train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 99 "
      "--lr 1e-3 $B\n";
  const auto with = [&](const std::string& text, const std::map<std::string, std::string>& variables = {}) {
    return import_recipe(text + "\n" + line, "run.sh", {.variables = variables});
  };
  CHECK(with("L=4").resolution.ok());
  for (const char* list : {"$USE && B=--bf16", "((USE)) && B=--bf16", "(( ${USE:-0} == 1 )) && B=--bf16",
                           "[ \"$USE\" = 0 ] || B=--bf16", "f() { B=--bf16; }; [ \"$USE\" = 1 ] && f"}) {
    CAPTURE(list);
    const Imported asked = with(list);
    CHECK(asked.undecided);
    CHECK(value_of(asked, "mixed_precision (preset)") == "unset");
    CHECK(omitted_as(asked, "--bf16", OmissionReason::to_fill_in));
    const std::string yes = list[0] == '$' ? "true" : "1", no = list[0] == '$' ? "false" : "0";
    CHECK(value_of(with(list, {{"USE", yes}}), "mixed_precision (preset)") == "bf16_mixed");
    const Imported without = with(list, {{"USE", no}});
    CHECK(value_of(without, "mixed_precision (preset)") == "fp32 (assumed)");
    CHECK(!without.undecided);
  }
  for (const char* list : {"nvidia-smi -L | grep -q H100 && B=--bf16", "command -v foo && B=--bf16"}) {
    CAPTURE(list);
    CHECK(with(list).undecided);
    CHECK(omitted_as(with(list), "--bf16", OmissionReason::to_fill_in));
  }
  const Imported sourced = with("source ./env.sh");
  CHECK(!sourced.undecided);
  REQUIRE(omitted_as(sourced, "source ./env.sh", OmissionReason::to_fill_in));
  CHECK(omitted(sourced, "source ./env.sh")->reason ==
        "not executed, and may set variables; write those that matter into the recipe");
}

TEST_CASE("megatron: options and values of all branches are to be filled in") {
  const auto values_of = [](const Imported& imported, const std::string& key) {
    std::string values;
    for (const OmittedKey& one : imported.omitted)
      if (one.key == key && one.why == OmissionReason::to_fill_in) values += "[" + one.value + "]";
    return values;
  };
  const std::string rest = " --hidden-size 64 --num-attention-heads 4 --seq-length 32 --mock-data\n";
  const Imported flags = import_recipe(
      "case $PRECISION in\n  bf16) PR=\"--bf16\";;\n  fp16) PR=\"--fp16\";;\nesac\n"
      "python pretrain_gpt.py --num-layers 2 $PR" +
          rest,
      "run.sh", {});
  CHECK(value_of(flags, "mixed_precision (preset)") == "unset");
  CHECK(omitted_as(flags, "--bf16", OmissionReason::to_fill_in));
  CHECK(omitted_as(flags, "--fp16", OmissionReason::to_fill_in));
  const Imported options = import_recipe(
      "if [ $SIZE = a ]; then\n  ARGS=\"--num-layers 32 --seed 5\"\nelif [ $SIZE = b ]; then\n"
      "  ARGS=\"--num-layers 40\"\nfi\npython pretrain_gpt.py $ARGS" +
          rest,
      "run.sh", {});
  CHECK(values_of(options, "--num-layers") == "[32][40]");
  CHECK(values_of(options, "--seed") == "[5]");
  CHECK(value_of(options, "model.num_layers") == "unset");
  const Imported values = import_recipe(
      "if [ $SIZE = a ]; then LAYERS=32; elif [ $SIZE = b ]; then LAYERS=36; LAYERS=40; else LAYERS=48; fi\n"
      "python pretrain_gpt.py --num-layers $LAYERS" +
          rest,
      "run.sh", {});
  CHECK(values_of(values, "--num-layers") == "[32 or 40 or 48]");
}

TEST_CASE("megatron: a branch that empties or unsets a variable is asked about") {
  const std::string line =
      "\npython pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
      "--micro-batch-size 1 --train-iters 10 --lr 1e-3 $EXTRA --mock-data --tokenizer-type NullTokenizer "
      "--vocab-size 99\n";
  const auto with = [&](const std::string& text, const std::map<std::string, std::string>& variables = {}) {
    return import_recipe(text + line, "run.sh", {.variables = variables});
  };
  struct {
    const char* text;
    const char* branch;
    // Whether FP8=1 gives the option, and FP8=0.
    bool one, zero;
  } const scripts[] = {
      {"EXTRA=\"--swiglu\"; if [ \"$FP8\" = 1 ]; then EXTRA=\"\"; fi", "if [ \"$FP8\" = 1 ]", false, true},
      {"EXTRA=\"--swiglu --weight-decay 0.3\"; case $FP8 in 1) EXTRA=\"\";; esac", "case $FP8 in", false,
       true},
      {"ARGS=(--swiglu); [ \"$FP8\" = 1 ] && ARGS=(); EXTRA=\"${ARGS[@]}\"", "if [ \"$FP8\" = 1 ]", false,
       true},
      {"[ \"$FP8\" = 1 ] && EXTRA=\"--swiglu\" || EXTRA=\"\"", "if [ \"$FP8\" = 1 ]", true, false},
      {"if [ \"$FP8\" = 1 ]; then EXTRA=\"--swiglu\"; else EXTRA=\"\"; fi", "if [ \"$FP8\" = 1 ]", true,
       false},
      {"EXTRA=\"--swiglu\"; if [ \"$FP8\" = 1 ]; then unset EXTRA; fi", "if [ \"$FP8\" = 1 ]", false, true},
      {"EXTRA=\"--swiglu\"; [ \"$FP8\" = 1 ] && unset EXTRA", "if [ \"$FP8\" = 1 ]", false, true}};
  for (const auto& script : scripts) {
    CAPTURE(script.text);
    const Imported asked = with(script.text);
    CHECK(asked.undecided);
    CHECK(value_of(asked, "model.gated_linear_unit") == "unset");
    REQUIRE(omitted_as(asked, "--swiglu", OmissionReason::to_fill_in));
    CHECK(omitted(asked, "--swiglu")->reason ==
          "depends on `" + std::string(script.branch) + "`, which is not decided");
    REQUIRE(omitted_as(asked, script.branch, OmissionReason::to_fill_in));
    CHECK(omitted(asked, script.branch)->reason ==
          "not decided: the script does not set `$FP8`; choose with {variable}FP8=VALUE");
    CHECK(omitted(asked, "$EXTRA") == nullptr);
    for (const bool one : {true, false}) {
      const Imported chosen = with(script.text, {{"FP8", one ? "1" : "0"}});
      CHECK(!chosen.undecided);
      CHECK(value_of(chosen, "model.gated_linear_unit") ==
            ((one ? script.one : script.zero) ? "true" : "unset"));
    }
  }
  for (const char* text : {"EXTRA=\"\"", "EXTRA=\"\"; if [ \"$FP8\" = 1 ]; then EXTRA=\"\"; fi",
                           "EXTRA=\"--swiglu\"; if [ \"$FP8\" = 1 ]; then EXTRA=\"\"; else EXTRA=\"\"; fi",
                           "EXTRA=\"--swiglu\"; if [ 1 = 1 ]; then EXTRA=\"\"; fi"}) {
    CAPTURE(text);
    CHECK(!with(text).undecided);
    CHECK(value_of(with(text), "model.gated_linear_unit") == "unset");
  }
}

TEST_CASE("megatron: a command inside of a branch or loop is read, and that is said") {
  const std::string line =
      "python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
      "--micro-batch-size 1 --train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 99";
  const Imported looped =
      import_recipe("for LR in 1e-3 3e-3; do\n" + line + " --lr $LR\ndone\n", "run.sh", {});
  CHECK(value_of(looped, "model.num_layers") == "2");
  CHECK(omitted_as(looped, "--lr", OmissionReason::to_fill_in));
  REQUIRE(omitted_as(looped, "for LR in 1e-3 3e-3", OmissionReason::to_fill_in));
  CHECK(omitted(looped, "for LR in 1e-3 3e-3")
            ->reason.starts_with("the command runs in it; a loop is not run"));
  const std::string two =
      "if [ \"$1\" = train ]; then\n" + line + " --lr 1e-3\nelse\n" + line + " --lr 2e-3\nfi\n";
  const Imported first = import_recipe(two, "run.sh", {});
  CHECK(omitted_as(first, "if [ \"$1\" = train ]", OmissionReason::to_fill_in));
  const Imported second = import_recipe(two, "run.sh", {.variables = {{"1", "test"}}});
  CHECK(value_of(second, "optimizer.lr") == "0.002");
  CHECK(omitted(second, "if [ \"$1\" = train ]") == nullptr);
}
