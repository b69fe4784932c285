"""Online trainers end to end on a tiny model: the step is the one a slow loop gives, however it is cut; resume; eval.

The reward is the share of lower-case letters, which differs between completions of an untrained model.
"""

from __future__ import annotations

import math
import signal
import time

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from preftune import BEMACallback
from preftune.configs.grpo import GRPOConfig
from preftune.configs.rloo import RLOOConfig
from preftune.data.rounds import MicroStep
from preftune.errors import CheckpointError, ConfigError, DataFormatError
from preftune.rollouts.local import LocalBackend
from preftune.trainers.grpo import GRPOTrainer
from preftune.trainers.online import OnlineTrainer
from preftune.trainers.rloo import RLOOTrainer
from tests.support.runs import die, digest, killed, logged, options

PROMPTS = ["the cat", "a longer prompt here", "dog", "one more of them", "who", "and the last one"]


def letters(completions, **_):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [sum(map(str.islower, text)) / max(len(text), 1) for text in texts]


def build(tmp_path, tiny_model, tokenizer, algorithm="grpo", *, model=None, reward=letters, rows=PROMPTS, **changes):
    config, trainer = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[algorithm]
    peft_config, callbacks = changes.pop("peft_config", None), changes.pop("callbacks", None)
    eval_dataset, backend = changes.pop("eval_dataset", None), changes.pop("backend", None)
    defaults = {"num_generations": 4, "max_completion_length": 6, "per_device_train_batch_size": 8, "beta": 0.0}
    return trainer(
        model=tiny_model() if model is None else model,
        reward_funcs=reward,
        args=config(**options(tmp_path, **defaults | changes)),
        train_dataset=Dataset.from_list([{"prompt": text} for text in rows]),
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        peft_config=peft_config,
        callbacks=callbacks,
        rollout_backend=backend,
    )


def flat_weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


SGD = {"optim": "sgd", "max_grad_norm": 0.0, "max_steps": 1}


def test_a_step_is_that_of_a_slow_loop(tmp_path, tiny_model, tokenizer):
    """Weights move by -lr times the gradient of the mean over tokens of -A log p, one padded row at a time."""
    trainer = build(tmp_path, tiny_model, tokenizer, **SGD)
    before = flat_weights(trainer)
    trainer.train()
    model = tiny_model().double()
    rows = [(g, i) for part in trainer._round.parts for g in part for i in range(g.rows)]
    tokens = sum(len(g.completion_ids[i]) for g, i in rows)
    loss = 0.0
    for group, i in rows:
        prompt, answer = list(group.prompt_ids), list(group.completion_ids[i])
        logps = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
        for place, token in enumerate(answer, start=len(prompt)):
            loss = loss - group.advantages[i] * logps[place - 1, token] / tokens
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(flat_weights(trainer) - before, -1e-2 * gradient.float(), atol=1e-7)
    assert any(group.advantages.any() for group, _ in rows)


def test_seconds_of_a_step(tmp_path, tiny_model, tokenizer):
    """Rounds are part of the step that they are drawn in; of four steps on two rounds two hold none."""
    how = SGD | {"max_steps": 4, "logging_steps": 1, "gradient_accumulation_steps": 1, "steps_per_generation": 2}
    trainer = build(tmp_path, tiny_model, tokenizer, **how)
    started = time.perf_counter()
    trainer.train()
    whole = time.perf_counter() - started
    steps, rounds = logged(trainer, "step_time"), logged(trainer, "round_time")
    assert len(steps) == 4
    assert len(rounds) == 2
    assert sum(rounds) < sum(steps) < whole
    assert steps[0] > rounds[0]


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_the_cut_of_a_step_changes_nothing(tmp_path, tiny_model, tokenizer, algorithm):
    beta = {"beta": 0.1}
    cuts = [
        {"per_device_train_batch_size": 16},
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
        {"per_device_train_batch_size": 16, "max_tokens_per_micro_batch": 40},
    ]
    ends = []
    for n, cut in enumerate(cuts):
        trainer = build(tmp_path / str(n), tiny_model, tokenizer, algorithm, **SGD | beta | cut | {"max_steps": 2})
        trainer.train()
        ends.append((flat_weights(trainer), logged(trainer, "loss"), logged(trainer, "reward")))
    for weights, losses, rewards in ends[1:]:
        assert torch.allclose(weights, ends[0][0], atol=2e-6)
        assert losses == pytest.approx(ends[0][1], abs=2e-6)
        assert rewards == pytest.approx(ends[0][2])


