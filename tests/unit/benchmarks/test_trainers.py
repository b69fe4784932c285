"""The bench of trainers other than DPO: rows, what is noted of a batch, work and figures against hand-made cases.

Nothing here measures a time; no trainer is built.
"""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import kinds, models, report, run, trainer_figures, watch
from benchmarks.work import ModelShape, Work, decode_bytes, done_flops, layouts, needed_flops, tree_work

SHAPE = ModelShape(layers=2, hidden=8, intermediate=12, heads=4, key_value_heads=2, head_dim=3, vocabulary=50)
PAIRS = [
    {
        "prompt": [{"role": "user", "content": f"p{i}"}],
        "chosen": [{"role": "assistant", "content": f"c{i}"}],
        "rejected": [{"role": "assistant", "content": f"r{i}"}],
    }
    for i in range(4)
]


# Rows


def test_labelled_rows_alternate_and_no_prompt_comes_twice():
    rows = kinds.rows_of("kto", PAIRS)
    assert [(row["completion"][0]["content"], row["label"]) for row in rows] == [
        ("c0", True),
        ("r1", False),
        ("c2", True),
        ("r3", False),
    ]


@pytest.mark.parametrize("kind", sorted(kinds.KINDS))
def test_every_kind_has_rows_of_its_own_columns(kind):
    wanted = {
        "dpo": {"prompt", "chosen", "rejected"},
        "reward": {"prompt", "chosen", "rejected"},
        "sft": {"prompt", "completion"},
        "sft-packed": {"messages"},
        "kto": {"prompt", "completion", "label"},
        "grpo": {"prompt"},
        "rloo": {"prompt"},
    }
    rows = kinds.rows_of(kind, PAIRS)
    assert len(rows) == len(PAIRS) and set(rows[0]) == wanted[kind]


# What is noted of a batch


def note(kind: str, *rows: dict, max_length: int = 100) -> dict:
    return watch.note_of(kind, rows, max_length)


def test_a_reward_pair_shares_what_both_sides_begin_with():
    noted = note("reward", {"chosen_ids": [1, 2, 3, 4], "rejected_ids": [1, 2, 9]})
    assert (noted["trees"], noted["scored"]) == ([(2, [2, 1])], 0)
    assert note("reward", {"chosen_ids": [1, 2], "rejected_ids": [1, 2, 3]})["trees"] == [(1, [1, 2])]


def test_packed_documents_never_score_their_first_token():
    row = {"input_ids": [1, 2, 3, 4, 5], "labels": [1, 2, 3, 4, 5], "seq_lengths": [2, 3]}
    noted = note("sft-packed", row)
    assert (noted["trees"], noted["scored"]) == ([(0, [2]), (0, [3])], 1 + 2)


def test_a_completion_is_scored_where_its_labels_are():
    noted = note("sft", {"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]})
    assert (noted["trees"], noted["scored"]) == ([(0, [4])], 2)


@pytest.mark.parametrize("column", ["mismatched_ids", "KL_completion_ids"])
def test_a_mismatched_completion_is_a_branch_cut_to_the_limit_and_not_compared(column):
    row = {"prompt_ids": [1, 2], "completion_ids": [3], "label": True}
    noted = note("kto", {**row, column: [4, 5, 6, 7]}, max_length=5)
    assert (noted["trees"], noted["scored"]) == ([(2, [1, 3])], 1)
    assert noted["digest"] == note("kto", {**row, column: [9]})["digest"]
    assert noted["digest"] != note("kto", {**row, "label": False, column: [9]})["digest"]


def test_prompts_are_the_same_in_lists_and_in_padded_repeated_rows():
    ids = torch.tensor([[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]])
    mask = torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1], [1, 1, 1]])
    assert watch.distinct_prompts((ids, mask)) == watch.distinct_prompts([[1, 2], [3, 4, 5]])


