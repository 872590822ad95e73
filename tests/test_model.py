import json

import pytest
import torch

from mosaic_opt.model import ModelSource
from tests.conftest import tiny_llama


@pytest.fixture
def folder(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    ModelSource(name="random").tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_local_folder_gives_its_model_tokenizer_and_dtype(folder):
    source = ModelSource(name=str(folder), dtype="bfloat16", device="cpu")
    model = source.load()
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    assert source.config.num_hidden_layers == 4
    assert source.tokenizer.decode(source.tokenizer("Hé 12").input_ids) == "Hé 12"


def test_the_fingerprint_follows_the_weights_and_the_dtype(folder):
    first = ModelSource(name=str(folder)).fingerprint
    assert ModelSource(name=str(folder)).fingerprint == first
    assert ModelSource(name=str(folder), dtype="float64").fingerprint != first
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert ModelSource(name=str(folder)).fingerprint != first


def test_random_models_are_the_same_every_time_and_leave_the_random_state_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = (ModelSource(name="random").load() for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"name": ""}, "name"),
        ({"name": None}, "name"),
        ({"name": "./nowhere"}, "neither"),
        ({"name": "nowhere.gguf"}, "neither"),
        ({"name": "a/b/c"}, "neither"),
        ({"name": "/tmp"}, "config.json"),
        ({"name": "random", "dtype": "int8"}, "dtype"),
        ({"name": "random", "device": "tpu"}, "device"),
    ],
)
def test_bad_sources(arguments, named):
    with pytest.raises(ValueError, match=named):
        ModelSource(**arguments)


def test_a_config_json_is_enough_where_no_weights_are_needed(folder, tmp_path):
    path = tmp_path / "any-name.json"
    path.write_bytes((folder / "config.json").read_bytes())
    source, whole = ModelSource(name=str(path)), ModelSource(name=str(folder))
    assert source.config.num_hidden_layers == whole.config.num_hidden_layers
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "dtype": "bfloat16"}))
    assert ModelSource(name=str(path)).element_bytes == 2
    for attribute in ("tokenizer", "loaded"):
        with pytest.raises(ValueError, match="a configuration has no weights"):
            getattr(source, attribute)


def test_what_is_known_of_a_model_is_its_outline(monkeypatch):
    monkeypatch.setattr(ModelSource, "config", property(lambda self: pytest.fail("the configuration was read")))
    known = {"model_type": "qwen3", "num_hidden_layers": 5, "num_key_value_heads": 3}
    outline = ModelSource(name="no/where", dtype="bfloat16", known=known).outline
    assert (outline.num_hidden_layers, outline.num_key_value_heads) == (5, 3)
    for wrong in ({"model_type": "nosuch"}, {"num_hidden_layers": 5}, {**known, "num_key_value_heads": "x"}):
        with pytest.raises(ValueError, match="is no configuration"):
            _ = ModelSource(name="no/where", known=wrong).outline


def test_unreadable_contents_are_one_clear_error(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        _ = ModelSource(name=str(tmp_path)).config
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(ValueError, match="cannot be read"):
        _ = ModelSource(name=str(tmp_path / "x.gguf")).config