def test_groups_without_signal_cost_nothing_and_change_nothing(tmp_path, tiny_model, tokenizer, monkeypatch):
    """With a reward that tells nothing for most prompts, leaving their backward out gives the same weights."""

    def sparse(prompts, completions, **_):
        return [value if "cat" in prompt else 0.5 for prompt, value in zip(prompts, letters(completions))]

    how = SGD | {"reward": sparse, "per_device_train_batch_size": 24, "max_steps": 2}
    trainer = build(tmp_path / "a", tiny_model, tokenizer, **how)
    trainer.train()
    monkeypatch.setattr(OnlineTrainer, "learns_from_flat", True)
    whole = build(tmp_path / "b", tiny_model, tokenizer, **how)
    whole.train()
    assert torch.allclose(flat_weights(trainer), flat_weights(whole), atol=1e-6)
    assert logged(trainer, "entropy") == pytest.approx(logged(whole, "entropy"), abs=1e-6)
    assert logged(trainer, "frac_reward_zero_std") == [pytest.approx(5 / 6)] * 2


REUSED = {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 6}


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_killed_in_a_round_and_resumed(tmp_path, tiny_model, tokenizer, algorithm):
    """Three rounds of four micro-steps; the checkpoint of step 3 lies in the first, that of step 6 in the second."""
    moving = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2}
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 9, "temperature": 0.7}
    parts = (tiny_model, tokenizer, algorithm)
    straight = build(tmp_path / "a", *parts, **REUSED | moving | saving)
    straight.train()

    def run() -> None:
        trainer = build(tmp_path / "b", *parts, **REUSED | moving | saving)
        step, calls = trainer.training_step, []

        def fatal(*args, **kwargs):
            calls.append(1)
            return die() if len(calls) == 8 else step(*args, **kwargs)

        trainer.training_step = fatal
        trainer.train()

    assert killed(run) == signal.SIGKILL
    resumed = build(tmp_path / "b", *parts, **REUSED | moving | saving)
    resumed.train(resume_from_checkpoint=True)
    assert digest(resumed) == digest(straight)
    assert logged(resumed, "reward") == logged(straight, "reward")
    assert (tmp_path / "a" / "checkpoint-3" / "preftune_rank_0.safetensors").exists()


