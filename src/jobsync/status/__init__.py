"""Read-only reports on sessions, queues and jobs, and why something waits."""
