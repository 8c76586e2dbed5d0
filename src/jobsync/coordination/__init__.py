"""Who is alive. One session for a process; everything it holds hangs on it."""
