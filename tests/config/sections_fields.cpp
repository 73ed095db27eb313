// The field tables: documentation, names, derived values, what training refuses.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "config/sections/data_sources.hpp"
#include "config/sections/pipeline_layout.hpp"
#include "sections_bench.hpp"

using namespace capstan;
using namespace capstan::config;
using capstan::config::testing::all_errors;
using capstan::config::testing::bench_config;

TEST_CASE("every field has a document of one line, and numbers that count something have a unit") {
  size_t fields = 0;
  for (const FieldInfo* field : schema().fields()) {
    CAPTURE(field->path);
    ++fields;
    CHECK(field->doc.size() >= 8);
    CHECK(field->doc.size() <= 140);
    CHECK(field->doc.find('\n') == std::string::npos);
    CHECK(field->doc.back() != '.');
    if (field->type->kind == Type::Kind::integer && field->path != "rng.seed" &&
        field->path != "dataset.random_seed" && field->path != "resilience.max_rewinds" &&
        field->path != "mixed_precision.fp8_margin")
      CHECK_FALSE(field->unit.empty());
    if (field->type->kind == Type::Kind::enumeration)
      for (const auto& entry : field->type->names->entries) CHECK_FALSE(entry.doc.empty());
  }
  CHECK(fields > 200);
  CHECK(schema().rules().size() >= 60);
}

TEST_CASE("names of other places and short names are the same field") {
  const std::pair<const char*, const char*> names[] = {
      {"dist.tp", "dist.tensor_model_parallel_size"},
      {"model.tensor_model_parallel_size", "dist.tensor_model_parallel_size"},
      {"dist.pp", "dist.pipeline_model_parallel_size"},
      {"model.pipeline_model_parallel_size", "dist.pipeline_model_parallel_size"},
      {"model.virtual_pipeline_model_parallel_size", "dist.virtual_pipeline_model_parallel_size"},
      {"model.pipeline_model_parallel_layout", "dist.pipeline_model_parallel_layout"},
      {"dist.cp", "dist.context_parallel_size"},
      {"model.context_parallel_size", "dist.context_parallel_size"},
      {"dist.ep", "dist.expert_model_parallel_size"},
      {"dist.etp", "dist.expert_tensor_parallel_size"},
      {"model.sequence_parallel", "dist.sequence_parallel"},
      {"model.cp_comm_type", "dist.cp_comm_type"},
      {"dataset.seq_length", "model.seq_length"},
      {"dist.distributed_timeout_minutes", "resilience.timeout"},
      {"ddp.grad_reduce_in_fp32", "mixed_precision.grad_reduce_in_fp32"},
      {"comm_overlap.overlap_grad_reduce", "ddp.overlap_grad_reduce"},
      {"comm_overlap.bucket_size", "ddp.bucket_size"},
      {"optimizer.loss_scale", "mixed_precision.loss_scale"},
      {"train.eval_interval", "validation.eval_interval"},
  };
  for (const auto& name : names) {
    const std::string alias = name.first, path = name.second;
    const FieldInfo* field = schema().find_spelling(alias);
    REQUIRE_MESSAGE(field != nullptr, alias);
    CHECK(field->path == path);
  }
}

TEST_CASE("defaults are Megatron's") {
  const Config c;
  CHECK(c.model.hidden_dropout == 0.1);
  CHECK(c.model.attention_dropout == 0.1);
  CHECK(c.model.init_method_std == 0.02);
  CHECK(c.model.layernorm_epsilon == 1e-5);
  CHECK(c.model.seq_length == 1024);
  CHECK(c.model.make_vocab_size_divisible_by == 128);
  CHECK(c.model.add_bias_linear);
  CHECK(c.model.share_embeddings_and_output_weights);
  CHECK(c.model.moe_router_topk == 2);
  CHECK(c.optimizer.adam_beta2 == 0.999);
  CHECK(c.optimizer.weight_decay == 0.01);
  CHECK(c.optimizer.clip_grad == 1.0);
  CHECK(c.scheduler.lr_decay_style == LrDecayStyle::linear);
  CHECK(c.validation.eval_iters == 100);
  CHECK(c.rng.seed == 1234);
  CHECK(c.checkpoint.most_recent_k == 2);
  CHECK(c.resilience.timeout.seconds == 600);
}

