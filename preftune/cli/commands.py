"""The commands of `preftune`, by name; a new one is one line here.

Everything is named as text, so that listing the commands imports none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Command:
    """A command and where it is defined.

    Attributes:
        name: What the user types.
        summary: One line for help.
        run: `"package.module:function"`; for a training command `function(command, parsed) -> exit code`, else
            `function(words) -> exit code`.
        config: For a training command, its config class.
        trainer: And its trainer class.
        scores: The method of its trainer that scores held-out rows, which is then done before and after.
        rewards: Whether it takes reward functions.
        required: Columns without which no row can be read, for a check before anything is loaded.
    """

    name: str
    summary: str
    run: str = "preftune.cli.train:run"
    config: str | None = None
    trainer: str | None = None
    scores: str | None = None
    rewards: bool = False
    required: tuple[str, ...] = ()

    @property
    def option_classes(self) -> list[str]:
        """The dataclasses whose fields are this command's options."""
        if self.config is None:
            return []
        shared = ["ScriptArguments", "DatasetMixtureConfig", "ModelConfig", "LaunchArguments"]
        rewards = ["RewardArguments"] if self.rewards else []
        return [self.config.partition(":")[2], *rewards, *shared]


_COMMANDS = (
    Command(
        "sft",
        "Supervised fine-tuning on texts, conversations or prompt-completion rows.",
        config="preftune.configs.sft:SFTConfig",
        trainer="preftune.trainers.sft:SFTTrainer",
    ),
    Command(
        "dpo",
        "Preference tuning on chosen and rejected completions, with a fixed or moving reference model.",
        config="preftune.configs.dpo:DPOConfig",
        trainer="preftune.trainers.dpo:DPOTrainer",
        scores="score_pairs",
        required=("chosen", "rejected"),
    ),
    Command(
        "reward",
        "Reward modelling: a score for an answer, learnt from chosen and rejected ones.",
        config="preftune.configs.reward:RewardConfig",
        trainer="preftune.trainers.reward:RewardTrainer",
        scores="score_pairs",
        required=("chosen", "rejected"),
    ),
    Command(
        "kto",
        "Preference tuning on single completions that are labelled good or bad (pairs become two rows).",
        config="preftune.configs.kto:KTOConfig",
        trainer="preftune.trainers.kto:KTOTrainer",
        scores="score_rows",
    ),
    Command(
        "grpo",
        "Learning from rewards of the model's own completions, compared within groups of one prompt.",
        config="preftune.configs.grpo:GRPOConfig",
        trainer="preftune.trainers.grpo:GRPOTrainer",
        rewards=True,
        required=("prompt",),
    ),
    Command(
        "rloo",
        "The same with REINFORCE and the mean of the other completions as baseline.",
        config="preftune.configs.rloo:RLOOConfig",
        trainer="preftune.trainers.rloo:RLOOTrainer",
        rewards=True,
        required=("prompt",),
    ),
    Command(
        "sdft",
        "Learning to answer without a context as the model itself answers with it.",
        config="preftune.configs.sdft:SDFTConfig",
        trainer="preftune.trainers.sdft:SDFTTrainer",
        required=("prompt", "privileged_context"),
    ),
    Command(
        "sdpo",
        "Learning from rewards, where failed attempts learn from what the model says once shown a successful one.",
        config="preftune.configs.sdpo:SDPOConfig",
        trainer="preftune.trainers.sdpo:SDPOTrainer",
        rewards=True,
        required=("prompt",),
    ),
    Command(
        "report",
        "Write one HTML page about runs: curves, findings, completions, config and data.",
        run="preftune.cli.report.command:main",
    ),
    Command("compare", "Name the first step and metric at which two runs differ.", run="preftune.cli.compare:main"),
    Command("env", "Show versions, hardware and threads.", run="preftune.cli.env:main"),
    Command("demo", "Build, teach and align a tiny model on this machine, in minutes.", run="preftune.cli.demo:main"),
)
COMMANDS = {command.name: command for command in _COMMANDS}

# Config classes that the generated files describe beside those of the commands.
SHARED_CLASSES = {
    "BaseConfig": "preftune.configs.base",
    "ScriptArguments": "preftune.configs.script",
    "DatasetMixtureConfig": "preftune.configs.script",
    "RewardArguments": "preftune.configs.script",
    "ModelConfig": "preftune.configs.model",
    "LaunchArguments": "preftune.cli.launch",
}


def load_object(path: str) -> Any:
    """What `"package.module:name"` names."""
    module, _, name = path.partition(":")
    return vars(import_module(module))[name]
