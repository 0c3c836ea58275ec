"""Communication between ranks besides a graph's own: agreements, and failures of ranks."""
