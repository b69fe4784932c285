"""Reward models: a sequence classifier with one label, called like any other reward function.

Texts are scored in batches of like length under one token budget; completions of one prompt share its tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

from preftune.data.encoding import TextEncoder, common_prefix_length
from preftune.data.templates import Chat, ChatRenderer
from preftune.data.tree import build_tree
from preftune.errors import ConfigError
from preftune.models import structure
from preftune.models.distributed import loaded_whole
from preftune.models.load import load_model, load_processing_class, model_name, tokenizer_of
from preftune.models.logprobs import Layout, branch_values, choose_layout
from preftune.rewards.calling import name_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Group:
    """Rows whose texts begin with the same ids: `prompt`, then one of `branches`, none of them empty."""

    rows: list[int]
    prompt: list[int]
    branches: list[list[int]]

    def cost(self, layout: Layout) -> int:
        """Tokens of the group in a batch of its own."""
        if layout == "tree":
            return len(self.prompt) + sum(map(len, self.branches))
        return len(self.rows) * self.longest

    @property
    def longest(self) -> int:
        return len(self.prompt) + max(map(len, self.branches))


class RewardModel:
    """Rewards from a sequence classification model with one label: the value of prompt + completion.

    Messages are rendered with the reward model's own chat template; texts are joined, after a BOS token where its
    tokenizer writes one. Texts longer than the model takes lose their beginning, since the value is read at their end.
    An empty text has no value (None). The model is put in eval mode and called without gradients.

    Args:
        model: A folder, a name on the hub, or a module.
        processing_class: Its tokenizer; None loads the one saved beside the model.
        name: In metrics; None takes the last part of the model's name.
        init_kwargs: For `from_pretrained`, with a model given by name: `dtype`, `revision`, ... Never the policy's.
        trust_remote_code: Of model and tokenizer.
        chat_template_kwargs: For the chat template.
        max_length: Of a text, in tokens; None takes what model and tokenizer allow.
        max_batch_tokens: Of one forward, in tokens.

    Raises:
        ConfigError: no model there, or none with a trained scalar head, or no tokenizer.

    One fact to check: values equal those of the model's own forward on each text alone.
    """

    def __init__(
        self,
        model: str | nn.Module,
        processing_class: Any = None,
        *,
        name: str | None = None,
        init_kwargs: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        max_length: int | None = None,
        max_batch_tokens: int = 16_384,
    ) -> None:
        init_kwargs = dict(init_kwargs or {})
        self.__name__ = name_of(model) if name is None else name
        full_name = model if isinstance(model, str) else model_name(cast("Any", model))
        self.model = _load(model, init_kwargs, trust_remote_code) if isinstance(model, str) else model
        if structure.value_head(self.model) is None or structure.num_labels(self.model) != 1:
            raise ConfigError(
                f"reward model {full_name!r} ({type(self.model).__name__}) has no head with one label. Load it with "
                "AutoModelForSequenceClassification and num_labels=1."
            )
        tokenizer = _tokenizer(full_name, processing_class, init_kwargs, trust_remote_code)
        self.max_batch_tokens = max_batch_tokens
        limits = (max_length, structure.position_limit(self.model), tokenizer.model_max_length)
        self.max_length: int = min(limit for limit in limits if limit is not None)
        self._encoder = TextEncoder(tokenizer)
        self._renderer = ChatRenderer(tokenizer, options=dict(chat_template_kwargs or {}))
        self._layout: Layout | None = None
        self._warned = False

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_metric: Callable[[str, float], None] | None = None,
    ) -> list[float | None]:
        """The value of each prompt + completion; None for an empty text."""
        texts = self._token_ids(prompts, completions)
        cut = sum(len(ids) > self.max_length for ids in texts)
        self._report_cut(cut, len(texts), log_metric)
        texts = [ids[-self.max_length :] for ids in texts]
        values: list[float | None] = [None] * len(texts)
        self.model.eval()
        if self._layout is None:
            self._layout = choose_layout(self.model).layout
        groups = _groups(prompts, texts, share=self._layout == "tree")
        with torch.no_grad():
            for batch in _batches(groups, self._layout, self.max_batch_tokens):
                self._score(batch, self._layout, values)
        return values

    def _token_ids(self, prompts: Sequence[Any], completions: Sequence[Any]) -> list[list[int]]:
        if not prompts:
            return []
        if isinstance(prompts[0], str):
            texts = [prompt + completion for prompt, completion in zip(prompts, completions)]
            return [
                self._encoder.open(list(ids)) if text else [] for text, ids in zip(texts, self._encoder.encode(texts))
            ]
        chats = [Chat([*p, *c], row) for row, (p, c) in enumerate(zip(prompts, completions))]
        return [list(ids) for ids in self._encoder.encode(self._renderer.render(chats))]

    def _score(self, batch: list[_Group], layout: Layout, values: list[float | None]) -> None:
        tree = build_tree([group.prompt for group in batch], [group.branches for group in batch])
        scored = branch_values(self.model, tree.to(structure.input_device(self.model)), layout=layout)
        rows = [row for group in batch for row in group.rows]
        for row, value in zip(rows, scored.tolist(), strict=True):
            values[row] = value

    def _report_cut(self, cut: int, rows: int, log_metric: Callable[[str, float], None] | None) -> None:
        if log_metric is not None and rows:
            log_metric(f"rewards/{self.__name__}/truncated", cut / rows)
        if cut and not self._warned:
            self._warned = True
            logger.warning(
                "reward model %r: %d of %d texts are longer than %d tokens and lose their beginning; "
                "rewards/%s/truncated counts them",
                *(self.__name__, cut, rows, self.max_length, self.__name__),
            )


def _load(model: str, init_kwargs: dict[str, Any], trust_remote_code: bool) -> nn.Module:
    options = {"num_labels": 1, **init_kwargs, "output_loading_info": True}
    try:
        with loaded_whole():  # ranks have batches of unlike number
            loaded, info = cast(
                "tuple[nn.Module, dict[str, Any]]",
                load_model(
                    model,
                    auto_class=AutoModelForSequenceClassification,
                    init_kwargs=options,
                    trust_remote_code=trust_remote_code,
                ),
            )
    except RuntimeError as error:  # sizes that do not fit
        raise ConfigError(f"reward model {model!r} could not be loaded with one label: {error}") from error
    head = sorted(name for name in info["missing_keys"] if name.startswith("score."))
    if head:
        raise ConfigError(
            f"{model!r} is no reward model: its files have no {', '.join(head)}, so its rewards would be random. Give "
            "a model that was trained with a scalar head (preftune reward, or AutoModelForSequenceClassification)."
        )
    return loaded


def _tokenizer(name: str, processing_class: Any, init_kwargs: dict[str, Any], trust_remote_code: bool) -> Any:
    try:
        return tokenizer_of(load_processing_class(name, processing_class, init_kwargs, trust_remote_code))
    except ConfigError as error:
        raise ConfigError(f"reward_processing_classes: {error}") from error


def _groups(prompts: Sequence[Any], texts: list[list[int]], share: bool) -> list[_Group]:
    """Neighbours with equal prompts together, as far as their ids begin alike; empty texts are left out."""
    groups: list[list[int]] = []
    for row, ids in enumerate(texts):
        if not ids:
            continue
        last = groups[-1][-1] if groups else None
        if share and last is not None and prompts[last] == prompts[row] and texts[last][:1] == ids[:1]:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [_group(rows, [texts[row] for row in rows]) for rows in groups]


def _group(rows: list[int], texts: list[list[int]]) -> _Group:
    # At least one token of each text is its own, so that no branch is empty.
    shared = min(map(len, texts)) - 1
    for ids in texts[1:]:
        shared = min(shared, common_prefix_length(texts[0], ids))
    return _Group(rows, texts[0][:shared], [ids[shared:] for ids in texts])


def _batches(groups: list[_Group], layout: Layout, budget: int) -> Iterator[list[_Group]]:
    """Groups of like length, longest first, up to `budget` tokens a batch; a larger group is a batch of its own."""
    batch: list[_Group] = []
    used = 0
    for group in sorted(groups, key=lambda g: (-g.longest, g.rows)):
        # In padded rows every row of a batch is as wide as its longest, which comes first.
        cost = group.cost(layout) if layout == "tree" or not batch else batch[0].longest * len(group.rows)
        if batch and used + cost > budget:
            yield batch
            batch, used, cost = [], 0, group.cost(layout)
        batch.append(group)
        used += cost
    if batch:
        yield batch
