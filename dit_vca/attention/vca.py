"""Visual-Contrast Attention (VCA): two streams of pooled contrast tokens, linear in the number of tokens.

Equation numbers are those of the VCA paper. Where it leaves a detail open, the choice here is the one that reproduces
the parameter and operation counts of its Tables 1 to 4; docs/attention/vca.md lists them.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d, rms_norm, scaled_dot_product_attention

from .base import QKVAttention, check_grid, one_of, refuse_bias, refuse_other_tokens
from .differential import RMS_EPS, check_halves, difference_of_maps, lambda_init, learned_lambda
from .streams import STAGE_1, STAGE_2, Streams, softmax_stream

STAGES = ("vca", "vanilla", "differential")
STREAMS = ("pool", "emb", "pool+emb")


class VisualContrastAttention(QKVAttention):
    """VCA with n = pool x pool contrast tokens a head, at every size of the token grid; and its ablations.

    Options: `pool`, the side of the contrast grid (8 in the paper's DiT and SiT, 7 in DeiT); `depthwise`, the kernel
    size of the convolution on the values (3; 0 leaves it out); `embedding_std`, of the learned stream embeddings.

    `stage1` and `stage2` are `vca`, `vanilla` (one softmax with the pooled queries as tokens) or `differential` (halves
    of each head, with the pooled queries as tokens); `vca` and `differential` do not go together. `positive` and
    `negative` say what the contrast tokens of a stream are where a stage is `vca`: pooled queries, the embedding alone,
    or their sum. Parameters that an ablation does not use are kept, frozen, as the paper counts them.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        layer: int = 0,
        qkv_bias: bool = True,
        pool: int = 8,
        depthwise: int = 3,
        embedding_std: float = 0.02,
        stage1: str = "vca",
        stage2: str = "vca",
        positive: str = "pool+emb",
        negative: str = "pool+emb",
    ):
        super().__init__(dim, num_heads, layer=layer, qkv_bias=qkv_bias, depthwise=depthwise)
        if pool < 1:
            raise ValueError(f"attention option pool must be at least 1, got {pool}")
        if embedding_std < 0:
            raise ValueError(f"attention option embedding_std must not be negative, got {embedding_std}")
        self.stages = one_of("stage1", stage1, STAGES), one_of("stage2", stage2, STAGES)
        self.streams = one_of("positive", positive, STREAMS), one_of("negative", negative, STREAMS)
        if "differential" in self.stages:
            check_halves(self.head_dim)
            if "vca" in self.stages:
                raise ValueError("attention options stage1 and stage2: vca and differential do not go together")
        self.pool = pool
        self.lambda_init = lambda_init(layer)
        for name, stream in zip(("embedding_pos", "embedding_neg"), self.streams, strict=True):
            has_embedding = stream != "pool" and "vca" in self.stages
            embedding = nn.Parameter(torch.empty(num_heads, pool * pool, self.head_dim)) if has_embedding else None
            if embedding is not None:
                nn.init.trunc_normal_(embedding, std=embedding_std)
            self.register_parameter(name, embedding)
        self.lambda1 = nn.Parameter(torch.empty(4, self.head_dim))  # rows: q1, k1, q2, k2
        self.lambda2 = nn.Parameter(torch.empty(4, self.head_dim))
        self.rms1 = nn.Parameter(torch.ones(self.head_dim))
        self.rms2 = nn.Parameter(torch.ones(self.head_dim))
        for vectors in (self.lambda1, self.lambda2):
            nn.init.normal_(vectors, std=0.1)
        for stage, unused in zip(self.stages, ((self.lambda1, self.rms1), (self.lambda2, self.rms2)), strict=True):
            for parameter in unused if stage == "vanilla" else ():
                parameter.requires_grad_(False)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], *, bias: Tensor | None = None) -> Tensor:
        refuse_bias(bias, "VCA", "it has no q-k logits that one could be added to")
        refuse_other_tokens(q, k, "VCA")
        return visual_contrast_attention(
            q, k, v, grid,
            contrast_grid=(self.pool, self.pool),
            embeddings=(self.embedding_pos, self.embedding_neg),
            lambdas=(learned_lambda(self.lambda1, self.lambda_init), learned_lambda(self.lambda2, self.lambda_init)),
            gains=(self.rms1, self.rms2),
            scale=1 - self.lambda_init,
            stages=self.stages,
            streams=self.streams,
        )  # fmt: skip

    def two_streams(self, x: Tensor, grid: tuple[int, int], *, kv: Tensor | None = None) -> tuple[Streams, ...]:
        """The stages that are not vanilla, each before lambda and norm, with the maps written out.

        In stage I the n contrast tokens read all values, in stage II the N tokens read the n contrast values.
        """
        q, k, v = (self._split_heads(tokens) for tokens in self._project(x, kv))
        refuse_other_tokens(q, k, "VCA")
        if set(self.stages) == {"vanilla"}:
            raise ValueError("VCA with both stages vanilla has no two streams; make stage1 or stage2 vca or differential")
        pooled = pool_queries(q, grid, (self.pool, self.pool))
        pairs = {"differential": [z.chunk(2, dim=-1) for z in (q, k, pooled)]}  # of both streams: queries, keys, contrast tokens
        if "vca" in self.stages:
            embedded = zip(self.streams, (self.embedding_pos, self.embedding_neg), strict=True)
            pairs["vca"] = [(q, q), (k, k), [contrast_tokens(pooled, s, e, len(q)) for s, e in embedded]]
        lambdas = [learned_lambda(vectors, self.lambda_init) for vectors in (self.lambda1, self.lambda2)]
        found, (stage1, stage2) = [], self.stages
        if stage1 != "vanilla":
            _, keys, asking = pairs[stage1]
            branches = [softmax_stream(a, b, v) for a, b in zip(asking, keys, strict=True)]
            found.append(Streams(STAGE_1, *branches, lambdas[0].expand(self.num_heads)))
        if stage2 != "vanilla":
            tokens = torch.cat(pairs["vca"][2], dim=2) if "vca" in pairs else None
            contrast = _gather(stage1, pooled, tokens, k, v, lambdas[0])
            if stage1 != "vanilla":
                contrast = (1 - self.lambda_init) * rms_norm(contrast, self.rms1.shape, self.rms1, RMS_EPS)
            asking, _, read = pairs[stage2]
            branches = [softmax_stream(a, b, contrast) for a, b in zip(asking, read, strict=True)]
            found.append(Streams(STAGE_2, *branches, lambdas[1].expand(self.num_heads)))
        return tuple(found)

    def mix_macs(self, num_tokens: int) -> int:
        """In units of N n dim: stage I 4, or 2 where it is vanilla or its maps are differenced first; stage II 3 or 2."""
        units = {"vca": 4, "vanilla": 2, "differential": 2}[self.stages[0]] + {"vca": 3, "vanilla": 2, "differential": 2}[
            self.stages[1]
        ]
        return units * num_tokens * self.pool**2 * self.dim

    def extra_repr(self) -> str:
        return f"pool={self.pool}, layer={self.layer}, stages={self.stages}, streams={self.streams}"


