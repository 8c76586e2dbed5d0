"""A simulated world: real code under virtual time, with faults, the same way every time."""
