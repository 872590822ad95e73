"""An Optuna search space as a box, and its rows as Optuna parameters."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.search_space import intersection_search_space
from optuna.trial import FrozenTrial

from .box import Box

Floats = npt.NDArray[np.float64]


class Space:
    """Joint space of Int, Float and Categorical distributions; columns in the order of the names."""

    def __init__(self, distributions: Mapping[str, BaseDistribution]) -> None:
        if not distributions:
            raise ValueError("distributions must hold at least one parameter, got none")
        self.distributions = dict(sorted(distributions.items()))
        bounds = [_bounds(name, distribution) for name, distribution in self.distributions.items()]
        low, high, step, log, nominal = zip(*bounds, strict=True)
        self.box = Box(
            np.array(low, float),
            np.array(high, float),
            np.array(step, float),
            np.array(log),
            np.array(nominal),
        )
        self._categorical = [
            (j, d) for j, d in enumerate(self.distributions.values()) if isinstance(d, CategoricalDistribution)
        ]
        self._converters = [_converter(distribution) for distribution in self.distributions.values()]

    def pinned(self, parameters: Mapping[str, Any]) -> "Space":
        """This space where the parameters given stay at their values, if these lie in their distributions."""
        values = np.full(self.box.dimension, np.nan)
        for j, (name, distribution) in enumerate(self.distributions.items()):
            with suppress(KeyError, TypeError, ValueError):
                value = distribution.to_internal_repr(parameters[name])
                values[j] = value if distribution._contains(value) else np.nan
        if np.isnan(values).all():
            return self
        space = copy(self)
        units = self.box.snap(self.box.units(values))
        space.box = replace(self.box, pinned=np.where(np.isnan(values), np.nan, units))
        return space

    def parameters(self, units: Floats) -> list[dict[str, Any]]:
        """One dict of plain Python values for every row of units (n, d)."""
        rows = self.box.values(units).tolist()
        names, converters = list(self.distributions), self._converters
        return [{k: f(v) for k, f, v in zip(names, converters, row, strict=True)} for row in rows]

    def units(self, parameters: Sequence[Mapping[str, Any]]) -> tuple[Floats, list[int]]:
        """Snapped units (k, d) and indices of the dicts that hold every parameter inside its bounds."""
        rows, index = [], []
        for i, configuration in enumerate(parameters):
            row = self._row(configuration)
            if row is not None:
                rows.append(row)
                index.append(i)
        values = np.array(rows, dtype=float).reshape(len(rows), self.box.dimension)
        inside = np.all((values >= self.box.low) & (values <= self.box.high), axis=1)
        return self.box.snap(self.box.units(values[inside])), [
            i for i, kept in zip(index, inside, strict=True) if kept
        ]

    def _row(self, configuration: Mapping[str, Any]) -> list[float] | None:
        """Optuna's internal values, or None if a parameter is missing, no number or not one of the choices."""
        try:
            row = [configuration[name] for name in self.distributions]
            for j, distribution in self._categorical:
                row[j] = distribution.to_internal_repr(row[j])
        except (KeyError, TypeError, ValueError):
            return None
        return row if all(isinstance(value, Real) for value in row) else None

    def check(self, parameters: Mapping[str, Any]) -> None:
        """Raise RuntimeError where a value lies outside its distribution; Optuna would silently redraw."""
        for name, distribution in self.distributions.items():
            if not distribution._contains(distribution.to_internal_repr(parameters[name])):
                raise RuntimeError(f"{name} must lie in {distribution}, the sampler made {parameters[name]!r}")


def shared_space(trials: Sequence[FrozenTrial]) -> dict[str, BaseDistribution]:
    """What all trials have in common, by name; as Optuna's intersection, at once where all have the same space."""
    if not trials:
        return {}
    first = {name: (type(d), vars(d)) for name, d in trials[0].distributions.items()}
    if all({name: (type(d), vars(d)) for name, d in t.distributions.items()} == first for t in trials):
        return dict(sorted(trials[0].distributions.items()))
    return intersection_search_space(list(trials))


def _bounds(name: str, distribution: BaseDistribution) -> tuple[float, float, float, bool, bool]:
    """Low, high, step (0 = continuous), log, nominal of one distribution."""
    if isinstance(distribution, CategoricalDistribution):
        return 0.0, len(distribution.choices) - 1.0, 1.0, False, True
    if isinstance(distribution, IntDistribution | FloatDistribution):
        return distribution.low, distribution.high, distribution.step or 0.0, distribution.log, False
    raise ValueError(f"{name} must have an Int, Float or Categorical distribution, got {distribution}")


def _converter(distribution: BaseDistribution) -> Callable[[float], Any]:
    if isinstance(distribution, CategoricalDistribution):
        choices = distribution.choices
        return lambda value: choices[int(value)]
    return int if isinstance(distribution, IntDistribution) else float
