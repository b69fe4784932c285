"""GRPO with tools, environments and functions that make the rollouts, end to end on a tiny model.

What the policy says comes from a script, so that every token that may or may not be learned from is known.
"""

from __future__ import annotations

import json
import signal
import time

import numpy as np
import pytest
import torch
from datasets import Dataset

from preftune.configs.grpo import GRPOConfig
from preftune.errors import ConfigError, DataFormatError, RolloutError
from preftune.trainers.grpo import GRPOTrainer
from tests.support.runs import die, digest, killed, logged, options
from tests.support.scripted import ScriptedBackend, call, say

SGD = {"optim": "sgd", "max_grad_norm": 0.0, "max_steps": 1}
ROWS = [{"prompt": [{"role": "user", "content": text}], "answer": n} for n, text in enumerate(("a", "b", "c", "d"))]


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def script(prompt, key):
    """Samples with an odd number make a call, whose result those of number 3 do not wait for."""
    sample = key[-1] if len(key) == 5 else key[4]
    if prompt.count("<|im_start|>tool\n"):
        return say("so it is " + prompt.rpartition("tool\n")[2][0])
    return say(call("add", a=sample, b=1)) if sample % 2 else say("I know" + " so" * sample)


def last_length(completions, **_):
    return [len(c[-1]["content"]) for c in completions]


def build(
    tmp_path, tiny_model, tokenizer, *, reward=last_length, rows=ROWS, with_script=script, backend=None, **changes
):
    names = ("tools", "environment_factory", "rollout_func")
    agents = {name: changes.pop(name) for name in names if name in changes}
    evaluation = changes.pop("eval_dataset", None)
    defaults = {"num_generations": 4, "max_completion_length": 150, "per_device_train_batch_size": 8}
    if backend is None and with_script is not None:
        backend = ScriptedBackend(tokenizer, with_script)
    return GRPOTrainer(
        tiny_model(),
        reward,
        GRPOConfig(**options(tmp_path, **defaults | changes)),
        train_dataset=None if rows is None else Dataset.from_list(rows),
        eval_dataset=evaluation,
        processing_class=tokenizer,
        rollout_backend=backend,
        **agents,
    )


def flat_weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def expected_step(trainer, tiny_model, learning_rate=1e-2):
    """-lr times the gradient of the mean over the model's own tokens of -A log p, one row at a time, in float64."""
    model = tiny_model().double()
    rows = [(group, i) for part in trainer._round.parts for group in part for i in range(group.rows)]
    tokens = sum(int(group.masks[i].sum()) for group, i in rows)
    loss = 0.0
    for group, i in rows:
        prompt, answer = list(group.prompt_ids), list(group.completion_ids[i])
        logps = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        for place, (token, own) in enumerate(zip(answer, group.masks[i]), start=len(prompt)):
            if own:
                loss = loss - group.advantages[i] * logps[place - 1, token] / tokens
    loss.backward()
    return -learning_rate * torch.cat([p.grad.flatten() for p in model.parameters()]).float()


def test_only_what_the_policy_wrote_is_learned(tmp_path, tiny_model, tokenizer):
    trainer = build(tmp_path, tiny_model, tokenizer, tools=[add], **SGD)
    before = flat_weights(trainer)
    trainer.train()
    assert torch.allclose(flat_weights(trainer) - before, expected_step(trainer, tiny_model), atol=1e-7)
    groups = [group for part in trainer._round.parts for group in part]
    texts = [
        tokenizer.decode(np.array(ids)[~mask])
        for group in groups
        for ids, mask in zip(group.completion_ids, group.masks)
    ]
    assert sorted(t for t in texts if t) == sorted(
        f"\n<|im_start|>tool\n{n}<|im_end|>\n<|im_start|>assistant\n" for n in (2, 4) for _ in groups
    )
    assert logged(trainer, "tools/call_frequency") == [0.5]
    assert logged(trainer, "tools/failure_frequency") == [0.0]
    own = [mask.sum() for group in groups for mask in group.masks]
    assert logged(trainer, "completions/mean_length") == [pytest.approx(np.mean(own))]
    assert any(group.advantages.any() for group in groups)


