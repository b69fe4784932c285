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
        scores_pairs: Whether its trainer can score held-out pairs (`score_pairs`), which is then done before and after.
        required: Columns without which no row can be read, for a check before anything is loaded.
    """

    name: str
    summary: str
    run: str = "preftune.cli.train:run"
    config: str | None = None
    trainer: str | None = None
    scores_pairs: bool = False
    required: tuple[str, ...] = ()

    @property
    def option_classes(self) -> list[str]:
        """The dataclasses whose fields are this command's options."""
        if self.config is None:
            return []
        shared = ["ScriptArguments", "DatasetMixtureConfig", "ModelConfig", "LaunchArguments"]
        return [self.config.partition(":")[2], *shared]


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
        scores_pairs=True,
        required=("chosen", "rejected"),
    ),
    Command("env", "Show versions, hardware and threads.", run="preftune.cli.env:main"),
    Command("demo", "Build, teach and align a tiny model on this machine, in minutes.", run="preftune.cli.demo:main"),
)
COMMANDS = {command.name: command for command in _COMMANDS}

# Config classes that the generated files describe beside those of the commands.
SHARED_CLASSES = {
    "BaseConfig": "preftune.configs.base",
    "ScriptArguments": "preftune.configs.script",
    "DatasetMixtureConfig": "preftune.configs.script",
    "ModelConfig": "preftune.configs.model",
    "LaunchArguments": "preftune.cli.launch",
}


def load_object(path: str) -> Any:
    """What `"package.module:name"` names."""
    module, _, name = path.partition(":")
    return vars(import_module(module))[name]
