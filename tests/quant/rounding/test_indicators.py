"""Indicators against the paper's equations in float64, and against rounding really done."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from quant.common.errors import CheckpointError, SpecError
from quant.rounding.canonical import dequantize, quantize
from quant.rounding.gram import Gram, top_eigenvalue
from quant.rounding.indicators import (
    HessianStatistics,
    RunningMoments,
    VarianceStatistics,
    random_indicator,
    squared_rounding_error,
    weight_noises,
)
from quant.rounding.ways import Rounding
from quant.scheme import VarianceForm

BITS = (3, 4, 8, 16)
CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("offset", [0.0, 3.0, -500.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_are_those_of_all_values(offset: float, dtype: torch.dtype) -> None:
    parts = [
        (normal(*shape, seed=i) * (i + 1) + offset).to(dtype)
        for i, shape in enumerate([(1, 7), (2, 3, 50_000), (65_537,), (1,)])
    ]
    moments = RunningMoments()
    for part in parts:
        moments.add(part)
    values = torch.cat([part.flatten() for part in parts]).double().numpy()
    assert moments.count == values.size
    assert moments.mean == pytest.approx(values.mean(), rel=1e-5, abs=1e-5)
    assert moments.variance == pytest.approx(values.var(), rel=1e-4)


def test_moments_of_a_transposed_view_and_of_equal_values() -> None:
    view, moments = normal(40, 30).T, RunningMoments()
    moments.add(view)
    assert moments.variance == pytest.approx(float(view.double().var(correction=0)), rel=1e-6)
    equal = RunningMoments()
    equal.add(torch.full((100_000,), 0.1))
    assert equal.variance == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e25])
def test_moments_refuse_what_is_not_finite(bad: float) -> None:
    values = normal(100)
    values[3] = bad
    with pytest.raises(CheckpointError, match="not finite"):
        RunningMoments().add(values)


def eq3(weight: Tensor, inputs: Tensor, bits: int, form: VarianceForm) -> float:
    """One linear's term of eq. 3 with eq. 2, word for word, in float64."""
    if bits == 16:
        return 0.0
    w, x = weight.double(), inputs.double()
    if form.scheme == "asymmetric":
        s_w = (w.max() - w.min()) / (2**bits - 1)
    else:
        s_w = w.abs().max() / (2 ** (bits - 1) - 1)
    variance, mean = x.var(correction=0), x.mean()
    g = variance / 4 if form.rounding == "nearest" else (mean**2 + variance) / 6
    return float(w.numel() * s_w**2 * g)


FORMS = [
    VarianceForm(rounding, scheme)
    for rounding in ("nearest", "stochastic")
    for scheme in ("asymmetric", "symmetric")
]


@pytest.mark.parametrize("form", FORMS)
def test_variance_indicator_is_proposition_2(form: VarianceForm) -> None:
    shared, own = normal(5, 40, 64, seed=1) + 0.7, normal(200, 96, seed=2) * 3
    weights = {
        "q": normal(64, 64, seed=3),
        "k": normal(16, 64, seed=4) * 0.1 - 0.2,
        "down": normal(64, 96, seed=5).bfloat16(),
    }
    statistics = VarianceStatistics(form)
    for batch in shared:
        statistics.observe("q", batch)
    statistics.observe("down", own)
    found = statistics.omega(weights, {"q": "q", "k": "q", "down": "down"}, BITS)
    inputs = {"q": shared, "k": shared, "down": own}
    expected = [sum(eq3(w, inputs[name], b, form) for name, w in weights.items()) for b in BITS]
    assert found == pytest.approx(expected, rel=1e-5)
    assert found[-1] == 0


def test_group_scales_are_the_quantizers() -> None:
    weight, form = normal(6, 256) * torch.logspace(-2, 0, 256), VarianceForm(scales="group")
    groups = weight.double().view(6, 8, 32)
    spans = groups.amax(-1) - groups.amin(-1)
    rows = weight.double().amax(-1) - weight.double().amin(-1)
    expected = [float((spans / 7).square().sum() * 32), float((rows / 255).square().sum() * 256)]
    assert weight_noises(form, weight, (3, 8, 16)) == pytest.approx([*expected, 0])
    per_tensor = weight_noises(VarianceForm(), weight, (3,))[0]
    assert expected[0] < per_tensor