TEST_CASE("derived values of the model") {
  SUBCASE("shapes") {
    const Config c =
        bench_config({"model.ffn_hidden_size=null", "model.num_query_groups=null", "model.vocab_size=50257"});
    CHECK(c.model.ffn_hidden_size == 256);
    CHECK(c.model.num_query_groups == 8);
    CHECK(c.model.kv_channels == 8);
    CHECK(c.model.padded_vocab_size == 50304);
    CHECK(c.model.softmax_scale.value() == doctest::Approx(1 / std::sqrt(8.0)));
    CHECK(c.model.max_position_embeddings == 128);
    CHECK(c.model.embedding_init_method_std.value() == 0.02);
  }
  SUBCASE("how far cos and sin of stretched positions are scaled") {
    const auto factor = [](std::vector<std::string> overrides) {
      overrides.insert(overrides.begin(), {"model.position_embedding_type=rope", "model.rope_scaling=true",
                                           "model.rope_scaling_factor=32",
                                           "model.rope_scaling_original_max_position_embeddings=4096"});
      return bench_config(overrides).model.rope_scaling_attention_factor;
    };
    CHECK(factor({"model.rope_scaling_type=yarn"}).value() == doctest::Approx(1.3465735902799727));
    CHECK(factor({"model.rope_scaling_type=longrope"}).value() == doctest::Approx(1.1902380714238083));
    CHECK(factor({"model.rope_scaling_type=longrope", "model.rope_scaling_factor=1"}).value() == 1);
    CHECK(factor({"model.rope_scaling_type=yarn", "model.rope_scaling_attention_factor=1.5"}).value() == 1.5);
    CHECK(!factor({}).has_value());
  }
  SUBCASE("a gated feed-forward network is narrower") {
    const Config c = bench_config({"model.hidden_size=4096", "model.num_attention_heads=32",
                                   "model.gated_linear_unit=true", "model.ffn_hidden_size=null"});
    CHECK(c.model.ffn_hidden_size == 10880);  // floor(8 * 4096 / 3 / 64) * 64
    const Config tiny =
        bench_config({"model.hidden_size=16", "model.gated_linear_unit=true", "model.ffn_hidden_size=null"});
    CHECK(tiny.model.ffn_hidden_size == 64);  // below 24 the formula gives nothing
  }
  SUBCASE("recomputation") {
    const Config c = bench_config({"model.recompute_granularity=full"});
    CHECK(c.model.recompute_method == RecomputeMethod::uniform);
    CHECK(c.model.recompute_num_layers == 1);
    const Config d = bench_config({"model.recompute_granularity=selective"});
    CHECK(d.model.recompute_modules == std::vector<RecomputeModule>{RecomputeModule::core_attn});
  }
}

TEST_CASE("derived values of the layout") {
  SUBCASE("world and batch") {
    const Config c = bench_config({"dist.world_size=16", "dist.tp=2", "dist.pp=2", "train.gbs=32"});
    CHECK(c.dist.data_parallel_size == 4);
    CHECK(c.train.num_microbatches == 4);
    CHECK(bench_config({"dist.world_size=4", "train.gbs=null"}).train.global_batch_size == 8);
    CHECK(c.ddp.bucket_size == 40'000'000);
    CHECK(bench_config({"dist.world_size=64", "train.mbs=1", "train.gbs=64"}).ddp.bucket_size == 64'000'000);
  }
  SUBCASE("experts") {
    const Config c = bench_config({"dist.world_size=16", "dist.tp=2", "dist.pp=2", "dist.ep=4", "dist.etp=1",
                                   "dist.sp=true", "model.num_moe_experts=8", "train.gbs=32"});
    CHECK(c.dist.expert_data_parallel_size == 2);
    CHECK(c.model.moe_ffn_hidden_size == 256);
    CHECK_FALSE(bench_config({}).dist.expert_data_parallel_size.has_value());
  }
}