def test_the_rollout_watch_tells_prefill_from_decoding_and_groups_the_answers():
    """Two prompts of two answers; the policy is called on three columns, then twice on one."""

    class Backend:
        def generate(self, prompts: list, size: int) -> str:
            for width in (3, 1, 1):
                rollouts.forward(width)
            return "completions"

    class Trainer:
        backend = Backend()

    rollouts = watch.RolloutWatch("cpu")
    rollouts.attach(Trainer, "ours")
    assert not rollouts.is_generating
    assert Trainer.backend.generate([[1, 2, 3], [4, 5, 6]], 2) == "completions"
    assert rollouts.reward(completion_ids=[[1, 3], [2], [1, 2], [7]]) == [1.0, 0.0, 0.5, 1.0]
    noted = rollouts.take()
    assert noted["trees"] == [(3, [2, 1]), (3, [2, 1])]
    assert (noted["scored"], noted["decode_steps"]) == (6, 2)
    assert 0 <= noted["prefill"] <= noted["rollout"]["wall"]


def test_positions_are_counted_with_gradient_and_without_but_not_in_rollouts():
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(10, 2)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.embedding

    model, rollouts = Model(), watch.RolloutWatch("cpu")
    positions = watch.Positions(model, rollouts)
    model.embedding(torch.zeros(2, 5, dtype=torch.long))
    with torch.no_grad():
        model.embedding(torch.zeros(1, 3, dtype=torch.long))
    rollouts._clock = watch.Clock("cpu")
    model.embedding(torch.zeros(4, 1, dtype=torch.long))
    assert positions.take() == {"forwarded": 10, "looked_at": 3}
    assert positions.take() == {"forwarded": 0, "looked_at": 0}
    assert rollouts._decode_steps == 1


# Work


def forward(*trees: tuple[int, tuple[int, ...]], scored: int | None = None) -> float:
    return tree_work(trees, scored).forward_flops(SHAPE)


def test_forward_of_one_token_by_hand():
    """2 x 1152 (body), 4 x layers x heads x head_dim (one couple), 2 x 8 x 50 (head)."""
    assert Work(1, 1, 1).forward_flops(SHAPE) == 2 * 1152 + 4 * 2 * 4 * 3 + 2 * 8 * 50


def test_what_a_step_needs():
    """Policy three times its forward; RLOO the reference once; KTO mismatched tokens once, and the reference of all."""
    grpo = {"trees": [(3, (2, 4))], "scored": 6}
    assert needed_flops("grpo", grpo, SHAPE) == 3 * forward((3, (2, 4)))
    assert needed_flops("rloo", grpo, SHAPE) == 4 * forward((3, (2, 4)))
    own, both = forward((3, (2,))), forward((3, (2, 4)))
    assert needed_flops("kto", {**grpo, "scored": 2}, SHAPE) == 3 * own + (both - own) + both
    assert needed_flops("reward", grpo, SHAPE) == 3 * forward((3, (2, 4)), scored=0)


def test_done_work_goes_by_the_positions_that_were_seen():
    """Two prompts of 3 and 1, answers up to 4: shared 11 positions; padded 4 rows of 3 + 4, head on all on a CPU."""
    step = {"trees": [(3, (2, 4)), (1, (1, 0))], "scored": 7, "looked_at": 0}
    shared = done_flops("grpo", {**step, "forwarded": 11}, SHAPE, "cpu", is_ours=True)
    padded = done_flops("grpo", {**step, "forwarded": 28}, SHAPE, "cpu", is_ours=False)
    assert shared == 3 * forward((3, (2, 4)), (1, (1, 0)))
    assert padded == 3 * Work(28, 4 * 28, 28).forward_flops(SHAPE)
    assert done_flops("grpo", {**step, "forwarded": 12}, SHAPE, "cpu", is_ours=True) is None


def test_done_work_of_kto_in_one_pass_or_two():
    step = {"trees": [(3, (2, 4))], "scored": 2}
    both = forward((3, (2, 4)))
    apart = done_flops("kto", {**step, "forwarded": 5, "looked_at": 7}, SHAPE, "cpu", is_ours=True)
    assert apart == 3 * forward((3, (2,))) + forward((3, (4,))) + both
    assert done_flops("kto", {**step, "forwarded": 9, "looked_at": 0}, SHAPE, "cpu", is_ours=True) == 3 * both + both


