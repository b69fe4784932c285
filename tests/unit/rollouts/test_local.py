"""LocalBackend: greedy equals `generate`, log-probs equal the trainer's scores, and samples depend on their key alone.

Models are fp32 and sharp, so that a wrong window, position, soft-cap or mask changes tokens.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import GenerationConfig

from preftune.data.tree import build_tree
from preftune.errors import ConfigError, RolloutError
from preftune.models.attention import is_active, scoring
from preftune.models.logprobs import choose_layout, token_scores
from preftune.rollouts import cache as cache_module
from preftune.rollouts.decode import Sample, loop_obstacle
from preftune.rollouts.local import LocalBackend, batches
from tests.unit.rollouts.helpers import generated, keys, make_prompts, sampling

FAMILIES = ["llama", "qwen2", "mistral", "gemma2", "gpt2"]
MORE_FAMILIES = ["gemma3", "qwen3_moe", "gpt_oss"]
THROUGH_GENERATE = ["lfm2", "mamba"]
PROMPTS = make_prompts()
KEYS = keys(len(PROMPTS))


@pytest.fixture(scope="module")
def llama(tiny_model):
    return tiny_model("llama")


def as_lists(rollouts) -> list[list[int]]:
    return [list(ids) for ids in rollouts.completion_ids]


def largest_gap(model, rollouts, temperature: float) -> float:
    """Largest difference between the sampler's log-probs and `token_scores` of the same completions."""
    g = rollouts.num_generations
    groups = [rollouts.completion_ids[p * g : (p + 1) * g] for p in range(len(rollouts.prompt_ids))]
    tree = build_tree(rollouts.prompt_ids, groups)
    with torch.no_grad():
        scores = token_scores(model, tree, layout=choose_layout(model).layout, temperature=temperature)
    flat = torch.tensor([x for row in rollouts.logps for x in row])
    return (flat - scores.logps).abs().max().item()


