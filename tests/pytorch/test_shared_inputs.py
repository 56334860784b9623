"""Gradients of inputs that a module gives back, or is given in several places: no row holds what is not its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from observing import Numbers, observed, seeded, statistics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from watching import Output, attached

WIDE = torch.float64


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


EAGER_AND_COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def called(model: nn.Module, *, compiled: bool) -> Callable[..., Any]:
    return torch.compile(model, backend="aot_eager") if compiled else model


def gradients(output: Output, model: nn.Module, *, compiled: bool = False, **config: Any) -> Numbers:
    """Of a step on the scalar that the model returns."""
    call = called(model, compiled=compiled)
    return observed(output, model, lambda: call(values()).backward(), **config).numbers("actv_grad")


def values(*shape: int) -> Tensor:
    x = torch.arange(12, dtype=WIDE) * 1.7 + 0.3
    return torch.sin(x).view(shape or (3, 4))


def of_inputs(found: Numbers, module: str) -> Numbers:
    return {key: value for key, value in found.items() if key[0].startswith(f"{module}.input")}


# A tensor that a module gives back.


@dataclasses.dataclass
class Given:
    y: Tensor
    rest: list[Any]


GIVEN_BACK: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda y, b: (y, b),
    "list": lambda y, b: [y, [b]],
    "dict": lambda y, b: {"y": y, "rest": {"b": b}},
    "dataclass": lambda y, b: Given(y, [b]),
    "twice": lambda y, b: (b, y, b),
    "a view": lambda y, b: (y, b.view(-1)),
}


class Passing(nn.Module):
    """Uses ``b`` three times over, and gives it back."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, b: Tensor) -> Any:
        return GIVEN_BACK[self.how](x * self.w + 3 * b, b)


class Around(nn.Module):
    """Gives back what the module within gives back."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, b: Tensor) -> Any:
        return self.inner(x, b)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    parts = vars(value).values() if isinstance(value, Given) else value.values() if isinstance(value, dict) else value
    return [x for part in parts for x in tensors(part)]


class Uses(nn.Module):
    """Uses ``b`` beside ``inner``, before and after."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.make = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        b = self.make(x)
        before = 10 * b.sum()
        results = tensors(self.inner(x, b))
        y = next(one for one in results if one is not b and one.shape == b.shape)
        return y.sum() + before + 100 * b.sum()


@EAGER_AND_COMPILED
@pytest.mark.parametrize("how", GIVEN_BACK)
def test_an_input_that_is_given_back_has_the_gradient_of_the_modules_own_uses(how: str, compiled: bool, output: Output) -> None:
    found = gradients(output, seeded(lambda: Uses(Passing(how))), compiled=compiled)
    assert of_inputs(found, "inner") == statistics("inner.input_1", torch.full((3, 4), 3.0))


