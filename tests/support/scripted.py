"""A rollout backend that says what a script tells it, so that what is done with completions can be tested exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from preftune.rollouts.base import RolloutBackend, check_request
from preftune.types import Rollouts

LOGP = -0.5
TURN_END = "<|im_end|>"


def say(content: str) -> str:
    """An answer as the tiny tokenizer's template writes it."""
    return content + TURN_END


def call(name: str, **arguments: Any) -> str:
    """Part of a turn: one call, as the tiny tokenizer's template writes it."""
    return f"<call>{json.dumps({'name': name, 'arguments': arguments})}</call>"


@dataclass
class ScriptedBackend(RolloutBackend):
    """`script(text of the prompt, key)` is what follows a prompt; the key is the stream's with the sample's number.

    Attributes:
        requests: What was asked for: prompts, samples, sampling, stream.
        minds_budget: Whether it stops where the budget of a prompt ends.
    """

    tokenizer: Any
    script: Callable[[str, tuple[int, ...]], str]
    minds_budget: bool = True
    gives_logps: bool = True
    requests: list[tuple] = field(default_factory=list)

    def generate(self, prompts, num_generations, sampling, *, stream) -> Rollouts:
        check_request(prompts, num_generations, sampling, stream)
        self.requests.append(([list(p) for p in prompts], num_generations, sampling, list(stream)))
        budgets = sampling.budgets or [sampling.max_new_tokens] * len(prompts)
        ids, reasons = [], []
        for prompt, key, budget in zip(prompts, stream, budgets, strict=True):
            for g in range(num_generations):
                text = self.script(self.tokenizer.decode(prompt), (*key, g))
                drawn = self.tokenizer(text, add_special_tokens=False)["input_ids"]
                ids.append(drawn[:budget] if self.minds_budget else drawn)
                ended = bool(ids[-1]) and ids[-1][-1] in sampling.eos_token_ids
                reasons.append("stop" if ended or not ids[-1] else "length")
        logps = [[LOGP] * len(one) for one in ids] if self.gives_logps else None
        return Rollouts(prompts, ids, reasons, logps=logps)
