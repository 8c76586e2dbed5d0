"""Jobs on a schedule: every instant fires once in the whole fleet."""