class TestEqualsGenerate:
    @pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
    def test_greedy(self, tiny_model, family, monkeypatch):
        monkeypatch.setattr(cache_module, "_CHUNK", 3)  # so that the cache grows several times
        model = tiny_model(family)
        assert loop_obstacle(model) is None
        rollouts = LocalBackend(model).generate(PROMPTS, 1, sampling(temperature=0.0), stream=KEYS)
        assert as_lists(rollouts) == generated(model, PROMPTS, 12)
        assert largest_gap(model, rollouts, 1.0) < 1e-4

    @pytest.mark.parametrize("family", THROUGH_GENERATE)
    def test_greedy_of_models_whose_cache_cannot_be_shared(self, tiny_model, family, caplog):
        model = tiny_model(family)
        rollouts = LocalBackend(model).generate(PROMPTS, 2, sampling(temperature=0.0), stream=KEYS)
        alone = [generated(model, [prompt], 12)[0] for prompt in PROMPTS for _ in range(2)]
        assert as_lists(rollouts) == alone
        assert "cannot share prompts" in caplog.text

    @pytest.mark.parametrize(
        "options",
        [
            {"repetition_penalty": 1.8},
            {"suppress_tokens": list(range(3, 200))},
            {"bad_words_ids": [[t] for t in range(100, 320)]},
            {"min_new_tokens": 7},
            {"no_repeat_ngram_size": 1},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_greedy_with_processors_while_rows_are_dropped(self, llama, options):
        """Several end tokens stop rows at different steps; what is left must keep its own prompt in the processors."""
        eos = tuple(range(2, 320, 5))
        fields = {"repetition_penalty": options["repetition_penalty"]} if "repetition_penalty" in options else {}
        wanted = sampling(temperature=0.0, eos_token_ids=eos, extra={} if fields else options, **fields)
        rollouts = LocalBackend(llama).generate(PROMPTS, 1, wanted, stream=KEYS)
        assert as_lists(rollouts) == generated(llama, PROMPTS, 12, eos, **options)
        assert len({len(ids) for ids in rollouts.completion_ids}) > 1

    @pytest.mark.parametrize("family", ["llama", "lfm2"])
    def test_no_option_of_the_models_own_generation_config_gets_in(self, tiny_model, family):
        model = tiny_model(family)
        plain = as_lists(LocalBackend(model).generate(PROMPTS, 2, sampling(), stream=KEYS))
        model.generation_config = GenerationConfig(do_sample=True, top_k=1, repetition_penalty=9.0, eos_token_id=7)
        assert as_lists(LocalBackend(model).generate(PROMPTS, 2, sampling(), stream=KEYS)) == plain


class TestSampledLogps:
    @pytest.mark.parametrize("family", [*FAMILIES, *THROUGH_GENERATE])
    def test_equal_the_trainers_scores(self, tiny_model, family):
        model = tiny_model(family)
        rollouts = LocalBackend(model).generate(PROMPTS, 3, sampling(temperature=0.7, seed=3), stream=KEYS)
        assert largest_gap(model, rollouts, 0.7) < 1e-4

    def test_of_every_length_when_rows_are_dropped(self, llama):
        wanted = sampling(16, temperature=1.3, eos_token_ids=tuple(range(2, 320, 11)), top_p=0.9)
        rollouts = LocalBackend(llama).generate(PROMPTS, 4, wanted, stream=KEYS)
        lengths = [len(ids) for ids in rollouts.completion_ids]
        assert min(lengths) == 1 and max(lengths) == 16
        assert [len(row) for row in rollouts.logps] == lengths
        assert largest_gap(llama, rollouts, 1.3) < 1e-4


class TestStreams:
    """Equal logits give equal samples: in fp32 a last-bit difference turns a token with a chance of about 1e-6."""

    @pytest.mark.parametrize("family", [*FAMILIES, "lfm2"])
    def test_batch_order_and_budget_change_nothing(self, tiny_model, family):
        model = tiny_model(family)
        wanted = sampling(seed=11, eos_token_ids=tuple(range(2, 320, 17)))
        together = as_lists(LocalBackend(model).generate(PROMPTS, 3, wanted, stream=KEYS))
        alone = [
            ids
            for prompt, key in zip(PROMPTS, KEYS, strict=True)
            for ids in as_lists(LocalBackend(model).generate([prompt], 3, wanted, stream=[key]))
        ]
        assert alone == together
        backwards = as_lists(LocalBackend(model).generate(PROMPTS[::-1], 3, wanted, stream=KEYS[::-1]))
        assert [backwards[3 * (4 - p) + g] for p in range(5) for g in range(3)] == together
        for budget in (1, 70, 130):
            assert as_lists(LocalBackend(model, max_batch_tokens=budget).generate(PROMPTS, 3, wanted, stream=KEYS)) == (
                together
            )

    def test_more_samples_or_tokens_extend_what_was_there(self, llama):
        few = as_lists(LocalBackend(llama).generate(PROMPTS, 2, sampling(5), stream=KEYS))
        many = as_lists(LocalBackend(llama).generate(PROMPTS, 4, sampling(9), stream=KEYS))
        assert few == [ids[:5] for p in range(5) for ids in many[4 * p : 4 * p + 2]]

    def test_seed_round_prompt_and_sample_each_change_the_numbers(self, llama):
        backend = LocalBackend(llama)
        same = [PROMPTS[2]] * 3
        first = as_lists(backend.generate(same, 2, sampling(seed=0), stream=keys(3)))
        assert len(set(map(tuple, first))) == 6
        assert as_lists(backend.generate(same, 2, sampling(seed=1), stream=keys(3))) != first
        assert as_lists(backend.generate(same, 2, sampling(seed=0), stream=keys(3, round_number=1))) != first
        assert as_lists(backend.generate(same, 2, sampling(seed=0), stream=keys(3))) == first

    def test_frequencies_are_the_models_probabilities(self, llama):
        prompt = PROMPTS[1]
        rollouts = LocalBackend(llama).generate([prompt], 3000, sampling(1), stream=[(0, 0)])
        counts = np.bincount([ids[0] for ids in rollouts.completion_ids], minlength=320)
        with torch.no_grad():
            p = llama(torch.tensor([prompt])).logits[0, -1].double().softmax(-1).numpy()
        assert (np.abs(counts - 3000 * p) < 5 * np.sqrt(3000 * p) + 3).all()


class TestEnds:
    def test_every_end_token_is_honoured_and_kept(self, llama):
        free = as_lists(LocalBackend(llama).generate(PROMPTS, 2, sampling(seed=5), stream=KEYS))
        ends = {free[0][0], free[3][4], free[7][11]}
        rollouts = LocalBackend(llama).generate(PROMPTS, 2, sampling(seed=5, eos_token_ids=tuple(ends)), stream=KEYS)
        for got, all_of_it, reason in zip(rollouts.completion_ids, free, rollouts.finish_reasons, strict=True):
            first = next((i for i, token in enumerate(all_of_it) if token in ends), None)
            assert got == (all_of_it if first is None else all_of_it[: first + 1])
            assert reason == ("length" if first is None else "stop")
        assert {len(ids) for ids in rollouts.completion_ids} >= {1, 12}

    def test_an_end_token_as_the_last_of_the_budget_is_a_stop(self, llama):
        free = as_lists(LocalBackend(llama).generate(PROMPTS[:1], 1, sampling(3), stream=KEYS[:1]))[0]
        assert len(set(free)) == 3
        wanted = sampling(3, eos_token_ids=(free[2],))
        assert LocalBackend(llama).generate(PROMPTS[:1], 1, wanted, stream=KEYS[:1]).finish_reasons == ["stop"]

    @pytest.mark.parametrize("family", ["gpt2", "mamba"])
    def test_one_token_for_prompts_of_one_token(self, tiny_model, family):
        rollouts = LocalBackend(tiny_model(family)).generate([[5], [6]], 2, sampling(1), stream=keys(2))
        assert [len(ids) for ids in rollouts.completion_ids] == [1, 1, 1, 1]

    def test_no_prompt_is_no_completion(self, llama):
        assert as_lists(LocalBackend(llama).generate([], 4, sampling(), stream=[])) == []


class TestPositions:
    def test_a_learned_table_of_positions_cuts_the_budget(self, tiny_model, caplog):
        model = tiny_model("gpt2", max_position_embeddings=20)
        rollouts = LocalBackend(model).generate(PROMPTS, 1, sampling(temperature=0.0), stream=KEYS)
        assert [len(ids) for ids in rollouts.completion_ids] == [12, 12, 11, 11, 3]
        assert "20 positions" in caplog.text
        assert as_lists(rollouts)[4] == generated(model, PROMPTS[4:], 3)[0]
        assert largest_gap(model, rollouts, 1.0) < 1e-4  # the trainer can score all of it

    def test_a_prompt_that_fills_the_table_is_an_error_with_numbers(self, tiny_model):
        with pytest.raises(RolloutError, match="17 tokens leaves none of the model's 16 positions"):
            LocalBackend(tiny_model("gpt2", max_position_embeddings=16)).generate(PROMPTS, 1, sampling(), stream=KEYS)

    def test_rotary_positions_have_no_such_limit(self, tiny_model):
        model = tiny_model("llama", max_position_embeddings=16)
        rollouts = LocalBackend(model).generate(PROMPTS, 1, sampling(temperature=0.0), stream=KEYS)
        assert as_lists(rollouts) == generated(model, PROMPTS, 12)


class TestBatches:
    def samples(self, lengths, count=3, budget=5):
        return [
            Sample([4] * n, budget, [(p, g) for g in range(count)], range(p * count, (p + 1) * count))
            for p, n in enumerate(lengths)
        ]

    @pytest.mark.parametrize("max_tokens", [1, 40, 100, 10_000])
    @pytest.mark.parametrize("one_length", [False, True])
    def test_every_sample_once_within_the_limits(self, max_tokens, one_length):
        dealt = list(batches(self.samples([7, 2, 7, 30, 2]), max_tokens, 4, one_length=one_length))
        assert sorted(place for batch in dealt for sample in batch for place in sample.places) == list(range(15))
        for batch in dealt:
            rows = sum(len(sample.keys) for sample in batch)
            widest = max(len(sample.prompt) for sample in batch)
            assert rows == 1 or (rows <= 4 and rows * (widest + 5) <= max_tokens)
            assert not one_length or len({len(sample.prompt) for sample in batch}) == 1
            assert all([(k[0] * 3 + k[1]) for k in s.keys] == list(s.places) for s in batch)


class TestNothingIsDisturbed:
    def state(self, model):
        return (
            [(name, m.training) for name, m in model.named_modules()],
            vars(model).get("forward"),
            model.generation_config,
            model.generation_config.to_dict(),
            model.config._attn_implementation,
            [m.gradient_checkpointing for m in model.modules() if "gradient_checkpointing" in vars(m)],
            random.getstate(),
            np.random.get_state()[1].tobytes(),
            torch.get_rng_state().tolist(),
            torch.is_grad_enabled(),
        )

    @pytest.mark.parametrize("family", ["llama", "lfm2"])
    def test_after_success_and_after_an_exception(self, tiny_model, family):
        model = tiny_model(family, attention_dropout=0.5) if family == "llama" else tiny_model(family)
        wanted = as_lists(LocalBackend(model).generate(PROMPTS, 2, sampling(), stream=KEYS))
        model.train()
        model.model.layers[1].eval()
        model.gradient_checkpointing_enable()
        before = self.state(model)
        assert as_lists(LocalBackend(model).generate(PROMPTS, 2, sampling(), stream=KEYS)) == wanted
        assert self.state(model) == before
        hook = model.model.layers[0].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyError("stop")))
        with pytest.raises(KeyError):
            LocalBackend(model).generate(PROMPTS, 2, sampling(), stream=KEYS)
        hook.remove()
        assert self.state(model) == before

    def test_inside_a_scoring_block(self, llama):
        wanted = as_lists(LocalBackend(llama).generate(PROMPTS, 2, sampling(), stream=KEYS))
        with scoring(llama, "tree"):
            assert as_lists(LocalBackend(llama).generate(PROMPTS, 2, sampling(), stream=KEYS)) == wanted
            assert is_active(llama, "tree")

    def test_autocast_is_off_in_and_around_the_model(self, tiny_model):
        """As accelerate prepares a model for bf16: autocast inside `forward`."""
        model = tiny_model("llama")
        wanted = LocalBackend(model).generate(PROMPTS, 2, sampling(), stream=KEYS)
        original = model.forward
        model._original_forward = original
        model.forward = torch.autocast("cpu", torch.bfloat16)(original)
        wrapped = model.forward
        with torch.autocast("cpu", torch.bfloat16):
            got = LocalBackend(model).generate(PROMPTS, 2, sampling(), stream=KEYS)
        assert got.logps == wanted.logps
        assert model.forward is wrapped

    def test_gradients_still_flow_afterwards(self, tiny_model):
        model = tiny_model("llama").train()
        LocalBackend(model).generate(PROMPTS, 2, sampling(), stream=KEYS)
        model(torch.tensor([PROMPTS[3]])).logits.sum().backward()
        assert all(p.grad is not None for p in model.parameters())


