// --shrink: what stays, what gets small, and that every shipped recipe still fits together on any number of
// ranks.
#include "config/tools/shrink.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "config/tools/show.hpp"
#include "request.hpp"
#include "support/sanitized.hpp"

using namespace capstan;
using namespace capstan::config;
using testing::request_of;

namespace {

Resolution shrunk(const std::string& recipe, const std::vector<std::string>& overrides = {},
                  std::optional<int64_t> ranks = {}) {
  Request request = request_of(recipe, overrides, ranks);
  request.imposed_by = "--shrink";
  Resolution small = resolve_shrunk(request);
  CHECK_MESSAGE(small.ok(), recipe << "\n" << render(small.diagnostics, small.sources));
  return small;
}

}  // namespace

TEST_CASE("every shipped recipe can be shrunk, to any number of ranks, without a word") {
  for (const auto& entry : test::sampled(Library::standard().recipes())) {
    CAPTURE(entry.name);
    for (const std::optional<int64_t> ranks :
         {std::optional<int64_t>{}, {1}, {2}, {3}, {4}, {6}, {8}, {16}, {64}}) {
      CAPTURE(ranks.value_or(0));
      const Resolution small = shrunk(entry.name, {}, ranks);
      CHECK_MESSAGE(small.diagnostics.empty(), render(small.diagnostics, small.sources));
      const Config& c = small.config;
      if (ranks) CHECK(c.dist.world_size == *ranks);
      CHECK(c.model.hidden_size <= 512);
      CHECK(c.model.num_layers <= 8);
      CHECK(c.model.vocab_size <= 512);
      CHECK(c.model.seq_length <= 64);
      CHECK(c.train.train_iters == 2);
      CHECK(c.dataset.kind == DatasetKind::mock);
      CHECK(c.tokenizer.tokenizer_type == TokenizerKind::none);
      CHECK_FALSE(c.checkpoint.pretrained_checkpoint);
      CHECK(c.name == entry.name + "-shrunk");
    }
  }
}