def test_resumed_in_a_later_epoch(tmp_path, tiny_model, tokenizer):
    """Six prompts, two a round: three steps an epoch; the second epoch has an order of its own, also after a resume."""
    saving = {"save_strategy": "steps", "save_steps": 4, "max_steps": 6}
    straight = build(tmp_path / "a", tiny_model, tokenizer, **saving)
    straight.train()
    resumed = build(tmp_path / "b", tiny_model, tokenizer, **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    assert digest(resumed) == digest(straight)


def test_a_steered_entropy_bonus_is_resumed(tmp_path, tiny_model, tokenizer):
    """Its weight rises in every step; that of a run that began anew would be behind."""
    steered = {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0, "entropy_coef_delta": 0.03}
    steered |= {"save_strategy": "steps", "save_steps": 2}
    straight = build(tmp_path / "a", tiny_model, tokenizer, **steered)
    straight.train()
    resumed = build(tmp_path / "b", tiny_model, tokenizer, **steered)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert digest(resumed) == digest(straight)
    assert logged(resumed, "entropy_coef") == logged(straight, "entropy_coef") == pytest.approx([0.13, 0.16, 0.19])


def test_a_stream_is_read_again_and_resumed_in_its_second_pass(tmp_path, tiny_model, tokenizer):
    """Seven rounds of a prompt a pass, two of them a step: the last one fills no step."""

    def make(folder: str):
        stream = Dataset.from_list([{"prompt": text} for text in [*PROMPTS, "x"]]).to_iterable_dataset()
        how = {"max_steps": 6, "save_strategy": "steps", "save_steps": 4, "gradient_accumulation_steps": 2}
        return GRPOTrainer(
            model=tiny_model(),
            reward_funcs=letters,
            args=GRPOConfig(
                **options(
                    tmp_path / folder, per_device_train_batch_size=4, num_generations=4, steps_per_generation=1,
                    max_completion_length=6, **how
                )
            ),
            train_dataset=stream,
            processing_class=tokenizer,
        )  # fmt: skip

    straight, resumed = make("a"), make("b")
    straight.train()
    assert straight.state.global_step == 6
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-4"))
    assert digest(resumed) == digest(straight)
    assert logged(resumed, "reward") == logged(straight, "reward")


@pytest.mark.parametrize(
    ("count", "changes", "words"),
    [
        (3, {"per_device_train_batch_size": 16}, "stream of training rows gave 3 usable rows"),
        (3, {"gradient_accumulation_steps": 2, "steps_per_generation": 1}, "makes 1 micro-steps.*takes 2"),
    ],
    ids=["no_round", "no_step"],
)
def test_a_stream_that_makes_no_step_is_an_error(tmp_path, tiny_model, tokenizer, count, changes, words):
    calls = []
    rows = Dataset.from_list([{"prompt": text} for text in PROMPTS[:count]]).to_iterable_dataset()
    trainer = build(tmp_path, tiny_model, tokenizer, reward=lambda completions, **_: calls.append(1), **changes)
    trainer.train_dataset = trainer.prepare_dataset(rows, "train")[0]
    with pytest.raises(DataFormatError, match=words):
        trainer.train()
    assert not calls  # no completion is paid for that would not be learned from


class FarBackend(LocalBackend):
    """Draws with weights that it was given, as a server does."""

    needs_weights = True

    def load_weights(self, named_parameters):
        self.given = {name: tensor.clone() for name, tensor in named_parameters}

    def holds(self, model):
        return all(torch.equal(self.given[name], tensor) for name, tensor in model.state_dict().items())


def test_a_backend_of_its_own_follows_the_best_model_and_a_second_run(tmp_path, tiny_model, tokenizer):
    """Both have the number of a step whose weights it had before, and other weights."""
    rows = Dataset.from_list([{"prompt": "abc"}])
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_reward", "save_strategy": "steps"}
    best |= {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "per_device_eval_batch_size": 4}
    values = iter([0.0, 2.0, 0.0, 1.0] * 2)  # of rounds and evaluations in turn: the first evaluation is the best

    def falling(completions, **_):
        value = next(values, 0.5)
        return [value + 1e-3 * n for n, _ in enumerate(completions)]

    model = tiny_model()
    backend = FarBackend(model, pad_token_id=0)
    trainer = build(
        tmp_path, tiny_model, tokenizer, model=model, reward=falling, eval_dataset=rows, backend=backend, max_steps=2,
        **best,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_global_step == 1
    trainer.evaluate()
    assert backend.holds(model)
    trainer.args.max_steps, trainer.args.load_best_model_at_end = 1, False
    trainer.args.eval_strategy = "no"
    trainer.train()
    drawn_from = []
    rollout = backend.generate

    def watched(*args, **how):
        drawn_from.append(backend.holds(model))
        return rollout(*args, **how)

    backend.generate = watched
    trainer.train()
    assert all(drawn_from) and drawn_from


def test_predicting_is_evaluating(tmp_path, tiny_model, tokenizer):
    rows = Dataset.from_list([{"prompt": text} for text in PROMPTS[:3]])
    trainer = build(tmp_path, tiny_model, tokenizer)
    evaluated, predicted = trainer.evaluate(rows), trainer.predict(rows).metrics
    for name in ("reward", "loss", "completions/mean_length"):
        assert predicted[f"test_{name}"] == evaluated[f"eval_{name}"], name


def test_reused_completions_are_weighed_by_the_ratio(tmp_path, tiny_model, tokenizer):
    """After an update the ratio is that to the policy that drew: with a large step some tokens are clipped."""
    trainer = build(tmp_path, tiny_model, tokenizer, learning_rate=0.1, epsilon=0.01, **REUSED)
    trainer.train()
    clipped = logged(trainer, "clip_ratio/region_mean")
    assert clipped[0] == 0.0  # the first step of a round is on-policy
    assert max(clipped[1:4]) > 0.0
    # the sampler's log-probabilities serve as the old ones: no gap
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) < 1e-4


def test_evaluation_draws_the_same_and_leaves_no_trace(tmp_path, tiny_model, tokenizer):
    rows = Dataset.from_list([{"prompt": text} for text in ["abc", "who is", "it"]])
    how = {"eval_dataset": rows, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    trainer = build(tmp_path / "a", tiny_model, tokenizer, eval_strategy="steps", eval_steps=1, **how)
    first, second = trainer.evaluate(), trainer.evaluate()
    timed = ("runtime", "per_second", "seconds_per_sample")
    assert {k: v for k, v in first.items() if not k.endswith(timed)} == {
        k: v for k, v in second.items() if not k.endswith(timed)
    }
    assert {"eval_reward", "eval_loss", "eval_entropy", "eval_completions/mean_length"} <= set(first)
    trainer.train()
    alone = build(tmp_path / "b", tiny_model, tokenizer)
    alone.train()
    assert digest(trainer) == digest(alone)


def test_eval_batches_change_no_metric(tmp_path, tiny_model, tokenizer):
    rows = Dataset.from_list([{"prompt": text} for text in PROMPTS[:5]])
    found = []
    for size in (2, 4, 10):
        trainer = build(
            tmp_path / str(size), tiny_model, tokenizer, num_generations_eval=2, per_device_eval_batch_size=size
        )
        found.append(trainer.evaluate(rows))
    for name in ("eval_reward", "eval_loss", "eval_entropy", "eval_completions/mean_length"):
        assert [m[name] for m in found] == pytest.approx([found[0][name]] * 3, abs=1e-6), name


def test_a_token_budget_changes_no_eval_metric(tmp_path, tiny_model, tokenizer):
    rows = Dataset.from_list([{"prompt": text} for text in PROMPTS[:3]])
    found = []
    for budget in (None, 20):
        how = {"beta": 0.1, "sync_ref_model": True, "max_tokens_per_micro_batch": budget}
        trainer = build(tmp_path / str(budget), tiny_model, tokenizer, per_device_eval_batch_size=4, **how)
        trainer.train()  # until the reference differs, the loss is 0 whatever its weight
        found.append(trainer.evaluate(rows))
    assert found[0]["eval_loss"] > 1e-4
    for name in ("eval_loss", "eval_kl", "eval_entropy"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-3), name


def test_the_budget_of_a_cpu_divides_no_group(tmp_path, tiny_model, tokenizer, monkeypatch):
    """A prompt that fills the budget alone would be computed once for each of its completions."""
    monkeypatch.setattr("preftune.trainers.step._CPU_TOKENS", 1)
    trainer = build(tmp_path, tiny_model, tokenizer, per_device_train_batch_size=8, max_steps=1)
    seen = []
    cut = trainer.micro_batches

    def watched(batch):
        seen.append([part["groups"] for part in cut(batch)])
        return cut(batch)

    monkeypatch.setattr(trainer, "micro_batches", watched)
    trainer.train()
    parts = seen[0]
    assert len(parts) > 1 and {g.rows for part in parts for g in part} == {4}


def test_numbers_that_rewards_report_are_means(tmp_path, tiny_model, tokenizer):
    """Whatever they are called: 0, 1, 2, ... over three rounds of one log is 1."""
    calls = []

    def counted(completions, log_metric, **_):
        log_metric("max_depth", len(calls))
        calls.append(1)
        return letters(completions)

    trainer = build(tmp_path, tiny_model, tokenizer, reward=counted, max_steps=3, logging_steps=3)
    trainer.train()
    assert logged(trainer, "max_depth") == [1.0]


def test_a_round_that_is_not_the_checkpoints_is_refused(tmp_path, tiny_model, tokenizer):
    trainer = build(tmp_path, tiny_model, tokenizer, **REUSED)
    trainer.train()
    elsewhere = MicroStep(epoch=5, round=1, step=1)
    with pytest.raises(CheckpointError, match="round 1 of epoch 5"):
        trainer._batch_of(elsewhere)


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("mover", ["sync", "bema"])
def test_the_reference_moves(tmp_path, tiny_model, tokenizer, algorithm, lora, mover):
    moving = {
        "sync": {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 1.0},
        "bema": {"bema_ref_model": True, "bema_update_freq": 1, "ref_model_update_freq": 1, "bema_lag": 1},
    }[mover]
    adapter = LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if lora else None
    trainer = build(tmp_path, tiny_model, tokenizer, algorithm, beta=0.1, max_steps=3, peft_config=adapter, **moving)
    trainer.train()
    assert trainer.reference.form == ("reference_adapter" if lora else "frozen_copy")
    if mover == "sync":
        assert trainer.reference.drift(trainer.model) == 0.0
    assert logged(trainer, "sampling/sampling_logp_difference/max")[0] < 1e-4


def test_kl_of_a_fixed_reference(tmp_path, tiny_model, tokenizer):
    trainer = build(tmp_path, tiny_model, tokenizer, beta=0.1)
    trainer.train()
    kl = logged(trainer, "kl")
    assert kl[0] == 0.0
    assert 0 < kl[-1] < 1


def test_completions_that_end_at_once_or_never_are_trained_on(tmp_path, tiny_model, tokenizer):
    how = {"mask_truncated_completions": True, "max_completion_length": 1}
    trainer = build(tmp_path, tiny_model, tokenizer, **how)
    before = flat_weights(trainer)
    trainer.train()  # nearly all completions are cut off: nothing to learn, no NaN
    assert all(map(math.isfinite, logged(trainer, "loss")))
    assert torch.isfinite(flat_weights(trainer)).all()
    assert logged(trainer, "completions/clipped_ratio")[0] > 0.9
    assert torch.equal(before, flat_weights(trainer)) or logged(trainer, "completions/clipped_ratio")[0] < 1.0


def test_a_batch_without_tokens_goes_through_the_policy_as_often_as_others(tmp_path, tiny_model, tokenizer):
    """For the statistics of the step and for its loss: ranks would wait for one that stays away where it is sharded."""
    how = {"top_entropy_quantile": 0.5, "mask_truncated_completions": True, "max_completion_length": 1, "max_steps": 1}
    trainer = build(tmp_path, tiny_model, tokenizer, **how)
    seen, tokens_of = [], trainer.tokens_of

    def watched(model, batch):
        seen.append(batch["repeated"])
        return tokens_of(model, batch)

    trainer.tokens_of = watched
    trainer.train()
    assert seen == [True, True]
    assert logged(trainer, "loss") == [0.0]


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "grpo"},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
        {"loss_type": "cispo"},
        {"loss_type": "sapo"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "vespo"},
        {"top_entropy_quantile": 0.2},
        {"entropy_coef": 0.1},
        {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_target": 9.0, "top_entropy_quantile": 0.5},
        {"off_policy_mask_threshold": 0.0},
        {"rollout_precision": "bfloat16"},
        {"multi_objective_aggregation": "normalize_then_sum"},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_every_option_trains_and_is_cut_alike(tmp_path, tiny_model, tokenizer, changes):
    """The weights do not depend on how the step is cut, whatever the statistic over the step."""
    ends = []
    for n, cut in enumerate(
        [{}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 8}]
    ):
        trainer = build(tmp_path / str(n), tiny_model, tokenizer, **SGD | REUSED | {"max_steps": 2} | changes | cut)
        trainer.train()
        ends.append(flat_weights(trainer))
    assert torch.allclose(ends[0], ends[1], atol=2e-6)
    assert not torch.equal(ends[0], torch.cat([p.flatten() for p in tiny_model().parameters()]))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"bf16": True}),
        ("llama", {"gradient_checkpointing": True, "beta": 0.1}),
        ("llama", {"activation_offloading": True}),
        ("llama", {"attention_layout": "padded", "beta": 0.1}),
        ("gpt2", {"disable_dropout": True}),
        ("gemma2", {}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.01}),
        ("llama", {"rollout_backend": "continuous"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_widths(tmp_path, tiny_model, tokenizer, family, changes):
    """Everything that models and memory options offer trains here too, and moves the weights."""
    model = tiny_model(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = build(tmp_path, tiny_model, tokenizer, model=model, max_steps=2, **changes)
    trainer.train()
    assert all(map(math.isfinite, logged(trainer, "loss") + logged(trainer, "entropy")))
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
    gaps = logged(trainer, "sampling/sampling_logp_difference/max")
    if "rollout_backend" in changes:
        assert gaps == []
    else:
        assert max(gaps) < (0.2 if changes.get("bf16") else 1e-4)


def test_mistakes_are_named_before_the_run(tmp_path, tiny_model, tokenizer):
    with pytest.raises(DataFormatError, match="2 usable rows and a generation round takes 4"):
        build(tmp_path, tiny_model, tokenizer, rows=PROMPTS[:2], per_device_train_batch_size=16)
    with pytest.raises(ConfigError, match="rollout_backend is 'server'; wanted a RolloutBackend object"):
        GRPOTrainer(tiny_model(), letters, GRPOConfig(tmp_path), PROMPTS, rollout_backend="server")
    with pytest.raises(ConfigError, match="reward_weights has 2 numbers, and there are 1"):
        build(tmp_path, tiny_model, tokenizer, reward_weights=[1.0, 2.0])
    with pytest.raises(ConfigError, match="beta=0"):
        build(tmp_path, tiny_model, tokenizer, callbacks=[BEMACallback(update_ref_model=True)])
    with pytest.raises(DataFormatError, match="prompt"):
        GRPOTrainer(
            model=tiny_model(),
            reward_funcs=letters,
            args=GRPOConfig(**options(tmp_path, per_device_train_batch_size=8)),
            train_dataset=Dataset.from_list([{"question": "a"}] * 8),
            processing_class=tokenizer,
        )
