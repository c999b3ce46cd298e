"""Which requests run in a step, and which blocks they own. Plain Python, no tensors."""
