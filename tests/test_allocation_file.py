"""Allocation files: what they hold, what is refused, what is derived from them."""

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mosaic_opt.allocation import Allocation, parse, parse_bytes, schema

ABOUT = {
    "model": {
        "id": "tiny", "fingerprint": "abc:float32", "layers": [0, 1, 2, 3], "windows": [], "kv_heads": 2,
        "head_dim": 8, "element_bytes": 4,
    },
    "eviction": {"name": "SnapKV", "window": 8, "kernel": 7, "version": 1},
    "floor": 8,
    "cap": 500,
    "task": "niah_single_2",
    "metric": "string_match_all",
    "protocol": "question-aware",
    "scores": {"test": {"score": 0.75, "interval": [0.5, 1.0], "examples": 20}},
    "provenance": {"study": "s", "command": "mosaic search"},
}  # fmt: skip
MADE = Allocation([8, 20, 300, 12], ABOUT)
PAIR = 2 * 2 * 8 * 4  # bytes


@pytest.fixture
def file(tmp_path):
    MADE.save(tmp_path / "a.json")
    return tmp_path / "a.json"


def rewritten(file, change):
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_what_is_saved_is_loaded(file):
    loaded = Allocation.load(file)
    assert (loaded, loaded.about) == (MADE, ABOUT)
    assert parse(str(file), layers=4).about == ABOUT
    content = json.loads(file.read_text())
    assert (content["version"], content["mean"]) == (1, 85)
    assert [path.name for path in file.parent.iterdir()] == ["a.json"]
    assert schema()["properties"].keys() == content.keys()


