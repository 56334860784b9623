"""torch.compile: what compiled code computes has the rows of eager code, and nothing is compiled because of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from compiling import WAYS, Compile, Make, Place, Ways, batch, recorded, trained
from networks import Attention, Checkpointed, Forked, InPlace, Interrupted, Shared
from observing import seeded
from watching import EVERYTHING, Output, attached, train

MODELS = (InPlace, Shared, Checkpointed, Forked, Attention)
needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def one_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inductor without a pool of processes that would outlive the test."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    with torch._inductor.config.patch(compile_threads=1):
        yield


def assert_rows_are_those_of_eager_code(make: Make, way: Compile, output: Output, **options: object) -> None:
    trained(make, Ways.eager, output)
    eager = recorded(output)

    trained(make, way, output, **options)
    compiled = recorded(output)

    assert {place for place in compiled if not copies_in_compiled_code(place)} == eager.keys()
    for place, row in eager.items():
        assert compiled[place].values == pytest.approx(row.values, rel=1e-9, abs=1e-12), place


def copies_in_compiled_code(place: Place) -> bool:
    """Whether a row is of the input of a dropout that drops nothing. In eager code it gives its input back, so that there is
    none.
    """
    kind, name, *_ = place
    return kind == "actv_grad" and ".dropout" in name and name.endswith(".input")


# Not Shared layer by layer: a layer there returns a tensor that it uses itself, and what is within its graph is no part of that
# tensor's gradient outside.
@pytest.mark.parametrize(
    ("way", "model"),
    [
        *((WAYS["whole"], model) for model in MODELS),
        *((WAYS["layer_by_layer"], model) for model in MODELS if model is not Shared),
    ],
)
def test_compiled_code_has_the_rows_of_eager_code(way: Compile, model: Make, output: Output) -> None:
    assert_rows_are_those_of_eager_code(model, way, output, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_each_way_of_compiling_has_the_rows_of_eager_code(way: Compile, output: Output) -> None:
    assert_rows_are_those_of_eager_code(InPlace, way, output, backend="eager")


def test_code_with_a_break_in_it_has_the_rows_of_eager_code(output: Output) -> None:
    assert_rows_are_those_of_eager_code(Interrupted, Ways.whole, output, backend="aot_eager")


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("one_compiler")
@pytest.mark.parametrize("model", [Shared, Checkpointed])
@needs_a_compiler
def test_what_inductor_compiles_has_the_rows_of_eager_code(model: Make, output: Output) -> None:
    assert_rows_are_those_of_eager_code(model, Ways.whole, output, fullgraph=True)


@pytest.mark.parametrize(
    ("way", "model", "watch_what_is_called"),
    [
        *((WAYS["whole"], model, False) for model in (*MODELS, Interrupted)),
        *((WAYS["layer_by_layer"], model, False) for model in (InPlace, Forked, Attention)),
        (WAYS["whole"], InPlace, True),
        (WAYS["within_a_function"], Shared, False),
    ],
)
def test_nothing_is_compiled_because_of_the_monitor_and_training_is_the_same(
    way: Compile, model: Make, watch_what_is_called: bool, output: Output
) -> None:
    """Fault 14 of the tool before: it recompiled until the limit."""
    alone = trained(model, way, backend="aot_eager")

    monitored = trained(model, way, output, backend="aot_eager", watch_what_is_called=watch_what_is_called)

    assert (monitored.graphs, monitored.breaks) == (alone.graphs, alone.breaks)
    assert all(map(torch.equal, alone.numbers, monitored.numbers))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("one_compiler")
@needs_a_compiler
def test_inductor_compiles_nothing_because_of_the_monitor_and_trains_as_without(output: Output) -> None:
    alone = trained(InPlace, Ways.whole, fullgraph=True)

    monitored = trained(InPlace, Ways.whole, output, fullgraph=True)

    assert (monitored.graphs, monitored.breaks) == (alone.graphs, alone.breaks) == (1, {})
    for expected, found in zip(alone.numbers, monitored.numbers, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_names_are_those_of_the_model_and_not_of_what_the_compiler_wraps_it_in(output: Output) -> None:
    """The same tool gave names with ``_orig_mod.``."""
    trained(InPlace, Ways.replaced_layer_by_layer, output, backend="eager", watch_what_is_called=True)
    assert not [name for _, name, *_ in recorded(output) if "_orig_mod" in name]


def test_layers_that_share_their_code_are_compiled_once_for_all(output: Output) -> None:
    assert trained(InPlace, Ways.layer_by_layer, output, backend="aot_eager", fullgraph=True).graphs == 1


def test_steps_that_are_not_collected_run_the_same_code_and_have_no_rows(output: Output) -> None:
    config = {**EVERYTHING, "step_interval": 2}

    graphs = trained(InPlace, Ways.whole, output, backend="aot_eager", fullgraph=True, config=config).graphs

    assert graphs == 1
    assert {step for _, _, step, _ in recorded(output)} == {0, 2}


def test_calls_of_earlier_steps_are_let_go_of(output: Output) -> None:
    model = seeded(InPlace)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = Ways.within_a_function(model, backend="aot_eager", fullgraph=True)
    with attached(output, model, optimizer, **EVERYTHING):
        train(compiled, optimizer, 5, batch(0))
        hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
        kept = [(len(hook._traced._observed._calls), len(hook._traced._observed._earlier)) for hook in hooks]
    assert {now for now, _ in kept} == {0}
    assert 1 <= max(before for _, before in kept) <= 2  # a call's beginning and its end
