"""Where records live. Everything above sees the contract alone."""
