import copy
import itertools
import json
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mosaic_opt.eviction import H2O, TOVA, AdaKV, ExpectedAttention, KeyDiff, L2Norm, SnapKV, StreamingLLM
from mosaic_opt.eviction.base import gather_pairs
from tests.eviction.literal import best, keep_adakv, kept_sets, random_states, slots_in_turn

METHODS = [
    SnapKV(window=4, kernel=3),
    AdaKV(window=4, kernel=3),
    AdaKV(window=2, kernel=1, floor=0),
    H2O(window=3),
    H2O(window=0),
    H2O(window=3, recent_fraction=0.5),
    TOVA(),
    L2Norm(),
    L2Norm(window=2, skip=[0]),
    KeyDiff(),
    KeyDiff(window=2),
    StreamingLLM(sinks=2),
    ExpectedAttention(queries=5, sinks=2),
]


def named(methods):
    return pytest.mark.parametrize(
        "method", methods, ids=lambda method: "-".join(map(str, method.describe().values()))
    )


EACH_METHOD = named(METHODS)
HEADS = st.sampled_from([(2, 2), (4, 2), (3, 1), (3, 3)])
SEEDS = st.integers(0, 999)
few_examples = settings(max_examples=30)


def side_by_side(rows):
    """Several prompts in one batch, junk to the left of the shorter ones."""
    n = max(row.keys.shape[2] for row in rows)
    generator = torch.Generator().manual_seed(n)

    def filled(states):
        junk = 100 * torch.randn(1, states.shape[1], n - states.shape[2], states.shape[3], generator=generator)
        return torch.cat([junk, states], dim=2)

    parts = {name: torch.cat([filled(getattr(row, name)) for row in rows]) for name in ("queries", "keys", "values")}
    padding = torch.stack([torch.arange(n) < n - row.keys.shape[2] for row in rows])[:, None]
    return replace(rows[0], **parts, padding=padding)


@st.composite
def prompts(draw, least=1):
    """One to three prompts of different lengths."""
    H, G = draw(HEADS)
    lengths = draw(st.lists(st.integers(least, 16), min_size=1, max_size=3))
    return [random_states(n, H=H, G=G, seed=draw(SEEDS)) for n in lengths]


def with_scores(method, scores):
    """The method, scoring (B, G, n) `scores` whatever it sees."""
    fixed = copy.copy(method)
    fixed.scores = lambda states, observed: scores[..., : max(scores.shape[2] - method.window, 0)]
    return fixed


@st.composite
def tied_scores(draw):
    """(B, G, n) scores with many ties."""
    B, G, n = draw(st.integers(1, 2)), draw(st.integers(1, 4)), draw(st.integers(1, 14))
    kind = st.sampled_from([st.just(0), st.integers(0, 2), st.sampled_from([-1e30, 0.0, 1e30, 3e38])])
    values = draw(st.lists(draw(kind), min_size=B * G * n, max_size=B * G * n))
    return torch.tensor(values, dtype=torch.float32).view(B, G, n)


def apart(scores):
    """Whether no two scores of an example are so close that rounding could swap them."""
    gaps = scores.flatten(1).sort(dim=1).values.diff(dim=1)
    return bool(((gaps == 0) | (gaps > 1e-6)).all())


def safely_ranked(method, states):
    observed = method.observe(states)
    outside = states.keys.shape[2] > method.window
    return not outside or (
        apart(method.scores(states, observed)) and (not isinstance(method, H2O) or apart(observed))
    )


@EACH_METHOD
@few_examples
@given(rows=prompts())
def test_kept_sets_grow_with_the_budget_and_hold_the_window_but_no_padding(method, rows):
    ranking = method.rank(side_by_side(rows))
    most = max(row.keys.shape[2] for row in rows)
    assert torch.equal(ranking.order.sort(dim=-1).values, torch.arange(most).expand_as(ranking.order))
    smaller = [[set() for _ in example] for example in ranking.order]
    for budget in range(1, most + 3):
        kept = kept_sets(ranking, budget)
        for row, heads, before in zip(rows, kept, smaller, strict=True):
            n = row.keys.shape[2]
            recent = set(range(most - min(method.window, budget, n), most))
            assert all(recent <= head <= set(range(most - n, most)) for head in heads)
            assert all(head >= less for head, less in zip(heads, before, strict=True))
            assert sum(map(len, heads)) == min(budget, n) * len(heads)
            if budget <= method.window or not isinstance(method, AdaKV):
                assert all(len(head) == min(budget, n) for head in heads)
        smaller = kept


@EACH_METHOD
@few_examples
@given(rows=prompts())
def test_padding_changes_nothing(method, rows):
    assume(all(safely_ranked(method, row) for row in rows))
    together = method.rank(side_by_side(rows))
    most = together.order.shape[2]
    for index, row in enumerate(rows):
        alone, pads = method.rank(row), most - row.keys.shape[2]
        for budget in range(1, most + 1):
            shifted = [{j + pads for j in head} for head in kept_sets(alone, budget)[0]]
            assert kept_sets(together, budget)[index] == shifted


