"""The command line: bad input, a whole search, resuming after kill -9, configuration files."""

import contextlib
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import optuna
import pytest
import yaml
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import instantiate
from optuna.trial import TrialState
from transformers import AutoModelForCausalLM, DeepseekV3Config, StableLmConfig

from mosaic_opt import __main__ as command
from mosaic_opt.allocation import Allocation
from mosaic_opt.eviction import apply, kv_shape
from mosaic_opt.model import ModelSource
from mosaic_opt.objective import measured
from mosaic_opt.settings import configured_task, setting
from mosaic_opt.storage import open_storage
from mosaic_opt.study import completed
from tests.postgres import PASSWORD

CONF = Path(__file__).parents[1] / "conf"
VERBS = ("search", "worker", "studies", "evaluate", "tasks", "baseline", "generate", "bench", "report", "compare",
         "export", "plan", "dashboard")  # fmt: skip
GROUPS = ("model", "task", "eviction", "sampler", "storage")
SMALL = ["model=random", "tokens=900", "calibration=3", "selection=3", "test=4", "levels=[32,64,128,256]"]


@pytest.fixture(autouse=True)
def _own_signal_handler():
    """`main` takes SIGTERM over; give it back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run(capfd, *arguments, stdin=b""):
    """Exit code, stdout and stderr of `mosaic` with these arguments, in this process."""
    sys.stdin = SimpleNamespace(buffer=io.BytesIO(stdin), isatty=lambda: False)
    GlobalHydra.instance().clear()
    before, sys.argv = sys.argv, ["mosaic", *map(str, arguments)]
    try:
        command.main()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv, sys.stdin = before, sys.__stdin__
    captured = capfd.readouterr()
    return code, captured.out, captured.err


def spawn(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "mosaic_opt", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def test_help_lists_every_verb_with_an_example(capfd):
    code, out, _ = run(capfd, "--help")
    assert code == 0
    for verb in VERBS:
        assert f"mosaic {verb} " in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["serch"], "unknown verb 'serch'"),
        (["search", "trails=3"], "trails"),
        (["search", "model=nosuch"], "nosuch"),
        (["search", "trials=-1"], "trials must be a whole number of at least 1; got -1"),
        (["search", "trials=many"], "trials"),
        (["search", "race=2"], "race must be true or false; got 2"),
        (["search", "levels=[32,9000]"], "levels must be between 1 and 650"),
        (["search", "levels=[64,32]"], "levels must be a rising list"),
        (["search", "budgets=[16,128]"], "budgets must be between 32 and 650 tokens"),
        (["search", "budgets=[]"], "budgets"),
        (["search", "model=custom", "model.name=./nowhere"], "model './nowhere'"),
        (["search", "model=custom", "model.name=/etc/hostname"], ".gguf"),
        (["search", "model=custom"], "model.name"),
        (["search", "model.dtype=int3"], "dtype"),
        (["search", "storage.url=sqlite:////proc/none/x.db"], "storage"),
        (["search", "output=/proc/none"], "/proc/none"),
        (["search", "study=a/b"], "study"),
        (["search", "task.new_tokens=0"], "new_tokens"),
        (["search", "tokens=20", "levels=[8]", "budgets=[8]", "eviction.window=8"], "tokens"),
        (["search", "eviction.kernel=2"], "kernel"),
        (["evaluate"], "allocation"),
        (["evaluate", "allocation=uniform:x"], "uniform"),
        (["evaluate", "allocation=[1,2]", "model=random"], "4 budgets"),
        (["evaluate", "allocation=uniform:64", "split=dev"], "split must be one of"),
        (["search", "model=random", "tokens=5000"], "exceed the model's context of 4096"),
        (["evaluate", "model=random", "tokens=5000", "allocation=uniform:64"], "exceed the model's context of 4096"),
        (["search", "task=mixture", "task.tasks=[niah_single2]"], "task must be one of niah_single_2, "),
        (["search", "task=niah_singl_2"], "task must be one of niah_single_2, "),
        (["search", "-m", "task=vt,niah_singl_2"], "task must be one of niah_single_2, "),
        (["search", "eviction=snap"], "eviction must be one of snapkv ...; got 'snap'"),
        (["search", "task=mixture", "task.tasks=[mixture]"], "no mixture"),
        (["search", "task=mixture", "task.tasks=[{task: vt, wrong: 1}]"], "vt must be given settings of its own"),
        (["search", "task=mixture", "task.protocol=both"], "protocol must be one of"),
        (["search", "task=mixture", "task.tasks=niah_single_2"], "task.tasks must be a list of at least one name"),
        (["search", "task=mixture", "calibration=3"], "count must be a multiple of 2"),
        (["search", "task=mixture", "task.tasks=[vt,vt]"], "different names"),
        (["search", "task=qasper", "task.path=nowhere"], "put rows there"),
        (["search", "task=file", "task.path=nowhere.jsonl"], "nowhere.jsonl"),
        (["search", "task=lcc", "task.protocol=both"], "protocol must be one of question-aware"),
        (["search", "prefill_for=snapkv"], "prefill_for must be a list of names"),
        (["search", "prefill_for=[snap]"], "eviction must be one of snapkv"),
        (["baseline", "tasks=[niah]"], "task must be one of niah"),
        (["baseline", "tasks=[]"], "tasks must be"),
        (["baseline", "tasks=vt"], "tasks must be a list of at least one name"),
        (["baseline", "budgets=[0]"], "budgets must be a whole number between 1"),
        (["baseline", "budgets=128"], "budgets must be a list"),
        (["baseline", "split=all"], "split must be one of"),
        (["baseline", "examples=0"], "examples"),
        (["baseline", "model=random", "tasks=[vt]", "tokens=100"], "tokens must be at least"),
        (["baseline", "model=random", "table=/proc/none/t.md"], "table"),
        (["baseline", "model=random", "table=/tmp"], "table must be a file"),
        (["baseline", "tasks=[vt,vt]"], "different names"),
        (["baseline", "model=random", "tasks=[vt]", "tokens=900", "cap=100", "budgets=[128]"], "at most cap=100"),
        (["tasks", "tokens=x"], "tokens"),
        (["dashboard", "port=0"], "port"),
        (["dashboard", "port=true"], "port"),
        (["search", "tokens=abc"], "tokens"),
        (["search", "tokens=null"], "tokens"),
        (["search", "tokens=900.5"], "tokens"),
        (["search", "tokens=1000000000"], "tokens"),
        (["search", "cap=0"], "cap"),
        (["search", "cap=abc"], "cap"),
        (["search", "seed=-1"], "seed"),
        (["search", "batch_size=0"], "batch_size"),
        (["search", "output="], "output"),
        (["search", "output=/etc/hostname"], "/etc/hostname"),
        (["search", "output=null"], "output"),
        (["search", "storage.url=null"], "storage"),
        (["search", "~trials"], "trials"),
        (["search", "=1"], "override"),
        (["search", "model=random", "tokens=900", "sampler.seed=abc"], "sampler"),
        (["search", "model=random", "tokens=900", "+sampler.foo=1"], "sampler"),
        (["search", "model=random", "tokens=900", "model.device=cuda:99"], "cuda:99"),
        (["search", "model=random", "tokens=900", "cap=64"], "levels"),
        (["search", "eviction.window=1.5"], "window"),
        (["evaluate", "allocation=uniform:64", "test=1.5"], "test"),
        (["evaluate", "allocation=uniform:64", "task.new_tokens=1.5"], "new_tokens"),
        (["evaluate", "allocation=uniform:64", "model=random", "tokens=900", "model.device=mps"], "mps"),
        (["evaluate", "allocation=uniform:128", "model=random", "tokens=900", "cap=64"], "cap=64"),
        (["evaluate", "allocation=uniform:64", "model=random", "prefill_for=[h3o]"], "h3o"),
        (["evaluate", "allocation=uniform:64", "model=random", "prefill_for=h2o"], "prefill_for"),
        (["evaluate", "allocation=uniform:64", "model=random", "host_gib=-1"], "host_gib"),
        (["search", "model=random", "tokens=900", "eviction=l2norm", "eviction.skip=[0]"], "skip"),
        (["search", "eviction=h3o"], "h3o"),
        (["search", "eviction=adakv", "eviction.floor=2"], "floor"),
        (["search", "eviction=h2o", "eviction.recent_fraction=half"], "recent_fraction"),
        (["search", "eviction=l2norm", "eviction.skip=1"], "skip"),
        (["search", "eviction=expected_attention", "eviction.queries=1"], "queries"),
        (["evaluate", "allocation=uniform:64", "model=random", "eviction=l2norm", "eviction.skip=[99]"], "skip"),
        (
            [
                "evaluate",
                "allocation=uniform:64",
                "model=random",
                "tokens=900",
                "eviction=l2norm",
                "eviction.skip=[1]",
                "cap=100",
            ],
            "cap",
        ),
        (["evaluate", "allocation=uniform:99999999999999999999", "model=random"], "allocation"),
        (["evaluate", "allocation=uniform:64", "model.device=3"], "device"),
        (["generate", "model=random", "allocation=uniform:64", "eviction=l2norm", "eviction.skip=[99]"], "skip"),
        (["generate"], "allocation is required"),
        (["generate", "model=random", "allocation=[64]"], "4 budgets"),
        (["generate", "model=random", "allocation=uniform:64", "new_tokens=0"], "new_tokens"),
        (["generate", "model=random", "allocation=uniform:64", "prompt_file=nowhere.txt"], "nowhere.txt"),
        (["generate", "model=random", "allocation=uniform:64"], "standard input holds no prompt"),
        (["generate", "model=random", "allocation=uniform:64", "chat=perhaps"], "chat"),
        (["evaluate", "allocation=uniform:64", "eviction.window=8"], "eviction must be chosen"),
        (["compare", "allocations=[[1,2],uniform:64]", "+eviction.window=8"], "eviction must be chosen"),
        (["compare"], "allocations is required"),
        (["compare", "allocations=[uniform:64]"], "at least two"),
        (["compare", "allocations=a.json"], "at least two"),
        (["compare", "allocations=[uniform:64,uniform:32]"], "says how many layers"),
        (["compare", "allocations=[[1,2],[1,2,3]]"], "must all be of 2 layers"),
        (["compare", "allocations=[[1,2],uniform:64]", "model=random"], "must have 4 budgets"),
        (["compare", "allocations=[[1,2],uniform:64]", "split=dev"], "split must be one of"),
        (["compare", "allocations=[[1,2],nowhere.json]"], "nowhere.json"),
        (["compare", "allocations=[[1,2,3,900],uniform:64]", "model=random", "tokens=900", "cap=64"], "cap=64"),
        (["plan", "context=0"], "context"),
        (["plan", "memory=2GX"], "memory must be bytes"),
        (["plan", "model=custom", "model.name=nowhere.json"], "neither"),
        (["plan", "model=llama3_8b", "memory=100KiB"], "memory must be at least 131072 bytes"),
        (["plan", "model=llama3_8b", "model.known.num_hidden_layers=1000000000"], "num_hidden_layers must be"),
        (["plan", "model=llama3_8b", "model.known.num_key_value_heads=-8"], "num_key_value_heads must be"),
        (["plan", "model=qwen3_8b", "model.known.head_dim=-4"], "head_dim must be"),
        (["plan", "model=llama3_8b", "model.known.num_hidden_layers=x"], "num_hidden_layers must be"),
        (["plan", "model=llama3_8b", "model.known=5"], "known must be fields"),
        (["plan", "result=nowhere.json"], "result must be a result.json"),
        (["bench"], "allocation"),
        (["bench", "model=random", "allocation=uniform:64", "lengths=512"], "lengths"),
        (["bench", "model=random", "allocation=uniform:64", "lengths=[]"], "lengths"),
        (["bench", "model=random", "allocation=uniform:64", "batches=[0]"], "batches"),
        (["bench", "model=random", "allocation=uniform:64", "repeats=0"], "repeats"),
        (["bench", "model=random", "allocation=uniform:64", "lengths=[5000]"], "context of 4096"),
        (["bench", "model=random", "allocation=uniform:64", "model.device=cuda:99"], "cuda:99"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capfd, tmp_path, monkeypatch, arguments, named):
    monkeypatch.setattr("mosaic_opt.model.ModelSource.load", lambda self: pytest.fail("a model was loaded"))
    own = ("output=", "serch", "=", "tasks", "generate", "bench", "plan")
    home = [] if any(a.startswith(own) for a in arguments if not a.startswith("tasks=")) else [f"output={tmp_path}"]
    code, out, err = run(capfd, *arguments, *home)
    assert code == 2
    assert out == ""
    lines = [line for line in err.splitlines() if line]
    assert len(lines) == 1
    assert lines[0].startswith("mosaic: ")
    assert named in lines[0]


def test_a_whole_search_then_its_result_at_once_then_a_mismatch(capfd, tmp_path, monkeypatch):
    arguments = [*SMALL, f"output={tmp_path}", "study=one", "budgets=[48,96]", "trials=14", "refine_trials=5"]
    code, out, err = run(capfd, "search", *arguments)
    assert code == 0
    result = json.loads(out)
    assert json.loads((tmp_path / "results/one/result.json").read_text()) == result
    assert "mean budget" in err
    check_result(result, tmp_path)

    monkeypatch.setattr("mosaic_opt.stages.Search.__init__", lambda *a, **k: pytest.fail("searched again"))
    code, again, _ = run(capfd, "search", *arguments)
    assert (code, json.loads(again)) == (0, result)

    code, out, err = run(capfd, "search", *arguments, "seed=1")
    assert (code, out) == (2, "")
    assert "seed is 1, stored 0" in err


def check_result(result, folder):
    rows = {(row["budget"], row["allocation"]): row for row in result["rows"]}
    assert set(rows) == {(b, a) for b in (48, 96) for a in ("full", "uniform", "pyramid", "rescaled", "refined")}
    for (budget, name), row in rows.items():
        assert row["mean_budget"] == (900 if name == "full" else budget)
        assert row["interval"][0] <= row["gain"] <= row["interval"][1]
    assert result["trials"]["one"] == {"COMPLETE": 14}
    assert len(result["winner"]["budgets"]) == 4
    storage = open_storage(f"sqlite:///{folder}/mosaic.db")
    study = optuna.load_study(study_name="one", storage=storage)
    assert {"fingerprint", "plan", "versions", "stage", "metric", "protocol", "splits"} <= set(study.user_attrs)
    splits = study.user_attrs["splits"].values()
    assert len({example for split in splits for example in split}) == 3 + 3 + 4
    budgets = [tuple(trial.user_attrs["budgets"]) for trial in completed(study)]
    assert len(set(budgets)) == 14
    for trial in completed(study):
        assert set(trial.user_attrs["budgets"]) <= {32, 64, 128, 256}
        assert trial.user_attrs["origin"] in ("ladder", "lhs", "surrogate", "classifier", "random")
    selection = {
        tuple(t.user_attrs["budgets"]): measured(t)["score"]
        for t in completed(optuna.load_study(study_name="one-selection", storage=storage))
    }
    for budget in (48, 96):
        kept, refined = (rows[budget, name] for name in ("rescaled", "refined"))
        assert [row["selection_score"] for row in (kept, refined)] == [
            selection[tuple(row["budgets"])] for row in (kept, refined)
        ]
        gain = result["selection_gain"]["refined"][str(budget)]
        assert gain["measured"] == pytest.approx(refined["selection_score"] - kept["selection_score"])
        assert 0 <= gain["expected"] <= gain["measured"] + 1e-12
    refined = [name for name in result["trials"] if "-refine-" in name]
    for name in refined:
        for trial in completed(optuna.load_study(study_name=name, storage=storage)):
            assert sum(trial.user_attrs["budgets"]) == 4 * int(name.split("-")[2])


def test_a_raced_search_comes_to_its_result(capfd, tmp_path):
    """Three batches of one example: every trial is either measured to its end or raced, and all of them count."""
    arguments = [*SMALL, f"output={tmp_path}", "study=raced", "budgets=[48]", "trials=14", "refine_trials=5"]
    code, out, _ = run(capfd, "search", *arguments, "race=true", "batch_size=1")
    assert code == 0
    trials = json.loads(out)["trials"]
    assert trials["raced"].get("COMPLETE", 0) + trials["raced"].get("PRUNED", 0) == 14
    code, _, err = run(capfd, "search", *arguments, "batch_size=1")
    assert code == 2
    assert "race is False, stored True" in err


def test_tasks_are_listed_with_what_their_data_lacks(capfd, monkeypatch):
    monkeypatch.delenv("MOSAIC_LONGBENCH", raising=False)
    code, out, err = run(capfd, "tasks")
    assert code == 0
    rows = {row["task"]: row for row in json.loads(out)}
    assert set(rows) == {file.stem for file in (CONF / "task").glob("*.yaml")} - {"mixture"}
    assert "data/qasper.jsonl" in rows["qasper"]["missing"]
    assert rows["qasper"]["category"] == "single-document QA"
    assert rows["next_line"]["missing"] is None
    assert min(rows["next_line"]["examples"].values()) > 64
    assert all(row["category"] and row["new_tokens"] for row in rows.values())
    assert "niah_multivalue" in err
    code, out, _ = run(capfd, "tasks", "tokens=100")
    rows = {row["task"]: row for row in json.loads(out)}
    assert code == 0
    assert "tokens must be at least 128" in rows["next_line"]["missing"]


def test_tasks_over_rows_of_the_users(capfd, tmp_path, monkeypatch):
    """A file by one setting; LongBench's folder by its variable; both protocols; the result names the protocol."""
    rows = [
        {"context": f"Box {i} holds a pen. " * 30, "question": f"\nWhat does box {i} hold?", "answers": ["pen"]}
        for i in range(60)
    ]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = ["task=file", f"task.path={tmp_path}/own.jsonl", "task.metric=f1", "task.new_tokens=4"]
    for protocol in ("question-aware", "question-agnostic"):
        output = f"output={tmp_path}/{protocol}"
        arguments = [*SMALL, *data, "budgets=[64]", "trials=2", "refine_trials=0", output]
        code, out, err = run(capfd, "search", *arguments, f"task.protocol={protocol}")
        assert code == 0, err
        assert [json.loads(out)[key] for key in ("protocol", "allow_overlap")] == [protocol, False]
    code, _, err = run(capfd, "search", *SMALL, *data, "test=60", f"output={tmp_path}/few")
    assert code == 2
    assert "test must be from 1 to" in err
    arguments = [*SMALL, *data, "budgets=[64]", "trials=2", "refine_trials=0", "test=60", f"output={tmp_path}/all"]
    code, out, err = run(capfd, "search", *arguments, "task.allow_overlap=true")
    assert code == 0, err
    assert json.loads(out)["allow_overlap"] is True
    code, out, err = run(capfd, "evaluate", "model=random", *data, "allocation=uniform:64", f"output={tmp_path}/one",
                         "test=4", "task.protocol=question-agnostic")  # fmt: skip
    assert code == 0, err
    assert [json.loads(out)[key] for key in ("protocol", "allow_overlap")] == ["question-agnostic", False]
    (tmp_path / "own.jsonl").write_text(json.dumps(rows[0]) + "\n{broken\n")
    code, _, err = run(capfd, "search", *SMALL, *data, f"output={tmp_path}/broken")
    assert code == 2
    assert "own.jsonl, line 2" in err