class UsesWhatComesBack(nn.Module):
    """Uses ``b`` and what ``inner`` gives back in its place."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.make = nn.Linear(4, 4)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        b = self.make(x)
        y, back = self.inner(x, b)
        return y.sum() + 10 * b.sum() + 100 * back.sum()


@pytest.mark.parametrize("hooked", [("inner",), ("inner.inner",), ("inner", "inner.inner"), ("inner", "inner.inner", "")])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_full_backward_hook_of_the_users_is_no_use_of_a_tensor(hooked: tuple[str, ...], output: Output) -> None:
    model = seeded(lambda: UsesWhatComesBack(Around(Passing("tuple"))))
    for name in hooked:
        model.get_submodule(name).register_full_backward_hook(lambda *_: None)

    found = gradients(output, model)

    for module in ("inner", "inner.inner"):
        assert of_inputs(found, module) == statistics(f"{module}.input_1", torch.full((3, 4), 3.0))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_module_that_does_nothing_has_no_row_where_a_full_backward_hook_is_on_it(output: Output) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Linear(4, 1)))
    model[1].register_full_backward_hook(lambda *_: None)

    found = observed(output, model, lambda: model(values()).sum().backward()).numbers("actv_grad")

    assert of_inputs(found, "1") == {}
    assert of_inputs(found, "2") != {}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_tensor_in_several_places_behind_a_full_backward_hook_has_the_total(output: Output) -> None:
    model = nn.ModuleDict({"inner": Passing("tuple"), "make": nn.Linear(4, 4).double()})
    model["inner"].register_full_backward_hook(lambda *_: None)

    def run() -> None:
        b = model["make"](values())
        y, back = model["inner"](b, b)
        (y.sum() + 100 * back.sum()).backward()

    found = observed(output, model, run).numbers("actv_grad")

    assert of_inputs(found, "inner") == statistics("inner.input_0+1", torch.full((3, 4), 4.0))


class Bag:
    """An object of no class that the monitor knows."""

    def __init__(self, y: Tensor) -> None:
        self._y = y

    @property
    def y(self) -> Tensor:
        return self._y


class SlotBag:
    __slots__ = ("y",)

    def __init__(self, y: Tensor) -> None:
        self.y = y


UNKNOWN: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "property": (Bag, lambda bag: bag.y),
    "slots": (SlotBag, lambda bag: bag.y),
    "list in an object": (lambda y: Bag([y]), lambda bag: bag.y[0]),  # type: ignore[arg-type]
    "set": (lambda y: {y}, lambda bag: next(iter(bag))),
    "closure": (lambda y: lambda: y, lambda bag: bag()),
}


class Hiding(nn.Module):
    """Uses ``b`` once for what it returns as a tensor, and three times for what it returns in a bag."""

    def __init__(self, put: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.put = put

    def forward(self, x: Tensor, b: Tensor) -> Any:
        return x + b, self.put(3 * b)


class TakesOut(nn.Module):
    def __init__(self, put: Callable[[Tensor], Any], take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.b = nn.Linear(4, 4, dtype=WIDE)
        self.inner = Hiding(put)
        self.take = take

    def forward(self, x: Tensor) -> Tensor:
        y, bag = self.inner(x, self.b(x))
        return y.sum() + self.take(bag).sum()


class Puts(nn.Module):
    """Returns all that it computes in a bag."""

    def __init__(self, put: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.put = put

    def forward(self, b: Tensor) -> Any:
        return self.put(3 * b)


class TakesAlone(nn.Module):
    def __init__(self, put: Callable[[Tensor], Any], take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.b = nn.Linear(4, 4, dtype=WIDE)
        self.inner = Puts(put)
        self.take = take

    def forward(self, x: Tensor) -> Tensor:
        return self.take(self.inner(self.b(x))).sum()


@pytest.mark.parametrize("how", UNKNOWN)
def test_what_is_returned_in_an_unknown_object_is_among_the_uses_of_an_input(how: str, output: Output) -> None:
    found = gradients(output, seeded(lambda: TakesOut(*UNKNOWN[how])))
    assert of_inputs(found, "inner") == statistics("inner.input_1", torch.full((3, 4), 4.0))


@pytest.mark.parametrize("how", UNKNOWN)
def test_an_unknown_object_may_be_the_whole_result(how: str, output: Output) -> None:
    put, take = UNKNOWN[how]
    found = gradients(output, seeded(lambda: TakesAlone(put, take)))
    assert of_inputs(found, "inner") == statistics("inner.input", torch.full((3, 4), 3.0))


@pytest.mark.parametrize("how", ["property", "slots"])
def test_compiled_code_that_returns_an_unknown_object_has_no_rows_of_its_inputs(how: str, output: Output) -> None:
    """Some versions of torch do not compile such code, so that there are."""
    found = gradients(output, seeded(lambda: TakesOut(*UNKNOWN[how])), compiled=True)
    assert of_inputs(found, "inner") in ({}, statistics("inner.input_1", torch.full((3, 4), 4.0)))
    assert ("inner.output_0", "norm") in found


@EAGER_AND_COMPILED
def test_what_holds_no_tensors_beside_a_result_leaves_the_rows_as_they_are(compiled: bool, output: Output) -> None:
    model = seeded(lambda: TakesOut(lambda y: (y, None, 3, "name", torch.float32, y.shape, nn.Linear), lambda bag: bag[0]))
    found = gradients(output, model, compiled=compiled)
    assert of_inputs(found, "inner") == statistics("inner.input_1", torch.full((3, 4), 4.0))


def test_a_result_that_cannot_be_looked_into_costs_the_rows_of_inputs_and_is_said_once(
    output: Output, caplog: pytest.LogCaptureFixture
) -> None:
    model = seeded(lambda: TakesOut(lambda y: iter([y]), next))
    found = gradients(output, model)
    assert not of_inputs(found, "inner")
    assert caplog.text.count("Gradients of the inputs of 'inner' are not recorded") == 1


def test_so_it_is_where_the_result_holds_nothing_else(output: Output, caplog: pytest.LogCaptureFixture) -> None:
    found = gradients(output, seeded(lambda: TakesAlone(lambda y: iter([y]), next)))
    assert not of_inputs(found, "inner")
    assert caplog.text.count("Gradients of the inputs of 'inner' are not recorded") == 1


@EAGER_AND_COMPILED
def test_so_has_it_in_a_module_around_that_gives_it_back_too(compiled: bool, output: Output) -> None:
    found = gradients(output, seeded(lambda: Uses(Around(Passing("tuple")))), compiled=compiled)
    own = torch.full((3, 4), 3.0)
    assert of_inputs(found, "inner") == statistics("inner.input_1", own)
    assert of_inputs(found, "inner.inner") == statistics("inner.inner.input_1", own)


@pytest.mark.parametrize("reentrant", [True, False])
def test_so_has_it_under_activation_checkpointing(reentrant: bool, output: Output) -> None:
    class Checkpointed(Around):
        def forward(self, x: Tensor, b: Tensor) -> Any:
            return checkpoint(self.inner, x, b, use_reentrant=reentrant)

    found = gradients(output, seeded(lambda: Uses(Checkpointed(Passing("tuple")))))
    assert of_inputs(found, "inner.inner") == statistics("inner.inner.input_1", torch.full((3, 4), 3.0))


@EAGER_AND_COMPILED
def test_so_has_a_parameter_that_is_given_and_given_back(compiled: bool, output: Output) -> None:
    class WithParameter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.b, self.inner = nn.Parameter(torch.ones(3, 4)), Passing("tuple")

        def forward(self, x: Tensor) -> Tensor:
            y, b = self.inner(x, self.b)
            return y.sum() + 10 * self.b.sum() + 100 * b.sum()

    found = gradients(output, seeded(WithParameter), compiled=compiled)
    assert of_inputs(found, "inner") == statistics("inner.input_1", torch.full((3, 4), 3.0))


class Broadcasts(nn.Module):
    """Uses a smaller tensor for every row, as attention does a position bias."""

    def forward(self, x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return x + b, b


def test_its_gradient_has_the_shape_of_the_input_where_it_was_broadcast(output: Output) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.make, self.inner = nn.Linear(4, 4), Broadcasts()

        def forward(self, x: Tensor) -> Tensor:
            b = self.make(x)[0]
            y, b = self.inner(x, b)
            return y.sum() + 10 * b.sum()

    found = gradients(output, seeded(Model))
    assert of_inputs(found, "inner") == statistics("inner.input_1", torch.full((4,), 3.0))


class Takes(nn.Module):
    """What is inside is given one tensor, which others use too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.make, self.inner = nn.Linear(4, 4), inner

    def forward(self, x: Tensor) -> Tensor:
        b = self.make(x)
        before = 10 * b.sum()
        return 2 * self.inner(b).sum() + before


