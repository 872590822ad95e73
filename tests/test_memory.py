import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from mosaic_opt.allocation import Allocation, uniform
from mosaic_opt.eviction import SnapKV, attach, kv_shape
from mosaic_opt.memory import expected_score, kv_bytes, memory_plan
from tests.conftest import tiny_gemma3, tiny_llama, tiny_qwen3

MODEL = {"layers": [0, 1, 2, 3], "windows": [], "kv_heads": 2, "head_dim": 8, "element_bytes": 4}
SLIDING = MODEL | {"windows": [20, 1000]}
PAIR = 2 * 2 * 8 * 4


def test_bytes_are_those_of_the_allocation():
    budgets = Allocation([8, 20, 300, 12], {"model": MODEL})
    assert kv_bytes(MODEL, context=400, batch=3, mean=budgets.mean) == budgets.kv_bytes(batch=3)
    assert kv_bytes(MODEL, context=50, batch=1) == 4 * 50 * PAIR == kv_bytes(MODEL, context=50, batch=1, mean=99)
    assert kv_bytes(SLIDING, context=50, batch=2) == 2 * (4 * 50 + 20 + 50) * PAIR


@pytest.mark.parametrize(
    ("name", "kib"),
    [("llama3_8b", 128), ("llama3_1_8b", 128), ("llama3_1_70b", 320), ("mistral_7b", 128), ("qwen2_5_7b", 56),
     ("qwen3_8b", 144), ("gemma3_1b", 26)],
)  # fmt: skip
def test_a_token_of_a_known_model_needs_what_is_published(name, kib):
    """2 x layers x KV heads x head size x 2 bytes, by hand; nothing is fetched."""
    source = instantiate(OmegaConf.load(f"conf/model/{name}.yaml"))
    model = {**kv_shape(source.outline), "element_bytes": source.element_bytes}
    assert kv_bytes(model, context=1, batch=1) == kib * 2**10
    if name == "gemma3_1b":  # 4 layers with full attention, 22 with a window of 512
        assert (len(model["layers"]), model["windows"]) == (4, [512] * 22)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "smollm2"])
def test_predicted_bytes_are_those_of_the_live_model(kind, request):
    made = {"llama": tiny_llama, "qwen3": tiny_qwen3, "gemma3": tiny_gemma3}
    model = made[kind]() if kind in made else request.getfixturevalue(kind)[1]
    shape = {**kv_shape(model.config), "element_bytes": model.dtype.itemsize}
    prompt = torch.randint(0, 256, (2, 301), generator=torch.Generator().manual_seed(0))

    def live(mean):
        """Bytes once a token was fed after the prompt: only then a sliding-window layer frees what it can."""
        with attach(model, SnapKV(), uniform(len(shape["layers"]), mean)) as eviction, torch.no_grad():
            model(prompt[:, -1:], cache=model(prompt[:, :-1]).cache)
            report = eviction.report()
        return report.kv_bytes + report.other_bytes

    assert kv_bytes(shape, context=300, batch=2) == pytest.approx(live(300), rel=0.02)
    assert kv_bytes(shape, context=300, batch=2, mean=64) == pytest.approx(live(64), rel=0.02)


@pytest.mark.parametrize("model", [MODEL, SLIDING])
def test_what_fits_is_the_most_that_fits(model):
    memory = 3 * kv_bytes(model, context=100, batch=2) + 5
    found = memory_plan(model, context=100, batch=2, mean=30, memory=memory, floor=8)
    assert found["fitting_mean"] == 100
    tight = memory_plan(model, context=1000, batch=2, mean=30, memory=memory)
    mean = tight["fitting_mean"]
    assert kv_bytes(model, context=1000, batch=2, mean=mean) <= memory
    assert kv_bytes(model, context=1000, batch=2, mean=mean + 1 / 4) > memory
    for name, most in (("full_batch", {"context": 100}), ("budget_batch", {"context": 100, "mean": 30})):
        assert kv_bytes(model, batch=found[name], **most) <= memory < kv_bytes(model, batch=found[name] + 1, **most)
    longest = found["full_context"]
    assert kv_bytes(model, context=longest, batch=2) <= memory < kv_bytes(model, context=longest + 1, batch=2)


def test_a_memory_that_is_too_small_says_what_works():
    least = kv_bytes(SLIDING, context=100, batch=2, mean=8)
    memory_plan(SLIDING, context=100, batch=2, memory=least, floor=8)
    with pytest.raises(ValueError, match=f"memory must be at least {least} bytes .* got {least - 1}"):
        memory_plan(SLIDING, context=100, batch=2, memory=least - 1, floor=8)


def test_the_expected_score_is_between_those_measured():
    rows = [
        {"allocation": name, "mean_budget": mean, "score": score, "score_interval": [score - 0.1, score]}
        for name, mean, score in [("refined", 100, 0.5), ("refined", 200, 0.7), ("uniform", 150, 0.1)]
    ]
    found = expected_score(rows, 150)
    assert found["score"] == pytest.approx(0.6)
    assert found["interval"] == pytest.approx([0.5, 0.6])
    assert expected_score(rows, 99) is None
    assert expected_score(rows, 201) is None
    assert expected_score([], 150) is None
