"""One-sided transfer engines behind one interface (NIXL, MemFabric). Nothing is here yet."""
