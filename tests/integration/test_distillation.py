"""SDFT and SDPO end to end on a tiny model: the step is a slow loop's, however it is cut; teachers; resume; evaluation.

A teacher that is told nothing more than the student must not move it: the loss is then 0, whoever the teacher is.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
import warnings

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from preftune import BEMACallback, SyncRefModelCallback
from preftune.cli.main import main as run_main
from preftune.configs.grpo import GRPOConfig
from preftune.configs.sdft import SDFTConfig
from preftune.configs.sdpo import SDPOConfig
from preftune.errors import ConfigError, DataFormatError, RewardError
from preftune.losses.distillation import alpha_divergence
from preftune.trainers.grpo import GRPOTrainer
from preftune.trainers.sdft import SDFTTrainer
from preftune.trainers.sdpo import SDPOTrainer
from tests.support.runs import die, digest, killed, logged, options
from tests.support.scripted import ScriptedBackend

PROMPTS = ["the cat", "a longer prompt here", "dog", "one more of them", "who", "and the last one"]
LORA = {"r": 2, "target_modules": ["q_proj", "v_proj"]}


def letters(completions, **_):
    """1 where most characters are lower-case letters, which some completions of the untrained model have."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(sum(map(str.islower, text)) >= 4) for text in texts]


def sdft_rows(texts=PROMPTS, context="because"):
    return [{"prompt": text, "privileged_context": f"{context} {n}"} for n, text in enumerate(texts)]


def build(tmp_path, tiny_model, tokenizer, algorithm="sdft", *, model=None, rows=None, reward=letters, **changes):
    config, trainer = {"sdft": (SDFTConfig, SDFTTrainer), "sdpo": (SDPOConfig, SDPOTrainer)}[algorithm]
    extra = {k: changes.pop(k) for k in ("peft_config", "callbacks", "eval_dataset", "rollout_backend") if k in changes}
    defaults = {"num_generations": 4, "max_completion_length": 6, "per_device_train_batch_size": 8}
    if algorithm == "sdpo":
        extra["reward_funcs"] = reward
    return trainer(
        model=tiny_model() if model is None else model,
        args=config(**options(tmp_path, **defaults | changes)),
        train_dataset=Dataset.from_list(sdft_rows() if rows is None else rows),
        processing_class=tokenizer,
        **extra,
    )


def flat_weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


SGD = {"optim": "sgd", "max_grad_norm": 0.0, "max_steps": 1}
MODES = {
    "sampled": {"distillation_mode": "sampled_token", "distillation_alpha": 1.0},
    "top": {"distillation_mode": "topk_logits", "distillation_topk": 7, "distillation_alpha": 0.3},
    "tail": {"distillation_mode": "topk_logits", "distillation_topk": 7, "distillation_add_tail": True},
    "all": {"distillation_mode": "full_logits", "distillation_alpha": 0.0},
}
REUSED = {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 1, "max_steps": 6}


def slow_values(mode, student_tV, teacher_tV, drawn):
    """`[t]` divergences of one completion, from whole distributions."""
    if mode == "sampled":
        s, t = (logps.gather(1, drawn[:, None])[:, 0] for logps in (student_tV, teacher_tV))
        return (s - t).detach() * s
    if mode == "all":
        return alpha_divergence(student_tV, teacher_tV, alpha=0.0)
    ids = student_tV.topk(7, dim=-1).indices
    s, t = (logps.gather(1, ids) for logps in (student_tV, teacher_tV))
    if mode == "top":
        return alpha_divergence(s.log_softmax(-1), t.log_softmax(-1), alpha=0.3)
    s, t = (torch.cat([x, (1 - x.exp().sum(-1, keepdim=True)).log()], 1) for x in (s, t))
    return alpha_divergence(s, t, alpha=0.5)


