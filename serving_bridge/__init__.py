"""What runs in production: frozen policy, online adapter, recovery, allocator and server."""
