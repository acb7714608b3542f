"""Parameters and floating-point operations of every family: the published numbers, and torch's own count."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from minititan.models.counts import flops_per_token, parameters
from minititan.registry import families

# (family, flavor) -> parameters of the published checkpoint; a tied head is counted once.
PUBLISHED = {
    ("llama3", "1B"): 1_235_814_400,
    ("llama3", "3B"): 3_212_749_824,
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
    ("llama3", "llama2_7B"): 6_738_415_616,
    ("llama3", "llama2_13B"): 13_015_864_320,
    ("llama3", "llama2_70B"): 68_976_648_192,
    ("qwen2", "0.5B"): 494_032_768,
    ("qwen2", "1.5B"): 1_543_714_304,
    ("qwen2", "3B"): 3_085_938_688,
    ("qwen2", "7B"): 7_615_616_512,
    ("qwen2", "14B"): 14_770_033_664,
    ("qwen2", "32B"): 32_763_876_352,
    ("qwen2", "72B"): 72_706_203_648,
    ("qwen3", "0.6B"): 596_049_920,
    ("qwen3", "1.7B"): 1_720_574_976,
    ("qwen3", "4B"): 4_022_468_096,
    ("qwen3", "8B"): 8_190_735_360,
    ("qwen3", "14B"): 14_768_307_200,
    ("qwen3", "32B"): 32_762_123_264,
    ("qwen3", "30B-A3B"): 30_532_122_624,
    ("qwen3", "235B-A22B"): 235_093_634_560,
    ("mixtral", "8x7B"): 46_702_792_704,
    ("mixtral", "8x22B"): 140_620_634_112,
    # With a correction bias for each expert, 58 x 256 of them.
    ("deepseek_v3", "671B"): 671_026_419_200,
    ("deepseek_v3", "16B"): 15_706_484_224,
    ("deepseek_v3", "236B"): 235_741_434_880,
    ("gpt_oss", "20b"): 20_914_757_184,
    ("gpt_oss", "120b"): 116_829_156_672,
}
# Billions, as the reports say them, and whether they count the embedding.
ACTIVE = {
    ("qwen3", "30B-A3B"): (3.3, True),
    ("qwen3", "235B-A22B"): (22, True),
    ("mixtral", "8x7B"): (12.9, True),
    ("mixtral", "8x22B"): (39, True),
    ("deepseek_v3", "671B"): (37, True),
    ("deepseek_v3", "16B"): (2.4, False),
    ("deepseek_v3", "236B"): (21, True),
    ("gpt_oss", "20b"): (3.61, False),
    ("gpt_oss", "120b"): (5.13, False),
    ("minimind", "198M-A64M"): (0.064, True),
}


@pytest.mark.parametrize("family, flavor", PUBLISHED, ids=str)
def test_parameters_of_published_models(family, flavor):
    total, _ = parameters(families()[family].flavors[flavor])
    assert total == PUBLISHED[family, flavor]


def test_every_full_size_flavor_is_published():
    full_size = {
        (family, flavor)
        for family, spec in families().items()
        for flavor in spec.flavors
        if flavor[-1] in "Bb" and family not in ("minimind", "numbered")
    }
    assert full_size - {("deepseek_v3", "moonlight_16B")} == set(PUBLISHED)


@pytest.mark.parametrize("family, flavor", ACTIVE, ids=str)
def test_active_parameters_of_published_models(family, flavor):
    args = families()[family].flavors[flavor]
    billions, with_embedding = ACTIVE[family, flavor]
    found = parameters(args)[1] - (0 if with_embedding else args.vocab_size * args.hidden_size)
    assert found / 1e9 == pytest.approx(billions, rel=0.025)


@pytest.mark.parametrize(
    "family, flavor",
    [(name, flavor) for name, spec in families().items() for flavor in spec.flavors if "debug" in flavor],
)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_operations_are_those_that_torch_counts(family, flavor, tied):
    """Forward and backward, attention as plain products; sequences within every window."""
    spec, batch, length = families()[family], 3, 16
    args = replace(spec.flavors[flavor], vocab_size=70, tie_word_embeddings=tied, num_hidden_layers=2)
    if family == "deepseek_v3":  # values are padded to the width of keys for the kernel
        args = replace(args, v_head_dim=args.channels)
    model = spec.build(args).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    tokens = torch.randint(70, (batch, length))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.lm_head(model(tokens)).sum().backward()
    padding = 0
    if family == "gpt_oss":  # for the kernel a sink is one more token and one more channel
        scores = (length + 1) ** 2 * (args.channels + 1) - length**2 * args.channels
        padding = 12 * batch * args.num_hidden_layers * args.num_attention_heads * scores
    assert counter.get_total_flops() == batch * length * flops_per_token(args, length) + padding


def test_keys_and_values_of_different_widths():
    args = replace(families()["deepseek_v3"].flavors["debugmodel"], vocab_size=70)
    # Four layers of eight heads, keys of 32 channels and values of 16.
    assert flops_per_token(args, 1064) - flops_per_token(args, 64) == 6 * 4 * 8 * (32 + 16) * 1000


def test_a_window_bounds_what_attention_costs():
    args = replace(families()["gpt_oss"].flavors["debugmodel"], vocab_size=70)
    # Four layers, two of which look at 32 tokens at most; 8 heads of 16 channels, key and value: 256.
    grown = flops_per_token(args, 132) - flops_per_token(args, 32)
    assert grown == 6 * 256 * 2 * 100
