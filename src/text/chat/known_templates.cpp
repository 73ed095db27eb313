// Short forms of the families' own templates: without tools, and with {% generation %} around the assistant's
// text.
#include "text/chat/chat_template.hpp"

namespace capstan::text::chat {

namespace {

constexpr KnownTemplate kKnown[] = {
    {"alpaca", R"({{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}
{{- message.content + '\n\n' }}
{%- elif message.role == 'user' %}
{%- set with_input = message.input is defined and message.input %}
{%- if loop.first and with_input %}
{{- 'Below is an instruction that describes a task, paired with an input that provides further context. ' }}
{{- 'Write a response that appropriately completes the request.\n\n' }}
{%- elif loop.first %}
{{- 'Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n' }}
{%- endif %}
{%- if with_input %}
{{- '### Instruction:\n' + message.instruction + '\n\n### Input:\n' + message.input + '\n\n' }}
{%- else %}
{{- '### Instruction:\n' + message.content + '\n\n' }}
{%- endif %}
{%- elif message.role == 'assistant' %}
{{- '### Response:\n' }}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{%- if not loop.last %}{{ '\n\n' }}{% endif %}
{%- else %}
{{- raise_exception('the alpaca template knows system, user and assistant, not ' ~ message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '### Response:\n' }}{% endif %})"},
    {"chatml", R"({% for message in messages %}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' %}
{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}
{{ message.content + '<|im_end|>' }}
{%- endif %}
{{ '\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{%- endif %})"},
    {"gemma", R"({{ bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message.role == 'assistant' %}
{{- '<start_of_turn>model\n' }}{% generation %}{{ message.content | trim + '<end_of_turn>' }}{% endgeneration %}{{ '\n' }}
{%- else %}
{{- '<start_of_turn>' + message.role + '\n' + message.content | trim + '<end_of_turn>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %})"},
    {"harmony",
     R"({{- '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n' }}
{{- 'Knowledge cutoff: 2024-06\nCurrent date: ' + strftime_now('%Y-%m-%d') + '\n\n' }}
{{- 'Reasoning: ' + reasoning_effort | default('medium') + '\n\n' }}
{{- '# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>' }}
{%- for message in messages %}
{%- if message.role in ['system', 'developer'] and loop.first %}
{{- '<|start|>developer<|message|># Instructions\n\n' + message.content + '\n\n<|end|>' }}
{%- elif message.role == 'user' %}
{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'assistant' %}
{%- if '<|channel|>' in message.content %}
{{- raise_exception('the content of a message has no channels: reasoning goes into `thinking`') }}
{%- endif %}
{{- '<|start|>assistant' }}
{%- generation %}
{%- set last = loop.last and not add_generation_prompt %}
{%- if last and message.thinking is defined %}
{{- '<|channel|>analysis<|message|>' + message.thinking + '<|end|><|start|>assistant' }}
{%- endif %}
{{- '<|channel|>final<|message|>' + message.content + ('<|return|>' if last else '<|end|>') }}
{%- endgeneration %}
{%- else %}
{{- raise_exception('the harmony template knows a first system or developer, user and assistant, not ' ~ message.role) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %})"},
    {"llama2", R"({%- if messages[0].role == 'system' %}
{%- set turns = messages[1:] %}{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}
{%- else %}
{%- set turns = messages %}{% set system = '' %}
{%- endif %}
{%- for message in turns %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message.role == 'user' %}
{{- bos_token + '[INST] ' + ((system if loop.first else '') + message.content) | trim + ' [/INST]' }}
{%- elif message.role == 'assistant' %}
{{- ' ' }}{% generation %}{{ message.content | trim + ' ' + eos_token }}{% endgeneration %}
{%- endif %}
{%- endfor %})"},
    {"llama3", R"({{ bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content | trim + '<|eot_id|>' }}{% endgeneration %}
{%- else %}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %})"},
    {"mistral", R"({%- if messages[0].role == 'system' %}
{%- set system = messages[0].content + '\n\n' %}{% set turns = messages[1:] %}
{%- else %}
{%- set system = '' %}{% set turns = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in turns %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('After the optional system message, conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message.role == 'user' %}
{{- '[INST] ' + (system if loop.first else '') + message.content + '[/INST]' }}
{%- else %}
{{- ' ' }}{% generation %}{{ message.content + eos_token }}{% endgeneration %}
{%- endif %}
{%- endfor %})"},
    {"phi3", R"({%- for message in messages %}
{{- '<|' + message.role + '|>\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + '<|end|>' }}{% endgeneration %}{{ '\n' }}
{%- else %}
{{- message.content + '<|end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %})"},
    {"zephyr", R"({%- for message in messages %}
{{- '<|' + message.role + '|>\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + eos_token }}{% endgeneration %}{{ '\n' }}
{%- else %}
{{- message.content + eos_token + '\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %})"},
};

}  // namespace

std::span<const KnownTemplate> known_templates() {
  return kKnown;
}

}  // namespace capstan::text::chat
