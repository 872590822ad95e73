import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_opt.eviction import SnapKV
from mosaic_opt.eviction.base import gather_pairs


def literal_scores(queries, keys, window, kernel, scaling):
    """SnapKV straight from its definition: the whole n x n softmax, loops for the sums and the pooling."""
    B, H, n, _ = queries.shape
    G = keys.shape[1]
    repeated = keys.repeat_interleave(H // G, dim=1)
    logits = queries @ repeated.transpose(2, 3) * scaling
    attention = torch.softmax(logits.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf), dim=-1)
    scores = torch.zeros(B, G, n - window)
    for b in range(B):
        for g in range(G):
            heads = range(g * H // G, (g + 1) * H // G)
            received = [
                sum(attention[b, h, query, j] for h in heads for query in range(n - window, n)) / len(heads)
                for j in range(n - window)
            ]
            for j in range(n - window):
                near = received[max(0, j - kernel // 2) : j + kernel // 2 + 1]
                scores[b, g, j] = max(near)
    return scores


def states(n, *, B=1, H=4, G=2, d=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda heads: torch.randn(B, heads, n, d, generator=generator)  # noqa: E731
    return draw(H), draw(G), draw(G)


@pytest.mark.parametrize(("H", "G"), [(2, 2), (6, 2), (4, 1), (9, 3)])
def test_scores_agree_with_the_literal_definition(H, G):
    queries, keys, values = states(29, B=2, H=H, G=G)
    method = SnapKV(window=6, kernel=5)
    expected = literal_scores(queries, keys, 6, 5, 0.3)
    torch.testing.assert_close(method.scores(queries, keys, values, scaling=0.3), expected, rtol=0, atol=1e-5)


def test_scores_are_float32_and_finite_in_half_precision():
    queries, keys, values = (state.half() * 40 for state in states(50))
    scores = SnapKV(window=8).scores(queries, keys, values, scaling=1.0)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()


@settings(deadline=None, max_examples=60)
@given(n=st.integers(1, 40), window=st.integers(1, 12), pads=st.integers(0, 5), seed=st.integers(0, 99))
def test_keep_order_is_a_permutation_with_the_window_first_and_padding_last(n, window, pads, seed):
    queries, keys, values = states(n + pads, B=2, seed=seed)
    padding = torch.zeros(2, n + pads, dtype=torch.bool)
    padding[1, :pads] = True
    order = SnapKV(window=window).keep_order(
        queries, keys, values, scaling=0.3, limit=n + pads, padding=padding if pads else None
    )
    assert torch.equal(order.sort(-1).values, torch.arange(n + pads).expand_as(order))
    recent = list(range(n + pads - 1, max(n + pads - window, pads) - 1, -1))
    for row in order[1]:  # the padded example
        assert row[: len(recent)].tolist() == recent
        assert set(row[n:].tolist()) == set(range(pads))


@settings(deadline=None, max_examples=40)
@given(n=st.integers(2, 40), pads=st.integers(1, 6), seed=st.integers(0, 99))
def test_padding_changes_nothing(n, pads, seed):
    queries, keys, values = states(n, seed=seed)
    padded = [torch.cat([100 * torch.randn(1, s.shape[1], pads, 8), s], dim=2) for s in (queries, keys, values)]
    padding = torch.arange(n + pads)[None] < pads
    method = SnapKV(window=4, kernel=3)
    alone = method.keep_order(queries, keys, values, scaling=0.3, limit=n)
    together = method.keep_order(*padded, scaling=0.3, limit=n, padding=padding)
    assert torch.equal(alone + pads, together)


@settings(deadline=None, max_examples=40)
@given(n=st.integers(1, 40), limit=st.integers(1, 45), seed=st.integers(0, 99))
def test_the_kept_set_at_a_budget_is_a_prefix(n, limit, seed):
    queries, keys, values = states(n, seed=seed)
    method = SnapKV(window=5)
    whole = method.keep_order(queries, keys, values, scaling=0.3, limit=n)
    assert torch.equal(method.keep_order(queries, keys, values, scaling=0.3, limit=limit), whole[..., :limit])


def test_ties_go_to_the_lower_position():
    keys = torch.zeros(1, 1, 20, 8)
    order = SnapKV(window=4).keep_order(torch.zeros(1, 2, 20, 8), keys, keys, scaling=1.0, limit=20)
    assert order.flatten().tolist() == [19, 18, 17, 16, *range(16)]


def test_gather_copies():
    keys = torch.randn(1, 2, 10, 4)
    kept = gather_pairs(keys, torch.tensor([[[3, 1], [0, 9]]]))
    assert torch.equal(kept[0, 0, 0], keys[0, 0, 3])
    assert kept.untyped_storage().nbytes() == 1 * 2 * 2 * 4 * 4


@pytest.mark.parametrize("arguments", [{"window": 0}, {"kernel": 4}, {"kernel": 0}])
def test_bad_parameters(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        SnapKV(**arguments)
