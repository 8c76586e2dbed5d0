"""The command line: parses, asks, renders; decides nothing."""
