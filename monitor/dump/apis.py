"""L1: what goes into each API of the framework and comes out of it, and the list of those that are recorded."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from monitor.config.errors import shown
from monitor.config.jsonc import JsonError, parse
from monitor.config.loading import ConfigError, content_of
from monitor.dump.calls import ADVICE, Call, Recorded
from monitor.dump.modules import Tokens
from monitor.dump.names import CallName
from monitor.failures import OURS

WRITING: Final = ("Distributed", "MintDistributed")
"""Prefixes of functions that write into what they are given, and return nothing once they have waited for it."""

ApiList = Mapping[str, Sequence[str]]
"""Names of APIs, by the prefix that says where they are."""


def api_list(path: str | os.PathLike[str], prefixes: Sequence[str]) -> ApiList:
    """A list of APIs: an object with a list of names for each prefix; comments are welcome.

    Raises:
        ConfigError: It cannot be read, or has something else in it.
    """
    name = os.path.expanduser(os.fsdecode(path))
    try:
        listed = parse(content_of(name).decode()).value
    except (JsonError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name}: {error}") from None
    if not isinstance(listed, dict) or not all(isinstance(names, list) for names in listed.values()):
        raise ConfigError(f"{name}: expected an object with a list of names for each of {', '.join(prefixes)}")
    if unknown := sorted(set(listed) - set(prefixes)):
        raise ConfigError(f"{name}: {shown(unknown[0])} is not known: expected {', '.join(prefixes)}")
    if odd := [one for names in listed.values() for one in names if not isinstance(one, str)]:
        raise ConfigError(f"{name}: {shown(odd[0])} is no name of an API")
    return listed


def packaged_list(module_file: str) -> Path:
    """The list that stands beside a module."""
    return Path(module_file).with_name("apis.json")


class Calling(threading.local):
    """What a thread is at.

    Attributes:
        busy: Calls of APIs have no entry now.
        written: What the collective that is called may have written into.
    """

    def __init__(self) -> None:
        self.busy = False
        self.written: tuple[Any, ...] | None = None


class ApiDump:
    """Makes entries of calls of APIs. One that is called by another has none: it is how the other works."""

    def __init__(self, recorded: Recorded, tokens: Tokens) -> None:
        self._recorded, self._session = recorded, recorded.session
        self._tokens = tokens
        guarded = recorded.failures.guarded
        self._begin = guarded("reading the arguments", self._begins, ADVICE)
        self._end = guarded("reading the results", self._ended, ADVICE)
        self._calling = Calling()

    def begins(self, prefix: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call is about to happen."""
        if self._calling.busy or OURS.depth or self._session.reading or not self._tokens.open or not self._session.here:
            return None
        self._calling.busy = True  # until it has ended: reading a tensor may call APIs, too
        call = None
        try:
            call = self._begin(f"{prefix}.{name}", args, kwargs)
        finally:
            self._calling.busy = call is not None
        return call

    def ended(self, call: Any, result: Any) -> None:
        try:
            self._end(call, result)
        finally:
            self._calling.busy, self._calling.written = False, None

    def raised(self, call: Any) -> None:
        del call
        self._calling.busy, self._calling.written = False, None

    def warn(self, cause: str, message: str) -> None:
        self._recorded.failures.warn(cause, message)

    def _begins(self, base: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        self._recorded.settle()
        name = CallName(base, self._session.number(base), of_module=False)
        call = self._recorded.opened(name)
        self._calling.written = _written(args, kwargs, self._recorded.backend.tensor) if base.startswith(WRITING) else None
        call.begin(args, kwargs)
        return call

    def _ended(self, call: Call, result: Any) -> None:
        if self._session.here:
            call.end(self._calling.written if result is None and self._calling.written else result)


def _written(args: Sequence[Any], kwargs: Mapping[str, Any], tensor: type) -> tuple[Any, ...]:
    """What a collective may have written into."""
    return tuple(one for one in (*args, *kwargs.values()) if isinstance(one, (tensor, list)))
