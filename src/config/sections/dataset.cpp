#include "config/sections/sections.hpp"

namespace capstan::config {

namespace {
bool evaluates(const Config& c) {
  return c.validation.eval_interval.has_value();
}
}  // namespace

void describe(Section<DatasetConfig>& s) {
  using D = DatasetConfig;
  s.doc("training text").variants("kind");
  s.field("kind", &D::kind).doc("where samples come from").alias("type");
  s.field("data_path", &D::data_path)
      .doc(
          "prefixes of indexed datasets (without .bin/.idx); with weights in front of them: [0.3, a, 0.7, b]")
      .effect(Effect::math)
      .scalar_ok()
      .only_for({"gpt"})
      .example("[data/books_text_document]");
  s.field("blend", &D::blend)
      .doc("prefix: weight, for each dataset (prefixes relative to the current directory)")
      .only_for({"gpt"})
      .example("{data/books_text_document: 0.3, data/web_text_document: 0.7}");
  s.field("train_blend", &D::train_blend)
      .doc("as blend, for training alone, instead of split")
      .only_for({"gpt"})
      .known_as("blend_per_split")
      .known_as("train_data_path");
  s.field("valid_blend", &D::valid_blend)
      .doc("as blend, for validation alone")
      .only_for({"gpt"})
      .known_as("valid_data_path");
  s.field("test_blend", &D::test_blend)
      .doc("as blend, for the test at the end of the run")
      .only_for({"gpt"})
      .used_when<Config>("`validation.eval_interval` is set", evaluates)
      .known_as("test_data_path");
  s.field("split", &D::split)
      .doc(
          "shares of the documents or samples for train, validation and test; the test share is evaluated "
          "once, at the end")
      .only_for({"gpt", "sft"})
      .example("969,30,1");
  s.field("sample_order", &D::sample_order)
      .doc("order of the samples; `recipe import` takes megatron for configurations of Megatron-LM and NeMo")
      .only_for({"gpt"});
  s.field("path_to_cache", &D::path_to_cache)
      .doc(
          "directory that keeps built indices of the order of samples, so that a later start need not build "
          "them; "
          "null: none is kept")
      .effect(Effect::io)
      .only_for({"gpt"})
      .known_as("data_cache_path");
  s.field("reset_position_ids", &D::reset_position_ids)
      .doc("positions start again after each end of document")
      .only_for({"gpt"});
  s.field("reset_attention_mask", &D::reset_attention_mask)
      .doc("attention does not cross an end of document")
      .only_for({"gpt"});
  s.field("eod_mask_loss", &D::eod_mask_loss).doc("no loss on end-of-document tokens").only_for({"gpt"});
  s.field("train_files", &D::train_files)
      .doc("JSONL files of training samples")
      .scalar_ok()
      .only_for({"sft"})
      .example("[data/chats.jsonl]");
  s.field("valid_files", &D::valid_files)
      .doc("JSONL files for validation, instead of split")
      .scalar_ok()
      .only_for({"sft"});
  s.field("test_files", &D::test_files)
      .doc("JSONL files for the test at the end of the run, instead of split")
      .scalar_ok()
      .only_for({"sft"})
      .used_when<Config>("`validation.eval_interval` is set", evaluates);
  s.field("format", &D::format).doc("what a line of the files holds").only_for({"sft"});
  s.field("loss_mode", &D::loss_mode).doc("tokens that are learned").only_for({"sft"});
  s.field("packing", &D::packing)
      .doc(
          "several samples in a row of model.seq_length tokens, which do not see each other; false: one, "
          "padded")
      .only_for({"sft"})
      .known_as("sample_packing");
  s.field("too_long", &D::too_long)
      .doc("what happens to samples longer than model.seq_length")
      .only_for({"sft"});
  s.field("on_bad_line", &D::on_bad_line)
      .doc("what happens to lines that are no sample, for instance broken JSON or a missing key")
      .only_for({"sft"});
  s.field("max_train_samples", &D::max_train_samples)
      .doc("train on the first so many samples; null: on all")
      .unit("samples")
      .count()
      .min(1)
      .only_for({"sft"});
  s.field("random_seed", &D::random_seed).doc("seed of the samples' order").min(0);
  s.field("num_workers", &D::num_workers)
      .doc("threads that read ahead; 0: reading is part of the step; the order is the same")
      .unit("threads")
      .range(0, 256)
      .effect(Effect::perf);
}

}  // namespace capstan::config
