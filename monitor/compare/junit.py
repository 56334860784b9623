"""What a comparison has found, as a JUnit report that build servers show: a case for each kind of rows."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Final
from xml.etree import ElementTree

from monitor.compare.values import Compared, Finding

MOST: Final = 100
"""Findings of a case."""

_NOT_IN_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_of(compared: Compared, name: str, described: Callable[[Finding], str]) -> bytes:
    """The report, in UTF-8.

    Args:
        name: Of the test suite.
        described: What to say of a finding.
    """
    found: Mapping[str, list[Finding]] = defaultdict(list)
    for finding in compared.findings:
        found[finding.kind].append(finding)
    kinds = dict.fromkeys([*compared.counted, *found])
    suite = ElementTree.Element("testsuite", name=_text(name))
    for kind in kinds:
        _case(suite, kind, [described(one) for one in found[kind]])
    _case(suite, "everything is there", list(compared.not_compared))
    if compared.is_empty:
        _case(suite, "something was compared", ["there is no tensor that both sides have in the same step"])
    failed = sum(len(case) > 0 for case in suite)
    suite.attrib |= {"tests": str(len(suite)), "failures": str(failed), "errors": "0", "skipped": "0"}
    report: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return report


def _case(suite: ElementTree.Element, name: str, wrong: list[str]) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname="trainermon.compare", name=_text(name))
    if wrong:
        more = f"\nand {len(wrong) - MOST:,} more" if len(wrong) > MOST else ""
        failure = ElementTree.SubElement(case, "failure", message=_text(wrong[0].partition("\n")[0]))
        failure.text = _text("\n".join(wrong[:MOST]) + more)


def _text(text: str) -> str:
    """Without characters that XML cannot hold."""
    return _NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text)
