"""The command line: parses, asks, renders; decides nothing.

A command loads what it needs when it runs, not when it shows its help.
"""
