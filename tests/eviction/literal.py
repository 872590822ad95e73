"""The eviction methods straight from their definitions, with random states to try them on.

Whole n x n softmaxes in float64, loops where they are clearer, one example without padding at a time. Scores are
(G, n - W). Kept positions are a list of sets, one a KV head.
"""

import math
from fractions import Fraction

import torch

from mosaic_opt.eviction import PromptStates

SOFTCAP, SINKS = {"softcap": 1.5}, {"sinks": torch.linspace(1, 4, 12)}


def random_states(n, *, B=1, H=4, G=2, d=8, seed=0, scaling=0.3, softcap=None, sinks=None):
    generator = torch.Generator().manual_seed(seed)
    queries, keys, values = (torch.randn(B, heads, n, d, generator=generator) for heads in (H, G, G))
    return PromptStates(queries, keys, values, scaling, softcap=softcap, sinks=None if sinks is None else sinks[:H])


def kept_sets(ranking, budget):
    """[example][KV head] sets of the positions that a `Ranking` keeps."""
    return [[{j for j in head if j >= 0} for head in example] for example in ranking.kept(budget).tolist()]


def attention(states):
    """(H, n, n): each query head's causal softmax over the keys of its KV head."""
    queries, keys = states.queries[0].double(), states.keys[0].double()
    H, n, _ = queries.shape
    weights = torch.zeros(H, n, n, dtype=torch.float64)
    for h in range(H):
        logits = queries[h] @ keys[h // (H // len(keys))].T * states.scaling
        if states.softcap is not None:
            logits = states.softcap * torch.tanh(logits / states.softcap)
        weights[h] = torch.exp(logits).tril()
        sink = 0.0 if states.sinks is None else math.exp(states.sinks[h])
        weights[h] /= weights[h].sum(dim=1, keepdim=True) + sink
    return weights


def over_groups(states, per_query_head):
    """(G, ...): the average over the query heads of each KV head."""
    G = states.keys.shape[1]
    size = len(per_query_head) // G
    return torch.stack([sum(per_query_head[g * size : (g + 1) * size]) / size for g in range(G)])


def snapkv(states, *, window, kernel):
    n = states.keys.shape[2]
    received = over_groups(states, attention(states)[:, n - window :, : n - window].sum(dim=1))
    reach = kernel // 2
    near = [received[:, max(0, j - reach) : j + reach + 1] for j in range(n - window)]
    return torch.stack([part.amax(dim=1) for part in near], dim=1)


def h2o(states, *, window):
    received = over_groups(states, attention(states).sum(dim=1))
    return received[:, : received.shape[1] - window]


def tova(states):
    last = attention(states)[:, -1, :-1]
    return last.mean(dim=0).expand(states.keys.shape[1], -1)


def l2norm(states, *, window):
    keys = states.keys[0].double()
    return -keys[:, : keys.shape[1] - window].pow(2).sum(dim=2).sqrt()


def keydiff(states, *, window):
    keys = states.keys[0].double()
    scores = torch.zeros(keys.shape[0], keys.shape[1] - window, dtype=torch.float64)
    for g, own in enumerate(keys):
        anchor = torch.stack([key / key.norm() for key in own]).mean(dim=0)
        for j in range(scores.shape[1]):
            scores[g, j] = -(own[j] @ anchor) / (own[j].norm() * anchor.norm())
    return scores


def expected_attention(states, *, queries, sinks):
    """The first `sinks` positions score infinity."""
    keys, values = states.keys[0].double(), states.values[0].double()
    H, n, _ = states.queries[0].shape
    asked = [j for j in range(max(n - queries, 0), n) if j >= sinks] or [n - 1]
    expected = torch.zeros(H, n, dtype=torch.float64)
    for h in range(H):
        own, own_keys = states.queries[0, h].double()[asked], keys[h // (H // len(keys))]
        mean = own.mean(dim=0)
        covariance = sum(torch.outer(query - mean, query - mean) for query in own) / len(own)
        logits = [mean @ key * states.scaling + key @ covariance @ key * states.scaling**2 / 2 for key in own_keys]
        expected[h] = torch.exp(torch.stack(logits))
        expected[h] /= expected[h].sum()
    scores = over_groups(states, expected) * values.norm(dim=2)
    scores[:, :sinks] = math.inf
    return scores[:, :-1]


def best(scores, count):
    """The `count` best positions of one head, ties to the lower."""
    return sorted(range(len(scores)), key=lambda j: (-scores[j], j))[:count]


def keep_best(scores, n, budget):
    """The last W positions and the best others; of a budget up to W, the last `budget`."""
    window = n - scores.shape[1]
    recent = set(range(max(n - min(window, budget), 0), n))
    return [recent | set(best(head, max(budget - window, 0))) for head in scores.tolist()]


def keep_streamingllm(states, budget, *, sinks):
    n = states.keys.shape[2]
    order = [n - 1, *range(min(sinks, n - 1)), *range(n - 2, sinks - 1, -1)]
    return [set(order[:budget])] * states.keys.shape[1]


def keep_recent_and_heavy(received, budget, *, window, recent_fraction):
    """H2O's halves: as t grows, the recent_fraction * t latest and the (1 - recent_fraction) * t heaviest enter.

    Args:
        received: (G, n), window included.
        recent_fraction: exact, such as "1/2".
    """
    n, share = received.shape[1], Fraction(recent_fraction)
    if budget <= window:
        return keep_best(received[:, : n - window], n, budget)
    steps = {Fraction(k) / part for k in range(1, n + 1) for part in (share, 1 - share) if part}
    kept = []
    for head in received.tolist():
        heaviest = best(head, n)
        positions = list(range(n - window, n))
        for t in sorted(steps):
            recent = range(n - min(int(share * t), n), n)
            positions += sorted({*recent, *heaviest[: int((1 - share) * t)]} - set(positions))
        kept.append(set(positions[:budget]))
    return kept


def heads_of_best(scores):
    """The KV head of each score of a layer, best first; ties: lower position, then lower head."""
    G, m = scores.shape
    entries = [(-scores[h, j].item(), j, h) for h in range(G) for j in range(m)]
    return [h for _, _, h in sorted(entries)]


def shares(best_heads, slots, G, floor):
    """AdaKV's real-valued share of each head in the first `slots` slots of a layer."""
    return [(1 - Fraction(floor)) * best_heads[:slots].count(h) + Fraction(floor) * slots / G for h in range(G)]


def largest_remainder(parts):
    """Whole numbers of the same sum, each a part rounded down or up."""
    counts = [int(part) for part in parts]
    by_remainder = sorted(range(len(parts)), key=lambda h: (counts[h] - parts[h], h))
    for h in by_remainder[: int(sum(parts)) - sum(counts)]:
        counts[h] += 1
    return counts


def slots_in_turn(scores, floor):
    """The KV heads of AdaKV's slots, in an order whose first G * (b - W) give each head its count at budget b."""
    G, m = scores.shape
    best_heads, turns = heads_of_best(scores), []
    for each in range(1, m + 1):
        counts = largest_remainder(shares(best_heads, G * each, G, floor))
        turns += [h for h in range(G) for _ in range(counts[h] - turns.count(h))]
    return turns


def keep_adakv(scores, n, budget, turns):
    """Each head's window and as many of its best as it has slots."""
    G, m = scores.shape
    window = n - m
    counts = [turns[: G * max(budget - window, 0)].count(h) for h in range(G)]
    recent = set(range(max(n - min(window, budget), 0), n))
    return [recent | set(best(head, count)) for head, count in zip(scores.tolist(), counts, strict=True)]
