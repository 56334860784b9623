"""A key-value store of our own, for jobs whose launcher gives the ranks an address to meet at and no store: one process serves
a dictionary on a thread, the others ask it.

It has the operations of torch's stores that are used here, and none that waits: ``check``, ``get`` of a key that exists,
``add``, ``compare_set``, ``clone``. Every call is bounded in time. Any thread may call.
"""

from monitor.coordinator.store.protocol import Rendezvous
from monitor.coordinator.store.server import ASKED_PER_SECOND
from monitor.coordinator.store.stores import STORES

__all__ = ["ASKED_PER_SECOND", "STORES", "Rendezvous"]
