"""Live eviction on tiny random models of the real classes."""

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from transformers import DynamicCache

from mosaic_opt.allocation import Allocation, uniform
from mosaic_opt.eviction import H2O, TOVA, AdaKV, KeyDiff, SnapKV, StreamingLLM, attach, evictable_layers

COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SLIDING = {  # two layers attend to the last 16 tokens only
    "num_hidden_layers": 4, "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "num_hidden_layers": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
CLASSES = {
    "Llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {}),
    "Mistral": (hf.MistralForCausalLM, hf.MistralConfig, {"sliding_window": None}),
    "MistralSliding": (hf.MistralForCausalLM, hf.MistralConfig, {"sliding_window": 16}),
    "Qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, {}),
    "Qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {}),
    "Phi3": (hf.Phi3ForCausalLM, hf.Phi3Config, {}),
    "Gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, {**SLIDING, "query_pre_attn_scalar": 8}),
    "Gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, {**SLIDING, "query_pre_attn_scalar": 8}),
    "Mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {"num_local_experts": 4, "sliding_window": None}),
    "Qwen3Moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, EXPERTS),
    "GptOss": (hf.GptOssForCausalLM, hf.GptOssConfig, {**SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3Next": (hf.Qwen3NextForCausalLM, hf.Qwen3NextConfig, {**EXPERTS, **LINEAR}),
    "DeepseekV3": (hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config, LATENT),
}
REFUSED = ("MistralSliding", "DeepseekV3")
SUPPORTED = [name for name in CLASSES if name not in REFUSED]
UPCAST = ("gemma2", "gpt_oss", "qwen3_next")  # these compute parts in float32 whatever the dtype

PROMPT = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(1))
TAIL = torch.randint(3, 64, (2, 6), generator=torch.Generator().manual_seed(2))
MASK = torch.ones_like(PROMPT)
MASK[0, :21] = 0  # row 0 has 19 tokens
METHOD = SnapKV(window=4, kernel=3)
BUDGETS = Allocation([7, 11])


def tiny(name, **arguments):
    torch.manual_seed(0)
    build, config, own = CLASSES[name]
    if any("expert" in key for key in own):
        arguments["experts_implementation"] = "eager"  # the default knows no float64
    model = build(config(**{**COMMON, **own, **arguments})).eval()
    return model if name == "Gemma2" else model.double()  # its float32 softmax overflows on float64 masks


@pytest.fixture(scope="module", params=SUPPORTED)
def tiny_model(request):
    """Tests leave the model as it is."""
    return tiny(request.param)


def tolerance(model):
    return {"rtol": 0, "atol": 2e-5 if model.config.model_type in UPCAST else 1e-9}


def generate(model, prompt=PROMPT, **arguments):
    defaults = {"max_new_tokens": 18, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(prompt, **{**defaults, **arguments})[:, prompt.shape[1] :]


def state_of(model):
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    implementations = {m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    return implementations, sum(hooks), model.config.to_dict(), set(vars(model)), set(vars(model.get_decoder()))


def forward(model, tokens, cache=None, mask=None, **arguments):
    with torch.no_grad():
        return model(tokens, cache=cache, attention_mask=mask, use_cache=True, **arguments)


@pytest.mark.parametrize("mask", [None, MASK], ids=["", "padded"])
@pytest.mark.parametrize("method", [METHOD, AdaKV(window=4, kernel=3)], ids=lambda m: type(m).__name__)
def test_a_budget_of_the_whole_prompt_is_the_plain_model(tiny_model, method, mask):
    plain = generate(tiny_model, attention_mask=mask)
    with attach(tiny_model, method, uniform(2, 40)):
        assert torch.equal(generate(tiny_model, attention_mask=mask), plain)


def test_logits_with_a_budget_of_the_whole_prompt(tiny_model):
    plain = forward(tiny_model, PROMPT)
    plain_after = forward(tiny_model, TAIL, plain.cache).logits
    with attach(tiny_model, METHOD, uniform(2, 40)):
        whole = forward(tiny_model, PROMPT)
        whole_after = forward(tiny_model, TAIL, whole.cache).logits
    torch.testing.assert_close(whole.logits, plain.logits, **tolerance(tiny_model))
    torch.testing.assert_close(whole_after, plain_after, **tolerance(tiny_model))


def test_each_layer_holds_its_budget_and_the_model_is_restored(tiny_model):
    before = state_of(tiny_model)
    plain = generate(tiny_model)
    with attach(tiny_model, METHOD, BUDGETS) as eviction:
        forward(tiny_model, PROMPT)
        report = eviction.report()
        assert report.layers == evictable_layers(tiny_model.config)
        assert report.lengths == [[[7, 7]] * 2, [[11, 11]] * 2]
        assert report.prompt_tokens == 40
        size = tiny_model.dtype.itemsize
        assert report.kv_bytes == 2 * BUDGETS.kv_bytes(kv_heads=2, head_dim=8, element_bytes=size)
        evicted = generate(tiny_model)
        assert eviction.report().lengths == [[[7 + 17] * 2] * 2, [[11 + 17] * 2] * 2]
        assert not torch.equal(evicted, plain)
    assert state_of(tiny_model) == before
    assert torch.equal(generate(tiny_model), plain)


@pytest.mark.parametrize("mask", [None, MASK], ids=["", "padded"])
@pytest.mark.parametrize("method", [METHOD, AdaKV(window=4, kernel=3)], ids=lambda m: type(m).__name__)
def test_several_tokens_at_once_equal_token_by_token(tiny_model, method, mask):
    def masked(length):  # with the positions that generate gives
        if mask is None:
            return {}
        grown = F.pad(mask, (0, length), value=1)
        return {"mask": grown, "position_ids": (grown.cumsum(1) - 1).clamp(min=0)}

    def fed(cache, *pieces):
        logits, seen = [], 0
        for piece in pieces:
            seen += piece.shape[1]
            own = masked(seen)
            if own:
                own["position_ids"] = own["position_ids"][:, -piece.shape[1] :]
            logits.append(forward(tiny_model, piece, cache, **own).logits)
        return torch.cat(logits, dim=1)

    with attach(tiny_model, method, BUDGETS):
        together = fed(forward(tiny_model, PROMPT, **masked(0)).cache, TAIL)
        halves = fed(forward(tiny_model, PROMPT, **masked(0)).cache, TAIL[:, :1], TAIL[:, 1:])
        single = fed(forward(tiny_model, PROMPT, **masked(0)).cache, *TAIL.split(1, dim=1))
    torch.testing.assert_close(together, single, **tolerance(tiny_model))
    torch.testing.assert_close(halves, single, **tolerance(tiny_model))


def kept_by_hand(weights, method, budget):
    """Positions kept, (B, G, budget) rising, from one layer's whole attention (B, H, n, n)."""
    B, H, n, _ = weights.shape
    grouped = weights.view(B, 2, H // 2, n, n)
    if isinstance(method, StreamingLLM):
        scores = torch.arange(n, dtype=torch.float64).expand(B, 2, n).clone()
        scores[..., : method.sinks] += n
    elif isinstance(method, TOVA):
        scores = weights[:, :, -1].mean(dim=1, keepdim=True).repeat(1, 2, 1)
    elif isinstance(method, H2O):
        scores = grouped.sum(dim=3).mean(dim=2)
    else:
        scores = grouped[:, :, :, n - method.window :].sum(dim=3).mean(dim=2)[..., : n - method.window]
        pad = method.kernel // 2
        scores = F.pad(scores, (pad, pad)).unfold(2, method.kernel, 1).amax(dim=3)
        scores = F.pad(scores, (0, method.window))
    scores[..., n - method.window :] = torch.inf
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :budget].sort(dim=-1).values


@pytest.mark.parametrize("method", [METHOD, H2O(window=4), TOVA(), StreamingLLM()], ids=lambda m: type(m).__name__)
def test_evicted_attention_is_plain_attention_over_the_pairs_kept(tiny_model, method):
    """The reference: a plain model, its cache gathered by hand, one token at a time at its true position."""
    own = tiny_model.config._attn_implementation
    tiny_model.set_attn_implementation("eager")
    attentions = forward(tiny_model, PROMPT, output_attentions=True).attentions
    tiny_model.set_attn_implementation(own)
    layers = evictable_layers(tiny_model.config)
    if len(attentions) == len(layers):  # models with linear attention return those of the others only
        attentions = dict(zip(layers, attentions, strict=True))
    cache = forward(tiny_model, PROMPT).cache
    for layer in layers:
        positions = kept_by_hand(attentions[layer].double(), method, 9)[..., None].expand(-1, -1, -1, 8)
        states = cache.layers[layer]
        states.keys, states.values = states.keys.gather(2, positions), states.values.gather(2, positions)
    wanted = [
        forward(tiny_model, TAIL[:, [step]], cache, position_ids=torch.full((2, 1), 40 + step)).logits
        for step in range(6)
    ]
    with attach(tiny_model, method, uniform(2, 9)):
        evicted = forward(tiny_model, PROMPT).cache
        got = [forward(tiny_model, TAIL[:, [step]], evicted).logits for step in range(6)]
        assert evicted.get_seq_length() == 46
    torch.testing.assert_close(torch.cat(got, dim=1), torch.cat(wanted, dim=1), **tolerance(tiny_model))


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_layers_of_unequal_length_against_the_plain_model(name):
    model = tiny(name)
    cache = forward(model, PROMPT).cache
    for states, budget in zip(cache.layers, BUDGETS.budgets, strict=True):
        positions = torch.tensor([*range(4), *range(40 - (budget - 4), 40)])
        states.keys, states.values = states.keys[:, :, positions], states.values[:, :, positions]
    wanted = forward(model, TAIL[:, :1], cache, position_ids=torch.full((2, 1), 40)).logits
    with attach(model, StreamingLLM(), BUDGETS):
        got = forward(model, TAIL[:, :1], forward(model, PROMPT).cache).logits
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("mask", [None, MASK], ids=["", "padded"])
@pytest.mark.parametrize(
    "method", [METHOD, AdaKV(window=4), H2O(window=4), KeyDiff()], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_eager_attention_gives_the_same_tokens(name, method, mask):
    found = []
    for implementation in ("sdpa", "eager"):
        model = tiny(name, attn_implementation=implementation)
        with attach(model, method, BUDGETS):
            found.append(generate(model, attention_mask=mask))
        assert model.config._attn_implementation == implementation
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("MistralSliding", r"mistral.*layers \[0, 1\].*[Ss]liding"),
        ("DeepseekV3", r"deepseek_v3.*layers \[0, 1\].*MLA"),
    ],
)
def test_layers_that_cannot_be_evicted_are_named(name, message):
    model = tiny(name)
    before = state_of(model)
    with pytest.raises(ValueError, match=message), attach(model, METHOD, BUDGETS):
        pass
    with pytest.raises(ValueError, match=message):
        evictable_layers(model.config)
    assert state_of(model) == before


@pytest.mark.parametrize("name", ["Gemma2", "Gemma3", "GptOss", "Qwen3Next"])
def test_the_other_layers_of_a_mixed_model_are_named_and_keep_theirs(name):
    model = tiny(name)
    before = state_of(model)
    with (
        pytest.raises(ValueError, match=r"2 budgets.*got 4.*layers \[0, 2\].*keep theirs"),
        attach(model, METHOD, uniform(4, 9)),
    ):
        pass
    assert state_of(model) == before
    plain = forward(model, PROMPT).cache
    with attach(model, METHOD, BUDGETS) as eviction:
        cache = forward(model, PROMPT).cache
        assert isinstance(cache, DynamicCache)
        for layer in (0, 2):
            assert type(cache.layers[layer]) is type(plain.layers[layer])
        assert eviction.report().other_bytes > 0


@pytest.mark.parametrize("method", [METHOD, AdaKV(window=4, kernel=3)], ids=lambda m: type(m).__name__)
def test_held_budgets(tiny_model, method):
    with attach(tiny_model, method, BUDGETS, hold_budget=True) as eviction:
        generate(tiny_model, attention_mask=MASK)
        for lengths, budget in zip(eviction.report().lengths, BUDGETS.budgets, strict=True):
            assert [sum(row) for row in lengths] == [2 * budget] * 2


SHARED = {  # the last two layers attend to keys and values of earlier ones
    **SLIDING, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
    "laurel_rank": 4, "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 4,
}  # fmt: skip
UNUSUAL = {
    "Falcon": (hf.FalconForCausalLM, hf.FalconConfig, {}),  # attention of their own, not transformers' interface
    "Bloom": (hf.BloomForCausalLM, hf.BloomConfig, {"n_layer": 2, "n_head": 4}),
    "Mpt": (hf.MptForCausalLM, hf.MptConfig, {"d_model": 32, "n_layers": 2, "n_heads": 4}),
    "StableLm": (hf.StableLmForCausalLM, hf.StableLmConfig, {}),  # their layers pass no further arguments on
    "Nemotron": (hf.NemotronForCausalLM, hf.NemotronConfig, {}),
    "Gemma3n": (hf.Gemma3nForCausalLM, hf.Gemma3nTextConfig, SHARED),
}


@pytest.mark.parametrize("name", UNUSUAL)
@pytest.mark.parametrize("mask", [None, MASK], ids=["", "padded"])
def test_models_whose_attention_is_out_of_reach_are_refused(name, mask):
    torch.manual_seed(0)
    build, config, own = UNUSUAL[name]
    common = {key: value for key, value in COMMON.items() if name != "Falcon" or key != "head_dim"}
    model = build(config(**{**common, **own})).eval()
    before, plain = state_of(model), generate(model, attention_mask=mask)
    budgets = uniform(len(evictable_layers(model.config)) if name != "Gemma3n" else 1, 7)

    def evict():
        with attach(model, METHOD, budgets):
            generate(model, attention_mask=mask)

    with pytest.raises(ValueError, match="evict"):
        evict()
    assert state_of(model) == before
    assert torch.equal(generate(model, attention_mask=mask), plain)
