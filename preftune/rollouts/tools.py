"""Rollouts with tools: the policy writes, its calls are made, the results follow what it wrote, and it writes on.

Ids only ever grow at their end: what was sampled is what is trained on, token by token, whatever it reads like.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from preftune.data.formats import template_options
from preftune.data.template_probes import Messages
from preftune.data.templates import Chat
from preftune.rollouts.base import RolloutBackend, Stream
from preftune.rollouts.calls import Call, Outcome
from preftune.rollouts.toolbox import Toolbox, messages_of
from preftune.rollouts.turns import ToolTurns
from preftune.types import FinishReason, Rollouts, Sampling


@dataclass
class _Talk:
    """One rollout as it grows.

    Attributes:
        place: Its number among the rollouts of the call.
        environment_name: None without environments.
        text: What stands before the next turn of the model: the prompt, later the results.
        logps: None where the backend gives none.
        said: Messages after the prompt.
    """

    place: int
    stream: Stream
    chat: Chat
    environment: Any
    environment_name: str | None
    prompt_ids: list[int]
    text: str
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logps: list[float] | None = field(default_factory=list)
    said: Messages = field(default_factory=list)
    finish: FinishReason = "stop"
    calls: int = 0
    failures: int = 0

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The calls of the last turn, if it came to its end."""
        return self.said[-1].get("tool_calls") or [] if self.finish == "stop" else []

    def write(self, ids: Sequence[int], logps: Sequence[float] | None) -> None:
        self.ids += ids
        self.mask += [1] * len(ids)
        self.logps = None if logps is None or self.logps is None else [*self.logps, *logps]

    def read(self, ids: Sequence[int], results: Messages, text: str) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logps = None if self.logps is None else [*self.logps, *[float("nan")] * len(ids)]
        self.said += results
        self.text = text


