"""Llama 3: torchtitan's model with true positions and sparse attention.

RMSNorm, grouped queries, SwiGLU, no biases, interleaved rotary pairs, and RoPE scaling
by wavelength, as in Llama 3.1 (`scaling_factor` 1 is plain RoPE).
"""

# No `from __future__ import annotations` here: torchtitan reads the field types.
from dataclasses import dataclass

from torch import nn
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import FeedForward

from mtraining_flex.models.common import (
    Attention,
    Block,
    Decoder,
    count_attention_flops,
    count_nparams_and_flops,
)


@dataclass
class Llama3Args(TransformerModelArgs):
    """torchtitan's arguments; `attn_type` is "sparse" or, for a dense twin, "sdpa"."""

    attn_type: str = "sparse"

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters, and training FLOPs per token without attention."""
        return count_nparams_and_flops(model, tied=False)

    def attention_flops_per_token(self, seq_len: int) -> int:
        """Training FLOPs per token of dense causal attention."""
        return count_attention_flops(self, seq_len)


class Llama3Block(Block):
    def __init__(self, layer_id: int, model_args: Llama3Args):
        feed_forward = FeedForward(
            dim=model_args.dim,
            hidden_dim=4 * model_args.dim,
            multiple_of=model_args.multiple_of,
            ffn_dim_multiplier=model_args.ffn_dim_multiplier,
        )
        attention = Attention(layer_id, model_args)
        super().__init__(layer_id, model_args, attention, feed_forward)


class Llama3(Decoder):
    def __init__(self, model_args: Llama3Args):
        layers = range(model_args.n_layers)
        blocks = [Llama3Block(layer_id, model_args) for layer_id in layers]
        super().__init__(model_args, blocks, scaling=model_args.rope_scaling_args)


llama3_flavors = {
    "debugmodel": Llama3Args(
        dim=256,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=4096,
        rope_theta=500000,
    ),
    "tiny": Llama3Args(
        dim=64,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=4096,
        multiple_of=64,
        rope_theta=500000,
    ),
}
