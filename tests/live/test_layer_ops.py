"""A layer's work on single rows: the kernels against float64, beside PyTorch's own in bfloat16."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hlem_env.live.layer_ops import KERNEL_WIDTH, layer_norm, silu_

KERNEL_TOLERANCE = 5e-3
NO_WORSE = 1.05
"""Of our error over PyTorch's; rounding the result to bfloat16 is nearly all of both."""
EPSILON = 1e-6
TINY_EPSILON = 1e-18
SHAPES = [(1, 512), (128, 512), (4099, 512), (37, 1024), (300, 64), (5, 777), (2500, 3)]


class Case:
    """Random rows, and a gate that is a strided view, as a projection's first part is."""

    def __init__(
        self,
        rows: int,
        width: int,
        scale: float = 1.0,
        device: str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        generator = torch.Generator(device).manual_seed(rows + width)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        self.x = (scale * (normal(rows, width) + 0.5)).to(dtype)
        self.weight, self.bias = (1 + 0.3 * normal(width)).to(dtype), normal(width).to(dtype)
        self.projected = normal(rows, 4 * width).to(dtype)
        self.gate, self.rest = self.projected.split([width, 3 * width], 1)

    def by_hand(self, epsilon: float, gated: bool) -> Tensor:
        """The formula in float64."""
        x, weight, bias, gate = (t.double() for t in (self.x, self.weight, self.bias, self.gate))
        centred = x - x.mean(1, keepdim=True)
        variance = centred.pow(2).mean(1, keepdim=True)
        normed = centred / (variance + epsilon).sqrt() * weight + bias
        return normed * gate / (1 + (-gate).exp()) if gated else normed


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Frobenius, NaN counted as infinite."""
    error = float((actual.double() - expected).norm() / expected.norm())
    return math.inf if math.isnan(error) else error


@pytest.mark.parametrize("gated", [False, True])
def test_definition_follows_the_formula(gated: bool) -> None:
    case = Case(9, 20, device="cpu", dtype=torch.float64)
    gate = case.gate if gated else None
    result = layer_norm(case.x, case.weight, case.bias, EPSILON, gate)
    torch.testing.assert_close(result, case.by_hand(EPSILON, gated), rtol=1e-12, atol=1e-12)


def test_silu_leaves_the_gate_alone() -> None:
    case = Case(9, 20, device="cpu", dtype=torch.float64)
    gate, expected = case.gate.clone(), case.rest / (1 + (-case.rest).exp())
    silu_(case.rest)
    torch.testing.assert_close(case.projected, torch.cat([gate, expected], 1))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), SHAPES)
@pytest.mark.parametrize(("scale", "epsilon"), [(1.0, EPSILON), (3e-7, TINY_EPSILON)])
def test_norm_is_as_exact_as_pytorchs(rows: int, width: int, scale: float, epsilon: float) -> None:
    case = Case(rows, width, scale)
    expected = case.by_hand(epsilon, gated=False)
    ours = layer_norm(case.x, case.weight, case.bias, epsilon)
    theirs = functional.layer_norm(case.x, (width,), case.weight, case.bias, epsilon)
    error = relative_error(ours, expected)
    assert error < KERNEL_TOLERANCE
    assert error <= NO_WORSE * relative_error(theirs, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_gated_norm_is_as_exact_as_pytorchs(rows: int, width: int) -> None:
    case = Case(rows, width, 3e-7)
    expected = case.by_hand(TINY_EPSILON, gated=True)
    ours = layer_norm(case.x, case.weight, case.bias, TINY_EPSILON, case.gate)
    theirs = functional.layer_norm(case.x, (width,), case.weight, case.bias, TINY_EPSILON)
    theirs = theirs * functional.silu(case.gate)
    error = relative_error(ours, expected)
    assert error < KERNEL_TOLERANCE
    assert error <= NO_WORSE * relative_error(theirs, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_silu_is_as_exact_as_pytorchs_and_leaves_the_gate_alone(rows: int, width: int) -> None:
    case = Case(rows, width)
    gate, theirs = case.gate.clone(), functional.silu(case.rest)
    expected = case.rest.double() / (1 + (-case.rest.double()).exp())
    silu_(case.rest)
    error = relative_error(case.rest, expected)
    assert error < KERNEL_TOLERANCE
    assert error <= NO_WORSE * relative_error(theirs, expected)
    assert torch.equal(case.gate, gate)


@pytest.mark.gpu
def test_wide_strided_and_no_rows() -> None:
    """What the kernels do not take has the same result; no rows have none."""
    for case in (Case(5, KERNEL_WIDTH + 1), Case(0, 512)):
        result = layer_norm(case.x, case.weight, case.bias, EPSILON, case.gate)
        assert result.shape == case.x.shape
        if len(result):
            assert relative_error(result, case.by_hand(EPSILON, gated=True)) < KERNEL_TOLERANCE
        silu_(case.rest)
    case = Case(33, 64)
    strided = layer_norm(case.gate, case.weight, case.bias, EPSILON)
    assert strided.is_contiguous()
    assert torch.equal(strided, layer_norm(case.gate.clone(), case.weight, case.bias, EPSILON))


@pytest.mark.gpu
def test_a_row_of_nan_stays_alone() -> None:
    case = Case(64, 512)
    expected = layer_norm(case.x, case.weight, case.bias, EPSILON, case.gate)
    case.x[7] = math.nan
    result = layer_norm(case.x, case.weight, case.bias, EPSILON, case.gate)
    others = torch.arange(64, device="cuda") != 7
    assert torch.equal(result[others], expected[others])
    assert bool(result[7].isnan().all())


@pytest.mark.gpu
def test_recorded_kernels_read_new_values() -> None:
    case, other = Case(70, 512), Case(70, 512, 2.0)
    other.projected.neg_()
    expected = layer_norm(other.x, case.weight, case.bias, EPSILON, other.gate)
    silu_(other.rest.copy_(case.rest))
    layer_norm(case.x, case.weight, case.bias, EPSILON, case.gate)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = layer_norm(case.x, case.weight, case.bias, EPSILON, case.gate)
        silu_(case.rest)
    case.x.copy_(other.x)
    case.gate.copy_(other.gate)
    graph.replay()
    assert torch.equal(result, expected)
    assert torch.equal(case.rest, other.rest)
