// A program that uses Capstan as a library: it resolves a recipe, trains a tiny model on generated tokens
// under a callback, and generates with it.
//
//   embed RUN_DIR                the run must be new
//   mpirun -n 2 embed RUN_DIR    the same on two ranks
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "capstan/config.hpp"
#include "capstan/model.hpp"
#include "capstan/trainer.hpp"

namespace {

capstan::Outcome train(const capstan::Config& config, const char* run_dir, bool report) {
  capstan::TrainOptions options;
  options.run_dir = run_dir;
  options.on_step = [&](const capstan::StepReport& step) {
    if (report)
      std::printf("step %d of %d: loss %.3f, gradient norm %.2f, learning rate %.1e, %.0f tokens/s\n",
                  static_cast<int>(step.step), static_cast<int>(step.total_steps), step.loss, step.grad_norm,
                  step.learning_rate, step.tokens_per_second);
    // Below it, save a checkpoint and stop.
    return step.loss > 0.1;
  };
  options.on_rank_failure = [](const capstan::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    std::_Exit(capstan::exit_code_of(error.code()));
  };
  return capstan::run_training(config, options);
}

void use(capstan::Model model) {
  std::printf("loss of a text: %.3f nats a token\n", model.loss("To be, or not to be").loss);

  const std::vector<int32_t> ids = model.encode("To be");
  const std::vector<float> logits = model.logits(ids);  // [ids.size(), vocab_size]
  const auto last = logits.end() - model.vocab_size();
  std::printf("likeliest token after `To be`: %d\n",
              static_cast<int>(std::max_element(last, logits.end()) - last));

  capstan::GenerateOptions options;
  options.max_tokens = 100;
  options.temperature = 0.8;
  int spaces = 0;
  options.on_token = [&](int32_t, const std::string& text) {
    spaces += static_cast<int>(std::count(text.begin(), text.end(), ' '));
    return spaces < 3;  // enough words
  };
  for (const auto& generated : model.generate_batch({"To be", "Once upon a time"}, options))
    std::printf("%d tokens\n", static_cast<int>(generated.ids.size()));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: embed RUN_DIR\n");
    return 2;
  }
  try {
    const capstan::World world = capstan::launched_world();
    const auto config =
        capstan::Config::resolve("quickstart",
                                 {"dataset=mock", "tokenizer=byte", "mixed_precision=fp32",
                                  "model.vocab_size=257", "model.num_layers=1", "model.hidden_size=64",
                                  "model.ffn_hidden_size=128", "model.seq_length=32", "train.train_iters=8"},
                                 world.size);
    if (!config.ok()) {
      std::fputs(config.diagnostics().c_str(), stderr);
      return 2;
    }
    const capstan::Outcome outcome = train(config, argv[1], world.rank == 0);
    if (world.rank == 0) use(capstan::Model::load(outcome.run_dir));
    return 0;
  } catch (const capstan::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return capstan::exit_code_of(error.code());
  }
}
