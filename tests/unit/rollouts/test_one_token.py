"""Products by blocks and grouped heads: the numbers of float64 loops, used where they help, gone afterwards."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from preftune.models.attention import attention_configs
from preftune.rollouts import one_token as module
from preftune.rollouts.local import LocalBackend
from preftune.rollouts.one_token import grouped_heads, one_token
from tests.unit.rollouts.helpers import generated, keys, make_prompts, sampling

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="products by blocks are for MKL")


@pytest.fixture
def counted(monkeypatch):
    """Shapes of the products that went by blocks, with every layer large enough for it."""
    monkeypatch.setattr(module, "_SMALL", 1)
    shapes = []
    bmm = torch.bmm

    def spy(left, right):
        shapes.append((left.shape[1], right.shape[0] * right.shape[2]))
        return bmm(left, right)

    monkeypatch.setattr(module.torch, "bmm", spy)
    return shapes


def wrapped(layer: nn.Linear) -> nn.Module:
    """A model as `one_token` wants it: an embedding says where ids go."""
    model = nn.Module()
    model.get_input_embeddings = lambda: nn.Embedding(2, 2)
    model.layer = layer
    return model


def product_in_float64(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    weight, bias = layer.weight.tolist(), layer.bias.tolist() if layer.bias is not None else [0.0] * len(layer.weight)
    rows = x.reshape(-1, x.shape[-1]).tolist()
    products = [[sum(a * w for a, w in zip(row, ws)) + b for ws, b in zip(weight, bias)] for row in rows]
    return torch.tensor(products, dtype=torch.float64)


class TestProducts:
    @pytest.mark.parametrize("bias", [False, True])
    @pytest.mark.parametrize("shape", [(4, 1, 5), (2, 4, 5), (8, 5), (15, 1, 5)])
    def test_numbers(self, counted, shape, bias):
        torch.manual_seed(0)
        layer, x = nn.Linear(5, 192, bias=bias), torch.randn(*shape)
        with torch.no_grad(), one_token(wrapped(layer)):
            out = layer(x)
        rows = x.numel() // 5
        assert counted == [(rows, 192)]
        assert out.shape == (*shape[:-1], 192)
        assert torch.allclose(out.reshape(rows, 192).double(), product_in_float64(layer, x), atol=1e-6)

    @pytest.mark.parametrize("rows", [1, 3, 16, 40])
    def test_few_or_many_rows_go_as_before(self, counted, rows):
        layer, x = nn.Linear(5, 64), torch.randn(rows, 5)
        with torch.no_grad():
            expected = layer(x)
            with one_token(wrapped(layer)):
                assert torch.equal(layer(x), expected)
        assert not counted

    def test_only_large_float32_layers_of_whole_blocks(self, counted, monkeypatch):
        class Own(nn.Linear):
            def forward(self, x):
                return super().forward(x)

        busy = nn.Linear(5, 64)
        busy.forward = lambda x: x  # as accelerate's hooks do
        others = [nn.Linear(5, 65), nn.Linear(5, 64).to(torch.bfloat16), Own(5, 64), busy]
        for layer in others:
            with torch.no_grad(), one_token(wrapped(layer)):
                layer(torch.randn(8, 5, dtype=layer.weight.dtype))
        monkeypatch.setattr(module, "_SMALL", 5 * 64 + 1)
        layer = nn.Linear(5, 64)
        with torch.no_grad(), one_token(wrapped(layer)):
            layer(torch.randn(8, 5))
        assert not counted
        assert busy.forward(1) == 1

    def test_the_weight_of_now(self, counted):
        layer, x = nn.Linear(5, 64, bias=False), torch.ones(4, 5)
        with torch.no_grad(), one_token(wrapped(layer)):
            layer.weight.fill_(1.0)
            assert layer(x).unique().tolist() == [5.0]
            layer.weight.fill_(2.0)
            assert layer(x).unique().tolist() == [10.0]

    def test_layers_are_given_back_after_an_error(self, counted):
        layer = nn.Linear(5, 64)

        def use() -> None:
            with one_token(wrapped(layer)):
                assert "forward" in vars(layer)
                raise KeyError

        with pytest.raises(KeyError):
            use()
        assert "forward" not in vars(layer)


class TestGroupedHeads:
    def attention_in_float64(self, q, k, v, mask, scale):
        out = torch.zeros(q.shape[0], 1, q.shape[1], v.shape[-1], dtype=torch.float64)
        for row in range(q.shape[0]):
            for head in range(q.shape[1]):
                group = head // (q.shape[1] // k.shape[1])
                seen = [t for t in range(k.shape[2]) if mask is None or mask[row, 0, 0, t]]
                scores = torch.tensor(
                    [scale * float(q[row, head, 0].double() @ k[row, group, t].double()) for t in seen]
                )
                weights = (scores - scores.max()).double().exp()
                for weight, t in zip(weights / weights.sum(), seen):
                    out[row, 0, head] += weight * v[row, group, t].double()
        return out

    @pytest.mark.parametrize("masked", [False, True])
    def test_numbers(self, masked):
        torch.manual_seed(0)
        q, k, v = torch.randn(3, 6, 1, 4), torch.randn(3, 2, 7, 4), torch.randn(3, 2, 7, 5)
        mask = torch.rand(3, 1, 1, 7) > 0.3 if masked else None
        if mask is not None:
            mask[..., -1] = True
        out, weights = grouped_heads(nn.Module(), q, k, v, mask, scaling=0.3)
        assert weights is None
        assert torch.allclose(out.double(), self.attention_in_float64(q, k, v, mask, 0.3), atol=1e-6)

    def test_many_queries_go_to_sdpa(self):
        torch.manual_seed(0)
        layer = nn.Module()
        layer.num_key_value_groups, layer.is_causal = 3, True
        q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)
        out, _ = grouped_heads(layer, q, k, v, None, scaling=0.5)
        last = self.attention_in_float64(q[:, :, -1:], k, v, None, 0.5)
        assert torch.allclose(out[:, -1:].double(), last, atol=1e-6)
        first = self.attention_in_float64(q[:, :, :1], k[:, :, :1], v[:, :, :1], None, 0.5)
        assert torch.allclose(out[:, :1].double(), first, atol=1e-6)

    def test_a_family_with_attention_of_its_own_keeps_it(self, tiny_model, monkeypatch):
        """It may look its class up by the name of what it computes with."""
        model = tiny_model("llama")
        monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
        with one_token(model):
            assert {c._attn_implementation_internal for c in attention_configs(model)} == {"sdpa"}

    def test_a_model_with_another_attention_keeps_it(self, tiny_model):
        model = tiny_model("llama", attn_implementation="eager")
        with one_token(model):
            assert {c._attn_implementation_internal for c in attention_configs(model)} == {"eager"}


class TestInRollouts:
    @pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma3"])
    def test_greedy_equals_generate(self, tiny_model, counted, family):
        model = tiny_model(family)
        prompts = make_prompts()
        before = {c._attn_implementation_internal for c in attention_configs(model)}
        rollouts = LocalBackend(model).generate(prompts, 1, sampling(temperature=0.0), stream=keys(len(prompts)))
        assert counted, "no product went by blocks"
        assert [list(ids) for ids in rollouts.completion_ids] == generated(model, prompts, 12)
        assert {c._attn_implementation_internal for c in attention_configs(model)} == before
        assert not any("forward" in vars(m) for m in model.modules())

    def test_adapters_take_part(self, tiny_model, counted):
        torch.manual_seed(0)
        model = get_peft_model(
            tiny_model("llama"), LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)
        )
        prompts = make_prompts()
        rollouts = LocalBackend(model).generate(prompts, 1, sampling(temperature=0.0), stream=keys(len(prompts)))
        assert counted, "no product went by blocks"
        assert [list(ids) for ids in rollouts.completion_ids] == generated(model, prompts, 12)
