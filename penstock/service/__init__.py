"""Many instances behind one endpoint: placement, and the clients' streams. No tensors."""