class ToolRollouts:
    """Draws completions in which the policy calls tools, turn by turn, all rollouts of a turn together.

    A turn's random numbers are named by the prompt's key, the sample and the turn, so they do not depend on which other
    rollouts are still under way. `max_new_tokens` is for a whole completion, results included.

    Args:
        backend: Draws each turn.
        tokenizer: Of the policy; its chat template must write tools.
        toolbox: The tools.
        options: `chat_template_kwargs`.
        max_iterations: Rounds of calls within a completion; None: any number.
        max_tokens: Of prompt and completion together, where the model has a limit.

    Raises:
        ConfigError: the chat template cannot be used; see `ToolTurns`.
    """

    def __init__(
        self,
        backend: RolloutBackend,
        tokenizer: Any,
        toolbox: Toolbox,
        *,
        options: Mapping[str, Any] | None = None,
        max_iterations: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        self._backend = backend
        self._toolbox = toolbox
        self._turns = ToolTurns(tokenizer, options)
        self._max_iterations = max_iterations
        self._max_tokens = max_tokens

    def __call__(
        self, rows: Sequence[Mapping[str, Any]], size: int, sampling: Sampling, stream: Sequence[Stream]
    ) -> Rollouts:
        """`size` completions of each row, as `RolloutBackend.generate`; tokens of results have the mask 0.

        `columns` has "completions" and "prompts" as messages, and "environments".

        Raises:
            DataFormatError: a row whose prompt is no list of messages, or that names no known environment.
            RolloutError: an environment's reset failed, or the template refused a conversation.
        """
        talks = self._begin(rows, size, stream)
        if not set(self._turns.stop_ids) & set(sampling.eos_token_ids):  # else turns would not end
            sampling = replace(sampling, eos_token_ids=(*sampling.eos_token_ids, *self._turns.stop_ids))
        under_way = talks
        with self._backend.conversations() as go_on:
            for turn in itertools.count():
                self._write(under_way, size, sampling, turn)
                under_way = [talk for talk in under_way if talk.asked]
                if not under_way or turn == self._max_iterations:
                    break
                go_on([talk.prompt_ids + talk.ids for talk in under_way])
                under_way = self._answer(under_way, sampling.max_new_tokens)
        return _rollouts(talks, has_environments=self._toolbox.environments is not None)

    # Prompts

    def _begin(self, rows: Sequence[Mapping[str, Any]], size: int, stream: Sequence[Stream]) -> list[_Talk]:
        environments = self._toolbox.environments
        names = [environments.name_of(row) if environments else None for row in rows for _ in range(size)]
        taken: list[Any] = environments.take([name for name in names if name is not None]) if environments else []
        heard = [""] * len(names)
        if environments:
            heard = environments.reset(taken, [row for row in rows for _ in range(size)], self._toolbox.runner)
        kinds = [(place // size, name, heard[place]) for place, name in enumerate(names)]
        chats = {kind: self._chat(rows[kind[0]], *kind) for kind in dict.fromkeys(kinds)}
        rendered = dict(zip(chats, self._turns.prompts(list(chats.values())), strict=True))
        return [
            _Talk(
                place=place,
                stream=tuple(stream[place // size]),
                chat=chats[kind],
                environment=taken[place] if environments else None,
                environment_name=names[place],
                prompt_ids=rendered[kind][1],
                text=rendered[kind][0],
            )
            for place, kind in enumerate(kinds)
        ]

    def _chat(self, row: Mapping[str, Any], number: int, environment: str | None, heard: str) -> Chat:
        """The prompt of a row, with what its environment said at the end."""
        _, options = template_options({"chat_template_kwargs": row.get("chat_template_kwargs")}, number)
        prompt = _with_text(messages_of(row), heard)
        return Chat(prompt, number, True, self._toolbox.schemas(environment), options)

    # Turns of the policy

    def _write(self, talks: Sequence[_Talk], size: int, sampling: Sampling, turn: int) -> None:
        """The next turn of each; at first samples of one prompt are drawn together, where their prompts are equal."""
        groups = [list(few) for _, few in itertools.groupby(talks, lambda talk: talk.place // size)]
        shared = [few for few in groups if turn == 0 and all(t.prompt_ids == few[0].prompt_ids for t in few)]
        if shared:
            drawn = self._backend.generate(
                [few[0].prompt_ids for few in shared], size, sampling, stream=[few[0].stream for few in shared]
            )
            self._take([talk for few in shared for talk in few], drawn, sampling.max_new_tokens)
        known = {talk.place for few in shared for talk in few}
        single = [talk for talk in talks if talk.place not in known]
        if single:
            budgets = [sampling.max_new_tokens - len(talk.ids) for talk in single]
            drawn = self._backend.generate(
                [talk.prompt_ids + talk.ids for talk in single],
                1,
                replace(sampling, max_new_tokens=max(budgets), budgets=tuple(budgets)),
                stream=[(*talk.stream, talk.place % size, turn) for talk in single],
            )
            self._take(single, drawn, sampling.max_new_tokens)

    def _take(self, talks: Sequence[_Talk], drawn: Rollouts, budget: int) -> None:
        for i, talk in enumerate(talks):
            ids = list(drawn.completion_ids[i])[: budget - len(talk.ids)]
            is_cut = len(ids) < len(drawn.completion_ids[i])
            talk.finish = "length" if is_cut else drawn.finish_reasons[i]
            talk.write(ids, None if drawn.logps is None else list(drawn.logps[i])[: len(ids)])
            message = self._turns.parse(ids, talk.text, talk.chat.tools or [])
            known = sum(len(said.get("tool_calls") or []) for said in talk.said)
            for number, call in enumerate(message.get("tool_calls") or [], start=known):
                call["id"] = f"call{number:05d}"  # nine letters and digits, as Mistral's template wants
            talk.said.append(message)

    # Turns of the tools

    def _answer(self, talks: Sequence[_Talk], budget: int) -> list[_Talk]:
        """Makes the calls of each and puts the results behind them; those that can write on.

        Where the results leave no room for another token the completion ends before them, and so it does where the
        template has no place for results of such calls.
        """
        results = [
            [
                {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": content}
                for call, content in zip(talk.asked, contents, strict=True)
            ]
            for talk, contents in zip(talks, self._call(talks), strict=True)
        ]
        texts = [self._turns.results(talk.asked, few, talk.chat) for talk, few in zip(talks, results, strict=True)]
        going_on = []
        for talk, few, text, ids in zip(talks, results, texts, self._turns.encode([t or "" for t in texts])):
            length = len(talk.ids) + len(ids)
            is_full = self._max_tokens is not None and len(talk.prompt_ids) + length >= self._max_tokens
            if text is None:
                continue
            if length >= budget or is_full:
                talk.finish = "length"
            else:
                talk.read(ids, few, text)
                going_on.append(talk)
        return going_on

    def _call(self, talks: Sequence[_Talk]) -> list[list[str]]:
        """What each call of each rollout gave, as the text of its message, in the order of the calls."""
        calls = [[self._prepared(talk, call["function"]) for call in talk.asked] for talk in talks]
        made = iter(self._toolbox.runner.run([c for few in calls for c in few if isinstance(c, Call)]))
        contents = []
        for talk, few in zip(talks, calls, strict=True):
            outcomes = [_as_text(next(made) if isinstance(call, Call) else call) for call in few]
            talk.calls += len(outcomes)
            talk.failures += sum(failed for _, failed in outcomes)
            contents.append([text for text, _ in outcomes])
        return contents

    def _prepared(self, talk: _Talk, function: Mapping[str, Any]) -> Call | Outcome:
        name, arguments = function["name"], function["arguments"]
        found = self._toolbox.find(name, talk.environment, talk.environment_name)
        if found is None:
            known = [schema["function"]["name"] for schema in talk.chat.tools or []]
            return Outcome(error=f"there is no tool {name!r}; wanted one of {', '.join(map(repr, known))}")
        if not isinstance(arguments, dict):
            return Outcome(error=f"the arguments of {name!r} are {arguments!r}; wanted an object with a value for each")
        is_method = name not in self._toolbox.functions
        return Call(name, found, arguments, chain=id(talk.environment) if is_method else None)


def _rollouts(talks: Sequence[_Talk], *, has_environments: bool) -> Rollouts:
    logps = [talk.logps for talk in talks if talk.logps is not None]
    calls = sum(talk.calls for talk in talks)
    columns = {"completions": [talk.said for talk in talks], "prompts": [talk.chat.messages for talk in talks]}
    return Rollouts(
        prompt_ids=[talk.prompt_ids for talk in talks],
        completion_ids=[talk.ids for talk in talks],
        finish_reasons=[talk.finish for talk in talks],
        logps=logps if len(logps) == len(talks) else None,
        masks=[talk.mask for talk in talks],
        columns=columns | ({"environments": [talk.environment for talk in talks]} if has_environments else {}),
        metrics={
            "tools/call_frequency": calls / max(len(talks), 1),
            "tools/failure_frequency": sum(talk.failures for talk in talks) / max(calls, 1),
        },
    )


def _with_text(messages: Messages, text: str) -> Messages:
    """`messages` with `text` at the end of the last one."""
    if not text:
        return messages
    last = messages[-1]
    content = last.get("content") or ""
    longer = content + text if isinstance(content, str) else [*content, {"type": "text", "text": text}]
    return [*messages[:-1], {**last, "content": longer}]


def _as_text(outcome: Outcome) -> tuple[str, bool]:
    """The content of a tool's message, and whether the call failed; what is no text is written as JSON."""
    value, error = outcome.value, outcome.error
    if error is None and isinstance(value, list) and value and all(map(_is_block, value)):
        others = sorted({block["type"] for block in value} - {"text"})
        if not others:
            return "".join(block["text"] for block in value), False
        error = f"the tool returned {', '.join(others)}, and only text can be read"
    if error is not None:
        return json.dumps({"error": error}, ensure_ascii=False), True
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), False


def _is_block(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str) and value["type"] in value
