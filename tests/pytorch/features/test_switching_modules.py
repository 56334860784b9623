"""Modules of torch that compute otherwise while a function mode looks on are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from watching import Output, attached, warnings_in


class WithFrozenEncoder(nn.Module):
    """Its encoder takes torch's fast path, unless a mode is on the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            seen = self.encoder(x)
        return self.head(seen)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = WithFrozenEncoder()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def trained(output: Output | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = Holder()
    model.inner.encoder.eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.inner.head.parameters(), lr=0.1)
    x = torch.randn(3, 5, 16)
    watched = (
        None
        if output is None
        else attached(output, model, optimizer, recording_l2_features=True, l2_targets={"attention_hook": ["inner"]})
    )
    for _ in range(3):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if watched is not None:
        watched.close()
    return [p.detach().clone() for p in model.parameters()]


def test_the_fast_path_is_taken_as_without_the_monitor(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    expected, found = trained(None), trained(output)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert any("attention_hook" in said and "'inner'" in said for said in warnings_in(caplog))
