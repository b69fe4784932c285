"""Rows with images: placeholders in messages, ids that are the processor's own, and rows that cannot be used."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
from datasets import Dataset, Image, List

from preftune import prepare_multimodal_messages, unpair_preference_dataset
from preftune.data.collate import PreferenceCollator, SFTCollator
from preftune.data.image_texts import ImageEncoder
from preftune.data.mismatched import prompt_groups
from preftune.data.multimodal import images_read, row_images
from preftune.data.tokenize import prepare_preference, prepare_sft
from preftune.data.unpaired import prepare_unpaired
from preftune.errors import ConfigError, DataFormatError
from tests.support.vision import VISION_FAMILIES, picture, tiny_processor

QUESTION, GOOD, BAD = "What is the capital of France?", "The capital is Paris.", "The capital is Rome."
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def processors():
    return {family: tiny_processor(family) for family in VISION_FAMILIES}


def user(text=QUESTION, images=0):
    return {"role": "user", "content": [{"type": "image"}] * images + [{"type": "text", "text": text}]}


def assistant(text=GOOD):
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def pairs(shown, prompts=None, **columns):
    """Preference rows whose images are `shown`, a list for each row."""
    prompts = prompts or [[{"role": "user", "content": QUESTION}] for _ in shown]
    rows = {"prompt": prompts, "images": shown, **columns}
    for side, text in (("chosen", GOOD), ("rejected", BAD)):
        rows[side] = [[{"role": "assistant", "content": text}] for _ in shown]
    return Dataset.from_dict(rows).cast_column("images", List(Image()))


def pixels(image):
    return image.size, image.tobytes()


def processed(processor, messages, images, **how):
    """Ids of a whole conversation as the processor gives them."""
    text = processor.apply_chat_template(messages, tokenize=False, **how)
    return processor(text=[text], images=[images] if images else None, add_special_tokens=False)["input_ids"][0]


# --- messages ---------------------------------------------------------------------------------------------------------


def test_images_go_before_the_text_of_the_first_user_turn():
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Which?"},
        {"role": "assistant", "content": "This."},
        {"role": "user", "content": "Why?"},
    ]
    before = copy.deepcopy(messages)
    first, second = picture(1), picture(2)
    prepared = prepare_multimodal_messages(messages, [first, second])
    assert messages == before
    assert prepared[0]["content"] == [{"type": "text", "text": "Be short."}]
    assert prepared[1]["content"] == [
        {"type": "image", "image": first},
        {"type": "image", "image": second},
        {"type": "text", "text": "Which?"},
    ]
    assert prepared[3]["content"] == [{"type": "text", "text": "Why?"}]


def test_empty_image_blocks_are_filled_in_order_and_full_ones_kept():
    own, new, tool = picture(1), picture(2), {"type": "image"}
    messages = [
        {"role": "user", "content": [{"type": "image", "image": own}, {"type": "text", "text": "and"}]},
        {"role": "tool", "content": [tool]},
        {"role": "user", "content": [{"type": "text", "text": "this"}, {"type": "image"}]},
    ]
    before = copy.deepcopy(messages)
    prepared = prepare_multimodal_messages(messages, [new])
    assert messages == before
    assert prepared[0]["content"][0]["image"] is own
    assert prepared[1]["content"] == [{"type": "image"}]
    assert prepared[2]["content"][1]["image"] is new


def test_messages_without_images_become_blocks():
    assert prepare_multimodal_messages([{"role": "assistant", "content": "Yes."}]) == [assistant("Yes.")]
    assert prepare_multimodal_messages([{"role": "assistant", "tool_calls": []}])[0]["content"] == []


@pytest.mark.parametrize(
    "messages, images, said",
    [
        ([user(images=1)], [], "0 images and 1 empty"),
        ([user(images=1)], [1, 2], "2 images and 1 empty"),
        ([assistant()], [1], "1 images and 0 empty"),
        ([{"role": "narrator", "content": "x"}], [], "'narrator'"),
    ],
)
def test_messages_that_do_not_fit_are_refused(messages, images, said):
    with pytest.raises(ValueError, match=said):
        prepare_multimodal_messages(messages, images)


# --- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_ids_are_those_of_the_processor_on_the_whole_text(processors, family):
    processor = processors[family]
    shown = [[picture(1)], [], [picture(2, 8, 20), picture(3)]]
    prepared = prepare_preference(pairs(shown), processor.tokenizer, processor=processor).dataset
    assert [len(row) for row in prepared["images"]] == [1, 0, 2]
    for row, images in zip(prepared, shown):
        for side, text in (("chosen_ids", GOOD), ("rejected_ids", BAD)):
            messages = [user(images=len(images)), assistant(text)]
            assert row["prompt_ids"] + row[side] == processed(processor, messages, images)


def test_sft_scores_everything_but_what_stands_for_images(processors):
    processor = processors["idefics3"]
    rows = {"messages": [[user_text(""), assistant_text()]], "image": [picture(1)]}
    row = prepare_sft(Dataset.from_dict(rows), processor.tokenizer, processor=processor).dataset[0]
    assert row["input_ids"] == processed(processor, [user(images=1), assistant()], [picture(1)])
    names = processor.tokenizer.convert_ids_to_tokens(row["input_ids"])
    of_image = {"<image>", "<fake_token_around_image>", "<global-img>"} | {n for n in names if n.startswith("<row_")}
    assert [label == -100 for label in row["labels"]] == [name in of_image for name in names]


def assistant_text(text=GOOD):
    return {"role": "assistant", "content": text}


def test_unpaired_rows_and_tools(processors):
    processor = processors["qwen2_vl"]
    rows = {"prompt": [[{"role": "user", "content": QUESTION}]], "completion": [[assistant_text()]], "label": [True]}
    rows |= {"image": [picture(1)], "tools": [TOOLS]}
    row = prepare_unpaired(Dataset.from_dict(rows), processor.tokenizer, processor=processor).dataset[0]
    whole = processed(processor, [user(images=1), assistant()], [picture(1)], tools=TOOLS)
    assert row["prompt_ids"] + row["completion_ids"] == whole
    assert "look" in processor.tokenizer.decode(row["prompt_ids"])


def test_plain_text_holds_its_own_placeholders(processors):
    processor = processors["llava"]
    rows = {"prompt": ["<image>\nWhat?"], "chosen": [" One."], "rejected": [" Two."], "images": [[picture(1)]]}
    row = prepare_preference(Dataset.from_dict(rows), processor.tokenizer, processor=processor).dataset[0]
    assert processor.tokenizer.decode(row["prompt_ids"]) == "<image>" * 4 + "\nWhat?"


def test_a_stream_keeps_its_images(processors):
    processor = processors["llava"]
    stream = pairs([[picture(1)], [picture(2)]]).to_iterable_dataset()
    prepared = prepare_preference(stream, processor.tokenizer, processor=processor).dataset
    known = prepare_preference(pairs([[picture(1)], [picture(2)]]), processor.tokenizer, processor=processor).dataset
    for row, other in zip(prepared, known, strict=True):
        assert row["prompt_ids"] == other["prompt_ids"]
        assert row_images(row, 0) == row_images(other, 0)


def test_dropped_rows_take_their_images_along(processors):
    processor = processors["llava"]
    dataset = pairs([[picture(n)] for n in range(4)], prompts=[[user_text("x" * 90 * (n == 1))] for n in range(4)])
    prepared = prepare_preference(dataset, processor.tokenizer, processor=processor, max_length=90)
    assert prepared.report.rows_dropped == 1
    shuffled = prepare_preference(dataset.select([3, 1, 0]), processor.tokenizer, processor=processor, max_length=90)
    assert [pixels(images[0]) for images in shuffled.dataset["images"]] == [pixels(picture(n)) for n in (3, 0)]
    assert [pixels(images[0]) for images in prepared.dataset["images"]] == [pixels(picture(n)) for n in (0, 2, 3)]


def user_text(text):
    return {"role": "user", "content": text or QUESTION}


def test_a_row_whose_image_would_be_cut_is_dropped_and_reported(processors):
    processor = processors["llava"]
    turns = [user_text(""), assistant_text(), {"role": "user", "content": "And this?"}, assistant_text()]
    late = prepare_multimodal_messages([user(), assistant(), user("And this?", images=1), assistant()], [picture(2)])
    for message in late:
        message["content"] = [{"type": block["type"], "text": block.get("text")} for block in message["content"]]
    early = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in turns]
    early[0]["content"].insert(0, {"type": "image", "text": None})
    dataset = Dataset.from_dict({"messages": [early, late], "image": [picture(1), picture(2)]})
    whole = processed(processor, late, [picture(2)])
    last = max(n for n, token in enumerate(whole) if token == processor.image_token_id)
    prepared = prepare_sft(dataset, processor.tokenizer, processor=processor, max_length=last)
    assert [pixels(image) for image in prepared.dataset["image"]] == [pixels(picture(1))]
    assert "1 (row 1) with an image beyond max_length" in str(prepared.report)
    assert len(prepare_sft(dataset, processor.tokenizer, processor=processor, max_length=last + 1).dataset) == 2


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_tokenizer_alone_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="only knows text"):
        prepare_preference(pairs([[picture(1)]]), tokenizer)


@pytest.mark.parametrize(
    "images, prompt, said",
    [
        ([picture(1)], user(), "row 1: 1 images and 0 empty"),
        ([], user(images=2), "row 1: 0 images and 2 empty"),
        ([picture(1)], user("<image> here", images=1), "row 1: 1 images, and the text has 2 placeholders '<image>'"),
    ],
)
def test_counts_that_do_not_match_name_the_row(processors, images, prompt, said):
    shape = [{"type": "text", "text": b.get("text")} | {"type": b["type"]} for b in prompt["content"]]
    fine = [{"type": "image", "text": None}, {"type": "text", "text": QUESTION}]
    prompts = [[{"role": "user", "content": content}] for content in (fine, shape)]
    dataset = pairs([[picture(1)], images], prompts)
    sides = {side: [[assistant(t)] for _ in range(2)] for side, t in (("chosen", GOOD), ("rejected", BAD))}
    for side, rows in sides.items():
        dataset = dataset.remove_columns(side).add_column(side, rows)
    with pytest.raises(DataFormatError, match=said):
        prepare_preference(dataset, processors["llava"].tokenizer, processor=processors["llava"])


def test_an_encoder_can_go_to_another_process(processors):
    for processor in processors.values():
        encoder = pickle.loads(pickle.dumps(ImageEncoder(processor)))
        text = f"{encoder.token} What?"
        assert encoder.expand(text, [text + " This."], [picture(1)], 0).wholes[0].endswith(" What? This.")


def test_options_that_do_not_go_with_images(processors):
    processor = processors["llava"]
    dataset = pairs([[picture(1)]])
    with pytest.raises(ConfigError, match="keep_end"):
        prepare_preference(dataset, processor.tokenizer, processor=processor, truncation_mode="keep_end")
    with pytest.raises(ConfigError, match="unpair_preference_dataset"):
        prepare_unpaired(dataset, processor.tokenizer, processor=processor)
    halves = prepare_unpaired(unpair_preference_dataset(dataset), processor.tokenizer, processor=processor).dataset
    assert halves["label"][:] == [True, False] and prompt_groups(halves).tolist() == [0, 0]
    chats = dataset.select_columns(["images"]).add_column("messages", [[user_text(""), assistant_text()]])
    with pytest.raises(ConfigError, match="assistant_only_loss"):
        prepare_sft(chats, processor.tokenizer, processor=processor, assistant_only_loss=True)


def test_values_that_are_no_images(tmp_path):
    file = io.BytesIO()
    picture(1).save(file, "PNG")
    (tmp_path / "one.png").write_bytes(file.getvalue())
    as_given = [picture(1), {"bytes": file.getvalue(), "path": None}, str(tmp_path / "one.png"), file.getvalue()]
    assert [pixels(image) for image in row_images({"images": as_given}, 0)] == [pixels(picture(1))] * 4
    assert row_images({"image": picture(1).convert("L")}, 0)[0].mode == "RGB"
    assert row_images({"image": None}, 0) == row_images({"images": [None]}, 0) == row_images({}, 0) == []
    for wrong in (3, "no such file", b"no image"):
        with pytest.raises(DataFormatError, match="row 7, column 'image'"):
            row_images({"image": wrong}, 7)


def test_messages_of_text_alone_reach_a_template_that_wants_blocks(processors):
    processor = processors["llava"]
    dataset = pairs([[]]).remove_columns("images")
    row = prepare_preference(dataset, processor.tokenizer, processor=processor).dataset[0]
    assert row["prompt_ids"] + row["chosen_ids"] == processed(processor, [user(), assistant()], [])
    labelled = prepare_unpaired(dataset, processor.tokenizer, processor=processor).dataset[0]
    assert labelled["prompt_ids"] + labelled["completion_ids"] == row["prompt_ids"] + row["chosen_ids"]


def test_an_image_block_without_an_image_column_names_the_row(processors):
    turns = [[user(images=0), assistant()], [user(images=1), assistant()]]
    for message in (m for row in turns for m in row):
        message["content"] = [{"type": b["type"], "text": b.get("text")} for b in message["content"]]
    with pytest.raises(DataFormatError, match="row 1: 0 images and 1 empty"):
        prepare_sft(
            Dataset.from_dict({"messages": turns}), processors["llava"].tokenizer, processor=processors["llava"]
        )


def test_trainers_that_show_no_images_say_so(processors):
    dataset = pairs([[picture(1)]])
    assert images_read(["images"], processors["llava"], None, {"a": dataset})
    assert not images_read(["prompt"], None, dataset)  # a column for rewards
    assert not images_read(["prompt"], processors["llava"], dataset.remove_columns("images"), None)
    with pytest.raises(ConfigError, match="does not show them"):
        images_read(["prompt"], processors["llava"], dataset)


# --- batches ----------------------------------------------------------------------------------------------------------


def test_each_image_is_processed_once_a_pair(processors, monkeypatch):
    processor = processors["llava"]
    prepared = prepare_preference(pairs([[picture(1)], [picture(2)]]), processor.tokenizer, processor=processor).dataset
    calls = []
    inner = type(processor.image_processor).__call__
    spy = lambda self, images, *a, **k: calls.append(images) or inner(self, images, *a, **k)  # noqa: E731
    monkeypatch.setattr(type(processor.image_processor), "__call__", spy)
    tree = PreferenceCollator(processor)(list(prepared))["tree"]
    assert len(calls) == 2
    assert [tuple(given["pixel_values"].shape) for given in tree.images.prompts] == [(1, 3, 8, 8)] * 2


def test_rows_without_images_make_a_plain_tree(processors):
    rows = [{"input_ids": [5, 6], "labels": [5, 6], "images": []}]
    assert SFTCollator(processors["llava"])(rows)["tree"].images is None
    with pytest.raises(ConfigError, match="no processor"):
        SFTCollator()([{**rows[0], "images": [picture(1)]}])
