"""Loading: in which dtype and where, from which revision; which tokens end a text; what is changed of a tokenizer."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from preftune.errors import ConfigError
from preftune.models import load
from preftune.models.load import eos_token_ids, load_model, load_processing_class, read_chat_template, with_tokens
from tests.support.tokenizers import CHAT_TEMPLATE
from tests.support.vision import tiny_processor


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model, tokenizer):
    """A checkpoint in bfloat16 with its tokenizer."""
    path = tmp_path_factory.mktemp("models") / "half"
    tiny_model(dtype=torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def asked(monkeypatch, cls) -> list[dict]:
    """Keyword arguments of each `cls.from_pretrained`."""
    seen, real = [], cls.from_pretrained
    monkeypatch.setattr(cls, "from_pretrained", lambda *args, **kwargs: seen.append(kwargs) or real(*args, **kwargs))
    return seen


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        (None, torch.float32),
        ({"dtype": "auto"}, torch.bfloat16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": torch.float16}, torch.float16),
    ],
    ids=str,
)
def test_dtype_and_place(folder, monkeypatch, options, dtype):
    """R172: float32 unless said otherwise, on the CPU and without a device map: the trainer moves it."""
    seen = asked(monkeypatch, AutoModelForCausalLM)
    model = load_model(folder, auto_class=AutoModelForCausalLM, init_kwargs=options)
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert "device_map" not in seen[0] and seen[0]["trust_remote_code"] is False


def test_options_that_do_not_do(folder, tiny_model):
    with pytest.raises(ConfigError, match="'dtype'.*'fp32'.*'float32'"):
        load_model(folder, auto_class=AutoModelForCausalLM, init_kwargs={"dtype": "fp32"})
    twice = {"quantization_config": {"a": 1}}
    with pytest.raises(ConfigError, match="given both"):
        load_model(folder, auto_class=AutoModelForCausalLM, init_kwargs=twice, quantization_config={"a": 1})
    for how in ({"init_kwargs": {"dtype": "auto"}}, {"init_kwargs": None, "quantization_config": {"a": 1}}):
        with pytest.raises(ConfigError, match="already a LlamaForCausalLM"):
            load_model(tiny_model(), auto_class=AutoModelForCausalLM, **how)


def test_every_file_is_of_the_revision_asked_for(folder, monkeypatch):
    """C9: architecture, end tokens and tokenizer come from where the weights come from."""
    where = {"revision": "main", "cache_dir": "elsewhere"}
    readers = [load.AutoConfig, load.GenerationConfig, load.AutoProcessor, AutoModelForCausalLM]
    seen = [asked(monkeypatch, reader) for reader in readers]
    load_model(folder, auto_class=AutoModelForCausalLM, init_kwargs={**where, "dtype": "auto"})
    eos_token_ids(folder, None, where)
    load_processing_class(folder, None, where)
    for calls in seen:
        assert where.items() <= calls[0].items()


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_every_token_that_ends_a_text(folder, tiny_model, make_tokenizer):
    """R049: all of the generation config, and the tokenizer's own, which need not be among them."""
    model, tokenizer = copy.deepcopy(tiny_model()), make_tokenizer("plain")
    model.generation_config.eos_token_id = [3, 4]
    assert eos_token_ids(model) == (3, 4)
    assert eos_token_ids(model, tokenizer) == (3, 4, tokenizer.eos_token_id)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    assert eos_token_ids(model, tokenizer) == (tokenizer.eos_token_id,)
    model.generation_config = GenerationConfig()
    assert eos_token_ids(model, tokenizer) == (tokenizer.eos_token_id,) and eos_token_ids(model) == ()
    assert eos_token_ids(tiny_model(head="value"), make_tokenizer("no_eos")) == ()
    assert eos_token_ids(folder) == (2,) and eos_token_ids("no/such-model", tokenizer) == (tokenizer.eos_token_id,)


def test_a_tokenizer_is_copied_where_it_changes(make_tokenizer):
    given = make_tokenizer("no_pad")
    assert with_tokens(given, pads=False) is given  # padding is not everybody's business
    changed = with_tokens(given, eos_token="<|im_end|>", pads=False)
    assert (changed.eos_token, changed.pad_token, given.eos_token) == ("<|im_end|>", None, "<eos>")
    bare = make_tokenizer("no_eos")
    bare.pad_token = None
    assert with_tokens(bare, pads=False) is bare
    for option in ("pad_token", "eos_token"):
        with pytest.raises(ConfigError, match=rf"{option}='<nope>' is not in the tokenizer's vocabulary"):
            with_tokens(given, pads=False, **{option: "<nope>"})


def test_a_template_is_also_that_of_the_processor():
    processor = tiny_processor("llava")
    changed = with_tokens(processor, chat_template="{{ messages[0].content }}", pads=False)
    assert changed.chat_template == changed.tokenizer.chat_template == "{{ messages[0].content }}"
    assert processor.chat_template != changed.chat_template


def test_a_template_with_tokens_that_are_not_there_is_refused(tmp_path, make_tokenizer):
    """Its end of turn would be letters, and the model would never learn to stop."""
    source, given = make_tokenizer("plain"), make_tokenizer("no_template")
    source.add_tokens(["<|turn|>"], special_tokens=True)
    source.chat_template = CHAT_TEMPLATE.replace("<|im_end|>", "<|turn|>")
    source.save_pretrained(tmp_path / "source")
    with pytest.raises(ConfigError, match=r"writes <\|turn\|>, which the tokenizer does not have.*clone_chat_template"):
        read_chat_template(str(tmp_path / "source"), given)
    given.add_tokens(["<|turn|>"])
    assert read_chat_template(str(tmp_path / "source"), given) == source.chat_template
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    assert read_chat_template(str(tmp_path / "own.jinja"), given) == "{{ messages }}"
    assert read_chat_template(None, given) is None
    make_tokenizer("no_template").save_pretrained(tmp_path / "bare")
    for path, words in (("bare", "has no chat template"), ("none", "neither"), ("none.jinja", "no such file")):
        with pytest.raises(ConfigError, match=words):
            read_chat_template(str(tmp_path / path), given)
