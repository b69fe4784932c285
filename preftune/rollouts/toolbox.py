"""What a policy may call: plain functions, and the public methods of environments, with schemas for chat templates.

Mistakes in a tool (no types, no docstring, two of one name) are known before a model is loaded.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from preftune.configs.fields import did_you_mean
from preftune.data.columns import first_row
from preftune.data.prompts import read_prompt
from preftune.data.template_probes import Messages
from preftune.errors import ConfigError, DataFormatError, RolloutError
from preftune.rewards.calling import Signature, is_async
from preftune.rollouts.calls import Call, CallRunner

Schema = dict[str, Any]
Factory = Callable[[], Any]
_NO_TOOLS = ("reset", "get_reward")
_ONLY = ""


class Toolbox:
    """The tools of a run.

    Args:
        tools: Functions, plain or async, with typed arguments and a Google docstring that describes each.
        environment_factory: Makes an environment, or a dict of such by the name that a row gives in `environment`.
        timeout: Seconds that a call may take.

    Raises:
        ConfigError: a tool without a schema, two tools of one name, an environment without `reset`.
    """

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]] | None = None,
        environment_factory: Factory | Mapping[str, Factory] | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        self.runner = CallRunner(timeout)
        self.functions: dict[str, Callable[..., Any]] = {}
        self._schemas: list[Schema] = []
        for tool in tools or ():
            schema = schema_of(tool, "tools")
            name = schema["function"]["name"]
            if name in self.functions:
                raise ConfigError(f"two tools are called {name!r}, and the model calls them by name. Rename one.")
            self.functions[name] = tool
            self._schemas.append(schema)
        self.environments = None if environment_factory is None else Environments(environment_factory)
        for name, schemas in self.environments.schemas.items() if self.environments else ():
            both = {schema["function"]["name"] for schema in schemas} & set(self.functions)
            if both:
                raise ConfigError(f"{sorted(both)} are tools and methods of environment {name or 'class'}. Rename one.")

    def schemas(self, environment: str | None) -> list[Schema]:
        """Of the functions, and of the environment that a rollout has."""
        if self.environments is None or environment is None:
            return self._schemas
        return [*self._schemas, *self.environments.schemas[environment]]

    def find(self, name: str, environment: Any, environment_name: str | None) -> Callable[..., Any] | None:
        """The function of a rollout with this environment; None where there is none of that name."""
        if name in self.functions or self.environments is None or environment_name is None:
            return self.functions.get(name)
        known = [schema["function"]["name"] for schema in self.environments.schemas[environment_name]]
        return getattr(environment, name) if name in known else None

    @property
    def rewards(self) -> list[EnvironmentReward]:
        """A reward function for each kind of environment that gives rewards."""
        return [] if self.environments is None else self.environments.rewards

    @property
    def columns(self) -> tuple[str, ...]:
        """What reward functions get beside the columns of the data."""
        return () if self.environments is None else ("environments",)

    def check_rows(self, rows: Any, split: str) -> None:
        """Raises a DataFormatError where rows of a split cannot be used, as far as columns and the first row tell."""
        messages_of(first_row(rows, split))
        if self.environments is not None:
            self.environments.check_columns(list(rows.column_names or []), rows, split)


class Environments:
    """One environment for each rollout of a batch: made when first needed, reset and used again by later batches."""

    def __init__(self, factory: Factory | Mapping[str, Factory]) -> None:
        self.is_named = isinstance(factory, Mapping)
        self._factories: dict[str, Factory] = dict(factory) if isinstance(factory, Mapping) else {_ONLY: factory}
        wrong = [name for name, made in self._factories.items() if not callable(made)]
        if wrong or not self._factories:
            raise ConfigError(
                f"environment_factory has {f'no callable for {wrong[0]!r}' if wrong else 'no entries'}; wanted a class "
                "or function that makes an environment, or a dict of them by name."
            )
        self._pool = {name: [make()] for name, make in self._factories.items()}
        self.schemas = {name: _method_schemas(made[0]) for name, made in self._pool.items()}

    def name_of(self, row: Mapping[str, Any]) -> str:
        """Which of the environments a row asks for.

        Raises:
            DataFormatError: there is none of that name.
        """
        if not self.is_named:
            return _ONLY
        name = row.get("environment")
        if name not in self._factories:
            near = did_you_mean(name, self._factories) if isinstance(name, str) else ""
            raise DataFormatError(
                f"a row has environment={name!r}; wanted one of {', '.join(map(repr, self._factories))}, the keys of "
                f"environment_factory{near or '.'}"
            )
        return name

    def check_columns(self, columns: Sequence[str], rows: Any, split: str) -> None:
        """As `Toolbox.check_rows`."""
        if "environments" in columns:
            raise DataFormatError(
                f"{split} has a column 'environments', and that is what reward functions get of environment_factory. "
                "Rename the column."
            )
        if self.is_named and columns:
            if "environment" not in columns:
                raise DataFormatError(
                    f"{split} has the columns {list(columns)}; with several environments each row names its own in "
                    f"'environment' (one of {', '.join(map(repr, self._factories))}; kept where "
                    "remove_unused_columns=False)."
                )
            values = set(rows.unique("environment")) if "unique" in dir(rows) else ()
            for value in values:
                self.name_of({"environment": value})

    def take(self, names: Sequence[str]) -> list[Any]:
        """An environment for each name, no two the same."""
        taken = dict.fromkeys(self._factories, 0)
        environments = []
        for name in names:
            if taken[name] == len(self._pool[name]):
                self._pool[name].append(self._factories[name]())
            environments.append(self._pool[name][taken[name]])
            taken[name] += 1
        return environments

    def reset(self, environments: Sequence[Any], rows: Sequence[Mapping[str, Any]], runner: CallRunner) -> list[str]:
        """Resets each for its row, all together; what they have to say first, "" for nothing.

        Raises:
            RolloutError: a reset fails, takes too long, or returns something other than text or None.
        """
        calls = []
        for environment, row in zip(environments, rows, strict=True):
            offered = {key: value for key, value in row.items() if key not in ("environment", "prompt_ids")}
            arguments = Signature.of(environment.reset).pick(offered)[1]
            calls.append(Call(f"{type(environment).__name__}.reset", environment.reset, arguments))
        texts = []
        for call, row, outcome in zip(calls, rows, runner.run(calls), strict=True):
            if outcome.error is not None or not isinstance(outcome.value, str | None):
                what = outcome.error or f"it returned a {type(outcome.value).__name__}; wanted text or None"
                raise RolloutError(f"{call.name} failed for the row with prompt {row.get('prompt')!r}: {what}.")
            texts.append(outcome.value or "")
        return texts

    @property
    def rewards(self) -> list[EnvironmentReward]:
        kinds = dict.fromkeys(type(made[0]) for made in self._pool.values())
        return [EnvironmentReward(kind) for kind in kinds if "get_reward" in dir(kind)]


class EnvironmentReward:
    """Asks each environment for the reward of its rollout; None for environments of another kind."""

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.__name__ = kind.__name__

    async def __call__(self, environments: Sequence[Any], **_: Any) -> list[Any]:
        return await asyncio.gather(*map(self._of, environments))

    async def _of(self, environment: Any) -> Any:
        if type(environment) is not self.kind:
            return None
        if is_async(environment.get_reward):
            return await environment.get_reward()
        return environment.get_reward()


def messages_of(row: Mapping[str, Any]) -> Messages:
    """The prompt of a row.

    Raises:
        DataFormatError: it is text, or there is none.
    """
    prompt = read_prompt(row.get("prompt", ""), 0)
    if isinstance(prompt, str) or not prompt:
        raise DataFormatError(
            f"a row has the prompt {prompt!r}; with tools it must be messages, such as "
            "[{'role': 'user', 'content': '...'}], for the chat template writes the tools into it."
        )
    return prompt


def schema_of(tool: Any, where: str) -> Schema:
    """The JSON schema of a function.

    Raises:
        ConfigError: it has no name, an argument without a type, or no Google docstring that describes each.
    """
    if not inspect.isroutine(tool):
        raise ConfigError(f"{where} has {tool!r}; wanted functions with a name, typed arguments and a docstring.")
    try:
        return get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException, TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: no schema can be made of {tool.__name__!r}: {error} Give every argument a type and a line under "
            "'Args:' in a Google docstring; the model reads both."
        ) from error


def _method_schemas(environment: Any) -> list[Schema]:
    kind = type(environment)
    members = inspect.getmembers(kind, inspect.isroutine)
    if "reset" not in dict(members):
        raise ConfigError(
            f"environment {kind.__name__} has no method 'reset'; it is called with the columns of the row before each "
            "rollout, and returns text for the prompt, or None."
        )
    names = [name for name, _ in members if not name.startswith("_") and name not in _NO_TOOLS]
    return [schema_of(getattr(environment, name), f"environment {kind.__name__}") for name in names]
