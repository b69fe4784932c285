"""Chat templates as they belong to a model: copying one from another model, and marking what the assistant says.

A training template is derived from what the tokenizer's own template renders, never looked up by its text.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import AutoTokenizer

from preftune.errors import ConfigError

# The first line of derived templates, by which they are known: rows are then compared with the tokenizer's own.
DERIVED = "{# derived by preftune from the tokenizer's own chat template #}"
_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

_SYSTEM, _USERS, _ANSWERS = "Zsystemz", ("Zuseronez", "Zusertwoz"), ("Zanswerwonz", "Zanswertooz")


def has_generation_markers(template: str | Mapping[str, str] | None) -> bool:
    """Whether a template (of several: the one called `default`) has `{% generation %}` tags."""
    if isinstance(template, Mapping):
        template = template.get("default")
    return template is not None and _MARKER.search(template) is not None


def get_training_chat_template(processing_class: Any = None, tokenizer: Any = None) -> str | None:
    """A template that renders what the tokenizer's own does and marks assistant turns, or None if that one does.

    It is derived from trial renderings, so it knows a system message and turns of user and assistant that alternate,
    and refuses tools and other roles. The end-of-turn token is marked with the answer.

    Raises:
        ConfigError: the own template is missing, or no derived one renders the trial conversations alike.
    """
    if tokenizer is not None:
        if processing_class is not None:
            raise TypeError("tokenizer= is the old name of processing_class=; give one of them.")
        warnings.warn("tokenizer= is now called processing_class=.", FutureWarning, stacklevel=2)
        processing_class = tokenizer
    if processing_class is None:
        raise TypeError("get_training_chat_template needs a tokenizer.")
    if not processing_class.chat_template:
        raise ConfigError("the tokenizer has no chat template, so none can be derived. Set tokenizer.chat_template.")
    own = processing_class.get_chat_template()
    if has_generation_markers(own):
        return None
    for content in ("turn['content']", "turn['content'] | trim"):
        derived = _derive(processing_class, content)
        if derived is not None and _renders_alike(processing_class, derived):
            return derived
    raise ConfigError(
        f"no training template can be derived from the tokenizer's chat template, which begins {own[:200]!r}. Mark "
        "assistant turns in it yourself, with {% generation %} and {% endgeneration %}."
    )


def _derive(tokenizer: Any, content: str) -> str | None:
    """The template read off the text around known contents, or None if turns do not repeat."""
    (user, user2), (answer, answer2) = _USERS, _ANSWERS
    turns = [("user", user), ("assistant", answer), ("user", user2), ("assistant", answer2)]
    whole = _around(tokenizer, turns)
    alone = _around(tokenizer, turns[:1])
    asked = _around(tokenizer, turns[:1], add_generation_prompt=True)
    answered = _around(tokenizer, turns[:2], add_generation_prompt=True)
    if whole is None or alone is None or asked is None or answered is None or whole[1] != whole[3]:
        return None
    head, to_answer, to_user, _, tail = whole
    close = _end_of_turn(tokenizer, to_user, tail)
    if not answered[2].startswith(close):
        return None
    system = _around(tokenizer, [("system", _SYSTEM), *turns])
    words = {
        "head": head,
        "to_answer": to_answer,
        "to_user": to_user[len(close) :],
        "tail": tail[len(close) :],
        "close": close,
        "open_user": alone[1],
        "ask": asked[1],
        "ask_again": answered[2][len(close) :],
        "system_head": system[0] if system else "",
        "after_system": system[1] if system else "",
    }
    body = _BODY if system else _BODY.replace("first['role'] == 'system'", "false")
    for name, text in words.items():
        body = body.replace(f"<{name}>", "{{ " + ascii(text) + " }}")
    return DERIVED + body.replace("<content>", "{{ " + content + " }}").replace("\n", "")


_BODY = """
{% set first = messages[0] %}
{% if first['role'] == 'system' %}
{% set turn = first %}{% set turns = messages[1:] %}<system_head><content><after_system>
{% else %}
{% set turns = messages %}<head>
{% endif %}
{% for turn in turns %}
{% set speaker = 'user' if loop.index0 % 2 == 0 else 'assistant' %}
{% if tools or turn['role'] != speaker or turn['content'] is not string %}
{{ raise_exception('the derived training template knows texts of user and assistant in turn only, without tools') }}
{% endif %}
{% if speaker == 'user' %}
{% if not loop.first %}<to_user>{% endif %}
<content>
{% if not loop.last %}<to_answer>{% elif add_generation_prompt %}<ask>{% else %}<open_user>{% endif %}
{% else %}
{% generation %}<content><close>{% endgeneration %}
{% if loop.last %}{% if add_generation_prompt %}<ask_again>{% else %}<tail>{% endif %}{% endif %}
{% endif %}
{% endfor %}
"""


def _around(tokenizer: Any, turns: Sequence[tuple[str, str]], **how: Any) -> list[str] | None:
    """The texts before, between and after the contents of `turns`; None if one is not there once and in order."""
    text = _try_render(tokenizer, turns, **how)
    pieces: list[str] = []
    for _, content in turns:
        if text is None or text.count(content) != 1:
            return None
        before, _, text = text.partition(content)
        pieces.append(before)
    return [*pieces, text] if text is not None else None


def _end_of_turn(tokenizer: Any, to_user: str, tail: str) -> str:
    """What closes an answer in the middle and at the end alike, up to its first special token; "" without one."""
    shared = 0
    while shared < min(len(to_user), len(tail)) and to_user[shared] == tail[shared]:
        shared += 1
    ends = []
    for token in tokenizer.added_tokens_decoder.values():
        at = to_user.find(token.content, 0, shared)
        if at != -1:
            ends.append((at, -len(token.content)))
    return to_user[: min(ends)[0] - min(ends)[1]] if ends else ""


def _renders_alike(tokenizer: Any, derived: str) -> bool:
    contents = ("one", " two\n", "three\n\n3", "four <b>", "five")
    dialogue = [(role, text) for role, text in zip(("user", "assistant") * 3, contents)]
    trials = [(dialogue[:n], answer) for n in (1, 2, 3, 4, 5) for answer in (False, True)]
    trials += [([("system", " be brief\n"), *turns], answer) for turns, answer in trials]
    alike = 0
    for turns, answer in trials:
        own = _try_render(tokenizer, turns, add_generation_prompt=answer)
        if own is None:  # for instance a template that knows no system message
            continue
        if _try_render(tokenizer, turns, add_generation_prompt=answer, chat_template=derived) != own:
            return False
        alike += 1
    return alike > 0


def _try_render(tokenizer: Any, turns: Sequence[tuple[str, str]], **how: Any) -> str | None:
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **how)
    except (TemplateError, TypeError, ValueError, KeyError):
        return None


def clone_chat_template(
    model: Any, tokenizer: Any, source_tokenizer_path: str, resize_to_multiple_of: int | None = 64
) -> tuple[Any, Any, list[int]]:
    """Gives `model` and `tokenizer` the chat template, added tokens and EOS token of another tokenizer.

    The embeddings grow to a multiple of `resize_to_multiple_of` rows (None: as needed); rows without a token get a
    placeholder `<extra_id_N>`, so that tokenizer and embeddings have one size.

    Returns:
        The model, the tokenizer and the ids of the tokens that were added (new rows of the embedding: train them).

    Raises:
        ConfigError: the source has no chat template.
    """
    source = AutoTokenizer.from_pretrained(source_tokenizer_path)
    if not source.chat_template:
        raise ConfigError(f"the tokenizer at {source_tokenizer_path!r} has no chat template to copy.")
    tokenizer.chat_template = source.get_chat_template()
    known = tokenizer.get_vocab()
    added = [token for token in source.added_tokens_decoder.values() if token.content not in known]
    tokenizer.add_tokens(added)
    tokenizer.eos_token = source.eos_token
    model.config.eos_token_id = tokenizer.eos_token_id
    if model.can_generate():
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        rows = model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=resize_to_multiple_of).weight.shape[0]
    known, room = tokenizer.get_vocab(), rows - len(tokenizer)
    placeholders = [name for name in map("<extra_id_{}>".format, range(rows)) if name not in known][: max(0, room)]
    tokenizer.add_tokens(placeholders)
    return model, tokenizer, tokenizer.convert_tokens_to_ids([*(token.content for token in added), *placeholders])
