"""A tokenizer that needs no download: the 256 bytes, id = byte, and a few special tokens behind them.

It is byte-level BPE without merges in the `tokenizers` format, so it saves, reloads with AutoTokenizer and speaks
chat. Its template marks what the assistant says, its end token included, with {% generation %}.
"""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] + '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(_symbols())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=SPECIAL[0],
        pad_token=SPECIAL[1],
        extra_special_tokens=SPECIAL[2:],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        ids_are_bytes=True,  # plain text may skip the tokenizer: its UTF-8 bytes are its ids
    )


def _symbols() -> list[str]:
    """The character by which byte-level BPE writes each byte: itself where it is visible, else one from 256 up."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte if byte in visible else next(hidden)) for byte in range(256)]