@pytest.mark.parametrize("layout", ["tree", "padded"])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_is_that_of_a_slow_loop(tmp_path, tiny_model, tokenizer, mode, layout):
    """Weights move by -lr times the gradient of the mean over completions of the mean over tokens, row by row."""
    how = {"temperature": 0.7, "attention_layout": layout}
    trainer = build(tmp_path, tiny_model, tokenizer, **SGD | MODES[mode] | how)
    before = flat_weights(trainer)
    trainer.train()
    model = tiny_model().double()
    rows = [(g, i) for part in trainer._round.parts for g in part for i in range(g.rows)]

    def distributions(prompt, answer):
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        return (logits / 0.7).log_softmax(-1)

    loss = torch.zeros((), dtype=torch.float64)
    for group, i in rows:
        answer = group.completion_ids[i]
        assert tokenizer.decode(group.teacher_prompts[i]).startswith(tokenizer.decode(group.prompt_ids) + "\n\nbecause")
        student = distributions(group.prompt_ids, answer)
        teacher = distributions(group.teacher_prompts[i], answer).detach()
        loss = loss + slow_values(mode, student, teacher, torch.tensor(answer)).mean() / len(rows)
    loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.allclose(flat_weights(trainer) - before, -1e-2 * gradient.float(), atol=2e-7)
    assert gradient.norm() > 1e-3
    if mode != "sampled":  # its value has no gradient of its own
        assert logged(trainer, "loss")[0] == pytest.approx(loss.item(), abs=1e-5)
        assert logged(trainer, "sdft/distillation_loss")[0] == pytest.approx(loss.item(), abs=1e-5)


@pytest.mark.parametrize("algorithm", ["sdft", "sdpo"])
def test_the_cut_of_a_step_changes_nothing(tmp_path, tiny_model, tokenizer, algorithm):
    cuts = [
        {"per_device_train_batch_size": 16},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8},
        {"per_device_train_batch_size": 16, "max_tokens_per_micro_batch": 40},
    ]
    mix = {"distillation_weight": 0.5} if algorithm == "sdpo" else MODES["top"]
    ends = []
    for n, cut in enumerate(cuts):
        how = SGD | mix | cut | {"max_steps": 2}
        trainer = build(tmp_path / str(n), tiny_model, tokenizer, algorithm, **how)
        trainer.train()
        ends.append((flat_weights(trainer), logged(trainer, "loss"), logged(trainer, f"{algorithm}/distillation_loss")))
    for weights, losses, distances in ends[1:]:
        assert torch.allclose(weights, ends[0][0], atol=2e-6)
        assert losses == pytest.approx(ends[0][1], abs=2e-6)
        assert distances == pytest.approx(ends[0][2], abs=2e-6)


@pytest.mark.parametrize("policy", ["full", "fresh", "ready"])
@pytest.mark.parametrize("kind", ["live", "base", "ema"])
def test_a_teacher_that_knows_nothing_more_teaches_nothing(tmp_path, tiny_model, tokenizer, kind, policy):
    """The teacher is the model in memory, never one loaded again, nor an adapter of zeros: the first loss is 0."""
    model = tiny_model(seed=3)
    if policy == "ready":
        with torch.random.fork_rng(devices=[]):
            model = get_peft_model(model, LoraConfig(**LORA, init_lora_weights=False))
    rows = [{"prompt": text, "privileged_context": ""} for text in PROMPTS]
    how = {"teacher_prompt_template": "{prompt}{privileged_context}", "teacher_model_kind": kind, "max_steps": 1}
    adapter = LoraConfig(**LORA) if policy == "fresh" else None
    trainer = build(tmp_path, tiny_model, tokenizer, model=model, rows=rows, peft_config=adapter, **MODES["all"] | how)
    forms = {
        ("full", "base"): "frozen_copy", ("full", "ema"): "frozen_copy", ("fresh", "base"): "disabled_adapter",
        ("fresh", "ema"): "reference_adapter", ("ready", "base"): "reference_adapter",
        ("ready", "ema"): "reference_adapter",
    }  # fmt: skip
    form = trainer.reference.form if trainer.reference is not None else None
    assert form == forms.get((policy, kind))
    trainer.train()
    assert logged(trainer, "loss")[0] == pytest.approx(0, abs=1e-6)


