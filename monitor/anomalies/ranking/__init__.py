"""The offline ranking: orders the events of all ranks by time, and decides which events are root causes (origins)."""
