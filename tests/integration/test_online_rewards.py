"""Rewards and rounds seen from a trainer: what is logged of rewards, who is asked how often, which tokens end a text.

Functions give numbers that are known beforehand, so that what is logged can be said by hand.
"""

from __future__ import annotations

import asyncio
import copy
import math
import os
import threading
import time

import pytest
import torch
from datasets import Dataset

from preftune import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from preftune.errors import ConfigError, RewardError
from preftune.models import logprobs
from preftune.trainers import learning
from tests.support.runs import logged, options
from tests.unit.rewards import in_processes

PROMPTS = ["the cat", "a longer prompt here", "dog", "one more of them", "who", "and the last one", "up", "so", "or"]
KINDS = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}


def letters(completions, **_):
    return [sum(map(str.islower, text)) / max(len(text), 1) for text in completions]


def build(folder, model, tokenizer, kind="grpo", *, rewards=letters, rows=PROMPTS, **changes):
    trainer, config = KINDS[kind]
    given = {n: changes.pop(n) for n in ("eval_dataset", "reward_processing_classes", "callbacks") if n in changes}
    rows = [{"prompt": row} if isinstance(row, str) else row for row in rows]
    common = {"num_generations": 2, "max_completion_length": 4, "per_device_train_batch_size": 4, "max_steps": 2}
    return trainer(
        model,
        rewards,
        config(**options(folder, **common | changes)),
        Dataset.from_list(rows),
        processing_class=tokenizer,
        **given,
    )


def constant(value: float, name: str):
    def reward(completions, **_):
        return [value] * len(completions)

    reward.__name__ = name
    return reward


# ---- when they are asked ---------------------------------------------------------------------------------------------


def test_async_rewards_wait_while_the_reference_scores(tmp_path, tiny_model, tokenizer, monkeypatch):
    """One after the other, the reward would never get its answer, and the limit would end the run."""
    scored = threading.Event()
    whole = GRPOTrainer._score_groups

    def score_groups(self, *args, **kwargs):
        known = whole(self, *args, **kwargs)
        scored.set()
        return known

    async def judge(completions, **_):
        while not scored.is_set():
            await asyncio.sleep(0.001)
        scored.clear()
        return [float(len(text)) for text in completions]

    monkeypatch.setattr(GRPOTrainer, "_score_groups", score_groups)
    trainer = build(tmp_path, tiny_model(), tokenizer, rewards=judge, beta=0.1, reward_timeout=30.0)
    trainer.train()
    assert len(logged(trainer, "reward")) == 2


# ---- what is logged --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_logged_reward_is_the_weighted_sum(tmp_path, tiny_model, tokenizer, kind):
    """R100: 1 * 1 + 0.1 * 10, in every row."""
    rewards = [constant(1.0, "one"), constant(10.0, "ten")]
    trainer = build(tmp_path, tiny_model(), tokenizer, kind, rewards=rewards, reward_weights=[1.0, 0.1])
    trainer.train()
    assert logged(trainer, "reward") == [pytest.approx(2.0)] * 2
    assert logged(trainer, "reward_std") == [pytest.approx(0.0, abs=1e-9)] * 2
    assert logged(trainer, "rewards/ten/mean") == [10.0] * 2
    assert logged(trainer, "frac_reward_zero_std") == [1.0] * 2


def test_rewards_that_do_not_apply_are_in_no_mean(tmp_path, tiny_model, tokenizer):
    """R097: one log over four rounds; f judges rounds 0 and 2, g rounds 1 and 3, each with the number of the round."""
    rounds = {"even": [], "odd": []}

    def judge(name, parity):
        def reward(completions, **_):
            rounds[name].append(len(rounds[name]))
            number = rounds[name][-1]
            return [float(number) if number % 2 == parity else None] * len(completions)

        reward.__name__ = name
        return reward

    trainer = build(
        tmp_path, tiny_model(), tokenizer, rewards=[judge("even", 0), judge("odd", 1)], max_steps=4, logging_steps=4
    )
    trainer.train()
    assert logged(trainer, "rewards/even/mean") == [1.0]
    assert logged(trainer, "rewards/odd/mean") == [2.0]
    assert logged(trainer, "reward") == [1.5]
    numbers = [value for entry in trainer.state.log_history for value in entry.values()]
    assert all(math.isfinite(value) for value in numbers)