TEST_CASE("family, method and kind of layout stay") {
  for (const auto& entry : test::sampled(Library::standard().recipes())) {
    CAPTURE(entry.name);
    const Resolution large = resolve(request_of(entry.name)), small = shrunk(entry.name);
    const ModelConfig &a = large.config.model, &b = small.config.model;
    CHECK(a.normalization == b.normalization);
    CHECK(a.norm_placement == b.norm_placement);
    CHECK(a.activation_func == b.activation_func);
    CHECK(a.gated_linear_unit == b.gated_linear_unit);
    CHECK(a.add_qkv_bias == b.add_qkv_bias);
    CHECK(a.qk_layernorm == b.qk_layernorm);
    CHECK(a.share_embeddings_and_output_weights == b.share_embeddings_and_output_weights);
    CHECK(a.position_embedding_type == b.position_embedding_type);
    CHECK(a.rotary_base == b.rotary_base);
    CHECK(a.rope_scaling == b.rope_scaling);
    CHECK(a.rope_scaling_type == b.rope_scaling_type);
    CHECK(a.rope_scaling_factor == b.rope_scaling_factor);
    CHECK(a.attn_logit_softcapping == b.attn_logit_softcapping);
    CHECK(a.final_logit_softcapping == b.final_logit_softcapping);
    CHECK(a.window_size.has_value() == b.window_size.has_value());
    CHECK(a.embedding_multiplier.has_value() == b.embedding_multiplier.has_value());
    CHECK((*a.padded_vocab_size > a.vocab_size) == (*b.padded_vocab_size > b.vocab_size));
    const int64_t of_one = a.num_attention_heads / *a.num_query_groups;
    CHECK(b.num_attention_heads / *b.num_query_groups == std::min<int64_t>(of_one, 8));
    CHECK((a.hidden_size == a.num_attention_heads * *a.kv_channels) ==
          (b.hidden_size == b.num_attention_heads * *b.kv_channels));
    const double feed_forward = static_cast<double>(*a.ffn_hidden_size) / static_cast<double>(a.hidden_size);
    CHECK(static_cast<double>(*b.ffn_hidden_size) / static_cast<double>(b.hidden_size) ==
          doctest::Approx(feed_forward).epsilon(0.2));
    CHECK(a.recompute_granularity == b.recompute_granularity);
    CHECK(a.moe_router_num_groups.has_value() == b.moe_router_num_groups.has_value());
    CHECK(b.moe_router_group_topk.value_or(0) < b.moe_router_num_groups.value_or(1));

    CHECK(large.config.peft.has_value() == small.config.peft.has_value());
    if (const auto& peft = small.config.peft) {
      CHECK(peft->random_base);
      CHECK(peft->scheme == large.config.peft->scheme);
      CHECK(peft->target_modules == large.config.peft->target_modules);
      CHECK(peft->alpha / static_cast<double>(peft->dim) ==
            doctest::Approx(large.config.peft->alpha / static_cast<double>(large.config.peft->dim)));
    }
    CHECK(large.config.optimizer.lr == small.config.optimizer.lr);
    CHECK(large.config.scheduler.lr_decay_style == small.config.scheduler.lr_decay_style);
    CHECK(large.config.mixed_precision.params_dtype == small.config.mixed_precision.params_dtype);
    CHECK(large.config.ddp.data_parallel_sharding_strategy ==
          small.config.ddp.data_parallel_sharding_strategy);

    const DistConfig &x = large.config.dist, &y = small.config.dist;
    CHECK(y.tensor_model_parallel_size == std::min<int64_t>(2, x.tensor_model_parallel_size));
    CHECK(y.pipeline_model_parallel_size == std::min<int64_t>(2, x.pipeline_model_parallel_size));
    CHECK(y.context_parallel_size == std::min<int64_t>(2, x.context_parallel_size));
    CHECK(y.data_parallel_size == std::min<int64_t>(2, *x.data_parallel_size));
    CHECK(y.virtual_pipeline_model_parallel_size.value_or(1) ==
          std::min<int64_t>(2, x.virtual_pipeline_model_parallel_size.value_or(1)));
    CHECK(y.sequence_parallel == x.sequence_parallel);
  }
}

TEST_CASE("scaled positions, windows and capped scores keep their proportion") {
  const ModelConfig llama = shrunk("llama3.1-8b").config.model;
  CHECK(llama.rope_scaling_original_max_position_embeddings == 64);
  CHECK(llama.max_position_embeddings == 1024);
  const ModelConfig gemma = shrunk("gemma2-27b").config.model;
  CHECK(gemma.window_size == 32);
  CHECK(gemma.window_attn_skip_freq == 2);
  CHECK(*gemma.embedding_multiplier == doctest::Approx(std::sqrt(static_cast<double>(gemma.hidden_size))));
  CHECK(*gemma.softmax_scale == doctest::Approx(std::sqrt(128.0 / 16) / 12));
  const ModelConfig phi = shrunk("phi3.5-mini-lora").config.model;
  CHECK(phi.rope_scaling_short_factors.size() == 8);
  CHECK(phi.rope_scaling_long_factors.size() == 8);
  CHECK(phi.rope_scaling_long_factors[0] == doctest::Approx(1.08));
  // Keys and values held by several tensor ranks each.
  const ModelConfig few = shrunk("qwen2.5-0.5b", {"dist.tp=2", "model.num_query_groups=1"}).config.model;
  CHECK(few.num_query_groups == 1);
  CHECK(few.num_attention_heads % 2 == 0);
}

TEST_CASE("the command line's sizes and lengths count, its data and weights do not") {
  const Resolution small =
      shrunk("llama3-8b-lora",
             {"train.train_iters=20", "model.num_layers=3", "peft.dim=5", "dataset.train_files=mine.jsonl",
              "tokenizer.eod_token=</s>", "checkpoint.pretrained_checkpoint=hf:mine"});
  CHECK(small.config.train.train_iters == 20);
  CHECK(small.config.validation.eval_interval == 20);
  CHECK(small.config.model.num_layers == 3);
  CHECK(small.config.peft->dim == 5);
  CHECK(small.config.peft->alpha == doctest::Approx(32));
  CHECK(small.config.dataset.kind == DatasetKind::mock);
  CHECK_FALSE(small.config.checkpoint.pretrained_checkpoint);
  CHECK(small.diagnostics.empty());
  CHECK(small.origin("model.hidden_size").text == "--shrink");
  CHECK(small.origin("train.train_iters").text == "<cli>:1");
}