class _Wrapped(nn.Module):
    """As DDP holds its module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class TestWrappedModels:
    def test_wrappers_and_adapters(self, tiny_model):
        torch.manual_seed(0)
        config = LoraConfig(r=4, lora_alpha=32, lora_dropout=0.5, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(tiny_model("llama"), config).train()
        rollouts = LocalBackend(_Wrapped(model)).generate(PROMPTS, 2, sampling(temperature=0.9), stream=KEYS)
        with model.disable_adapter():
            base = LocalBackend(model).generate(PROMPTS, 2, sampling(temperature=0.9), stream=KEYS)
        assert as_lists(base) != as_lists(rollouts)
        assert model.training
        assert largest_gap(model.eval(), rollouts, 0.9) < 1e-4

    @pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
    def test_prompt_learning(self, tiny_model, caplog, config):
        """peft's own `generate` forgets the virtual tokens after the first token, or all of them."""
        torch.manual_seed(0)
        model = get_peft_model(tiny_model("llama"), config(task_type="CAUSAL_LM", num_virtual_tokens=4))
        rollouts = LocalBackend(model).generate(PROMPTS, 2, sampling(8), stream=KEYS)
        assert "virtual tokens" in caplog.text
        assert largest_gap(model.eval(), rollouts, 1.0) < 1e-4


