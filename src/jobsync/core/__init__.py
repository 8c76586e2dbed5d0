"""Pure values and decisions. Nothing here touches a store, a thread or a network."""
