"""Norms of matrices, similarity of their rows and entropy of routing, computed in blocks of rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final

import torch
from torch import Tensor

from monitor.recording.features import krylov
from monitor.recording.features.krylov import CERTAIN, MOST, SQUARINGS, UNCERTAIN, UNREAD, Tridiagonal
from monitor.recording.features.reading import Logits, Norms, Routing, Similarity
from monitor.stats.torch.memory import sent
from monitor.stats.torch.tensors import working_precision

BLOCK: Final = 1 << 18
"""Elements that are converted at once on the host, so a tensor of low precision is never copied as a whole."""

BLOCK_ON_DEVICE: Final = 1 << 24
"""The same on an accelerator, where the calls cost more than the computation."""

LONGEST_ROW: Final = 1 << 13
"""Elements whose squares may be added one after the other in float32."""

UNSCALED: Final = (1e-20, 1e25)
"""Range of sums of squares for which no product overflows or underflows in float32."""


FARTHEST: Final = {torch.float32: 100, torch.float64: 900}
"""Greatest power of two for scaling a vector without underflow of its elements."""


def norms_of(matrix: Tensor) -> Norms:
    """The norms of a floating-point matrix. With NaN or Inf in it, the spectral norm is NaN."""
    if matrix.numel() == 0:
        return Norms(0.0, 0.0, CERTAIN)
    if matrix.stride(0) < matrix.stride(1):
        matrix = matrix.t()  # same norms, and the elements of a row are contiguous
    return _norms_read(matrix) if _may_read(matrix) else _norms_unread(matrix)


def _may_read(matrix: Tensor) -> bool:
    """Whether reading a number is free. On an accelerator it would wait for all earlier work."""
    return matrix.is_cpu


def _norms_read(matrix: Tensor) -> Norms:
    squares = sum(_squares(block) for block in _blocks(matrix))
    if UNSCALED[0] < squares < UNSCALED[1]:
        found = _lanczos(matrix, working_precision(matrix.dtype))
        return Norms(squares, math.sqrt(found.largest), CERTAIN if found.certain else UNCERTAIN)
    squares, greatest = float(_squares_in_float64(matrix)), float(_greatest(matrix))
    if not math.isfinite(greatest):
        return Norms(squares, math.nan, CERTAIN)
    exponent = max(-FARTHEST[torch.float64], min(FARTHEST[torch.float64], math.frexp(greatest)[1]))
    found = _lanczos(matrix, torch.float64, math.ldexp(1.0, -exponent))
    return Norms(squares, math.ldexp(math.sqrt(found.largest), exponent), CERTAIN if found.certain else UNCERTAIN)


def _lanczos(matrix: Tensor, dtype: torch.dtype, factor: float | None = None) -> Tridiagonal:
    """Multiply until the spectral norm is certain. Needs free reads."""
    columns = matrix.shape[1]
    found, vector = Tridiagonal(columns), _start(matrix, dtype)
    basis = torch.empty((min(MOST, columns), columns), dtype=dtype, device="cpu")
    for size in range(1, len(basis) + 1):
        basis[size - 1] = vector
        along, before, rest, length = _beyond(basis[:size], _times(matrix, vector, factor))
        if found.add(along.item(), before.item(), length.item()):
            break
        vector = rest.div_(length)
    return found


def _norms_unread(matrix: Tensor) -> Norms:
    greatest = _greatest(matrix)
    farthest = FARTHEST[greatest.dtype]
    exponent = torch.frexp(greatest).exponent.clamp(-farthest, farthest)
    factor = torch.ldexp(torch.ones((), dtype=torch.float64, device=matrix.device), -exponent)
    largest, certain = _lanczos_unread(matrix, factor.to(greatest.dtype))
    spectral = torch.where(torch.isfinite(greatest), largest.sqrt() / factor, math.nan)
    return Norms(_squares_in_float64(matrix), spectral, torch.where(certain | spectral.isnan(), CERTAIN, UNCERTAIN))


def _lanczos_unread(matrix: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """A fixed number of products. Returns the largest eigenvalue of A = W^T W, scaled, and whether it is certain."""
    columns = matrix.shape[1]
    vector, products = _start(matrix, factor.dtype), min(UNREAD, columns)
    basis = torch.zeros((products, columns), dtype=vector.dtype, device=matrix.device)
    diagonal, beside = [], []
    for size in range(1, products + 1):
        basis[size - 1] = vector
        along, before, rest, length = _beyond(basis[:size], _times(matrix, vector, factor))
        length = torch.where(length > krylov.NOISE * before, length, 0.0)
        diagonal.append(along)
        beside.append(length)
        vector = torch.where(length > 0, rest / length, 0.0)
    off = torch.stack(beside).double()
    projected = torch.diag(torch.stack(diagonal).double())
    if products > 1:
        projected = projected + torch.diag(off[:-1], 1) + torch.diag(off[:-1], -1)
    best = _largest_eigenvector(projected)
    largest = (best @ projected @ best).clamp(min=0.0)
    certain = largest >= 0 if products == columns else _is_certain(projected, off[-1], largest, columns)
    return largest, certain


def _is_certain(projected: Tensor, beyond: Tensor, largest: Tensor, columns: int) -> Tensor:
    """The bound of ``Tridiagonal``'s polynomial, from a corner of ``Σ_j (T / s)^j``, whose terms are positive."""
    allowed = largest * krylov.ALLOWED
    power = projected / torch.where(allowed > 0, allowed, 1.0)
    identity = torch.eye(len(power), dtype=power.dtype, device=power.device)
    total = identity + power
    for _ in range(SQUARINGS):
        power = power @ power
        total = total + total @ power
    return beyond * total[0, -1] * krylov.growth_needed(columns) <= allowed