def test_groups_without_signal_are_told_by_the_rewards_alone(tmp_path, tiny_model, tokenizer):
    """RLOO takes a KL penalty off rewards; completions that are rewarded alike are alike all the same."""
    calls = []

    def reward(completions, **_):
        calls.append(1)
        return [1.0] * len(completions) if len(calls) > 1 else [float(n) for n, _ in enumerate(completions)]

    trainer = build(tmp_path, tiny_model(), tokenizer, "rloo", rewards=reward, beta=0.5, optim="sgd", learning_rate=0.1)
    trainer.train()
    assert logged(trainer, "frac_reward_zero_std") == [0.0, 1.0]
    assert logged(trainer, "kl")[0] == 0.0 != logged(trainer, "kl")[1]


def test_the_share_of_samples_that_a_correction_drops_is_logged(tmp_path, tiny_model, tokenizer):
    """W10: completions whose weight is out of bounds teach nothing, and that can be seen."""
    how = {"rollout_precision": "bfloat16", "vllm_importance_sampling_clip_max": 1e-6}
    trainer = build(tmp_path, tiny_model(), tokenizer, **how)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    assert logged(trainer, "sampling/importance_sampling_ratio/dropped") == [1.0] * 2
    assert logged(trainer, "sampling/importance_sampling_ratio/mean") == [0.0] * 2
    assert all(torch.equal(before[name], value) for name, value in trainer.model.state_dict().items())


@pytest.mark.parametrize("adaptive", [False, True])
def test_the_entropy_bonus_is_told_apart_from_the_loss(tmp_path, tiny_model, tokenizer, adaptive):
    """loss = policy_loss - entropy_coef * entropy over several micro-batches; steered, the first step has none."""
    how = {"entropy_coef": 0.1, "use_adaptive_entropy": adaptive, "entropy_target": 9.0, "entropy_coef_delta": 0.02}
    trainer = build(tmp_path, tiny_model(), tokenizer, **how, gradient_accumulation_steps=2, beta=0.1, max_steps=3)
    trainer.train()
    told = [entry for entry in trainer.state.log_history if "policy_loss" in entry]
    assert [entry["entropy_coef"] for entry in told] == pytest.approx([0.12, 0.14] if adaptive else [0.1] * 3)
    for entry in told:
        assert entry["loss"] == pytest.approx(entry["policy_loss"] - entry["entropy_coef"] * entry["entropy"], abs=1e-5)


# ---- who is asked, and what they get ---------------------------------------------------------------------------------


@pytest.mark.parametrize("iterations", [1, 2])
def test_a_round_has_distinct_prompts_and_is_used_as_often_as_asked(tmp_path, tiny_model, tokenizer, iterations):
    """R107: nine prompts, three a round, each twice; a round serves two micro-steps an iteration."""
    rounds = []

    def reward(prompts, completions, **_):
        rounds.append(list(prompts))
        return letters(completions)

    how = {"generation_batch_size": 6, "per_device_train_batch_size": 3, "num_iterations": iterations, "max_steps": 12}
    build(tmp_path, tiny_model(), tokenizer, rewards=reward, **how).train()
    assert len(rounds) == 6 // iterations
    for prompts in rounds:
        assert prompts[0::2] == prompts[1::2] and len(set(prompts)) == 3
    assert sorted({p for prompts in rounds[:3] for p in prompts}) == sorted(PROMPTS)


def test_an_epoch_is_once_all_prompts(tmp_path, tiny_model, tokenizer):
    """R120: eight prompts, two a step: four steps, and as many logs."""
    trainer = build(tmp_path, tiny_model(), tokenizer, "rloo", rows=PROMPTS[:8], max_steps=-1, num_train_epochs=1)
    trainer.train()
    assert trainer.state.epoch == 1.0 and trainer.state.global_step == 4
    assert [e["step"] for e in trainer.state.log_history if "loss" in e] == [1, 2, 3, 4]
    assert logged(trainer, "epoch")[-1] == 1.0


