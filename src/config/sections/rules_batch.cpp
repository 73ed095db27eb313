// Batch sizes, length of the run, sequence length and sources of data.
#include <cmath>

#include "base/text.hpp"
#include "config/sections/batch_ramp.hpp"
#include "config/sections/data_sources.hpp"
#include "config/sections/rule_tools.hpp"

namespace capstan::config {

RULES_OF_FILE(batch_rules)

namespace {

RULE("R0201", global_batch_divisible,
     "the global batch is a multiple of micro-batch size * data parallelism; the quotient is the number of "
     "micro-batches. With decrease_batch_size_if_needed it is at least one micro-batch of each rank",
     "train.global_batch_size", "train.micro_batch_size", "dist.data_parallel_size",
     "train.decrease_batch_size_if_needed") {
  if (!c.train.global_batch_size || !c.dist.data_parallel_size) return;
  const int64_t together = c.train.micro_batch_size * *c.dist.data_parallel_size;
  const int64_t batch = *c.train.global_batch_size;
  if (batch % together == 0) return;
  if (c.train.decrease_batch_size_if_needed) {
    if (batch < together)
      report
          .error("`train.global_batch_size` " + to_text(batch) +
                 " is less than one micro-batch of each rank, micro_batch_size * data_parallel_size = " +
                 product_text({c.train.micro_batch_size, *c.dist.data_parallel_size}) +
                 ", and cannot be rounded down")
          .operand("micro_batch_size * data_parallel_size", to_text(together))
          .help("smallest legal global_batch_size: " + to_text(together));
    return;
  }
  std::string help = "nearest legal global_batch_size: " + nearest_multiples(batch, together);
  if (batch % *c.dist.data_parallel_size == 0)
    help += "; or micro_batch_size: " +
            nearest_divisors(c.train.micro_batch_size, batch / *c.dist.data_parallel_size);
  if (batch > together)
    help += "; or train.decrease_batch_size_if_needed=true, which trains with " +
            to_text(batch / together * together);
  report
      .error("`train.global_batch_size` " + to_text(batch) +
             " is not a multiple of micro_batch_size * data_parallel_size = " +
             product_text({c.train.micro_batch_size, *c.dist.data_parallel_size}))
      .operand("micro_batch_size * data_parallel_size", to_text(together))
      .help(help);
}

RULE("R0202", micro_batches_agree, "a given number of micro-batches agrees with the batch sizes",
     "train.num_microbatches", "train.global_batch_size", "train.micro_batch_size",
     "dist.data_parallel_size") {
  if (!c.train.num_microbatches || !c.train.global_batch_size || !c.dist.data_parallel_size) return;
  const int64_t together = c.train.micro_batch_size * *c.dist.data_parallel_size;
  // The rule global_batch_divisible reports a batch that does not divide.
  if (!c.train.decrease_batch_size_if_needed && *c.train.global_batch_size % together != 0) return;
  if (*c.train.num_microbatches == *c.train.global_batch_size / together) return;
  report
      .error("`train.num_microbatches` " + to_text(*c.train.num_microbatches) +
             " is not global_batch_size / " +
             "(micro_batch_size * data_parallel_size) = " + to_text(*c.train.global_batch_size / together))
      .help("leave train.num_microbatches unset; it follows from the batch sizes");
}

RULE("R0203", eval_batch_divisible,
     "the evaluation batch is a multiple of its micro-batch size * data parallelism",
     "validation.eval_global_batch_size", "validation.eval_micro_batch_size", "dist.data_parallel_size",
     "train.decrease_batch_size_if_needed") {
  const auto& v = c.validation;
  if (!v.eval_interval || !v.eval_global_batch_size || !v.eval_micro_batch_size || !c.dist.data_parallel_size)
    return;
  // The rule global_batch_divisible reports this.
  if (v.eval_global_batch_size == c.train.global_batch_size &&
      *v.eval_micro_batch_size == c.train.micro_batch_size)
    return;
  const int64_t together = *v.eval_micro_batch_size * *c.dist.data_parallel_size;
  if (*v.eval_global_batch_size % together == 0) return;
  if (c.train.decrease_batch_size_if_needed && *v.eval_global_batch_size > together) return;
  report
      .error("`validation.eval_global_batch_size` " + to_text(*v.eval_global_batch_size) +
             " is not a multiple of eval_micro_batch_size * data_parallel_size = " +
             product_text({*v.eval_micro_batch_size, *c.dist.data_parallel_size}))
      .help("nearest legal eval_global_batch_size: " +
            nearest_multiples(*v.eval_global_batch_size, together));
}

RULE("R0204", length_given, "exactly one of train_iters, train_samples and epochs sets the length of the run",
     "train.train_iters", "train.train_samples", "train.epochs", "train.global_batch_size",
     "train.rampup_batch_size") {
  const auto& t = c.train;
  if (t.epochs) {
    if (t.train_iters || t.train_samples)
      report
          .error(std::string("`train.epochs` and `train.") +
                 (t.train_samples ? "train_samples" : "train_iters") + "` both set the length of the run")
          .at("train.epochs")
          .operand(t.train_samples ? "train.train_samples" : "train.train_iters")
          .help(t.train_samples
                    ? "give one of the two: train.train_samples=null with epochs, or train.epochs=null"
                    : "give one of the two: train.train_iters=null with epochs, or train.epochs=null");
  } else if (!t.train_iters && !t.train_samples) {
    report
        .error(
            "none of `train.train_iters`, `train.train_samples` and `train.epochs` sets the length of the "
            "run")
        .operand("train.train_iters")
        .operand("train.train_samples")
        .operand("train.epochs")
        .help("set train.train_iters");
  } else if (const auto ramp = BatchRamp::of(c); t.train_iters && t.train_samples && ramp) {
    const int64_t steps = ramp->steps_in(*t.train_samples);
    if (steps == *t.train_iters) return;
    const std::string samples = to_text(*t.train_samples);
    report
        .error("`train.train_iters` " + to_text(*t.train_iters) + " and `train.train_samples` " + samples +
               " disagree: " +
               (ramp->grows() ? "with `train.rampup_batch_size` the samples make " + to_text(steps) + " steps"
                              : samples + " / " + to_text(ramp->size_at(0)) + " = " + to_text(steps)))
        .operand("train.train_iters")
        .operand("train.train_samples")
        .operand(ramp->grows() ? "train.rampup_batch_size" : "train.global_batch_size")
        .help("give one of the two, and unset the other");
  }
}

RULE("R0221", epochs_of_real_data, "train.epochs needs a dataset with an end", "train.epochs",
     "dataset.kind") {
  if (c.train.epochs && c.dataset.kind == DatasetKind::mock)
    report.error("`train.epochs` counts passes over data, and generated data has no end")
        .at("train.epochs")
        .help("for example, set train.train_iters=100 train.epochs=null");
}

RULE("R0222", megatron_order_seed, "Megatron's sample order accepts 32-bit seeds only", "dataset.random_seed",
     "dataset.sample_order") {
  if (c.dataset.kind == DatasetKind::gpt && c.dataset.sample_order == SampleOrder::megatron &&
      c.dataset.random_seed > int64_t{0xffffffff})
    report
        .error("`dataset.random_seed` " + to_text(c.dataset.random_seed) +
               " is above 4294967295, the largest seed of Megatron's order")
        .at("dataset.random_seed")
        .help("choose a smaller seed, or set dataset.sample_order=capstan");
}

RULE("R0205", run_has_a_step, "a run has at least one step", "train.train_samples", "train.global_batch_size",
     "train.rampup_batch_size") {
  const auto ramp = BatchRamp::of(c);
  if (!c.train.train_samples || !ramp) return;
  const int64_t first = ramp->size_at(0);
  if (*c.train.train_samples >= first) return;
  report
      .error("`train.train_samples` " + to_text(*c.train.train_samples) + " is less than one step of " +
             to_text(first) + " samples")
      .help("nearest legal train_samples: " + to_text(first));
}

RULE("R0223", ramp_reaches_batch_size,
     "a growing batch begins below global_batch_size and reaches it in equal steps",
     "train.rampup_batch_size", "train.global_batch_size") {
  const std::string problem = BatchRamp::problem(c.train);
  if (problem.empty()) return;
  report.error("`train.rampup_batch_size` " + problem)
      .at("train.rampup_batch_size")
      .help("[start, increment, samples], where global_batch_size is start plus a multiple of increment");
}

RULE("R0224", ramp_sizes_divisible,
     "every size of a growing batch is a multiple of micro-batch size * data parallelism. With "
     "decrease_batch_size_if_needed the first is at least one micro-batch of each rank",
     "train.rampup_batch_size", "train.micro_batch_size", "dist.data_parallel_size",
     "train.decrease_batch_size_if_needed") {
  const std::vector<int64_t>& given = c.train.rampup_batch_size;
  if (given.empty() || !c.dist.data_parallel_size || !BatchRamp::problem(c.train).empty()) return;
  const int64_t together = c.train.micro_batch_size * *c.dist.data_parallel_size;
  if (c.train.decrease_batch_size_if_needed) {
    if (given[0] < together)
      report
          .error(
              "`train.rampup_batch_size` starts with " + to_text(given[0]) +
              " samples, less than one micro-batch of each rank, micro_batch_size * data_parallel_size = " +
              product_text({c.train.micro_batch_size, *c.dist.data_parallel_size}))
          .at("train.rampup_batch_size")
          .help("smallest legal start: " + to_text(together));
    return;
  }
  // If the first two sizes are multiples, all sizes are.
  for (const int64_t size : {given[0], given[0] + given[1]}) {
    if (size % together == 0 || size == *c.train.global_batch_size) continue;
    report
        .error("`train.rampup_batch_size` makes steps of " + to_text(size) +
               " samples, not a multiple of micro_batch_size * data_parallel_size = " +
               product_text({c.train.micro_batch_size, *c.dist.data_parallel_size}))
        .at("train.rampup_batch_size")
        .help("nearest legal start: " + nearest_multiples(given[0], together) +
              "; nearest legal increment: " + nearest_multiples(given[1], together));
    return;
  }
}

RULE("R0225", ramp_counts_samples, "with rampup_batch_size, train_samples sets the length of the run",
     "train.rampup_batch_size", "train.train_samples") {
  if (c.train.rampup_batch_size.empty() || c.train.train_samples) return;
  report
      .error(std::string("`train.rampup_batch_size` needs the length of the run in samples, not in ") +
             (c.train.epochs ? "passes over the data" : "iterations"))
      .at("train.rampup_batch_size")
      .help(c.train.epochs ? "train.epochs=null and train.train_samples=N"
                           : "train.train_iters=null and train.train_samples=N");
}

RULE("R0206", one_source_of_data,
     "a gpt dataset has exactly one source: data_path, blend, or a blend for each split", "dataset.data_path",
     "dataset.blend", "dataset.train_blend") {
  const auto& d = c.dataset;
  if (d.kind != DatasetKind::gpt) return;
  const bool per_split = !d.train_blend.empty() || !d.valid_blend.empty() || !d.test_blend.empty();
  const int given = (d.data_path.empty() ? 0 : 1) + (d.blend.empty() ? 0 : 1) + (per_split ? 1 : 0);
  if (given == 1) return;
  if (given == 0)
    report.error("no data: neither `dataset.data_path` nor `dataset.blend` names a dataset")
        .help(
            "set dataset.data_path=PREFIX (what `capstan data prepare` wrote, without .bin), or "
            "dataset=mock");
  else
    report
        .error(
            "data is named in more than one place: data_path, blend and train/valid/test_blend exclude each "
            "other")
        .help("keep one of them, for instance with `~dataset.data_path`");
}

RULE("R0207", data_paths_alternate, "data_path is a list of prefixes, or of weights and prefixes in turn",
     "dataset.data_path") {
  if (c.dataset.kind != DatasetKind::gpt) return;
  if (const std::string problem = data_path_problem(c.dataset.data_path); !problem.empty())
    report.error("`dataset.data_path` " + problem).help("write [a, b], or with weights [0.3, a, 0.7, b]");
}

RULE("R0208", blend_weights_positive, "weights of a blend are positive", "dataset.blend",
     "dataset.train_blend", "dataset.valid_blend", "dataset.test_blend") {
  if (c.dataset.kind != DatasetKind::gpt) return;
  const std::pair<const char*, const Blend*> blends[] = {{"dataset.blend", &c.dataset.blend},
                                                         {"dataset.train_blend", &c.dataset.train_blend},
                                                         {"dataset.valid_blend", &c.dataset.valid_blend},
                                                         {"dataset.test_blend", &c.dataset.test_blend}};
  for (const auto& [path, blend] : blends)
    for (const auto& [prefix, weight] : *blend)
      if (!(weight > 0) || !std::isfinite(weight))
        report.error("the weight of `" + prefix + "` in `" + path + "` is " + to_text(weight))
            .at(path)
            .help("choose a positive weight; leave a dataset out to give it none");
}

RULE("R0209", split_with_one_source, "split divides one source of data; blends for each split replace it",
     "dataset.split", "dataset.train_blend") {
  const auto& d = c.dataset;
  if (d.kind != DatasetKind::gpt) return;
  const bool per_split = !d.train_blend.empty() || !d.valid_blend.empty() || !d.test_blend.empty();
  if (d.split && per_split)
    report.error("`dataset.split` and blends for each split exclude each other").help("unset dataset.split");
}

RULE("R0210", split_is_three_shares, "split consists of three proportions, the first above 0",
     "dataset.split") {
  if (c.dataset.kind == DatasetKind::mock || !c.dataset.split) return;
  const auto shares = split_shares(*c.dataset.split);
  if (!shares)
    report.error("`dataset.split` " + in_quotes(*c.dataset.split) + " is not three proportions")
        .help("write the proportions of train, validation and test: 969,30,1 or 0.9,0.1,0");
  else if ((*shares)[0] <= 0)
    report.error("`dataset.split` " + *c.dataset.split + " leaves no training data")
        .help("the first proportion must be above 0");
}

RULE("R0211", validation_has_data, "validation.eval_interval needs validation data",
     "validation.eval_interval", "dataset.split", "dataset.valid_blend", "dataset.valid_files") {
  const auto& d = c.dataset;
  if (d.kind == DatasetKind::mock || !c.validation.eval_interval) return;
  if (d.split) {
    const auto shares = split_shares(*d.split);
    if (shares && (*shares)[0] > 0 && (*shares)[1] <= 0)
      report
          .error("`validation.eval_interval` is set, but `dataset.split` " + *d.split +
                 " leaves no validation data")
          .help("for example, set dataset.split=99,1,0, or validation.eval_interval=null");
  } else if (!d.train_blend.empty() && d.valid_blend.empty()) {
    report.error("`validation.eval_interval` is set, but `dataset.valid_blend` is empty")
        .help("set dataset.valid_blend, or validation.eval_interval=null");
  } else if (!d.test_files.empty() && d.valid_files.empty()) {
    report.error("`validation.eval_interval` is set, but `dataset.valid_files` is empty beside test_files")
        .help("set dataset.valid_files, or validation.eval_interval=null");
  }
}

RULE("R0226", validation_data_is_read, "validation data is read only if validation.eval_interval is set",
     "validation.eval_interval", "dataset.valid_files", "dataset.valid_blend") {
  const auto& d = c.dataset;
  if (c.validation.eval_interval || (d.valid_files.empty() && d.valid_blend.empty())) return;
  const std::string field = d.valid_files.empty() ? "dataset.valid_blend" : "dataset.valid_files";
  report.warning("`" + field + "` is not read: `validation.eval_interval` is null")
      .at(field)
      .operand("validation.eval_interval")
      .help("set validation.eval_interval, or leave out " + field);
}

RULE("R0217", fine_tuning_needs_train_files, "fine-tuning needs dataset.train_files", "dataset.train_files") {
  if (c.dataset.kind != DatasetKind::sft || !c.dataset.train_files.empty()) return;
  report.error("no data: `dataset.train_files` names no file")
      .help("set dataset.train_files=FILE.jsonl, with a sample on each line");
}

RULE("R0218", split_or_files, "split divides the samples of train_files; files for each split replace it",
     "dataset.split", "dataset.valid_files", "dataset.test_files") {
  const auto& d = c.dataset;
  if (d.kind != DatasetKind::sft || !d.split || (d.valid_files.empty() && d.test_files.empty())) return;
  report.error("`dataset.split` and files for each split exclude each other").help("unset dataset.split");
}

RULE("R0219", samples_need_a_tokenizer, "fine-tuning samples are text, which needs a tokenizer",
     "tokenizer.tokenizer_type", "dataset.kind") {
  if (c.dataset.kind != DatasetKind::sft || c.tokenizer.tokenizer_type != TokenizerKind::none) return;
  report.error("`dataset.kind` sft reads text, but `tokenizer.tokenizer_type` is none")
      .help("choose the model's tokenizer, for instance tokenizer=huggingface");
}

RULE("R0220", text_samples_have_no_turns,
     "samples of format text have no turns, so the loss covers all tokens", "dataset.loss_mode",
     "dataset.format") {
  const auto& d = c.dataset;
  if (d.kind != DatasetKind::sft || d.format != SampleFormat::text || d.loss_mode != LossMode::last_turn)
    return;
  report.error("`dataset.loss_mode` last_turn, but samples of format text have no turns")
      .help("set dataset.loss_mode=all");
}

RULE("R0212", split_blends_complete, "blends for each split include one for training", "dataset.train_blend",
     "dataset.valid_blend", "dataset.test_blend") {
  const auto& d = c.dataset;
  if (d.kind != DatasetKind::gpt || !d.train_blend.empty() || (d.valid_blend.empty() && d.test_blend.empty()))
    return;
  report.error("`dataset.train_blend` is missing beside the blends of the other splits")
      .help("set dataset.train_blend");
}

RULE("R0213", context_divides_sequence,
     "with context parallelism the sequence is a multiple of 2 * context_parallel_size (balanced chunks)",
     "model.seq_length", "dist.context_parallel_size") {
  const int64_t cp = c.dist.context_parallel_size;
  if (cp == 1 || c.model.seq_length % (2 * cp) == 0) return;
  report
      .error("`model.seq_length` " + to_text(c.model.seq_length) +
             " is not a multiple of 2 * context parallelism = " + to_text(2 * cp))
      .help("nearest legal seq_length: " + nearest_multiples(c.model.seq_length, 2 * cp));
}

RULE("R0214", tensor_divides_sequence,
     "sequence parallelism splits each context chunk evenly over the tensor-parallel ranks",
     "model.seq_length", "dist.tensor_model_parallel_size", "dist.context_parallel_size",
     "dist.sequence_parallel") {
  if (!c.dist.sequence_parallel) return;
  const auto ranks = product_of({c.dist.tensor_model_parallel_size, c.dist.context_parallel_size});
  if (!ranks || c.model.seq_length % *ranks == 0) return;
  report
      .error("`model.seq_length` " + to_text(c.model.seq_length) +
             " is not a multiple of tensor * context parallelism = " + to_text(*ranks) +
             ", over which sequence_parallel splits it")
      .help("nearest legal seq_length: " + nearest_multiples(c.model.seq_length, *ranks));
}

RULE("R0215", positions_cover_sequence, "max_position_embeddings is at least seq_length",
     "model.max_position_embeddings", "model.seq_length") {
  if (!c.model.max_position_embeddings || *c.model.max_position_embeddings >= c.model.seq_length) return;
  report
      .error("`model.max_position_embeddings` " + to_text(*c.model.max_position_embeddings) +
             " is less than `model.seq_length` " + to_text(c.model.seq_length))
      .help("set model.max_position_embeddings to " + to_text(c.model.seq_length) + " or more");
}

RULE("R0216", documents_need_their_end,
     "settings that depend on the ends of documents need a tokenizer with an end-of-document token",
     "tokenizer.tokenizer_type", "dataset.reset_position_ids", "dataset.reset_attention_mask",
     "dataset.eod_mask_loss") {
  const auto& d = c.dataset;
  if (d.kind != DatasetKind::gpt || c.tokenizer.tokenizer_type != TokenizerKind::none) return;
  if (!d.reset_position_ids && !d.reset_attention_mask && !d.eod_mask_loss) return;
  report
      .error(
          "reset_position_ids, reset_attention_mask and eod_mask_loss need to know the end-of-document "
          "token, but `tokenizer.tokenizer_type` is none")
      .help("choose the tokenizer that the data was prepared with, for instance tokenizer=huggingface");
}

}  // namespace

}  // namespace capstan::config