TEST_CASE("derived values of the pipeline") {
  const Config c =
      bench_config({"dist.world_size=2", "dist.pp=2", "dist.num_layers_per_virtual_pipeline_stage=1"});
  CHECK(c.dist.virtual_pipeline_model_parallel_size == 4);
  CHECK(c.dist.pipeline_model_parallel_layout == "Et|(t|)*6tL");
  CHECK(c.dist.pipeline_schedule == PipelineSchedule::interleaved);
  CHECK(c.comm_overlap.overlap_p2p_comm == true);
  CHECK(c.comm_overlap.batch_p2p_comm == false);
  const Config d = bench_config({"dist.world_size=2", "dist.pp=2", "dist.vpp=2"});
  CHECK(d.dist.num_layers_per_virtual_pipeline_stage == 2);
  const Config e = bench_config(
      {"dist.world_size=2", "dist.pp=2", "dist.pipeline_model_parallel_layout=\"Et|tt|ttt|ttL\""});
  CHECK(e.dist.virtual_pipeline_model_parallel_size == 2);
  const Config f = bench_config({"dist.world_size=4", "dist.pp=4"});
  CHECK(f.dist.pipeline_model_parallel_layout == "Ett|tt|tt|ttL");
  CHECK(f.dist.pipeline_schedule == PipelineSchedule::one_f_one_b);
  CHECK(f.comm_overlap.batch_p2p_comm == true);
  const Config g = bench_config({"dist.world_size=4", "dist.pp=4", "dist.pipeline_schedule=zb_v"});
  CHECK(g.dist.virtual_pipeline_model_parallel_size == 2);
  CHECK_FALSE(g.dist.microbatch_group_size_per_vp_stage.has_value());
  CHECK(g.dist.pipeline_model_parallel_layout == "Et|(t|)*6tL");
  CHECK(g.comm_overlap.overlap_p2p_comm == true);
  CHECK(stage_ranks(g.dist) == std::vector<int64_t>{0, 1, 2, 3, 3, 2, 1, 0});
  const Config h = bench_config({"dist.world_size=4", "dist.pp=4", "dist.pipeline_schedule=zero_bubble"});
  CHECK(h.dist.pipeline_schedule == PipelineSchedule::zb_h1);
  CHECK(h.comm_overlap.overlap_p2p_comm == true);
  CHECK(stage_ranks(h.dist) == std::vector<int64_t>{0, 1, 2, 3});
  CHECK(stage_ranks(bench_config({"dist.world_size=2", "dist.pp=2", "dist.vpp=2"}).dist) ==
        std::vector<int64_t>{0, 1, 0, 1});
}

TEST_CASE("derived values of the schedule") {
  const Config c = bench_config({"scheduler.warmup_fraction=0.03", "scheduler.lr_decay_style=WSD",
                                 "scheduler.lr_wsd_decay_fraction=0.1"});
  CHECK(c.scheduler.lr_decay_iters == 1000);
  CHECK(c.scheduler.lr_warmup_iters == 30);
  CHECK(c.scheduler.lr_wsd_decay_iters == 100);
  CHECK(c.optimizer.min_lr == 0.0);
  const Config d =
      bench_config({"train.train_iters=null", "train.train_samples=4000", "scheduler.warmup_fraction=1%"});
  CHECK(d.train.train_iters == 500);
  CHECK(d.scheduler.lr_decay_samples == 4000);
  CHECK(d.scheduler.lr_warmup_samples == 40);
  CHECK_FALSE(d.scheduler.lr_decay_iters.has_value());
}

TEST_CASE("explicit values are not derived") {
  const Config c = bench_config({"model.kv_channels=16", "dist.world_size=4", "ddp.bucket_size=5"});
  CHECK(c.model.kv_channels == 16);
  CHECK(c.ddp.bucket_size == 5);
}

