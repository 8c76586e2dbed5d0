"""Queues on stores without SQL: the messages that were pushed together are one record, a page."""