class TestErrors:
    @pytest.mark.parametrize(
        ("prompts", "g", "options", "words"),
        [
            ([[3], []], 1, {}, "prompt 1 .* no tokens"),
            ([[3], [4, 320]], 1, {}, "token 320, and the model knows the ids 0 to 319"),
            ([[3], [4, -1]], 1, {}, "token -1"),
            ([[3], [4]], 0, {}, "num_generations=0"),
            ([[3], [4]], 1, {"temperature": -1.0}, "temperature=-1.0"),
            ([[3], [4]], 1, {"max_new_tokens": 0}, "max_new_tokens=0"),
            ([[3], [4]], 1, {"extra": {"suppress_tokens": list(range(320))}}, "leave no token"),
        ],
    )
    def test_requests_that_cannot_be_followed(self, llama, prompts, g, options, words):
        with pytest.raises(RolloutError, match=words):
            LocalBackend(llama).generate(prompts, g, sampling(**options), stream=keys(2))

    def test_keys_must_match_prompts(self, llama):
        with pytest.raises(RolloutError, match="2 prompts came with 1 stream keys"):
            LocalBackend(llama).generate([[3], [4]], 1, sampling(), stream=keys(1))

    def test_a_model_without_numbers(self, tiny_model):
        model = tiny_model("llama")
        model.lm_head.weight.data[7] = torch.nan
        with pytest.raises(RolloutError, match="NaN"):
            LocalBackend(model).generate(PROMPTS, 1, sampling(), stream=KEYS)

    @pytest.mark.parametrize("options", [{"precision": "float8"}, {"max_batch_tokens": 0}])
    def test_constructor(self, llama, options):
        with pytest.raises(ConfigError, match="wanted"):
            LocalBackend(llama, **options)
