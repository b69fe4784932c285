"""Images of prompts: the policy is shown them when it answers, and tables hold them where a tracker can show them.

Expected answers and log-probabilities come from transformers alone, on what the processor makes of one text.
"""

from __future__ import annotations

import importlib.util
import json

import pytest
import torch
from datasets import Dataset

from preftune.callbacks.completions import LogCompletionsCallback
from preftune.callbacks.formatting import plain
from preftune.callbacks.round_completions import RoundCompletionsCallback
from preftune.callbacks.trackers.base import Tracker, TrackerQueue, is_images
from preftune.callbacks.trackers.cells import as_cell
from preftune.callbacks.trackers.jsonl import read_table
from preftune.configs.dpo import DPOConfig
from preftune.configs.sft import SFTConfig
from preftune.trainers.dpo import DPOTrainer
from preftune.trainers.sft import SFTTrainer
from tests.support.runs import options
from tests.support.vision import picture, tiny_vlm

QUESTIONS = ["What is it?", "Which colour has it?", "Who are you?"]
SHOWN = [[picture(1)], [picture(2, 8, 20), picture(3)], []]


class Kept(Tracker):
    name = "kept"

    def __init__(self, takes_images=False):
        self.takes_images = takes_images
        self.rows = []

    def log_scalars(self, scalars, step):
        """Nothing."""

    def log_table(self, name, rows, step):
        self.rows += rows

    def close(self):
        """Nothing."""


def raw_rows(shown=SHOWN):
    def turn(role, text):
        return [{"role": role, "content": text}]

    return [
        {"prompt": turn("user", q), "chosen": turn("assistant", "A cat."), "rejected": turn("assistant", "Two dogs."),
         "images": images}
        for q, images in zip(QUESTIONS, shown)
    ]  # fmt: skip


def dpo(folder, family, shown=SHOWN):
    model, processor = tiny_vlm(family)
    rows = Dataset.from_list(raw_rows(shown))
    args = DPOConfig(**options(folder, beta=0.5, max_steps=1))
    return DPOTrainer(model, args=args, train_dataset=rows, eval_dataset=rows, processing_class=processor)


def rows_of(trainer, **changes):
    tracker = Kept(takes_images=True)
    callback = LogCompletionsCallback(
        trainer, max_new_tokens=5, do_sample=False, trackers=[queue := TrackerQueue(tracker)], **changes
    )
    callback.log_completions(1)
    assert queue.flush(10)
    return tracker.rows


@torch.no_grad()
def by_transformers(model, processor, question, images):
    """The greedy answer and its log-probability."""
    blocks = [{"type": "image"}] * len(images) + [{"type": "text", "text": question}]
    text = processor.apply_chat_template(
        [{"role": "user", "content": blocks}], tokenize=False, add_generation_prompt=True
    )
    given = processor(text=[text], images=[images] if images else None, add_special_tokens=False, return_tensors="pt")
    start = given["input_ids"].shape[1]
    whole = model.generate(**given, max_new_tokens=5, do_sample=False, pad_token_id=0)
    ids = whole[0, start:].tolist()
    extra = {}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in given:
            extra[name] = torch.nn.functional.pad(given[name], (0, len(ids)))
    mask = torch.ones_like(whole)
    logits = model(**{**given, "input_ids": whole, "attention_mask": mask, **extra}).logits[0].double()
    logps = logits.log_softmax(-1)
    text = processor.tokenizer.decode(ids, skip_special_tokens=True)
    return text, sum(logps[start - 1 + n, token].item() for n, token in enumerate(ids))


@pytest.mark.parametrize("family", ["llava", "qwen2_vl", "gemma3"])
def test_the_policy_sees_the_images_when_it_answers(tmp_path, family):
    trainer = dpo(tmp_path, family)
    rows = rows_of(trainer)
    for row, question, images in zip(rows, QUESTIONS, SHOWN, strict=True):
        text, logp = by_transformers(trainer.model, trainer.processing_class, question, images)
        assert row["completion"] == text
        assert row["logp"] == pytest.approx(logp, abs=2e-3) == row["ref_logp"]
        assert [image.size for image in row.get("images", [])] == [image.size for image in images]
        assert question in row["prompt"]
        marks = row["prompt"].count(trainer.processing_class.image_token)
        assert min(1, len(images)) <= marks <= len(images)  # and not one for every token of an image


def test_raw_rows_give_what_prepared_ones_do(tmp_path):
    trainer = dpo(tmp_path, "llava")

    def plainly(rows):
        return [row | {"images": [image.tobytes() for image in row.get("images", [])]} for row in rows]

    assert plainly(rows_of(trainer, dataset=raw_rows())) == plainly(rows_of(trainer))


def test_another_image_has_other_numbers(tmp_path):
    one = rows_of(dpo(tmp_path / "a", "llava"))
    two = rows_of(dpo(tmp_path / "b", "llava", [[picture(9)], *SHOWN[1:]]))
    assert one[0]["logp"] != two[0]["logp"]
    assert [row["logp"] for row in one[1:]] == [row["logp"] for row in two[1:]]


