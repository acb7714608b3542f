"""The Qwen3 family (arXiv:2505.09388): RMSNorm of queries and keys by head; dense, or with experts."""

from minititan.models.arguments import MoEArgs

FLAVORS = {
    "debugmodel": MoEArgs(128, 4, 8, 4, intermediate_size=384, rms_norm_eps=1e-6, qk_norm=True),
    "debugmodel_moe": MoEArgs(
        128,
        4,
        8,
        4,
        intermediate_size=384,
        rms_norm_eps=1e-6,
        qk_norm=True,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        router_aux_loss_coef=0.001,
    ),
}