def test_options_of_tools_reach_them(tmp_path, tiny_model, tokenizer):
    """Two rounds of calls at most, a limit for each call, and what the template is told."""
    calls = []

    def slow(a: int, b: int) -> int:
        """Adds two numbers.

        Args:
            a: The first.
            b: The second.
        """
        calls.append(1)
        time.sleep(0.5)
        return a + b

    how = {"max_tool_calling_iterations": 2, "tool_timeout": 0.05, "chat_template_kwargs": {"enable_thinking": True}}
    always = lambda *_: say(call("slow", a=1, b=1))  # noqa: E731
    how |= {"max_completion_length": 600, "per_device_train_batch_size": 4, "max_steps": 1}
    trainer = build(tmp_path, tiny_model, tokenizer, tools=[slow], with_script=always, **how)
    trainer.train()
    assert len(calls) == 2 * 4
    assert logged(trainer, "tools/failure_frequency") == [1.0]
    assert tokenizer.decode(trainer._round.parts[0][0].prompt_ids).endswith("<think>\n")


def test_micro_batches_change_nothing(tmp_path, tiny_model, tokenizer):
    cuts = [
        {},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"max_tokens_per_micro_batch": 300},
    ]
    ends = []
    for n, cut in enumerate(cuts):
        trainer = build(tmp_path / str(n), tiny_model, tokenizer, tools=[add], beta=0.1, **SGD | {"max_steps": 2} | cut)
        trainer.train()
        ends.append(flat_weights(trainer))
    assert torch.allclose(ends[0], ends[1], atol=2e-6) and torch.allclose(ends[0], ends[2], atol=2e-6)


def test_killed_in_a_round_with_masks_and_resumed(tmp_path, tiny_model, tokenizer):
    """Rounds of four micro-steps with one update each; the checkpoint of step 3 lies in the first round."""
    reused = {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 6}
    how = reused | {"save_strategy": "steps", "save_steps": 3, "per_device_train_batch_size": 4, "tools": [add]}
    straight = build(tmp_path / "a", tiny_model, tokenizer, **how)
    straight.train()

    def run() -> None:
        trainer = build(tmp_path / "b", tiny_model, tokenizer, **how)
        step, calls = trainer.training_step, []

        def fatal(*args, **kwargs):
            calls.append(1)
            return die() if len(calls) == 5 else step(*args, **kwargs)

        trainer.training_step = fatal
        trainer.train()

    assert killed(run) == signal.SIGKILL
    resumed = build(tmp_path / "b", tiny_model, tokenizer, **how)
    resumed.train(resume_from_checkpoint=True)
    assert digest(resumed) == digest(straight)
    # one round is drawn after the resume, with its second turns; the one that was under way is not
    assert [len(r[0]) for r in resumed.backend.requests] == [2, 4]
    assert logged(resumed, "clip_ratio/region_mean") == logged(straight, "clip_ratio/region_mean")


def test_by_the_policy_itself(tmp_path, tiny_model, tokenizer):
    """An untrained policy calls nothing, and its own log-probabilities are those of the trainer."""
    seen = []

    def reward(prompts, completions, environments, **_):
        seen.extend(environments)
        return [len(c[-1]["content"]) for c in completions]

    how = {"max_completion_length": 8, "num_iterations": 2, "max_steps": 4}
    trainer = build(
        tmp_path, tiny_model, tokenizer, with_script=None, reward=reward, environment_factory=Counter, **how
    )
    trainer.train()
    assert trainer.rewards.names == ["reward", "Counter"]
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4
    assert {type(one) for one in seen} == {Counter} and len(set(map(id, seen))) == 8
    assert logged(trainer, "rewards/Counter/mean") == [0.0] * 2


class Counter:
    """An environment that counts."""

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

    def get_reward(self) -> float:
        return float(self.value)


class Other(Counter):
    """Another one."""


def counting(prompt, key):
    sample = key[-1] if len(key) == 5 else key[4]
    return say("done") if prompt.count("<|im_start|>tool\n") else say(call("up", by=sample))


def test_environments_reward_and_are_seen(tmp_path, tiny_model, tokenizer):
    """Rewards come from the environments alone; each sample of a prompt counted for itself."""
    rows = [{**row, "start": 10} for row in ROWS]
    how = {"with_script": counting, "reward": None, "rows": rows, "environment_factory": Counter}
    trainer = build(tmp_path, tiny_model, tokenizer, **how, **SGD)
    before = flat_weights(trainer)
    trainer.train()
    assert logged(trainer, "reward") == [11.5]  # 10 and 0, 1, 2, 3
    prompt = tokenizer.decode(list(trainer._round.parts[0][0].prompt_ids))
    assert " from 10<|im_end|>" in prompt and "Counts up." in prompt
    assert torch.allclose(flat_weights(trainer) - before, expected_step(trainer, tiny_model), atol=1e-7)


