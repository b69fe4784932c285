"""PolicyAnswers: what is generated with, the log-probabilities beside it, and failures that stop nothing."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import GenerationConfig

from preftune.callbacks.answers import PolicyAnswers
from preftune.callbacks.completions import LogCompletionsCallback, row_of
from preftune.callbacks.generation import as_sampling
from preftune.configs.dpo import DPOConfig
from preftune.configs.reward import RewardConfig
from preftune.trainers.dpo import DPOTrainer
from preftune.trainers.reward import RewardTrainer
from tests.support.runs import options
from tests.unit.callbacks.tiny_trainer import PROMPTS, tiny_trainer


def dpo_trainer(tmp_path, model, tokenizer, rows, **changes):
    peft_config = changes.pop("peft_config", None)
    return DPOTrainer(
        model=model,
        args=DPOConfig(**options(tmp_path, beta=0.3, **changes)),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:3]),
        processing_class=tokenizer,
        peft_config=peft_config,
    )


def slow_logp(model, prompt, completion):
    """Sum of log-probabilities of the completion's tokens, one full forward, in float64."""
    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        logps = model.double()(input_ids=ids).logits[0].log_softmax(-1)
    model.float()
    return sum(logps[len(prompt) + i - 1, token].item() for i, token in enumerate(completion))


class TestSampling:
    def test_what_a_config_says(self):
        config = GenerationConfig(
            do_sample=True, temperature=0.5, top_p=0.9, max_new_tokens=7, eos_token_id=[2, 5], no_repeat_ngram_size=3,
            use_cache=True, num_beams=1, pad_token_id=0,
        )  # fmt: skip
        sampling = as_sampling(config, 4)
        assert (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (7, 0.5, 0.9, 4)
        assert sampling.eos_token_ids == (2, 5)
        assert dict(sampling.extra) == {"no_repeat_ngram_size": 3}

    def test_what_transformers_takes_where_nothing_is_said(self):
        assert as_sampling(GenerationConfig(do_sample=True, max_new_tokens=1), 0).top_k == 50
        greedy = as_sampling(GenerationConfig(do_sample=False, temperature=0.3, max_new_tokens=1), 0)
        assert (greedy.temperature, greedy.top_k) == (0.0, 0)

    @pytest.mark.parametrize("options", [{"num_beams": 2, "max_new_tokens": 2}, {"max_length": 9}])
    def test_what_no_backend_can_do(self, options):
        assert as_sampling(GenerationConfig(**options), 0) is None

    def test_beams_go_through_the_model(self, tmp_path, monkeypatch):
        monkeypatch.setattr("preftune.callbacks.answers.LocalBackend", None)  # a call would fail
        trainer = tiny_trainer(tmp_path)
        answers = PolicyAnswers(trainer, options={"num_beams": 2, "max_new_tokens": 3}).mine()
        assert len(answers) == len(PROMPTS) and all(0 < len(a.ids) <= 3 for a in answers)

    def test_a_sample_does_not_depend_on_the_others(self, tmp_path):
        trainer = tiny_trainer(tmp_path)
        drawn = {"do_sample": True, "max_new_tokens": 6}
        three = [a.ids for a in PolicyAnswers(trainer, options=drawn).mine()]
        assert [a.ids for a in PolicyAnswers(trainer, num_prompts=2, options=drawn).mine()] == three[:2]


class TestLogProbabilities:
    @pytest.mark.parametrize("lora", [False, True])
    def test_of_policy_and_reference(self, tmp_path, tiny_model, tokenizer, preference_rows, lora):
        """Two steps move the policy away from its start, which the reference still is."""
        peft_config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if lora else None
        trainer = dpo_trainer(
            tmp_path, tiny_model(), tokenizer, preference_rows["text"], max_steps=2, peft_config=peft_config
        )
        callback = LogCompletionsCallback(trainer, max_new_tokens=5)
        first = callback.log_completions(0)
        assert [row["implicit_reward"] for row in first] == [pytest.approx(0, abs=1e-4)] * 3
        trainer.train()
        answers = callback.answers.mine()
        model = trainer.model.eval()
        for answer in answers:
            prompt = answer.prompt.ids
            assert answer.logp == pytest.approx(slow_logp(model, prompt, answer.ids), abs=1e-3)
            assert answer.ref_logp == pytest.approx(slow_logp(tiny_model(), prompt, answer.ids), abs=1e-3)
            assert answer.implicit_reward == pytest.approx(0.3 * (answer.logp - answer.ref_logp))
        assert any(abs(a.implicit_reward) > 1e-3 for a in answers)
        assert list(row_of(answers[0], 1)) == ["step", "prompt", "completion", "logp", "ref_logp", "implicit_reward"]

    def test_none_without_a_reference(self, tmp_path):
        assert list(row_of(PolicyAnswers(tiny_trainer(tmp_path)).mine()[0], 1)) == ["step", "prompt", "completion"]

    def test_numbers_are_no_reference(self, tmp_path, tiny_model, tokenizer, preference_rows):
        stored = {"precompute_ref_log_probs": True}
        trainer = dpo_trainer(tmp_path, tiny_model(), tokenizer, preference_rows["text"], **stored)
        assert PolicyAnswers(trainer, options={"max_new_tokens": 2}).mine()[0].ref_logp is None

    def test_completions_without_tokens(self, tmp_path, tiny_model, tokenizer, preference_rows):
        trainer = dpo_trainer(tmp_path, tiny_model(), tokenizer, preference_rows["text"])
        answers = PolicyAnswers(trainer, generate=lambda m, t, p, c: [[] for _ in p]).mine()
        assert [(a.text, a.logp, a.implicit_reward) for a in answers] == [("", 0.0, 0.0)] * 3


class TestFailures:
    def test_one_warning_and_no_rows(self, tmp_path, caplog):
        def broken(model, tokenizer, prompts, config):
            raise RuntimeError("out of memory")

        trainer = tiny_trainer(tmp_path)
        trainer.add_callback(LogCompletionsCallback(trainer, freq=1, generate=broken))
        trainer.train()
        assert trainer.state.global_step == 4
        assert not (tmp_path / "logs" / "tables").exists()
        assert len([r for r in caplog.records if "RuntimeError: out of memory" in r.getMessage()]) == 1

    def test_a_generate_that_loses_prompts(self, tmp_path, caplog):
        answers = PolicyAnswers(tiny_trainer(tmp_path), generate=lambda m, t, p, c: [[7]]).mine()
        assert [(a.prompt.text, a.ids) for a in answers] == [(p, None) for p in PROMPTS]
        assert "1 completions for 3 prompts" in caplog.text


@pytest.mark.parametrize("lora", [False, True])
def test_a_model_that_cannot_generate(tmp_path, tiny_model, tokenizer, preference_rows, lora):
    model = tiny_model(head="value")
    if lora:
        model = get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_CLS, target_modules=["q_proj"]))
    rows = Dataset.from_list(preference_rows["text"])
    trainer = RewardTrainer(
        model=model, args=RewardConfig(**options(tmp_path)), train_dataset=rows, eval_dataset=rows,
        processing_class=tokenizer,
    )  # fmt: skip
    with pytest.raises(ValueError, match="cannot generate text"):
        LogCompletionsCallback(trainer)