def test_noise_that_theorem_1_bounds_is_what_rounding_adds() -> None:
    """Uniform weights and inputs: rounding to nearest errs by S^2 / 12, a third of its bound."""
    weight = torch.rand(32, 512, generator=torch.Generator().manual_seed(0)) - 0.5
    inputs = normal(4096, 512, seed=1)
    error = inputs @ (dequantize(quantize(weight, 3, rounding=Rounding("nearest"))) - weight).T
    added = float(error.double().square().sum(dim=1).mean())  # summed over outputs
    bound = weight_noises(VarianceForm(), weight, (3,))[0] / 4
    assert added == pytest.approx(bound / 3, rel=0.1)


def test_weights_that_are_not_finite() -> None:
    weight = normal(8, 32)
    weight[1, 1] = float("nan")
    for form in (VarianceForm(), VarianceForm(scales="group")):
        with pytest.raises(CheckpointError, match="NaN"):
            weight_noises(form, weight, BITS)


def test_unknown_forms() -> None:
    with pytest.raises(SpecError, match="scales is 'row'; it must be one of tensor, group"):
        VarianceForm(scales="row")


@pytest.mark.parametrize("size", [1, 5, 64, 200])
@pytest.mark.parametrize("rank", [1, 500])
def test_top_eigenvalue_is_lapacks(size: int, rank: int) -> None:
    inputs = normal(rank, size) + normal(size, seed=9)
    gram = Gram(size, CPU)
    for batch in inputs.split(77):
        gram.add(batch)
    exact = inputs.double().T @ inputs.double()
    torch.testing.assert_close(gram.matrix().double(), exact, rtol=1e-4, atol=1e-3)
    wanted = float(torch.linalg.eigvalsh(exact)[-1])
    assert gram.top_eigenvalue() == pytest.approx(wanted, rel=1e-3)


def test_top_eigenvalue_of_multiples_of_the_identity() -> None:
    assert top_eigenvalue(torch.eye(70) * 5) == pytest.approx(5)
    assert top_eigenvalue(torch.zeros(7, 7)) == 0


def test_gram_takes_any_type_and_refuses_what_is_not_finite() -> None:
    inputs = normal(2, 9, 24).bfloat16()
    gram = Gram(24, CPU)
    gram.add(inputs)
    rows = inputs.view(-1, 24).double()
    torch.testing.assert_close(gram.matrix().double(), rows.T @ rows, rtol=1e-5, atol=1e-5)
    gram.add(torch.full((1, 24), float("inf")))
    with pytest.raises(CheckpointError, match="not finite"):
        gram.top_eigenvalue()


def test_hessian_indicator_is_eigenvalue_times_squared_error() -> None:
    inputs = {"q": normal(300, 64) + 1, "down": normal(300, 96, seed=1)}
    weights = {"q": normal(700, 64, seed=2), "k": normal(8, 64), "down": normal(64, 96, seed=3)}
    statistics = HessianStatistics()
    for source, values in inputs.items():
        statistics.observe(source, values)
    found = statistics.omega(weights, {"q": "q", "k": "q", "down": "down"}, BITS)
    expected = []
    for bits in BITS[:-1]:
        total = 0.0
        for name, weight in weights.items():
            x = inputs["down" if name == "down" else "q"].double()
            top = float(torch.linalg.eigvalsh(2 * x.T @ x)[-1])
            apart = (dequantize(quantize(weight, bits)) - weight).double()
            assert squared_rounding_error(weight, bits) == pytest.approx(
                float(apart.square().sum()), rel=1e-5
            )
            total += top * float(apart.square().sum())
        expected.append(total)
    assert found == pytest.approx([*expected, 0], rel=1e-3)


def test_random_indicator_falls_and_is_seeded() -> None:
    matrix = random_indicator(50, BITS, seed=3)
    assert matrix.shape == (50, 4)
    assert (np.diff(matrix, axis=1) <= 0).all()
    assert (matrix[:, 3] == 0).all()
    assert matrix[:, 0].std() > 0.1  # layers differ
    assert (matrix == random_indicator(50, BITS, seed=3)).all()
    assert (matrix != random_indicator(50, BITS, seed=4))[:, 0].all()
    assert (np.diff(random_indicator(9, (8, 3), 0), axis=1) >= 0).all()  # in the order given
