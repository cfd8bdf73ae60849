"""DiT (Peebles and Xie 2023): a transformer over latent patches with adaLN-Zero conditioning and pluggable attention.

SiT (Ma et al. 2024) is the same network under another objective.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ..attention import build_attention
from .layers import (
    LabelEmbedder,
    Mlp,
    Modulation,
    PatchEmbed,
    TimestepEmbedder,
    modulate,
    sincos_position_embedding,
    unpatchify,
)


class DiT(nn.Module):
    """(x_t, model_time, y) -> a field of x_t's shape, or of twice its channels with `learn_sigma`.

    `num_classes` 0 makes an unconditional network that ignores y and has no label table. The network is a pure
    function of its inputs in train and eval mode alike: labels are dropped by the training task.
    """

    def __init__(
        self,
        *,
        input_size: int,
        patch_size: int,
        in_channels: int,
        dim: int,
        depth: int,
        num_heads: int,
        num_classes: int,
        mlp_ratio: float = 4.0,
        learn_sigma: bool = False,
        time_freqs: str = "dit",
        attention: str = "softmax",
        attention_options: dict[str, Any] | None = None,
    ):
        super().__init__()
        if input_size % patch_size:
            raise ValueError(f"model.patch_size {patch_size} does not divide the latent size {input_size}")
        self.patch_size = patch_size
        self.in_channels = in_channels
        self.out_channels = in_channels * (2 if learn_sigma else 1)
        self.num_classes = num_classes
        self.grid = (input_size // patch_size, input_size // patch_size)

        self.x_embedder = PatchEmbed(patch_size, in_channels, dim)
        self.t_embedder = TimestepEmbedder(dim, time_freqs)
        self.y_embedder = LabelEmbedder(num_classes, dim) if num_classes else None
        self.pos_embed = nn.Parameter(sincos_position_embedding(dim, self.grid), requires_grad=False)
        attentions = (
            build_attention(
                attention, dim, num_heads, layer=i, depth=depth, num_tokens=self.grid[0] * self.grid[1],
                options=attention_options or {},
            )
            for i in range(depth)
        )  # fmt: skip
        self.blocks = nn.ModuleList(DiTBlock(dim, int(dim * mlp_ratio), attn) for attn in attentions)
        self.final_layer = FinalLayer(dim, patch_size**2 * self.out_channels)
        self._initialize()

    @property
    def null_class(self) -> int | None:
        """The label of classifier-free guidance's unconditional branch; None for an unconditional network."""
        return self.num_classes if self.num_classes else None

    def forward(self, x: Tensor, model_time: Tensor, y: Tensor) -> Tensor:
        """x (B, C, H, W), model_time (B,), y (B,) int64 -> (B, C or 2C, H, W)."""
        c = self.t_embedder(model_time)  # (B, dim)
        if self.y_embedder is not None:
            c = c + self.y_embedder(y)
        tokens = self.x_embedder(x) + self.pos_embed  # (B, N, dim)
        for block in self.blocks:
            tokens = block(tokens, c, self.grid)
        return unpatchify(self.final_layer(tokens, c), self.grid, self.patch_size)

    def macs(self) -> int:
        """Multiply-accumulates of one image: all products of matrices and convolutions, the conditioning's among them.

        Embedding tables, norms, softmax and other functions of single elements do not count.
        """
        num_tokens = self.grid[0] * self.grid[1]
        patch = self.patch_size**2
        dim = self.x_embedder.proj.out_channels
        embedders = num_tokens * patch * self.in_channels * dim + _macs_of(self.t_embedder)
        blocks = sum(
            block.attn.macs(num_tokens) + num_tokens * _macs_of(block.mlp) + _macs_of(block.adaLN_modulation)
            for block in self.blocks
        )
        final = num_tokens * _macs_of(self.final_layer.linear) + _macs_of(self.final_layer.adaLN_modulation)
        return embedders + blocks + final

    def _initialize(self) -> None:
        """DiT's initialisation: Xavier for linear layers, N(0, 0.02) for the embedders, zero for adaLN and the output.

        What a kind of attention adds to `qkv` and `proj` keeps the initialisation its own constructor gave it.
        """
        added = {m for block in self.blocks for m in block.attn.modules()} - {
            projection for block in self.blocks for projection in (block.attn.qkv, block.attn.proj)
        }
        for module in self.modules():
            if isinstance(module, nn.Linear) and module not in added:
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.xavier_uniform_(self.x_embedder.proj.weight.flatten(1))  # flatten is a view of the parameter
        nn.init.zeros_(self.x_embedder.proj.bias)
        for embedder in (self.t_embedder.mlp[0], self.t_embedder.mlp[2]):
            nn.init.normal_(embedder.weight, std=0.02)
        if self.y_embedder is not None:
            nn.init.normal_(self.y_embedder.embedding_table.weight, std=0.02)
        for zeroed in (
            *(b.adaLN_modulation[1] for b in self.blocks),
            self.final_layer.adaLN_modulation[1],
            self.final_layer.linear,
        ):
            nn.init.zeros_(zeroed.weight)
            nn.init.zeros_(zeroed.bias)


def _macs_of(module: nn.Module) -> int:
    """Multiply-accumulates of a module's linear layers on one token."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


class DiTBlock(nn.Module):
    """Attention and MLP, each with LayerNorm modulated and its result gated by the conditioning; the identity at init."""

    def __init__(self, dim: int, mlp_hidden: int, attn: nn.Module):
        super().__init__()
        self.attn = attn
        self.mlp = Mlp(dim, mlp_hidden)
        self.adaLN_modulation = Modulation(dim, 6)

    def forward(self, x: Tensor, c: Tensor, grid: tuple[int, int]) -> Tensor:
        """x (B, N, dim), c (B, dim) -> (B, N, dim)."""
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c)
        x = torch.addcmul(x, gate_msa, self.attn(modulate(x, shift_msa, scale_msa), grid))
        return torch.addcmul(x, gate_mlp, self.mlp(modulate(x, shift_mlp, scale_mlp)))


class FinalLayer(nn.Module):
    """Modulated LayerNorm and a zero-initialised linear map to patches."""

    def __init__(self, dim: int, out_features: int):
        super().__init__()
        self.linear = nn.Linear(dim, out_features)
        self.adaLN_modulation = Modulation(dim, 2)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c)
        return self.linear(modulate(x, shift, scale))
