"""Options of `SDFTTrainer`: what the teacher is told, and which tokens learn from it.

Rows bring the context in a column `privileged_context`.
"""

from __future__ import annotations

from dataclasses import dataclass

from preftune.configs.distillation import DistillationConfig, check_template
from preftune.configs.fields import option


@dataclass(repr=False)
class SDFTConfig(DistillationConfig):
    """Self-distillation fine-tuning: the teacher sees the privileged context of a row, the student does not."""

    teacher_prompt_template: str = option(
        "{prompt}\n\n{privileged_context}",
        "The teacher's prompt (of a conversation: its last user turn), made of {prompt} and {privileged_context}.",
    )
    generate_from_teacher: bool = option(
        False, "Draw completions from the teacher's prompt; the student still learns them from its own."
    )
    num_loss_tokens_to_skip: int = option(0, "The first so many tokens of each completion are not learned from.", low=0)

    def _check(self) -> None:
        super()._check()
        check_template("teacher_prompt_template", self.teacher_prompt_template, ("prompt", "privileged_context"))
