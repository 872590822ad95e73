"""Differential evolution over a box (Storn and Price 1997, current-to-best/1/bin), vectorised."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .box import Box

Floats = npt.NDArray[np.float64]


def maximise(
    function: Callable[[Floats], Floats],
    box: Box,
    initial: Floats,
    rng: np.random.Generator,
    *,
    generations: int = 12,
) -> tuple[Floats, Floats]:
    """All points visited and their values, best first, equal points once.

    `function` maps snapped units (n, d) to values (n,) and is called generations + 1 times with the
    population's size, the number of rows of `initial` (at least 4). Equal values keep the order of the visit.
    """
    if len(initial) < 4:
        raise ValueError(f"initial must have at least 4 rows, got {len(initial)}")
    if generations < 0:
        raise ValueError(f"generations must be at least 0, got {generations}")
    population = box.snap(initial)
    fitness = function(population)
    points, values = [population], [fitness]
    for _ in range(generations):
        trials = _trials(population, fitness, box, rng)
        trial_fitness = function(trials)
        better = trial_fitness >= fitness
        population = np.where(better[:, None], trials, population)
        fitness = np.where(better, trial_fitness, fitness)
        points.append(trials)
        values.append(trial_fitness)
    return _best_first(np.concatenate(points), np.concatenate(values))


def _trials(population: Floats, fitness: Floats, box: Box, rng: np.random.Generator) -> Floats:
    """Trial points (n, d): a step towards a good member plus a difference of two, then crossover."""
    n, d = population.shape
    leaders = np.argsort(-fitness, kind="stable")[: max(1, n // 8)]
    leader = population[leaders[rng.integers(len(leaders), size=n)]]
    first, second = population[rng.integers(n, size=n)], population[rng.integers(n, size=n)]
    scale = rng.uniform(0.3, 0.9, size=(n, 1))
    mutant = population + scale * (leader - population) + scale * (first - second)
    # differences of category indices mean nothing: nominal columns copy a leader or draw any choice
    mutant = np.where(box.nominal, np.where(rng.random((n, d)) < 0.8, leader, rng.random((n, d))), mutant)
    crossed = rng.random((n, d)) < rng.uniform(0.1, 0.9, size=(n, 1))
    crossed[np.arange(n), rng.integers(d, size=n)] = True
    return box.snap(np.where(crossed, _reflected(mutant), population))


def _reflected(units: Floats) -> Floats:
    """Units outside 0..1 mirrored at the border: clipping would crowd the corners of the box."""
    return 1.0 - np.abs(1.0 - np.abs(units) % 2.0)


def _best_first(points: Floats, values: Floats) -> tuple[Floats, Floats]:
    _, first = np.unique(points, axis=0, return_index=True)
    first.sort()
    order = first[np.argsort(-values[first], kind="stable")]
    return points[order], values[order]
