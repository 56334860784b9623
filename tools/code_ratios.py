"""How the code and its prose are built, in numbers: ``python tools/code_ratios.py [-v] [PACKAGE]``, by default ``monitor``.

A line of code is a line with a token that is neither a comment nor a docstring. ``tests/test_code_ratios.py`` holds the
limits.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FRAGMENT = 30
"""Lines of code of a module that is hardly worth a file."""

LONG_SENTENCE = 35
"""Words of a sentence that has to be read twice."""

BLANK = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
)
DIALECT = re.compile(
    r"\b(?:who(?:so)?ever|nobody|none of ours|stands? for|stood for|(?:is|are|was|were) told|(?:is|are) given up"
    r"|comes? of nothing|lets? go of|goes on|foretells?|foretold|spells?|spelled|in hand)\b",
    re.IGNORECASE,
)
"""Words of ``DIALECT`` read like riddles; plain ones say the same."""

MOST_PARAMETERS = 6
DOCUMENTED = {"training/metrics.py:RunMetrics"}
"""Classes whose parameters users pass by name, as documented: a context object would change every training loop."""

RECORD_BASES = {"NamedTuple", "BaseModel", "TypedDict", "Protocol", "Enum", "IntEnum"}


class Constructor(NamedTuple):
    """A class and how many parameters its ``__init__`` takes, without ``self``."""

    where: str
    parameters: int


@dataclass(frozen=True)
class Module:
    """A source file."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def docstrings(self) -> list[ast.Constant]:
        """Strings that are statements of their own."""
        nodes = (node.value for node in ast.walk(self.tree) if isinstance(node, ast.Expr))
        return [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]

    @cached_property
    def comments(self) -> list[str]:
        """Comments, those on neighbouring lines as one."""
        found: list[str] = []
        last = -1
        for token in self._tokens():
            if token.type == tokenize.COMMENT:
                said = token.string.lstrip("# ")
                if token.start[0] == last + 1 and found:
                    found[-1] += " " + said
                else:
                    found.append(said)
                last = token.start[0]
        return found

    @cached_property
    def code_lines(self) -> set[int]:
        documented = {line for node in self.docstrings for line in range(node.lineno, (node.end_lineno or 0) + 1)}
        tokens = (token for token in self._tokens() if token.type not in BLANK)
        return {line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - documented

    @cached_property
    def import_lines(self) -> int:
        imports = (node for node in ast.walk(self.tree) if isinstance(node, ast.Import | ast.ImportFrom))
        return sum((node.end_lineno or 0) - node.lineno + 1 for node in imports)

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]

    def constructors(self) -> Iterator[Constructor]:
        for node in self.classes:
            if RECORD_BASES & set(map(_last_name, node.bases)):
                continue
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    given = method.args
                    number = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - 1
                    yield Constructor(f"{self.name}:{node.name}", number)

    def _tokens(self) -> Iterator[tokenize.TokenInfo]:
        return tokenize.generate_tokens(io.StringIO(self.text).readline)


@dataclass(frozen=True)
class Ratios:
    """Of a package, and of the documents beside it."""

    modules: list[Module]
    documents: dict[str, str]

    @cached_property
    def lengths(self) -> dict[str, int]:
        return {module.name: len(module.code_lines) for module in self.modules}

    @property
    def code(self) -> int:
        return sum(self.lengths.values())

    @property
    def median_lines(self) -> float:
        return median(self.lengths.values())

    @property
    def longest(self) -> int:
        return max(self.lengths.values())

    @property
    def fragments(self) -> float:
        """The share of modules that are hardly worth a file."""
        return sum(lines <= FRAGMENT for lines in self.lengths.values()) / len(self.lengths)

    @property
    def imports(self) -> float:
        """The share of lines of code that import."""
        return sum(module.import_lines for module in self.modules) / self.code

    @property
    def namesakes(self) -> list[str]:
        """Classes that bear the name of a base."""
        return [
            f"{module.name}:{node.name}"
            for module in self.modules
            for node in module.classes
            if node.name in map(_last_name, node.bases)
        ]

    @property
    def names_used_twice(self) -> list[str]:
        return sorted(name for name, number in self._class_names.items() if number > 1)

    @property
    def share_used_twice(self) -> float:
        """Of the names of classes."""
        return len(self.names_used_twice) / len(self._class_names)

    @cached_property
    def long_constructors(self) -> list[Constructor]:
        """Those of more than ``MOST_PARAMETERS``, but for ``DOCUMENTED`` ones."""
        found = (one for module in self.modules for one in module.constructors())
        return [one for one in found if one.parameters > MOST_PARAMETERS and one.where not in DOCUMENTED]

    @cached_property
    def long_sentences(self) -> list[tuple[str, str]]:
        return [(where, said) for where, said in self._sentences() if len(said.split()) > LONG_SENTENCE]

    @cached_property
    def dialect(self) -> list[tuple[str, str]]:
        return [(where, said) for where, said in self._sentences() if DIALECT.search(said)]

    @cached_property
    def _class_names(self) -> Counter[str]:
        return Counter(node.name for module in self.modules for node in module.classes)

    def _sentences(self) -> Iterator[tuple[str, str]]:
        for module in self.modules:
            for said in (*(str(node.value) for node in module.docstrings), *module.comments):
                yield from ((module.name, sentence) for sentence in sentences_of(said))
        for name, text in self.documents.items():
            yield from ((name, sentence) for sentence in sentences_of(re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)))


def sentences_of(text: str) -> list[str]:
    """The sentences of a text. Rows of tables, headings and items of lists end one, too."""
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\. ))|\n(?=\s*\w+: )", text)
    return [one for block in blocks for one in re.split(r"(?<=[.!?:;])\s+|\|", " ".join(block.split())) if one]


def ratios_of(package: Path, documents: list[Path] | None = None) -> Ratios:
    """Measure the modules below a directory, without ``__init__`` and ``__main__``."""
    paths = [path for path in sorted(package.rglob("*.py")) if path.stem not in ("__init__", "__main__")]
    modules = [Module(str(path.relative_to(package)), path.read_text(encoding="utf-8")) for path in paths]
    return Ratios(modules, {path.name: path.read_text(encoding="utf-8") for path in documents or []})


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def main(arguments: list[str]) -> None:
    given = [argument for argument in arguments if argument != "-v"]
    package = Path(given[0]) if given else ROOT / "monitor"
    found = ratios_of(package, DOCUMENTS)
    print(f"modules                     {len(found.modules)}")
    print(f"lines of code               {found.code}")
    print(f"median of a module          {found.median_lines:g}")
    print(f"longest module              {found.longest}")
    print(f"modules of <= {FRAGMENT} lines      {found.fragments:.1%}")
    print(f"lines that import           {found.imports:.1%}")
    print(f"classes named as their base {len(found.namesakes)}  {' '.join(found.namesakes)}")
    print(f"class names used twice      {found.share_used_twice:.1%}  {' '.join(found.names_used_twice)}")
    print(f"constructors of > {MOST_PARAMETERS}         {len(found.long_constructors)}")
    for one in found.long_constructors:
        print(f"    {one.parameters:3} {one.where}")
    print(f"sentences of > {LONG_SENTENCE} words     {len(found.long_sentences)}")
    print(f"sentences in dialect        {len(found.dialect)}")
    if "-v" in arguments:
        for where, said in (*found.long_sentences, *found.dialect):
            print(f"    {where}: {said}")


if __name__ == "__main__":
    main(sys.argv[1:])
