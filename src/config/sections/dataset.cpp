#include "config/sections/conditions.hpp"
#include "config/sections/sections.hpp"

namespace capstan::config {

namespace {
bool has_positions(const Config& c) {
  return c.model.position_embedding_type != PositionEmbedding::none;
}
}  // namespace

void describe(Section<DatasetConfig>& s) {
  using D = DatasetConfig;
  s.doc("training, validation and test data").variants("kind");
  s.field("kind", &D::kind).doc("type of dataset").alias("type");
  s.field("data_path", &D::data_path)
      .doc(
          "prefixes of indexed datasets (paths without .bin/.idx), optionally each preceded by its weight: "
          "[0.3, a, 0.7, b]")
      .effect(Effect::math)
      .scalar_ok()
      .only_for({"gpt"})
      .example("[data/books_text_document]");
  s.field("blend", &D::blend)
      .doc("sampling weight of each dataset, by prefix (relative to the current directory)")
      .only_for({"gpt"})
      .example("{data/books_text_document: 0.3, data/web_text_document: 0.7}");
  s.field("train_blend", &D::train_blend)
      .doc("blend for training only, instead of split")
      .only_for({"gpt"})
      .known_as("blend_per_split")
      .known_as("train_data_path");
  s.field("valid_blend", &D::valid_blend)
      .doc("blend for validation only")
      .only_for({"gpt"})
      .known_as("valid_data_path");
  s.field("test_blend", &D::test_blend)
      .doc("blend for the test evaluation at the end of the run")
      .only_for({"gpt"})
      .used_when<Config>("`validation.eval_interval` is set", evaluates)
      .known_as("test_data_path");
  s.field("split", &D::split)
      .doc(
          "proportions for training, validation and test (evaluated once, at the end); with "
          "validation.eval_interval=null only the first is used")
      .only_for({"gpt", "sft"})
      .example("969,30,1");
  s.field("sample_order", &D::sample_order)
      .doc(
          "shuffling scheme of the samples; `recipe import` selects megatron for configurations of "
          "Megatron-LM and NeMo")
      .only_for({"gpt"});
  s.field("path_to_cache", &D::path_to_cache)
      .doc(
          "directory that caches the document, sample and shuffle indices between runs; null: they are "
          "rebuilt at each start")
      .effect(Effect::io)
      .only_for({"gpt"})
      .known_as("data_cache_path");
  s.field("reset_position_ids", &D::reset_position_ids)
      .doc("restart position ids after each end-of-document token")
      .only_for({"gpt"})
      .used_when<Config>("`model.position_embedding_type` is not none", has_positions);
  s.field("reset_attention_mask", &D::reset_attention_mask)
      .doc("restrict attention to tokens of the same document")
      .only_for({"gpt"});
  s.field("eod_mask_loss", &D::eod_mask_loss)
      .doc("exclude end-of-document tokens from the loss")
      .only_for({"gpt"});
  s.field("train_files", &D::train_files)
      .doc("JSONL files of training samples")
      .scalar_ok()
      .only_for({"sft"})
      .example("[data/chats.jsonl]");
  s.field("valid_files", &D::valid_files)
      .doc("JSONL files of validation samples, instead of split")
      .scalar_ok()
      .only_for({"sft"});
  s.field("test_files", &D::test_files)
      .doc("JSONL files of test samples, evaluated at the end of the run, instead of split")
      .scalar_ok()
      .only_for({"sft"})
      .used_when<Config>("`validation.eval_interval` is set", evaluates);
  s.field("format", &D::format).doc("format of the samples in the JSONL files").only_for({"sft"});
  s.field("loss_mode", &D::loss_mode)
      .doc("tokens that contribute to the loss; samples of format text: every token")
      .only_for({"sft"});
  s.field("packing", &D::packing)
      .doc(
          "pack several samples into one sequence of model.seq_length tokens, without attention between "
          "them; false: one padded sample per sequence")
      .only_for({"sft"})
      .known_as("sample_packing");
  s.field("too_long", &D::too_long)
      .doc("treatment of samples longer than model.seq_length")
      .only_for({"sft"});
  s.field("on_bad_line", &D::on_bad_line)
      .doc("treatment of lines that are not valid samples, for example broken JSON or a missing key")
      .only_for({"sft"});
  s.field("max_train_samples", &D::max_train_samples)
      .doc("use only this many samples from the start of the training data; null: all")
      .unit("samples")
      .count()
      .min(1)
      .only_for({"sft"});
  s.field("random_seed", &D::random_seed).doc("seed of the sample order").min(0);
  s.field("num_workers", &D::num_workers)
      .doc(
          "threads that prefetch batches; 0: batches are read within the step; the order does not depend on "
          "it")
      .unit("threads")
      .range(0, 256)
      .effect(Effect::perf);
}

}  // namespace capstan::config
