// A fine-tuning file from a stranger. The first byte says how it is read: bits 0-2 the format, 3-4 what is
// learned, 5 packing, 6 cutting, 7 the template.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "data/sft_inspect.hpp"
#include "named_error.hpp"

using namespace capstan;
using namespace capstan::data;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::string directory = [] {
    const auto path = (std::filesystem::exists("/dev/shm") ? std::filesystem::path("/dev/shm")
                                                           : std::filesystem::temp_directory_path()) /
                      ("capstan-fuzz-sft-" + std::to_string(::getpid()));
    std::filesystem::create_directories(path);
    return path.string();
  }();
  static const auto tokenizer = text::byte_tokenizer();
  static const std::shared_ptr<const text::chat::ChatTemplate> templates[] = {
      text::chat::ChatTemplate::load("chatml"),
      // Without marks: turns are looked for.
      text::chat::ChatTemplate::parse(
          "plain",
          "{% for m in messages %}{{ '<' + m.role + '>' }}{{ m.content | trim }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}")};
  if (size < 1) return 0;
  const int choice = data[0];
  const std::string path = directory + "/a.jsonl";
  std::ofstream(path, std::ios::binary)
      .write(reinterpret_cast<const char*>(data) + 1, static_cast<std::streamsize>(size - 1));
  SftOptions options;
  options.train_files = {path};
  options.split = "1,0,0";
  options.format = static_cast<SftFormat>((choice & 7) % 6);
  options.loss = static_cast<SftLoss>(((choice >> 3) & 3) % 3);
  options.packing = choice & 32, options.truncate = choice & 64;
  options.chat_template = templates[choice >> 7];
  options.sequence_length = 64;
  options.max_record_bytes = 1 << 16;
  options.on_bad_line = OnBadLine::skip;
  options.tokenizer = tokenizer.get();
  options.eod = tokenizer->eod();
  options.threads = 1;
  fuzz::expect_no_internal_error([&] {
    const auto dataset = build_sft_datasets(options)[0];
    const SftCounts& counts = dataset->counts();
    if (counts.samples + counts.bad + counts.dropped + counts.without_loss != counts.records) std::abort();
    std::multiset<int64_t> seen;
    std::vector<int32_t> tokens(64), labels(64), positions(64), bounds;
    std::vector<float> loss(64);
    double loss_tokens = 0;
    for (int64_t r = 0; r < dataset->epoch_samples(); ++r) {
      for (const int64_t sample : dataset->samples_of(r)) seen.insert(sample);
      dataset->row(r, {tokens, labels, loss, positions, &bounds});
      for (const float value : loss) loss_tokens += static_cast<double>(value);
    }
    if (static_cast<int64_t>(seen.size()) != counts.samples ||
        std::set<int64_t>(seen.begin(), seen.end()).size() != seen.size())
      std::abort();
    if (loss_tokens != static_cast<double>(counts.loss_tokens)) std::abort();
    to_json_report(inspect_sft(*dataset, *tokenizer, 2, 32));
  });
  return 0;
}