TEST_CASE("the layout grammar") {
  const auto good = [](const char* text) {
    const auto layout = parse_pipeline_layout(text);
    REQUIRE_MESSAGE(layout.ok(), layout.problem);
    return layout.stages;
  };
  const auto deepseek = good("Et*3|(tt|)*29,L");
  REQUIRE(deepseek.size() == 31);
  CHECK(deepseek[0] == PipelineStage{true, 3, 0, false});
  CHECK(deepseek[29] == PipelineStage{false, 2, 0, false});
  CHECK(deepseek[30] == PipelineStage{false, 0, 0, true});
  CHECK(good("Et*3|(tt|)*29,m|L").size() == 32);
  CHECK(good("(E)(t|(t|)*2)*2 tmL").size() == 7);
  CHECK(good("E||tL")[1] == PipelineStage{});

  for (const auto& bad : std::vector<std::pair<const char*, const char*>>{
           {"", "`E` (the embedding) is missing"},
           {"tt|L", "missing"},
           {"tE|L", "`E` has to be the first item"},
           {"Et|E|L", "`E` has to be the first item"},
           {"Et|L|t", "`L` has to be the last item"},
           {"|EttL", "`E` has to be in the first stage"},
           {"EttL|", "`L` has to be in the last stage"},
           {"Ett|tt|L|", "`L` has to be in the last stage"},
           {"EtLL", "`L` must occur exactly once"},
           {"Et|t", "`L` (head and loss) is missing"},
           {"Em|tL", "may follow"},
           {"Etm|m|L", "all `m` have to be in one stage"},
           {"E(t|L", "`(` without `)` (character 2)"},
           {"Et)|L", "`)` without `(` (character 3)"},
           {"Et*|L", "needs a count"},
           {"Et*0|L", "needs a count"},
           {"Et*99999999999999999999|L", "needs a count"},
           {"Ed|L", "`d` is none of"},
           {"E(((((((((t)))))))))L", "nested"},
           {"E(t*1000000)*1000000L", "more than 1048576"},
       }) {
    const std::string text = bad.first, problem = bad.second;
    CAPTURE(text);
    const auto layout = parse_pipeline_layout(text);
    CHECK(layout.problem.find(problem) != std::string::npos);
  }

  // Writing a layout and reading it back gives the same stages.
  for (const char* text :
       {"Et*3|(tt|)*29,L", "Et*3|(tt|)*29,m|L", "EtL", "E|t|t|L", "Et|t|t|t|tmmL", "E||||tL"}) {
    const auto stages = good(text);
    const std::string again = pipeline_layout_text(stages);
    CHECK_MESSAGE(good(again.c_str()) == stages, again);
  }
}

TEST_CASE("stages hold every layer exactly once, however they are split") {
  int checked = 0;
  for (const int64_t layers : {1, 2, 7, 8, 12, 30, 61, 126})
    for (const int64_t pp : {1, 2, 3, 4, 8, 16})
      for (const int64_t vpp : {1, 2, 3, 8})
        for (const int ends : {0, 1, 2, 3}) {
          Config c = bench_config({});
          c.model.num_layers = layers;
          c.dist.pipeline_model_parallel_size = pp;
          if (vpp > 1) c.dist.virtual_pipeline_model_parallel_size = vpp;
          if (ends & 1) c.dist.account_for_embedding_in_pipeline_split = true;
          if (ends & 2) c.dist.account_for_loss_in_pipeline_split = true;
          const auto stages = pipeline_stages(c);
          const bool fits = (layers + (ends & 1) + (ends >> 1)) % (pp * vpp) == 0;
          REQUIRE(stages.has_value() == fits);
          if (!fits) continue;
          ++checked;
          int64_t held = 0;
          for (const auto& stage : *stages) {
            CHECK(stage.layers >= 0);
            held += stage.layers;
          }
          CHECK(held == layers);
          CHECK(static_cast<int64_t>(stages->size()) == pp * vpp);
          CHECK(stages->front().embedding);
          CHECK(stages->back().loss);
        }
  CHECK(checked > 50);
}

TEST_CASE("the data that a recipe names") {
  Config c =
      bench_config({"dataset.kind=gpt", "dataset.data_path=[0.3, a, 0.7, /b/c]", "dataset.split=\"8,1,1\""});
  auto sources = data_sources(c.dataset);
  REQUIRE(sources.splits[0].size() == 2);
  CHECK(sources.splits[0][0].weight == 0.3);
  CHECK(sources.splits[0][1].prefix == "/b/c");
  REQUIRE(sources.shares.has_value());
  CHECK((*sources.shares)[0] == doctest::Approx(0.8));
  c = bench_config({"dataset.kind=gpt", "dataset.data_path=[x, y]"});
  sources = data_sources(c.dataset);
  CHECK_FALSE(sources.splits[0][1].weight.has_value());
  CHECK((*sources.shares)[1] == doctest::Approx(0.03));
  c = bench_config({"dataset.kind=gpt", "dataset.train_blend={b: 2, a: 1}", "dataset.valid_blend={v: 1}"});
  sources = data_sources(c.dataset);
  CHECK(sources.splits[0][0].prefix == "b");  // in the order written
  CHECK(sources.splits[1][0].prefix == "v");
  CHECK(sources.splits[2].empty());
  CHECK_FALSE(sources.shares.has_value());

  for (const char* text : {"1", "1,2", "1,2,3,4", "a,b,c", "-1,1,1", "0,0,0", "nan,1,1", "inf,1,1", "1,,1"})
    CHECK_MESSAGE(!split_shares(text).has_value(), text);
}