TEST_CASE("an axis of the command line keeps its size: 24 queries for 6 keys, over 3, 6 and 12 ranks") {
  const auto path = std::filesystem::current_path() / "capstan-shrink-odd.yaml";
  std::ofstream(path, std::ios::binary) << "extends: llama3.2-3b\nname: odd\n"
                                           "model: {num_query_groups: 6, ffn_hidden_size: 9216}\n";
  for (const std::string ranks : {"3", "6", "12"}) {
    CAPTURE(ranks);
    const Config odd = shrunk(path.string(), {"dist.tp=" + ranks, "dist.world_size=" + ranks}).config;
    CHECK(odd.model.num_attention_heads == 4 * *odd.model.num_query_groups);
    CHECK(odd.dist.tensor_model_parallel_size == std::stoi(ranks));
  }
  std::filesystem::remove(path);
}

TEST_CASE("a layout of the command line is one of the launch's ranks") {
  for (const char* axis : {"dist.tp=2", "dist.pp=2", "dist.cp=2"}) {
    CAPTURE(axis);
    const Resolution small = shrunk("llama3-8b-lora", {axis}, 2);
    CHECK(small.config.dist.world_size == 2);
    CHECK(small.config.dist.data_parallel_size == 1);
  }
}

TEST_CASE("a layout of the command line takes more ranks than the recipe's batch has samples") {
  // Two samples at a time on each rank, four in a step.
  for (const char* experts : {"dist.ep=2", "dist.ep=4"}) {
    const Config small = shrunk("quickstart-moe", {experts}, 4).config;
    CHECK(small.dist.world_size == 4);
    CHECK(small.dist.data_parallel_size == 4);
    CHECK(*small.train.global_batch_size % (4 * small.train.micro_batch_size) == 0);
  }
  // What is wrong with the ranks of the launch is reported, not what is wrong with one rank.
  const auto reported = [](const std::vector<std::string>& overrides) {
    const Resolution wrong = resolve_shrunk(request_of("quickstart-moe", overrides, 4));
    CHECK_FALSE(wrong.ok());
    return render(wrong.diagnostics, wrong.sources);
  };
  const std::string batch = reported({"dist.ep=2", "train.global_batch_size=4"});
  CHECK_MESSAGE(batch.find("micro_batch_size * data_parallel_size = 8") != std::string::npos, batch);
  const std::string layout = reported({"dist.ep=3", "model.num_moe_experts=6"});
  CHECK_MESSAGE(layout.find("the world of 4 ranks is not a multiple") != std::string::npos, layout);
}

TEST_CASE("sizes of the command line need not fit the large recipe") {
  // 16 samples are fewer than data-parallel ranks, and 4 layers fewer than stages.
  for (const char* recipe : {"deepseek-v2", "deepseek-v3", "kimi-k2", "llama3-70b", "mixtral-8x7b"})
    for (const std::optional<int64_t> ranks : {std::optional<int64_t>{}, {1}, {4}}) {
      CAPTURE(recipe);
      CAPTURE(ranks.value_or(0));
      const Config small = shrunk(recipe, {"train.global_batch_size=16", "model.num_layers=4"}, ranks).config;
      CHECK(small.train.global_batch_size == 16);
      CHECK(small.model.num_layers == 4);
    }
  const Config one = shrunk("deepseek-v3", {"train.global_batch_size=8"}, 1).config;
  CHECK(one.dist.expert_model_parallel_size == 1);
  CHECK(one.dist.world_size == 1);
  // The values that are reported are those of the small recipe.
  const Resolution wrong = resolve_shrunk(request_of("deepseek-v2", {"train.global_batch_size=3"}, 2));
  CHECK_FALSE(wrong.ok());
  CHECK(wrong.config.dist.world_size == 2);
  // What a file gives is for the large recipe.
  const auto path = std::filesystem::current_path() / "capstan-shrink-batch.yaml";
  std::ofstream(path, std::ios::binary) << "extends: deepseek-v3\nname: own\ntrain.global_batch_size: 8\n";
  CHECK_FALSE(resolve_shrunk(request_of(path.string(), {"train.train_iters=3"})).ok());
  std::filesystem::remove(path);
}

