"""Images and videos of requests: where they come from, how they are decoded, and how many tokens stand for them.

What a client sends is looked at in processes of their own (worker.py), which have little memory and are killed when
they take too long: decoders are large, and files are made to break them.
"""
