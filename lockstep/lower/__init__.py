"""How a model's lanes are computed: lane by lane, batched, fused or compiled, and how that is chosen."""
