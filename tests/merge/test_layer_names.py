from __future__ import annotations

import pytest

from monitor.merge.layer_names import LayerNames


def test_where_every_stage_counts_from_0_layers_are_numbered_through() -> None:
    names = LayerNames({0: ["layers.0.w", "layers.1.w", "embed.w"], 1: ["layers.0.w", "norm.w"]}, 2)
    assert [names.of(0, "layers.1.w"), names.of(1, "layers.0.w"), names.of(1, "norm.w")] == [
        "layers.1.w",
        "layers.2.w",
        "norm.w",
    ]


def test_names_that_are_those_of_the_model_already_stay() -> None:
    names = LayerNames({0: ["layers.0.w"], 1: ["layers.1.w"]}, 2)
    assert names.of(1, "layers.1.w") == "layers.1.w"


def test_only_the_first_number_of_a_name_is_that_of_a_layer() -> None:
    names = LayerNames({0: ["m.layers.0.experts.0.w"], 1: ["m.layers.0.experts.0.w"]}, 2)
    assert names.of(1, "m.layers.0.experts.0.w") == "m.layers.1.experts.0.w"


def test_where_a_stage_is_not_known_the_stage_stands_in_the_name() -> None:
    names = LayerNames({0: ["layers.0.w"], 2: ["layers.0.w"]}, 3)
    assert names.of(2, "layers.0.w") == "stage2:layers.0.w"


def test_where_only_some_modules_were_recorded_the_stage_stands_in_the_name() -> None:
    names = LayerNames({0: ["layers.0.w"], 1: ["layers.0.w"]}, 2, whole=False)
    assert names.of(1, "layers.0.w") == "stage1:layers.0.w"


def test_the_numbers_of_a_sequence_are_counted_on() -> None:
    names = LayerNames({0: ["0.weight", "1.output"], 1: ["0.weight"]}, 2)
    assert names.of(1, "0.weight") == "2.weight"


@pytest.mark.parametrize(
    "name", [".".join(["embeddings"] * 40), "a" * 100_000, "1" * 100_000 + ".w", f"layers.{10**7}.w", ".0", "0"]
)
def test_names_without_the_number_of_a_layer_stay(name: str) -> None:
    """However long: a pattern that tries many ways to read one would take years."""
    assert LayerNames({0: [name], 1: [name]}, 2).of(1, name) == name


def test_a_number_is_a_whole_component() -> None:
    names = LayerNames({0: ["v2.block3x.4.w"], 1: ["v2.block3x.0.w"]}, 2, whole=False)
    assert names.of(0, "v2.block3x.4.w") == "v2.block3x.4.w"
    names = LayerNames({0: ["v2.block3x.0.w"], 1: ["v2.block3x.0.w"]}, 2)
    assert names.of(1, "v2.block3x.0.w") == "v2.block3x.1.w"
