"""The demo in short: all acts run, figures are of words that training never saw; preferences and rewards win."""

from __future__ import annotations

from transformers import AutoModelForCausalLM

from preftune.cli import demo


def test_short_run(tmp_path, capsys):
    figures = demo.run(tmp_path, sft_steps=300, dpo_steps=20, grpo_steps=20)
    summed = figures["pair accuracy, summed"]
    assert summed["before"].n == summed["after"].n == 300
    assert summed["after"].value > summed["before"].value + 0.1
    assert {"greedy exact match", "pair accuracy, per token"} <= set(figures)
    printed = capsys.readouterr().out
    greedy = figures["greedy exact match, GRPO"]
    assert greedy["after"].low > greedy["before"].high  # a clear rise in twenty steps
    assert figures["rewards"][-1] > figures["rewards"][0] + 0.1
    assert "after SFT" in printed and f"{summed['after'].value:.3f}" in printed
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() < 200_000
    assert (tmp_path / "dpo" / "logs" / "metrics.jsonl").stat().st_size > 0


def test_held_out_words_are_unseen():
    demonstrations, pairs, held_out = demo.make_data(rows=200, held_out=50)

    def words(rows):
        return {prompt[0]["content"] for prompt in rows["prompt"]}

    assert not words(held_out) & (words(demonstrations) | words(pairs))
    for row in pairs:
        word = row["prompt"][0]["content"]
        assert row["chosen"][0]["content"] == word[::-1] != row["rejected"][0]["content"]
