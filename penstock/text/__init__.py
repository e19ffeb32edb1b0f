"""Text to tokens and back: tokenizer, chat templates, streaming detokenizer, stop strings."""
