"""What the modules and parameters of a rank are called in rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monitor.config import MonitorConfig
from monitor.recording.attached_model import ModelNames, NamedParts


def named(chunks: Sequence[Sequence[str]], **config: Any) -> ModelNames:
    """A model of these modules, chunk by chunk."""
    parts = [NamedParts([(name, name) for name in chunk], []) for chunk in chunks]
    return ModelNames(parts, MonitorConfig.model_validate(config))


def spelled(names: ModelNames) -> list[tuple[int, str]]:
    return [(one.chunk, one.name) for one in names.modules()]


def test_short_names_are_the_documents_names() -> None:
    names = named([["", "module.decoder.layers.63.mlp.linear_fc2", "module.embedding.word_embeddings"]], squash_name=True)
    assert spelled(names) == [(0, ""), (0, "63.mlp.linear_fc2"), (0, "word_embeddings")]


def test_names_that_would_share_a_short_one_stay_full_in_whichever_chunks_of_the_rank_they_are() -> None:
    names = named([["vision.layers.0", "vision.layers.1"], ["text.layers.0"]], squash_name=True)
    assert spelled(names) == [(0, "vision.layers.0"), (0, "1"), (1, "text.layers.0")]


def test_two_chunks_that_have_the_same_names_both_have_them_short() -> None:
    names = named([["decoder.layers.0"], ["decoder.layers.0"]], squash_name=True)
    assert spelled(names) == [(0, "0"), (1, "0")]


def test_a_parameter_that_chunks_share_has_one_row_in_the_first_that_is_selected() -> None:
    trunk, heads = object(), [object(), object()]
    chunks = [NamedParts([("trunk", 0), ("head", 1)], [("trunk.weight", trunk), ("head.weight", head)]) for head in heads]
    every = [(one.chunk, one.name, one.tensor) for one in ModelNames(chunks, MonitorConfig()).parameters()]
    assert every == [(0, "trunk.weight", trunk), (0, "head.weight", heads[0]), (1, "head.weight", heads[1])]
    second = MonitorConfig.model_validate({"targets": {"1:trunk": {}}})
    assert [(one.chunk, one.tensor) for one in ModelNames(chunks, second).parameters()] == [(1, trunk)]


def test_the_documents_l2_targets_find_their_modules_whatever_rows_call_them() -> None:
    model = [[f"decoder.layers.{i}.self_attention.linear_qkv" for i in (0, 1)]]
    for squash in (False, True):
        found = named(model, squash_name=squash).targeted(["0:0.self_attention.linear_qkv", "0:1.self_attention.linear_qkv"])
        assert [one.module for one in found.modules] == model[0]
        assert (list(found.unmatched), list(found.ambiguous)) == ([], [])


def test_a_short_name_of_several_modules_takes_all_of_them_and_says_so() -> None:
    found = named([["text.layers.0", "vision.layers.0"]]).targeted(["0"])
    assert [one.module for one in found.modules] == ["text.layers.0", "vision.layers.0"]
    assert [one.names for one in found.ambiguous] == [("text.layers.0", "vision.layers.0")]