class Adapters(TrainerCallback):
    """The student's adapter after each step."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model=None, reference=None, **kwargs):
        self.seen.append({n: p.detach().double().clone() for n, p in reference.policy_parameters(model).items()})


def test_the_averaged_adapter_starts_as_the_students(tmp_path, tiny_model, tokenizer):
    """TRL began with zeros. Every second step T <- 0.7 T + 0.3 S, followed in float64 from the recorded students."""
    with torch.random.fork_rng(devices=[]):
        model = get_peft_model(tiny_model(), LoraConfig(**LORA, init_lora_weights=False))
    recorder = Adapters()
    how = {"teacher_model_kind": "ema", "teacher_update_rate": 0.3, "teacher_sync_steps": 2, "max_steps": 5}
    trainer = build(tmp_path, tiny_model, tokenizer, model=model, callbacks=[recorder], **how)
    start = {n: p.detach().double().clone() for n, p in trainer.reference.policy_parameters(trainer.model).items()}
    for name, p in trainer.reference.own_parameters().items():
        assert torch.equal(p.double(), start[name]) and p.abs().sum() > 0
    trainer.train()
    expected = start
    for step in (2, 4):
        expected = {n: 0.7 * p + 0.3 * recorder.seen[step - 1][n] for n, p in expected.items()}
    for name, p in trainer.reference.own_parameters().items():
        torch.testing.assert_close(p.double(), expected[name], rtol=1e-5, atol=1e-6)
    assert logged(trainer, "reference/moves") == [0, 1, 1, 2, 2, 2]


RUNS = {
    "sdft": ("sdft", {"teacher_model_kind": "ema", "teacher_sync_steps": 2}),
    "sdft-lora": ("sdft", {"teacher_model_kind": "ema", "peft_config": LORA | {"lora_dropout": 0.1}} | MODES["all"]),
    "sdft-base": ("sdft", {"peft_config": LORA}),
    "sdpo": ("sdpo", {"distillation_weight": 0.5, "beta": 0.1}),
    "sdpo-live": ("sdpo", {"teacher_model_kind": "live"}),
}
QUICK = ("sdft-lora", "sdpo")


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in RUNS if n not in QUICK)])
def test_killed_in_a_round_and_resumed(tmp_path, tiny_model, tokenizer, name):
    """Three rounds of four micro-steps; the checkpoint of step 3 lies in the first, that of step 6 in the second."""
    algorithm, how = RUNS[name]

    def make(folder):
        changes = dict(how)
        if "peft_config" in changes:
            changes["peft_config"] = LoraConfig(**changes["peft_config"])
        saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 9}
        return build(tmp_path / folder, tiny_model, tokenizer, algorithm, **REUSED | saving | changes)

    straight = make("a")
    straight.train()

    def run() -> None:
        trainer = make("b")
        step, calls = trainer.training_step, []

        def fatal(*args, **kwargs):
            calls.append(1)
            return die() if len(calls) == 8 else step(*args, **kwargs)

        trainer.training_step = fatal
        trainer.train()

    assert killed(run) == signal.SIGKILL
    resumed = make("b")
    resumed.train(resume_from_checkpoint=True)
    assert digest(resumed) == digest(straight)
    assert logged(resumed, "loss") == logged(straight, "loss")


def test_old_completions_are_weighed_and_the_weight_is_bounded(tmp_path, tiny_model, tokenizer):
    """With a large step the ratio matters; without a bound the loss of later passes is another one."""
    ends = {}
    for clip in (None, 1e-6, 2.0):
        how = REUSED | {"distillation_is_clip": clip, "learning_rate": 0.05, "max_steps": 2}
        trainer = build(tmp_path / str(clip), tiny_model, tokenizer, **how)
        trainer.train()
        ends[clip] = logged(trainer, "loss")
    assert ends[None][0] == ends[1e-6][0] == ends[2.0][0] > 1e-3  # the first pass is on-policy
    assert ends[1e-6][1] < 1e-5
    assert ends[None][1] != ends[2.0][1]


def test_completions_of_the_teachers_prompt(tmp_path, tiny_model, tokenizer):
    """They are drawn after the teacher's prompt and learned after the student's, without any ratio."""
    backend = ScriptedBackend(tokenizer, lambda prompt, key: f"so {key[-1]}")
    how = REUSED | {"generate_from_teacher": True, "max_steps": 3}
    trainer = build(tmp_path, tiny_model, tokenizer, rollout_backend=backend, **how)
    trainer.train()
    asked = {tokenizer.decode(prompt) for request in backend.requests for prompt in request[0]}
    assert asked <= {f"{row['prompt']}\n\n{row['privileged_context']}" for row in sdft_rows()}
    for group in (g for part in trainer._round.parts for g in part):
        assert tokenizer.decode(group.prompt_ids) in PROMPTS
        assert group.logps == {}
    assert all(map(math.isfinite, logged(trainer, "loss")))


def test_the_first_tokens_can_be_left_out(tmp_path, tiny_model, tokenizer):
    trainer = build(tmp_path / "a", tiny_model, tokenizer, num_loss_tokens_to_skip=2, max_steps=1)
    trainer.train()
    for group in (g for part in trainer._round.parts for g in part):
        for mask in group.masks:
            assert mask.tolist() == [False, False, *[True] * (len(mask) - 2)][: len(mask)]
    nothing = build(tmp_path / "b", tiny_model, tokenizer, num_loss_tokens_to_skip=6, max_steps=1)
    before = flat_weights(nothing)
    nothing.train()
    assert torch.equal(flat_weights(nothing), before)


def test_one_completion_a_prompt(tmp_path, tiny_model, tokenizer):
    trainer = build(tmp_path, tiny_model, tokenizer, num_generations=1, per_device_train_batch_size=6)
    trainer.train()
    assert all(loss > 0 for loss in logged(trainer, "loss"))


def test_evaluation_has_the_metrics_and_leaves_no_trace(tmp_path, tiny_model, tokenizer):
    """What TRL logged only, and did not return."""
    rows = Dataset.from_list(sdft_rows()[:3])
    how = {"eval_dataset": rows, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    for algorithm in ("sdft", "sdpo"):
        folder = tmp_path / algorithm
        trainer = build(folder / "a", tiny_model, tokenizer, algorithm, eval_strategy="steps", eval_steps=4, **how)
        first, second = trainer.evaluate(), trainer.evaluate()
        names = ["eval_loss", f"eval_{algorithm}/distillation_loss", "eval_completions/mean_length"]
        names += ["eval_self_distillation/reward_mean"] if algorithm == "sdpo" else []
        assert [first[name] for name in names] == [second[name] for name in names]
        if algorithm == "sdft":
            assert first["eval_loss"] == pytest.approx(first["eval_sdft/distillation_loss"]) != 0
        trainer.train()
        alone = build(folder / "b", tiny_model, tokenizer, algorithm)
        alone.train()
        assert digest(trainer) == digest(alone)


def test_without_distillation_it_is_grpo(tmp_path, tiny_model, tokenizer):
    """Weight for weight, bit for bit."""
    trainer = build(tmp_path / "a", tiny_model, tokenizer, "sdpo", distillation_weight=0.0, **REUSED)
    trainer.train()
    common = {"num_generations": 4, "max_completion_length": 6, "per_device_train_batch_size": 8, **REUSED}
    grpo = GRPOTrainer(
        model=tiny_model(),
        reward_funcs=letters,
        args=GRPOConfig(**options(tmp_path / "b", disable_dropout=True, **common)),
        train_dataset=Dataset.from_list(sdft_rows()),
        processing_class=tokenizer,
    )
    grpo.train()
    assert torch.equal(flat_weights(trainer), flat_weights(grpo))
    assert logged(trainer, "reward") == logged(grpo, "reward")
    assert max(logged(trainer, "reward")) > 0


def test_attempts_without_a_teacher_cost_nothing_and_change_nothing(tmp_path, tiny_model, tokenizer, monkeypatch):
    how = SGD | {"per_device_train_batch_size": 24, "max_steps": 2}
    trainer = build(tmp_path / "a", tiny_model, tokenizer, "sdpo", **how)
    trainer.train()
    monkeypatch.setattr(SDPOTrainer, "has_gradient", lambda self, group: True)
    whole = build(tmp_path / "b", tiny_model, tokenizer, "sdpo", **how)
    whole.train()
    assert torch.allclose(flat_weights(trainer), flat_weights(whole), atol=1e-6)
    assert logged(trainer, "sdpo/distillation_loss") == pytest.approx(logged(whole, "sdpo/distillation_loss"), abs=1e-6)
    assert 0 < max(logged(trainer, "self_distillation/reprompt_sample_fraction")) < 1


def test_the_loss_is_the_weighted_mean_of_both(tmp_path, tiny_model, tokenizer):
    """A step of SGD with weight 1/4 is 3/4 of the policy gradient's and 1/4 of the distillation's."""
    start = torch.cat([p.detach().flatten() for p in tiny_model().parameters()])
    moves = {}
    for weight in (0.0, 0.25, 1.0):
        how = SGD | MODES["all"] | {"per_device_train_batch_size": 24, "distillation_weight": weight}
        trainer = build(tmp_path / str(weight), tiny_model, tokenizer, "sdpo", **how)
        trainer.train()
        moves[weight] = flat_weights(trainer) - start
    assert min(moves[0.0].norm(), moves[1.0].norm()) > 1e-4
    torch.testing.assert_close(moves[0.25], 0.75 * moves[0.0] + 0.25 * moves[1.0], rtol=1e-3, atol=1e-7)


def test_metrics_of_sdpo_by_hand(tmp_path, tiny_model, tokenizer):
    """Two prompts, four attempts each; the script says which succeed: one of the first, none of the other."""
    backend = ScriptedBackend(tokenizer, lambda prompt, key: "good" if prompt == "who" and key[-1] == 2 else "bad")
    rows = [{"prompt": "who", "privileged_context": "no"}, {"prompt": "dog", "privileged_context": None}]
    trainer = build(
        tmp_path, tiny_model, tokenizer, "sdpo", rows=rows, rollout_backend=backend, max_steps=1,
        reward=lambda completions, **_: [float(text == "good") for text in completions],
        include_environment_feedback=True, environment_feedback_only_without_solution=True,
    )  # fmt: skip
    trainer.train()
    expected = {
        "success_group_fraction": 1 / 2, "success_sample_fraction": 1 / 8, "feedback_available_fraction": 4 / 8,
        "feedback_used_fraction": 0.0, "reprompt_sample_fraction": 3 / 8, "reward_mean": 1 / 8, "reward_min": 0.0,
        "reward_max": 1.0, "flat_group_fraction": 1 / 2, "group_reward_std_mean": 1 / 4,
    }  # fmt: skip
    assert {name: logged(trainer, f"self_distillation/{name}")[0] for name in expected} == pytest.approx(expected)
    asked = {tokenizer.decode(p) for part in trainer._round.parts for g in part for p in g.teacher_prompts if len(p)}
    (prompt,) = asked
    assert prompt == "who\n\nA correct solution:\n\ngood\n\nCorrectly solve the original question.\n"


def test_rewards_go_through_the_runner(tmp_path, tiny_model, tokenizer):
    """Async functions and extra columns, which TRL's SDPO did not take; and a wrong count is an error."""

    async def slow(completions, log_extra, **_):
        await asyncio.sleep(0)
        log_extra("length", [len(text) for text in completions])
        return letters(completions)

    trainer = build(tmp_path / "a", tiny_model, tokenizer, "sdpo", reward=slow, log_completions=True, max_steps=1)
    trainer.train()
    assert logged(trainer, "rewards/slow/mean") == logged(trainer, "self_distillation/rewards/slow")
    assert (tmp_path / "a" / "completions" / "completions_00001.parquet").is_file()
    short = build(tmp_path / "b", tiny_model, tokenizer, "sdpo", reward=lambda completions, **_: [1.0])
    with pytest.raises(RewardError, match="1 .* 8"):
        short.train()