def test_a_mixture_keeps_the_scores_of_its_tasks(capfd, tmp_path):
    tasks = "task.tasks=[niah_single_1,{task: next_line, new_tokens: 3}]"
    arguments = ["task=mixture", tasks, "task.protocol=question-agnostic", "calibration=4", "selection=4", "trials=3"]
    code, out, err = run(
        capfd, "search", *SMALL, *arguments, "budgets=[64]", "refine_trials=0", "study=m", f"output={tmp_path}"
    )
    assert code == 0, err
    result = json.loads(out)
    assert result["metric"] == "mean of string_match_all, code_similarity"
    assert result["protocol"] == "question-agnostic"
    for row in result["rows"]:
        assert row["score"] == pytest.approx(sum(row["task_scores"].values()) / 2)
    study = optuna.load_study(study_name="m", storage=open_storage(f"sqlite:///{tmp_path}/mosaic.db"))
    for trial in completed(study):
        scores = measured(trial)["task_scores"]
        assert set(scores) == {"niah_single_1", "next_line"}
        assert measured(trial)["score"] == pytest.approx(sum(scores.values()) / 2)


def test_baseline_measures_full_cache_and_uniform_on_several_tasks(capfd, tmp_path):
    arguments = ["model=random", "tasks=[niah_single_1,next_line]", "budgets=[64,2000]", "examples=3", "tokens=900"]
    code, out, err = run(capfd, "baseline", *arguments, f"output={tmp_path}", f"table={tmp_path}/table.md")
    assert code == 0, err
    rows = {row["task"]: row for row in json.loads(out)}
    assert set(rows) == {"niah_single_1", "next_line"}
    for row in rows.values():
        assert row["examples"] == 3
        assert row["uniform"]["2000"] == row["full"]  # a budget beyond the prompt evicts nothing
        assert row["headroom"]["2000"] == [0, 0, 0]
        assert row["headroom"]["64"][0] == pytest.approx(row["full"][0] - row["uniform"]["64"][0])
    table = (tmp_path / "table.md").read_text().splitlines()
    assert len(table) == 2 + 2 * 2
    assert table[0].startswith("| task | category |")
    assert rows["niah_single_1"]["mark"] == {"64": "floor", "2000": "floor"}  # random weights know no answer
    assert err.count("loading") == 1


