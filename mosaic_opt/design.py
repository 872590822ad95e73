"""The first points of stages 1 and 4, before a sampler proposes: lists of (origin, parameters)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial
from scipy.stats import qmc

from mosaic_opt import allocation as allocations
from mosaic_opt.allocation import Allocation
from mosaic_opt.objective import LevelObjective, WeightObjective, by_score, parameter_names
from mosaic_opt.samplers.surrogate import Surrogate, knapsack_path

LEARNED_SHAPES = 8  # allocations that stage 1's surrogate gives a refinement
LEARNED_STEP = 8  # tokens, their resolution
CUBE_SEEDS = 4  # Latin-hypercube samples that seed a refinement

Design = list[tuple[str, dict[str, Any]]]


def initial_design(objective: LevelObjective, *, trials: int, seed: int) -> Design:
    """Stage 1's first points: uniform at every level, then Latin-hypercube samples over a range of means.

    Args:
        objective: knows layers and levels.
        trials: completed trials wanted in the end; the design takes a quarter of them, at most 64.
        seed: of the samples.

    Returns:
        (origin, parameters) of each point.
    """
    count, layers = len(objective.levels), objective.layers
    ladder = [("ladder", objective.encode([index] * layers)) for index in range(count)]
    samples = max(0, min(64, trials // 4) - count)
    if not samples:
        return ladder
    cube = qmc.LatinHypercube(d=layers, rng=np.random.default_rng(seed)).random(samples)
    skew = np.linspace(0.5, 2.0, samples)[:, None]  # from rich to poor allocations
    indices = np.minimum((cube**skew * count).astype(int), count - 1)
    return ladder + [("lhs", objective.encode(row)) for row in indices]


def refinement_design(
    objective: WeightObjective,
    *,
    rescaled: Allocation,
    shapes: Sequence[Allocation],
    trials: Sequence[FrozenTrial],
    window: int,
    seed: int,
) -> Design:
    """Stage 4's first points, each allocation once: what is known to be good, what is learned, and samples.

    Args:
        objective: knows layers, budget, floor and cap.
        rescaled: the winner at this budget, which comes first; uniform and pyramid follow.
        shapes: further allocations of this mean budget, such as the front's.
        trials: stage 1's completed trials, at least one: a surrogate of theirs gives allocations, too.
        window: of the eviction method, in tokens.
        seed: of the surrogate's bootstraps and of the Latin-hypercube samples.
    """
    layers, budget = objective.layers, objective.budget
    bounds = {"window": window, "floor": objective.floor, "cap": objective.cap}
    pyramid = allocations.pyramid(layers, budget, **bounds)
    heuristic = [rescaled, allocations.uniform(layers, budget), pyramid, *shapes]
    learned = learned_shapes(trials, budget, seed=seed, **bounds)
    origins = {**dict.fromkeys(learned, "surrogate"), **dict.fromkeys(heuristic, "heuristic")}
    seeds = [(origins[made], objective.encode(made)) for made in dict.fromkeys([*heuristic, *learned])]
    cube = qmc.LatinHypercube(d=layers, rng=np.random.default_rng([seed, budget])).random(CUBE_SEEDS)
    names = parameter_names("weight", layers)
    return seeds + [("lhs", dict(zip(names, row.tolist(), strict=True))) for row in cube]


def learned_shapes(
    trials: Sequence[FrozenTrial], budget: int, *, seed: int, window: int, floor: int, cap: int
) -> list[Allocation]:
    """Allocations of one mean budget that a surrogate of the log-likelihood takes for best.

    Each is the greedy knapsack (LEARNED_STEP tokens at a time) on one bootstrap of the surrogate.

    Args:
        trials: measured allocations of any budgets, at least one.
        budget: the mean of the shapes, in tokens.
        seed: of the bootstraps.
        window, floor, cap: see `Allocation.rescale`.
    """
    budgets = np.array([trial.user_attrs["budgets"] for trial in trials], dtype=float)
    score, likelihood = np.array([by_score(trial) for trial in trials], dtype=float).T
    rng = np.random.default_rng([seed, budget])
    tokens = np.arange(floor, cap + 1, LEARNED_STEP)
    table = np.tile(tokens.astype(float), (budgets.shape[1], 1))
    shapes = []
    for _ in range(LEARNED_SHAPES):
        surrogate = Surrogate(budgets, likelihood, score, rng)
        path = tokens[knapsack_path(surrogate.gains(table), table)]
        nearest = path[np.abs(path.mean(axis=1) - budget).argmin()]
        shapes.append(Allocation(nearest.tolist()).rescale(budget, window=window, floor=floor, cap=cap))
    return shapes