TEST_CASE("train refuses by name what the engine cannot do, and nothing that it can") {
  const auto missing = [](const std::vector<std::string>& overrides) {
    const Config c = bench_config(overrides);
    std::set<std::string> paths;
    for (const auto& feature : missing_features(schema(), &c)) {
      CHECK_FALSE(feature.reason.empty());
      paths.insert(feature.path);
    }
    return paths;
  };
  for (const auto& possible : std::vector<std::vector<std::string>>{
           {},
           {"dist.world_size=2"},
           {"mixed_precision.params_dtype=bf16"},
           {"mixed_precision.params_dtype=fp16", "mixed_precision.loss_scale=1024"},
           {"mixed_precision.grad_reduce_in_fp32=false"},
           {"ddp.sharding=zero1"},
           {"dist.world_size=4", "dist.tp=2", "dist.sp=true", "dist.cp=2", "dist.cp_comm_type=a2a"},
           {"dist.world_size=2", "dist.pp=2", "dist.pipeline_schedule=gpipe"},
           {"dist.world_size=2", "dist.pp=2", "dist.pipeline_schedule=zb_h1"},
           {"dist.world_size=2", "dist.pp=2", "dist.pipeline_schedule=zb_v"},
           {"ddp.sharding=zero3", "ddp.overlap_grad_reduce=true", "ddp.overlap_param_gather=true"},
           {"model.recompute_granularity=full"},
           {"model.recompute_granularity=full", "model.recompute_method=block"},
           {"model.recompute_granularity=selective", "model.recompute_modules=[core_attn, mlp, layernorm]"},
           {"optimizer.optimizer=sgd", "optimizer.grad_norm_skip_threshold=10"},
           {"model.position_embedding_type=rope", "model.rope_scaling=true", "model.normalization=RMSNorm"},
           {"model.position_embedding_type=rope", "model.rope_scaling=true", "model.rope_scaling_type=yarn"},
           {"model.norm_placement=both", "model.embedding_multiplier=8", "model.attn_logit_softcapping=50",
            "model.final_logit_softcapping=30"},
           {"model.norm_placement=output", "model.normalization=RMSNorm", "model.qk_layernorm=true",
            "model.qk_layernorm_across_heads=true"},
           {"checkpoint.async_save=true"},
           {"peft.base_quantization=nf4", "peft.quantization_double=false"},
           {"resilience.loss_spike_action=rewind", "resilience.grad_norm_spike_action=skip"},
           {"resilience.rerun_mode=validate_results"},
           {"model.window_size=16", "model.qk_layernorm=true", "model.hidden_dropout=0.1"},
           {"model.mtp_num_layers=2", "model.mtp_loss_scaling_factor=0.3"},
           {"dist.world_size=2", "dist.ep=2", "model.num_moe_experts=2"},
           {"model.num_moe_experts=4", "model.moe_router_load_balancing_type=global_aux_loss",
            "model.moe_aux_loss_coeff=0.1", "model.moe_input_jitter_eps=0.01", "model.moe_router_dtype=fp64"},
           {"scheduler.lr_decay_style=WSD", "scheduler.lr_wsd_decay_fraction=0.1"},
           {"scheduler.weight_decay_incr_style=linear", "scheduler.start_weight_decay=0",
            "scheduler.end_weight_decay=1"}})
    CHECK_MESSAGE(missing(possible).empty(), *missing(possible).begin());

  const std::vector<std::pair<std::vector<std::string>, const char*>> refused = {
      {{"dist.world_size=2", "dist.pp=2", "comm_overlap.defer_embedding_wgrad_compute=true"},
       "comm_overlap.defer_embedding_wgrad_compute"},
      {{"model.num_moe_experts=4", "model.moe_router_load_balancing_type=sinkhorn"},
       "model.moe_router_load_balancing_type"},
      {{"optimizer.use_precision_aware_optimizer=true", "optimizer.exp_avg_dtype=fp16"},
       "optimizer.exp_avg_dtype"},
      {{"peft.dropout_position=post"}, "peft.dropout_position"},
  };
  for (const auto& one : refused) CHECK_MESSAGE(missing(one.first).count(one.second) == 1, one.second);
}
