// A chat template and a conversation from strangers: the template, a NUL, and a line of JSON as in a
// fine-tuning file. The rendered text and the turns that are found have to stay within small limits.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "data/sft_record.hpp"
#include "named_error.hpp"
#include "text/chat/assistant_turns.hpp"

using namespace capstan;
using namespace capstan::data;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static SftRecordParser parser;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t separator = input.find('\0');
  fuzz::expect_no_internal_error([&] {
    const auto chat_template = text::chat::ChatTemplate::parse("template", input.substr(0, separator));
    SftDialogue dialogue;
    if (separator != std::string_view::npos) {
      const std::string json = std::string(input.substr(separator + 1)) + std::string(64, '\0');
      auto record = parser.parse(std::string_view(json).substr(0, json.size() - 64), SftFormat::automatic);
      if (auto* found = std::get_if<SftDialogue>(&record.what)) dialogue = std::move(*found);
    }
    text::chat::RenderOptions options;
    options.variables.set("bos_token", text::chat::Value("<s>"));
    options.limits = {20'000, 1 << 20, 1 << 18, 150};
    options.now.emplace();
    const text::chat::Rendered complete = chat_template->render(dialogue.conversation, options);
    if (complete.text.size() > static_cast<size_t>(options.limits.output)) std::abort();
    size_t end = 0;
    for (const auto& [first, second] : complete.generations)
      if (first > second || second > complete.text.size()) std::abort();
    for (const auto& turn : text::chat::assistant_turns(*chat_template, dialogue.conversation, options,
                                                        complete, [](size_t offset) { return offset; })) {
      if (turn.begin > turn.end || turn.end > complete.text.size()) std::abort();
      if (complete.generations.empty() && turn.begin < end) std::abort();
      end = turn.end;
    }
  });
  return 0;
}