def _start(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    return sent(krylov.start(matrix.shape[1]), matrix.device).to(dtype)


def _times(matrix: Tensor, vector: Tensor, factor: Tensor | float | None) -> Tensor:
    """``W^T W v`` for W times ``factor``, a power of two, which causes no rounding; None is 1."""
    result = torch.zeros_like(vector)
    scaled = vector if factor is None else vector * factor
    for block in _blocks(matrix, vector.dtype):
        product = torch.mv(block, scaled)
        result.addmv_(block.t(), product if factor is None else product * factor)
    return result


def _beyond(basis: Tensor, vector: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Orthogonalise a vector against ``basis``, twice.

    Returns:
        The component along the last basis vector, the length after the first pass, the remainder, and its length.
    """
    across = basis.t()
    along = torch.mv(basis, vector)
    rest = torch.addmv(vector, across, along, alpha=-1)
    before = torch.linalg.vector_norm(rest)
    rest.addmv_(across, torch.mv(basis, rest), alpha=-1)
    return along[-1], before, rest, torch.linalg.vector_norm(rest)


def _largest_eigenvector(projected: Tensor) -> Tensor:
    """The eigenvector of the largest eigenvalue of a small positive semidefinite matrix, by squaring: it waits for no
    device.
    """
    power = projected
    for _ in range(SQUARINGS):
        trace = power.diagonal().sum()
        power = power / torch.where(trace > 0, trace, 1.0)
        power = power @ power
    column = power.index_select(1, power.diagonal().argmax().view(1)).squeeze(1)
    length = torch.linalg.vector_norm(column)
    return column / torch.where(length > 0, length, 1.0)


def _squares(block: Tensor) -> float:
    if block.shape[1] > LONGEST_ROW:
        return float(block.square().sum())
    return float(torch.linalg.vector_norm(block, dim=1).double().square().sum())


def _squares_in_float64(matrix: Tensor) -> Tensor:
    """The sum of squares in float64, which is slower on the host."""
    return torch.stack([torch.linalg.vector_norm(block, dtype=torch.float64).square() for block in _blocks(matrix)]).sum()


def _greatest(matrix: Tensor) -> Tensor:
    ends = [torch.aminmax(block) for block in _blocks(matrix)]
    return torch.stack([torch.maximum(-least, greatest) for least, greatest in ends]).amax()


def _blocks(matrix: Tensor, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
    rows = max(1, (BLOCK if matrix.is_cpu else BLOCK_ON_DEVICE) // matrix.shape[1])
    for block in matrix.split(rows):
        yield block.to(working_precision(matrix.dtype) if dtype is None else dtype)


def similarity_of_rows(matrix: Tensor) -> Similarity:
    """The sum of the cosines of all pairs of rows, from Σ_ij cos_ij = |Σ_i row_i / |row_i||².

    A row of zeros has no direction: its cosines count as 0. With NaN or Inf, the sum is NaN.
    """
    rows = matrix.shape[0]
    total = torch.zeros(matrix.shape[1], dtype=torch.float64, device=matrix.device)
    directed = torch.zeros((), dtype=torch.float64, device=matrix.device)
    for block in matrix.split(max(1, BLOCK // max(1, matrix.shape[1]))):
        wide = block.double()
        wide = wide / torch.where((greatest := wide.abs().amax(1, keepdim=True)) == 0, 1.0, greatest)
        length = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
        total += (wide / torch.where(length == 0, 1.0, length)).sum(0)
        directed += (length != 0).sum()
    return Similarity(rows * (rows - 1), total.square().sum() - directed)


# --- Entropy of routing.


"""Numbers that are worked on at once."""

DTYPES: Final = {"fp32": torch.float32, "fp64": torch.float64}
"""Names in Megatron's configuration."""


def entropy_of(logits: Tensor) -> Routing:
    """The entropy of routing from logits, whose last dimension is the experts."""
    return _entropy(logits.device, _parts_of(logits))


def entropy_from(tokens: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Routing:
    """The entropy of routing from the logits ``tokens @ weight^T + bias``, computed in ``dtype`` like the router, in blocks of
    tokens.

    Args:
        tokens: Last dimension the hidden size.
        weight: Shape ``(experts, hidden size)``.
    """
    return _entropy(tokens.device, _parts_from(tokens, weight, bias, dtype))


def logit_sums_of(logits: Tensor) -> Logits:
    """The sums for z-loss and the greatest of logits, whose last dimension is the experts."""
    return _logit_sums(logits.device, _parts_of(logits))


def logit_sums_from(tokens: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Logits:
    """The same of logits that are computed, as in ``entropy_from``."""
    return _logit_sums(tokens.device, _parts_from(tokens, weight, bias, dtype))


def logits_from(tokens: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The logits of ``entropy_from``, shape ``(tokens, experts)``."""
    return torch.cat(list(_parts_from(tokens, weight, bias, dtype)))


def _parts_of(logits: Tensor) -> Iterator[Tensor]:
    flat = logits.flatten(0, -2)
    yield from flat.split(max(1, BLOCK // max(1, flat.shape[1]))) if len(flat) else ()


def _parts_from(tokens: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Iterator[Tensor]:
    flat, weight = tokens.flatten(0, -2), weight.to(dtype)
    for block in flat.split(max(1, BLOCK // max(1, *weight.shape))):
        yield torch.nn.functional.linear(block.to(dtype), weight, None if bias is None else bias.to(dtype))


def _entropy(device: torch.device, parts: Iterable[Tensor]) -> Routing:
    tokens, total = 0, torch.zeros((), dtype=torch.float64, device=device)
    for logits in parts:
        tokens += logits.shape[0]
        total += _entropies(logits).sum(dtype=torch.float64)
    return Routing(tokens, total)


def _logit_sums(device: torch.device, parts: Iterable[Tensor]) -> Logits:
    tokens, squares = 0, torch.zeros((), dtype=torch.float64, device=device)
    greatest = torch.full_like(squares, -torch.inf)
    for logits in parts:
        tokens += logits.shape[0]
        exact = logits.to(working_precision(logits.dtype))
        squares += torch.logsumexp(exact, -1).double().square().sum()
        greatest = torch.maximum(greatest, exact.amax().double())
    return Logits(tokens, squares, greatest)


def dtype_of_routing(module: torch.nn.Module, tokens: Tensor, weight: Tensor) -> torch.dtype:
    """The precision of a router's logits, from its configuration, autocast, or the dtypes of its inputs."""
    said = DTYPES.get(str(getattr(getattr(module, "config", None), "moe_router_dtype", None)))
    if said is not None:
        return said
    device = tokens.device.type
    lowered = torch.is_autocast_enabled(device)
    dtype: torch.dtype = torch.get_autocast_dtype(device) if lowered else torch.promote_types(tokens.dtype, weight.dtype)
    return dtype


def _entropies(logits: Tensor) -> Tensor:
    """The entropy of each token. An expert with a logit of -Inf has the share 0."""
    shares = torch.softmax(logits.to(working_precision(logits.dtype)), -1)
    entropies: Tensor = torch.special.entr(shares).sum(-1)
    return entropies