def visual_contrast_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: tuple[int, int],
    *,
    contrast_grid: tuple[int, int],
    embeddings: tuple[Tensor | None, Tensor | None],
    lambdas: tuple[Tensor, Tensor],
    gains: tuple[Tensor, Tensor],
    scale: float,
    stages: tuple[str, str] = ("vca", "vca"),
    streams: tuple[str, str] = ("pool+emb", "pool+emb"),
) -> Tensor:
    """Both stages of VCA: q, k, v (B, heads, N, d) -> (B, heads, N, d).

    embeddings: e+ and e-, each (heads, n, d); lambdas: of stage I and II, each a scalar; gains: RMSNorm's, each (d,);
    scale: 1 - lambda_init.
    """
    pooled = tokens = None
    if set(streams) != {"emb"} or set(stages) != {"vca"}:
        pooled = pool_queries(q, grid, contrast_grid)  # (B, heads, n, d)
    if "vca" in stages:
        tokens = torch.cat(
            [contrast_tokens(pooled, s, e, len(q)) for s, e in zip(streams, embeddings, strict=True)], dim=2
        )  # t+ then t-: (B, heads, 2n, d)
    contrast = _gather(stages[0], pooled, tokens, k, v, lambdas[0])
    if stages[0] != "vanilla":
        contrast = scale * rms_norm(contrast, gains[0].shape, gains[0], RMS_EPS)  # Eq. 10
    out = _scatter(stages[1], q, pooled, tokens, contrast, lambdas[1])
    return out if stages[1] == "vanilla" else scale * rms_norm(out, gains[1].shape, gains[1], RMS_EPS)  # Eq. 13