def test_a_table_without_rewards(tmp_path, tiny_model, tokenizer, capsys):
    trainer = build(tmp_path, tiny_model, tokenizer, log_completions=True, num_completions_to_print=1, max_steps=1)
    trainer.train()
    assert "completions, step 1" in capsys.readouterr().out


def test_equal_prompts_get_completions_of_their_own(tmp_path, tiny_model, tokenizer):
    """TRL's ranks drew alike; here every sample of a round has a random stream of its own."""
    rows = sdft_rows(["the cat"] * 6)
    trainer = build(tmp_path, tiny_model, tokenizer, rows=rows, per_device_train_batch_size=24, max_steps=1)
    trainer.train()
    drawn = [tuple(ids) for part in trainer._round.parts for g in part for ids in g.completion_ids]
    assert len(drawn) == 24 == len(set(drawn))


def test_the_distance_from_the_teachers_weights(tmp_path, tiny_model, tokenizer):
    """TRL keeps beta and never reads it."""
    how = {"distillation_weight": 0.5, "beta": 0.2, "teacher_model_kind": "base"}
    trainer = build(tmp_path, tiny_model, tokenizer, "sdpo", **how)
    trainer.train()
    kl = logged(trainer, "kl")
    assert kl[0] == 0.0 and max(kl) > 0
    assert build(tmp_path, tiny_model, tokenizer, "sdpo").penalty_reference is None


