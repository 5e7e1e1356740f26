"""The sans-I/O engine core: scheduler, block pool, radix cache and request life cycle. Standard library only."""