@pytest.mark.parametrize("inner", [nn.Identity(), nn.Dropout(0.0)])
def test_a_module_that_only_gives_its_input_back_hands_it_no_gradient(inner: nn.Module, output: Output) -> None:
    found = gradients(output, seeded(lambda: Takes(inner)))
    assert of_inputs(found, "inner") == {}
    whole = torch.full((3, 4), 12.0)
    assert {key: value for key, value in found.items() if key[0] == "inner.output"} == statistics("inner.output", whole)


def test_a_module_that_works_in_place_has_all_that_comes_after_it(output: Output) -> None:
    found = gradients(output, seeded(lambda: Takes(nn.Hardtanh(-9.0, 9.0, inplace=True))))
    assert of_inputs(found, "inner") == statistics("inner.input", torch.full((3, 4), 2.0))


# One tensor that is given in several places.


class Weighs(nn.Module):
    """Two of the first and half of the second."""

    def forward(self, a: Any, b: Any = None) -> Tensor:
        a, b = a if isinstance(a, list) else (a, b)
        return 2 * a + 0.5 * (b["it"] if isinstance(b, dict) else b)


class Gives(nn.Module):
    def __init__(self, how: Callable[[nn.Module, Tensor], Tensor], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.make, self.inner, self.how = nn.Linear(4, 4), inner or Weighs(), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.make(x)
        return self.how(self.inner, y).sum() + 10 * y.sum()


SHARED: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], str]] = {
    "arguments": (lambda f, y: f(y, y), "input_0+1"),
    "a keyword": (lambda f, y: f(y, b=y), "input_0+b"),
    "a list": (lambda f, y: f([y, y]), "input_0+1"),
    "a dictionary": (lambda f, y: f(y, {"it": y}), "input_0+1_it"),
}


