"""How a model's lanes are computed: lane by lane, batched, or by a kernel set; each set is a folder here."""
