"""Peers of tools/compare_peers.py: a worker for each engine, which runs in an interpreter of its own, and both ends of
the protocol. Workers import nothing of compspec, but for compspec's own."""
