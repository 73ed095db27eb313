// Which bytes of a rendered conversation the assistant says: what a model learns.
#pragma once

#include <cstddef>
#include <vector>

#include "base/function_ref.hpp"
#include "text/chat/chat_template.hpp"

namespace capstan::data::chat {

struct AssistantTurn {
  size_t message = 0;         // index in the conversation
  size_t begin = 0, end = 0;  // bytes of the rendered text, the end of the turn included
};

// `whole` is the conversation rendered with `options` (add_generation_prompt false). `boundary` gives the largest boundary
// between tokens of whole.text at or before an offset.
//
// Where the template has {% generation %}, the turns are what it marks, one for each of the assistant's messages. Else a turn
// begins where the conversation before it ends, rendered with a generation prompt, and ends where the conversation up to it
// ends; both have to be beginnings of the whole. Behind the last turn nothing counts that another turn would not have behind it.
// Where the conversation up to a turn is no beginning of the whole (Phi-3 ends every text with <|endoftext|>, Qwen 3 shows
// thoughts behind the last question only), places are found in both by replacing a text of a message and seeing what changes:
// a turn begins behind as much as stands in the shorter conversation, rendered with a generation prompt, between the last text
// of the message before it and its end; it ends behind its own last text (the content, or a tool call) and as much of the
// shorter conversation's ending as the whole has there too. The first message, and one whose shorter conversation the template
// refuses or ends otherwise, begins behind the prompt with which the template has a question answered. White space behind an
// end of turn is not part of it.
// ErrorCode::format where neither finds the turns. last_only: the last of them alone, which is all that is looked for.
std::vector<AssistantTurn> assistant_turns(const ChatTemplate& chat_template,
                                           const Conversation& conversation, const RenderOptions& options,
                                           const Rendered& whole, FunctionRef<size_t(size_t offset)> boundary,
                                           bool last_only = false);

bool is_assistant(const Value& message);

}  // namespace capstan::data::chat
