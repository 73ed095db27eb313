// Another program that uses Capstan: it resolves a recipe, trains a tiny model on generated tokens, and lets it write.
//
//   embed RUN_DIR                the run must be new
//   mpirun -n 2 embed RUN_DIR    the same on two ranks
#include <cstdio>

#include "capstan/config.hpp"
#include "capstan/generate.hpp"
#include "capstan/trainer.hpp"

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
    std::printf("rank %d of %d: %s layer, vocabulary %s\n", world.rank, world.size,
                config.value("model.num_layers").c_str(), config.value("model.vocab_size").c_str());

    const auto outcome = capstan::run_training(
        config, {.run_dir = argv[1]},
        [](capstan::Message, const std::string& text) { std::printf("  %s\n", text.c_str()); });

    if (world.rank > 0) return 0;
    auto model = capstan::Model::load(outcome.run_dir);
    std::printf("loss of a text: %.3f nats a byte\n", model.loss("To be, or not to be").loss);
    model.generate("To be", {.max_tokens = 16, .temperature = 0.8, .top_p = 0.95, .seed = 1},
                   [](const std::string& text) { std::fputs(text.c_str(), stdout); });
    std::puts("");
    return 0;
  } catch (const capstan::Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return capstan::exit_code_of(error.code());
  }
}
