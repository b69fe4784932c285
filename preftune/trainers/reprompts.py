"""What SDPO's teacher is asked of the attempts of a round: the question, a successful attempt, feedback.

A group may be spread over ranks: then what its attempts say is gathered first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from jaxtyping import Float
from torch import Tensor

from preftune.configs.sdpo import SDPOConfig
from preftune.data.teacher_prompts import CONTEXT, Fitted, Prompt, TeacherPrompts, filled
from preftune.trainers.demonstrations import demonstrations, without_thinking
from preftune.trainers.rounds import Division, Scored


@dataclass(frozen=True)
class Attempts:
    """The attempts of whole groups.

    Attributes:
        rewards_PGK: As `RewardTable.values`.
        texts: P * G texts.
        own: The numbers among them of this rank's completions, in their order.
    """

    rewards_PGK: Float[Tensor, "P G K"]
    texts: list[str]
    own: np.ndarray

    @classmethod
    def of(cls, scored: Scored, size: int, division: Division | None) -> Attempts:
        """Those of this rank, or, where a rank has parts of groups, of all ranks (a collective).

        Args:
            size: G, attempts of a group.
            division: None: every group is on one rank.
        """
        values, texts = scored.table.values, [_text(completion) for completion in scored.completions]
        own = np.arange(len(texts))
        if division is not None and division.size != size:
            parts: list[tuple[np.ndarray, list[str]]] = gather_object([(values, texts)])
            values = np.concatenate([part for part, _ in parts])[division.order]
            together = [text for _, part in parts for text in part]
            texts, own = [together[i] for i in division.order], division.own
        return cls(torch.from_numpy(values).unflatten(0, (-1, size)), texts, own)


@dataclass(frozen=True)
class Asked:
    """What the teacher is asked of one attempt.

    Attributes:
        prompt: None: nothing.
        has_feedback: There was feedback to use.
        uses_feedback: It is in the prompt.
    """

    prompt: Fitted | None
    has_feedback: bool
    uses_feedback: bool


class Reprompter:
    """Makes the teacher's prompts as `SDPOConfig` says.

    Args:
        template_options: What the chat template is told.
        position_limit: Tokens that the model has positions for; None: any number.
    """

    def __init__(
        self, args: SDPOConfig, tokenizer: Any, template_options: Mapping[str, Any] | None, position_limit: int | None
    ) -> None:
        self._args = args
        self._prompts = TeacherPrompts.of(tokenizer, template_options)
        limits = [args.max_reprompt_len]
        limits += [position_limit - args.max_completion_length] if position_limit is not None else []
        self._limit = min((limit for limit in limits if limit is not None), default=None)

    def ask(self, rows: Sequence[Mapping[str, Any]], attempts: Attempts, rewards_PG: Tensor) -> list[Asked]:
        """One for each completion of this rank; of N completions, number i belongs to row i // (N / len(rows))."""
        args, size = self._args, rewards_PG.shape[1]
        shown = demonstrations(
            rewards_PG, threshold=args.success_reward_threshold, skip_successful=args.dont_reprompt_on_self_success
        )
        succeeded = (rewards_PG >= args.success_reward_threshold).tolist()
        each = len(attempts.own) // len(rows)
        known: dict[Any, Fitted | None] = {}
        asked = []
        for i, number in enumerate(attempts.own.tolist()):
            place, (group, own) = i // each, divmod(number, size)
            feedback = (rows[place].get(CONTEXT) or None) if args.include_environment_feedback else None
            if succeeded[group][own] and args.dont_reprompt_on_self_success:
                asked.append(Asked(None, feedback is not None, False))
                continue
            best = shown[group][own] if args.use_successful_as_teacher else None
            solution = None if best is None else self._demonstration(attempts.texts[group * size + best])
            used = feedback if solution is None or not args.environment_feedback_only_without_solution else None
            key = (place, best, used)
            if key not in known:
                known[key] = self._prompt(rows[place], place, solution, used)
            asked.append(Asked(known[key], feedback is not None, used is not None and known[key] is not None))
        return asked

    def _demonstration(self, text: str) -> str | None:
        """None where nothing is left of it."""
        return (without_thinking(text) if self._args.remove_thinking_from_demonstration else text) or None

    def _prompt(self, row: Mapping[str, Any], number: int, solution: str | None, feedback: str | None) -> Fitted | None:
        if solution is None and feedback is None:
            return None
        args = self._args

        def fill(prompt: Prompt, texts: Sequence[str]) -> Prompt:
            solution, feedback = texts
            values = {
                "solution": args.solution_template.format(solution=solution) if solution else "",
                "feedback": args.feedback_template.format(feedback=feedback) if feedback else "",
            }
            return filled(prompt, args.reprompt_template, values, number)

        return self._prompts.fitted(row, number, fill, [solution or "", feedback or ""], self._limit)


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1].get("content") or "")