def test_completions_have_the_form_of_their_prompts(tmp_path, tiny_model, tokenizer):
    """R094: a text for a text, one message of the assistant for messages."""
    seen = []

    def reward(prompts, completions, completion_ids, **_):
        seen.extend(zip(prompts, completions, completion_ids, strict=True))
        return [1.0] * len(completions)

    build(tmp_path / "a", tiny_model(), tokenizer, rewards=reward, max_steps=1).train()
    assert all(isinstance(prompt, str) and isinstance(text, str) for prompt, text, _ in seen)
    assert [text for _, text, _ in seen] == tokenizer.batch_decode([ids for *_, ids in seen], skip_special_tokens=True)
    seen.clear()
    chats = [{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS]
    build(tmp_path / "b", tiny_model(), tokenizer, rewards=reward, rows=chats, max_steps=1).train()
    assert [completion for _, completion, _ in seen] == [
        [{"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}] for *_, ids in seen
    ]


def test_a_reward_model_alone(tmp_path, tiny_model, tokenizer):
    """R095; and no reward at all is an error before anything is loaded."""
    judge = tiny_model(head="value")
    trainer = build(tmp_path, tiny_model(), tokenizer, rewards=judge, reward_processing_classes=tokenizer)
    trainer.train()
    assert logged(trainer, "reward") == logged(trainer, "rewards/LlamaForSequenceClassification/mean")
    assert all(math.isfinite(value) for value in logged(trainer, "loss") + logged(trainer, "reward"))
    with pytest.raises(ConfigError, match="reward_funcs is empty"):
        build(tmp_path, "no-such-model", tokenizer, rewards=[])


@pytest.mark.parametrize("returned", [[1.0], [1.0, 1.0, 1.0], 1.0])
def test_a_reward_of_another_length_ends_the_run(tmp_path, tiny_model, tokenizer, returned):
    """R089: it is not spread over all completions."""
    trainer = build(tmp_path, tiny_model(), tokenizer, rewards=lambda completions, **_: returned)
    with pytest.raises(RewardError, match=r"reward '<lambda>' returned .*wanted 4"):
        trainer.train()


# ---- how completions are drawn ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_end_token_ends_a_completion(tmp_path, tiny_model, tokenizer, kind):
    """R049: those of the model's generation config and the tokenizer's own; none of them counts as cut off."""
    model = tiny_model()
    model.generation_config.eos_token_id = [n for n in range(100, 320) if n % 2]
    trainer = build(tmp_path, model, tokenizer, kind, max_completion_length=12, num_generations=4)
    assert set(trainer.sampling.eos_token_ids) == {tokenizer.eos_token_id, *range(101, 320, 2)}
    trainer.train()
    ends = set(trainer.sampling.eos_token_ids)
    completions = [ids for part in trainer._round.parts for group in part for ids in group.completion_ids]
    assert completions and all(not ends & set(ids[:-1]) for ids in completions)
    cut = [ids[-1] not in ends for ids in completions]
    assert logged(trainer, "completions/clipped_ratio")[-1] == pytest.approx(sum(cut) / len(cut))
    assert not all(cut)


def test_sampling_has_no_dropout(tmp_path, tiny_model, tokenizer):
    """W3: what is drawn, and its log-probabilities under old policy and reference, are those of a model without any."""
    rounds = []
    for dropout in (0.0, 0.5):
        model = tiny_model(attention_dropout=dropout)
        # with top_p the old ones are the trainer's, not the sampler's; the second round begins in training mode
        how = {"beta": 0.1, "top_p": 0.9, "learning_rate": 0.0}
        trainer = build(tmp_path / str(dropout), model, tokenizer, "rloo", **how)
        trainer.train()
        assert trainer.model.model.layers[0].self_attn.attention_dropout == dropout
        rounds.append([group for part in trainer._round.parts for group in part])
    for plain, group in zip(*rounds, strict=True):
        assert [list(ids) for ids in group.completion_ids] == [list(ids) for ids in plain.completion_ids]
        for name in ("old", "ref"):
            for one, other in zip(plain.logps[name], group.logps[name], strict=True):
                assert other == pytest.approx(one, abs=1e-5), name


def test_a_temperature_near_zero_stays_finite(tmp_path, tiny_model, tokenizer):
    """R112."""
    trainer = build(tmp_path, tiny_model(), tokenizer, temperature=1e-3, num_iterations=2, beta=0.1)
    trainer.train()
    assert all(math.isfinite(value) for value in logged(trainer, "loss") + logged(trainer, "grad_norm"))


def test_other_options_of_generation(tmp_path, tiny_model, tokenizer):
    """R114: None and an empty dict say nothing; an unknown option is named when the trainer is built."""
    lengths = {}
    for name, options_ in (("none", None), ("empty", {}), ("two", {"min_new_tokens": 3})):
        model = tiny_model()
        model.generation_config.eos_token_id = list(range(2, 320, 2))
        trainer = build(tmp_path / name, model, tokenizer, generation_kwargs=options_, max_steps=1)
        trainer.train()
        lengths[name] = logged(trainer, "completions/min_length")[0]
    assert lengths["none"] == lengths["empty"] < 3 <= lengths["two"]
    with pytest.raises(ConfigError, match="bogus"):
        build(tmp_path / "wrong", tiny_model(), tokenizer, generation_kwargs={"bogus": 1})


def test_scoring_a_round_takes_no_more_rows_at_a_time_than_learning(tmp_path, tiny_model, tokenizer, monkeypatch):
    """R184: old policy and reference see micro-batches too."""
    sizes = []
    for module in (learning, logprobs):
        real = module.token_scores

        def counted(model, tree, real=real, **how):
            sizes.append(tree.num_branches)
            return real(model, tree, **how)

        monkeypatch.setattr(module, "token_scores", counted)
    how = {"beta": 0.1, "per_device_train_batch_size": 2, "steps_per_generation": 8, "num_iterations": 2}
    build(tmp_path, tiny_model(), tokenizer, **how, top_p=0.9).train()  # another distribution: old ones are computed
    assert len(sizes) > 16 and max(sizes) <= 2


# ---- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_several_eval_sets_and_the_best_model(tmp_path, tiny_model, tokenizer, kind):
    """R084, R037: each set has metrics of its own name, by which the best model is found."""
    rows = [{"prompt": text} for text in PROMPTS]
    sets = {"a": Dataset.from_list(rows[:3]), "b": Dataset.from_list(rows[3:5])}
    trainer = build(
        tmp_path, tiny_model(), tokenizer, kind, eval_dataset=sets, eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True, metric_for_best_model="eval_a_reward",
        per_device_eval_batch_size=4,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_metric == max(logged(trainer, "eval_a_reward"))
    metrics = trainer.evaluate()
    alone = trainer.evaluate(sets["b"])
    for name in ("reward", "loss", "completions/mean_length"):
        assert f"eval_a_{name}" in metrics
        assert metrics[f"eval_b_{name}"] == pytest.approx(alone[f"eval_{name}"], abs=1e-6)


def test_eval_batches_that_are_no_whole_groups(tmp_path, tiny_model, tokenizer):
    """W43: where no evaluation was planned, evaluate() takes as many prompts at a time as fit."""
    rows, found = Dataset.from_list([{"prompt": text} for text in PROMPTS[:3]]), []
    for size in (1, 3, 8):
        trainer = build(tmp_path / str(size), tiny_model(), tokenizer, per_device_eval_batch_size=size)
        found.append(trainer.evaluate(rows)["eval_reward"])
    assert found == pytest.approx([found[0]] * 3)


# ---- what is said of rounds, and the options of rewards --------------------------------------------------------------


def said(caplog, words: str) -> list[str]:
    return [record.levelname for record in caplog.records if words in record.getMessage()]


def test_a_round_in_which_nothing_ends_is_said_once(tmp_path, tiny_model, tokenizer, caplog):
    """R115: where all answers are cut off, rewards may have nothing to judge."""
    trainer = build(tmp_path, tiny_model(), tokenizer, max_completion_length=1)
    trainer.train()
    assert logged(trainer, "completions/clipped_ratio") == [1.0] * 2
    assert said(caplog, "4 completions of a round ran out of max_completion_length=1") == ["WARNING"]


@pytest.mark.parametrize("shuffle", [True, False])
def test_prompts_that_fill_no_round_are_told(tmp_path, tiny_model, tokenizer, caplog, shuffle):
    """W42: without shuffling they would never be used, in any epoch."""
    caplog.set_level("INFO", logger="preftune")
    build(tmp_path, tiny_model(), tokenizer, shuffle_dataset=shuffle, max_steps=1).train()
    assert said(caplog, "leaves 1 of 9 prompts out" if shuffle else "last 1 of 9 training prompts fill no round") == [
        "INFO" if shuffle else "WARNING"
    ]
    caplog.clear()
    build(tmp_path, tiny_model(), tokenizer, rows=PROMPTS[:8], max_steps=1, shuffle_dataset=shuffle).train()
    assert not said(caplog, "prompts")


@pytest.mark.parametrize("kind", KINDS)
def test_one_reward_that_fails_and_one_that_hangs_beside_one_that_works(tmp_path, tiny_model, tokenizer, kind):
    """The trainer's options reach the runner: rows of the two count as None, and the run goes on."""

    def hangs(completions, **_):
        time.sleep(2)

    def fails(completions, **_):
        raise ValueError("broken")

    how = {"reward_timeout": 0.05, "on_reward_error": "none", "max_steps": 1}
    trainer = build(tmp_path, tiny_model(), tokenizer, kind, rewards=[hangs, fails, letters], **how)
    trainer.train()
    assert [logged(trainer, f"rewards/{name}/failed") for name in trainer.rewards.names] == [[1.0], [1.0], [0.0]]
    assert logged(trainer, "reward") == logged(trainer, "rewards/letters/mean")
    trainer = build(tmp_path, tiny_model(), tokenizer, kind, rewards=[hangs, letters], reward_timeout=0.05)
    with pytest.raises(RewardError, match="'hangs' took longer than reward_timeout=0.05"):
        trainer.train()


def test_rewards_in_processes(tmp_path, tiny_model, tokenizer):
    """A function of this test cannot be sent; one of a module can, and says where it ran."""
    with pytest.raises(ConfigError, match="reward_processes=0"):
        build(tmp_path, tiny_model(), tokenizer, rewards=constant(1.0, "local"), reward_processes=1)
    trainer = build(tmp_path, tiny_model(), tokenizer, rewards=in_processes.process_id, reward_processes=1)
    trainer.train()
    assert os.getpid() not in logged(trainer, "reward") and len(set(logged(trainer, "reward"))) == 1


def test_which_prompts_in_which_order(tmp_path, tiny_model, tokenizer):
    """`shuffle_dataset`, `data_seed` and `seed`: the order is that of the data, or one that follows from the seed."""
    orders = {}
    for name, how in {
        "plain": {"shuffle_dataset": False}, "seed": {}, "again": {}, "other": {"seed": 1},
        "data": {"seed": 1, "data_seed": 0},
    }.items():  # fmt: skip
        seen = orders.setdefault(name, [])

        def reward(prompts, completions, seen=seen, **_):
            seen.extend(prompts[::2])
            return letters(completions)

        build(tmp_path / name, tiny_model(), tokenizer, rewards=reward, **how).train()
    assert orders["plain"] == PROMPTS[:4]
    assert orders["seed"] == orders["again"] == orders["data"] != orders["other"]
    assert orders["seed"] != orders["plain"] != orders["other"]


def test_columns_that_rewards_get_and_what_the_template_is_told(tmp_path, tiny_model, tokenizer):
    rows = [{"prompt": [{"role": "user", "content": text}], "gold": text} for text in PROMPTS]
    seen = []

    def reward(completions, gold=None, **others):
        seen.append((gold is not None, "gold" in others))
        return [1.0] * len(completions)

    for n, dropped in enumerate((False, True)):
        trainer = build(
            tmp_path / str(n), tiny_model(), tokenizer, rewards=reward, rows=rows, remove_unused_columns=dropped,
            max_steps=1, chat_template_kwargs={"enable_thinking": True},
        )  # fmt: skip
        trainer.train()
        prompts = [group.prompt_ids for part in trainer._round.parts for group in part]
        assert all(tokenizer.decode(ids).endswith("<|im_start|>assistant\n<think>\n") for ids in prompts)
    assert seen == [(True, False), (False, False)]
