"""The loop of turns with a backend that says what a script tells it: ids, masks, order, budgets, failures, time limits.

Expected texts are written by hand after the tiny template: `<|im_start|>role ... <|im_end|>` and a newline.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import math
import threading
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from preftune.data.templates import Chat
from preftune.errors import ConfigError, DataFormatError, RolloutError
from preftune.rollouts.calls import Call, CallRunner
from preftune.rollouts.local import LocalBackend
from preftune.rollouts.toolbox import Toolbox
from preftune.rollouts.tools import ToolRollouts
from preftune.rollouts.turns import ToolTurns
from preftune.types import Sampling
from tests.support.chat_templates import TOOLS, family_tokenizer
from tests.support.scripted import LOGP, ScriptedBackend, call, say
from tests.unit.rollouts.helpers import keys, make_prompts


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def wait_add(a: int, b: int) -> int:
    """Adds two numbers, after a while.

    Args:
        a: The first.
        b: The second.
    """
    await asyncio.sleep(0.02)
    return a + b


def broken(a: int) -> int:
    """Fails.

    Args:
        a: A number.
    """
    raise ZeroDivisionError(f"no {a}")


def rows(*texts):
    return [{"prompt": [{"role": "user", "content": text}], "prompt_ids": [1]} for text in texts]


def draw(tokenizer, script, toolbox=None, *, prompts=("q",), size=1, budget=800, backend=None, data=None, **options):
    toolbox = toolbox or Toolbox([add, wait_add, broken])
    backend = backend or ScriptedBackend(tokenizer, script)
    rollouts = ToolRollouts(backend, tokenizer, toolbox, **options)
    data = data or rows(*prompts)
    stream = [(5, number) for number in range(len(data))]
    return rollouts(data, size, Sampling(budget, eos_token_ids=(2,)), stream), backend


def results(*contents):
    """What the template writes behind a turn that ended: the results, and the header of the next turn."""
    turns = [f"<|im_start|>tool\n{content}<|im_end|>\n" for content in contents]
    return "\n" + "".join(turns) + "<|im_start|>assistant\n"


def in_turns(*turns):
    """A script: the n-th turn of a completion, by the number of results that its prompt holds."""
    return lambda prompt, key: turns[prompt.count("<|im_start|>tool\n")]


def tool_contents(out, i=0):
    return [m["content"] for m in out.columns["completions"][i] if m["role"] == "tool"]


def test_ids_masks_and_log_probabilities(tokenizer):
    """What was drawn, then the template's text of the result with mask 0 and NaN, then what was drawn next."""
    first, last = say(call("add", a=2, b=3)), say("It is 5.")
    out, backend = draw(tokenizer, in_turns(first, last))
    parts = [tokenizer(t, add_special_tokens=False)["input_ids"] for t in (first, results("5"), last)]
    assert out.completion_ids == [parts[0] + parts[1] + parts[2]]
    assert out.masks == [[1] * len(parts[0]) + [0] * len(parts[1]) + [1] * len(parts[2])]
    drawn = [value == LOGP if one else math.isnan(value) for value, one in zip(out.logps[0], out.masks[0])]
    assert all(drawn) and len(drawn) == len(out.completion_ids[0])
    assert out.finish_reasons == ["stop"]
    prompt = tokenizer.decode(out.prompt_ids[0])
    assert "Adds two numbers." in prompt and prompt.endswith("q<|im_end|>\n<|im_start|>assistant\n")
    assert backend.requests[1][0] == [out.prompt_ids[0] + parts[0] + parts[1]]
    asked, answer, said = out.columns["completions"][0]
    assert asked["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}}
    assert answer == {"role": "tool", "name": "add", "tool_call_id": asked["tool_calls"][0]["id"], "content": "5"}
    assert said["content"] == "It is 5."
    assert out.columns["prompts"] == [[{"role": "user", "content": "q"}]]
    assert out.metrics == {"tools/call_frequency": 1.0, "tools/failure_frequency": 0.0}


def test_what_was_written_is_never_tokenized_again(tokenizer):
    """A turn in single letters, which the tokenizer would write in fewer tokens, stays as it was drawn."""
    odd = [i for letter in call("add", a=1, b=1) for i in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert odd != tokenizer(call("add", a=1, b=1), add_special_tokens=False)["input_ids"]

    class Spelling(ScriptedBackend):
        def generate(self, prompts, num_generations, sampling, *, stream):
            out = super().generate(prompts, num_generations, sampling, stream=stream)
            if len(self.requests) == 1:
                out.completion_ids[0][:] = [*odd, end]
                out.logps[0][:] = [LOGP] * (len(odd) + 1)
            return out

    backend = Spelling(tokenizer, in_turns(say("x"), say("2")))
    out, _ = draw(tokenizer, None, backend=backend)
    assert out.completion_ids[0][: len(odd) + 1] == [*odd, end]
    assert backend.requests[1][0][0][: -len(tokenizer(results("2"), add_special_tokens=False)["input_ids"])] == [
        *out.prompt_ids[0],
        *odd,
        end,
    ]
    assert tool_contents(out) == ["2"]


def test_results_in_call_order_when_async_and_plain_are_mixed(tokenizer):
    turn = say(call("wait_add", a=1, b=0) + call("add", a=2, b=0) + call("wait_add", a=3, b=0) + call("add", a=4, b=0))
    out, _ = draw(tokenizer, in_turns(turn, *["?"] * 3, say("done")))
    assert tool_contents(out) == ["1", "2", "3", "4"]
    ids = [m["tool_call_id"] for m in out.columns["completions"][0] if m["role"] == "tool"]
    assert ids == [c["id"] for c in out.columns["completions"][0][0]["tool_calls"]]
    assert len(set(ids)) == 4 and all(len(one) == 9 for one in ids)


def test_calls_of_all_rollouts_run_together(tokenizer):
    """Eight calls of a plain tool wait for each other: one after another they would never come to an end."""
    barrier = threading.Barrier(8, timeout=5)

    def meet() -> str:
        """Waits for the others."""
        barrier.wait()
        return "met"

    out, backend = draw(tokenizer, in_turns(say(call("meet")), say("ok")), Toolbox([meet]), prompts=("a", "b"), size=4)
    assert [tool_contents(out, i) for i in range(8)] == [["met"]] * 8
    assert [(len(prompts), n) for prompts, n, *_ in backend.requests] == [(2, 4), (8, 1)]


@pytest.mark.parametrize(
    ("turn", "shown"),
    [
        (call("broken", a=7), "ZeroDivisionError: no 7"),
        (call("unknown", a=7), "there is no tool 'unknown'; wanted one of 'add', 'wait_add', 'broken'"),
        (call("add", a=7), "TypeError"),
        ('<call>{"name": "add", "arguments": [1, 2]}</call>', "wanted an object"),
    ],
)
def test_failures_become_errors_that_the_model_reads(tokenizer, turn, shown):
    out, _ = draw(tokenizer, in_turns(say(call("add", a=1, b=1) + turn), "?", say("sorry")))
    good, bad = tool_contents(out)
    assert good == "2" and shown in json.loads(bad)["error"]
    assert out.metrics == {"tools/call_frequency": 2.0, "tools/failure_frequency": 0.5}
    assert out.finish_reasons == ["stop"]


@pytest.mark.parametrize(
    "text",
    [
        '<call>{"name": "add", "argum',
        "<call>add</call>",
        '<call>{"arguments": {}}</call>',
        "<call>[1]</call>",
        "</call><call>",
        "<call>" + "[" * 3000,
        '<call>{"name": "add", "arguments": ' + "[" * 20_000 + "]" * 20_000 + "}</call>",  # too deep for any Python
        "",
    ],
)
def test_what_is_no_call_is_plain_text(tokenizer, text):
    out, _ = draw(tokenizer, in_turns(say(text)), budget=50_000)
    (message,) = out.columns["completions"][0]
    assert message["role"] == "assistant" and not message.get("tool_calls")
    assert sum(out.masks[0]) == len(out.completion_ids[0])


@pytest.mark.parametrize("kind", ["plain", "async", "async that blocks", "async that does not let go"])
def test_a_tool_that_hangs(tokenizer, kind):
    def plain(a: int) -> int:
        """Hangs.

        Args:
            a: A number.
        """
        time.sleep(1.5 if kind != "async that blocks" else 4)
        return a

    async def hanging(a: int) -> int:
        """Hangs.

        Args:
            a: A number.
        """
        if kind == "async that blocks":
            return plain(a)
        for _ in range(3):
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                if kind == "async":
                    raise
        return a

    hang = plain if kind == "plain" else hanging
    toolbox = Toolbox([add, hang], timeout=0.2)
    started = time.perf_counter()
    turn = say(call("add", a=1, b=1) + call(hang.__name__, a=1))
    out, _ = draw(tokenizer, in_turns(turn, "?", say("late")), toolbox)
    assert time.perf_counter() - started < 3
    good, bad = tool_contents(out)
    assert "took longer than 0.2 seconds" in json.loads(bad)["error"]
    assert good == "2" or kind == "async that blocks"  # the loop that a plain call is waited for on is blocked
    assert out.metrics["tools/failure_frequency"] >= 0.5
    again, _ = draw(tokenizer, in_turns(say(call("add", a=1, b=2)), say("ok")), toolbox)
    assert tool_contents(again) == ["3"]


def test_a_tool_that_ends_the_process():
    async def leave():
        raise SystemExit(3)

    def leave_at_once():
        raise SystemExit(3)

    outcomes = CallRunner(None).run([Call("a", leave, {}), Call("b", leave_at_once, {}), Call("c", lambda: 1, {})])
    assert ["SystemExit" in (o.error or "") for o in outcomes] == [True, True, False]
    assert outcomes[2].value == 1


def test_partials_and_lambdas_around_async_are_awaited():
    runner = CallRunner(1.0)
    functions = [functools.partial(wait_add, b=1), lambda a: wait_add(a, 1)]
    assert [o.value for o in runner.run([Call("f", f, {"a": 1}) for f in functions])] == [2, 2]


def test_the_budget_is_for_all_turns(tokenizer):
    """The next turn gets what is left; the sampler is told, and what it draws beyond is cut."""
    first = say(call("add", a=2, b=3))
    used = len(tokenizer(first + results("5"), add_special_tokens=False)["input_ids"])
    for minds in (True, False):
        backend = ScriptedBackend(tokenizer, in_turns(first, "w" * 300), minds_budget=minds)
        out, _ = draw(tokenizer, None, backend=backend, budget=used + 7)
        assert len(out.completion_ids[0]) == used + 7
        assert out.finish_reasons == ["length"]
        assert backend.requests[1][2].budgets == (7,) and backend.requests[1][2].max_new_tokens == 7
        assert len(out.masks[0]) == len(out.logps[0]) == used + 7


@pytest.mark.parametrize("left", [0, -1])
def test_a_result_that_does_not_fit_ends_the_completion(tokenizer, left):
    """With room for the result and no token more it would end in a question: it ends where the policy ended."""
    first = say(call("add", a=2, b=3))
    drawn = tokenizer(first, add_special_tokens=False)["input_ids"]
    used = len(tokenizer(first + results("5"), add_special_tokens=False)["input_ids"])
    out, backend = draw(tokenizer, in_turns(first, say("5")), budget=used + left)
    assert out.completion_ids == [drawn] and out.masks == [[1] * len(drawn)]
    assert out.finish_reasons == ["length"] and len(backend.requests) == 1
    assert tool_contents(out) == []
    out, backend = draw(tokenizer, in_turns(first, say("5")), budget=used + 1)
    assert len(out.completion_ids[0]) == used + 1


def test_the_limit_of_the_model(tokenizer):
    first = say(call("add", a=2, b=3))
    out, _ = draw(tokenizer, in_turns(first, say("5")))
    limit = len(out.prompt_ids[0]) + len(tokenizer(first + results("5"), add_special_tokens=False)["input_ids"])
    ends = [draw(tokenizer, in_turns(first, say("5")), max_tokens=limit + more)[0].finish_reasons for more in (0, 1)]
    assert ends == [["length"], ["stop"]]


def test_a_turn_that_was_cut_makes_no_calls(tokenizer):
    out, backend = draw(tokenizer, in_turns(call("add", a=2, b=3) + "and" * 50), budget=60)
    assert len(backend.requests) == 1 and out.finish_reasons == ["length"]
    assert out.metrics["tools/call_frequency"] == 0


@pytest.mark.parametrize("most", [0, 1, 3])
def test_the_number_of_rounds_of_calls(tokenizer, most):
    out, backend = draw(tokenizer, lambda *_: say(call("add", a=1, b=1)), budget=2000, max_iterations=most)
    assert len(backend.requests) == most + 1
    assert tool_contents(out) == ["2"] * most
    assert out.columns["completions"][0][-1]["role"] == "assistant"


def test_random_numbers_do_not_depend_on_who_else_is_asked(tokenizer):
    """The key of a turn names prompt, sample and turn; rollouts that are over earlier do not move it."""

    def script(prompt, key):
        talks = int(prompt.rpartition("user\n")[2][0])
        return say(call("add", a=key[2], b=1) if prompt.count("<|im_start|>tool\n") < talks else str(key))

    whole, _ = draw(tokenizer, script, prompts=("1", "2", "0"), size=2)
    data = rows("2")
    rollouts = ToolRollouts(ScriptedBackend(tokenizer, script), tokenizer, Toolbox([add, wait_add, broken]))
    alone = rollouts(data, 2, Sampling(800, eos_token_ids=(2,)), [(5, 1)])
    assert alone.completion_ids == whole.completion_ids[2:4]
    said = [talk[-1]["content"] for talk in whole.columns["completions"]]
    assert said[4:6] == ["(5, 2, 0)", "(5, 2, 1)"]
    assert said[2:4] == ["(5, 1, 0, 2, 0)", "(5, 1, 1, 2, 0)"]
    assert len(set(said)) == 6


def test_a_backend_without_log_probabilities(tokenizer):
    backend = ScriptedBackend(tokenizer, in_turns(say(call("add", a=1, b=1)), say("2")), gives_logps=False)
    out, _ = draw(tokenizer, None, backend=backend)
    assert out.logps is None and 0 in out.masks[0]


def test_an_empty_completion(tokenizer):
    out, _ = draw(tokenizer, in_turns("", ""), size=2)
    assert out.completion_ids == [[], []] and out.masks == [[], []]
    assert [talk[0]["content"] for talk in out.columns["completions"]] == ["", ""]


class Counter:
    """An environment that counts."""

    made = 0

    def __init__(self):
        type(self).made += 1
        self.value = None

    def reset(self, start: int = 0) -> str | None:
        self.value = start
        return f" from {start}" if start else None

    def up(self, by: int) -> int:
        """Counts up.

        Args:
            by: How far.
        """
        self.value += by
        return self.value

    async def double(self) -> int:
        """Doubles the count."""
        before = self.value
        await asyncio.sleep(0.01)
        self.value = 2 * before
        return self.value

    def _hidden(self):
        raise AssertionError

    def get_reward(self) -> float:
        return float(self.value)


def test_a_method_that_hangs_does_not_keep_the_next_ones_waiting(tokenizer):
    class Slow(Counter):
        def wait(self) -> int:
            """Waits."""
            time.sleep(1)
            return 0

    toolbox = Toolbox(environment_factory=Slow, timeout=0.1)
    turn = say(call("up", by=1) + call("wait") + call("up", by=2))
    out, _ = draw(tokenizer, in_turns(turn, "?", "?", say("ok")), toolbox)
    one, hung, three = tool_contents(out)
    assert (one, three) == ("1", "3") and "wait took longer than 0.1 seconds" in hung


class Silent:
    """An environment without a reward."""

    async def reset(self, **row):
        return None

    def look(self) -> list[dict]:
        """Looks."""
        return [{"type": "text", "text": "dark"}]


def test_an_environment_for_each_rollout(tokenizer):
    """State is a rollout's own, calls on it happen in order, reset comes first, and instances are used again."""
    Counter.made = 0
    toolbox = Toolbox(environment_factory=Counter)
    data = [{**row, "start": start} for row, start in zip(rows("a", "b"), (0, 10))]
    turn = say(call("up", by=1) + call("double") + call("up", by=3))
    out, _ = draw(tokenizer, in_turns(turn, "?", "?", say("ok")), toolbox, data=data, size=2)
    assert [tool_contents(out, i) for i in range(4)] == [["1", "2", "5"]] * 2 + [["11", "22", "25"]] * 2
    assert [prompt[-1]["content"] for prompt in out.columns["prompts"]] == ["a", "a", "b from 10", "b from 10"]
    assert data[1]["prompt"][-1]["content"] == "b"
    environments = out.columns["environments"]
    assert len({id(e) for e in environments}) == 4 and Counter.made == 4
    (reward,) = toolbox.rewards
    assert reward.__name__ == "Counter"
    assert asyncio.run(reward(environments=environments, prompts=None)) == [5.0, 5.0, 25.0, 25.0]
    names = [schema["function"]["name"] for schema in toolbox.schemas("")]
    assert names == ["double", "up"]
    again, _ = draw(tokenizer, in_turns(turn, "?", "?", say("ok")), toolbox, data=data, size=2)
    assert [tool_contents(again, i) for i in range(4)] == [tool_contents(out, i) for i in range(4)]
    assert Counter.made == 4


def test_prompts_of_a_group_that_differ(tokenizer):
    """An environment that tells every rollout something else: each is drawn for its own prompt."""
    texts = iter("abcd")

    class Teller:
        def reset(self):
            return next(texts)

        def look(self) -> str:
            """Looks."""
            return "x"

    out, backend = draw(tokenizer, in_turns(say("ok")), Toolbox(environment_factory=Teller), size=4)
    assert [prompt[-1]["content"] for prompt in out.columns["prompts"]] == ["qa", "qb", "qc", "qd"]
    assert [(len(prompts), n) for prompts, n, *_ in backend.requests] == [(4, 1)]
    assert [tokenizer.decode(ids).count("qa<|im_end|>") for ids in out.prompt_ids] == [1, 0, 0, 0]


def test_environments_by_name(tokenizer):
    toolbox = Toolbox([add], {"count": Counter, "silent": Silent})
    data = [{**row, "environment": name} for row, name in zip(rows("a", "b"), ("silent", "count"))]
    turn = say(call("look") + call("up", by=1) + call("add", a=1, b=1))
    out, _ = draw(tokenizer, in_turns(turn, "?", "?", say("ok")), toolbox, data=data)
    silent, count = tool_contents(out, 0), tool_contents(out, 1)
    assert silent[0] == "dark" and "no tool 'up'" in silent[1] and silent[2] == "2"
    assert "no tool 'look'" in count[0] and count[1:] == ["1", "2"]
    assert "Looks." in tokenizer.decode(out.prompt_ids[0]) and "Looks." not in tokenizer.decode(out.prompt_ids[1])
    (reward,) = toolbox.rewards
    assert asyncio.run(reward(environments=out.columns["environments"])) == [None, 1.0]
    with pytest.raises(DataFormatError, match=r"environment='cuont'.*did you mean 'count'"):
        draw(tokenizer, None, toolbox, data=[{**data[0], "environment": "cuont"}])


def test_a_reset_that_fails_names_the_row(tokenizer):
    class Failing:
        def reset(self):
            raise OSError("gone")

    class Telling:
        def reset(self):
            return 5

    with pytest.raises(RolloutError, match=r"Failing.reset failed for the row with prompt.*'q'.*OSError: gone"):
        draw(tokenizer, None, Toolbox(environment_factory=Failing))
    with pytest.raises(RolloutError, match="returned a int; wanted text or None"):
        draw(tokenizer, None, Toolbox(environment_factory=Telling))


class NoReset:
    def look(self) -> str:
        """Looks."""
        return ""


def untyped(a):
    """Has no types.

    Args:
        a: What?
    """


def undescribed(a: int):
    """Has no description of a."""


@pytest.mark.parametrize(
    ("tools", "factory", "said"),
    [
        ([untyped], None, "no schema can be made of 'untyped'"),
        ([undescribed], None, "no schema can be made of 'undescribed'"),
        ([functools.partial(add, 1)], None, "wanted functions"),
        ([add, add], None, "two tools are called 'add'"),
        (None, NoReset, "NoReset has no method 'reset'"),
        (None, {}, "no entries"),
        (None, {"a": 3}, "no callable for 'a'"),
    ],
)
def test_tools_that_cannot_be_called(tools, factory, said):
    with pytest.raises(ConfigError, match=said):
        Toolbox(tools, factory)


def test_text_prompts_are_refused(tokenizer):
    with pytest.raises(DataFormatError, match="must be messages"):
        draw(tokenizer, None, data=[{"prompt": "plain text"}])


def test_templates_without_tools_are_refused(make_tokenizer):
    plain = make_tokenizer("no_template")
    with pytest.raises(ConfigError, match="does not write tools"):
        ToolTurns(plain)
    with pytest.raises(ConfigError, match="does not write tools"):
        ToolTurns(family_tokenizer("smollm"))


class CallsFirst(ScriptedBackend):
    """A call at first, then what the policy itself draws."""

    def generate(self, prompts, num_generations, sampling, *, stream):
        if not any("<call>" in self.tokenizer.decode(prompt) for prompt in prompts):
            return super().generate(prompts, num_generations, sampling, stream=stream)
        return LocalBackend(self.script.model).generate(prompts, num_generations, sampling, stream=stream)


def test_later_turns_of_the_policy_itself(tiny_model, tokenizer):
    """Their log-probs are those of one forward over everything before them; alone a prompt gets the same samples."""
    model = tiny_model()

    def script(prompt, key):
        return say(call("add", a=key[-1], b=1))

    script.model = model
    used = len(tokenizer(say(call("add", a=0, b=1)) + results("1"), add_special_tokens=False)["input_ids"])
    how = {"backend": CallsFirst(tokenizer, script), "budget": used + 6, "size": 2}
    out, _ = draw(tokenizer, None, prompts=("a", "bb"), **how)
    for i in range(4):
        prompt, answer = out.prompt_ids[i], out.completion_ids[i]
        with torch.no_grad():
            logps = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        own = [place for place in range(used, len(answer)) if out.masks[i][place]]
        assert own == list(range(used, len(answer))) and own
        wanted = [logps[len(prompt) + place - 1, answer[place]].item() for place in own]
        assert [out.logps[i][place] for place in own] == pytest.approx(wanted, abs=1e-4)
    rollouts = ToolRollouts(how["backend"], tokenizer, Toolbox([add, wait_add, broken]))
    alone = rollouts(rows("bb"), 2, Sampling(used + 6, eos_token_ids=(2,)), [(5, 1)])
    assert alone.completion_ids == out.completion_ids[2:] and alone.completion_ids[0] != alone.completion_ids[1]


def test_a_budget_for_each_prompt(tiny_model):
    """With budgets of their own, completions are the beginnings of those without."""
    backend, prompts = LocalBackend(tiny_model()), make_prompts((5, 9, 1))
    whole = backend.generate(prompts, 2, Sampling(9), stream=keys(3))
    few = backend.generate(prompts, 2, Sampling(9, budgets=(2, 9, 5)), stream=keys(3))
    for row, most in enumerate([2, 2, 9, 9, 5, 5]):
        assert few.completion_ids[row] == whole.completion_ids[row][:most]
        assert few.logps[row] == pytest.approx(whole.logps[row][:most], abs=1e-5)


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_written_ends_in_a_rollout(tokenizer, data):
    """Calls with pieces left out, doubled or put in: never an exception, and the parts of a rollout fit together."""
    text = call("add", a=1, b=2) + call("broken", a="<|im_end|>") + "so"
    for _ in range(data.draw(st.integers(0, 3))):
        start, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        piece = data.draw(
            st.sampled_from(["", "<call>", "</call>", "{", '"', "null", "[]", "<|im_end|>", text[start:end]])
        )
        text = text[:start] + piece + text[end:]
    out, _ = draw(tokenizer, in_turns(say(text), *[say(text)] * 40), budget=1500, max_iterations=2)
    assert len(out.completion_ids[0]) == len(out.masks[0]) == len(out.logps[0])
    assert [m["role"] for m in out.columns["completions"][0]].count("assistant") >= 1
    assert len(tool_contents(out)) <= out.metrics["tools/call_frequency"]


def test_several_calls_where_the_template_takes_one():
    """llama3's refuses a turn of two calls, not their results; a template that refuses those too ends the rollout."""
    tokenizer = copy.deepcopy(family_tokenizer("llama3"))
    turn = {"name": "add", "arguments": {"a": 1, "b": 2}}
    calls = [{"id": f"call0000{n}", "type": "function", "function": turn} for n in range(2)]
    results = [
        {"role": "tool", "name": "add", "tool_call_id": c["id"], "content": f"r{n}"} for n, c in enumerate(calls)
    ]
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    written = ToolTurns(tokenizer).results(calls, results, Chat([], 0))
    assert written == "".join(header.format("ipython") + f"r{n}<|eot_id|>" for n in range(2)) + header.format(
        "assistant"
    )
    refusal = "{%- if messages | length > 3 %}{{- raise_exception('no') }}{%- endif %}"
    tokenizer.chat_template = tokenizer.chat_template + refusal
    assert ToolTurns(tokenizer).results(calls, results, Chat([], 0)) is None


def test_calls_that_the_template_has_no_place_for_end_the_rollout(make_tokenizer):
    tokenizer = make_tokenizer("plain")
    tokenizer.chat_template += "{%- if messages | length > 3 %}{{- raise_exception('no') }}{%- endif %}"
    turn = say(call("add", a=1, b=2) * 2)
    out, backend = draw(tokenizer, in_turns(turn), size=2)
    assert len(backend.requests) == 1 and out.finish_reasons == ["stop"] * 2
    assert tokenizer.decode(out.completion_ids[0]) == turn


def test_of_several_templates_the_one_for_tools(make_tokenizer, tokenizer):
    several = make_tokenizer("plain")
    several.chat_template = {"default": family_tokenizer("smollm").chat_template, "tool_use": tokenizer.chat_template}
    out, _ = draw(several, in_turns(say(call("add", a=1, b=2)), say("3")))
    same, _ = draw(tokenizer, in_turns(say(call("add", a=1, b=2)), say("3")))
    assert out.completion_ids == same.completion_ids and out.prompt_ids == same.prompt_ids


@pytest.mark.parametrize("family", TOOLS)
def test_every_family_of_templates(family):
    """Ids of prompt, call and result are a beginning of what the template itself writes for that conversation.

    qwen3 as training writes it: its own template would drop the empty thought once the result is there. In history
    deepseek keeps no thought, of which the rollout has one.
    """
    tokenizer = family_tokenizer(family)
    before = copy.deepcopy(tokenizer.__dict__.get("response_template"))
    turns = ToolTurns(tokenizer)
    out, backend = draw(tokenizer, None, Toolbox([add]), backend=Echo(tokenizer, turns))
    talk = out.columns["completions"][0]
    assert [m["role"] for m in talk] == ["assistant", "tool", "assistant"]
    assert talk[1]["content"] == "5" and talk[2]["content"].strip() == "It is 5."
    written = tokenizer.decode([i for i, one in zip(out.completion_ids[0], out.masks[0]) if not one])
    messages = [*out.columns["prompts"][0], talk[0], talk[1]]
    whole = turns._probe.render(messages, tools=Toolbox([add]).schemas(None), add_generation_prompt=True)
    assert whole.endswith(written) and "5" in written
    if family != "deepseek":
        assert tokenizer.decode(backend.requests[1][0][0]) == whole
    assert tokenizer.__dict__.get("response_template") == before


class Echo(ScriptedBackend):
    """Says a call and then an answer as a template writes them: what it adds to the prompt of an answer."""

    def __init__(self, tokenizer, turns):
        super().__init__(tokenizer, self._next)
        self._turns = turns

    def _next(self, prompt, key):
        schemas = Toolbox([add]).schemas(None)
        asked = [{"role": "user", "content": "q"}]
        function = {"name": "add", "arguments": {"a": 2, "b": 3}}
        tool_call = {"type": "function", "id": "call00000", "function": function}
        calling = {"role": "assistant", "content": "", "tool_calls": [tool_call]}
        result = {"role": "tool", "name": "add", "tool_call_id": "call00000", "content": "5"}
        answer = {"role": "assistant", "content": "It is 5."}
        before, turn = (asked, calling) if len(self.requests) == 1 else ([*asked, calling, result], answer)
        render = functools.partial(self._turns._probe.render, tools=schemas)
        begun = render(before, add_generation_prompt=True)
        if begun.endswith("<think>\n"):  # which history does not keep
            rest = "So.</think>" + render([*before, turn])[len(begun.removesuffix("<think>\n")) :]
        else:
            rest = render([*before, turn])[len(begun) :]
        ends = [rest.index(stop) + len(stop) for stop in self._turns._stops if stop in rest]
        return rest[: min(ends)] if ends else rest + self._turns._stops[-1]
