// Readers that want files: the first byte says which, the rest are the files' contents with a 0 byte between
// them. The files lie in memory. G: a GGUF model. P: adapter_config.json and adapter_model.safetensors. V:
// vocab.json and merges.txt. W: vocab.txt and tokenizer_config.json. S: tokenizer.json, tokenizer_config.json
// and special_tokens_map.json.
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "formats/external_model.hpp"
#include "formats/peft_adapter.hpp"
#include "named_error.hpp"
#include "text/tokenizer/tokenizer.hpp"

using namespace capstan;
namespace fs = std::filesystem;

namespace {

// Of each kind its own, which lasts as long as the process.
fs::path home(char kind) {
  struct Made {
    fs::path path = fs::path(fs::exists("/dev/shm") ? "/dev/shm" : fs::temp_directory_path()) /
                    ("capstan-fuzz-" + std::to_string(::getpid()));
    Made() {
      for (const char* one : {"G", "P", "V", "W", "S"}) fs::create_directories(path / one);
    }
    ~Made() {
      std::error_code ignored;
      fs::remove_all(path, ignored);
    }
  };
  static const Made made;
  return made.path / std::string(1, kind);
}

// As many files as there are names; the last one takes what is left.
void write(const fs::path& to, std::string_view content, const std::vector<const char*>& names) {
  for (size_t i = 0; i < names.size(); ++i) {
    const size_t end = i + 1 < names.size() ? content.find('\0') : std::string_view::npos;
    std::ofstream(to / names[i], std::ios::binary) << content.substr(0, end);
    content = end == std::string_view::npos ? std::string_view() : content.substr(end + 1);
  }
}

void use(const text::Tokenizer& tokenizer) {
  tokenizer.decode(tokenizer.encode("the <s>123 \xC3\xA9</s>", {.add_special = true}));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  if (input.empty()) return 0;
  const std::string_view content = input.substr(1);
  const fs::path at = home(input[0]);
  fuzz::expect_no_internal_error([&] {
    switch (input[0]) {
      case 'G': {
        write(at, content, {"m.gguf"});
        const auto model = formats::ExternalModel::open("gguf:" + (at / "m.gguf").string());
        formats::recipe_text(*model);
        model->assets();
        break;
      }
      case 'P':
        write(at, content, {"adapter_config.json", "adapter_model.safetensors"});
        formats::read_peft(at);
        break;
      case 'V':
        write(at, content, {"vocab.json", "merges.txt"});
        use(*text::Tokenizer::load_pair(at / "vocab.json", at / "merges.txt",
                                        text::PreTokenizerChoice::gpt2));
        break;
      case 'W':
        write(at, content, {"vocab.txt", "tokenizer_config.json"});
        use(*text::Tokenizer::load(at / "vocab.txt"));
        break;
      case 'S':
        write(at, content, {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"});
        use(*text::Tokenizer::load(at));
        break;
      default:
        break;
    }
  });
  return 0;
}
