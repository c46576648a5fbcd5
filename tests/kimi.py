"""The tiny model with Kimi's control tokens and turn layout: no newlines, no BOS, `<think>` prefilled."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.tiny import CORPUS, VOCAB, write_tiny_checkpoint

CONTROL = (
    "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
    "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<|tool_call_end|>",
)  # fmt: skip
THINK, THINK_END = "<think>", "</think>"
TEMPLATE = "".join(
    line.strip()
    for line in """
{%- macro calls(message) -%}
<|tool_calls_section_begin|>
{%- for call in message['tool_calls'] -%}
{%- set given = call['function']['arguments'] -%}
<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>
{{ given if given is string else given | tojson }}<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endmacro -%}
{%- if tools -%}
<|im_system|>tool_declare<|im_middle|>
{{ tools_ts_str if tools_ts_str is defined else tools | tojson }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
<|im_user|>user<|im_middle|>{{ message['content'] }}<|im_end|>
{%- elif message['role'] == 'assistant' -%}
<|im_assistant|>assistant<|im_middle|><think></think>{{ message['content'] }}
{%- if message['tool_calls'] -%}{{ calls(message) }}{%- endif -%}<|im_end|>
{%- elif message['role'] == 'tool' -%}
<|im_system|>{{ message['name'] or 'tool' }}<|im_middle|>
{{ '## Return of ' + message['tool_call_id'] + '\\n' + message['content'] }}<|im_end|>
{%- else -%}
<|im_system|>system<|im_middle|>{{ message['content'] }}<|im_end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|>
{{ '<think></think>' if thinking is defined and not thinking else '<think>' }}
{%- endif -%}
""".splitlines()
)


def write_kimi_checkpoint(directory: Path) -> Path:
    """The tiny Llama under another tokenizer and template."""
    write_tiny_checkpoint(directory)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 2,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # as in Kimi's own: one token each, and part of an answer's text
    tokenizer.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t in (THINK, THINK_END)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "bos_token": "[BOS]",
                "model_max_length": 8192,  # Kimi's own names none: that case has tests of its own
                "chat_template": TEMPLATE,
            }
        )
    )
    return directory


def token_id(directory: Path, token: str) -> int:
    """The id of a control token."""
    found = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id(token)
    assert found is not None
    return int(found)
