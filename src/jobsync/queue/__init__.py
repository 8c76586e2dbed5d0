"""Durable queues: messages that are handled at least once, or found among the dead letters."""
