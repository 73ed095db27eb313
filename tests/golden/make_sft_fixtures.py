#!/usr/bin/env python3
"""Writes tests/text/chat/encoded.json with Transformers (5.23).

    python3 tests/golden/make_sft_fixtures.py

What apply_chat_template makes of conversations.json, as ids: small tokenizers of
tests/text/tokenizer/families with templates of tests/text/chat/templates. With them, where the template marks
what the assistant says, which tokens have a part in it, by the tokens' places in the text (assistant_masks is
the same where it finds the beginning, which it does not in white space that trim_offsets or the tokenizer
takes away); null where the template refuses the conversation.
"""
import json
import pathlib

import make_chat_fixtures  # with the clock of the tests
import tokenizers
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

TEXT = pathlib.Path(__file__).resolve().parent.parent / "text"
# Tokenizer, template, beginning and end of a text.
PAIRS = [("llama2", "llama2", "<s>", "</s>"), ("llama2", "generation", "<s>", "</s>"),
         ("mistral", "mistral", "<s>", "</s>"), ("gemma", "gemma2", "<s>", "</s>"),
         ("gemma", "generation", "<s>", "</s>"),
         ("llama3", "llama3", "<|begin_of_text|>", "<|end_of_text|>"),
         ("llama3", "generation", "<|begin_of_text|>", "<|end_of_text|>"),
         ("gpt_oss", "harmony", "<|startoftext|>", "<|return|>"),
         ("t5", "generation", "<s>", "</s>"), ("bert_cased", "generation", "[CLS]", "[SEP]")]


def encode(tokenizer, conversation, marked):
    try:
        given = dict(tools=conversation.get("tools"), return_assistant_tokens_mask=marked,
                     **conversation.get("chat_template_kwargs", {}))
        result = tokenizer.apply_chat_template(conversation["messages"], tokenize=True, return_dict=True,
                                               **given)
    except Exception:
        return None
    if not marked:
        return {"ids": result["input_ids"]}
    texts, spans = render_jinja_template([conversation["messages"]], chat_template=tokenizer.chat_template,
                                         **given, **tokenizer.special_tokens_map)
    untrimmed = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    untrimmed.post_processor = tokenizers.processors.TemplateProcessing(single="$A")
    encoding = untrimmed.encode(texts[0], add_special_tokens=False)
    assert encoding.ids == result["input_ids"]
    learned = [int(any(begin < last and first < end for first, last in spans[0]))
               for begin, end in encoding.offsets]
    assert sum(result["assistant_masks"]) in (0, sum(learned)), (result["assistant_masks"], learned)
    return {"ids": encoding.ids, "learned": learned}


def main():
    conversations = json.loads((TEXT / "chat" / "conversations.json").read_text(encoding="utf-8"))
    pairs = []
    for name, template, bos, eos in PAIRS:
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(TEXT / f"tokenizer/families/{name}.json"), bos_token=bos,
            eos_token=eos)
        tokenizer.chat_template = (TEXT / f"chat/templates/{template}.jinja").read_text(encoding="utf-8")
        samples = [encode(tokenizer, c, template == "generation") for c in conversations]
        pairs.append({"tokenizer": name, "template": template, "bos": bos, "eos": eos, "samples": samples})
        print(f"{name}, {template}: {sum(s is not None for s in samples)} of {len(samples)} encoded")
    # One pair a line.
    text = ",\n".join(json.dumps(pair, separators=(",", ":")) for pair in pairs)
    (TEXT / "chat" / "encoded.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
