"""The command line: parses arguments, reads from a store, renders the result.

Every decision is made in the layers below. A command's module imports heavy modules inside its
functions, so that help is fast.
"""
