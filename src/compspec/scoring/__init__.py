"""Scorers compute the target's logits for the newest token and every draft of a batch."""
