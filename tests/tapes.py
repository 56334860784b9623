"""Networks computed by hand, in float64 with numpy, and what a precision dump has to say of each call of theirs.

A tape is given every call that a framework makes, by the name that the call has in a dump, with the formula of its result
and of its gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

Array = np.ndarray
Back = Callable[..., Sequence[Array | None]]
Formula = Callable[..., tuple[Any, Back]]
"""Of the arrays and settings of a call: its result (a tuple if there are several), and what makes the gradients of its
tensors, in their order, of those of the results.
"""


class Value:
    """A tensor.

    Attributes:
        trained: Whether gradients come to it.
        gradient: The sum over all that it went into; None before the backward, and where none came.
    """

    def __init__(self, array: Array, *, trained: bool = False) -> None:
        self.array = array.astype(np.float64) if array.dtype.kind == "f" else array
        self.trained = trained
        self.gradient: Array | None = None


class Call:
    """A call of a function, or of a module: then it spans those made in it.

    Attributes:
        name: What its forward and its backward are called, for ``format``.
        gradients: Of its tensors, as they came from this call alone, by their place among all arguments.
    """

    def __init__(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.name, self.args, self.kwargs = name, args, kwargs
        self.results: tuple[Any, ...] = ()
        self.gradients: dict[int, Array | None] = {}
        self.parameters: Mapping[str, Value] = {}
        self.inner: Sequence[Call] = ()
        self.back: Back | None = None
        self.gives_back = False

    @property
    def given(self) -> list[Any]:
        return [*self.args, *self.kwargs.values()]

    def forward(self) -> dict[str, Any]:
        told = {"input_args": list(self.args), "input_kwargs": dict(self.kwargs), "output": list(self.results)}
        return {**told, "parameters": dict(self.parameters)} if self.parameters else told

    def backward(self) -> dict[str, Any] | None:
        """None where no gradient comes."""
        if not any(isinstance(one, Value) and one.trained for one in self.results):
            return None
        last = max((place for place, one in enumerate(self.given) if isinstance(one, Value)), default=-1)
        taken = [self._taken(place) for place in range(last + 1)]
        return {"input": [one.gradient if isinstance(one, Value) else None for one in self.results], "output": taken}

    def _taken(self, place: int) -> Array | None:
        x = self.given[place]
        if not isinstance(x, Value) or not x.trained:
            return None
        if not self.inner:
            return None if self.gives_back else self.gradients[place]
        parts = [one.gradients[k] for one in self.inner for k, y in enumerate(one.given) if y is x and k in one.gradients]
        return sum(part for part in parts if part is not None)


class Tape:
    """All calls of one forward, and its backward."""

    def __init__(self) -> None:
        self.functions: list[Call] = []
        self.modules: list[Call] = []
        self.order: list[Call] = []
        self._counts: Counter[str] = Counter()

    def call(self, name: str, formula: Formula, *args: Any, **kwargs: Any) -> Any:
        """A function is called."""
        call = Call(f"{name}.{self._number(name)}.{{}}", args, kwargs)
        arrays = [one.array if isinstance(one, Value) else one for one in args]
        named = {key: one.array if isinstance(one, Value) else one for key, one in kwargs.items()}
        result, call.back = formula(*arrays, **named)
        call.gives_back = formula is unchanged
        trained = any(isinstance(one, Value) and one.trained for one in call.given)
        several = result if isinstance(result, tuple) else (result,)
        call.results = tuple(
            Value(one, trained=trained and one.dtype.kind == "f") if isinstance(one, np.ndarray) else one for one in several
        )
        self.functions.append(call)
        self.order.append(call)
        return call.results if isinstance(result, tuple) else call.results[0]

    @contextmanager
    def module(self, name: str, *args: Value, parameters: Mapping[str, Value] | None = None, **kwargs: Any) -> Iterator[Call]:
        """A module is called. What it gives is to be noted as its ``results``."""
        call, begun = Call(f"{name}.{{}}.{self._number(name)}", args, kwargs), len(self.functions)
        call.parameters = parameters or {}
        yield call
        call.inner = self.functions[begun:]
        self.modules.append(call)
        self.order.append(call)

    def backward(self, loss: Value) -> None:
        loss.gradient = np.ones_like(loss.array)
        for call in reversed(self.functions):
            if any(isinstance(one, Value) and one.gradient is not None for one in call.results):
                self._back(call)

    def expected(self, level: str) -> dict[str, Any]:
        """The entries of a dump: forwards in their order, then what the backward brings, in any order."""
        chosen = [call for call in self.order if level == "mix" or (call in self.modules) == (level == "L0")]
        told = {call.name.format("forward"): call.forward() for call in chosen}
        backwards = {call.name.format("backward"): call.backward() for call in chosen}
        for call in chosen:
            own = {key: [one.gradient] for key, one in call.parameters.items()}
            backwards[call.name.format("parameters_grad")] = own or None
        return told | {name: entry for name, entry in backwards.items() if entry is not None}

    def _back(self, call: Call) -> None:
        tensors = [(place, one) for place, one in enumerate(call.given) if isinstance(one, Value)]
        assert call.back is not None
        gradients = call.back(*(one.gradient for one in call.results if isinstance(one, Value)))
        for (place, x), gradient in zip(tensors, gradients, strict=True):
            if x.trained:
                call.gradients[place] = gradient
                x.gradient = gradient if x.gradient is None else x.gradient + gradient

    def _number(self, name: str) -> int:
        self._counts[name] += 1
        return self._counts[name] - 1


def convolution(x: Array, weight: Array, bias: Array | None = None, *_: Any) -> tuple[Array, Back]:
    """Stride 1, no padding. ``x``: samples, channels, rows, columns."""
    windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], axis=(2, 3))
    y = np.einsum("nchwij,ocij->nohw", windows, weight)

    def back(g: Array) -> list[Array]:
        of_x = np.zeros_like(x)
        for i, j in np.ndindex(*weight.shape[2:]):
            of_x[:, :, i : i + g.shape[2], j : j + g.shape[3]] += np.einsum("nohw,oc->nchw", g, weight[:, :, i, j])
        of_bias = [] if bias is None else [g.sum((0, 2, 3))]
        return [of_x, np.einsum("nchwij,nohw->ocij", windows, g), *of_bias]

    return (y if bias is None else y + bias[:, None, None]), back


def biased(x: Array, bias: Array) -> tuple[Array, Back]:
    """A bias for each channel, the second axis."""
    shape = (1, -1) + (1,) * (x.ndim - 2)
    return x + bias.reshape(shape), lambda g: (g, g.sum(tuple(n for n in range(g.ndim) if n != 1)))


def linear(x: Array, weight: Array, bias: Array | None = None) -> tuple[Array, Back]:
    def back(g: Array) -> list[Array]:
        rows = g.reshape(-1, g.shape[-1])
        of_bias = [] if bias is None else [rows.sum(0)]
        return [g @ weight, rows.T @ x.reshape(-1, x.shape[-1]), *of_bias]

    return (x @ weight.T if bias is None else x @ weight.T + bias), back


def matmul(a: Array, b: Array) -> tuple[Array, Back]:
    return a @ b, lambda g: (g @ b.swapaxes(-1, -2), a.swapaxes(-1, -2) @ g)


def relu(x: Array, **_: Any) -> tuple[Array, Back]:
    return np.maximum(x, 0), lambda g: (g * (x > 0),)


def normalized(x: Array, weight: Array, bias: Array, eps: float) -> tuple[tuple[Array, Array, Array], Back]:
    """The norm over the last axis; its means and variances too."""
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    scale = 1 / np.sqrt(variance + eps)
    unit = (x - mean) * scale

    def back(g: Array, *_: None) -> list[Array]:
        of_unit = g * weight
        centred = of_unit - of_unit.mean(-1, keepdims=True) - unit * (of_unit * unit).mean(-1, keepdims=True)
        rows = tuple(range(x.ndim - 1))
        return [centred * scale, (g * unit).sum(rows), g.sum(rows)]

    return (unit * weight + bias, mean, variance), back


def softmax(x: Array) -> tuple[Array, Back]:
    powers = np.exp(x - x.max(-1, keepdims=True))
    y = powers / powers.sum(-1, keepdims=True)
    return y, lambda g: (y * (g - (g * y).sum(-1, keepdims=True)),)


def causal_attention(q: Array, k: Array, v: Array, **_: Any) -> tuple[Array, Back]:
    scale = q.shape[-1] ** -0.5
    future = np.triu(np.full((q.shape[-2], k.shape[-2]), -np.inf), 1)
    weights, back_to_scores = softmax(q @ k.swapaxes(-1, -2) * scale + future)

    def back(g: Array) -> list[Array]:
        (scores,) = back_to_scores(g @ v.swapaxes(-1, -2))
        return [scores @ k * scale, scores.swapaxes(-1, -2) @ q * scale, weights.swapaxes(-1, -2) @ g]

    return weights @ v, back


def looked_up(tokens: Array, table: Array, *_: Any, **__: Any) -> tuple[Array, Back]:
    def back(g: Array) -> list[Array | None]:
        of_table = np.zeros_like(table)
        np.add.at(of_table, tokens, g)
        return [None, of_table]

    return table[tokens], back


def in_thirds(x: Array, *_: Any, **__: Any) -> tuple[tuple[Array, ...], Back]:
    return tuple(np.split(x, 3, axis=-1)), lambda *g: (np.concatenate(g, axis=-1),)


def reshaped(shape: Sequence[int]) -> Formula:
    return lambda x, *_, **__: (x.reshape(shape), lambda g: (g.reshape(x.shape),))


def last_two_swapped(x: Array, *_: Any) -> tuple[Array, Back]:
    return x.swapaxes(-1, -2), lambda g: (g.swapaxes(-1, -2),)


def unchanged(x: Array, *_: Any, **__: Any) -> tuple[Array, Back]:
    return x, lambda g: (g,)


def scaled(x: Array, by: float) -> tuple[Array, Back]:
    return x * by, lambda g: (g * by,)


def added(a: Array, b: Array) -> tuple[Array, Back]:
    return a + b, lambda g: (g, g)


def squared(x: Array, _: int) -> tuple[Array, Back]:
    return x**2, lambda g: (2 * x * g,)


def summed(x: Array) -> tuple[Array, Back]:
    return np.asarray(x.sum()), lambda g: (np.full_like(x, g),)


def cross_entropy(x: Array, target: Array, **_: Any) -> tuple[Array, Back]:
    """The mean over rows."""
    probabilities, _back = softmax(x)
    rows = np.arange(len(x))
    wanted = np.zeros_like(x)
    wanted[rows, target] = 1
    loss = -np.log(probabilities[rows, target]).mean()
    return np.asarray(loss), lambda g: (g * (probabilities - wanted) / len(x), None)


def shape_of(x: Array) -> tuple[tuple[int, ...], Back]:
    return x.shape, lambda *_: (None,)
