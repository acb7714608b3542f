"""How many parameters a decoder has, and what a token costs: counted on the module, on the meta device.

`docs/models.md` has the formula. Nothing here knows a family: what is there is counted.
"""

from functools import lru_cache

from torch import Tensor

from minititan.models.arguments import DecoderArgs, MoEArgs
from minititan.models.decoder import Decoder
from minititan.models.meta import on_meta


@lru_cache(maxsize=1)
def _decoder(args: DecoderArgs) -> Decoder:
    with on_meta():
        return Decoder(args)


def _active(name: str, parameter: Tensor, args: DecoderArgs) -> int:
    """The number of elements of a parameter that one token goes through."""
    if isinstance(args, MoEArgs) and ".experts." in name:
        return parameter[0].numel() * args.num_experts_per_tok
    return parameter.numel()


def parameters(args: DecoderArgs) -> tuple[int, int]:
    """Return the number of parameters, and of those that a token goes through.

    These are all but those of experts that it does not choose. The embedding counts whole, as in the numbers
    that are published of most models.
    """
    named = dict(_decoder(args).named_parameters())
    active = sum(_active(name, parameter, args) for name, parameter in named.items())
    return sum(parameter.numel() for parameter in named.values()), active


def flops_per_token(args: DecoderArgs, seq_len: int) -> int:
    """Return the floating-point operations of forward and backward for one token of a sequence.

    Six for each weight of a matrix product that the token goes through (the embedding's look-up is none), and
    six times the tokens that a layer's attention looks at, for each channel of a key and of a value of each
    query head, counted without the saving of causality, as is usual for MFU (PaLM, arXiv:2204.02311, appendix
    B). Recomputation counts nothing.
    """
    model = _decoder(args)
    weights = model.lm_head.weight.numel() + sum(
        _active(name, parameter, args)
        for name, parameter in model.layers.named_parameters(prefix="layers")
        if parameter.ndim > 1 and not name.endswith("bias")
    )
    seen = sum(min(seq_len, args.window(layer) or seq_len) for layer in range(args.num_hidden_layers))
    return 6 * weights + 6 * args.attention_channels * seen
