"""Options that SDFT and SDPO share: who the teacher is, and how far the student is from it.

The teacher is the model itself, asked with more in its prompt; no other model is loaded.
"""

from __future__ import annotations

import string
from collections.abc import Collection
from dataclasses import dataclass

from preftune.configs.fields import option
from preftune.configs.rollout import RolloutConfig
from preftune.errors import ConfigError
from preftune.losses.names import DISTILLATION_MODES, TEACHER_KINDS


@dataclass(repr=False)
class DistillationConfig(RolloutConfig):
    """Learning to say without a context what the model says with it."""

    disable_dropout: bool = option(True, "Switch dropout off in the student and the teacher.")
    num_generations: int = option(8, "Completions sampled for each prompt.", low=1)
    max_completion_length: int = option(256, "Most tokens of a completion.", low=1)
    max_prompt_length: int | None = option(
        512,
        "Most tokens of a prompt. Rows whose own prompt is longer are left out and counted. Unset: no limit.",
        low=1,
    )
    teacher_model_kind: str = option(
        "base",
        "The teacher's weights: live (those of the student, at every step), base (those it began with) or ema (an "
        "average that follows the student).",
        choices=TEACHER_KINDS,
    )
    teacher_update_rate: float = option(
        0.05, "ema: share of the student in the new teacher; 1 is a copy.", above=0, high=1
    )
    teacher_sync_steps: int = option(1, "ema: optimizer steps between two updates of the teacher.", low=1)
    ref_adapter_name: str | None = option(
        None, "The adapter of the PeftModel you pass that the teacher begins with. Unset: as its active adapter is."
    )
    distillation_mode: str = option(
        "topk_logits",
        "What is compared at each token: full_logits (all of the vocabulary), topk_logits (the student's most probable "
        "tokens) or sampled_token (the one that was drawn).",
        choices=DISTILLATION_MODES,
    )
    distillation_alpha: float = option(
        0.5,
        "The divergence: 0 is KL(teacher || student), 1 is KL(student || teacher), between them each from the mixture "
        "of both.",
        low=0,
        high=1,
    )
    distillation_topk: int | None = option(100, "topk_logits: how many tokens.", low=1)
    distillation_add_tail: bool = option(
        False, "topk_logits: compare the probability of all other tokens too, instead of leaving them out."
    )
    distillation_is_clip: float | None = option(
        2.0,
        "Where completions are older than the student, weigh a token by the ratio of its probabilities, at most this. "
        "none: no weight.",
        above=0,
    )
    use_teacher_server: bool = option(
        False, "Refused: the teacher is asked in this process, where its weights already are."
    )

    def _check(self) -> None:
        super()._check()
        if self.use_teacher_server:
            raise ConfigError(
                "use_teacher_server=True is not supported: the teacher shares its weights with the student, and is "
                "asked in this process. Leave it out; completions may still come from a vLLM server "
                "(rollout_backend='server')."
            )
        if self.distillation_mode == "sampled_token" and self.distillation_alpha != 1:
            raise ConfigError(
                f"distillation_mode='sampled_token' knows one divergence, KL(student || teacher), but "
                f"distillation_alpha={self.distillation_alpha}. Set distillation_alpha=1, or another mode."
            )
        if self.distillation_mode == "topk_logits" and self.distillation_topk is None:
            raise ConfigError(
                "distillation_mode='topk_logits' needs distillation_topk, how many tokens to compare; 100 is usual."
            )
        if self.distillation_add_tail and self.distillation_mode != "topk_logits":
            raise ConfigError(
                f"distillation_add_tail=True would change nothing with distillation_mode={self.distillation_mode!r}. "
                "Leave it out, or set distillation_mode='topk_logits'."
            )
        if self.ref_adapter_name is not None and self.teacher_model_kind == "live":
            raise ConfigError(
                f"ref_adapter_name={self.ref_adapter_name!r} names the teacher's adapter, but the teacher 'live' is "
                "the student itself. Set teacher_model_kind to 'base' or 'ema', or leave the name out."
            )

    @property
    def moving_reference(self) -> str | None:
        """The option that moves the teacher, which is the trainer's reference; None where it stays."""
        return "teacher_model_kind='ema'" if self.teacher_model_kind == "ema" else None


def check_template(option_name: str, template: str, wanted: Collection[str]) -> None:
    """A template has each of the placeholders, and no other.

    Raises:
        ConfigError: one is missing, one is not known, or a brace stands alone.
    """
    spelt = ", ".join(f"{{{name}}}" for name in wanted)
    try:
        found = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(
            f"{option_name}={template!r} cannot be read ({error}). Its placeholders are {spelt}; a brace that is meant "
            "as one is written twice."
        ) from error
    missing, unknown = [n for n in wanted if n not in found], [n for n in found if n not in wanted]
    if missing or unknown:
        fault = f"has no {{{missing[0]}}}" if missing else f"has {{{unknown[0]}}}, which nothing fills"
        raise ConfigError(
            f"{option_name}={template!r} {fault}. Its placeholders are {spelt}; a brace that is meant as one is "
            "written twice."
        )
