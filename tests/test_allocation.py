import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mosaic_opt.allocation import Allocation, from_weights, parse, parse_several, pyramid, uniform


def decode_by_bisection(weights, total, floor, cap, base):
    """Slow reference of the real-valued decode, straight from its definition."""
    weights = np.asarray(weights, dtype=float)
    positive = weights > 0
    if total >= positive.sum() * cap + (~positive).sum() * floor:
        rest = (total - positive.sum() * cap) / max((~positive).sum(), 1)
        return np.where(positive, cap, rest)
    low, high = 0.0, (cap - base) / weights[positive].min() + 1
    for _ in range(300):
        middle = (low + high) / 2
        if np.clip(base + middle * weights, floor, cap).sum() < total:
            low = middle
        else:
            high = middle
    return np.clip(base + high * weights, floor, cap)


bounds = st.tuples(st.integers(1, 40), st.integers(0, 400)).map(lambda pair: (pair[0], pair[0] + pair[1]))
weight_lists = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=1, max_size=40)


@given(weights=weight_lists, limits=bounds, share=st.floats(0, 1), based=st.booleans())
def test_decode_meets_the_mean_exactly_and_follows_the_weights(weights, limits, share, based):
    floor, cap = limits
    total = round(len(weights) * (floor + share * (cap - floor)))
    base = floor if based else 0
    budgets = from_weights(weights, total / len(weights), floor=floor, cap=cap, base=base).budgets
    assert sum(budgets) == total
    assert floor <= min(budgets) <= max(budgets) <= cap
    exact = decode_by_bisection(weights, total, floor, cap, base)
    assert np.abs(np.array(budgets) - exact).max() <= 1 + 1e-6


def test_decode_where_clamping_the_cap_first_misses_the_sum():
    assert from_weights((100, 1, 1), 14 / 3, floor=3, cap=10).budgets == (8, 3, 3)


def test_remainders_go_to_the_largest_then_the_lower_layer():
    assert from_weights([1, 1, 1, 1], 10.5, floor=1, cap=20).budgets == (11, 11, 10, 10)
    assert from_weights([0, 0, 0], 7, floor=1, cap=20).budgets == (7, 7, 7)


@pytest.mark.parametrize(
    ("weights", "mean", "floor", "cap", "named"),
    [
        ([1.0, -1.0], 5, 1, 9, "weights"),
        ([], 5, 1, 9, "weights"),
        ([float("nan")], 5, 1, 9, "weights"),
        ([1.0], 10, 1, 9, "between 1 and 9"),
        ([1.0], 5, 9, 1, "floor"),
        ([1.0], 5, 0, 9, "floor"),
    ],
)
def test_decode_refuses_bad_input(weights, mean, floor, cap, named):
    with pytest.raises(ValueError, match=named):
        from_weights(weights, mean, floor=floor, cap=cap)


def test_rescaling_keeps_the_proportions_beyond_the_window():
    shape = Allocation([32, 132, 232])
    assert shape.rescale(82, window=32, floor=32, cap=500).budgets == (32, 82, 132)
    assert shape.rescale(shape.mean, window=32, floor=32, cap=500) == shape


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=80), st.integers(1, 50), st.randoms())
def test_distances_are_the_share_that_moves(budgets, times, random):
    shuffled = random.sample(budgets, len(budgets))
    one, other = Allocation(budgets), Allocation(shuffled)
    assert one.distance(Allocation([times * budget for budget in budgets])) == pytest.approx(0, abs=1e-12)
    surplus = sum(max(0, a - b) for a, b in zip(budgets, shuffled, strict=True)) / sum(budgets)
    assert one.distance(other) == pytest.approx(other.distance(one)) == pytest.approx(surplus)
    with pytest.raises(ValueError, match="budgets, one per evictable layer"):
        one.distance(Allocation([*budgets, 1]))


def test_several_allocations_agree_on_the_layers(tmp_path):
    (tmp_path / "a.json").write_text("[5, 7, 9]")
    read = parse_several(["uniform:4", str(tmp_path / "a.json"), [1, 2, 3]])
    assert [one.budgets for one in read] == [(4, 4, 4), (5, 7, 9), (1, 2, 3)]
    for texts, message in (
        (["uniform:4", "uniform:5"], "one that says how many layers"),
        ([[1, 2], [1, 2, 3]], r"must all be of 2 layers; \[1, 2, 3\] is of 3"),
        ([[1, 2], "uniform:x"], "whole number"),
        ([[1, 2], None], "list of whole numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_several(texts)


def test_a_result_says_what_its_winner_is_for(tmp_path):
    content = {"winner": {"budgets": [5, 7]}, "about": {"eviction": {"name": "H2O"}, "floor": 2}}
    (tmp_path / "result.json").write_text(json.dumps(content))
    assert parse(str(tmp_path / "result.json"), layers=2).about == content["about"]
    (tmp_path / "result.json").write_text(json.dumps({**content, "about": {"floor": "two"}}))
    with pytest.raises(ValueError, match="does not fit its schema at floor"):
        parse(str(tmp_path / "result.json"), layers=2)


def test_pyramid_falls_linearly_from_twice_the_mean():
    shape = pyramid(5, 132, window=32, floor=32, cap=1000)
    assert shape.mean == 132
    assert shape.budgets[0] == 32 + 195
    assert shape.budgets[-1] == 32 + 5
    assert np.ptp(np.diff(shape.budgets)) <= 1


def test_bytes_and_realised_lengths():
    shape = Allocation([10, 20])
    assert shape.kv_bytes(kv_heads=3, head_dim=4, element_bytes=2) == 2 * 30 * 3 * 4 * 2
    assert shape.realised(15).budgets == (10, 15)
    assert shape.mean == 15


def test_parse_reads_what_users_write(tmp_path):
    listed, wrapped, result = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "result.json"
    listed.write_text("[1, 2, 3]")
    wrapped.write_text(json.dumps({"budgets": [1, 2, 3]}))
    result.write_text(json.dumps({"winner": {"budgets": [1, 2, 3]}, "rows": []}))
    for given_as in ([1, 2, 3], str(listed), str(wrapped), str(result)):
        assert parse(given_as, layers=3) == Allocation([1, 2, 3])
    assert parse("uniform:7", layers=3) == uniform(3, 7)


@pytest.mark.parametrize(
    "given_as",
    [
        [1, 2],
        [1, 2, 0],
        [1, 2, 3.5],
        [1, True, 3],
        "uniform:x",
        "uniform:0",
        "nowhere.json",
        7,
        None,
        [],
        "uniform:",
    ],
)
def test_parse_refuses_bad_input(given_as):
    with pytest.raises(ValueError, match="allocation"):
        parse(given_as, layers=3)


@pytest.mark.parametrize("content", ["{", '{"x": 1}', '"text"', '{"budgets": "3"}', "[1, null, 2]"])
def test_parse_refuses_bad_files(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="allocation"):
        parse(str(path), layers=3)
