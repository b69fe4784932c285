"""How a token is drawn: streams that depend on their key alone, an exact inverse CDF, and options named early.

The CDF is checked against a float64 running sum over the whole vocabulary.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from preftune.errors import ConfigError
from preftune.rollouts.sampling import TokenSampler, generation_config, uniforms
from tests.unit.rollouts.helpers import sampling


class TestUniforms:
    def test_a_row_depends_on_its_key_alone(self):
        keys = [(0, 3, 1), (0, 3, 2), (7, 0, 0)]
        together = uniforms(keys, 9)
        assert torch.equal(uniforms(keys[::-1], 9), together.flip(0))
        assert torch.equal(uniforms(keys[1:2], 4), together[1:2, :4])

    def test_keys_do_not_run_into_each_other(self):
        keys = [(1,), (1, 0), (0, 1), (0,), (0, 0), (2**32,), (2**64, 1), (1, 2**64), (-1,), (12, 3), (1, 23)]
        assert len({tuple(row.tolist()) for row in uniforms(keys, 2)}) == len(keys)

    def test_uniform_over_samples_and_over_steps(self):
        drawn = uniforms([(0, 0, g) for g in range(2000)], 3).numpy()
        assert drawn.min() >= 0 and drawn.max() < 1
        for values in drawn.T:  # 2000 numbers in 10 bins: 200 +- 13.4, five sigma
            assert np.abs(np.histogram(values, 10, (0, 1))[0] - 200).max() < 67
        assert abs(np.corrcoef(drawn.T) - np.eye(3)).max() < 0.1

    def test_numpy_integers_and_python_integers_are_one_key(self):
        assert torch.equal(uniforms([(np.int64(5), 1)], 2), uniforms([(5, 1)], 2))

    def test_known_numbers(self):
        """A resumed run draws what the first one did, whatever version wrote the checkpoint: the streams are fixed."""
        assert uniforms([(42, 0, 1, 2)], 2)[0].tolist() == [0.21703027410988485, 0.9353718455855359]


def slow_draw(logits: torch.Tensor, u: float) -> int:
    running = 0.0
    weights = np.exp(logits.double().numpy() - logits.double().max().item())
    target = u * weights.sum()
    for token, weight in enumerate(weights):
        running += weight
        if running > target:
            return token
    raise AssertionError


@pytest.fixture(scope="module")
def model(tiny_model):
    return tiny_model("llama", num_hidden_layers=1)


def sampler_for(model, prompt=((5, 6, 7),), **options) -> TokenSampler:
    sampler = TokenSampler(model, sampling(**options), torch.device("cpu"))
    ids = torch.tensor(prompt)
    sampler.begin(ids, torch.ones_like(ids))
    return sampler


class TestDraw:
    @pytest.mark.parametrize("vocabulary", [7, 256, 257, 700])
    def test_equals_a_slow_running_sum(self, model, vocabulary):
        generator = torch.Generator().manual_seed(vocabulary)
        logits = 3 * torch.randn(40, vocabulary, generator=generator)
        u = torch.rand(40, generator=generator, dtype=torch.float64)
        u[:3] = torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)
        ids = torch.full((40, 3), 5)
        tokens, logps = sampler_for(model)(ids, logits, u)
        assert tokens.tolist() == [slow_draw(row, x) for row, x in zip(logits, u.tolist(), strict=True)]
        exact = logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
        assert (logps - exact).abs().max() < 2e-6

    def test_impossible_tokens_are_never_drawn(self, model):
        logits = torch.full((1001, 600), -torch.inf)
        logits[:, [3, 255, 256, 511, 597]] = torch.tensor([0.0, -30.0, 1.0, -200.0, 2.0])
        u = torch.linspace(0, 1 - 2**-53, 1001, dtype=torch.float64)
        tokens, _ = sampler_for(model)(torch.full((1001, 3), 5), logits, u)
        assert set(tokens.tolist()) <= {3, 255, 256, 597}

    def test_temperature_scales_the_distribution_and_its_logps(self, model):
        logits = torch.tensor([[1.0, 2.0, 4.0]])
        tokens, logps = sampler_for(model, temperature=2.0)(torch.tensor([[5]]), logits, torch.tensor([0.5]).double())
        # exp(.5), exp(1), exp(2) = 1.649, 2.718, 7.389: half of 11.756 is in the third
        assert tokens.tolist() == [2]
        assert logps.item() == pytest.approx(np.log(7.38906 / 11.75606), abs=1e-5)

    def test_top_k_restricts_the_draw_but_not_the_logps(self, model):
        logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
        tokens, logps = sampler_for(model, top_k=2)(torch.tensor([[5]]), logits, torch.tensor([0.0]).double())
        assert tokens.tolist() == [2]
        assert logps.item() == pytest.approx(2 - np.log(np.exp([0, 1, 2, 3]).sum()), abs=1e-5)

    def test_greedy_takes_the_largest_and_gives_its_probability_at_temperature_one(self, model):
        logits = torch.tensor([[0.0, 3.0, 1.0]])
        tokens, logps = sampler_for(model, temperature=0.0)(torch.tensor([[5]]), logits, torch.tensor([0.0]).double())
        assert tokens.tolist() == [1]
        assert logps.item() == pytest.approx(3 - np.log(np.exp([0, 3, 1]).sum()), abs=1e-5)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_nothing_to_draw_is_told_by_the_logps(self, model, temperature):
        everything = list(range(320))
        logits = torch.zeros(1, 320)
        for options, row in (({}, logits * torch.nan), ({"extra": {"suppress_tokens": everything}}, logits)):
            sampler = sampler_for(model, temperature=temperature, **options)
            tokens, logps = sampler(torch.tensor([[5]]), row, torch.tensor([0.5]).double())
            assert 0 <= tokens.item() < 320
            assert not torch.isfinite(logps).any()


class TestOptions:
    def test_nothing_of_the_defaults_changes_a_distribution(self, model):
        assert sampler_for(model)._processors is None
        assert sampler_for(model, temperature=0.7)._processors is None
        assert sampler_for(model, temperature=0.7, top_p=0.9)._processors is not None

    @pytest.mark.parametrize(
        ("extra", "words"),
        [
            ({"top_q": 1}, "top_q"),
            ({"temperature": 0.5}, "field of the config"),
            ({"num_beams": 4}, "num_beams"),
            ({"min_length": 4}, "min_new_tokens"),
            ({"stop_strings": ["."]}, "stop_strings"),
        ],
    )
    def test_options_that_cannot_be_followed(self, extra, words):
        with pytest.raises(ConfigError, match=words):
            generation_config(sampling(extra=extra))

    def test_extras_win(self):
        assert generation_config(sampling(top_p=0.9, extra={"top_p": 0.5})).top_p == 0.5
