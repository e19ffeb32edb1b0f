"""The forward pass: models written for one device, over ops that each have a plain-torch reference."""
