// Assignment of layers to pipeline stages, and the order in which the stages work.
#include <algorithm>

#include "config/sections/batch_ramp.hpp"
#include "config/sections/conditions.hpp"
#include "config/sections/pipeline_layout.hpp"
#include "config/sections/rule_tools.hpp"

namespace capstan::config {

RULES_OF_FILE(pipeline_rules)

namespace {

bool uneven_ends(const Config& c) {
  return c.dist.num_layers_in_first_pipeline_stage || c.dist.num_layers_in_last_pipeline_stage;
}
bool accounts(const Config& c) {
  return c.dist.account_for_embedding_in_pipeline_split || c.dist.account_for_loss_in_pipeline_split;
}
// Layers, and embedding and head where they count as one.
int64_t units(const Config& c) {
  return c.model.num_layers + (c.dist.account_for_embedding_in_pipeline_split ? 1 : 0) +
         (c.dist.account_for_loss_in_pipeline_split ? 1 : 0);
}
std::string units_text(const Config& c) {
  std::string text = counted(c.model.num_layers, "layer");
  if (c.dist.account_for_embedding_in_pipeline_split) text += " + 1 for the embedding";
  if (c.dist.account_for_loss_in_pipeline_split) text += " + 1 for the head";
  return text;
}
RULE("R0301", virtual_stages_need_pipeline, "virtual stages need pipeline parallelism",
     "dist.virtual_pipeline_model_parallel_size", "dist.pipeline_model_parallel_size") {
  if (has_pipeline(c) || virtual_stages(c) == 1) return;
  report
      .error("`dist.virtual_pipeline_model_parallel_size` " + to_text(virtual_stages(c)) +
             " needs pipeline parallelism, but `dist.pipeline_model_parallel_size` is 1")
      .help(
          "set dist.pipeline_model_parallel_size to 2 or more, or unset "
          "virtual_pipeline_model_parallel_size");
}

RULE("R0302", stages_divide_layers,
     "num_layers is divisible by the number of pipeline stages, unless a field sets another split",
     "dist.pipeline_model_parallel_size", "model.num_layers", "dist.account_for_embedding_in_pipeline_split",
     "dist.account_for_loss_in_pipeline_split") {
  const int64_t pp = c.dist.pipeline_model_parallel_size;
  if (!has_pipeline(c) || uneven_ends(c) || c.dist.pipeline_model_parallel_layout || units(c) % pp == 0)
    return;
  std::string help = "nearest legal dist.pipeline_model_parallel_size: " + nearest_divisors(pp, units(c)) +
                     "; or num_layers: " + nearest_multiples(units(c), pp);
  if (accounts(c))
    help = "nearest legal dist.pipeline_model_parallel_size: " + nearest_divisors(pp, units(c));
  const int64_t bare = c.model.num_layers;
  if (!accounts(c) && (bare + 2) % pp == 0)
    help +=
        "; or let embedding and head count as layers: dist.account_for_embedding_in_pipeline_split=true "
        "dist.account_for_loss_in_pipeline_split=true";
  else
    help +=
        "; or give the ends their own sizes with dist.num_layers_in_first_pipeline_stage and "
        "dist.num_layers_in_last_pipeline_stage";
  report.error(units_text(c) + " do not divide into " + counted(pp, "pipeline stage")).help(help);
}

RULE("R0303", virtual_stages_divide_layers,
     "the number of layers of a stage is divisible by the number of virtual stages",
     "dist.virtual_pipeline_model_parallel_size", "dist.pipeline_model_parallel_size", "model.num_layers",
     "?dist.pipeline_schedule") {
  const int64_t pp = c.dist.pipeline_model_parallel_size, vpp = virtual_stages(c);
  if (!has_pipeline(c) || vpp == 1 || uneven_ends(c) || c.dist.pipeline_model_parallel_layout) return;
  if (units(c) % pp != 0 || units(c) / pp % vpp == 0) return;
  std::string help =
      "nearest legal virtual_pipeline_model_parallel_size: " + nearest_divisors(vpp, units(c) / pp);
  if (c.dist.pipeline_schedule == PipelineSchedule::zb_v)
    help =
        (accounts(c) ? ""
                     : "nearest legal model.num_layers: " + nearest_multiples(units(c), pp * vpp) + "; or ") +
        "set dist.virtual_pipeline_model_parallel_size=1 dist.pipeline_schedule=zb_h1";
  report
      .error("a pipeline stage has " + counted(units(c) / pp, "layer") + ", not a multiple of " +
             counted(vpp, "virtual stage"))
      .operand("layers of a stage", to_text(units(c) / pp))
      .help(help);
}

RULE("R0304", virtual_stage_layers_agree,
     "layers per virtual stage divide a stage, and agree with the number of virtual stages",
     "dist.num_layers_per_virtual_pipeline_stage", "dist.virtual_pipeline_model_parallel_size",
     "dist.pipeline_model_parallel_size", "model.num_layers") {
  const auto each = c.dist.num_layers_per_virtual_pipeline_stage;
  if (!has_pipeline(c) || !each) return;
  const int64_t pp = c.dist.pipeline_model_parallel_size;
  if (uneven_ends(c)) {
    report
        .error(
            "`dist.num_layers_per_virtual_pipeline_stage` needs stages of equal size, but the first or the "
            "last stage has a size of its own")
        .help("give dist.virtual_pipeline_model_parallel_size instead");
    return;
  }
  // The rule stages_divide_layers reports this.
  if (units(c) % pp != 0) return;
  if (units(c) / pp % *each != 0) {
    report
        .error("a pipeline stage has " + counted(units(c) / pp, "layer") + ", not a multiple of the " +
               counted(*each, "layer") + " of a virtual stage")
        .help("nearest legal num_layers_per_virtual_pipeline_stage: " +
              nearest_divisors(*each, units(c) / pp));
  } else if (units(c) / pp / *each != virtual_stages(c)) {
    report
        .error("`dist.num_layers_per_virtual_pipeline_stage` " + to_text(*each) + " gives " +
               to_text(units(c) / pp / *each) +
               " virtual stages, `dist.virtual_pipeline_model_parallel_size` is " +
               to_text(virtual_stages(c)))
        .help("give one of the two");
  }
}

RULE("R0305", explicit_ends_exclude_accounting,
     "num_layers_in_first/last_pipeline_stage and account_for_embedding/loss_in_pipeline_split exclude each "
     "other",
     "dist.num_layers_in_first_pipeline_stage", "dist.num_layers_in_last_pipeline_stage",
     "dist.account_for_embedding_in_pipeline_split", "dist.account_for_loss_in_pipeline_split") {
  if (!has_pipeline(c) || !uneven_ends(c) || !accounts(c)) return;
  report
      .error(
          "a first or last stage with a size of its own and account_for_embedding/loss_in_pipeline_split "
          "exclude each other")
      .help("keep one of them");
}

RULE("R0306", middle_stages_even,
     "the layers between the first and last stage are divisible by the number of stages there",
     "dist.num_layers_in_first_pipeline_stage", "dist.num_layers_in_last_pipeline_stage",
     "dist.pipeline_model_parallel_size", "model.num_layers") {
  const auto first = c.dist.num_layers_in_first_pipeline_stage,
             last = c.dist.num_layers_in_last_pipeline_stage;
  if (!has_pipeline(c) || !uneven_ends(c)) return;
  const int64_t layers = c.model.num_layers - first.value_or(0) - last.value_or(0);
  const int64_t stages = c.dist.pipeline_model_parallel_size - (first ? 1 : 0) - (last ? 1 : 0);
  if (layers < 0)
    report
        .error("the first and last stage take " + counted(first.value_or(0) + last.value_or(0), "layer") +
               ", the model has " + to_text(c.model.num_layers))
        .help("reduce dist.num_layers_in_first_pipeline_stage or dist.num_layers_in_last_pipeline_stage");
  else if (stages == 0 && layers > 0)
    report.error("no stage is left to hold " + counted(layers, "layer"))
        .help("let the first and last stage hold " + counted(c.model.num_layers, "layer") + " together");
  else if (stages > 0 && (layers == 0 || layers % stages != 0))
    report
        .error("the layers between the first and last stage, " + to_text(layers) +
               ", are not a multiple of the " + counted(stages, "stage") + " there")
        .help("nearest legal number of layers there: " + nearest_multiples(layers, stages));
}

RULE("R0307", virtual_stages_divide_ends,
     "the layers of the first, last and middle stages are divisible by the number of virtual stages",
     "dist.virtual_pipeline_model_parallel_size", "dist.num_layers_in_first_pipeline_stage",
     "dist.num_layers_in_last_pipeline_stage", "dist.pipeline_model_parallel_size", "model.num_layers") {
  const int64_t vpp = virtual_stages(c);
  if (!has_pipeline(c) || !uneven_ends(c) || vpp == 1) return;
  const auto first = c.dist.num_layers_in_first_pipeline_stage,
             last = c.dist.num_layers_in_last_pipeline_stage;
  const int64_t layers = c.model.num_layers - first.value_or(0) - last.value_or(0);
  const int64_t stages = c.dist.pipeline_model_parallel_size - (first ? 1 : 0) - (last ? 1 : 0);
  const auto check = [&](const char* which, int64_t held) {
    if (held % vpp != 0)
      report
          .error("the " + std::string(which) + " stage has " + counted(held, "layer") +
                 ", not a multiple of " + counted(vpp, "virtual stage"))
          .help("nearest legal virtual_pipeline_model_parallel_size: " + nearest_divisors(vpp, held));
  };
  if (first) check("first", *first);
  if (last) check("last", *last);
  if (stages > 0 && layers > 0 && layers % stages == 0) check("middle", layers / stages);
}

RULE("R0308", layout_is_valid, "the pipeline layout follows its grammar: E comes first, L last, each once",
     "dist.pipeline_model_parallel_layout") {
  if (!has_pipeline(c) || !c.dist.pipeline_model_parallel_layout) return;
  const auto layout = parse_pipeline_layout(*c.dist.pipeline_model_parallel_layout);
  if (!layout.ok())
    report.error("`dist.pipeline_model_parallel_layout`: " + layout.problem)
        .help(
            "E embedding, t layer, m predicted token, L head and loss, | between stages, (…)*n repeats: "
            "Et*3|(tt|)*29,L");
}

RULE("R0309", layout_divides_stages, "the number of stages of the layout is pipeline ranks * virtual stages",
     "dist.pipeline_model_parallel_layout", "dist.pipeline_model_parallel_size",
     "dist.virtual_pipeline_model_parallel_size") {
  if (!has_pipeline(c) || !c.dist.pipeline_model_parallel_layout) return;
  const auto layout = parse_pipeline_layout(*c.dist.pipeline_model_parallel_layout);
  if (!layout.ok()) return;
  const auto stages = static_cast<int64_t>(layout.stages.size());
  const int64_t pp = c.dist.pipeline_model_parallel_size;
  if (stages % pp != 0)
    report
        .error("`dist.pipeline_model_parallel_layout` has " + to_text(stages) +
               " stages, not a multiple of " + to_text(pp) + " pipeline ranks")
        .help("nearest legal number of stages: " + nearest_multiples(stages, pp));
  else if (stages / pp != virtual_stages(c))
    report
        .error("`dist.pipeline_model_parallel_layout` has " + to_text(stages) + " stages = " + to_text(pp) +
               " ranks * " + to_text(stages / pp) + ", `dist.virtual_pipeline_model_parallel_size` is " +
               to_text(virtual_stages(c)))
        .help("unset dist.virtual_pipeline_model_parallel_size; it follows from the layout");
}

RULE("R0310", layout_holds_all_layers,
     "the layout holds num_layers layers (t) and mtp_num_layers predicted tokens (m)",
     "dist.pipeline_model_parallel_layout", "model.num_layers", "model.mtp_num_layers") {
  if (!has_pipeline(c) || !c.dist.pipeline_model_parallel_layout) return;
  const auto layout = parse_pipeline_layout(*c.dist.pipeline_model_parallel_layout);
  if (!layout.ok()) return;
  int64_t layers = 0, predicted = 0;
  for (const auto& stage : layout.stages) {
    layers += stage.layers;
    predicted += stage.mtp_layers;
  }
  if (layers != c.model.num_layers)
    report
        .error("`dist.pipeline_model_parallel_layout` holds " + to_text(layers) +
               " layers, `model.num_layers` is " + to_text(c.model.num_layers))
        .help("write `t` " + to_text(c.model.num_layers) + " times");
  if (predicted != c.model.mtp_num_layers.value_or(0))
    report
        .error("`dist.pipeline_model_parallel_layout` holds " + to_text(predicted) +
               " predicted tokens, `model.mtp_num_layers` is " + to_text(c.model.mtp_num_layers.value_or(0)))
        .help("write `m` " + to_text(c.model.mtp_num_layers.value_or(0)) + " times");
}

RULE("R0311", layout_excludes_split,
     "a pipeline layout excludes the other fields that split layers over stages",
     "dist.pipeline_model_parallel_layout", "dist.num_layers_in_first_pipeline_stage",
     "dist.num_layers_in_last_pipeline_stage", "dist.account_for_embedding_in_pipeline_split",
     "dist.account_for_loss_in_pipeline_split") {
  if (!has_pipeline(c) || (!uneven_ends(c) && !accounts(c)) || layout_is_the_split(c)) return;
  report
      .error(
          "`dist.pipeline_model_parallel_layout` and sizes of the first or last stage or "
          "account_for_embedding/loss_in_pipeline_split exclude each other")
      .help("keep the layout, which already defines the stages");
}

RULE("R0312", virtual_stages_without_overlap, "virtual stages on two pipeline ranks need overlap_p2p_comm",
     "comm_overlap.overlap_p2p_comm", "dist.pipeline_model_parallel_size",
     "dist.virtual_pipeline_model_parallel_size") {
  if (c.dist.pipeline_model_parallel_size != 2 || virtual_stages(c) == 1) return;
  if (c.comm_overlap.overlap_p2p_comm.value_or(true)) return;
  report
      .error(
          "virtual stages on 2 pipeline ranks need `comm_overlap.overlap_p2p_comm`: each rank sends to and "
          "receives from the same neighbor")
      .help("set comm_overlap.overlap_p2p_comm=true, or use more than 2 pipeline ranks");
}

RULE("R0313", overlapped_p2p_excludes_batched, "overlap_p2p_comm and batch_p2p_comm exclude each other",
     "comm_overlap.batch_p2p_comm", "comm_overlap.overlap_p2p_comm") {
  if (!c.comm_overlap.overlap_p2p_comm.value_or(false) || !c.comm_overlap.batch_p2p_comm.value_or(false))
    return;
  report.error("`comm_overlap.overlap_p2p_comm` and `comm_overlap.batch_p2p_comm` exclude each other")
      .help("set comm_overlap.batch_p2p_comm=false");
}

// Complete groups of micro-batches, or a last one that still fills the pipeline.
bool divides_into_groups(int64_t micro_batches, int64_t group, int64_t stages) {
  const int64_t rest = micro_batches % group;
  return micro_batches >= group && (rest == 0 || rest >= stages);
}

// The first size of a growing batch, before the last one, whose micro-batches do not divide into groups.
std::optional<int64_t> size_that_does_not_fit(const BatchRamp& ramp, int64_t samples_of_micro_batch,
                                              int64_t group, int64_t stages) {
  // Each increment adds a micro-batch at least, and sizes above a group behave alike modulo the group.
  const int64_t most = std::min(ramp.increments(), 2 * group + 1);
  for (int64_t i = 0; i < most; ++i)
    if (!divides_into_groups(ramp.size(i) / samples_of_micro_batch, group, stages)) return ramp.size(i);
  return std::nullopt;
}

RULE("R0314", micro_batch_groups_fit,
     "with virtual stages, micro-batches divide into groups of microbatch_group_size_per_vp_stage, which is "
     "at least the number of pipeline ranks",
     "dist.microbatch_group_size_per_vp_stage", "train.num_microbatches", "dist.pipeline_model_parallel_size",
     "dist.virtual_pipeline_model_parallel_size", "train.global_batch_size", "train.rampup_batch_size",
     "train.micro_batch_size", "dist.data_parallel_size", "train.decrease_batch_size_if_needed") {
  const auto group = c.dist.microbatch_group_size_per_vp_stage;
  if (!has_pipeline(c) || virtual_stages(c) == 1 || !group || !c.train.num_microbatches) return;
  if (c.dist.pipeline_schedule == PipelineSchedule::zb_v) return;
  const int64_t pp = c.dist.pipeline_model_parallel_size, count = *c.train.num_microbatches;
  if (*group < pp) {
    report
        .error("`dist.microbatch_group_size_per_vp_stage` " + to_text(*group) +
               " is less than the number of pipeline ranks, " + to_text(pp))
        .operand("dist.microbatch_group_size_per_vp_stage")
        .operand("dist.pipeline_model_parallel_size")
        .help("nearest legal value: " + to_text(pp));
    return;
  }
  const auto ramp = BatchRamp::of(c);
  const int64_t together = c.train.micro_batch_size * c.dist.data_parallel_size.value_or(0);
  // R0224 reports sizes that do not divide into micro-batches.
  if (ramp && ramp->grows() && together > 0 && ramp->size(0) % together == 0 &&
      ramp->size(1) % together == 0) {
    if (const auto size = size_that_does_not_fit(*ramp, together, *group, pp)) {
      report
          .error("`train.rampup_batch_size` makes steps of " + to_text(*size) +
                 " samples, whose number of micro-batches, " + to_text(*size / together) +
                 ", does not divide into groups of " + to_text(*group) + ", which virtual stages need")
          .at("train.rampup_batch_size")
          .operand("dist.microbatch_group_size_per_vp_stage")
          .operand("train.micro_batch_size")
          .operand("dist.data_parallel_size")
          .help(
              "every size fits if start and increment are multiples of "
              "microbatch_group_size_per_vp_stage * micro_batch_size * data_parallel_size = " +
              product_text({*group, c.train.micro_batch_size, *c.dist.data_parallel_size}));
      return;
    }
  }
  if (divides_into_groups(count, *group, pp)) return;
  const int64_t below = count / *group * *group, above = below == 0 ? *group : below + pp;
  report
      .error("the number of micro-batches, " + to_text(count) + ", does not divide into groups of " +
             to_text(*group) + ", which virtual stages need")
      .operand("train.num_microbatches")
      .operand("dist.microbatch_group_size_per_vp_stage")
      .operand("train.global_batch_size")
      .help("nearest legal number of micro-batches: " + (below > 0 ? to_text(below) + " or " : "") +
            to_text(above) + " (global_batch_size / (micro_batch_size * data_parallel_size))");
}

RULE("R0315", pipeline_is_filled, "a pipeline has at least as many micro-batches as stages",
     "dist.pipeline_model_parallel_size", "train.num_microbatches", "dist.pipeline_schedule") {
  if (!has_pipeline(c) || !c.train.num_microbatches) return;
  const int64_t pp = c.dist.pipeline_model_parallel_size, count = *c.train.num_microbatches;
  if (c.dist.pipeline_schedule == PipelineSchedule::zb_v && count < 2 * pp - 1)
    report
        .warning("with " + counted(count, "micro-batch") + ", the bubble of zb_v is not filled: " +
                 to_text(2 * pp - 1) + " are needed on " + counted(pp, "pipeline rank"))
        .help("choose a larger train.global_batch_size, or fewer pipeline stages");
  if (virtual_stages(c) > 1 || count >= pp) return;
  report
      .warning("with " + counted(count, "micro-batch") + ", a pipeline of " + counted(pp, "stage") +
               " is idle for " + to_text(100 * (pp - 1) / (count + pp - 1)) +
               " % of the time (pipeline bubble)")
      .help("choose a larger train.global_batch_size, or fewer pipeline stages");
}

// Fields of Megatron that name a choice which this engine does not have to make.
RULE("R0319", p2p_options_without_effect,
     "variable_seq_lengths and batch_p2p_comm do not change how stages exchange tensors",
     "dist.variable_seq_lengths", "comm_overlap.batch_p2p_comm", "dist.pipeline_model_parallel_size",
     "dist.virtual_pipeline_model_parallel_size") {
  if (!has_pipeline(c)) return;
  if (c.dist.variable_seq_lengths)
    report
        .warning(
            "`dist.variable_seq_lengths` has no effect: stages exchange micro-batches of any length as they "
            "are")
        .at("dist.variable_seq_lengths")
        .help("remove it");
  const bool usual = virtual_stages(c) == 1;
  if (c.comm_overlap.batch_p2p_comm && *c.comm_overlap.batch_p2p_comm != usual)
    report
        .warning(
            "`comm_overlap.batch_p2p_comm` has no effect: MPI sends the same messages one by one or batched")
        .at("comm_overlap.batch_p2p_comm")
        .help("remove it")
        .if_given();
}

RULE("R0316", deferred_embedding_needs_pipeline, "defer_embedding_wgrad_compute needs pipeline parallelism",
     "comm_overlap.defer_embedding_wgrad_compute", "dist.pipeline_model_parallel_size") {
  if (!c.comm_overlap.defer_embedding_wgrad_compute || has_pipeline(c)) return;
  report
      .error(
          "`comm_overlap.defer_embedding_wgrad_compute` fills the pipeline's last bubble, but "
          "`dist.pipeline_model_parallel_size` is 1")
      .help("set comm_overlap.defer_embedding_wgrad_compute=false");
}

RULE("R0317", schedule_has_flush, "every schedule finishes all micro-batches before the update",
     "dist.pipeline_schedule") {
  if (c.dist.pipeline_schedule != PipelineSchedule::pipedream) return;
  report
      .error(
          "`dist.pipeline_schedule` pipedream does not flush the pipeline before the update, so that "
          "gradients are computed with stale weights")
      .help(virtual_stages(c) > 1 ? "nearest exact schedule: interleaved_1f1b"
                                  : "nearest exact schedule: 1f1b");
}

RULE("R0318", schedule_fits_virtual_stages,
     "interleaved_1f1b is for virtual stages, zb_v for two of them on each rank, and only these",
     "dist.pipeline_schedule", "dist.virtual_pipeline_model_parallel_size") {
  const auto schedule = c.dist.pipeline_schedule;
  if (!schedule || !has_pipeline(c) || schedule == PipelineSchedule::pipedream) return;
  if (schedule == PipelineSchedule::zb_v) {
    if (virtual_stages(c) != 2)
      report
          .error("`dist.pipeline_schedule` zb_v needs 2 virtual stages on each rank, not " +
                 to_text(virtual_stages(c)))
          .help("set dist.virtual_pipeline_model_parallel_size=2 and give 2 stages for each pipeline rank");
    return;
  }
  const bool interleaved = schedule == PipelineSchedule::interleaved;
  if (interleaved == (virtual_stages(c) > 1)) return;
  report
      .error("`dist.pipeline_schedule` " + std::string(enum_name(*schedule)) +
             (interleaved ? " needs virtual stages" : " cannot order ") +
             (interleaved ? "" : to_text(virtual_stages(c)) + " virtual stages"))
      .help(interleaved
                ? "set dist.virtual_pipeline_model_parallel_size to 2 or more, or dist.pipeline_schedule=1f1b"
                : "set dist.pipeline_schedule=interleaved_1f1b");
}

RULE("R0320", v_shape_divides_evenly,
     "zb_v excludes sizes of the first and last pipeline stage, which one rank holds",
     "dist.pipeline_schedule", "dist.num_layers_in_first_pipeline_stage",
     "dist.num_layers_in_last_pipeline_stage") {
  if (!has_pipeline(c) || c.dist.pipeline_schedule != PipelineSchedule::zb_v || !uneven_ends(c)) return;
  report
      .error(
          "`dist.pipeline_schedule` zb_v has the first and the last stage on the same rank: sizes of the "
          "first or last pipeline stage do not say how the layers of a rank are divided")
      .help("give the stages in full with dist.pipeline_model_parallel_layout");
}

}  // namespace

}  // namespace capstan::config
