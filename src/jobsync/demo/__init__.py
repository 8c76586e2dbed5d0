"""`jobsync demo`: a fleet of real processes on one machine that loses its leader and survives."""
