"""The folder of the samplers alone is an OptunaHub package: loaded from a registry, where there is no mosaic_opt."""

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mosaic_opt import samplers

FOLDER = Path(samplers.__file__).parent
README = (FOLDER / "README.md").read_text()

# arguments: the registry, the script to run; stands in for `optunahub`, so that neither it nor a network is needed
RUNNER = """
import runpy, sys, types
from importlib.util import module_from_spec, spec_from_file_location

def load_module(package):
    name = "optunahub_registry.package." + package.replace("/", ".")
    spec = spec_from_file_location(name, f"{sys.argv[1]}/{package}/__init__.py")
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

sys.modules["mosaic_opt"] = None  # wherever it is installed, it cannot be imported
try:
    import mosaic_opt.samplers
except ModuleNotFoundError:
    pass
else:
    sys.exit("mosaic_opt must not be importable here")
hub = sys.modules["optunahub"] = types.ModuleType("optunahub")
hub.load_module = load_module
runpy.run_path(sys.argv[2], run_name="__main__")
"""


def run_alone(registry: Path, script: Path) -> str:
    """What a script prints that knows the samplers from a registry only."""
    shutil.copytree(FOLDER, registry / "samplers" / "mosaic", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-I", "-c", RUNNER, str(registry), str(script)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=registry, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_example_beats_uniform_allocations(tmp_path):
    printed = run_alone(tmp_path, tmp_path / "samplers" / "mosaic" / "example.py").splitlines()
    uniform, found = (re.findall(r"(\d+) -> ([\d.]+)", line) for line in printed[1:])
    # at a quarter of the memory, twice as good
    assert max(float(score) for budget, score in found if int(budget) <= 64) > 2 * float(dict(uniform)["64"])


def test_example_of_the_readme(tmp_path):
    script = tmp_path / "snippet.py"
    script.write_text(README.split("## Example")[1].split("```python\n")[1].split("```")[0])
    assert eval(run_alone(tmp_path, script))


def test_front_matter_is_what_the_registry_asks_for():
    header = yaml.safe_load(README.split("---\n")[1])
    assert README.startswith("---\n")
    assert set(header) == {"author", "title", "description", "tags", "optuna_versions", "license"}
    lists = {"tags", "optuna_versions"}
    assert all(isinstance(value, list if key in lists else str) for key, value in header.items())
    assert all(isinstance(item, str) for key in lists for item in header[key])
    assert "sampler" in header["tags"]
    assert header["license"] == (FOLDER / "LICENSE").read_text().splitlines()[0] == "MIT License"


def test_sections_in_order():
    sections = re.findall(r"^## (.*)", README, flags=re.MULTILINE)
    assert sections == ["Abstract", "APIs", "Installation", "Example", "Others"]


@pytest.mark.parametrize("name", samplers.__all__)
def test_readme_has_the_signature_and_explains_every_argument(name):
    section = README.split(f"### `{name}`")[1].split("\n## ")[0].split("\n### ")[0]
    for argument in inspect.signature(getattr(samplers, name)).parameters.values():
        assert re.search(rf"^- `{argument.name}`: ", section, flags=re.MULTILINE)
        default = "" if argument.default is argument.empty else f" = {argument.default}"
        assert re.search(rf"{argument.name}: [^=\n]*?{re.escape(default)}[,)]", section)