def test_kill_9_at_a_random_moment_changes_nothing(tmp_path):
    """The same completed configurations, in the same proposals, as without the kill."""
    common = ["search", *SMALL, "study=k", "budgets=[64]", "trials=40", "refine_trials=3"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    first = spawn(*common, f"output={whole}")
    victim = spawn(*common, f"output={killed}")
    moment = random.randint(3, 30)  # how many completed trials the victim lives to see
    wait_for_trials(victim, killed, moment)
    time.sleep(random.random() / 10)
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    resumed = spawn(*common, f"output={killed}")
    for process in (first, resumed):
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        json.loads(out)
    studies = [
        optuna.load_study(study_name="k", storage=open_storage(f"sqlite:///{folder}/mosaic.db"))
        for folder in (whole, killed)
    ]
    sets = [{tuple(trial.user_attrs["budgets"]) for trial in completed(study)} for study in studies]
    assert len(sets[0]) == 40
    assert sets[0] == sets[1], f"killed after {moment} trials"
    assert not studies[1].get_trials(states=(TrialState.RUNNING,))
    assert len(studies[1].trials) <= 41
    results = [json.loads((folder / "results/k/result.json").read_text()) for folder in (whole, killed)]
    assert results[0]["rows"] == results[1]["rows"]


def wait_for_trials(process, folder, count):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        if (folder / "mosaic.db").exists():
            try:
                study = optuna.load_study(study_name="k", storage=open_storage(f"sqlite:///{folder}/mosaic.db"))
                if len(completed(study)) >= count:
                    return
            except (KeyError, ValueError):
                pass
        time.sleep(0.05)
    pytest.fail("the search did not get going")


def test_a_second_process_on_the_same_study_helps(capfd, tmp_path):
    arguments = ["search", *SMALL, f"output={tmp_path}", "study=k", "budgets=[64]", "trials=200", "refine_trials=4"]
    process = spawn(*arguments)
    wait_for_trials(process, tmp_path, 1)
    code, out, err = run(capfd, "worker", "study=k", f"output={tmp_path}")
    said, errors = process.communicate(timeout=300)
    assert (code, process.returncode) == (0, 0), err + errors
    assert json.loads(out)["rows"] == json.loads(said)["rows"]
    trials = optuna.load_study(study_name="k", storage=open_storage(f"sqlite:///{tmp_path}/mosaic.db")).trials
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 200
    assert len({tuple(trial.user_attrs["budgets"]) for trial in trials}) == 200
    assert len({trial.user_attrs["worker"][1] for trial in trials}) == 2


def test_an_interrupted_search_goes_on(tmp_path):
    arguments = ["search", *SMALL, f"output={tmp_path}", "study=k", "budgets=[64]", "trials=500", "workers=2"]
    process = spawn(*arguments)
    wait_for_trials(process, tmp_path, 3)
    while process.poll() is None:  # an interrupt can get lost in a library, as anybody at a keyboard knows
        process.send_signal(signal.SIGTERM)  # as Ctrl-C, which a process in the background may ignore
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
    _, said = process.communicate()
    assert process.returncode == 130, said
    assert "goes on from here" in said
    study = optuna.load_study(study_name="k", storage=open_storage(f"sqlite:///{tmp_path}/mosaic.db"))
    assert not study.get_trials(states=(TrialState.RUNNING,))


def test_studies_are_listed_copied_renamed_and_deleted(capfd, tmp_path):
    output = f"output={tmp_path}"
    assert run(capfd, "search", *SMALL, output, "study=k", "budgets=[64]", "trials=6", "refine_trials=2")[0] == 0
    code, out, err = run(capfd, "studies", output)
    (row,) = json.loads(out)
    assert (row["study"], row["stage"], row["done"], row["total"]) == ("k", "finished", 8, 8)
    assert (row["model"], row["task"], row["eviction"]) == ("random", "niah_single_2", "SnapKV")
    for arguments, code, message in [
        (["action=delete", "study=k"], 2, "force must be true"),  # nobody can be asked here
        (["action=copy", "study=k", "to=k", "force=true"], 2, "that no study has"),
        (["action=copy", "study=k", "to=z", "force=true"], 0, "copy study k to z"),
        (["action=rename", "study=z", "to=y", "force=true"], 0, "rename study z to y"),
        (["action=delete", "study=kk", "force=true"], 2, "study must be one of"),
        (["action=drop", "study=k"], 2, "action must be one of"),
        (["action=delete", "study=k", "force=true"], 0, "delete study k"),
    ]:
        found, _, err = run(capfd, "studies", output, *arguments)
        assert found == code, err
        assert message in err
    assert [row["study"] for row in json.loads(run(capfd, "studies", output)[1])] == ["y"]
    code, _, err = run(capfd, "search", *SMALL, output, "study=y", "budgets=[64]", "trials=6", "refine_trials=2")
    assert code == 0, err
    assert "prefill" not in err  # nothing is measured again
    assert len(optuna.get_all_study_names(open_storage(f"sqlite:///{tmp_path}/mosaic.db"))) == 4


@pytest.mark.parametrize("text", ["plain", "a b,c=d", "it's", "back\\", "\\'", "[x]", "{y: 1}", "öü"])
def test_a_setting_is_passed_on_as_it_is(text):
    (parsed,) = OverridesParser.create().parse_overrides([setting("output", text)])
    assert parsed.value() == text


def test_each_plan_of_a_study_keeps_its_own_result(capfd, tmp_path):
    common = ["search", *SMALL, f"output={tmp_path}", "study=k", "refine_trials=1"]
    plans = [
        ["budgets=[64]", "trials=4"],
        ["budgets=[64,96]", "trials=7"],
        ["budgets=[64]", "trials=7", "winner=paper"],
    ]
    results = [json.loads(run(capfd, *common, *plan)[1]) for plan in plans]
    for plan, result in zip(plans, results, strict=True):
        code, out, err = run(capfd, *common, *plan)
        assert (code, "prefill" in err) == (0, False)
        again = json.loads(out)
        assert {key: again[key] for key in again if key not in ("trials", "seconds")} == {
            key: result[key] for key in result if key not in ("trials", "seconds")
        }
        assert f"trials={again['config']['trials']}" in plan
        assert {row["budget"] for row in again["rows"]} == set(again["config"]["budgets"])
    code, _, err = run(capfd, "worker", f"output={tmp_path}", "study=k")
    assert code == 0, err
    (row,) = json.loads(run(capfd, "studies", f"output={tmp_path}")[1])
    assert (row["stage"], row["total"]) == ("finished", 8)


def test_studies_of_other_programs_are_listed(capfd, tmp_path):
    storage = open_storage(f"sqlite:///{tmp_path}/mosaic.db")
    for name, attributes in [
        ("[/bold]", {"stage": "search", "finished": ["x"]}),
        ("x", {"plan": [1], "plan:[1]": "text", "config": 3, "stage": ["search"]}),
        ("x-test", {"stage": "test"}),
    ]:
        study = optuna.create_study(study_name=name, storage=storage)
        study.optimize(lambda trial: trial.suggest_float("a", 0, 1), n_trials=1)
        for key, value in attributes.items():
            study.set_user_attr(key, value)
    code, out, err = run(capfd, "studies", f"output={tmp_path}")
    assert code == 0, err
    assert [(row["study"], row["stage"], row["done"]) for row in json.loads(out)] == [
        ("x", None, 2),
        ("[/bold]", None, 1),
    ]
    assert "[/bold]" in err
    code, _, err = run(capfd, "worker", f"output={tmp_path}", "study=x")
    assert code == 2
    assert "study must be one that `mosaic search` began; got 'x'" in err


def test_reports_and_what_they_lack(capfd, tmp_path):
    output = f"output={tmp_path}"
    code, out, err = run(capfd, "report", output)
    assert (code, out) == (2, "")
    assert "must hold a search" in err
    assert run(capfd, "search", *SMALL, output, "study=one", "budgets=[64]", "trials=6", "refine_trials=2")[0] == 0
    study = optuna.load_study(study_name="one", storage=open_storage(f"sqlite:///{tmp_path}/mosaic.db"))
    names = {meta.filename for meta in optuna.artifacts.get_all_artifact_meta(study)}
    assert {"result.json", "refined-64.json", "winner.json", "search.log", "front.png", "layers-64.png"} <= names
    assert "search: 6 of 6" in re.sub(" +", " ", (tmp_path / "results/one/search.log").read_text()).replace(" :", ":")
    code, out, err = run(capfd, "report", output, "study=on")
    assert (code, out) == (2, "")
    assert "study must be one of one" in err
    code, out, err = run(capfd, "report", output, "study=one")
    assert code == 0, err
    assert Path(out.strip()) == tmp_path / "reports/one/report.html"
    page = Path(out.strip()).read_text()
    assert "mosaic search model=random" in page
    assert "not come to its end" not in page


def test_what_a_search_found_lies_there_as_allocation_files(capfd, tmp_path):
    code, out, err = run(
        capfd, "search", *SMALL, f"output={tmp_path}", "study=one", "budgets=[64]", "trials=6", "refine_trials=2"
    )
    assert code == 0, err
    rows = {f"{row['allocation']}-{row['budget']}": row for row in json.loads(out)["rows"]}
    folder = tmp_path / "results/one/allocations"
    assert sorted(path.name for path in folder.iterdir()) == ["refined-64.json", "rescaled-64.json", "winner.json"]
    made = Allocation.load(folder / "refined-64.json")
    assert list(made.budgets) == rows["refined-64"]["budgets"]
    assert made.about["scores"]["test"]["score"] == rows["refined-64"]["score"]
    assert made.kv_bytes() == rows["refined-64"]["kv_bytes"]
    assert made.rescale(mean=80).mean == 80
    with apply(ModelSource(name="random").load(), made) as eviction:
        assert eviction.method.describe() == made.about["eviction"]
    code, out, err = run(
        capfd, "evaluate", *SMALL[:-1], f"output={tmp_path}", f"allocation={folder / 'refined-64.json'}"
    )
    assert code == 0, err
    assert json.loads(out)["score"] == rows["refined-64"]["score"]
    content = json.loads((folder / "winner.json").read_text())
    content["model"]["fingerprint"] = "other:float32"
    (tmp_path / "other.json").write_text(json.dumps(content))
    code, out, err = run(capfd, "evaluate", *SMALL[:-1], f"output={tmp_path}", f"allocation={tmp_path}/other.json")
    assert (code, out) == (2, "")
    assert (
        "must be for model 'random' (fingerprint random-1), or be given as a list; got one for 'random' (other)"
        in err
    )


def test_a_report_of_a_database_in_use(capfd, tmp_path):
    output = f"output={tmp_path}"
    process = spawn("search", *SMALL, output, "study=k", "budgets=[64]", "trials=2000", "workers=4")
    wait_for_trials(process, tmp_path, 6)
    code, out, err = run(capfd, "report", output, "study=k")
    process.send_signal(signal.SIGTERM)
    assert code == 0, err
    assert "k has not come to its end: it is in stage search" in err
    assert "not come to its end" in Path(out.strip()).read_text()
    while process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
    process.communicate()


@pytest.mark.parametrize(
    ("setting", "message"),
    [("host=0.0.0.0", "allow_anyone=true"), ("port=0", "port must be")],
)
def test_the_dashboard_is_not_opened_to_all_by_mistake(capfd, tmp_path, setting, message):
    code, _, err = run(capfd, "dashboard", f"output={tmp_path}", setting)
    assert code == 2
    assert message in err


def test_a_worker_of_another_version_or_without_a_study(capfd, tmp_path):
    output = f"output={tmp_path}"
    assert run(capfd, "search", *SMALL, output, "study=k", "budgets=[64]", "trials=4", "refine_trials=0")[0] == 0
    study = optuna.load_study(study_name="k", storage=open_storage(f"sqlite:///{tmp_path}/mosaic.db"))
    fingerprint = study.user_attrs["fingerprint"]
    fingerprint["versions"]["mosaic-opt"] = "0.0.9"
    study.set_user_attr("fingerprint", fingerprint)
    for arguments, message in [
        (["study=k"], "versions.mosaic-opt is"),
        (["study=kk"], "study must be one of k"),
        (["study=k", "batch_size=0"], "batch_size must be a whole number"),
        ([], "study"),
        (["study=k", "storage=postgresql"], "MOSAIC_STORAGE_URL"),
    ]:
        code, _, err = run(capfd, "worker", output, *arguments)
        assert code == 2
        assert message in err.strip().splitlines()[-1]


def test_no_password_is_shown_or_stored(capfd, tmp_path, postgres, monkeypatch):
    url = postgres.database("secrets")
    common = [*SMALL, f"output={tmp_path}", "study=k", "budgets=[64]", "trials=4", "refine_trials=1"]
    texts = []
    monkeypatch.setenv("MOSAIC_STORAGE_URL", url)
    code, _, err = run(capfd, "search", "-m", f"storage.url={url}", *common)
    assert code == 2
    assert "put the URL into MOSAIC_STORAGE_URL" in err
    for arguments in (["-m", "storage=postgresql"], ["storage=postgresql", "workers=2", "trials=6"]):
        code, out, err = run(capfd, "search", *arguments[:1], *common, *arguments[1:])
        assert code == 0, err
        texts += [out, err]
    wrong = url.replace(f":{postgres.port}/", ":1/")
    for arguments in ([f"storage.url={wrong}"], ["-m", f"storage.url={wrong}"], [f"storage.url={url}]["]):
        code, out, err = run(capfd, "search", *arguments[:1], *common, *arguments[1:])
        assert code == 2, err
        texts += [out, err]
    texts += [file.read_text(errors="replace") for file in (tmp_path / "results").rglob("*") if file.is_file()]
    tables = postgres.execute(
        "SELECT table_name FROM information_schema.tables WHERE table_schema='public'", "secrets"
    )
    texts += [str(postgres.execute(f'SELECT * FROM "{table}"', "secrets")) for (table,) in tables]
    assert len(tables) > 8
    assert not [text for text in texts if PASSWORD in text]


@pytest.mark.parametrize("launcher", ["joblib", pytest.param("submitit_local", marks=pytest.mark.slow)])
def test_a_failed_job_of_a_grid_does_not_stop_the_others(launcher, tmp_path):
    arguments = ["model=random", "tokens=900", "test=2", f"output={tmp_path}", f"hydra/launcher={launcher}"]
    process = spawn("evaluate", "-m", "allocation=uniform:x,uniform:64", *arguments)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 2, err
    assert "uniform:N" in err
    assert "Traceback" not in err
    logs = "".join(file.read_text() for file in tmp_path.glob("multirun/.submitit/*/*.out"))  # a job's own output
    assert '"mean_budget": 64' in out + logs


def test_help_of_a_verb_explains_its_settings(capfd):
    for verb in VERBS:
        code, out, _ = run(capfd, verb, "--help")
        assert code == 0
        settings = yaml.safe_load((CONF / f"{verb}.yaml").read_text())
        for name in set(settings) - {"defaults", "hydra"}:
            assert f"{name}: " in out


@pytest.mark.parametrize("verb", ["generate", "bench"])
def test_output_that_cannot_be_written(verb):
    arguments = [sys.executable, "-m", "mosaic_opt", verb, "model=random", "allocation=uniform:8", "new_tokens=2"]
    arguments += ["lengths=[40]", "repeats=1"] if verb == "bench" else []
    with open("/dev/full", "w") as full:
        done = subprocess.run(arguments, input="some prompt", stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "mosaic: standard output cannot be written: No space left on device"


def test_models_that_cannot_be_evaluated(capfd, tmp_path):
    """One is refused by its configuration, one only once its layers run."""
    common = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    for config, named in [
        (StableLmConfig(**common, num_key_value_heads=4, intermediate_size=32), "StableLmAttention"),
        (DeepseekV3Config(**common, num_key_value_heads=4, kv_lora_rank=8), "MLA"),
    ]:
        folder = tmp_path / config.model_type
        ModelSource(name="random").tokenizer.save_pretrained(folder)
        if named == "MLA":
            config.save_pretrained(folder)
        else:
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        code, out, err = run(
            capfd, "evaluate", "model=custom", f"model.name={folder}", "allocation=uniform:64", "tokens=900",
            "test=2", f"output={tmp_path}",
        )  # fmt: skip
        assert (code, out) == (2, "")
        assert named in err.splitlines()[-1]


def test_a_failed_job_of_a_multirun_does_not_end_the_others(capfd, tmp_path):
    code, out, err = run(
        capfd, "evaluate", "-m", "model=random", "allocation=uniform:64", f"output={tmp_path}", "tokens=20,900",
        "test=2",
    )  # fmt: skip
    assert code == 2
    assert json.loads(out)["mean_budget"] == 64
    assert "tokens" in err


def test_evaluate_prints_one_json_object(capfd, tmp_path):
    result = tmp_path / "a.json"
    result.write_text(json.dumps({"budgets": [32, 64, 128, 800]}))
    code, out, _ = run(
        capfd, "evaluate", "model=random", f"allocation={result}", "tokens=900", "selection=3", "split=selection",
        f"output={tmp_path}",
    )  # fmt: skip
    report = json.loads(out)
    assert code == 0
    assert report["mean_budget"] == 256
    assert report["kv_bytes"] == 1024 * 2 * 2 * 8 * 4
    assert len(report["example_scores"]) == len(report["outputs"]) == 3


def test_the_method_is_the_files_unless_said_otherwise(capfd, tmp_path):
    h2o = {"name": "H2O", "recent_fraction": 0.5}
    Allocation([32, 64, 32, 200], {"eviction": h2o}).save(tmp_path / "a.json")
    file, output = f"allocation={tmp_path}/a.json", f"output={tmp_path}"

    def used(*arguments):
        code, out, err = run(capfd, "evaluate", "model=random", "tokens=900", "test=2", output, *arguments)
        assert code == 0, err
        return json.loads(out)["eviction"]

    assert used(file).items() >= h2o.items()
    assert used(file, "eviction=l2norm")["name"] == "L2Norm"
    assert used("allocation=uniform:64")["name"] == "SnapKV"
    code, out, err = run(capfd, "generate", "model=random", file, "new_tokens=4", stdin=b"one " * 90)
    assert code == 0, err
    assert json.loads(out)["budgets"] == [32, 64, 32, 200]


def test_compare_measures_every_allocation_under_its_own_method(capfd, tmp_path):
    Allocation([32, 64, 32, 200], {"eviction": {"name": "H2O"}}).save(tmp_path / "a.json")
    arguments = ["model=random", "tokens=900", "examples=3", f"output={tmp_path}"]
    Allocation([82, 82, 82, 82], {"eviction": {"name": "SnapKV"}}).save(tmp_path / "s.json")
    files = [f"{tmp_path}/s.json", f"{tmp_path}/a.json"]
    code, out, err = run(capfd, "compare", *arguments, f"allocations=[{','.join(files)},{files[1]}]")
    assert code == 0, err
    report = json.loads(out)
    assert [row["eviction"]["name"] for row in report["rows"]] == ["SnapKV", "H2O", "H2O"]
    assert "SnapKV" in err
    assert len(list((tmp_path / "ranked").glob("*/*.safetensors"))) == 3 * (1 + 2)  # one prefill for both methods
    assert report["task"] == "niah_single_2"
    for row, allocation in zip(report["rows"], [*files, files[1]], strict=True):
        alone = run(capfd, "evaluate", *arguments[:2], "test=3", arguments[3], f"allocation={allocation}")[1]
        assert row["example_scores"] == json.loads(alone)["example_scores"]
    code, out, err = run(capfd, "compare", *arguments, "split=null", f"allocations=[uniform:82,{tmp_path}/a.json]")
    assert code == 0, err
    assert json.loads(out)["rows"][1]["differences"] == [-50, -18, -50, 118]
    code, out, err = run(capfd, "compare", *arguments, f"allocations=[uniform:82,{files[1]}]")
    assert [row["eviction"]["name"] for row in json.loads(out)["rows"]] == ["H2O", "H2O"]  # the same for all


def test_plan_needs_no_weights(capfd, tmp_path, monkeypatch):
    monkeypatch.setattr("mosaic_opt.model.ModelSource.load", lambda self: pytest.fail("a model was loaded"))
    ModelSource(name="random").config.to_json_file(tmp_path / "config.json")
    code, out, err = run(
        capfd, "plan", "model=custom", f"model.name={tmp_path}/config.json", "model.dtype=bfloat16", "context=1000",
        "batch=3", "budget=100", "memory=100KiB",
    )  # fmt: skip
    assert code == 0, err
    found, pair = json.loads(out), 2 * 2 * 8 * 2
    assert (found["full_bytes"], found["budget_bytes"]) == (3 * 4 * 1000 * pair, 3 * 4 * 100 * pair)
    assert found["fitting_mean"] == (100 * 2**10 // (3 * pair)) / 4
    assert (found["full_batch"], found["budget_batch"]) == (0, 100 * 2**10 // (4 * 100 * pair))
    assert "2 bytes an element" in err


@pytest.mark.parametrize(
    ("change", "named"),
    [({"about": {}}, "about.floor"), ({"about": None}, "about.floor"), ({"rows": [1]}, "result rows"),
     ({"rows": None}, "result rows"), ({"rows": [{"allocation": "refined"}]}, "result rows"),
     ({"rows": [{"allocation": "refined", "mean_budget": 64, "score": "x", "score_interval": [0, 1]}]}, "rows"),
     ({"rows": [{"allocation": "refined", "mean_budget": 64, "score": 1, "score_interval": [0]}]}, "result rows"),
     ({"winner": None}, "'budgets'"), ({"winner": {"budgets": [64]}}, "got 1")],
)  # fmt: skip
def test_plan_refuses_damaged_results(capfd, tmp_path, change, named):
    model = {"id": "random", **kv_shape(ModelSource(name="random").config)}
    rows = [{"allocation": "refined", "mean_budget": 64, "score": 0.5, "score_interval": [0.4, 0.6]}]
    content = {"winner": {"budgets": [64] * 4}, "about": {"floor": 8, "model": model}, "rows": rows}
    arguments = ["plan", "model=random", "budget=64", f"result={tmp_path}/result.json"]
    (tmp_path / "result.json").write_text(json.dumps(content))
    code, out, err = run(capfd, *arguments)
    assert code == 0, err
    assert json.loads(out)["expected"] == {"score": 0.5, "interval": [0.4, 0.6]}
    code, _, err = run(capfd, *arguments, "model=qwen3_8b")
    assert (code, "4" in err) == (2, True)
    (tmp_path / "result.json").write_text(json.dumps(content | change))
    code, out, err = run(capfd, *arguments)
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
    assert named in err


@pytest.mark.parametrize("method", ["h2o", "adakv", "l2norm", "streamingllm"])
def test_a_result_of_one_method_is_evaluated_under_another(capfd, tmp_path, method):
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"study": "s", "winner": {"budgets": [32, 64, 32, 200], "mean_budget": 82}}))
    code, out, _ = run(
        capfd, "evaluate", "model=random", f"eviction={method}", f"allocation={result}", "tokens=900", "test=2",
        "prefill_for=[snapkv,tova]", f"output={tmp_path}",
    )  # fmt: skip
    assert code == 0
    assert json.loads(out)["budgets"] == [32, 64, 32, 200]
    stored = [file.name for file in (tmp_path / "ranked").glob("*/*.safetensors")]
    assert len(stored) == 2 * (1 + 3)  # pairs, and an order for each of three methods


def test_generate_prints_both_texts_and_what_they_cost(capfd, tmp_path):
    prompt = "The moon is made of cheese, say the cats, and the dogs agree. " * 3
    arguments = ["generate", "model=random", "eviction=adakv", "eviction.window=8", "new_tokens=6"]
    code, out, err = run(capfd, *arguments, "allocation=[8,40,16,200]", stdin=prompt.encode())
    report = json.loads(out)
    assert code == 0
    assert report["prompt_tokens"] == len(prompt)
    pair = 2 * 2 * 8 * 4  # bytes of a key and a value in two heads
    assert report["plain"]["kv_bytes"] == 4 * (len(prompt) + 5) * pair
    assert report["evicted"]["kv_bytes"] == (8 + 40 + 16 + len(prompt) + 4 * 5) * pair
    assert report["plain"]["new_tokens"] == report["evicted"]["new_tokens"] == 6
    assert "full cache" in err
    assert "mean budget 66" in err

    file = tmp_path / "prompt.txt"
    file.write_text(prompt)
    code, out, _ = run(
        capfd, *arguments, "allocation=uniform:8", f"prompt_file={file}", "hold_budget=true", "plain=false"
    )
    report = json.loads(out)
    assert code == 0
    assert "plain" not in report
    assert report["evicted"]["kv_bytes"] == 4 * 8 * pair


def test_bench_compares_full_uniform_and_given(capfd):
    code, out, err = run(
        capfd, "bench", "model=random", "allocation=[8,40,16,36]", "lengths=[60,90]", "batches=[1,2]", "repeats=1",
        "new_tokens=3",
    )  # fmt: skip
    rows = json.loads(out)
    assert code == 0
    assert [(row["prompt_tokens"], row["batch"], row["allocation"]) for row in rows] == [
        (length, batch, name) for length in (60, 90) for batch in (1, 2) for name in ("full", "uniform", "given")
    ]
    for row in rows:
        kept = row["prompt_tokens"] if row["allocation"] == "full" else 25
        assert row["mean_budget"] == kept
        assert row["kv_bytes"] == row["batch"] * 4 * (kept + 2) * 2 * 2 * 8 * 4
        assert 0 <= row["scoring_seconds"] < row["prefill_seconds"]
        assert row["tokens_per_second"] > 0
    assert "KV cache" in err


def configurations():
    """Every verb by itself, and `search` with every file of every group."""
    for verb in VERBS:
        yield verb, []
    for group in GROUPS:
        for file in sorted((CONF / group).glob("*.yaml")):
            yield "search", [f"{group}={file.stem}"]


@pytest.mark.parametrize(("verb", "overrides"), list(configurations()))
def test_every_configuration_is_composed_and_instantiated(verb, overrides, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_STORAGE_URL", f"sqlite:///{tmp_path}/of-the-environment.db")
    if verb in ("evaluate", "generate", "bench", "export"):
        overrides = ["allocation=uniform:64"]
    if verb == "compare":
        overrides = ["allocations=[[64],uniform:64]"]
    if overrides == ["model=custom"]:
        overrides = ["model=custom", "model.name=random"]
    with initialize_config_module("mosaic_opt.conf", version_base="1.3"):
        home = [] if verb in ("tasks", "generate", "bench", "export", "plan") else [f"output={tmp_path}"]
        config = compose(verb, [*overrides, *home])
    for group in GROUPS:
        if group in config and "_target_" in config[group]:
            made = configured_task(config) if group == "task" else instantiate(config[group])
            assert made is not None
            if group == "sampler":
                assert isinstance(made(), optuna.samplers.BaseSampler)
    if "storage" in config:
        assert open_storage(config.storage.url).get_all_studies() == []


def test_every_configuration_file_is_reached():
    reached = set(GROUPS) | {"hydra"}
    assert {path.name for path in CONF.iterdir() if path.is_dir() and path.name != "__pycache__"} == reached
    assert {path.stem for path in CONF.glob("*.yaml")} == set(VERBS)


def test_the_dashboard_serves_the_database(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = spawn("dashboard", f"port={port}", f"output={tmp_path}")
    try:
        assert process.stderr is not None
        address = next(line for line in process.stderr if "http://" in line).split()[0]
        for _ in range(100):
            try:
                with urllib.request.urlopen(address.replace("/dashboard", "/api/studies"), timeout=5) as answer:
                    assert json.load(answer) == {"study_summaries": []}
                break
            except OSError:
                time.sleep(0.1)
        else:
            pytest.fail("no answer from the dashboard")
    finally:
        process.send_signal(signal.SIGTERM)  # as Ctrl-C, which a process in the background may ignore
        process.communicate(timeout=120)