def test_warnings_after_rounds_in_which_nothing_is_learned(tmp_path, tiny_model, tokenizer, caplog):
    how = {"reward": lambda completions, **_: [0.0] * len(completions), "diagnostics_warning_interval": 2}
    build(tmp_path, tiny_model, tokenizer, "sdpo", max_steps=3, **how).train()
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("SDPO")]
    assert len(said) == 3
    assert "no attempt reached success_reward_threshold=1.0 in the last 2 rounds" in caplog.text


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"bf16": True}),
        ("llama", {"gradient_checkpointing": True}),
        ("llama", {"gradient_checkpointing": True, "peft_config": LORA, "teacher_model_kind": "ema"}),
        ("llama", {"activation_offloading": True}),
        ("gpt2", {}),
        ("gemma2", {"teacher_model_kind": "live"}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.01}),
        ("mamba", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
@pytest.mark.parametrize("mode", ["top", pytest.param("all", marks=pytest.mark.slow)])
def test_widths(tmp_path, tiny_model, tokenizer, family, changes, mode):
    """Everything that models and memory options offer trains here too, and moves the weights."""
    model = tiny_model(family)
    changes = dict(changes)
    if "peft_config" in changes:
        changes["peft_config"] = LoraConfig(**changes["peft_config"])
    trainer = build(tmp_path, tiny_model, tokenizer, model=model, max_steps=2, **MODES[mode] | changes)
    before = flat_weights(trainer)
    trainer.train()
    assert all(map(math.isfinite, logged(trainer, "loss") + logged(trainer, "entropy")))
    assert not torch.equal(before, flat_weights(trainer))
    if "gradient_checkpointing" in changes:  # TRL lost these options with the first generation
        layer = next(m for m in model.modules() if "_gradient_checkpointing_func" in vars(m))
        assert layer.gradient_checkpointing and layer._gradient_checkpointing_func.keywords["use_reentrant"] is False


def test_mistakes_are_named_before_the_run(tmp_path, tiny_model, tokenizer):
    parts = (tmp_path, tiny_model, tokenizer)
    with pytest.raises(ConfigError, match="BEMACallback would each move the reference"):
        build(*parts, teacher_model_kind="ema", callbacks=[BEMACallback(update_ref_model=True)])
    with pytest.raises(ConfigError, match="the teacher 'live' is the student itself. Set teacher_model_kind='base'"):
        build(*parts, teacher_model_kind="live", callbacks=[BEMACallback(update_ref_model=True)])
    with pytest.raises(DataFormatError, match="needs 'privileged_context' too"):
        build(*parts, rows=[{"prompt": "a"}])
    with pytest.raises(ConfigError, match="reward_weights has 2 numbers"):
        build(*parts, "sdpo", reward_weights=[1.0, 2.0])
    with pytest.raises(DataFormatError, match="needs 'privileged_context' too"):
        build(*parts, "sdpo", rows=[{"prompt": "a"}], include_environment_feedback=True)


def test_without_args(tmp_path, tiny_model, tokenizer, monkeypatch):
    """TRL read attributes of None."""
    monkeypatch.chdir(tmp_path)
    rows = Dataset.from_list(sdft_rows())
    assert SDFTTrainer(tiny_model(), train_dataset=rows, processing_class=tokenizer).args.output_dir.endswith("-SDFT")
    assert SDPOTrainer(tiny_model(), letters, train_dataset=rows, processing_class=tokenizer).args.output_dir.endswith(
        "-SDPO"
    )


@pytest.mark.parametrize("name", ["sdft", "sdpo"])
def test_the_command(tmp_path, tiny_model, tokenizer, monkeypatch, name):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.chdir(tmp_path)
    for part in (tiny_model(), tokenizer):
        part.save_pretrained("model")
    rows = [{"question": text, "answer": "#### 7"} for text in PROMPTS]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    own = ["--reward_funcs", "numeric_match_reward"] if name == "sdpo" else ["privileged_context=answer"]
    given = ["--model_name_or_path", "model", "--dataset_name", "rows.json", "--output_dir", "out"]
    short = ["--max_steps", "1", "--max_completion_length", "4", "--report_to", "none", "--progress", "none"]
    assert run_main([name, *given, *short, "--columns", "prompt=question", *own]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_callback_of_the_users_moves_the_teacher(tmp_path, tiny_model, tokenizer):
    model = tiny_model()
    trainer = build(tmp_path, tiny_model, tokenizer, model=model, teacher_model_kind="base", max_steps=1)
    trainer.add_callback(SyncRefModelCallback(trainer.reference, mixup_alpha=1.0, sync_steps=1))
    trainer.train()
    assert trainer.reference.drift(trainer.model) == 0.0
