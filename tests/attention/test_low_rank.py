import pytest
import torch
from naive_attention import OnGrid, assert_same_function, by_heads, join, products, randn, random_parameters, softmax

from dit_vca.attention import build_attention
from dit_vca.attention.low_rank import pseudo_inverse, segment_means


def build(name: str, num_tokens: int | None = 15, **options):
    torch.manual_seed(0)
    return build_attention(name, 12, 3, layer=1, num_tokens=num_tokens, options=options)


def test_nystromformer_and_its_gradients_are_those_of_its_equation():
    attention = random_parameters(build("nystromformer", landmarks=5, iterations=2))

    def naive(x):
        q, k, v = by_heads(attention.qkv, x, 3, 3)
        q_few, k_few = (z.reshape(2, 3, 5, 3, 4).sum(3) / 3 for z in (q, k))
        kernel = softmax(products(q_few, k_few))
        identity = torch.eye(5, dtype=torch.float64)
        rows, columns = kernel.abs().sum(-1).max(-1).values, kernel.abs().sum(-2).max(-1).values
        z = kernel.mT / (rows * columns)[..., None, None]
        for _ in range(2):
            z = 0.25 * z @ (13 * identity - kernel @ z @ (15 * identity - kernel @ z @ (7 * identity - kernel @ z)))
        return join(softmax(products(q, k_few)) @ (z @ (softmax(products(q_few, k)) @ v)), attention)

    assert_same_function(OnGrid(attention), naive, randn(2, 15, 12))


@pytest.mark.parametrize("landmarks", [15, 40])
def test_nystromformer_with_as_many_landmarks_as_tokens_is_softmax_attention(landmarks):
    nystrom, exact = random_parameters(build("nystromformer", landmarks=landmarks)), random_parameters(build("softmax"))
    x = randn(2, 15, 12)
    assert torch.equal(nystrom(x, (3, 5)), exact(x, (3, 5)))


def test_nystromformer_is_exact_where_the_tokens_of_a_segment_are_equal_and_the_inverse_is():
    attention = build("nystromformer", landmarks=5, iterations=30).double()
    q, k = (randn(1, 3, 5, 4, seed=s).repeat_interleave(3, dim=2) for s in (1, 2))
    v = randn(1, 3, 15, 4, seed=3)
    exact = torch.einsum("bhnm,bhmd->bhnd", softmax(products(q, k)), v)
    torch.testing.assert_close(attention.mix(q, k, v, (3, 5)), exact, rtol=1e-6, atol=1e-6)


def test_the_pseudo_inverse_is_the_inverse():
    a = randn(2, 3, 6, 6).softmax(-1)
    torch.testing.assert_close(pseudo_inverse(a, 40) @ a, torch.eye(6, dtype=torch.float64).expand(2, 3, 6, 6), rtol=0, atol=1e-6)


def test_segments_that_do_not_divide_the_tokens_overlap():
    x = torch.arange(7.0).view(1, 1, 7, 1)
    assert segment_means(x, 3).flatten().tolist() == [1.0, 3.0, 5.0]  # tokens 0 to 2, 2 to 4, 4 to 6
    assert segment_means(x[:, :, :6], 3).flatten().tolist() == [0.5, 2.5, 4.5]


def test_linformer_and_its_gradients_are_those_of_its_equation():
    attention = random_parameters(build("linformer", rank=4))

    def naive(x):
        q, k, v = by_heads(attention.qkv, x, 3, 3)
        k, v = (torch.einsum("rn,bhnd->bhrd", p, z) for p, z in ((attention.project_k, k), (attention.project_v, v)))
        return join(torch.einsum("bhnr,bhrd->bhnd", softmax(products(q, k)), v), attention)

    assert_same_function(OnGrid(attention), naive, randn(2, 15, 12))


def test_linformer_with_the_identity_as_its_projections_is_softmax_attention():
    linformer, exact = random_parameters(build("linformer", rank=15)), random_parameters(build("softmax"))
    for projection in (linformer.project_k, linformer.project_v):
        projection.data = torch.eye(15, dtype=torch.float64)
    exact.load_state_dict({k: v for k, v in linformer.state_dict().items() if "project_" not in k})
    x = randn(2, 15, 12)
    torch.testing.assert_close(linformer(x, (3, 5)), exact(x, (3, 5)))


def test_linformer_is_tied_to_its_number_of_tokens():
    with pytest.raises(ValueError, match="linformer was made for 15 tokens, got 12"):
        build("linformer")(torch.zeros(1, 12, 12), (3, 4))
    with pytest.raises(ValueError, match="needs the number of tokens"):
        build("linformer", None)


@pytest.mark.parametrize("name", ["nystromformer", "linformer"])
def test_a_bias_is_refused_with_the_reason(name):
    with pytest.raises(ValueError, match="stand for many tokens; use softmax attention"):
        build(name)(torch.zeros(1, 15, 12), (3, 5), bias=torch.zeros(1, 3, 15, 15))


@pytest.mark.parametrize(
    ("name", "option"), [("nystromformer", "landmarks"), ("nystromformer", "iterations"), ("linformer", "rank")]
)
def test_a_size_below_one_is_refused(name, option):
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        build(name, **{option: 0})
