// Checkpoints, tokenizer, adapters and guards of a run.
#include "config/sections/rule_tools.hpp"

namespace capstan::config {

namespace {

constexpr int64_t kByteVocabulary = 257;  // one id for each byte, one for the end of a document

void one_start(const Config& c, RuleReport& report) {
  if (!c.checkpoint.load || !c.checkpoint.pretrained_checkpoint) return;
  report
      .error(
          "`checkpoint.load` continues a run, `checkpoint.pretrained_checkpoint` starts one from weights; "
          "they "
          "exclude each other")
      .help("keep one of them");
}

void retained_are_saved(const Config& c, RuleReport& report) {
  const auto& k = c.checkpoint;
  if (!k.save_retain_interval) return;
  if (!k.save_interval)
    report.error("`checkpoint.save_retain_interval` needs `checkpoint.save_interval`")
        .help("set checkpoint.save_interval");
  else if (*k.save_retain_interval % *k.save_interval != 0)
    report
        .error("`checkpoint.save_retain_interval` " + text_of(*k.save_retain_interval) +
               " is not a multiple of `checkpoint.save_interval` " + text_of(*k.save_interval))
        .help("nearest legal save_retain_interval: " +
              nearest_multiples(*k.save_retain_interval, *k.save_interval));
}

void some_checkpoint_is_kept(const Config& c, RuleReport& report) {
  if (c.checkpoint.most_recent_k != 0) return;
  report.error("`checkpoint.most_recent_k` 0 would keep no checkpoint").help("1 or more, or -1 for all");
}

void adapters_need_a_model(const Config& c, RuleReport& report) {
  if (!c.peft || c.checkpoint.pretrained_checkpoint || c.checkpoint.load) return;
  report
      .error(
          "`peft` trains adapters beside frozen weights, but `checkpoint.pretrained_checkpoint` names none")
      .help("set checkpoint.pretrained_checkpoint to a run or a checkpoint");
}

void adapters_have_targets(const Config& c, RuleReport& report) {
  if (!c.peft || !c.peft->target_modules.empty()) return;
  report.error("`peft.target_modules` is empty")
      .help("for instance [linear_qkv, linear_proj, linear_fc1, linear_fc2]");
}

void tokenizer_has_files(const Config& c, RuleReport& report) {
  const auto& t = c.tokenizer;
  if (t.tokenizer_type == TokenizerKind::huggingface && !t.tokenizer_model)
    report.error("`tokenizer.tokenizer_type` huggingface needs `tokenizer.tokenizer_model`")
        .help("set tokenizer.tokenizer_model=tokenizer.json");
  if (t.tokenizer_type == TokenizerKind::gpt2_bpe && (!t.vocab_file || !t.merge_file))
    report
        .error("`tokenizer.tokenizer_type` gpt2_bpe needs `tokenizer.vocab_file` and `tokenizer.merge_file`")
        .help("set tokenizer.vocab_file=vocab.json tokenizer.merge_file=merges.txt");
}

void bytes_fit_vocabulary(const Config& c, RuleReport& report) {
  if (c.tokenizer.tokenizer_type != TokenizerKind::byte || c.model.vocab_size >= kByteVocabulary) return;
  report
      .error("`model.vocab_size` " + text_of(c.model.vocab_size) + " is less than the " +
             text_of(kByteVocabulary) + " ids of `tokenizer.tokenizer_type` byte")
      .help("set model.vocab_size=" + text_of(kByteVocabulary));
}

void trace_has_steps(const Config& c, RuleReport& report) {
  const auto& p = c.profiling;
  if (!p.trace || p.profile_step_start < p.profile_step_end) return;
  report
      .error("`profiling.profile_step_start` " + text_of(p.profile_step_start) +
             " is not below `profiling.profile_step_end` " + text_of(p.profile_step_end))
      .help("set profiling.profile_step_end=" + text_of(p.profile_step_start + 2));
}

void traced_ranks_exist(const Config& c, RuleReport& report) {
  if (!c.profiling.trace) return;
  for (const int64_t rank : c.profiling.profile_ranks)
    if (rank < 0 || rank >= c.dist.world_size)
      report
          .error("`profiling.profile_ranks` names rank " + text_of(rank) + " of a world of " +
                 text_of(c.dist.world_size))
          .help("ranks from 0 to " + text_of(c.dist.world_size - 1));
}

void rewind_needs_checkpoints(const Config& c, RuleReport& report) {
  const bool rewinds = c.resilience.loss_spike_action == SpikeAction::rewind ||
                       c.resilience.grad_norm_spike_action == SpikeAction::rewind;
  if (!rewinds || (c.checkpoint.save_interval && c.checkpoint.save_optim)) return;
  report.error("rewinding after a spike needs checkpoints to go back to, with optimizer state")
      .help("set checkpoint.save_interval, and checkpoint.save_optim=true");
}

void checkpoints_can_resume(const Config& c, RuleReport& report) {
  if (!c.checkpoint.load_optim || c.checkpoint.save_optim || !c.checkpoint.save_interval) return;
  report.lint("`checkpoint.save_optim` is false: a run that stops cannot continue from its checkpoints")
      .help("set checkpoint.save_optim=true, unless weights are all that is wanted");
}

}  // namespace

void register_run_rules(Schema& s) {
  s.rule<Config>({"R0901",
                  "one_start",
                  "a run continues another or starts from weights, not both",
                  {"checkpoint.load", "checkpoint.pretrained_checkpoint"}},
                 one_start);
  s.rule<Config>({"R0902",
                  "retained_are_saved",
                  "checkpoints that are kept for good are among those saved",
                  {"checkpoint.save_retain_interval", "checkpoint.save_interval"}},
                 retained_are_saved);
  s.rule<Config>(
      {"R0903", "some_checkpoint_is_kept", "at least one checkpoint is kept", {"checkpoint.most_recent_k"}},
      some_checkpoint_is_kept);
  s.rule<Config>({"R0904",
                  "adapters_need_a_model",
                  "adapters need the weights of a trained model",
                  {"checkpoint.pretrained_checkpoint"}},
                 adapters_need_a_model);
  s.rule<Config>({"R0905", "adapters_have_targets", "adapters have layers to adapt", {"peft.target_modules"}},
                 adapters_have_targets);
  s.rule<Config>(
      {"R0906", "tokenizer_has_files", "a tokenizer has the files of its kind", {"tokenizer.tokenizer_type"}},
      tokenizer_has_files);
  s.rule<Config>({"R0907",
                  "bytes_fit_vocabulary",
                  "the byte tokenizer's ids fit the vocabulary",
                  {"model.vocab_size", "tokenizer.tokenizer_type"}},
                 bytes_fit_vocabulary);
  s.rule<Config>({"R0908",
                  "trace_has_steps",
                  "a trace has at least one step",
                  {"profiling.profile_step_start", "profiling.profile_step_end"}},
                 trace_has_steps);
  s.rule<Config>({"R0909",
                  "traced_ranks_exist",
                  "traced ranks are ranks of the world",
                  {"profiling.profile_ranks", "dist.world_size"}},
                 traced_ranks_exist);
  s.rule<Config>(
      {"R0910",
       "rewind_needs_checkpoints",
       "rewinding needs checkpoints with optimizer state",
       {"resilience.loss_spike_action", "resilience.grad_norm_spike_action", "checkpoint.save_interval"}},
      rewind_needs_checkpoints);
  s.rule<Config>({"R0911",
                  "checkpoints_can_resume",
                  "checkpoints hold what a resume needs",
                  {"checkpoint.save_optim", "checkpoint.save_interval"}},
                 checkpoints_can_resume);
}

}  // namespace capstan::config
