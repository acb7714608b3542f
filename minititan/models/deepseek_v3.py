"""The DeepSeek-V3 family (arXiv:2412.19437): latent attention, and mixtures with shared experts."""

from dataclasses import dataclass

from torch import nn

from minititan.models.arguments import MoEArgs
from minititan.models.latent_attention import LatentAttention
from minititan.models.rotary import YarnScaling

LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class DeepseekV3Args(MoEArgs):
    """The shape of a decoder with latent attention. `num_key_value_heads` is `num_attention_heads`."""

    num_key_value_heads: int = 8
    rms_norm_eps: float = 1e-6
    q_lora_rank: int | None = None  # width of the compressed queries; None: they are not compressed
    kv_lora_rank: int = 512  # width of the compressed keys and values
    qk_nope_head_dim: int = 128  # channels of a query and key head without positions
    qk_rope_head_dim: int = 64  # channels of it with rotary positions; the heads share those of the key
    v_head_dim: int = 128  # channels of a value head

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (*LATENT_SIZES, "q_lora_rank"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} ({value}) must be at least 1")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim ({self.qk_rope_head_dim}) must be even")
        for name in ("head_dim", "qk_norm"):
            if getattr(self, name):
                raise ValueError(f"{name} is no part of latent attention")
        if self.num_key_value_heads != self.num_attention_heads:
            raise ValueError(
                f"num_key_value_heads ({self.num_key_value_heads}) must be num_attention_heads "
                f"({self.num_attention_heads}): latent attention has no groups"
            )

    @property
    def channels(self) -> int:
        """The width of a query and key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def rotary_channels(self) -> int:
        return self.qk_rope_head_dim

    def attention(self, layer: int) -> nn.Module:
        scaling, scale = self.rope_scaling, self.channels**-0.5
        return LatentAttention(
            self.hidden_size,
            self.num_attention_heads,
            q_rank=self.q_lora_rank,
            kv_rank=self.kv_lora_rank,
            plain_dim=self.qk_nope_head_dim,
            rotary_dim=self.qk_rope_head_dim,
            value_dim=self.v_head_dim,
            scale=scale * scaling.score_factor if isinstance(scaling, YarnScaling) else scale,
            bias=self.attention_bias,
        )
