import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from mosaic_opt.eviction import H2O, TOVA, AdaKV, ExpectedAttention, KeyDiff, L2Norm, SnapKV, StreamingLLM
from tests.eviction import literal
from tests.eviction.literal import SINKS, SOFTCAP, kept_sets, random_states
from tests.memory import PeakMemory

GROUPS = pytest.mark.parametrize(("H", "G"), [(2, 2), (6, 2), (4, 1), (9, 3)])

SCORES = {
    "SnapKV": (SnapKV(window=6, kernel=5), partial(literal.snapkv, window=6, kernel=5)),
    "SnapKV unpooled": (SnapKV(window=1, kernel=1), partial(literal.snapkv, window=1, kernel=1)),
    "AdaKV": (AdaKV(window=4, kernel=3), partial(literal.snapkv, window=4, kernel=3)),
    "H2O": (H2O(window=5), partial(literal.h2o, window=5)),
    "H2O without window": (H2O(window=0), partial(literal.h2o, window=0)),
    "TOVA": (TOVA(), literal.tova),
    "L2Norm": (L2Norm(), partial(literal.l2norm, window=0)),
    "L2Norm with window": (L2Norm(window=3), partial(literal.l2norm, window=3)),
    "KeyDiff": (KeyDiff(), partial(literal.keydiff, window=0)),
    "KeyDiff with window": (KeyDiff(window=3), partial(literal.keydiff, window=3)),
    "ExpectedAttention": (ExpectedAttention(), partial(literal.expected_attention, queries=512, sinks=4)),
    "ExpectedAttention of few": (
        ExpectedAttention(queries=9, sinks=0),
        partial(literal.expected_attention, queries=9, sinks=0),
    ),
    "ExpectedAttention of one": (
        ExpectedAttention(queries=9, sinks=40),
        partial(literal.expected_attention, queries=9, sinks=40),
    ),
}


def kept_by(scores):
    """From a literal score to what is kept: states -> budget -> sets."""
    return lambda states: partial(literal.keep_best, scores(states), states.keys.shape[2])


def kept_by_adakv(states, *, floor):
    scores = literal.snapkv(states, window=4, kernel=3)
    return partial(literal.keep_adakv, scores, states.keys.shape[2], turns=literal.slots_in_turn(scores, floor))


def kept_by_halves(states, *, recent_fraction):
    received = literal.h2o(states, window=0)
    return partial(literal.keep_recent_and_heavy, received, window=5, recent_fraction=recent_fraction)


KEPT = {name: (method, kept_by(scores)) for name, (method, scores) in SCORES.items() if name != "AdaKV"}
for floor in ("0", "0.2", "0.7", "1"):
    KEPT[f"AdaKV {floor}"] = (AdaKV(window=4, kernel=3, floor=float(floor)), partial(kept_by_adakv, floor=floor))
for fraction in ("0", "0.6", "0.25", "0.5", "1"):
    method = H2O(window=5, recent_fraction=float(fraction))
    KEPT[f"H2O {fraction} recent"] = (method, partial(kept_by_halves, recent_fraction=fraction))
for sinks in (0, 4):
    KEPT[f"StreamingLLM {sinks}"] = (
        StreamingLLM(sinks=sinks),
        lambda states, sinks=sinks: partial(literal.keep_streamingllm, states, sinks=sinks),
    )


def scores_of(method, states):
    return method.scores(states, method.observe(states))


def assert_scores(name, states):
    method, expected = SCORES[name]
    scores, wanted = scores_of(method, states), expected(states)[None]
    finite = wanted.isfinite()
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores[finite].double(), wanted[finite], rtol=0, atol=1e-5)
    assert not finite.any() or finite.all() or scores[~finite].min() > scores[finite].max()


@GROUPS
@pytest.mark.parametrize("name", SCORES)
def test_scores_are_the_literal_ones(name, H, G):
    assert_scores(name, random_states(29, H=H, G=G, seed=H))


