// The bytes of a rendered conversation that the assistant writes, on which a model is trained.
#pragma once

#include <cstddef>
#include <vector>

#include "base/function_ref.hpp"
#include "text/chat/chat_template.hpp"

namespace capstan::text::chat {

struct AssistantTurn {
  // Index in the conversation.
  size_t message = 0;
  // Bytes of the rendered text, the end of the turn included.
  size_t begin = 0, end = 0;
};

// Finds the turns of the assistant in a rendered conversation. `full` is the complete conversation, rendered
// with `options` (add_generation_prompt false). `boundary` returns the largest token boundary of full.text
// at or before an offset. With `last_only`, finds the last turn alone. Throws ErrorCode::format where no
// method finds the turns. A template with {% generation %} marks the turns, one for each message of the
// assistant. For other templates a turn begins at the end of the preceding messages rendered with a
// generation prompt, and ends at the end of the messages up to and including it. Both renderings must be
// prefixes of `full`. Some templates render a shorter conversation to text that is no prefix of `full`:
// Phi-3 ends every text with <|endoftext|>, Qwen 3 shows reasoning after the last question only, and gpt-oss
// ends the last turn of a text with <|return|> and others with <|end|>. There, replacing the text of a
// message and comparing the renderings locates the message in both texts. A turn begins after the text that
// separates the preceding message from the end of the shorter conversation, rendered with a generation
// prompt. It ends after its own last text (the content or a tool call) and the text that a generation prompt
// would follow, or else the part of the shorter conversation's ending that `full` also has there; the last
// turn otherwise ends with `full`. The first message, and a message whose shorter conversation the template
// refuses or ends otherwise, begins after the generation prompt that the template renders for a question.
// White space after an end of turn does not belong to the turn.
std::vector<AssistantTurn> assistant_turns(const ChatTemplate& chat_template,
                                           const Conversation& conversation, const RenderOptions& options,
                                           const Rendered& full, FunctionRef<size_t(size_t offset)> boundary,
                                           bool last_only = false);

bool is_assistant(const Value& message);

}  // namespace capstan::text::chat