TEST_CASE("groups of experts stay, in proportion") {
  const ModelConfig v3 = shrunk("deepseek-v3").config.model;  // 4 of 8 groups, of 32 experts each
  CHECK(v3.num_moe_experts == 8);
  CHECK(v3.moe_router_num_groups == 4);
  CHECK(v3.moe_router_group_topk == 2);
  CHECK(v3.moe_router_group_score_topk == 2);
  // Its layer for multi-token prediction stays too.
  CHECK(v3.mtp_num_layers == 1);
  const auto layout_of = [](const std::vector<std::string>& overrides) {
    return *shrunk("deepseek-v3", overrides).config.dist.pipeline_model_parallel_layout;
  };
  CHECK(layout_of({}) == "Ett|tt|m|L");
  CHECK(layout_of({"model.num_layers=7"}) == "Et*4|t*3|m|L");
  CHECK(layout_of({"dist.vpp=1"}) == "Et*4m|L");
  const ModelConfig v2 = shrunk("deepseek-v2").config.model;  // 3 of 8
  CHECK(v2.moe_router_num_groups == 4);
  CHECK(v2.moe_router_group_topk == 2);
  CHECK(v2.moe_router_group_score_topk == 1);
  const ModelConfig all = shrunk("deepseek-v2", {"model.num_moe_experts=16"}).config.model;
  CHECK(all.moe_router_num_groups == 8);
  CHECK(all.moe_router_group_topk == 3);
  CHECK_FALSE(shrunk("deepseek-v2-lite").config.model.moe_router_num_groups);
}

TEST_CASE("patterns that number a layer follow the depth") {
  const Resolution small =
      shrunk("llama3-8b-lora",
             {"peft.target_modules=['*.layers.20.*.linear_qkv','*.layers.31.mlp.linear_fc1',linear_fc2]",
              "peft.exclude_modules=['*.layers.3.*','*.layers.9.*']"});
  CHECK(small.config.model.num_layers == 2);  // of 32
  CHECK(small.config.peft->target_modules ==
        std::vector<std::string>{"*.layers.1.*.linear_qkv", "*.layers.1.mlp.linear_fc1", "linear_fc2"});
  CHECK(small.config.peft->exclude_modules == std::vector<std::string>{"*.layers.0.*"});
}

TEST_CASE("a shrunk recipe names the full one") {
  ShrunkFrom from;
  const Resolution all = resolve_shrunk(request_of("llama3-70b"), &from);
  CHECK(from.full.config.model.num_layers == 80);
  CHECK_FALSE(from.layout);  // it has the ranks that it takes
  const Resolution one = resolve_shrunk(request_of("llama3-70b", {}, 1), &from);
  CHECK(one.config.dist.world_size == 1);
  REQUIRE(from.layout);
  CHECK(from.layout->world_size == all.config.dist.world_size);
  CHECK(from.layout->world_size > 1);
}

TEST_CASE("of a list of layers with experts the first ones are left, of both kinds") {
  const auto path = std::filesystem::current_path() / "capstan-shrink-layers.yaml";
  std::string list = "[1, 1, 1, 0";
  for (int layer = 4; layer < 32; ++layer) list += layer % 2 ? ", 1" : ", 0";
  std::ofstream(path, std::ios::binary)
      << "extends: mixtral-8x7b\nname: own\nmodel.moe_layer_freq: " << list << "]\n";
  const config::ModelConfig small = shrunk(path.string()).config.model;
  CHECK(small.num_layers == 4);
  CHECK(small.moe_layer_freq.items == std::vector<int64_t>{1, 1, 1, 0});
  std::filesystem::remove(path);
}

