"""Sessions and leader election. A process has one session; everything it holds depends on it."""
