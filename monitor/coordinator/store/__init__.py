"""The monitor's own key-value store, for jobs whose launcher gives the ranks an address to meet at but no store.

One process serves a dictionary on a thread; the others are clients. The store has the operations of torch's stores that the
monitor uses, and none that waits: ``check``, ``get`` of a key that exists, ``add``, ``compare_set``, ``clone``. Every call has
a timeout. Any thread may call.
"""

from monitor.coordinator.store.protocol import Rendezvous
from monitor.coordinator.store.server import ASKED_PER_SECOND
from monitor.coordinator.store.stores import STORES

__all__ = ["ASKED_PER_SECOND", "STORES", "Rendezvous"]
