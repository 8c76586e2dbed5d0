"""Who is alive, and who leads. One session for a process; everything it holds hangs on it."""