@GROUPS
@pytest.mark.parametrize("option", [SOFTCAP, SINKS, SOFTCAP | SINKS], ids=["softcap", "sinks", "both"])
@pytest.mark.parametrize("name", ["SnapKV", "AdaKV", "H2O", "TOVA"])
def test_scores_with_softcap_and_learned_sinks(name, option, H, G):
    plain = random_states(29, H=H, G=G, scaling=1.0)
    capped = random_states(29, H=H, G=G, scaling=1.0, **option)
    assert_scores(name, capped)
    assert (scores_of(SCORES[name][0], plain) - scores_of(SCORES[name][0], capped)).abs().max() > 1e-3


@GROUPS
@pytest.mark.parametrize("name", KEPT)
def test_kept_positions_are_the_literal_ones(name, H, G):
    method, kept_at = KEPT[name]
    states = random_states(29, H=H, G=G, seed=H)
    ranking, expected = method.rank(states), kept_at(states)
    for budget in range(1, 32):
        assert kept_sets(ranking, budget)[0] == expected(budget)


@pytest.mark.parametrize("floor", ["0", "0.2", "0.37", "1"])
@pytest.mark.parametrize("G", [1, 2, 3, 8])
def test_adakv_counts_are_near_the_shares_and_sum_exactly(G, floor):
    scores = torch.randn(G, 24, generator=torch.Generator().manual_seed(G)) + torch.arange(G)[:, None] / 2
    method = AdaKV(window=4, floor=float(floor))
    method.scores = lambda states, observed: scores[None]
    ranking = method.rank(random_states(28, H=G, G=G))
    best_heads = literal.heads_of_best(scores)
    for budget in range(5, 29):
        slots = G * (budget - 4)
        parts = literal.shares(best_heads, slots, G, floor)
        counts = (ranking.lengths(budget) - 4)[0].tolist()
        assert sum(counts) == sum(literal.largest_remainder(parts)) == sum(parts) == slots
        over = [count - math.floor(part) for count, part in zip(counts, parts, strict=True)]
        assert 0 <= min(over) <= max(over) <= G - 1


@pytest.fixture(scope="module")
def in_bfloat16():
    """The same states as the methods see them and, rounded alike, as the definitions do."""
    states = random_states(640, H=4, G=2, d=32, scaling=32**-0.5)
    rounded = {name: getattr(states, name).bfloat16() for name in ("queries", "keys", "values")}
    return replace(states, **rounded), replace(states, **{name: part.float() for name, part in rounded.items()})


@pytest.mark.parametrize("name", KEPT)
def test_bfloat16_keeps_what_the_definition_keeps(name, in_bfloat16):
    method, kept_at = KEPT[name]
    ranking, expected = method.rank(in_bfloat16[0]), kept_at(in_bfloat16[1])
    for budget in (40, 100, 250, 500):
        kept, wanted = kept_sets(ranking, budget)[0], expected(budget)
        shared = sum(len(own & other) for own, other in zip(kept, wanted, strict=True))
        assert sum(map(len, kept)) == sum(map(len, wanted)) == 2 * budget
        assert shared >= 0.995 * 2 * budget


@pytest.mark.parametrize("name", KEPT)
def test_half_precision_overflows_nowhere(name):
    states = random_states(50, scaling=1.0)
    halves = {part: getattr(states, part).half() * 40 for part in ("queries", "keys", "values")}
    scores = scores_of(KEPT[name][0], replace(states, **halves))
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()


def observing_peak(n):
    states = random_states(n, H=4, G=2, d=16)
    with PeakMemory() as peak:
        H2O().observe(states)
    return peak.bytes


def test_h2o_needs_memory_in_proportion_to_the_prompt():
    short, long = observing_peak(512), observing_peak(4096)
    assert 0 < long < 9 * short
    assert long < 4096 * 4096 * 4 / 4