@EAGER_AND_COMPILED
@pytest.mark.parametrize("how", SHARED)
def test_a_tensor_given_in_several_places_has_one_row_named_by_all_of_them(how: str, compiled: bool, output: Output) -> None:
    give, name = SHARED[how]
    found = gradients(output, seeded(lambda: Gives(give)), compiled=compiled)
    assert of_inputs(found, "inner") == statistics(f"inner.{name}", torch.full((3, 4), 2.5))


@EAGER_AND_COMPILED
def test_views_of_a_tensor_are_tensors_of_their_own(compiled: bool, output: Output) -> None:
    found = gradients(output, seeded(lambda: Gives(lambda f, y: f(y, y.view(3, 4)))), compiled=compiled)
    expected = statistics("inner.input_0", torch.full((3, 4), 2.0)) | statistics("inner.input_1", torch.full((3, 4), 0.5))
    assert of_inputs(found, "inner") == expected


def test_each_argument_keeps_its_row_of_activations(output: Output) -> None:
    model = seeded(lambda: Gives(lambda f, y: f(y, y)))
    names = observed(output, model, lambda: model(values()).backward()).names("actv")
    assert [name for name in names if name.startswith("inner.input")] == ["inner.input_0", "inner.input_1"]


def test_attention_of_a_tensor_to_itself_has_one_row_and_to_another_two(output: Output) -> None:
    attention = nn.MultiheadAttention(4, 1, batch_first=True)
    for give, names in (
        (lambda f, y: f(y, y, y)[0], ["inner.input_0+1+2"]),
        (lambda f, y: f(y, y * 1, y)[0], ["inner.input_0+2", "inner.input_1"]),
    ):
        model = seeded(lambda give=give: Gives(give, attention))
        found = of_inputs(gradients(output, model), "inner")
        assert sorted({name for name, _ in found}) == names


@pytest.mark.parametrize("index", [0, 1])
@EAGER_AND_COMPILED
def test_a_target_for_one_of_the_places_gets_the_row_of_all(index: int, compiled: bool, output: Output) -> None:
    targets = {"inner": {"input_grad": f"tuple[2]:{index}"}}
    model = seeded(lambda: Gives(lambda f, y: f(y, y)))
    found = gradients(output, model, compiled=compiled, targets=targets, all_xy=False)
    assert found == statistics("inner.input_0+1", torch.full((3, 4), 2.5))


def test_the_second_call_of_a_module_has_a_name_of_its_own(output: Output) -> None:
    found = gradients(output, seeded(lambda: Gives(lambda f, y: f(y, y) + f(y, y * 1))))
    assert {name for name, _ in of_inputs(found, "inner")} == {"inner.input_0+1", "inner.input_0#1", "inner.input_1#1"}


def test_no_row_has_the_name_of_another_place(output: Output) -> None:
    """A key may be written as the places of another tensor are."""

    class Sums(nn.Module):
        def forward(self, given: dict[str, Tensor]) -> Tensor:
            return given["0"] + given["1"] + 7 * given["0+1"]

    found = gradients(output, seeded(lambda: Gives(lambda f, y: f({"0": y, "1": y, "0+1": y * 1}), Sums())))
    expected = statistics("inner.input_0+1", torch.full((3, 4), 7.0)) | statistics("inner.input_0+1~", torch.full((3, 4), 2.0))
    assert of_inputs(found, "inner") == expected


def test_metrics_of_the_step_have_the_row_under_its_tag(output: Output) -> None:
    model = seeded(lambda: Gives(lambda f, y: f(y, y)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(output, model, optimizer, xy_distribution=True, all_xy=True, ops=["max"], format="api") as monitor:
        model(values()).backward()
        _, backward = monitor.generate_xy_metrics()
    found = {tag: one for tag, one in backward.items() if "inner.input" in tag}
    assert found == {"0:inner.input_0+1:0/rank0/actv_grad": {"max": 2.5}}


@EAGER_AND_COMPILED
def test_training_has_the_same_bits(compiled: bool, output: Output) -> None:
    def trained(*, monitored: bool) -> list[Tensor]:
        torch._dynamo.reset()
        model = seeded(lambda: nn.ModuleList([Uses(Passing("tuple")), Gives(lambda f, y: f(y, y))]), torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        monitor = attached(output, model, optimizer, xy_distribution=True, all_xy=True) if monitored else None
        calls = [called(one, compiled=compiled) for one in model]
        for _ in range(3):
            sum(call(values().float()) for call in calls).backward()
            optimizer.step()
            optimizer.zero_grad()
        if monitor is not None:
            monitor.close()
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, trained(monitored=False), trained(monitored=True)))
