"""The KV cache as bookkeeping: block ids, holders and prefix keys. Integers only, no tensors."""
