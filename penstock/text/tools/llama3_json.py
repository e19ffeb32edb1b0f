"""Llama 3.1 to 3.3, and 4: the output is {"name": ..., "parameters": {...}}, perhaps after <|python_tag|>; several with
semicolons between them."""

from __future__ import annotations

from penstock.text.tools.json_tools import JsonTools

TAG = "<|python_tag|>"


class Llama3Json(JsonTools):
    markers = (TAG,)
    signs = (TAG,)
    bare = True
    trusting = False  # since JSON may be what was asked for

    def outside(self) -> bool:
        text = self.reader.text
        blank = len(text) - len(text.lstrip())
        if TAG.startswith(text[blank:]) and text[blank:] != TAG and not self.reader.final:
            return False
        tag = TAG if text.startswith(TAG, blank) else ""
        return self.begins_calls(self.reader.take(blank + len(tag)))
