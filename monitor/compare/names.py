"""Rules by which the names of one run become those of another."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from typing import Final

import pyarrow as pa

from monitor.compare.values import ComparisonError

HOW: Final = "Write FROM=TO, in which each * of TO is the text that the * of FROM in the same place matches: 'model.*=*'"


WRAPPER: Final = re.compile(r"(module|_orig_mod|_forward_module)\.(?=.)")
"""The module that a wrapper such as DistributedDataParallel calls the model."""


def wrapper_of(names: Iterable[str]) -> str:
    """The beginning that all names of parameters have in common because the model is wrapped; empty without a wrapper."""
    every, common = list(names), ""
    while every and (match := WRAPPER.match(every[0])) and all(name.startswith(match[0]) for name in every):
        common += match[0]
        every = [name.removeprefix(match[0]) for name in every]
    return common


class NameRules:
    """Rules such as ``decoder.*.ln.gamma=layers.*.norm.weight``. Each ``*`` of the right part is the text of the ``*`` in the
    same place of the left one. The first rule that matches a whole name is applied.

    Args:
        given: The rules.
        wrapper: What is taken from the beginning of names that no rule matches.

    Raises:
        ComparisonError: A rule cannot be read.
    """

    def __init__(self, given: Sequence[str] = (), wrapper: str = "") -> None:
        self._wrapper = wrapper
        self._rules = [_rule(one) for one in given]
        self._made: dict[str, set[str]] = {one: set() for one in given}
        self._given = tuple(given)

    def of(self, name: str) -> str:
        """The name on the other side."""
        bare = name.removeprefix(self._wrapper)
        for given, (pattern, parts) in zip(self._given, self._rules, strict=True):
            if match := pattern.fullmatch(name) or pattern.fullmatch(bare):
                texts = [*match.groups()[: len(parts) - 1], ""]
                made = "".join(part + text for part, text in zip(parts, texts, strict=True))
                self._made[given].add(made)
                return made
        return bare

    def renamed(self, rows: pa.Table) -> pa.Table:
        """The rows with their names on the other side.

        Raises:
            ComparisonError: Two names would become one.
        """
        if not (self._rules or self._wrapper):
            return rows
        names = rows["name"].cast(pa.string()).combine_chunks().dictionary_encode()
        before = names.dictionary.to_pylist()
        after = list(map(self.of, before))
        if len(set(after)) < len(set(before)):
            twice = next(name for name in after if after.count(name) > 1)
            both = [name for name, new in zip(before, after, strict=True) if new == twice]
            raise ComparisonError(f"{both[0]} and {both[1]} would both be {twice}: choose other rules for --map.")
        column = pa.DictionaryArray.from_arrays(names.indices, pa.array(after, pa.string())).cast(pa.string())
        return rows.set_column(rows.column_names.index("name"), "name", column)

    def check(self, left: object, right: object, names: Container[str]) -> None:
        """Refuse rules that no name has matched, or that make no name of the right side.

        Args:
            names: Those of the right side.

        Raises:
            ComparisonError: There is such a rule.
        """
        for given, made in self._made.items():
            if not made:
                raise ComparisonError(f"--map {given} matches no name in {left}.")
            if not any(name in names for name in made):
                raise ComparisonError(f"--map {given} makes no name that {right} has, but {min(made)}, for example.")


def _rule(given: str) -> tuple[re.Pattern[str], list[str]]:
    """The pattern that a name must match, and the texts between the parts that it matches."""
    old, equals, new = given.partition("=")
    parts = new.split("*")
    if not (equals and old and new) or len(parts) > len(old.split("*")):
        raise ComparisonError(f"--map is {given!r}. {HOW}.")
    return re.compile("(.*)".join(map(re.escape, old.split("*")))), parts