def contrast_tokens(pooled: Tensor | None, stream: str, embedding: Tensor | None, batch: int) -> Tensor:
    """The contrast tokens of one stream, (B, heads, n, d)."""
    if stream == "emb":
        return embedding.expand(batch, *embedding.shape)
    return pooled if stream == "pool" else pooled + embedding


def _gather(stage: str, pooled, tokens, k: Tensor, v: Tensor, lam: Tensor) -> Tensor:
    """Stage I: what the contrast tokens read of all values, (B, heads, n, d)."""
    if stage == "vanilla":
        return scaled_dot_product_attention(pooled, k, v)
    if stage == "differential":
        return difference_of_maps(_half_logits(pooled, k), lam) @ v
    v_pos, v_neg = scaled_dot_product_attention(tokens, k, v).chunk(2, dim=2)  # Eq. 9, both streams in one pass over k, v
    return v_pos - lam * v_neg


def _scatter(stage: str, q: Tensor, pooled, tokens, contrast: Tensor, lam: Tensor) -> Tensor:
    """Stage II: what every token reads of the contrast values, (B, heads, N, d)."""
    if stage == "vanilla":
        return scaled_dot_product_attention(q, pooled, contrast)
    if stage == "differential":
        return difference_of_maps(_half_logits(q, pooled), lam) @ contrast
    logits = (q / math.sqrt(q.shape[-1])) @ tokens.transpose(-2, -1)  # (B, heads, N, 2n)
    return difference_of_maps(logits.unflatten(-1, (2, -1)), lam) @ contrast  # Eq. 11, 12: two softmaxes over n


def _half_logits(q: Tensor, k: Tensor) -> Tensor:
    """(B, heads, N, 2, M): the products of both halves of each head, over sqrt(d / 2)."""
    halves = [a @ b.transpose(-2, -1) for a, b in zip(q.chunk(2, dim=-1), k.chunk(2, dim=-1), strict=True)]
    return torch.stack(halves, dim=-2) / math.sqrt(q.shape[-1] / 2)


def pool_queries(q: Tensor, grid: tuple[int, int], contrast_grid: tuple[int, int]) -> Tensor:
    """Adaptive average pooling of the patch tokens' queries: (B, heads, N, d) -> (B, heads, h * w, d).

    Prefix tokens are not pooled. A contrast grid finer than the token grid repeats tokens; one that does not divide it
    has overlapping bins.
    """
    check_grid(q.shape[2], grid)
    (height, width), (rows, columns) = grid, contrast_grid
    image = q[:, :, q.shape[2] - height * width :].unflatten(2, grid)  # (B, heads, H, W, d)
    if height % rows == 0 and width % columns == 0:
        bins = image.unflatten(3, (columns, width // columns)).unflatten(2, (rows, height // rows))
        return bins.mean((3, 5)).flatten(2, 3)
    channels_first = image.permute(0, 1, 4, 2, 3).flatten(0, 1)  # (B * heads, d, H, W)
    pooled = adaptive_avg_pool2d(channels_first, contrast_grid)
    return pooled.unflatten(0, q.shape[:2]).flatten(3).transpose(2, 3)
