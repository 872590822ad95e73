"""What the README says to do, done as it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BEFORE = """
from mosaic_opt.model import ModelSource

source = ModelSource(name="random")
model, encoded = source.load(), source.tokenizer("one two three " * 40, return_tensors="pt")
inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
"""
AFTER = """
print(output.shape[1] - inputs["input_ids"].shape[1] <= 64, [layer[0][0] for layer in eviction.report().lengths])
"""


def block(heading):
    """The first Python block of a section of the README."""
    section = (ROOT / "README.md").read_text().split(f"\n## {heading}\n")[1]
    return re.search(r"```python\n(.*?)```", section, re.S)[1]


@pytest.fixture(params=["this environment", pytest.param("a fresh one", marks=pytest.mark.slow)])
def python(request, tmp_path):
    """An interpreter that has the package; nothing of this checkout is on the fresh one's path."""
    if request.param == "this environment":
        return sys.executable
    made = tmp_path / "venv/bin/python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run([made, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", ROOT], check=True)
    return str(made)


def test_from_a_search_to_a_live_model_in_three_lines(python, tmp_path):
    code = block("On a live model")
    assert len([line for line in code.splitlines() if line and "print" not in line]) == 3

    def said(*arguments):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(
            [python, *arguments], cwd=tmp_path, capture_output=True, text=True, env=environment, check=False
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    small = ["calibration=2", "selection=2", "test=2", "trials=4", "refine_trials=1", "levels=[32,64,128,256]"]
    said("-m", "mosaic_opt", "search", "study=NAME", "model=random", "tokens=900", "budgets=[128]", *small)
    *report, shown = said("-c", BEFORE + code + AFTER).splitlines()
    assert "kv_bytes" in report[0]
    assert shown.startswith("True [")
