"""How small can a cache be? Twelve layers share memory; a few need much of it, most next to none.

Every trial chooses one budget for each layer. The mean budget shall be small and the share of twenty questions
that is answered large. Questions fail until all layers together have enough, so single parameters hardly show in
the score; in the smooth `log_quality` beside it they do.
"""

import math
from typing import Any

import optuna
import optunahub

LEVELS = (16, 32, 64, 128, 256, 512)
NEEDS = (4, 6, 90, 5, 8, 160, 4, 7, 40, 5, 6, 4)  # one a layer; the search does not know them
QUESTIONS = 20


def decode(params: dict[str, Any]) -> list[int]:
    """The budgets that a trial's parameters stand for."""
    return [LEVELS[params[f"layer_{i:02d}"]] for i in range(len(NEEDS))]


def mean_budget(params: dict[str, Any]) -> float:
    """Objective 0, which needs no evaluation."""
    return sum(decode(params)) / len(NEEDS)


def log_quality(budgets: list[int]) -> float:
    """0 where every layer has all it can use, lower otherwise."""
    return sum(math.log1p(-math.exp(-budget / need)) for budget, need in zip(budgets, NEEDS, strict=True))


def score(budgets: list[int]) -> float:
    """The share of questions answered; each is harder than the one before."""
    return math.floor(math.exp(log_quality(budgets)) * QUESTIONS + 0.5) / QUESTIONS


def objective(trial: optuna.Trial) -> tuple[float, float]:
    """Suggest, evaluate, and store the signal beside the score."""
    params = {f"layer_{i:02d}": trial.suggest_int(f"layer_{i:02d}", 0, len(LEVELS) - 1) for i in range(len(NEEDS))}
    budgets = decode(params)
    trial.set_user_attr("log_quality", log_quality(budgets))
    return mean_budget(params), score(budgets)


def line(points: list[tuple[float, float]]) -> str:
    """Pairs of mean budget and score, to print."""
    return "  ".join(f"{budget:.0f} -> {share:.2f}" for budget, share in points)


if __name__ == "__main__":
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    mosaic = optunahub.load_module("samplers/mosaic")
    sampler = mosaic.MosaicSampler(seed=0, decode=decode, known_objective=mean_budget, signal="log_quality")
    study = optuna.create_study(directions=["minimize", "maximize"], sampler=sampler)
    study.optimize(objective, n_trials=100)
    front = sorted({(trial.values[0], trial.values[1]) for trial in study.best_trials})
    print("mean budget -> share of questions answered")
    print("uniform:", line([(level, score([level] * len(NEEDS))) for level in LEVELS]))
    print("found:  ", line(front))