TEST_CASE("recipes of one's own: other layouts, lengths and schedules") {
  const auto path = std::filesystem::current_path() / "capstan-shrink-own.yaml";
  for (const std::string more :
       {"dist.cp_comm_type: a2a",
        "dist: {cp: 4, cp_comm_type: a2a+p2p, hierarchical_context_parallel_sizes: [2, 2]}",
        "dist.sp: false\ncomm_overlap: none",
        "ddp: zero3\ndist: {pp: 1, virtual_pipeline_model_parallel_size: null}",
        "dist: {virtual_pipeline_model_parallel_size: null, num_layers_in_first_pipeline_stage: 20}",
        "dist: {virtual_pipeline_model_parallel_size: null, num_layers_per_virtual_pipeline_stage: 4}",
        "dist: {virtual_pipeline_model_parallel_size: null, pipeline_schedule: gpipe}",
        "scheduler: {preset: wsd, lr_warmup_fraction: null, lr_warmup_iters: 3000, lr_wsd_decay_fraction: "
        "null, "
        "lr_wsd_decay_iters: 9000}",
        "train: {train_iters: null, train_samples: 10M}", "train.exit_interval: 100",
        "checkpoint: {save_retain_interval: 1000, load: runs/other, save: elsewhere}",
        "model.recompute_granularity: full\nmodel.recompute_method: block\nmodel.recompute_num_layers: 4",
        "model: {num_moe_experts: 16, moe_router_topk: 4, moe_ffn_hidden_size: 2048, "
        "moe_shared_expert_intermediate_size: 4096}\ndist.ep: 4",
        "model: {num_moe_experts: 6, moe_ffn_hidden_size: 2048, moe_first_dense_layers: 1, moe_layer_freq: "
        "2}\n"
        "dist: {ep: 2, virtual_pipeline_model_parallel_size: null}",
        "model: {rotary_percent: 0.5, padded_vocab_size: 128512}",
        "peft: qlora\ncheckpoint.pretrained_checkpoint: base",
        "peft: qlora\ncheckpoint.pretrained_checkpoint: base\nmodel: {num_moe_experts: 16, "
        "moe_ffn_hidden_size: 2048, moe_shared_expert_intermediate_size: 4096}\ndist.ep: 4",
        "validation: {eval_global_batch_size: 64, eval_micro_batch_size: 2}"})
    for (const std::optional<int64_t> ranks : {std::optional<int64_t>{}, {1}, {2}, {4}}) {
      std::ofstream(path, std::ios::binary) << "extends: llama3-70b\nname: own\n" << more << "\n";
      const Resolution large = resolve(request_of(path.string()));
      CHECK_MESSAGE(large.ok(), more << "\n" << render(large.diagnostics, large.sources));
      CAPTURE(more);
      shrunk(path.string(), {}, ranks);
    }
  std::filesystem::remove(path);
}

TEST_CASE("a shrunk recipe is printed as a recipe, and a wrong one is reported as it is") {
  const Resolution small = shrunk("gemma2-2b-lora");
  for (const auto format : {ShowFormat::yaml, ShowFormat::minimal}) {
    const auto path = std::filesystem::current_path() / "capstan-shrunk-round-trip.yaml";
    std::ofstream(path, std::ios::binary) << show(small, {format, ""});
    Request request;
    request.recipe = path.string();
    const Resolution again = resolve(request);
    std::filesystem::remove(path);
    CAPTURE(render(again.diagnostics, again.sources));
    CHECK(again.ok());
    CHECK_MESSAGE(diff(small, again).empty(), render_diff(diff(small, again)));
  }
  const Resolution wrong = resolve_shrunk(request_of("llama3-8b", {"model.num_layer=3"}));
  CHECK_FALSE(wrong.ok());
  CHECK(render(wrong.diagnostics, wrong.sources).find("num_layers") != std::string::npos);
  Request both = request_of("llama3.2-1b-lora", {"peft.random_base=true"});
  CHECK(render(resolve(both).diagnostics, resolve(both).sources).find("exclude each other") !=
        std::string::npos);
}
