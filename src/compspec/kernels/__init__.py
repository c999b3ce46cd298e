"""Kernels compiled on the machine they run on."""
