"""Exports: what other tools make of them."""

import csv
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosaic_opt.allocation import Allocation
from mosaic_opt.export import FORMATS, PRESSES, exported, kvpress_ratios, lukv_curve
from tests.test_allocation_file import ABOUT, MADE

SLIDING = Allocation(
    [30, 60], ABOUT | {"model": ABOUT["model"] | {"layers": [1, 3], "windows": [20, 24]}, "cap": 500}
)


@given(budgets=st.lists(st.integers(1, 10**4), min_size=1), length=st.integers(1, 10**5))
def test_kvpress_keeps_what_the_budgets_say(budgets, length):
    for budget, ratio in zip(budgets, kvpress_ratios(budgets, length), strict=True):
        kept = length if ratio == 0 else max(1, int(length * (1 - ratio)))  # as kvpress counts
        assert kept == min(budget, length)
        assert 0 <= ratio < 1


PRESS_CODE = """
import json, sys, torch, kvpress
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache
torch.manual_seed(0)
found = {}
for name, exports in json.load(sys.stdin).items():
    for export in exports:
        config = LlamaConfig(vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192)
        config._attn_implementation = "eager" if export["press"] == "ObservedAttentionPress" else "sdpa"
        model = LlamaForCausalLM(config).eval()
        inner = getattr(kvpress, export["press"])(**export["arguments"])
        press = kvpress.PerLayerCompressionPress(inner, export["compression_ratios"])
        cache = DynamicCache()
        with torch.no_grad(), press(model):
            model(torch.randint(0, 256, (1, export["prompt_tokens"])), past_key_values=cache)
        found.setdefault(name, []).append([layer.keys.shape[2] for layer in cache.layers])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_real_kvpress_keeps_what_the_budgets_say(tmp_path):
    """In an environment of its own (MOSAIC_KVPRESS_PYTHON, or made here): it needs an older transformers."""
    python = os.environ.get("MOSAIC_KVPRESS_PYTHON")
    if python is None:
        subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
        python = str(tmp_path / "env" / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "-q", "torch==2.13.0", "kvpress==0.5.5"], check=True)
    described = {name: {"name": name} for name in PRESSES} | {"SnapKV": ABOUT["eviction"]}
    lengths = (500, 1000, 4096)
    exports = {
        name: [
            json.loads(exported(Allocation(MADE.budgets, ABOUT | {"eviction": way}), "kvpress", prompt_tokens=length))
            for length in (lengths if name == "SnapKV" else lengths[:1])
        ]
        for name, way in described.items()
    }
    made = subprocess.run(
        [python, "-c", PRESS_CODE], input=json.dumps(exports), capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    for name, lengths_kept in json.loads(made.stdout.splitlines()[-1]).items():
        assert lengths_kept == [list(MADE.budgets)] * len(exports[name]), name


def test_the_press_is_the_method_with_its_parameters():
    content = json.loads(exported(MADE, "kvpress", prompt_tokens=1000))
    assert (content["press"], content["arguments"]) == ("SnapKVPress", {"window_size": 8, "kernel_size": 7})
    ratios = json.loads(exported(SLIDING, "kvpress", prompt_tokens=1000))["compression_ratios"]
    assert (ratios[0], ratios[2]) == (0, 0)  # sliding windows are left alone
    adakv = Allocation(MADE.budgets, ABOUT | {"eviction": {"name": "AdaKV"}})
    with pytest.raises(ValueError, match=r"one of kvpress's per layer, SnapKV.*; got 'AdaKV'"):
        exported(adakv, "kvpress", prompt_tokens=1000)


def test_the_curve_of_shares():
    curve = np.load(io.BytesIO(exported(MADE, "lukv", prompt_tokens=1000)), allow_pickle=False)
    assert curve.shape == (99, 4, 2)
    assert np.array_equal(curve, lukv_curve(MADE, 1000))
    assert np.allclose(curve.mean(axis=(1, 2)), np.arange(1, 100) / 100, atol=1 / 4000)
    assert ((curve >= 0) & (curve < 1)).all()
    assert (np.diff(curve, axis=0) >= -1 / 1000).all()  # more goes everywhere, to a token
    scaled = MADE.rescale(85, cap=1000)
    assert np.allclose(lukv_curve(MADE, 1000)[90, :, 0], 1 - np.array(MADE.rescale(90, cap=1000).budgets) / 1000)
    assert scaled == MADE
    with pytest.raises(ValueError, match="without sliding windows"):
        exported(SLIDING, "lukv", prompt_tokens=1000)


def test_lists_of_layers():
    windows = json.loads(exported(SLIDING, "tensorrt_llm"))
    assert windows["kv_cache_config"] == {"max_attention_window": [20, 30, 24, 60]}
    assert "recency only" in windows["note"]
    assert json.loads(exported(MADE, "kvcache_factory")) == list(MADE.budgets)
    assert json.loads(exported(Allocation([3, 4]), "kvcache_factory")) == [3, 4]
    table = list(csv.reader(io.StringIO(exported(SLIDING, "csv").decode())))
    assert table == [["layer", "budget"], ["1", "30"], ["3", "60"]]
    holes = Allocation([3, 4], {"model": {"id": "x", "layers": [0, 9]}})
    with pytest.raises(ValueError, match="all have full or sliding-window attention"):
        exported(holes, "tensorrt_llm")


def test_json_is_an_allocation_file_again(tmp_path):
    (tmp_path / "a.json").write_bytes(exported(MADE, "json"))
    again = Allocation.load(tmp_path / "a.json")
    assert (again, again.about) == (MADE, MADE.about)


def test_what_a_format_lacks():
    with pytest.raises(ValueError, match=r"format must be one of json, kvpress, .*; got 'yaml'"):
        exported(MADE, "yaml")
    for form in FORMATS:
        if form in ("kvpress", "lukv"):
            with pytest.raises(ValueError, match="prompt_tokens must be a whole number between 1"):
                exported(MADE, form)
            with pytest.raises(ValueError, match=r"a file that says (eviction|model\.kv_heads)"):
                exported(Allocation([1, 2]), form, prompt_tokens=9)
        else:
            assert exported(Allocation([1, 2]), form)
