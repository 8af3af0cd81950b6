"""Yogi against the loop that the paper writes."""

import math

import pytest
import torch

from adumbra.training import optimizers
from adumbra.training.optimizers import Yogi


@pytest.mark.parametrize("chunk", [3, 1 << 16])
def test_yogi_equals_a_plain_loop(monkeypatch, chunk):
    monkeypatch.setattr(optimizers, "CHUNK", chunk)
    torch.manual_seed(0)
    parameters = [torch.randn(4, 2, dtype=torch.float64, requires_grad=True), torch.randn((), requires_grad=True)]
    plain = [p.detach().reshape(-1).tolist() for p in parameters]
    m, v = ([[start] * len(p) for p in plain] for start in (0.0, 1e-6))
    optimizer = Yogi(parameters, lr=0.05, betas=(0.8, 0.99), eps=1e-3)
    for t in range(1, 6):
        optimizer.param_groups[0]["lr"] = 0.05 / t  # as a schedule sets it
        for k, parameter in enumerate(parameters):
            parameter.grad = torch.randn_like(parameter)
            for i, g in enumerate(parameter.grad.reshape(-1).tolist()):
                m[k][i] = 0.8 * m[k][i] + 0.2 * g
                v[k][i] -= 0.01 * math.copysign(1, v[k][i] - g * g) * g * g
                m_hat, v_hat = m[k][i] / (1 - 0.8**t), v[k][i] / (1 - 0.99**t)
                plain[k][i] -= 0.05 / t * m_hat / (math.sqrt(v_hat) + 1e-3)
        optimizer.step()
    for parameter, want in zip(parameters, plain, strict=True):
        assert parameter.detach().reshape(-1).tolist() == pytest.approx(want, rel=1e-5, abs=1e-6)


def test_yogi_resumes_from_its_state():
    def trained(steps, state=None, start=None):
        parameter = torch.tensor(start if start is not None else [1.0, -2.0], requires_grad=True)
        optimizer = Yogi([parameter], lr=0.1)
        if state:
            optimizer.load_state_dict(state)
        for _ in range(steps):
            optimizer.zero_grad()
            parameter.square().sum().backward()
            optimizer.step()
        return parameter.detach().tolist(), optimizer.state_dict()

    half, state = trained(3)
    assert trained(3, state, half)[0] == trained(6)[0]
