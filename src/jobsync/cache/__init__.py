"""Answers of earlier reads, for processes that read more than they write."""