REFUSED = {
    "format": (lambda c: c.update(format="x"), "format is 'mosaic_opt/allocation'"),
    "newer": (lambda c: c.update(version=2), "version up to 1 .*; got 2"),
    "text": (lambda c: c.update(version="1"), "at version"),
    "no budgets": (lambda c: c.pop("budgets"), "'budgets' is a required property"),
    "float": (lambda c: c["budgets"].__setitem__(1, 20.0), "layer 1 has 20.0"),
    "negative": (lambda c: c["budgets"].__setitem__(1, -4), r"at budgets\.1"),
    "mean": (lambda c: c.update(mean=84), "mean of its budgets, 85; got 84"),
    "above the cap": (lambda c: c.update(cap=299), "from floor=8 to cap=299; got 8 to 300"),
    "layers": (lambda c: c["model"].update(layers=[1, 2]), r"each of 2 model\.layers; got 4"),
    "unknown": (lambda c: c.update(extra=1), "'extra'"),
    "score": (lambda c: c["scores"]["test"].update(score=75), r"at scores\.test\.score"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_refused(file, name):
    change, message = REFUSED[name]
    rewritten(file, change)
    with pytest.raises(ValueError, match=message):
        Allocation.load(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not readable JSON"), ("[" * 10**5, "not readable JSON"), ("NaN", "must be finite"), ("1e999", "finite"),
     ("[1, 2]", "format is"), (" " * (2**22 + 1), "more than 4194304 bytes"), ("\udcff", "not readable JSON")],
)  # fmt: skip
def test_texts_that_are_no_allocation_file(tmp_path, text, message):
    (tmp_path / "x.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message) as caught:
        Allocation.load(tmp_path / "x.json")
    assert len(str(caught.value)) < 600
    with pytest.raises(ValueError, match="must be there"):
        Allocation.load(tmp_path / "none.json")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | st.text(max_size=5)
    | st.sampled_from(["__import__('os')", "/etc/passwd", "../x", "${oc.env:HOME}"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


def places(content, path=()):
    """Every place in a JSON value."""
    yield path
    steps = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in steps:
        yield from places(value, (*path, key))


@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), value=VALUES, kind=st.sampled_from(["replace", "remove", "truncate", "flip"]))
def test_a_damaged_file_is_valid_or_one_clear_error(file, seed, value, kind):
    MADE.save(file)
    draw = random.Random(seed)
    if kind in ("replace", "remove"):
        content = json.loads(file.read_text())
        *path, last = draw.choice([place for place in places(content) if place])
        inside = content
        for key in path:
            inside = inside[key]
        if kind == "replace":
            inside[last] = value
        else:
            del inside[last]
        file.write_text(json.dumps(content))
    else:
        data = bytearray(file.read_bytes())
        if kind == "truncate":
            data = data[: draw.randrange(len(data))]
        else:
            data[draw.randrange(len(data))] = draw.randrange(256)
        file.write_bytes(data)
    loaded, said = None, ""
    try:
        loaded = Allocation.load(file)
    except ValueError as error:
        said = str(error)
    if loaded is None:
        assert "allocation" in said
        assert len(said) < 700
    else:
        assert all(isinstance(budget, int) and budget >= 1 for budget in loaded.budgets)
        loaded.save(file)  # what was read can be written
        assert Allocation.load(file).about == loaded.about


def test_rescaled_by_what_the_file_says(file):
    scaled = Allocation.load(file).rescale(mean=50)
    assert scaled.budgets == MADE.rescale(50, window=8, floor=8, cap=500).budgets
    assert scaled.mean == 50
    assert "scores" not in scaled.about  # they are not its own
    assert scaled.about["provenance"]["derived_from_mean"] == 85
    with pytest.raises(ValueError, match="mean budget must be between 8 and 500 tokens; got 501"):
        MADE.rescale(mean=501)
    with pytest.raises(ValueError, match="floor must be given"):
        Allocation([1, 2]).rescale(mean=2)


def test_bytes_by_what_the_file_says():
    assert MADE.kv_bytes() == 340 * PAIR
    assert MADE.kv_bytes(context=100, batch=3) == 3 * 140 * PAIR
    assert MADE.kv_bytes(element_bytes=2) == 340 * PAIR // 2
    with pytest.raises(ValueError, match="kv_heads must be given"):
        Allocation([1]).kv_bytes()


def test_what_fits_into_a_memory():
    for memory, context, batch in [("64KiB", 4096, 1), (100_000, 1000, 2), ("1MiB", 300, 1), ("12 kb", 8, 1)]:
        made = MADE.fit(memory=memory, context=context, batch=batch)
        left = parse_bytes(memory) - made.kv_bytes(context=context, batch=batch)
        assert left >= 0
        whole = sum(made.budgets) == 4 * context
        assert whole or left < batch * PAIR  # not one pair more fits
        assert min(made.budgets) >= 8
    with pytest.raises(ValueError, match=f"memory must be at least {32 * PAIR} bytes .* got 4095"):
        MADE.fit(memory=32 * PAIR - 1, context=1000)
    assert set(MADE.fit(memory=32 * PAIR, context=1000).budgets) == {8}
    sliding = Allocation(MADE.budgets, ABOUT | {"model": ABOUT["model"] | {"windows": [33, 1000]}})
    assert sliding.fit(memory=1000 * PAIR, context=400).kv_bytes() == (1000 - 33 - 400) * PAIR


@pytest.mark.parametrize("text", ["", "x", "-1", "1 GiBB", "nan", "1e9", "0", "1" * 40, None])
def test_memories_that_are_none(text):
    with pytest.raises(ValueError, match="memory must be bytes"):
        parse_bytes(text)


def test_whole_blocks():
    for block in (1, 7, 16, 100):
        made = MADE.round_to(block)
        assert all(budget % block == 0 and budget >= 8 for budget in made.budgets)
        least = 4 * -(-8 // block) * block
        assert sum(made.budgets) == max(340 // block * block, least)
    assert MADE.round_to(16).budgets == (16, 16, 288, 16)
    with pytest.raises(ValueError, match="block must be a whole number between 1"):
        MADE.round_to(0)