def test_weights_of_rewards_are_those_of_the_functions_given(tmp_path, tiny_model, tokenizer):
    how = {"with_script": counting, "environment_factory": Counter, "reward_weights": [0.5], **SGD}
    trainer = build(tmp_path, tiny_model, tokenizer, **how)
    trainer.train()
    assert logged(trainer, "reward") == [1.5 + 0.5 * 4]


def test_environments_without_a_dataset(tmp_path, tiny_model, tokenizer):
    how = {"with_script": counting, "reward": None, "rows": None, "environment_factory": Counter}
    trainer = build(tmp_path / "a", tiny_model, tokenizer, **how, **SGD)
    trainer.train()
    assert logged(trainer, "reward") == [1.5]
    with pytest.raises(DataFormatError, match="train_dataset is missing"):
        build(tmp_path / "b", tiny_model, tokenizer, **how | {"environment_factory": {"a": Counter}})
    with pytest.raises(DataFormatError, match="train_dataset is missing"):
        build(tmp_path / "c", tiny_model, tokenizer, **how, max_steps=-1)


def test_several_environments(tmp_path, tiny_model, tokenizer):
    """Each environment rewards its own rows; the other's function does not apply to them."""
    rows = [{**row, "environment": "one" if n % 2 else "two", "start": 0} for n, row in enumerate(ROWS)]
    how = {"with_script": counting, "reward": None, "environment_factory": {"one": Counter, "two": Other}, **SGD}
    trainer = build(tmp_path / "a", tiny_model, tokenizer, rows=rows, per_device_train_batch_size=16, **how)
    trainer.train()
    assert trainer.rewards.names == ["Counter", "Other"]
    assert logged(trainer, "rewards/Other/mean") == logged(trainer, "rewards/Counter/mean") == [1.5]
    with pytest.raises(DataFormatError, match=r"environment='three'.*'one', 'two'"):
        build(tmp_path / "b", tiny_model, tokenizer, rows=[*rows, {**rows[0], "environment": "three"}], **how)
    with pytest.raises(DataFormatError, match="'environment'"):
        build(tmp_path / "c", tiny_model, tokenizer, **how)


def test_conversations_in_the_table_of_completions(tmp_path, tiny_model, tokenizer, capsys):
    """What is logged has the calls, their results and what an environment said."""
    rows = [{**row, "start": 10} for row in ROWS]
    how = {"with_script": counting, "reward": None, "rows": rows, "environment_factory": Counter, **SGD}
    build(tmp_path, tiny_model, tokenizer, log_completions=True, **how).train()
    (path,) = tmp_path.rglob("*.parquet")
    table = Dataset.from_parquet(str(path))
    text = json.dumps([str(value) for row in table for value in row.values()])
    assert "from 10" in text and "tool_calls" in text and "done" in text
    assert "Counter" in table.column_names


def test_evaluation_with_tools(tmp_path, tiny_model, tokenizer):
    rows = Dataset.from_list(ROWS[:3])
    trainer = build(
        tmp_path, tiny_model, tokenizer, tools=[add], with_script=lambda p, k: say("hm"), num_generations_eval=2,
        per_device_eval_batch_size=4,
    )  # fmt: skip
    metrics = trainer.evaluate(rows)
    assert metrics["eval_reward"] == 2.0 and metrics["eval_tools/call_frequency"] == 0.0


# Functions that make the rollouts


def made(prompts, trainer):
    """Completion n is n tokens long, and its second token is not the policy's."""
    ids = [trainer.tokenizer(p[-1]["content"])["input_ids"] for p in prompts]
    completions = [[7 + n % 5] * (3 + n % 3) for n in range(len(prompts))]
    return {
        "prompt_ids": ids,
        "completion_ids": completions,
        "logprobs": [[-1.0] * len(c) for c in completions],
        "env_mask": [[1, 0, *[1] * (len(c) - 2)] for c in completions],
        "number": list(range(len(prompts))),
        "everywhere": "x",
    }


def by_number(completions, number, everywhere, answer, **_):
    assert everywhere == ["x"] * len(number) and len(answer) == len(number)
    return [float(n % 4) for n in number]


def test_a_function_makes_the_rollouts(tmp_path, tiny_model, tokenizer):
    trainer = build(tmp_path, tiny_model, tokenizer, reward=by_number, rollout_func=made, with_script=None, **SGD)
    before = flat_weights(trainer)
    trainer.train()
    groups = [group for part in trainer._round.parts for group in part]
    assert [group.rows for group in groups] == [4, 4]
    assert all(not mask[1] and mask.sum() == len(mask) - 1 for group in groups for mask in group.masks)
    assert torch.allclose(flat_weights(trainer) - before, expected_step(trainer, tiny_model), atol=1e-7)
    assert logged(trainer, "reward") == [1.5]