def test_half_of_the_rows_looked_at_cost_half_a_forward():
    step = {"trees": [(3, (2, 4)), (3, (2, 4))], "scored": 12, "forwarded": 18, "looked_at": 9}
    one = forward((3, (2, 4)))
    assert done_flops("rloo", step, SHAPE, "cpu", is_ours=True) == pytest.approx(3 * 2 * one + 2 * one + one)


def test_packed_rows_are_scored_everywhere_by_one_side_only():
    step = {"trees": [(0, (4,)), (0, (3,))], "scored": 5, "forwarded": 7, "looked_at": 0}
    ours, trl = (done_flops("sft-packed", step, SHAPE, "cpu", is_ours=is_ours) for is_ours in (True, False))
    assert trl - ours == 3 * 2 * 8 * 50 * (7 - 5)
    assert done_flops("sft-packed", step, SHAPE, "cuda", is_ours=False) == ours


@pytest.mark.parametrize("kind", sorted(set(kinds.KINDS) - {"dpo"}))
def test_no_layout_does_less_than_is_needed(kind):
    step = {"trees": [(3, (2, 4)), (5, (1, 2))], "scored": 0 if kind == "reward" else 9, "looked_at": 1}
    if kind == "kto":
        step["scored"] = 3
    for passes in layouts(kind, step, "cpu"):
        seen = passes.looked_at.tokens if passes.looked_at else 0
        done = done_flops(
            kind, {**step, "forwarded": passes.policy.tokens, "looked_at": seen}, SHAPE, "cpu", is_ours=True
        )
        assert done is not None and done >= needed_flops(kind, step, SHAPE)


def test_a_decoding_step_reads_every_matrix_and_the_head_once():
    assert decode_bytes(SHAPE) == 4 * (1152 + 8 * 50)


# Figures


