"""A fair benchmark: several configurations side by side in one process, on the same prompts, in turns."""
