"""A framework's own model on this runtime: transformers' Llama, and a loop that the host owns.

torchrun --standalone --nproc-per-node 2 examples/transformers_model.py

The model keeps its weights and its code. It needs one thing: to call back for attention, so that
pages, prefill, the selected decode backend and the steps come from here. The weights are whole on
every rank; what the ranks share out is the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tp_runtime import Engine, ModelShape, RankInfo, RuntimeConfig, SamplingParams, TpGroup

if TYPE_CHECKING:
    from tp_runtime import Attention


class TransformersModel:
    """A `DecodeModel` around a LlamaForCausalLM."""

    def __init__(self, model: Any, group: TpGroup) -> None:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface

        AttentionInterface.register("tp_runtime", self._attend)
        AttentionMaskInterface.register("tp_runtime", lambda *args, **kwargs: None)
        model.set_attn_implementation("tp_runtime")
        self._model = model
        self._attention: Attention | None = None
        config = model.config
        slice_size = -(-config.vocab_size // group.size)
        start = min(group.rank * slice_size, config.vocab_size)
        end = min(start + slice_size, config.vocab_size)
        self.shape = ModelShape(
            num_layers=config.num_hidden_layers,
            q_heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            vocab_start=start,
            vocab_end=end,
            max_positions=config.max_position_embeddings,
            dtype=model.dtype,
        )

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        self._attention = attention
        hidden: torch.Tensor = self._model.model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False
        ).last_hidden_state
        return hidden[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self._model.lm_head.weight[self.shape.vocab_start : self.shape.vocab_end]
        return hidden @ head.t()

    def _attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention function: [1, heads, tokens, head_dim] in."""
        if self._attention is None:
            raise RuntimeError("attention was called outside of forward")
        q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
        return self._attention(module.layer_idx, q, k, v)[None], None


def tiny_llama() -> Any:
    """The same small random Llama on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=199,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def run() -> list[int]:
    """Decode one prompt; the tokens on rank 0, nothing on the others."""
    info = RankInfo.from_env()
    group = TpGroup.create(info, device=torch.device("cpu"), timeout_s=60)
    model = TransformersModel(tiny_llama(), group)
    with group, Engine(RuntimeConfig(max_batch_size=2), group=group, model=model) as engine:
        if engine.rank > 0:
            while engine.step_peer():
                pass  # a host does its own work here, between steps
            return []
        engine.add_request([5, 17, 42], SamplingParams(max_tokens=20))
        tokens: tuple[int, ...] = ()
        while engine.unfinished:
            for output in engine.step():
                tokens = output.token_ids
        return list(tokens)


if __name__ == "__main__":
    if tokens := run():
        print(tokens)