def test_a_supervised_row_has_its_images_too(tmp_path):
    model, processor = tiny_vlm("llava")
    rows = Dataset.from_list(
        [{"prompt": r["prompt"], "completion": r["chosen"], "images": r["images"]} for r in raw_rows()]
    )
    trainer = SFTTrainer(
        model,
        args=SFTConfig(**options(tmp_path)),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=processor,
    )
    shown = rows_of(trainer)
    expected = [by_transformers(model, processor, q, i)[0] for q, i in zip(QUESTIONS, SHOWN)]
    assert [row["completion"] for row in shown] == expected
    assert [len(row.get("images", [])) for row in shown] == [1, 2, 0]


# --- tables -----------------------------------------------------------------------------------------------------------


def test_only_a_tracker_that_can_gets_images():
    image, message = picture(1), [{"role": "user", "content": [{"type": "image", "image": picture(2)}]}]
    row = {"images": [image, image], "prompt": message, "one": image, "mixed": [image, 1]}
    copies = []
    for takes in (True, False):
        queue = TrackerQueue(tracker := Kept(takes))
        queue.log_table("t", [row], 1)
        assert queue.flush(10)
        copies += tracker.rows
    able, other = copies
    assert able["images"] == [image, image] and able["one"] is image
    assert other["images"] == ["[image 12x8]"] * 2 and other["one"] == "[image 12x8]"
    for copy in copies:
        assert copy["prompt"] == [{"role": "user", "content": [{"type": "image", "image": "[image 12x8]"}]}]
        assert copy["mixed"] == ["[image 12x8]", 1]
        assert as_cell(copy["prompt"]) == "user: [image 12x8]"


def test_what_is_an_image():
    assert is_images(picture(1)) and is_images([picture(1)]) and not is_images([]) and not is_images(["x"])
    assert plain({"a": (picture(1, 3, 4),)}) == {"a": ["[image 3x4]"]}
    blocks = [{"type": "text", "text": "Look:"}, {"type": "image"}, {"type": "audio", "path": "x"}]
    assert as_cell([{"role": "user", "content": blocks}]) == 'user: Look: [image] {"type": "audio", "path": "x"}'


@pytest.mark.parametrize("wanted", [True, False])
def test_log_multimodal(tmp_path, wanted, capsys):
    """Images in the messages of prompts are a column of the table; switched off, their size in the prompt is all."""
    from transformers import TrainingArguments

    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    vars(args).update(log_completions=True, log_multimodal=wanted, num_completions_to_print=1, log_unique_prompts=False)

    class OfTrainer:
        pass

    trainer, tracker = OfTrainer(), Kept(takes_images=True)
    trainer.args = args
    callback = RoundCompletionsCallback(trainer, trackers=[queue := TrackerQueue(tracker)])
    blocks = [{"type": "image", "image": picture(4)}, {"type": "text", "text": "What?"}]
    with_image = {"prompt": [{"role": "user", "content": blocks}], "completion": "x", "reward": 1.0, "advantage": 0.0}
    without = {**with_image, "prompt": [{"role": "user", "content": "What?"}]}
    callback._pending["train"] = [[with_image, without]]

    class State:
        is_world_process_zero, global_step = True, 3

    callback.on_log(args, State, None, logs={"loss": 1.0})
    assert queue.flush(10)
    first, second = tracker.rows
    assert as_cell(first["prompt"]) == "user: [image 12x8] What?"
    if wanted:
        assert list(first) == ["step", "prompt", "completion", "images", "reward", "advantage"] == list(second)
        assert first["images"][0].size == (12, 8) and second["images"] == []
    else:
        assert "images" not in first and "images" not in second
    assert "PIL" not in capsys.readouterr().out


def test_lines_name_the_size(tmp_path):
    trainer = dpo(tmp_path, "llava")
    trainer.add_callback(LogCompletionsCallback(trainer, freq=1, max_new_tokens=2, do_sample=False))
    trainer.train()
    rows = read_table(tmp_path / "logs", "completions")
    assert [row.get("images") for row in rows] == [["[image 12x8]"], ["[image 8x20]", "[image 12x8]"], None]


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_has_the_images(tmp_path, monkeypatch):
    import wandb

    from preftune.callbacks.trackers.wandb import WandbTracker

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DISABLE_WEAVE", "true")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))  # images are in the artifact that would be uploaded
    with wandb.init(project="p", dir=tmp_path):
        queue = TrackerQueue(WandbTracker())
        queue.log_table("completions", [{"step": 0, "prompt": "text alone", "images": []}], 0)
        for step in (1, 2):
            rows = [{"step": step, "prompt": q, "images": images} for q, images in zip(QUESTIONS, SHOWN)]
            queue.log_table("completions", rows, step)
        assert queue.flush(30) and queue.failed == 0
    wandb.teardown()
    files = [path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert sum(content.startswith(b"\x89PNG") for content in files) >= 3
    tables = [json.loads(content) for content in files if b'"_type": "table"' in content]
    rows = {(row[0], row[1]): row[2] for table in tables for row in table["data"]}
    assert rows[0, "text alone"] == "[]"
    for step in (1, 2):
        sizes = [[(i["_type"], i["width"], i["height"]) for i in rows[step, q] or []] for q in QUESTIONS]
        assert sizes == [[("image-file", *image.size) for image in images] for images in SHOWN]
    kinds = [
        json.dumps(table["column_types"]["params"]["type_map"]["images"]) for table in tables if len(table["data"]) > 1
    ]
    assert kinds and all("image-file" in kind for kind in kinds)