def online_step(wall: float, rollout: float, scored: int) -> dict:
    spent = {"user": wall, "system": 0.0, "children": 0.0, "faults": 0, "others": 0.0}
    trees = [(3, (scored // 2, scored // 2))]
    return {
        "wall": wall,
        **spent,
        "rollout": {"wall": rollout},
        "prefill": rollout / 2,
        "decode_steps": 4,
        "trees": trees,
        "scored": scored,
        "forwarded": 3 + scored,
        "looked_at": 0,
        "memory": {"peak": 1.0},
        "digest": "a",
    }


def online_run(trl: list[dict], ours: list[dict]) -> dict:
    sides = {
        name: {
            "built": {"wall": 1.0},
            "steps": steps,
            "parts": {},
            "losses": [0.0, 0.5],
            "before": 1.0,
            "peak": {"peak": 1024.0, "gpu_peak": 0.0, "now": 1.0},
        }
        for name, steps in (("trl", trl), ("ours", ours))
    }
    return {
        "trainer": "grpo",
        "title": "rows",
        "variant": "default",
        "model": "m",
        "shape": vars(SHAPE),
        "peaks": [{"bfloat16": 2.0, "float32": 1.0}],
        "bandwidths": [{"gigabytes": 1.0}, {"gigabytes": 2.0}],
        "answer_tokens": 4,
        "sides": sides,
        "pairs": 1,
        "max_length": 8,
        "precision": "float32",
        "device": "cpu",
        "threads": 1,
    }


def test_ratios_of_a_step_its_rollout_and_the_rest():
    """TRL 12 s with 2 s of rollout, ours 3 s with 1 s: 4, 2 and 10 / 2; per token 8 against 4: all halved."""
    found = trainer_figures.figures(online_run([online_step(12.0, 2.0, 8)] * 3, [online_step(3.0, 1.0, 4)] * 3))
    assert [found["ratios"][part]["of_medians"] for part in ("step", "rollout", "training")] == [4.0, 2.0, 5.0]
    assert [found["token_ratios"][part]["per_step"] for part in ("step", "rollout", "training")] == [2.0, 1.0, 2.5]


def test_share_of_the_bandwidth():
    """6,208 bytes at 2 GB/s are 3.104 us; a decoding step took (2 - 1) / 4 s."""
    found = trainer_figures.figures(online_run([online_step(12.0, 2.0, 8)] * 2, [online_step(3.0, 1.0, 8)] * 2))
    trl = found["sides"]["trl"]
    assert trl["decode_bound_seconds"] == pytest.approx(3.104e-6)
    assert trl["share_of_bandwidth"] == pytest.approx(3.104e-6 / 0.25)
    assert (trl["completion_tokens"], trl["rollout_tokens_per_second"]) == (8, 4.0)


def test_the_page_holds_old_and_new_entries():
    origin = {
        "machine": {"cpu": "x"},
        "versions": {},
        "code": "c",
        "model": "m",
        "threads": 1,
        "command": "python",
        "date": "2026-01-01",
    }
    online = {**online_run([online_step(12.0, 2.0, 8)] * 10, [online_step(3.0, 1.0, 8)] * 10), "origin": origin}
    offline = {k: v for k, v in online.items() if k not in ("bandwidths", "answer_tokens")} | {"trainer": "sft"}
    side = {"before": 1.0, "built": 1.0, "between_steps": 1.0, "peak": 2.0, "gpu_peak": 0.0}
    old = {"title": "t", "variant": "default", "vocabulary": 50, "pairs": 4, "steps": 4, "device": "cpu"}
    memory = {**old, "sides": {"trl": side, "ours": side}, "origin": origin}
    page = report.render(
        {
            "trainers": {"sft": offline},
            "online": {"grpo/main": online},
            "memory": {"real/default/50": memory, "grpo/default/50": {**memory, "trainer": "grpo"}},
        }
    )
    assert "3, aim 6: reached" in page  # the whole step, 4x
    assert "3, aim 6: **short**" in page  # the rollout, 2x
    assert "0.7, aim 0.5: **short**" in page and "0.6, aim 0.5: **short**" in page
    assert "- trainers sft, online grpo/main, memory real/default/50, memory grpo/default/50: 2026-01-01" in page


# Options and models


def test_options_of_trainers():
    assert run.parse([]).trainers == list(kinds.KINDS)
    args = run.parse(["--trainers", "grpo", "kto", "--online-models", "tiny", "--answer-tokens", "16"])
    assert (args.trainers, args.online_models, args.answer_tokens) == (["grpo", "kto"], ["tiny"], 16)
    with pytest.raises(SystemExit):
        run.parse(["--trainers", "ppo"])


def special(*texts: str) -> dict:
    return {
        "added_tokens": [{"id": i, "content": text, "special": text.startswith("<")} for i, text in enumerate(texts)]
    }


def test_a_silent_token_is_special_and_has_no_other_use():
    tokenizer = special("<pad>", "<user>", "<end>", "<free>", "word")
    assert models.silent_token(tokenizer, "{{ '<user>' }}", ["<pad>", "<end>"]) == (3, "<free>")
    assert models.silent_token(special("<pad>", "<end>"), "", ["<pad>", "<end>"]) is None


def test_an_endless_model_changes_nothing_but_its_end_token(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(special("<pad>", "<end>", "<free>")))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>", "pad_token": "<pad>"}))
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0}))
    (folder / "model.safetensors").write_bytes(b"weights")
    for _ in range(2):  # a second run finds the folder there
        made = models.endless(folder, tmp_path / "cache")
    read = {name: json.loads((made / name).read_text()) for name in models.EOS_FILES}
    assert read["config.json"] == read["generation_config.json"] == {"eos_token_id": 2, "pad_token_id": 0}
    assert read["tokenizer_config.json"] == {"eos_token": "<free>", "pad_token": "<pad>"}
    assert (made / "model.safetensors").read_bytes() == b"weights"
    assert json.loads((folder / "config.json").read_text())["eos_token_id"] == 1
