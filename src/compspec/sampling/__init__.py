"""From logits to tokens: parameters, per-slot metadata, transforms, noise, sampler and verifier."""
