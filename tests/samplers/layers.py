"""A study as the search makes it: levels of layers decode to budgets, mean budget against a score with a signal."""

import numpy as np
import optuna
import sqlalchemy
from optuna.distributions import IntDistribution
from optuna.storages import RDBStorage
from optuna.trial import create_trial

from mosaic_opt.samplers import MosaicSampler
from mosaic_opt.samplers.space import Space

optuna.logging.set_verbosity(optuna.logging.ERROR)

BUDGETS = [32.0, 64.0, 96.0, 128.0, 192.0, 256.0, 512.0]


def space(layers=30, levels=7):
    return {f"layer_{i:02d}": IntDistribution(0, levels - 1) for i in range(layers)}


def decode(parameters):
    return [BUDGETS[level] for level in parameters.values()]


def mean_budget(parameters):
    return float(np.mean(decode(parameters)))


def likelihood(parameters):
    weights = np.random.default_rng(0).lognormal(0, 1, len(parameters))
    return float(((1 - np.exp(-np.array(decode(parameters)) / 120)) * weights).sum() / weights.sum())


def score(parameters):
    return round(likelihood(parameters) ** 2, 2)


def storage(path):
    """Without waiting for the disk at every commit, which would take most of the time."""
    opened = RDBStorage(f"sqlite:///{path}", engine_kwargs={"connect_args": {"timeout": 60}})
    sqlalchemy.event.listen(opened.engine, "connect", lambda raw, _: raw.execute("PRAGMA synchronous=OFF"))
    opened.engine.dispose()
    return opened


def sampler(distributions, **arguments):
    arguments = {
        "seed": 0,
        "decode": decode,
        "known_objective": mean_budget,
        "signal": "likelihood",
        "search_space": distributions,
        **arguments,
    }
    return MosaicSampler(**arguments)


def study(distributions, *, directions=("minimize", "maximize"), **arguments):
    return optuna.create_study(directions=list(directions), sampler=sampler(distributions, **arguments))


def finished(parameters, distributions, *, values=None, likely=None, **arguments):
    """A complete trial; values default to mean budget and score."""
    return create_trial(
        params=parameters,
        distributions=distributions,
        values=[mean_budget(parameters), score(parameters)] if values is None else values,
        user_attrs={"likelihood": likelihood(parameters) if likely is None else likely},
        **arguments,
    )


def configurations(distributions, count, seed=0):
    """Random parameters, `count` of them."""
    box = Space(distributions)
    return box.parameters(box.box.sample(count, np.random.default_rng(seed)))


def fill(target, distributions, count, seed=0):
    target.add_trials(finished(p, distributions) for p in configurations(distributions, count, seed))


def apart(distributions, proposals):
    """Least mean difference in units between two of the proposals."""
    units, kept = Space(distributions).units(proposals)
    assert len(kept) == len(proposals)
    distances = np.abs(units[:, None] - units[None]).mean(axis=2)
    return distances[np.triu_indices(len(units), 1)].min()
