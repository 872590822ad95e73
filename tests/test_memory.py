import pytest

from mosaic_opt.allocation import Allocation
from mosaic_opt.memory import expected_score, kv_bytes, memory_plan

MODEL = {"layers": [0, 1, 2, 3], "windows": [], "kv_heads": 2, "head_dim": 8, "element_bytes": 4}
SLIDING = MODEL | {"windows": [20, 1000]}
PAIR = 2 * 2 * 8 * 4


def test_bytes_are_those_of_the_allocation():
    budgets = Allocation([8, 20, 300, 12], {"model": MODEL})
    assert kv_bytes(MODEL, context=400, batch=3, mean=budgets.mean) == budgets.kv_bytes(batch=3)
    assert kv_bytes(MODEL, context=50, batch=1) == 4 * 50 * PAIR == kv_bytes(MODEL, context=50, batch=1, mean=99)
    assert kv_bytes(SLIDING, context=50, batch=2) == 2 * (4 * 50 + 20 + 50) * PAIR


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
