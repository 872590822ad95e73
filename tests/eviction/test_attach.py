import pytest
import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mosaic_opt.allocation import Allocation, uniform
from mosaic_opt.eviction import SnapKV, attach
from tests.conftest import tiny_llama

METHOD = SnapKV(window=8)
PROMPT = torch.randint(0, 256, (2, 50), generator=torch.Generator().manual_seed(1))
MIXED = Allocation([10, 50, 20, 8])


def generate(model, prompt=PROMPT, **arguments):
    defaults = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 258}
    return model.generate(prompt, **{**defaults, **arguments})[:, prompt.shape[1] :]


def state_of(model):
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    return model.config._attn_implementation, sum(hooks), model.config.to_dict()


def test_a_budget_of_the_whole_prompt_is_the_plain_model(model):
    plain = generate(model)
    with attach(model, METHOD, uniform(4, 50)):
        assert torch.equal(generate(model), plain)
    with attach(model, METHOD, uniform(4, 999)):
        assert torch.equal(generate(model), plain)


def test_realised_lengths_and_bytes(model):
    with attach(model, METHOD, MIXED) as eviction:
        model(PROMPT, use_cache=True)
        assert eviction.lengths() == [10, 50, 20, 8]
        assert eviction.kv_bytes() == 2 * MIXED.kv_bytes(kv_heads=2, head_dim=8, element_bytes=4)
        generate(model)
        assert eviction.lengths() == [10 + 11, 50 + 11, 20 + 11, 8 + 11]


def test_every_prompt_of_a_run_is_evicted_and_a_b_a_gives_a_twice(model):
    with attach(model, METHOD, MIXED):
        first = generate(model)
    with attach(model, METHOD, uniform(4, 9)):
        other = generate(model)
        assert not torch.equal(first, other)
    with attach(model, METHOD, MIXED):
        assert torch.equal(generate(model), first)
        assert torch.equal(generate(model), first)


def test_left_padding_gives_each_row_what_it_gets_alone(model):
    mask = torch.ones_like(PROMPT)
    mask[0, :33] = 0  # row 0 has 17 tokens: below one budget, above others
    with attach(model, METHOD, MIXED):
        together = generate(model, attention_mask=mask)
        assert torch.equal(together[:1], generate(model, PROMPT[:1, 33:]))
        assert torch.equal(together[1:], generate(model, PROMPT[1:]))


def test_prompts_shorter_than_the_window(model):
    mask = torch.ones_like(PROMPT)
    mask[0, :47] = 0
    with attach(model, METHOD, MIXED):
        together = generate(model, attention_mask=mask)
        assert torch.equal(together[:1], generate(model, PROMPT[:1, 47:]))


def test_several_tokens_at_once_equal_token_by_token():
    model = tiny_llama(dtype=torch.float64)
    with torch.no_grad(), attach(model, METHOD, MIXED):
        tail = torch.randint(0, 256, (2, 6), generator=torch.Generator().manual_seed(2))
        cache = DynamicCache(config=model.config)
        model(PROMPT, cache=cache)
        assert cache.get_seq_length() == 50
        together = model(tail, cache=cache).logits
        assert cache.get_seq_length() == 56
        cache = model(PROMPT).cache
        single = [model(tail[:, step : step + 1], cache=cache).logits for step in range(6)]
    torch.testing.assert_close(together, torch.cat(single, dim=1), rtol=0, atol=1e-10)


def test_beam_search_runs_and_keeps_the_budget(model):
    plain = generate(model, num_beams=3)
    with attach(model, METHOD, MIXED) as eviction:
        beams = generate(model, num_beams=3)
        assert beams.shape == (2, 12)
        assert eviction.lengths()[0] - eviction.lengths()[3] == 2
    with attach(model, METHOD, uniform(4, 50)):
        assert torch.equal(generate(model, num_beams=3), plain)


def test_positions_go_on_from_the_true_length():
    model = tiny_llama(dtype=torch.float64)
    seen = []
    with torch.no_grad(), attach(model, METHOD, MIXED):
        handle = model.model.rotary_emb.register_forward_hook(
            lambda module, args, kwargs, output: seen.append(kwargs["position_ids"].tolist()),
            with_kwargs=True,
        )
        cache = model(PROMPT[:1]).cache
        model(PROMPT[:1, :1], cache=cache)
        handle.remove()
    assert seen[-1] == [[50]]


def test_everything_is_restored_after_an_exception(model):
    before = state_of(model)

    def fail_inside():
        with attach(model, METHOD, MIXED):
            generate(model)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert state_of(model) == before
    assert model.config._attn_implementation in ALL_ATTENTION_FUNCTIONS


@pytest.mark.parametrize("case", ["length", "twice", "training", "eager"])
def test_bad_input_leaves_the_model_untouched(model, case):
    allocation = Allocation([10, 10]) if case == "length" else MIXED
    if case == "training":
        model.train()
    if case == "eager":
        model.set_attn_implementation("eager")
    before = state_of(model)
    named = {
        "length": "4 budgets",
        "twice": "attached already",
        "training": "training mode",
        "eager": "eager",
    }
    if case == "twice":
        with (
            attach(model, METHOD, MIXED),
            pytest.raises(ValueError, match=named[case]),
            attach(model, METHOD, MIXED),
        ):
            pass
    else:
        with pytest.raises(ValueError, match=named[case]), attach(model, METHOD, allocation):
            pass
    assert state_of(model) == before


def test_foreign_caches_are_refused(model):
    filled = model(PROMPT, use_cache=True).cache
    with attach(model, METHOD, MIXED), pytest.raises(ValueError, match="another run"):
        model(PROMPT, cache=filled)
    with attach(model, METHOD, MIXED):
        evicted = model(PROMPT).cache
    with attach(model, METHOD, uniform(4, 9)), pytest.raises(ValueError, match="another run"):
        model(PROMPT[:, :1], cache=evicted)
    with attach(model, METHOD, MIXED), pytest.raises(ValueError, match="use_cache"):
        model(PROMPT, use_cache=False)


def test_sliding_window_layers_are_named():
    config = MistralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=16,
    )  # fmt: skip
    with (
        pytest.raises(ValueError, match=r"mistral.*\[0, 1\]"),
        attach(MistralForCausalLM(config).eval(), METHOD, Allocation([4, 4])),
    ):
        pass
