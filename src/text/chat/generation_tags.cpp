#include "text/chat/generation_tags.hpp"

#include "base/error.hpp"
#include "text/chat/lexer.hpp"

namespace capstan::text::chat {

std::string without_generation_tags(std::string_view text) {
  if (text.find("generation") == std::string_view::npos) return std::string(text);
  try {
    const Source source("chat template", text);
    const std::vector<Token> tokens = tokenize(source);
    std::string result;
    size_t copied = 0;
    for (size_t i = 1; i + 1 < tokens.size(); ++i) {
      if (tokens[i - 1].kind != TokenKind::block_begin || tokens[i].kind != TokenKind::name ||
          tokens[i + 1].kind != TokenKind::block_end)
        continue;
      const bool begins = tokens[i].text == "generation";
      if (!begins && tokens[i].text != "endgeneration") continue;
      result += source.text().substr(copied, tokens[i].at - copied);
      result += begins ? "if true" : "endif";
      copied = tokens[i].at + tokens[i].text.size();
    }
    if (copied == 0) return std::string(text);
    return result.append(source.text().substr(copied));
  } catch (const Error&) {
    return std::string(text);
  }
}

}  // namespace capstan::text::chat
