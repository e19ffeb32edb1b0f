"""One model on many devices: experts on ranks, sequences in data-parallel groups, work on a device's units."""
