"""Small rows of data in every shape that users bring, as plain lists of dicts.

Answers to a question of three words or so, good and bad, in text and in messages; lengths differ on purpose.
"""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

_TRIPLES = (
    ("What is the capital of France?", "The capital of France is Paris.", "I do not know."),
    ("Two and two is", "four.", "five, I think, but ask again."),
    ("Name a colour.", "Blue.", "A dog is an animal and not a colour at all."),
    ("Say hello.", "Hello! How can I help you?", "No."),
    ("Count to three, please.", "One, two, three.", "Three, two."),
    ("What is the capital of Italy?", "Rome.", "The capital of Italy is Madrid."),
    ("Is water wet?", "Yes, water is wet.", "Perhaps."),
    ("Who jumps over the lazy dog?", "The quick brown fox.", "The lazy dog itself jumps over the fox."),
)


def turn(role: str, content: str) -> Row:
    return {"role": role, "content": content}


def preference_rows() -> dict[str, list[Row]]:
    """Preference rows by form: "text", "messages", "implicit_text", "implicit_messages" and "sharegpt".

    "sharegpt" has `conversations` of `from`/`value` turns and one-turn dicts `chosen` and `rejected`.
    """
    forms: dict[str, list[Row]] = {
        "text": [],
        "messages": [],
        "implicit_text": [],
        "implicit_messages": [],
        "sharegpt": [],
    }
    for prompt, good, bad in _TRIPLES:
        ask, right, wrong = turn("user", prompt), turn("assistant", good), turn("assistant", bad)
        forms["text"].append({"prompt": prompt, "chosen": " " + good, "rejected": " " + bad})
        forms["messages"].append({"prompt": [ask], "chosen": [right], "rejected": [wrong]})
        forms["implicit_text"].append({"chosen": f"{prompt} {good}", "rejected": f"{prompt} {bad}"})
        forms["implicit_messages"].append({"chosen": [ask, right], "rejected": [ask, wrong]})
        forms["sharegpt"].append(
            {
                "conversations": [{"from": "human", "value": prompt}],
                "chosen": {"from": "gpt", "value": good},
                "rejected": {"from": "gpt", "value": bad},
            }
        )
    return forms


def sft_rows() -> dict[str, list[Row]]:
    """SFT rows by form: "text", "messages", "prompt_completion", "prompt_completion_messages" and "sharegpt"."""
    forms: dict[str, list[Row]] = {
        "text": [],
        "messages": [],
        "prompt_completion": [],
        "prompt_completion_messages": [],
        "sharegpt": [],
    }
    for prompt, good, _ in _TRIPLES:
        ask, right = turn("user", prompt), turn("assistant", good)
        forms["text"].append({"text": f"{prompt} {good}"})
        forms["messages"].append({"messages": [ask, right]})
        forms["prompt_completion"].append({"prompt": prompt, "completion": " " + good})
        forms["prompt_completion_messages"].append({"prompt": [ask], "completion": [right]})
        forms["sharegpt"].append(
            {"conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": good}]}
        )
    return forms