@EACH_METHOD
@few_examples
@given(rows=prompts(least=5), heads_pads=st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_each_head_may_have_padding_of_its_own(method, rows, heads_pads):
    states = side_by_side(rows[:1])
    G, n = states.keys.shape[1:3]
    pads = torch.tensor(heads_pads[:G])
    padding = torch.arange(n) < pads[:, None]
    ranking = method.rank(replace(states, padding=padding[None]))
    for budget in range(1, n + 1):
        lengths = ranking.lengths(budget).expand(1, G)[0]
        for head, kept in enumerate(kept_sets(ranking, budget)[0]):
            assert len(kept) == lengths[head]
            assert kept <= set(range(int(pads[head]), n))


@named([method for method in METHODS if not isinstance(method, TOVA)])
@few_examples
@given(rows=prompts(least=5), heads_pads=st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_a_head_with_padding_of_its_own_is_scored_as_if_alone(method, rows, heads_pads):
    states = rows[0]
    H, G, n = states.queries.shape[1], *states.keys.shape[1:3]
    padding = (torch.arange(n) < torch.tensor(heads_pads[:G])[:, None])[None]
    states = replace(states, padding=padding)
    observed = method.observe(states)
    for head in range(G):
        own = {"keys": states.keys[:, [head]], "values": states.values[:, [head]], "padding": padding[:, [head]]}
        alone = replace(states, queries=states.queries[:, head * H // G : (head + 1) * H // G], **own)
        real = ~padding[0, head, : max(n - method.window, 0)]
        scores = method.scores(states, observed)[0, head, real]
        torch.testing.assert_close(
            scores, method.scores(alone, method.observe(alone))[0, 0, real], rtol=1e-5, atol=1e-5
        )


@EACH_METHOD
@few_examples
@given(rows=prompts(), cuts=st.sets(st.integers(1, 15), max_size=3))
def test_a_prompt_in_several_forwards_is_scored_as_in_one(method, rows, cuts):
    states = side_by_side(rows)
    n = states.keys.shape[2]
    whole = method.observe(states)
    observed = None
    for start, end in itertools.pairwise([0, *sorted(cut for cut in cuts if cut < n), n]):
        chunk = replace(states.first(end), queries=states.queries[:, :, start:end])
        observed = method.observe(chunk, observed)
    if whole is None:
        assert observed is None
    else:
        torch.testing.assert_close(observed, whole, rtol=0, atol=1e-5)
    if n > method.window:
        real = ~states.padding[..., : n - method.window].expand(-1, states.keys.shape[1], -1)
        scores, expected = method.scores(chunk, observed)[real], method.scores(states, whole)[real]
        if getattr(method, "recent_fraction", None) is None:
            torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


@EACH_METHOD
@few_examples
@given(scores=tied_scores())
def test_equal_scores_go_to_the_lower_position(method, scores):
    B, G, n = scores.shape
    order = with_scores(method, scores).rank(random_states(n, B=B, H=G, G=G)).order
    recent = list(range(n - 1, max(n - method.window, 0) - 1, -1))
    for row, values in zip(order.flatten(0, 1).tolist(), scores.flatten(0, 1).tolist(), strict=True):
        others = best(values[: n - len(recent)], n)
        assert row == recent + others


@named([SnapKV(window=4), AdaKV(window=4), TOVA(), KeyDiff(), L2Norm(), ExpectedAttention()])
def test_states_without_a_difference_are_kept_from_the_front(method):
    states = random_states(20)
    states = replace(
        states, **{name: torch.zeros_like(getattr(states, name)) for name in ("queries", "keys", "values")}
    )
    recent = list(range(19, 19 - method.window, -1))
    assert method.rank(states).order[0].tolist() == [recent + list(range(20 - method.window))] * 2


@settings(max_examples=60)
@given(scores=tied_scores(), window=st.integers(1, 5), floor=st.sampled_from([0, 0.1, 0.2, 1 / 3, 0.5, 1]))
def test_adakv_totals_are_exact_and_nested_whatever_the_scores(scores, window, floor):
    B, G, n = scores.shape
    ranking = with_scores(AdaKV(window=window, floor=floor), scores).rank(random_states(n, B=B, H=G, G=G))
    smaller = torch.zeros(B, G, dtype=torch.int64)
    for budget in range(1, n + 3):
        lengths = ranking.lengths(budget).expand(B, G)
        assert (lengths.sum(dim=1) == G * min(budget, n)).all()
        assert (lengths >= min(budget, window, n)).all()
        assert (lengths >= smaller).all()
        smaller = lengths


@settings(max_examples=60)
@given(
    scores=tied_scores(),
    window=st.integers(1, 3),
    floor=st.sampled_from(["0", "0.1", "0.2", "0.3", "0.7", "0.9", "1"]),
)
def test_adakv_breaks_ties_by_position_then_head(scores, window, floor):
    B, G, n = scores.shape
    outside = max(n - window, 0)
    method = with_scores(AdaKV(window=window, floor=float(floor)), scores)
    ranking = method.rank(random_states(n, B=B, H=G, G=G))
    for row in range(B):
        own = scores[row, :, :outside]
        turns = slots_in_turn(own, floor)
        for budget in range(1, n + 1):
            assert kept_sets(ranking, budget)[row] == keep_adakv(own, n, budget, turns)


def test_adakv_shares_are_exact():
    scores = torch.tensor([[4, 19, 13, 0, 3, 19, 7], [3, 17, 3, 1, 6, 16, 19], [18, 16, 16, 8, 14, 13, 6]])
    method = with_scores(AdaKV(window=1, floor=0.6), torch.cat([scores, torch.zeros(3, 1)], dim=1)[None])
    lengths = method.rank(random_states(8, H=3, G=3)).lengths(6)
    assert lengths[0].tolist() == [1 + 5, 1 + 4, 1 + 6]


@settings(max_examples=60)
@given(scores=tied_scores(), window=st.integers(1, 3), pads=st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_adakv_hands_on_what_a_padded_head_cannot_hold(scores, window, pads):
    _, G, n = scores.shape
    pads = torch.tensor(pads[:G]).clamp(max=max(n - window, 0))
    states = replace(random_states(n, H=G, G=G), padding=(torch.arange(n) < pads[:, None])[None])
    ranking = with_scores(AdaKV(window=window), scores[:1]).rank(states)
    for budget in range(1, n + 1):
        held = sum(min(budget, n - pad) for pad in pads.tolist()) if budget <= window else G * budget
        assert ranking.lengths(budget).sum() == min(held, int((n - pads).sum()))


@EACH_METHOD
@few_examples
@given(rows=prompts(), limit=st.integers(1, 18))
def test_a_cut_ranking_keeps_the_same_up_to_its_limit(method, rows, limit):
    ranking = method.rank(side_by_side(rows))
    cut = ranking.cut(limit)
    for budget in range(1, limit + 1):
        assert torch.equal(cut.kept(budget), ranking.kept(budget))
    assert cut.order.shape[2] == ranking.lengths(limit).max()


@EACH_METHOD
@pytest.mark.parametrize("earlier", [None, torch.zeros(1, 4, 3, 8)], ids=["whole", "chunk"])
def test_what_is_observed_keeps_no_other_states_alive(method, earlier):
    observed = method.observe(random_states(200), None if isinstance(method, H2O) else earlier)
    assert observed is None or observed.untyped_storage().nbytes() == 4 * observed.numel()


def test_gather_copies():
    keys = torch.randn(1, 2, 10, 4)
    kept = gather_pairs(keys, torch.tensor([[[3, 1], [0, 9]]]))
    assert torch.equal(kept[0, 0, 0], keys[0, 0, 3])
    assert kept.untyped_storage().nbytes() == 1 * 2 * 2 * 4 * 4


@pytest.mark.parametrize(
    ("method", "parameter", "values"),
    [
        (SnapKV, "window", [0, -1, 2.0, True, "8", None]),
        (SnapKV, "kernel", [0, 4, -3, 3.0, False]),
        (AdaKV, "window", [0, 1.5]),
        (AdaKV, "kernel", [0, 2]),
        (AdaKV, "floor", [-0.1, 1.1, float("nan"), True, "0.2", None]),
        (H2O, "window", [-1, 0.5, None]),
        (H2O, "recent_fraction", [-0.5, 2, float("inf"), True, "half"]),
        (L2Norm, "window", [-1, 1.0]),
        (L2Norm, "skip", [3, "01", [-1], [0.0], [True], None]),
        (KeyDiff, "window", [-1, "0"]),
        (StreamingLLM, "sinks", [-1, 4.0, None]),
        (ExpectedAttention, "queries", [1, 0, 512.0]),
        (ExpectedAttention, "sinks", [-1, 0.5]),
    ],
)
def test_bad_parameters_are_named(method, parameter, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"^{method.__name__} {parameter} must"):
            method(**{parameter: value})


def test_descriptions_tell_methods_and_parameters_apart():
    others = [
        *METHODS, SnapKV(), SnapKV(window=4), SnapKV(kernel=3), AdaKV(), AdaKV(window=4, kernel=3, floor=0.3),
        H2O(), H2O(window=3, recent_fraction=0.25), H2O(window=3, recent_fraction=0.0), L2Norm(skip=(0, 1)),
        L2Norm(window=2), StreamingLLM(), ExpectedAttention(), ExpectedAttention(queries=5),
        ExpectedAttention(sinks=2),
    ]  # fmt: skip
    descriptions = [json.dumps(method.describe(), sort_keys=True) for method in others]
    assert len(set(descriptions)) == len(others)
    names = [json.loads(description)["name"] for description in descriptions]
    assert names == [type(method).__name__ for method in others]
    assert L2Norm(skip=[1, 0]).describe() == L2Norm(skip=(0, 1)).describe()
