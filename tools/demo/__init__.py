"""The parts of `tools/train_demo.py`."""
