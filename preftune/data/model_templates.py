"""Chat templates as they belong to a model: copying one from another model, and marking what the assistant says.

A training template wraps the tokenizer's own (see `training_templates/twin.jinja`); it is never looked up by its text.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from importlib import resources
from typing import Any

from transformers import AutoTokenizer

from preftune.data.pairs import CONTROL_TOKEN, shared_text
from preftune.data.template_probes import (
    ANSWER,
    ANSWER2,
    KEY,
    QUESTION2,
    REFUSALS,
    RESULT,
    THOUGHT,
    VALUE,
    Probe,
    assistant,
    between,
    calling,
    marked_text,
    template_of,
    tokenizer_of,
    tool,
    user,
)
from preftune.errors import ConfigError

_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_REMEDY = "Mark assistant turns in the template yourself, with {% generation %} and {% endgeneration %}."


def has_generation_markers(template: str | Mapping[str, str] | None) -> bool:
    """Whether a template (of several: the one called `default`) has `{% generation %}` tags."""
    if isinstance(template, Mapping):
        template = template.get("default")
    return template is not None and _MARKER.search(template) is not None


def get_training_chat_template(processing_class: Any = None, tokenizer: Any = None) -> str | None:
    """A template that renders what the own one does and marks what the model generates, or None if that one does.

    It wraps the own template, so it takes the same tools, options and messages. What is marked of an assistant's turn
    is what follows the prompt that the model gets for it, up to and with the token that ends the turn. If a tool's
    result changes how the call before it is written, tool loops are written as they were generated.

    Raises:
        ConfigError: the own template is missing, or leaves open where assistant turns begin or end.
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
    own = template_of(processing_class)
    return None if has_generation_markers(own) else derive_training_template(processing_class, own)


def derive_training_template(processing_class: Any, own: str) -> str:
    """`own`, a template without markers, inside one that marks what the model generates.

    Raises:
        ConfigError: it leaves open where assistant turns begin or end, with what it writes there.
    """
    probe = Probe(processing_class, own)
    header, stops = turn_marks(probe)
    twin = resources.files("preftune.data.training_templates").joinpath("twin.jinja").read_text(encoding="utf-8")
    for name, value in (("header", header), ("stops", stops), ("keeps_loops", _rewrites_loops(probe))):
        twin = twin.replace(f"<{name}>", ascii(value).replace("True", "true").replace("False", "false"))
    before, _, after = twin.partition("<own>")
    # Jinja drops one newline at the end of a template, which here is no longer the end.
    derived = before + own.removesuffix("\n") + after
    _check(processing_class, probe, derived)
    return derived


def turn_marks(probe: Probe) -> tuple[str, list[str]]:
    """What opens an assistant's turn ("" where nothing does), and the tokens of which the first one ends it.

    Raises:
        ConfigError: the template writes no answers, or ends them without a token.
    """
    tokens = list(tokenizer_of(probe.processing_class).added_tokens_decoder.values())
    specials = [token.content for token in tokens]
    header = _header(probe, specials)
    stops = _stops(probe, specials)
    return header, stops + _call_stops(probe, stops, [token.content for token in tokens if token.special])


def _header(probe: Probe, specials: list[str]) -> str:
    """What opens an assistant's turn, both where it is asked for and where it is history; "" where nothing does."""
    alone, asked = probe.render([user()]), probe.render([user()], add_generation_prompt=True)
    answered = probe.render([user(), assistant()])
    if alone is None or asked is None or answered is None or ANSWER not in answered:
        raise ConfigError(
            "no training template can be derived: the tokenizer's chat template does not write a question and its "
            f"answer, or refuses them. {_REMEDY}"
        )
    at = shared_text(alone, asked, specials)
    return asked[at:][: shared_text(asked[at:], answered[at:], specials)]


def _stops(probe: Probe, specials: list[str]) -> list[str]:
    """The tokens that end an assistant's turn: the last one of what closes it both in the middle and at the end.

    Where the two have no token in common, the first after it in the middle and the last at the end.
    """
    middle = between(probe.render([user(), assistant(), user(QUESTION2), assistant(ANSWER2)]), ANSWER, QUESTION2)
    last = between(probe.render([user(), assistant()]), ANSWER)
    stops = _ends(middle[1] if middle else "", last[1] if last else "", specials, CONTROL_TOKEN.pattern)
    if not stops:
        raise ConfigError(
            "no training template can be derived: the tokenizer's chat template ends an assistant turn with "
            f"{last[1] if last else ''!r}, in which there is no special token, so nothing would teach the model to "
            f"stop. Write eos_token after assistant turns. {_REMEDY}"
        )
    return stops


def _call_stops(probe: Probe, known: list[str], specials: list[str]) -> list[str]:
    """Tokens that end a turn of calls where those that end an answer do not."""
    turn = [user(), calling({KEY: VALUE})]
    middle = between(probe.render([*turn, tool(), assistant()]), VALUE, RESULT)
    last = between(probe.render(turn), VALUE)
    if not middle or not last or any(stop in middle[1] and stop in last[1] for stop in known):
        return []
    return [stop for stop in _ends(middle[1], last[1], specials) if stop not in known]


def _ends(middle: str, last: str, specials: list[str], looks: str = "(?!)") -> list[str]:
    """The tokens that end a turn, of `specials` or of what `looks` like one."""
    known = "|".join(re.escape(token) for token in sorted(specials, key=len, reverse=True) if token.strip())
    token = re.compile(f"{known or '(?!)'}|{looks}")
    shared = token.findall(middle[: shared_text(middle, last, specials)])
    if shared:
        return shared[-1:]
    return list(dict.fromkeys([*token.findall(middle)[:1], *token.findall(last)[-1:]]))


def _rewrites_loops(probe: Probe) -> bool:
    """Whether a tool's result, or the answer after it, changes how the call before it is written."""
    if not probe.writes_tools():
        return False
    for thought in ({}, {"reasoning_content": THOUGHT}):
        loop = [user(), calling({KEY: VALUE}, **thought), tool(), assistant()]
        steps = [probe.render(loop[:turns]) for turns in (2, 3, 4)]
        for before, after in zip(steps, steps[1:]):
            if before is None or after is None:
                return False
            if not after.startswith(before.rstrip()):
                return True
    return False


def _check(processing_class: Any, probe: Probe, derived: str) -> None:
    """Tries the derived template: what the own one writes, and every answer marked with the token that ends it."""
    dialogue = [user(), assistant(), user(QUESTION2), assistant(ANSWER2, reasoning_content=THOUGHT)]
    for messages in (dialogue[:2], dialogue):
        own = probe.render(messages)
        if own is None:
            continue
        try:
            pieces = marked_text(processing_class, probe.fitted(messages), derived)
        except REFUSALS as error:
            raise ConfigError(f"no training template can be derived: {error}.") from error
        answers = [generated for _, generated in pieces if generated]
        twin = Probe(processing_class, derived).render(messages)
        wanted = [message["content"] for message in messages if message["role"] == "assistant"]
        if twin != own or [text in answer for text, answer in zip(wanted, answers)] != [True] * len(wanted):
            raise ConfigError(
                f"no training template can be derived: of {own!r} these pieces would be scored: {answers!r}. {_REMEDY}"
            )


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
