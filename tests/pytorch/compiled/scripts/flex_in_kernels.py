"""Trains with FlexAttention in kernels, in a directory that is given, and prints JSON: the rows of eager code and of compiled
code, the bits and the number of graphs with the monitor and without.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from compiling import Ways, trained
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from watching import Output

KINDS = ("attention_hook", "attention_head_hook")
CONFIG = {
    "recording_l2_features": True,
    "l2_targets": {kind: [""] for kind in KINDS},
    "ops": ["norm"],
    "ndigits": 17,
}
WINDOW = torch.tensor(2)


class Windowed(nn.Module):
    """Attention of 128 tokens in float32, with a mask that was made before."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.projection, self.attend = torch.sin(torch.arange(32.0 * 96)).view(32, 96), attend
        self.mask = create_block_mask(lambda _b, _h, i, j: i - j < WINDOW, None, None, 128, 128, device="cpu")
        self.factor = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x.float() @ self.projection).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        attended: Tensor = self.attend(q, k, v, block_mask=self.mask, scale=0.5)
        return attended.transpose(1, 2).flatten(2) + self.factor * x


def batch(number: int) -> Tensor:
    return torch.sin(torch.arange(2 * 128 * 32) * (1.0 + number)).view(2, 128, 32)


def rows(output: Output) -> list[Any]:
    found = [row for kind in KINDS for row in output.rows(kind, max(output.directories()))]
    return sorted([[row.kind, row.name, row.step, row.micro_step], row.values] for row in found)


def bits(numbers: list[Tensor]) -> list[str]:
    return [x.detach().numpy().tobytes().hex() for x in numbers]


output = Output(Path(sys.argv[1]))
trained(lambda: Windowed(flex_attention), Ways.eager, output, batch, config=CONFIG)
eager = rows(output)
attend = torch.compile(flex_attention)  # as many programs do, also those that compile the model
before = trained(lambda: Windowed(attend), Ways.within_a_function, None, batch)
after = trained(lambda: Windowed(attend), Ways.within_a_function, output, batch, config=CONFIG)
print(json.dumps([eager, rows(output), [bits(before.numbers), bits(after.numbers)], [before.graphs, after.graphs]]))
