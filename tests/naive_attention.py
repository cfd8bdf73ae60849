"""What naive definitions share: q, k and v of a module by heads, and softmax written out."""

import torch
from torch import Tensor


def by_heads(linear, x: Tensor, num_heads: int, parts: int) -> tuple[Tensor, ...]:
    """The parts of a fused projection, each (B, heads, N, d)."""
    rows = x @ linear.weight.T + (0 if linear.bias is None else linear.bias)
    return tuple(
        part.reshape(*x.shape[:2], num_heads, -1).permute(0, 2, 1, 3) for part in rows.split(rows.shape[-1] // parts, -1)
    )


def softmax(logits: Tensor) -> Tensor:
    e = torch.exp(logits)
    return e / e.sum(-1, keepdim=True)


def products(q: Tensor, k: Tensor) -> Tensor:
    """Logits q k' / sqrt(d)."""
    return torch.einsum("bhnd,bhmd->bhnm", q, k) / q.shape[-1] ** 0.5


def join(heads: Tensor, attention) -> Tensor:
    """The output projection of heads (B, heads, N, d)."""
    return heads.permute(0, 2, 1, 3).flatten(2) @ attention.proj.weight.T + attention.proj.bias


def random_parameters(attention, scale: float = 0.5):
    """The module in float64 with every trainable parameter random and of a size that shows."""
    generator = torch.Generator().manual_seed(0)
    attention = attention.double()
    for parameter in attention.parameters():
        parameter.data = scale * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return attention


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_same_function(module, naive, x: Tensor, *, rtol: float = 1e-9, atol: float = 1e-11) -> None:
    """Output and every gradient of module(x) are those of naive(x)."""
    x = x.requires_grad_()
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    outs = module(x), naive(x)
    torch.testing.assert_close(*outs, rtol=rtol, atol=atol)
    weights = randn(*outs[0].shape, seed=2)
    found = [torch.autograd.grad((out * weights).sum(), [x, *parameters.values()], allow_unused=True) for out in outs]
    for name, ours, theirs in zip(["x", *parameters], *found, strict=True):
        theirs = torch.zeros_like(ours) if theirs is None else theirs
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol, msg=lambda text, name=name: f"gradient of {name}: {text}")


class OnGrid(torch.nn.Module):
    """attention(x) on one grid, with the module's parameters."""

    def __init__(self, attention, grid: tuple[int, int] = (3, 5)):
        super().__init__()
        self.attention, self.grid = attention, grid

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, self.grid)
