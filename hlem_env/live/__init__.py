"""The real backend: one pool of memory, two caches, HSTU, measured as it runs."""
