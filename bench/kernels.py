"""How long six statistics of a tensor take, as multiples of one ``sum`` over the same tensor, and how right they are.

    python bench/kernels.py

Three ways stand side by side: this project's kernel; torch operators on the whole tensor; an op at a time, with mean and norm
in float64, as tools do that care for accuracy. One thread; in each round every way is run once after one ``sum``, in an order
that changes, and the medians of CPU time ratios are reported.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from stepping import rotated
from tables import Progress, aligned, save
from torch import Tensor

from monitor.stats.ops import derive
from monitor.stats.partials import Partials
from monitor.stats.torch_host_kernel import HostKernel

EPS = 1e-8
MILLION = 1_000_000
KERNEL = HostKernel(eps=EPS)

Way = Callable[[Tensor], object]


def whole_tensor(x: Tensor) -> Sequence[Tensor]:
    """min, max, mean, norm, zeros, nans."""
    return x.min(), x.max(), x.mean(), x.norm(), (x.abs() < EPS).sum() / x.numel(), x.isnan().sum()


def in_float64(x: Tensor) -> Sequence[Tensor]:
    """The same, mean and norm after a cast."""
    mean, norm = x.to(torch.float64).mean(), x.to(torch.float64).norm()
    return x.min(), x.max(), mean, norm, (x.abs() < EPS).sum() / x.numel(), x.isnan().sum()


WAYS: dict[str, Way] = {"monitor": KERNEL.reduce, "torch, whole tensor": whole_tensor, "torch, float64 casts": in_float64}
