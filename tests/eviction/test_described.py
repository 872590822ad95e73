"""Evictions from their descriptions, and allocation files applied to live models."""

import gc
import threading

import pytest
import torch
from transformers import pipeline

from mosaic_opt.allocation import Allocation, uniform
from mosaic_opt.eviction import H2O, AdaKV, L2Norm, SnapKV, apply, attach, kv_shape, method_of
from mosaic_opt.eviction.described import METHODS
from mosaic_opt.model import ModelSource
from tests.conftest import EVERY_METHOD, tiny_gemma3, tiny_llama, tiny_qwen3
from tests.conftest import METHODS as SETTINGS
from tests.memory import storages

BUDGETS = [9, 30, 12, 20]


def about(model, method):
    return {
        "model": {"id": "tiny", "element_bytes": model.dtype.itemsize, **kv_shape(model.config)},
        "eviction": method.describe(),
        "floor": method.floor,
        "cap": 100,
    }


def generated(model, prompts):
    return [model.generate(prompt[None], max_new_tokens=8, do_sample=False)[0].tolist() for prompt in prompts]


def live_bytes():
    """Of all tensors that Python can reach."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    return sum({storage._cdata: storage.nbytes() for storage in storages(tensors)}.values())


@EVERY_METHOD
def test_a_method_is_made_again_from_its_description(method):
    assert method_of(method.describe()).describe() == method.describe()
    assert type(method) is METHODS[method.describe()["name"]]
    assert len(METHODS) == len({type(setting) for setting in SETTINGS.values()})


@pytest.mark.parametrize(
    ("described", "message"),
    [({"name": "os.system"}, "eviction name must be one of SnapKV"), ({}, "got None"), ({"name": []}, r"got \[\]"),
     ({"name": "SnapKV", "windows": 3}, "parameters that it knows"), ({"name": "SnapKV", "window": -1}, "window"),
     ({"name": "SnapKV", "version": 2}, "of version 1; got 2"), ({"name": "H2O", "window": "x"}, "window")],
)  # fmt: skip
def test_descriptions_that_are_refused(described, message):
    with pytest.raises(ValueError, match=message):
        method_of(described)


@pytest.mark.parametrize("method", [SnapKV(window=8), H2O(window=4), AdaKV(window=8), L2Norm(skip=[1])])
def test_a_file_is_applied_as_its_method_is_attached(tmp_path, method):
    model = tiny_llama(dtype=torch.float64)
    Allocation(BUDGETS, about(model, method)).save(tmp_path / "a.json")
    prompts = torch.randint(0, 256, (3, 60), generator=torch.Generator().manual_seed(0))
    with attach(model, method, Allocation(BUDGETS)):
        expected = generated(model, prompts)
    with apply(model, tmp_path / "a.json") as eviction:
        assert generated(model, prompts) == expected
        assert eviction.method.describe() == method.describe()
    with apply(model, Allocation.load(tmp_path / "a.json"), hold_budget=True) as eviction:
        generated(model, prompts)
        assert eviction.hold_budget


def test_inside_a_pipeline(tmp_path):
    model, tokenizer = tiny_llama(), ModelSource(name="random").tokenizer
    Allocation(BUDGETS, about(model, SnapKV(window=8))).save(tmp_path / "a.json")
    writer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = "a prompt that is longer than every budget there is, by some tokens"
    with apply(writer.model, tmp_path / "a.json") as eviction:
        assert writer(text, max_new_tokens=4, do_sample=False)[0]["generated_text"].startswith(text)
        lengths = [layer[0][0] for layer in eviction.report().lengths]
    assert [length - budget for length, budget in zip(lengths, BUDGETS, strict=True)] == [3] * 4


def test_files_for_another_model_are_refused(tmp_path):
    model, other = tiny_llama(), tiny_llama(heads=4, kv_heads=1)
    made = Allocation(BUDGETS, about(other, SnapKV(window=8)))
    with (
        pytest.raises(ValueError, match="for a model with kv_heads=2; got one for 'tiny' with 1"),
        apply(model, made),
    ):
        pass
    short = Allocation(BUDGETS[1:], {"eviction": SnapKV().describe()})
    with pytest.raises(ValueError, match="must have 4 budgets"), apply(model, short):
        pass
    with pytest.raises(ValueError, match="must say which eviction method"), apply(model, uniform(4, 9)):
        pass


def test_two_attached_models_in_four_threads_do_not_disturb_each_other():
    models = [tiny_llama(dtype=torch.float64), tiny_qwen3(dtype=torch.float64)]
    made = [
        Allocation(BUDGETS, about(models[0], SnapKV(window=8))),
        Allocation(BUDGETS[::-1], about(models[1], H2O())),
    ]
    prompts = torch.randint(0, 256, (25, 50), generator=torch.Generator().manual_seed(1))
    alone, found = [], [[], [], [], []]
    for model, allocation in zip(models, made, strict=True):
        with apply(model, allocation):
            alone.append(generated(model, prompts))

    def work(number):
        for _ in range(2):
            found[number].append(generated(models[number % 2], prompts))

    before = live_bytes()
    with apply(models[0], made[0]), apply(models[1], made[1]):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert live_bytes() > before  # the caches used last are still there
    assert found == [[alone[number % 2]] * 2 for number in range(4)]  # 200 generations
    assert live_bytes() == before


def test_bytes_and_room_are_those_of_the_live_model():
    model = tiny_gemma3()
    method = SnapKV(window=8)
    shape = about(model, method)
    layers = len(shape["model"]["layers"])
    assert shape["model"]["windows"] == [20] * (4 - layers)
    allocation = Allocation(BUDGETS[:layers], shape)
    prompt = torch.randint(0, 256, (2, 60), generator=torch.Generator().manual_seed(2))
    with apply(model, allocation) as eviction, torch.no_grad():
        cache = model(prompt).cache
        model(prompt[:, :1], cache=cache)  # only now a sliding-window layer frees what it does not need
        report = eviction.report()
    assert report.kv_bytes == Allocation([budget + 1 for budget in allocation.budgets], shape).kv_bytes(batch=2)
    room = allocation.kv_bytes(batch=2) + report.other_bytes
    assert allocation.fit(memory=room, context=60, batch=2) == allocation
