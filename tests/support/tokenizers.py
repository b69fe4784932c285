"""A byte-level BPE tokenizer trained here on a few lines, with a ChatML-like template.

Every string survives encode and decode. The end of text is `<eos>`; a chat turn ends with `<|im_end|>`.
"""

from __future__ import annotations

import copy
import functools

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 320
VARIANTS = ("plain", "bos", "pad_is_eos", "no_pad", "no_eos", "no_markers", "no_template")

LINES = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "What is the capital of Spain? The capital of Spain is Madrid.",
    "Two and two is four; three and five is eight; six and seven is thirteen.",
    "Please answer the question in one short sentence.",
    "user assistant system tool messages content role",
    "The quick brown fox jumps over the lazy dog, again and again.",
    "I do not know the answer, but here is what I think about the question.",
)

_TURN = """\
{%- if tools %}{{ '<|im_start|>tools\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}{% generation %}
{{- message['content'] or '' -}}
{%- for call in message['tool_calls'] or [] %}{{ '<call>' + (call['function'] | tojson) + '</call>' }}{% endfor -%}
{{- '<|im_end|>' -}}
{% endgeneration %}
{%- else -%}{{- message['content'] + '<|im_end|>' -}}{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}
{%- endif -%}
"""
CHAT_TEMPLATE = _TURN
CHAT_TEMPLATE_WITHOUT_MARKERS = _TURN.replace("{% generation %}", "").replace("{% endgeneration %}", "")
CHAT_TEMPLATE_WITH_BOS = "{{- bos_token -}}\n" + _TURN


@functools.cache
def _trained() -> Tokenizer:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.train_from_iterator(
        LINES,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=list(SPECIALS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return backend


def make_tokenizer(variant: str = "plain") -> PreTrainedTokenizerFast:
    """A tokenizer of its own, free to be changed.

    Args:
        variant: "plain"; "bos" (the post-processor and the template each begin with `<bos>`); "pad_is_eos"; "no_pad";
            "no_eos"; "no_markers" (no `{% generation %}` in the template); "no_template".
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant {variant!r}; wanted one of {VARIANTS}")
    backend = copy.deepcopy(_trained())
    if variant == "bos":
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A",
            pair="<bos> $A <bos> $B",
            special_tokens=[("<bos>", backend.token_to_id("<bos>"))],
        )
    pad = {"pad_is_eos": "<eos>", "no_pad": None}.get(variant, "<pad>")
    template = {
        "bos": CHAT_TEMPLATE_WITH_BOS,
        "no_markers": CHAT_TEMPLATE_WITHOUT_MARKERS,
        "no_template": None,
    }.get(variant, CHAT_TEMPLATE)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token=None if variant == "no_eos" else "<eos>",
        unk_token="<unk>",
        pad_token=pad,
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=template,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )
