"""Turns of a conversation with what was computed before them: the same tokens and log-probs, and fewer tokens computed.

The yardstick is the same backend outside `conversations`, which computes every prompt from its beginning.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from preftune.rollouts import cache as cache_module
from preftune.rollouts.base import RolloutBackend
from preftune.rollouts.kept import KeptRows
from preftune.rollouts.local import LocalBackend
from preftune.rollouts.toolbox import Toolbox
from preftune.rollouts.tools import ToolRollouts
from preftune.types import Sampling
from tests.unit.rollouts.helpers import make_prompts, sampling

FAMILIES = ["llama", "qwen2", "gpt2", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3_moe"]  # windows of 6 tokens
ENDS = tuple(range(2, 320, 9))


class Counted:
    """Tokens that went through a model, padding included, while the block lasts."""

    def __init__(self, model):
        self._embeddings = model.get_input_embeddings()

    def __enter__(self):
        self.tokens = 0
        self._hook = self._embeddings.register_forward_pre_hook(self._count)
        return self

    def __exit__(self, *_):
        self._hook.remove()

    def _count(self, _, inputs):
        self.tokens += inputs[0].numel()


def converse(backend, prompts, results, wanted, *, size=1, keep=True):
    """Turns of `size` conversations a prompt: the n-th list of `results` holds what follows the n-th turn of each.

    Gives the drawn tokens and log-probs of each turn, and what stands before the next one.
    """
    turns, before = [], [p for p in prompts for _ in range(size)]
    with backend.conversations() if keep else nullcontext(lambda histories: None) as go_on:
        for turn, texts in enumerate([*results, None]):
            stream = [(7, turn, i) for i in range(len(before if turn else prompts))]
            drawn = backend.generate(prompts if turn == 0 else before, 1 if turn else size, wanted, stream=stream)
            turns.append((drawn.completion_ids, drawn.logps))
            before = [list(b) + list(ids) for b, ids in zip(before, drawn.completion_ids, strict=True)]
            if texts is not None:
                go_on(before)
                before = [b + list(text) for b, text in zip(before, texts, strict=True)]
    return turns, before


def texts_of(*lengths, seed=3):
    return make_prompts(lengths, seed=seed)


def same(one, other, tolerance=1e-4):
    for (ids, logps), (wanted_ids, wanted_logps) in zip(one, other, strict=True):
        assert ids == wanted_ids
        for row, wanted in zip(logps, wanted_logps, strict=True):
            assert row == pytest.approx(wanted, abs=tolerance)


@pytest.fixture(scope="module")
def llama(tiny_model):
    return tiny_model("llama")


class TestTokensComputed:
    def test_two_turns(self, llama):
        """Four tokens are drawn a turn, of which the last is never computed, so 5 + 3 and 9 + 3 are known.

        First turn: prompts of 5 and 9 (too unlike to be padded together) and 3 steps of 2 rows: 20. Second turn: 1 + 3
        new tokens a row, 3 steps: 8 + 6. Without: prompts of 12 and 16, padded together: 32 + 6.
        """
        prompts, results = texts_of(5, 9), [texts_of(3, 3, seed=4)]
        with Counted(llama) as kept:
            converse(LocalBackend(llama), prompts, results, sampling(4))
        with Counted(llama) as anew:
            converse(LocalBackend(llama), prompts, results, sampling(4), keep=False)
        assert (kept.tokens, anew.tokens) == (20 + 8 + 6, 20 + 32 + 6)

    def test_new_texts_of_unlike_lengths_are_not_padded_together(self, llama):
        """20 as above, then 1 + 1 and 1 + 20 new tokens, and 3 steps of 2 rows."""
        with Counted(llama) as kept:
            converse(LocalBackend(llama), texts_of(5, 9), [texts_of(1, 20, seed=4)], sampling(4))
        assert kept.tokens == 20 + 2 + 21 + 6

    def test_like_lengths_are(self, llama):
        """20, then 1 + 8 and 1 + 9 new tokens, both rows computing 10, and 3 steps of 2 rows."""
        with Counted(llama) as kept:
            converse(LocalBackend(llama), texts_of(5, 9), [texts_of(9, 8, seed=4)], sampling(4))
        assert kept.tokens == 20 + 20 + 6

    def test_samples_of_a_prompt(self, llama):
        """A prompt of 6 once and 1 step of 3 rows; then 1 + 2 new tokens a row, each its own, and 1 step."""
        with Counted(llama) as kept:
            converse(LocalBackend(llama), texts_of(6), [texts_of(2, 2, 2, seed=4)], sampling(2), size=3)
        assert kept.tokens == 6 + 3 + 9 + 3

    def test_what_was_rewritten_is_computed_from_there(self, llama):
        """Of 5 + 4 tokens the one at place 3 changes: 3 are known, of 9 + 2 the other 8 are computed."""
        backend, (prompt,) = LocalBackend(llama), texts_of(5)
        with backend.conversations():
            first = backend.generate([prompt], 1, sampling(4), stream=[(0,)]).completion_ids[0]
            after = [*prompt[:3], prompt[3] + 1, prompt[4], *first, 7, 8]
            with Counted(llama) as counted:
                got = backend.generate([after], 1, sampling(4), stream=[(1,)])
        assert counted.tokens == 8 + 3
        wanted = LocalBackend(llama).generate([after], 1, sampling(4), stream=[(1,)])
        same([(got.completion_ids, got.logps)], [(wanted.completion_ids, wanted.logps)])

    def test_samples_of_a_prompt_that_are_drawn_in_parts(self, llama):
        """Two of the four rows fit at once; the second two find the prompt, but for its last token."""
        backend, (prompt,) = LocalBackend(llama, max_batch_tokens=16), texts_of(6)
        with backend.conversations(), Counted(llama) as kept:
            backend.generate([prompt], 4, sampling(2), stream=[(0,)])
        assert kept.tokens == (6 + 2) + (1 + 2)


class TestSameResults:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_of_three_turns(self, tiny_model, family, temperature, monkeypatch):
        """Rows end at different steps and are dropped; texts are shorter and longer than a window."""
        monkeypatch.setattr(cache_module, "_CHUNK", 3)  # so that buffers are moved several times
        model = tiny_model(family)
        prompts = make_prompts((1, 5, 9, 9))
        results = [texts_of(1, 8, 2, 3, 4, 9, 12, 1), texts_of(7, 1, 1, 2, 13, 2, 6, 5, seed=5)]
        wanted = sampling(10, temperature=temperature, seed=2, eos_token_ids=ENDS)
        with Counted(model) as few:
            kept, after = converse(LocalBackend(model), prompts, results, wanted, size=2)
        with Counted(model) as all_of_them:
            anew, wanted_after = converse(LocalBackend(model), prompts, results, wanted, size=2, keep=False)
        same(kept, anew)
        assert after == wanted_after
        assert few.tokens < 0.8 * all_of_them.tokens
        if temperature:
            assert len({len(ids) for ids in kept[0][0]}) > 2

    @pytest.mark.parametrize("family", ["mistral", "gemma3"])
    def test_when_history_is_rewritten_far_behind_the_window(self, tiny_model, family):
        model, prompts = tiny_model(family), make_prompts((17, 20))
        backend = LocalBackend(model)
        with backend.conversations():
            drawn = backend.generate(prompts, 1, sampling(9), stream=[(0,), (1,)]).completion_ids
            after = [p[:at] + p[at + 1 :] + d + [5, 6] for p, d, at in zip(prompts, drawn, (8, 15), strict=True)]
            got = backend.generate(after, 1, sampling(9), stream=[(2,), (3,)])
        wanted = LocalBackend(model).generate(after, 1, sampling(9), stream=[(2,), (3,)])
        same([(got.completion_ids, got.logps)], [(wanted.completion_ids, wanted.logps)])

    @pytest.mark.parametrize("budget", [1, 30, 60])
    def test_with_little_room(self, llama, budget):
        """Some conversations are kept, or none."""
        prompts, results = make_prompts((5, 9, 7)), [texts_of(3, 4, 5), texts_of(1, 1, 6, seed=5)]
        backend = LocalBackend(llama, max_batch_tokens=budget)
        with Counted(llama) as few:
            kept, _ = converse(backend, prompts, results, sampling(4))
        with Counted(llama) as all_of_them:
            anew, _ = converse(backend, prompts, results, sampling(4), keep=False)
        same(kept, anew)
        assert few.tokens < all_of_them.tokens if budget > 1 else few.tokens == all_of_them.tokens

    def test_with_processors_that_read_the_prompt(self, llama):
        prompts, results = make_prompts((5, 9)), [texts_of(3, 4)]
        wanted = sampling(8, temperature=0.0, repetition_penalty=1.8)
        same(*(converse(LocalBackend(llama), prompts, results, wanted, keep=keep)[0] for keep in (True, False)))

    def test_of_a_model_whose_cache_cannot_be_shared(self, tiny_model, caplog):
        """It computes all of it, as it says once."""
        model, prompts, results = tiny_model("lfm2"), make_prompts((5, 9)), [texts_of(3, 4)]
        same(*(converse(LocalBackend(model), prompts, results, sampling(4), keep=keep)[0] for keep in (True, False)))
        assert "cannot share prompts" in caplog.text

    def test_of_the_bfloat16_copy(self, tiny_model):
        """Of every token the log-prob differs from that of one forward of the copy by the rounding of bfloat16."""
        model, prompts, results = tiny_model("llama"), make_prompts((5, 9)), [texts_of(3, 4)]
        backend = LocalBackend(model, precision="bfloat16")
        backend.generate(prompts, 1, sampling(1), stream=[(0,), (1,)])
        with Counted(backend._snapshot.model) as few:
            turns, after = converse(backend, prompts, results, sampling(4))
        assert few.tokens == 20 + 10 + 6
        for i, whole in enumerate(after):
            with torch.no_grad():
                logps = backend._snapshot.model(torch.tensor([whole])).logits[0].float().log_softmax(-1)
            place = len(whole) - 4
            wanted = [logps[place + n - 1, whole[place + n]].item() for n in range(4)]
            assert turns[1][1][i] == pytest.approx(wanted, abs=0.1)


class TestNothingStays:
    def test_after_a_block_and_after_an_exception(self, tiny_model):
        model = tiny_model("llama")
        backend, (prompt,) = LocalBackend(model), texts_of(5)

        def fails():
            with backend.conversations():
                backend.generate([prompt], 1, sampling(4), stream=[(0,)])
                assert backend._kept.tokens == 5 + 3
                hook = model.model.layers[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyError("stop")))
                try:
                    backend.generate([[*prompt, 3]], 1, sampling(4), stream=[(0,)])
                finally:
                    hook.remove()

        with pytest.raises(KeyError, match="stop"):
            fails()
        assert backend._kept.tokens == 0 and not backend._kept.keeps
        backend.generate([prompt], 1, sampling(4), stream=[(0,)])
        assert backend._kept.tokens == 0

    def test_new_weights_of_the_next_block(self, tiny_model):
        model, prompts, results = tiny_model("llama"), texts_of(5, 9), [texts_of(3, 3, seed=4)]
        backend = LocalBackend(model)
        before, _ = converse(backend, prompts, results, sampling(4))
        model.model.layers[0].mlp.down_proj.weight.data.mul_(-1)
        kept, _ = converse(backend, prompts, results, sampling(4))
        anew, _ = converse(LocalBackend(model), prompts, results, sampling(4), keep=False)
        same(kept, anew)
        assert kept[0][0] != before[0][0]

    def test_of_conversations_that_have_ended(self, llama):
        backend, prompts = LocalBackend(llama), texts_of(5, 9, 7)
        with backend.conversations() as go_on:
            drawn = backend.generate(prompts, 1, sampling(4), stream=[(i,) for i in range(3)]).completion_ids
            assert backend._kept.tokens == 8 + 12 + 10
            go_on([prompts[1] + drawn[1]])
            assert backend._kept.tokens == 12
            backend.generate([prompts[1] + drawn[1] + [3]], 1, sampling(4), stream=[(0,)])
            assert backend._kept.tokens == 9 + 4 + 1 + 3  # in place of what it continues
            go_on([])
            assert backend._kept.tokens == 0


class TestKeptRows:
    def test_by_hand(self):
        kept = KeptRows(10)
        kept.add([5, 6, 7], list)
        kept.add([5, 6], list)  # says nothing more
        assert kept.tokens == 3
        assert [kept.known(p) for p in ([5, 6, 7, 8], [5, 6, 7], [5, 6, 9, 9], [5], [4, 5], [9])] == [3, 2, 2, 0, 0, 0]
        kept.add([5, 6, 7, 8], list)
        kept.add([1, 2, 3, 4, 5, 6, 7], list)  # no room: 4 + 7
        assert kept.tokens == 4
        assert kept.past([5, 6, 7, 9], 2).ids == [5, 6]

    @given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=12), st.lists(st.integers(0, 2)))
    def test_the_longest_beginning_is_found(self, sequences, prompt):
        """Against every sequence in turn, at most all but the last token of the prompt."""
        kept = KeptRows(1000)
        for ids in sequences:
            kept.add(ids, list)

        def common(ids):
            return max(n for n in range(len(prompt[:-1]) + 1) if ids[:n] == prompt[:n])

        wanted = max(map(common, sequences), default=0)
        assert kept.known(prompt) == wanted
        assert not wanted or kept.past(prompt, wanted).ids == prompt[:wanted]
        all_kept = [past.ids for past in kept._pasts]
        assert all_kept == sorted(all_kept)
        assert not any(b[: len(a)] == a for a in all_kept for b in all_kept if a is not b)
        kept.only([prompt])
        assert kept.known(prompt) == wanted and len(kept._pasts) <= 1


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class Anew(LocalBackend):
    """Keeps nothing between turns."""

    conversations = RolloutBackend.conversations


def adds(ids, text, tools):
    """A turn's message, whatever the policy wrote."""
    function = {"name": "add", "arguments": {"a": 1, "b": 2}}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


def test_the_loop_of_tools(tiny_model, tokenizer, monkeypatch):
    """Turns end at one of many tokens, each is taken for a call: the same rollouts, and prompts are computed once."""
    model = tiny_model("llama")
    rows = [{"prompt": [{"role": "user", "content": text}], "prompt_ids": [1]} for text in ("q", "and who is it")]
    drawn, tokens = [], []
    for kind in (LocalBackend, Anew):
        backend = kind(model)
        rollouts = ToolRollouts(backend, tokenizer, Toolbox([add]), max_iterations=3)
        monkeypatch.setattr(rollouts._turns, "parse", adds)
        with Counted(model) as counted:
            drawn.append(rollouts(rows, 2, Sampling(500, eos_token_ids=ENDS), [(0, 0), (0, 1)]))
        tokens.append(counted.tokens)
        assert not backend._kept.keeps
    assert drawn[0].completion_ids == drawn[1].completion_ids
    # a turn and its result three times, and a last turn
    assert [len(talk) for talk in drawn[0].columns["completions"]] == [7] * 4
    prompts, results = (sum(map(len, drawn[0].prompt_ids)), sum(mask.count(0) for mask in drawn[0].masks))
    assert tokens[1] - tokens[0] > 3 * prompts + results


def test_while_tools_run_only_what_goes_on_is_kept(tiny_model, tokenizer, monkeypatch):
    """Of four rollouts those whose first token is odd make a call, and the others have ended."""
    backend, kept = LocalBackend(tiny_model("llama")), []

    def look() -> int:
        """Looks."""
        kept.append(len(backend._kept._pasts))
        return 1

    def looks(ids, text, tools):
        call = {"type": "function", "function": {"name": "look", "arguments": {}}}
        return {"role": "assistant", "content": "", **({"tool_calls": [call]} if ids[0] % 2 else {})}

    rows = [{"prompt": [{"role": "user", "content": text}], "prompt_ids": [1]} for text in ("q", "and who is it")]
    rollouts = ToolRollouts(backend, tokenizer, Toolbox([look]), max_iterations=1)
    monkeypatch.setattr(rollouts._turns, "parse", looks)
    drawn = rollouts(rows, 2, Sampling(500, eos_token_ids=ENDS, seed=1), [(0, 0), (0, 1)])
    calling = sum(ids[0] % 2 for ids in drawn.completion_ids)
    assert 0 < calling < 4 and kept == [calling] * calling