def test_a_function_gets_every_prompt_for_each_completion(tmp_path, tiny_model, tokenizer):
    seen = []

    def watching(prompts, trainer):
        seen.append([p[-1]["content"] for p in prompts])
        return made(prompts, trainer)

    build(
        tmp_path, tiny_model, tokenizer, reward=by_number, rollout_func=watching, with_script=None,
        shuffle_dataset=False, **SGD,
    ).train()  # fmt: skip
    assert seen == [["a"] * 4 + ["b"] * 4]


def test_random_numbers_of_a_function_come_from_the_round(tmp_path, tiny_model, tokenizer):
    """New ones in every round, and those of training stay as they were."""
    drawn = []

    def drawing(prompts, trainer):
        drawn.append(torch.rand(2).tolist())
        return made(prompts, trainer)

    how = {"reward": by_number, "with_script": None, "max_steps": 2}
    one = build(tmp_path / "a", tiny_model, tokenizer, rollout_func=drawing, **how)
    one.train()
    other = build(tmp_path / "b", tiny_model, tokenizer, rollout_func=made, **how)
    other.train()
    assert drawn[0] != drawn[1]
    assert digest(one) == digest(other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logprobs": ...}, "wanted a dict that has 'logprobs' too"),
        ({"completion_ids": [[1]]}, r"1 entries of 'completion_ids' for 8 prompts"),
        ({"env_mask": [[1]] * 8}, r"1 values of 'env_mask' and 3 of 'completion_ids' in row 0"),
        ({"number": [1, 2]}, r"2 values of 'number' for 8 prompts"),
        ({"prompt_ids": [[]] * 8}, r"no 'prompt_ids' in row 0"),
        ({"completion_ids": [[5]] * 7 + [None]}, r"None as 'completion_ids' of row 7; wanted a list of numbers"),
        (
            {"completion_ids": [[5, 999]] * 8, "logprobs": None, "env_mask": None},
            r"token 999 in 'completion_ids' of row 0",
        ),
        ({"prompt_ids": [[5, -1]] * 8}, r"token -1 in 'prompt_ids' of row 0"),
    ],
)
def test_what_is_no_rollout_is_named(tmp_path, tiny_model, tokenizer, change, said):
    def wrong(prompts, trainer):
        return {name: value for name, value in (made(prompts, trainer) | change).items() if value is not ...}

    trainer = build(tmp_path, tiny_model, tokenizer, reward=by_number, rollout_func=wrong, with_script=None)
    with pytest.raises(RolloutError, match=said):
        trainer.train()


@pytest.mark.parametrize("all_empty", [True, False])
def test_empty_completions_are_no_crash(tmp_path, tiny_model, tokenizer, all_empty):
    """A completion without a token has nothing to learn; a round of such leaves the weights as they are."""

    def silent(prompts, trainer):
        out = made(prompts, trainer)
        for n in range(0, len(prompts), 1 if all_empty else 2):
            out["completion_ids"][n], out["logprobs"][n], out["env_mask"][n] = [], [], []
        return out

    how = {"reward": by_number, "rollout_func": silent, "with_script": None, "beta": 0.1, "num_iterations": 2}
    trainer = build(tmp_path, tiny_model, tokenizer, **how, **SGD | {"max_steps": 2})
    before = flat_weights(trainer)
    trainer.train()
    assert torch.equal(flat_weights(trainer), before) == all_empty
    assert logged(trainer, "completions/min_length")[0] == 0


# Mistakes


def test_mistakes_are_known_at_construction(tmp_path, tiny_model, tokenizer, make_tokenizer):
    with pytest.raises(ConfigError, match="rollout_func makes the whole rollout, so tools would not be used"):
        build(tmp_path, tiny_model, tokenizer, tools=[add], rollout_func=made)
    with pytest.raises(ConfigError, match="no schema can be made of 'script'"):
        build(tmp_path, tiny_model, tokenizer, tools=[script])
    with pytest.raises(ConfigError, match="tool_timeout"):
        build(tmp_path, tiny_model, tokenizer, tools=[add], tool_timeout=0)
    with pytest.raises(DataFormatError, match="must be messages"):
        build(tmp_path, tiny_model, tokenizer, tools=[add], rows=[{"prompt": "text"}] * 4)
    with pytest.raises(DataFormatError, match="environments"):
        build(
            tmp_path, tiny_model, tokenizer, environment_factory=Counter, rows=[{**r, "environments": 1} for r in ROWS]
        )
