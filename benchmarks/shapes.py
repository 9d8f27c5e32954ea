# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of the models that the weight benchmarks pretend to move."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Qwen3:
    """The dense Qwen3 models, as transformers names their parameters."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Name to shape, in the order of the model's own state dict."""
        hidden, head = self.hidden, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, hidden)
        }
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            shapes |= {
                f"{at}.self_attn.q_proj.weight": (self.heads * head, hidden),
                f"{at}.self_attn.k_proj.weight": (self.kv_heads * head, hidden),
                f"{at}.self_attn.v_proj.weight": (self.kv_heads * head, hidden),
                f"{at}.self_attn.o_proj.weight": (hidden, self.heads * head),
                f"{at}.self_attn.q_norm.weight": (head,),
                f"{at}.self_attn.k_norm.weight": (head,),
                f"{at}.mlp.gate_proj.weight": (self.intermediate, hidden),
                f"{at}.mlp.up_proj.weight": (self.intermediate, hidden),
                f"{at}.mlp.down_proj.weight": (hidden, self.intermediate),
                f"{at}.input_layernorm.weight": (hidden,),
                f"{at}.post_attention_layernorm.weight": (hidden,),
            }
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, hidden)
        return shapes


MODELS = {
    # 310 tensors, 1.19 GB in bfloat16
    "qwen3-0.6b": Qwen3(1024, 3072, 28, 16, 8, 128, 151936, tied=True),
    # 399 tensors, 16.4 GB in bfloat16
    "qwen3-8b": Qwen3(4096, 12288, 36, 32, 8, 128, 151936, tied=False),
}
