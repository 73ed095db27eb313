// What each table does with single keys, how formats are recognised, and that nothing is dropped silently.
#include <doctest/doctest.h>

#include <algorithm>

#include "base/error.hpp"
#include "base/text.hpp"
#include "import/import.hpp"
#include "import/known_models.hpp"

using namespace capstan;
using namespace capstan::importer;

namespace {

Imported command(const std::string& options, const std::string& launcher = "python pretrain_gpt.py") {
  return import_recipe(launcher +
                           " --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
                           "--micro-batch-size 1 --train-iters 10 --lr 1e-3 --mock-data "
                           "--tokenizer-type NullTokenizer --vocab-size 99 " +
                           options,
                       "run.sh", {});
}

std::string value_of(const Imported& imported, const std::string& path) {
  for (const Taken& one : imported.taken)
    if (one.path == path) return one.value;
  for (const Assumed& one : imported.assumed)
    if (one.path == path) return one.value + " (assumed)";
  return "unset";
}

const Left* left(const Imported& imported, const std::string& key) {
  for (const Left& one : imported.left)
    if (one.key == key) return &one;
  return nullptr;
}

bool left_as(const Imported& imported, const std::string& key, Why why) {
  const Left* found = left(imported, key);
  return found && found->why == why;
}

}  // namespace

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
  CHECK(left_as(command("--dataset-impl mmap"), "--dataset-impl", Why::no_effect));
  CHECK(left_as(command("--DDP-impl local"), "--DDP-impl", Why::no_effect));
  CHECK(left_as(command("--distributed-backend nccl"), "--distributed-backend", Why::no_effect));
}

TEST_CASE("megatron: defaults that are not ours are written") {
  CHECK(value_of(command(""), "model.activation_func") == "gelu_tanh (assumed)");
  CHECK(value_of(command("--no-bias-gelu-fusion"), "model.activation_func") == "gelu");
  CHECK(value_of(command("--disable-bias-linear"), "model.activation_func") == "gelu");
  CHECK(value_of(command("--swiglu"), "model.activation_func") == "silu");
  CHECK(value_of(command(""), "mixed_precision (preset)") == "fp32 (assumed)");
  CHECK(value_of(command("--bf16"), "mixed_precision (preset)") == "bf16_mixed");
  CHECK(value_of(command("--fp16 --accumulate-allreduce-grads-in-fp32"),
                 "mixed_precision.grad_reduce_in_fp32") == "true");
  CHECK(value_of(command(""), "model.vocab_size") == "100");  // NullTokenizer adds the end of document
  CHECK(value_of(command("--seed 5"), "dataset.random_seed") == "5");
  CHECK(value_of(command("--window-size 4095,0"), "model.window_size") == "4096");
  CHECK(value_of(command("--group-query-attention --num-query-groups 2"), "model.num_query_groups") == "2");
  CHECK(left_as(command("--num-query-groups 2"), "--num-query-groups", Why::no_effect));
  CHECK(left_as(command("--sequence-parallel"), "--sequence-parallel", Why::no_effect));
}

TEST_CASE("megatron: the launcher gives the world") {
  CHECK(value_of(command("", "torchrun --nproc_per_node=8 --nnodes 4 pretrain_gpt.py"), "dist.world_size") ==
        "32");
  CHECK(value_of(command("", "mpirun -np 16 python pretrain_gpt.py"), "dist.world_size") == "16");
  const Imported open = command("--tensor-model-parallel-size 4",
                                "torchrun --nproc-per-node $GPUS --nnodes 2 tools/pretrain_gpt.py");
  CHECK(value_of(open, "dist.world_size") == "4 (assumed)");
  CHECK(left_as(open, "--nproc-per-node", Why::to_fill_in));
}

TEST_CASE("megatron: nothing is dropped silently") {
  const Imported odd =
      command("--hidden-dropot 0.1 --lr 2e-3 stray --micro-batch-size many --wandb-project x");
  REQUIRE(left(odd, "--hidden-dropot"));
  CHECK(left(odd, "--hidden-dropot")->why == Why::unknown);
  CHECK(left_as(odd, "--lr", Why::replaced));
  CHECK(value_of(odd, "optimizer.lr") == "0.002");
  CHECK(left_as(odd, "--micro-batch-size", Why::replaced));
  CHECK(left_as(odd, "--wandb-project", Why::theirs));
  const Imported slip = command("--num-layrs 3");
  REQUIRE(left(slip, "--num-layrs"));
  CHECK(left(slip, "--num-layrs")->near.front() == "--num-layers");
  const Imported near = command("--tensor-model-paralel-size 2");
  REQUIRE(left(near, "--tensor-model-paralel-size"));
  CHECK(left(near, "--tensor-model-paralel-size")->near.size() >= 1);
}

TEST_CASE("megatron: a bare list of options, and one inside quotes") {
  const Imported bare = import_recipe("--num-layers 4 --hidden-size 8 \\\n --lr 1e-3", "options.txt", {});
  CHECK(value_of(bare, "model.num_layers") == "4");
  CHECK_FALSE(bare.resolution.ok());  // the rest is to be filled in
  const Imported inside =
      import_recipe("srun bash -c 'python pretrain_gpt.py --num-layers 6 --lr 2e-3'", "job.sh", {});
  CHECK(value_of(inside, "model.num_layers") == "6");
}

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
  CHECK(left_as(wrong, "gradient_accumulation_steps", Why::value));
  CHECK(value_of(all, "optimizer.clip_grad") == "0 (assumed)");
}

TEST_CASE("deepspeed: auto is to be filled in, stages have names") {
  const Imported file = import_recipe(
      R"({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}, "train_batch_size": "auto"})",
      "d.json", {});
  CHECK(value_of(file, "ddp.data_parallel_sharding_strategy") == "optim_grads_params");
  CHECK(left_as(file, "train_batch_size", Why::to_fill_in));
  CHECK(left_as(file, "zero_optimization.offload_optimizer.device", Why::not_there));
}

TEST_CASE("formats are recognised, or the known ones are told") {
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
    FAIL("recognised");
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::format);
    for (const FormatInfo& info : formats()) CHECK(error.help().find(info.name) != std::string::npos);
  }
  try {
    import_recipe("model: {num_layers: 2}\noptimizer: {lr: 1}\n", "mine.yaml", {});
    FAIL("recognised");
  } catch (const Error& error) {
    CHECK(error.help().find("capstan check") != std::string::npos);
  }
  Options forced;
  forced.format = Format::deepspeed;
  CHECK(import_recipe("{\"a\": 1}", "file", forced).left.size() >= 1);
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
  CHECK(import_recipe(padded, "file.sh", {}).left.size() >= 9000);
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
  CHECK_FALSE(preset_of_builder("os.system"));
  CHECK(vocabulary_of_preset("llama3.1-8b") == 128256);
}

TEST_CASE("a class of a file is a name to look up, never something to load") {
  const Imported file = import_recipe(
      "_target_: os.system\nmodel:\n  _target_: subprocess.Popen\n  args: [rm]\n"
      "  activation_func: {_target_: builtins.exec}\n",
      "run_config.yaml", {});
  CHECK(left_as(file, "_target_", Why::value));
  CHECK(left_as(file, "model._target_", Why::value));
  CHECK(left_as(file, "model.activation_func", Why::value));
}

TEST_CASE("what a file calls its keys and values cannot write lines of the recipe") {
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
